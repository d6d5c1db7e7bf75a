//! Pinned memory that a graph's copies use. Its capture notes it here, the graph keeps it, and
//! every launch comes after the copies that use it, as a copy does.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use aquifer_allocator::Storage;
use aquifer_device::fork::Mutex;
use aquifer_device::{AccessKind, DeviceError, Stream};

use crate::error::TransferError;
use crate::pinned::{HostPart, PinnedMemory};
use crate::runtime::Transfer;

/// The pinned memory that a graph uses, and how.
#[derive(Default)]
pub struct HostUses(Mutex<Vec<(Arc<PinnedMemory>, AccessKind)>>);

impl HostUses {
    /// Has the copies that are captured on `stream` from now on noted. `None` if it does not
    /// capture.
    pub fn collect(stream: &Stream) -> Option<Arc<HostUses>> {
        let launches = stream.launches_of_capture()?;
        let uses = Arc::<HostUses>::default();
        let kept: Arc<dyn Any + Send + Sync> = uses.clone();
        launches.keep(&kept);
        Some(uses)
    }

    /// Those of the capture that the stream is part of; `None` if no graph keeps what its copies
    /// use.
    pub(crate) fn of(stream: &Stream) -> Option<Arc<HostUses>> {
        stream.launches_of_capture()?.kept()
    }

    pub(crate) fn note(&self, parts: &[(HostPart<'_>, AccessKind)]) {
        let mut uses = self.0.lock();
        for &(HostPart { memory, .. }, kind) in parts {
            match uses.iter_mut().find(|(known, _)| Arc::ptr_eq(known, memory)) {
                Some((_, known)) => *known = kind.max(*known),
                None => uses.push((memory.clone(), kind)),
            }
        }
    }

    /// True if the graph uses none.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// All of it.
    fn all(&self) -> Vec<(Arc<PinnedMemory>, AccessKind)> {
        self.0.lock().clone()
    }
}

impl fmt::Debug for HostUses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostUses").field("parts", &self.0.lock().len()).finish_non_exhaustive()
    }
}

impl Transfer {
    /// Launches a graph on `stream`, after the work that uses its memory, on the device and on the
    /// host. Later uses of the memory come after the launch.
    ///
    /// # Errors
    /// A stream that captures, and errors of the launch.
    pub fn launch(
        &self,
        stream: &Stream,
        device: &[(&Arc<Storage>, AccessKind)],
        host: &HostUses,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), TransferError> {
        let host = host.all();
        let parts: Vec<_> = host.iter().map(|(memory, kind)| (HostPart::all(memory), *kind)).collect();
        self.enqueue_uncovered(stream, device, &parts, launch)
    }
}
