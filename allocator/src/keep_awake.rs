//! Callers that keep an allocator awake, or wait until it is, and the report of what keeps it awake.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_device::DevicePtr;

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::format::Bytes;
use crate::heap::State;
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

/// What keeps an allocator awake: work that is about to be enqueued. See [`AllocError::KeptAwake`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeptAwakeBy {
    /// Number of [`crate::AccessGuard`]s on its memory.
    pub access_guards: u64,
    /// Number of [`crate::Reservation`]s on its memory: transfers that are not enqueued yet have
    /// them.
    pub reservations: u64,
    /// Number of results of [`Allocator::keep_awake`], among them those of library code at work.
    pub awake: u64,
    /// Number of all of these that were too many to be told apart.
    pub others: u64,
    /// Whether the calling thread has any of them: then waiting is in vain.
    pub is_this_thread: bool,
    /// The allocations that are known to be in use. An allocation is known if it is the only one
    /// with an access guard, or the only one with a reservation.
    pub allocations: Vec<UsedAllocation>,
}

/// An allocation with an access guard or a reservation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UsedAllocation {
    /// Its first address.
    pub ptr: DevicePtr,
    /// Bytes asked for.
    pub bytes: u64,
    /// Its tag: see [`crate::TagScope`].
    pub tag: Option<Arc<str>>,
    /// The [`aquifer_device::Stream::id`] of the stream that it was allocated for.
    pub stream: u32,
}

impl KeptAwakeBy {
    pub(crate) fn new(state: &'static AllocatorState, kept: [Kept; 4]) -> KeptAwakeBy {
        let [access_guards, reservations, awake, others] = kept.map(|kept| kept.number);
        let allocations = kept.iter().filter_map(|kept| used_at(state, kept.addr?)).collect();
        let is_this_thread = state.is_kept_awake_here();
        KeptAwakeBy { access_guards, reservations, awake, others, is_this_thread, allocations }
    }
}

/// The live allocation at an address.
fn used_at(state: &'static AllocatorState, addr: u64) -> Option<UsedAllocation> {
    let owned = state.shared().paged.as_ref().and_then(|paged| paged.owned.get(&addr).copied());
    let mut found = owned.map(|owned| (addr, owned.requested, owned.tag, owned.slot));
    state.walk(|_, _, passed| {
        let block = &passed.block;
        if block.state == State::Live && block.range().contains(&addr) {
            found = Some((block.addr, block.requested, Tag(block.tag), block.owner));
        }
    });
    found.map(|(addr, bytes, tag, stream)| UsedAllocation { ptr: DevicePtr(addr), bytes, tag: tag.name(), stream })
}

impl fmt::Display for KeptAwakeBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeptAwakeBy { access_guards, reservations, awake, others, .. } = *self;
        let counts = [
            (access_guards, "access guard"),
            (reservations, "reservation"),
            (awake, "`keep_awake`"),
            (others, "other"),
        ];
        for (at, (count, what)) in counts.into_iter().filter(|&(count, _)| count > 0).enumerate() {
            let (comma, s) = (if at > 0 { ", " } else { "" }, if count > 1 { "s" } else { "" });
            write!(f, "{comma}{count} {what}{s}")?;
        }
        for used in &self.allocations {
            write!(f, "; in use: {} at {}", Bytes(used.bytes), used.ptr)?;
            if let Some(tag) = &used.tag {
                write!(f, ", tagged `{tag}`")?;
            }
            write!(f, ", of stream {}", used.stream)?;
        }
        f.write_str(if self.is_this_thread { "; this thread has some of them" } else { "" })
    }
}
