//! Callers that keep an allocator awake, or wait until it is.

use std::fmt;
use std::time::{Duration, Instant};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::state::awake::KeptAwake;

/// Keeps an allocator from falling asleep while a thread works in several steps. Made by
/// [`Allocator::keep_awake`].
#[must_use = "it ends when it is dropped"]
pub struct Awake {
    _kept: KeptAwake,
    /// Keeps the allocator state in use by this allocator.
    _allocator: Allocator,
}

impl fmt::Debug for Awake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Awake").finish_non_exhaustive()
    }
}

/// See [`Allocator::keep_awake`].
pub(crate) fn keep_awake(allocator: &Allocator) -> Result<Awake, AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Map)?;
    Ok(Awake { _kept: KeptAwake::new(allocator.state())?, _allocator: allocator.kept_open() })
}

/// See [`Allocator::wait_awake`].
pub(crate) fn wait_awake(allocator: &Allocator, timeout: Duration) -> bool {
    let state = allocator.state();
    // `None` is later than any clock tells.
    let until = Instant::now().checked_add(timeout);
    let mut waking = state.wakefulness.waking.lock();
    while state.refuses_wake_locks() {
        match until {
            None => state.wakefulness.woken.wait(&mut waking),
            Some(until) if state.wakefulness.woken.wait_until(&mut waking, until).timed_out() => {
                return !state.refuses_wake_locks();
            }
            Some(_) => {}
        }
    }
    true
}
