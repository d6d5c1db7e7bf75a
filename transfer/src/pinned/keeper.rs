//! Keepers: users that keep memory of a pool for later, and can give it back when the pool needs it.

use std::sync::{Arc, Weak};

use aquifer_device::fork::Mutex;

/// Keeps memory of a pool between uses.
pub(crate) trait Keeper: Send + Sync {
    /// Gives back what it does not use now, copies that still use it included. Tells whether that was anything. Must not ask the pool
    /// for memory.
    fn give_back(&self) -> bool;
}

/// The keepers of a pool. They are asked without a lock.
#[derive(Default)]
pub(super) struct Keepers(Mutex<Vec<Weak<dyn Keeper>>>);

impl Keepers {
    pub(super) fn add(&self, keeper: Weak<dyn Keeper>) {
        let mut keepers = self.0.lock();
        keepers.retain(|keeper| keeper.strong_count() > 0);
        keepers.push(keeper);
    }

    /// Asks all of them; whether anything came back.
    pub(super) fn give_back(&self) -> bool {
        let keepers: Vec<Arc<dyn Keeper>> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        keepers.iter().filter(|keeper| keeper.give_back()).count() > 0
    }
}
