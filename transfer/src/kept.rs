//! Memory of other devices that copies to this one may still read, where no work of its own device could be ordered after them.
//!
//! Its own device does not know of these copies, so it is not given back before they are known to be done. That is asked at the next such
//! copy, once all that a runtime began was waited for, and when the runtime goes. What is in use even then is lost, as nobody would learn
//! when it is not.
//!
//! Lock order: the list's lock, then those of timelines. Memory is dropped without it.

use std::sync::Arc;

use aquifer_allocator::Storage;
use aquifer_device::fork::Mutex;
use aquifer_device::{DeviceError, Tick};

/// Memory that is kept.
#[derive(Debug, Default)]
pub(crate) struct Kept(Mutex<Vec<Entry>>);

#[derive(Debug)]
struct Entry {
    /// The copy that reads it.
    copied: Tick,
    source: Arc<Storage>,
}

impl Kept {
    /// Keeps the source of a copy until that is known to be done.
    pub(crate) fn keep(&self, copied: &Tick, source: &Arc<Storage>) {
        self.0.lock().push(Entry { copied: copied.clone(), source: source.clone() });
    }

    /// Lets go of what is read no more. Asks the drivers, and waits for nothing.
    pub(crate) fn release(&self) {
        let mut kept = self.0.lock();
        let done: Vec<Entry> = kept.extract_if(.., |entry| !entry.is_read()).collect();
        drop(kept);
        drop(done);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return std::mem::forget(std::mem::take(self.0.get_mut()));
        }
        self.release();
        for Entry { copied, source } in self.0.get_mut().drain(..) {
            tracing::warn!(
                bytes = source.bytes(),
                device = copied.timeline().device_id(),
                "nobody will learn when a copy from another device is done; its source is kept for good"
            );
            std::mem::forget(source);
        }
    }
}

impl Entry {
    /// Whether the copy may not be done. On a lost device nothing runs any more.
    fn is_read(&self) -> bool {
        match self.ask() {
            Ok(is_done) => !is_done,
            Err(error) => !error.is_device_lost(),
        }
    }

    fn ask(&self) -> Result<bool, DeviceError> {
        // Recording the event that tells may have failed before.
        self.copied.cover()?;
        self.copied.is_done()
    }
}
