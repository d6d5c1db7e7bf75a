//! Waiting instead of growing: when it pays, and for what.
//!
//! Where reserved memory would exceed the peak of memory in use by more than a share, and the
//! request's own stream has no memory that it may use at once (`lingering.rs`), there are two ways
//! to wait, each within a budget:
//! * the request's stream is made to wait for another stream, and gets that stream's memory, or
//!   blocks of its own that the other stream used; this stalls only the request's stream;
//! * the host waits, which stalls the program.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::internal::Timeline;

use crate::allocator::Allocator;
use crate::backing::paged::draft::Draft;
use crate::backing::paged::milestones::Reason;
use crate::cross_stream::lending::tick_of_lender;
use crate::cross_stream::progress::{Pending, cannot_be_asked};
use crate::cross_stream::waiting::{awaited, sweep_ordered, uses_of_own};
use crate::error::AllocError;
use crate::request::Request;
use crate::state::guard::StateGuard;

/// Waiting is considered only if reserved memory would exceed the peak in use by more than that
/// peak divided by this, and by more than [`SLACK_LEAST`]. For less it is not worth it.
const SLACK_SHARE: u64 = 128;
/// In bytes: see [`SLACK_SHARE`].
pub(super) const SLACK_LEAST: u64 = 32 << 20;
/// As [`SLACK_LEAST`], for memory to be used before the device is done with it (`lingering.rs`). Less
/// in debug builds, so that small random programs get there.
pub(super) const REUSE_LEAST: u64 = if cfg!(debug_assertions) { 2 << 20 } else { SLACK_LEAST };
/// The host waits only if reserved memory would exceed the peak in use by more than that peak
/// divided by this: it may not wait often.
const STALL_SLACK_SHARE: u64 = 80;
/// The host waits for at most one allocation in this many, and for a few more at the start:
/// [`STALL_ADVANCE`], and up to [`STALL_MORE`].
const STALL_SPACING: u64 = 600;
/// If only the request's own stream has memory to wait for, most of which it can use without a
/// wait (`lingering.rs`) where the driver maps memory twice, the host waits for at most one
/// allocation in this many, those at the start included.
const OWN_STALL_SPACING: u64 = 1000;
/// How often the host may wait at the start, however little memory that saves.
const STALL_ADVANCE: u64 = 2;
/// How often it may wait in addition if that saves a quarter of the peak in use; in proportion if
/// it saves less.
const STALL_MORE: u64 = 6;
/// How often the host waits at most before one request grows: another thread may use the memory
/// again each time.
pub(super) const STALLS_PER_REQUEST: u64 = STALL_ADVANCE + STALL_MORE;
/// The host waits for enough memory to serve more than one request: reserved memory divided by
/// this, or what the request lacks, if that is more.
const STALL_SHARE: u64 = 32;
/// A stream is made to wait for another one for at most one allocation in this many, plus
/// [`ORDER_ADVANCE`] at the start.
const ORDER_SPACING: u64 = 32;
/// See [`ORDER_SPACING`].
const ORDER_ADVANCE: u64 = 8;

/// Another stream's work that the request's stream should wait for.
pub(super) enum Order {
    /// These uses of the stream's own blocks.
    OwnUses(Pending),
    /// The work before another stream's free block.
    Lender,
}

/// Ticks at which streams may be asked how far they got: for each stream the latest one for which
/// an event was recorded or may be recorded now.
pub(crate) fn askable(guard: &mut StateGuard, not_done: &BTreeMap<(u32, u64), u64>) -> Pending {
    let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
    for &(slot, after) in not_done.keys() {
        if guard.may_be_covered(slot, after) || may_record(guard, slot, Reason::Question) {
            latest.insert(slot, after);
        }
    }
    let ticks: Vec<(u32, u64)> = latest.into_iter().collect();
    note_questions(guard, &ticks);
    ticks.into_iter().filter_map(|(slot, after)| Some((guard.timeline(slot)?.clone(), after))).collect()
}

/// Counts the events that will be recorded by asking about these ticks or by waiting for them.
fn note_questions(guard: &mut StateGuard, ticks: &[(u32, u64)]) {
    for &(slot, after) in ticks {
        if !guard.may_be_covered(slot, after) {
            note_recorded(guard, slot, Reason::Question);
        }
    }
}

/// Bytes by which reserved memory would exceed the peak in use; `None` if that is within
/// [`SLACK_SHARE`] and `least`.
pub(super) fn over_peak(guard: &StateGuard, draft: &Draft, least: u64) -> Option<u64> {
    let paged = guard.paged.as_ref()?;
    let grown = guard.reserved + guard.growing.now() + draft.buy * paged.granule;
    let peak = paged.in_use_peak.max(draft.point.in_use);
    grown.checked_sub(peak).filter(|&excess| excess > (peak / SLACK_SHARE).max(least))
}

/// What the request's stream should wait for: other streams' uses of a block of its own, or another
/// stream's free block. `None` if it waited too often or if there is no such block.
pub(super) fn worth_ordering(guard: &mut StateGuard, request: &Request) -> Option<Order> {
    let own = uses_of_own(guard, request);
    let ticks = own.clone().or_else(|| Some(vec![tick_of_lender(guard, request)?]))?;
    let searches = guard.searches();
    let few = guard.paged.as_ref()?.orders < ORDER_ADVANCE + searches / ORDER_SPACING;
    let known = |guard: &mut StateGuard, &(slot, after): &(u32, u64)| {
        guard.may_be_covered(slot, after) || may_record(guard, slot, Reason::Question)
    };
    if !few || !ticks.iter().all(|tick| known(guard, tick)) {
        return None;
    }
    note_questions(guard, &ticks);
    guard.paged.as_mut()?.orders += 1;
    if own.is_none() {
        return Some(Order::Lender);
    }
    let uses = ticks.into_iter().map(|(slot, after)| Some((guard.timeline(slot)?.clone(), after)));
    Some(Order::OwnUses(uses.collect::<Option<_>>()?))
}

/// What the host should wait for, rather than let reserved memory exceed the peak in use by
/// `excess` bytes. `None` if it waited too often or if there is nothing to wait for.
pub(super) fn worth_stalling(
    guard: &StateGuard,
    request: &Request,
    draft: &Draft,
    excess: u64,
) -> Option<(Arc<Timeline>, u64)> {
    let paged = guard.paged.as_ref()?;
    let peak = paged.in_use_peak.max(draft.point.in_use);
    if excess <= peak / STALL_SLACK_SHARE {
        return None;
    }
    let quarter = (peak / 4).max(1);
    let more = excess.min(quarter).saturating_mul(STALL_MORE) / quarter;
    let (few, searches) = (STALL_ADVANCE + more, guard.searches());
    if paged.stalls >= few + searches / STALL_SPACING {
        return None;
    }
    let mut not_done = draft.donors.not_done.clone();
    for (tick, bytes) in awaited(guard) {
        *not_done.entry(tick).or_default() += bytes / paged.granule;
    }
    let only_own = not_done.keys().all(|&(slot, _)| slot == request.slot);
    if only_own && paged.may_alias && paged.stalls >= few.max(searches / OWN_STALL_SPACING) {
        return None;
    }
    first_enough(guard, &not_done, draft.buy.max(guard.reserved / STALL_SHARE / paged.granule))
}

/// Chooses the stream that can free the most granules, counting up to `granules`, and the earliest
/// tick by which it does.
pub(crate) fn first_enough(
    guard: &StateGuard,
    not_done: &BTreeMap<(u32, u64), u64>,
    granules: u64,
) -> Option<(Arc<Timeline>, u64)> {
    let mut sums: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (&(slot, after), &count) in not_done {
        let (sum, latest) = sums.entry(slot).or_default();
        if *sum < granules {
            (*sum, *latest) = (*sum + count, after);
        }
    }
    let (&slot, &(_, after)) = sums.iter().max_by_key(|(_, (sum, _))| *sum)?;
    Some((guard.timeline(slot)?.clone(), after))
}

/// Makes the request's stream wait for other streams' uses of its own blocks, which are then free
/// to it. Returns false if that cannot be done now.
pub(super) fn order_after(allocator: &Allocator, request: &Request, uses: &Pending) -> Result<bool, AllocError> {
    let own = allocator.state().shared().timeline(request.slot).cloned();
    let Some(own) = own else { return Ok(false) };
    for (timeline, after) in uses {
        // `after` counts ticks; the last of them has the number `after - 1`.
        match own.wait_for(timeline, after.saturating_sub(1)) {
            Ok(()) => {}
            Err(error) if cannot_be_asked(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    tracing::debug!(
        target: "aquifer::wait",
        stream = request.slot,
        bytes = request.size,
        "a stream was made to wait for the uses of its own memory"
    );
    let clock = own.clock();
    let mut guard = allocator.state().lock(Some(request.slot));
    guard.counters().cross_stream_waits.add(1);
    sweep_ordered(&mut guard, request.slot, &clock);
    Ok(true)
}

/// Waits on the host until the timeline has got this far. Returns false if that cannot be done now.
pub(crate) fn stall_for(allocator: &Allocator, timeline: &Timeline, after: u64) -> Result<bool, AllocError> {
    tracing::debug!(target: "aquifer::wait", stream = timeline.id(), "the host waits so that memory can move");
    if let Some(paged) = &mut allocator.state().shared().paged {
        paged.stalls += 1;
    }
    match timeline.synchronize(after.saturating_sub(1)) {
        Ok(()) => Ok(true),
        Err(error) if cannot_be_asked(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// True if one more event on the stream is within the budget.
fn may_record(guard: &mut StateGuard, slot: u32, reason: Reason) -> bool {
    guard.try_arena(slot).is_some_and(|arena| arena.milestones.may_record(reason))
}

fn note_recorded(guard: &mut StateGuard, slot: u32, reason: Reason) {
    if let Some(arena) = guard.try_arena(slot) {
        arena.milestones.note_recorded(reason);
    }
}
