//! Pinned memory that a graph's copies use. Its capture notes it here, the graph keeps it, and
//! every launch comes after the copies that use it, as a copy does.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{AccessKind, DeviceError, Stream};

use crate::pinned::{HostPart, PinnedMemory};

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
    /// use. Ends a capture that was dropped, which would otherwise end before the work is enqueued.
    ///
    /// # Errors
    /// When such a capture goes on.
    pub(crate) fn of(stream: &Stream) -> Result<Option<Arc<HostUses>>, DeviceError> {
        stream.end_abandoned_captures()?;
        Ok(stream.launches_of_capture().and_then(|launches| launches.kept()))
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
    pub(crate) fn all(&self) -> Vec<(Arc<PinnedMemory>, AccessKind)> {
        self.0.lock().clone()
    }
}

impl fmt::Debug for HostUses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostUses").field("parts", &self.0.lock().len()).finish_non_exhaustive()
    }
}
