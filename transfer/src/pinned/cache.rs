//! Reclaimable caches: users that hold memory of a pool for later, and give it back on request.

use std::sync::{Arc, Weak};

use aquifer_device::fork::Mutex;

/// Holds memory of a pool between uses.
pub(crate) trait ReclaimableCache: Send + Sync {
    /// Gives back all memory that it does not use now, including memory that copies still use.
    /// Returns whether there was any. Must not ask the pool for memory.
    fn reclaim(&self) -> bool;
}

/// The caches of a pool. They are called without a lock.
#[derive(Default)]
pub(super) struct ReclaimableCaches(Mutex<Vec<Weak<dyn ReclaimableCache>>>);

impl ReclaimableCaches {
    pub(super) fn add(&self, cache: Weak<dyn ReclaimableCache>) {
        let mut caches = self.0.lock();
        caches.retain(|cache| cache.strong_count() > 0);
        caches.push(cache);
    }

    /// Asks all caches; returns whether any memory came back.
    pub(super) fn reclaim(&self) -> bool {
        let caches: Vec<Arc<dyn ReclaimableCache>> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        caches.iter().filter(|cache| cache.reclaim()).count() > 0
    }
}
