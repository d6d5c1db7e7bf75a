//! The state that the drivers of one context share: its device, and the captures in progress.
//!
//! A context has one device. It is known by a weak reference only: the last handle of a device
//! closes it, and a later request opens a new one. The device keeps its context alive, so the
//! handle of a context cannot mean another context while the device is there.
//!
//! Drivers that share a context must not break each other's captures: the driver refuses to wait
//! for a context of which any stream captures, and breaks the capture (CUDA programming guide,
//! “Prohibited and Unhandled Operations”).
//!
//! Locks: that of a context's device is held while the device is opened, so that threads which open
//! it at the same time get one device; those that open another GPU do not wait. No code of callers
//! runs under it. The others are leaves.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use aquifer_device::fork::Mutex;
use aquifer_device::internal::{RunningThread, WeakDevice, finish_all};
use aquifer_device::{CapturingStreams, Device, Driver, RawStream, Result};

/// A handle, and the thread where it means one stream for each.
type Which = (u64, Option<ThreadId>);

/// The shared state of the drivers of a context.
#[derive(Default)]
pub(crate) struct ContextState {
    device: Mutex<WeakDevice>,
    /// Streams on which a driver began a capture that has not ended. Where the handle means one
    /// stream for each thread, the thread is listed, too, with a sign that it runs: the default
    /// stream of a thread that has ended captures no more, and no other thread could end its
    /// capture.
    begun: Mutex<HashMap<Which, RunningThread>>,
    /// Streams of which devices know that they capture, including captures of other libraries.
    pub(crate) known: Arc<CapturingStreams>,
}

impl fmt::Debug for ContextState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ContextState").field("begun", &self.begun).field("known", &self.known).finish_non_exhaustive()
    }
}

impl ContextState {
    /// The state of the context with this handle. Its holder keeps the context, so that no other
    /// context has the handle.
    pub(crate) fn find(handle: u64) -> Arc<ContextState> {
        static CONTEXTS: Mutex<Option<HashMap<u64, Weak<ContextState>>>> = Mutex::new(None);
        let mut contexts = CONTEXTS.lock();
        let contexts = contexts.get_or_insert_default();
        contexts.retain(|_, shared| shared.strong_count() > 0);
        if let Some(shared) = contexts.get(&handle).and_then(Weak::upgrade) {
            return shared;
        }
        let shared = Arc::new(ContextState::default());
        contexts.insert(handle, Arc::downgrade(&shared));
        shared
    }

    /// The device of the context. If there is none, `open` opens the driver for one.
    pub(crate) fn device<D: Driver + 'static>(&self, open: impl FnOnce() -> Result<Arc<D>>) -> Result<Device> {
        // Before the lock, because this may run code of callers.
        finish_all();
        let mut known = self.device.lock();
        if let Some(device) = known.upgrade() {
            return Ok(device);
        }
        let device = Device::of_driver(open()?);
        *known = WeakDevice::new(&device);
        Ok(device)
    }

    pub(crate) fn begin(&self, stream: RawStream) {
        self.begun.lock().insert(which(stream), RunningThread::current());
    }

    pub(crate) fn end(&self, stream: RawStream) {
        self.begun.lock().remove(&which(stream));
    }

    /// Whether any stream of the context is known to capture.
    pub(crate) fn any(&self) -> bool {
        let mut begun = self.begun.lock();
        begun.retain(|(_, id), thread| id.is_none() || !thread.has_ended());
        self.known.any() || !begun.is_empty()
    }
}

/// Which stream a handle means on this thread.
fn which(stream: RawStream) -> Which {
    (stream.0, (stream == RawStream::PER_THREAD).then(|| thread::current().id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_has_its_own_state_as_long_as_it_is_held() {
        let (one, other) = (ContextState::find(u64::MAX), ContextState::find(u64::MAX - 1));
        one.begin(RawStream(7));
        assert!(ContextState::find(u64::MAX).any() && !other.any());
        one.end(RawStream(8));
        assert!(one.any());
        one.end(RawStream(7));
        thread::scope(|scope| {
            let begun = scope.spawn(|| {
                one.begin(RawStream::PER_THREAD);
                assert!(one.any());
            });
            begun.join().unwrap();
        });
        assert!(!one.any(), "its thread has ended");
        one.known.enter(false);
        assert!(ContextState::find(u64::MAX).any());
        drop(one);
        assert!(!ContextState::find(u64::MAX).any(), "another context with the same handle");
    }
}
