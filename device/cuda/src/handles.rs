//! Tables of the driver's live objects, by which handles are checked.
//!
//! The driver itself does not check handles: a dead handle is a dangling pointer to it. So a call
//! first looks its objects up here, and holds them until it returns.
//!
//! Invariant L1: a handle in a table is live, and stays live while any caller holds the object that
//! the table returned for it. An object that is destroyed while calls with it are in flight on
//! other threads leaves the table at once, and is destroyed when the last of these calls returns.
//!
//! Locks: a table's are leaves, never held across a driver call.

use std::collections::HashMap;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;

use aquifer_device::fork::RwLock;
use aquifer_device::{Code, DeviceError, Operation, Result};
use foldhash::fast::FixedState;

use crate::context::GpuContext;

/// Parts of a table, each with a lock of its own, so that threads with objects of their own rarely
/// meet. A power of two.
const SHARDS: usize = 16;

/// Live objects of one kind by handle.
pub(crate) struct Handles<T> {
    shards: [Shard<T>; SHARDS],
}

type Shard<T> = RwLock<HashMap<u64, Arc<T>, FixedState>>;

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Handles { shards: Default::default() }
    }
}

impl<T> fmt::Debug for Handles<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set()
            .entries(self.shards.iter().flat_map(|shard| shard.read().keys().copied().collect::<Vec<_>>()))
            .finish()
    }
}

impl<T> Handles<T> {
    fn shard(&self, handle: u64) -> &Shard<T> {
        // Other bits of the hash than those by which a shard's table finds an entry.
        let middle = FixedState::default().hash_one(handle) >> 32;
        &self.shards[usize::try_from(middle).unwrap_or(0) % SHARDS]
    }

    /// The object, if it is live.
    pub(crate) fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.shard(handle).read().get(&handle).cloned()
    }

    /// Adds an object. One that has the handle already was destroyed behind this table's back,
    /// since the driver gives handles of live objects to no others: its entry is forgotten, for
    /// dropping it would destroy the new one.
    pub(crate) fn insert(&self, handle: u64, object: T) {
        let before = self.shard(handle).write().insert(handle, Arc::new(object));
        if before.is_some() {
            tracing::warn!("an object of this device, {handle:#x}, was destroyed by other code");
            std::mem::forget(before);
        }
    }

    /// Takes an object out if `matches` says so: it is not live any more for calls to come.
    pub(crate) fn take_if(&self, handle: u64, matches: impl FnOnce(&T) -> bool) -> Option<Arc<T>> {
        let mut shard = self.shard(handle).write();
        shard.get(&handle).is_some_and(|object| matches(object)).then(|| shard.remove(&handle)).flatten()
    }

    /// Forgets all objects without destroying them.
    pub(crate) fn forget_all(&self) {
        for shard in &self.shards {
            std::mem::take(&mut *shard.write()).into_values().for_each(std::mem::forget);
        }
    }

    /// Takes an object out.
    pub(crate) fn take(&self, handle: u64) -> Option<Arc<T>> {
        self.take_if(handle, |_| true)
    }
}

/// A kind of object, and how one is destroyed.
pub(crate) trait Kind: fmt::Debug + Send + Sync {
    /// Its name in messages.
    const NAME: &'static str;
    /// The call that destroys one.
    const DESTROY: Operation;
    /// Data kept with its handle.
    type Extra: fmt::Debug + Send + Sync;

    /// Takes a lent object back; false while it is still lent, so that this one must not be
    /// destroyed.
    fn release(_extra: &mut Self::Extra) -> bool {
        true
    }

    /// Calls the driver to destroy it.
    ///
    /// # Safety
    /// `raw` must be a live object of this kind that nothing uses any more, and its context
    /// current.
    unsafe fn destroy(context: &GpuContext, raw: u64) -> Result<()>;
}

/// An object of the driver's that is destroyed when this is dropped.
#[derive(Debug)]
pub(crate) struct OwnedObject<K: Kind> {
    context: Arc<GpuContext>,
    /// 0 once it is destroyed.
    raw: u64,
    pub(crate) extra: K::Extra,
}

impl<K: Kind> OwnedObject<K> {
    /// Takes over an object.
    ///
    /// # Safety
    /// `raw` must be a live object of this kind in this context that nothing else destroys.
    pub(crate) unsafe fn new(context: &Arc<GpuContext>, raw: u64, extra: K::Extra) -> OwnedObject<K> {
        OwnedObject { context: context.clone(), raw, extra }
    }

    /// Its handle.
    pub(crate) fn raw(&self) -> u64 {
        self.raw
    }

    /// Destroys it now. It is still there after an error.
    pub(crate) fn destroy(&mut self) -> Result<()> {
        let _current = self.context.enter_relaxed(K::DESTROY)?;
        // SAFETY: the object is alive (L1), this is its only reference, and the context is current.
        unsafe { K::destroy(&self.context, self.raw) }?;
        self.raw = 0;
        Ok(())
    }
}

impl<K: Kind> Drop for OwnedObject<K> {
    fn drop(&mut self) {
        // An object that is still lent stays until the end of the context.
        if self.raw != 0 && K::release(&mut self.extra) {
            // SAFETY: the object is alive (L1), and this is its only reference.
            unsafe { self.context.destroy_or_leak(K::NAME, self.raw, K::destroy) };
        }
    }
}

impl<K: Kind> Handles<OwnedObject<K>> {
    /// The live object with this handle.
    pub(crate) fn find(&self, operation: Operation, handle: u64) -> Result<Arc<OwnedObject<K>>> {
        self.get(handle).ok_or_else(|| dead(operation, K::NAME, handle))
    }

    /// Destroys an object, or leaves that to the last call that uses it. It stays live if the
    /// driver refuses.
    pub(crate) fn destroy(&self, handle: u64) -> Result<()> {
        let object = self.take(handle).ok_or_else(|| dead(K::DESTROY, K::NAME, handle))?;
        // In use on another thread: the last user's drop destroys it (L1).
        let Ok(mut object) = Arc::try_unwrap(object) else { return Ok(()) };
        let destroyed = object.destroy();
        if destroyed.is_err() {
            self.insert(handle, object);
        }
        destroyed
    }
}

/// A handle that is not live.
#[cold]
pub(crate) fn dead(operation: Operation, name: &str, handle: u64) -> DeviceError {
    DeviceError::refused(operation, Code::INVALID_HANDLE)
        .with_detail(format!("{name} {handle:#x} is not live: never created here, or destroyed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_spread_over_the_shards() {
        for step in [1, 8, 64, 4096, 0x20_0000] {
            let handles = Handles::default();
            for handle in 0..1600_u64 {
                handles.insert(0x7f00_0000_0000 + handle * step, ());
            }
            let fullest = handles.shards.iter().map(|shard| shard.read().len()).max();
            assert!(fullest.unwrap() < 200, "{step}: {fullest:?} of 1600 in one of {SHARDS}");
        }
    }
}
