//! Callers that keep an allocator awake, or wait until it is; and what keeps it awake.

use std::fmt;
use std::time::{Duration, Instant};

use aquifer_device::DevicePtr;

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::State;
use crate::kept::{KeptAwakeBy, UsedAllocation};
use crate::state::AllocatorState;
use crate::state::awake::{Keeper, Kept, KeptAwake};
use crate::tags::Tag;

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
    let kept = KeptAwake::new(allocator.state(), Keeper::Awake, &(0..0))?;
    Ok(Awake { _kept: kept, _allocator: allocator.kept_open() })
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

/// What keeps an allocator awake, for the error of a caller that asked it to sleep.
pub(crate) fn kept_awake_by(state: &'static AllocatorState, kept: [Kept; 4]) -> KeptAwakeBy {
    let [access_guards, reservations, awake, others] = kept.map(|kept| kept.number);
    let allocations = kept.iter().filter_map(|kept| used_at(state, kept.addr?)).collect();
    let is_this_thread = state.is_kept_awake_here();
    KeptAwakeBy { access_guards, reservations, awake, others, is_this_thread, allocations }
}

/// The live allocation at an address.
fn used_at(state: &'static AllocatorState, addr: u64) -> Option<UsedAllocation> {
    let owned = state.shared().paged.as_ref().and_then(|paged| paged.owned.get(&addr).copied());
    let mut found = owned.map(|owned| (addr, owned.requested, owned.tag, owned.stream));
    state.walk(|_, passed| {
        let block = &passed.block;
        if block.state == State::Live && block.range().contains(&addr) {
            found = Some((block.addr, block.requested, Tag(block.tag), block.owner));
        }
    });
    found.map(|(addr, bytes, tag, stream)| UsedAllocation {
        ptr: DevicePtr(addr),
        bytes,
        tag: tag.name(),
        stream: stream.0,
    })
}
