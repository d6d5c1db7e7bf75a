//! Serves a request from mapped memory: drafts a remap, waits where that pays, plans, makes the
//! driver calls, and accounts for the result.
//!
//! Whether memory may move depends on how far streams got. The host asks first, which waits for
//! nothing. Where reserved memory would then exceed the peak of memory in use by more than a share,
//! there are two ways to wait instead of growing, each within a budget:
//! * the request's stream is made to wait for another stream, and gets that stream's memory, or
//!   blocks of its own that the other stream used; this stalls only the request's stream;
//! * the host waits, which stalls the program.
//!
//! Where memory would be refused otherwise, the host waits in any case.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::internal::Timeline;
use aquifer_device::{DeviceError, ErrorKind};

use crate::allocator::Allocator;
use crate::backing::growing::Refusal;
use crate::backing::growth::Growth;
use crate::backing::headroom::{Room, buyable, room};
use crate::backing::paged::carry_out::carry_out;
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::backing::paged::draft::{Draft, draft};
use crate::backing::paged::granules::{Paged, Purpose};
use crate::backing::paged::milestones::Reason;
use crate::backing::paged::plan::{Plan, Planned, Terms, plan};
use crate::backing::paged::settle::settle_plan;
use crate::backing::paged::trim::give_addresses_back;
use crate::config::CrossStream;
use crate::cross_stream::lending::{borrow_waiting, tick_of_lender};
use crate::cross_stream::progress::{Pending, cannot_be_asked, poll};
use crate::cross_stream::waiting::{awaited, poll_waiting, sweep_ordered, uses_of_own};
use crate::error::AllocError;
use crate::heap::kind_of;
use crate::pools::lookup::heap_with_pool;
use crate::pools::table::Which;
use crate::request::Request;
use crate::state::guard::StateGuard;

/// Waiting is considered only if reserved memory would exceed the peak in use by more than that
/// peak divided by this, and by more than [`SLACK_LEAST`]. For less it is not worth it.
const SLACK_SHARE: u64 = 128;
/// In bytes: see [`SLACK_SHARE`].
const SLACK_LEAST: u64 = 32 << 20;
/// The host waits only if reserved memory would exceed the peak in use by more than that peak
/// divided by this: it may not wait often.
const STALL_SLACK_SHARE: u64 = 80;
/// The host waits for at most one allocation in this many, and for a few more at the start:
/// [`STALL_ADVANCE`], and up to [`STALL_MORE`].
const STALL_SPACING: u64 = 600;
/// How often the host may wait at the start, however little memory that saves.
const STALL_ADVANCE: u64 = 2;
/// How often it may wait in addition if that saves a quarter of the peak in use; in proportion if
/// it saves less.
const STALL_MORE: u64 = 6;
/// How often the host waits at most before one request grows: another thread may use the memory
/// again each time.
const STALLS_PER_REQUEST: u64 = STALL_ADVANCE + STALL_MORE;
/// The host waits for enough memory to serve more than one request: reserved memory divided by
/// this, or what the request lacks, if that is more.
const STALL_SHARE: u64 = 32;
/// A stream is made to wait for another one for at most one allocation in this many, plus
/// [`ORDER_ADVANCE`] at the start.
const ORDER_SPACING: u64 = 32;
/// See [`ORDER_SPACING`].
const ORDER_ADVANCE: u64 = 8;
/// How often a request is planned anew at most. It may have to be, because others may take the
/// memory that it waited for.
pub(crate) const ROUNDS: u32 = 64;
/// At most this many times as many addresses are reserved as the device has memory. Live blocks
/// spread over addresses: on a full device whose program never settles, they took more than four
/// times as many addresses as it had memory.
const ADDRESSES_FOR_MEMORY: u64 = 64;

/// What may still be tried for a request. A field becomes false once it was tried in vain.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    /// Ask the streams how far they got.
    ask: bool,
    /// Make the request's stream wait for others.
    order: bool,
    /// How often to wait on the host rather than grow. Where memory would be refused otherwise, the
    /// host waits in any case.
    stalls: u64,
    /// Take memory from the device.
    create: bool,
    /// Take more than the request needs.
    ahead: bool,
    /// Take memory where granules might move instead.
    instead_of_moving: bool,
}

/// The next step for a request.
enum Next {
    Finished(Result<Growth, AllocError>),
    /// Learn, without waiting, how far these streams got.
    Ask(Pending),
    /// Make the request's stream wait for these uses of its own memory.
    Order(Pending),
    /// Make the request's stream wait for another stream's memory.
    Borrow,
    /// Wait on the host until the timeline has got this far.
    Wait(Arc<Timeline>, u64),
    Reserve,
    /// Wait until other threads have finished taking memory: only then is it known how much the
    /// device has left.
    AskRoom,
    Again,
}

/// Serves the request from memory that moves or that comes from the device.
pub(crate) fn grow_paged(allocator: &Allocator, request: &Request) -> Result<Growth, AllocError> {
    // While a stream captures, nothing waits that can do without.
    let may_wait = !allocator.device().is_capturing();
    let stalls = if may_wait { STALLS_PER_REQUEST } else { 0 };
    let mut allowed =
        Allowed { ask: true, order: may_wait, stalls, create: true, ahead: true, instead_of_moving: true };
    for _ in 0..ROUNDS {
        recycle_deferred_releases(allocator)?;
        match step(allocator, request, &mut allowed)? {
            Next::Finished(growth) => return growth,
            Next::Ask(ticks) => {
                allowed.ask = false;
                poll(&ticks)?;
            }
            Next::Order(uses) => allowed.order = order_after(allocator, request, &uses)?,
            Next::Borrow => match borrow_waiting(allocator, request)? {
                Some(granted) => return Ok(Growth::Grown(granted)),
                None => allowed.order = false,
            },
            Next::Wait(timeline, after) => {
                if stall_for(allocator, &timeline, after)? {
                    poll_waiting(allocator)?;
                    allowed.ask = true;
                    allowed.stalls = allowed.stalls.saturating_sub(1);
                } else if std::mem::take(&mut allowed.stalls) == 0 {
                    return Ok(Growth::Refused(Refusal::Device));
                }
            }
            Next::Reserve => {
                if !reserve_addresses(allocator, request)? {
                    return Ok(Growth::Refused(Refusal::Addresses));
                }
            }
            Next::AskRoom => Room::wait_for_others(),
            Next::Again => {}
        }
    }
    Ok(Growth::Refused(Refusal::Device))
}

fn step(allocator: &Allocator, request: &Request, allowed: &mut Allowed) -> Result<Next, AllocError> {
    let room = if allowed.create { room(allocator)? } else { Room::NONE };
    learn_capacity(allocator);
    let _gate = allocator.gate()?.shared();
    let mut guard = allocator.state().lock(Some(request.slot));
    if guard.is_asleep() {
        return Err(AllocError::Asleep);
    }
    // Another thread may have freed memory meanwhile.
    if let Some(granted) = guard.take_own(request) {
        return Ok(Next::Finished(Ok(Growth::Grown(granted))));
    }
    let buyable = if allowed.create { buyable(allocator, &guard, &room) } else { (0, Refusal::Device) };
    if request.size > allocator.device().info().total_bytes {
        // Reserving addresses for it is not worth while.
        let refusal = if buyable.0 < request.size { buyable.1 } else { Refusal::Device };
        return Ok(Next::Finished(Ok(Growth::Refused(refusal))));
    }
    let buyable_instead = if allowed.instead_of_moving { buyable.0 } else { 0 };
    let Some(draft) = draft(&mut guard, request, buyable_instead) else { return Ok(Next::Reserve) };
    if let Some(next) = before_buying(allocator, &mut guard, request, &draft, allowed) {
        return Ok(next);
    }
    let (buyable, refusal) = buyable;
    let terms = Terms { buyable, refusal, ahead: allowed.ahead };
    let bought_though_movable = draft.bought_though_movable;
    match plan(&mut guard, request, draft, &terms) {
        Planned::Ready(plan) => {
            drop(guard);
            Ok(carry_out_plan(allocator, request, plan, bought_though_movable, allowed))
        }
        Planned::NoAddresses => Ok(Next::Reserve),
        Planned::Short { missing, not_done, refusal } => Ok(match first_enough(&guard, &not_done, missing) {
            Some((timeline, after)) => Next::Wait(timeline, after),
            None if refusal == Refusal::Headroom && room.is_uncertain(&guard) => Next::AskRoom,
            None => Next::Finished(Ok(Growth::Refused(refusal))),
        }),
    }
}

/// The step that is worth trying before memory is bought from the device: to ask whether more work
/// is done, or to wait for it. `None` if there is none.
fn before_buying(
    allocator: &Allocator,
    guard: &mut StateGuard,
    request: &Request,
    draft: &Draft,
    allowed: &Allowed,
) -> Option<Next> {
    if draft.buy == 0 {
        return None;
    }
    if allowed.ask && !draft.donors.not_done.is_empty() {
        let ticks = askable(guard, &draft.donors.not_done);
        if !ticks.is_empty() {
            return Some(Next::Ask(ticks));
        }
    }
    if draft.bought_though_movable {
        return None;
    }
    let excess = over_peak(guard, draft)?;
    if allowed.order
        && allocator.config().cross_stream != CrossStream::Off
        && let Some(order) = worth_ordering(guard, request)
    {
        return Some(order);
    }
    let stall = if allowed.stalls > 0 { worth_stalling(guard, draft, excess) } else { None };
    stall.map(|(timeline, after)| Next::Wait(timeline, after))
}

fn carry_out_plan(
    allocator: &Allocator,
    request: &Request,
    plan: Plan,
    bought_though_movable: bool,
    allowed: &mut Allowed,
) -> Next {
    allowed.ahead &= bought_though_movable || plan.buys_ahead;
    let (work, held) = plan.part();
    let done = carry_out(allocator.device(), allocator.hooks(), work);
    if done.unmapped > 0 {
        let moved: u64 = held.donors[..done.unmapped].iter().map(|donor| donor.bytes).sum();
        let (stream, bytes) = (request.slot, request.size);
        tracing::debug!(target: "aquifer::remap", stream, bytes, moved, "free memory was moved to serve a request");
    }
    let mut guard = allocator.state().lock(Some(request.slot));
    if let Some(window) = settle_plan(&mut guard, request, held, &done) {
        let granted = guard.arena(request.slot).take(request, window);
        return Next::Finished(Ok(Growth::Grown(granted)));
    }
    drop(guard);
    if done.at_creation && done.error.as_ref().is_some_and(DeviceError::is_out_of_memory) {
        note_capacity(allocator, 0);
    }
    refused(done.error, done.at_creation, bought_though_movable, allowed)
}

/// Makes the request's stream wait for other streams' uses of its own blocks, which are then free
/// to it. Returns false if that cannot be done now.
fn order_after(allocator: &Allocator, request: &Request, uses: &Pending) -> Result<bool, AllocError> {
    let own = allocator.state().shared().timeline(request.slot).cloned();
    let Some(own) = own else { return Ok(false) };
    for (timeline, after) in uses {
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

/// Reserves addresses for the request's pool. In all, at most [`ADDRESSES_FOR_MEMORY`] times as
/// many are taken as the device has memory; where these are nearly used up, a request that is
/// larger than its share still gets as many as it needs. The first reservation has room for all
/// memory, and each later one takes a smaller share of the addresses that are left: after a hundred
/// streams or pools that keep theirs, the next one has room for a seventh of all memory. Small
/// requests take less, and so does any request if that many are refused. Returns false if there are
/// no addresses for the request.
fn reserve_addresses(allocator: &Allocator, request: &Request) -> Result<bool, AllocError> {
    let held = allocator
        .state()
        .shared()
        .paged
        .as_ref()
        .map(|paged| (paged.granule, paged.reservations(), paged.address_bytes()));
    let Some((granule, count, held)) = held else { return Ok(false) };
    let left = allocator.device().info().total_bytes.saturating_mul(ADDRESSES_FOR_MEMORY).saturating_sub(held);
    let least = request.size.next_multiple_of(granule) + granule;
    let smaller = if request.size <= crate::size_class::SMALL_SIZE { 16 } else { 1 };
    let mut bytes = (left / (ADDRESSES_FOR_MEMORY + count) / smaller).next_multiple_of(granule).max(least);
    let mut gave_back = false;
    allocator.device().settle_unused();
    loop {
        match allocator.device().driver().reserve(bytes, granule) {
            Ok(ptr) => {
                allocator.state().report_to_checks(|checks| checks.manage(ptr.range(bytes)));
                let mut guard = allocator.state().lock(Some(request.slot));
                if let Some(paged) = &mut guard.paged {
                    paged.add_reservation(ptr.0, bytes, kind_of(request.pool), Purpose::Heap);
                }
                guard.pools.note_region(request.pool, request.slot);
                let heap = heap_with_pool(&mut guard, request.slot, request.pool);
                heap.add_reservation(ptr.0, bytes, request.pool, granule);
                return Ok(true);
            }
            Err(error) if error.kind == ErrorKind::OutOfAddresses || error.is_out_of_memory() => {
                if bytes == least && std::mem::replace(&mut gave_back, true) {
                    return Ok(false);
                }
                if bytes == least {
                    give_addresses_back(allocator, Which::All)?;
                }
                bytes = (bytes / 4).next_multiple_of(granule).max(least);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The next step after a plan failed.
fn refused(error: Option<DeviceError>, at_creation: bool, bought_though_movable: bool, allowed: &mut Allowed) -> Next {
    match error {
        // A capture began before memory was unmapped. The next plan moves none.
        Some(error) if error.kind == ErrorKind::Capture => Next::Again,
        Some(error) if !error.is_out_of_memory() => Next::Finished(Err(error.into())),
        Some(_) if at_creation && bought_though_movable => {
            allowed.instead_of_moving = false;
            Next::Again
        }
        Some(_) if at_creation && allowed.ahead => {
            allowed.ahead = false;
            Next::Again
        }
        Some(_) if at_creation && allowed.create => {
            allowed.create = false;
            Next::Again
        }
        _ => Next::Finished(Ok(Growth::Refused(Refusal::Device))),
    }
}

/// Ticks at which streams may be asked how far they got: for each stream the latest one for which
/// an event was recorded or may be recorded now.
pub(crate) fn askable(guard: &mut StateGuard, not_done: &BTreeMap<(u32, u64), u64>) -> Pending {
    let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
    for &(slot, after) in not_done.keys() {
        if may_be_covered(guard, slot, after) || may_record(guard, slot, Reason::Question) {
            latest.insert(slot, after);
        }
    }
    let ticks: Vec<(u32, u64)> = latest.into_iter().collect();
    note_questions(guard, &ticks);
    ticks.into_iter().filter_map(|(slot, after)| Some((guard.timeline(slot)?.clone(), after))).collect()
}

/// True if an event covers the ticks below a count, or should: recording it may have failed.
fn may_be_covered(guard: &StateGuard, slot: u32, after: u64) -> bool {
    guard.timeline(slot).is_some_and(|timeline| after <= timeline.now())
}

/// Counts the events that will be recorded by asking about these ticks or by waiting for them.
fn note_questions(guard: &mut StateGuard, ticks: &[(u32, u64)]) {
    for &(slot, after) in ticks {
        if !may_be_covered(guard, slot, after) {
            note_recorded(guard, slot, Reason::Question);
        }
    }
}

/// Bytes by which reserved memory would exceed the peak in use; `None` if that is within
/// [`SLACK_SHARE`] and [`SLACK_LEAST`].
fn over_peak(guard: &StateGuard, draft: &Draft) -> Option<u64> {
    let paged = guard.paged.as_ref()?;
    let grown = guard.reserved + guard.growing.now() + draft.buy * paged.granule;
    let peak = paged.in_use_peak.max(draft.point.in_use);
    grown.checked_sub(peak).filter(|&excess| excess > (peak / SLACK_SHARE).max(SLACK_LEAST))
}

/// What the request's stream should wait for: other streams' uses of a block of its own, or another
/// stream's free block. `None` if it waited too often or if there is no such block.
fn worth_ordering(guard: &mut StateGuard, request: &Request) -> Option<Next> {
    let own = uses_of_own(guard, request);
    let ticks = own.clone().or_else(|| Some(vec![tick_of_lender(guard, request)?]))?;
    let searches = guard.searches();
    let few = guard.paged.as_ref()?.orders < ORDER_ADVANCE + searches / ORDER_SPACING;
    let known = |guard: &mut StateGuard, &(slot, after): &(u32, u64)| {
        may_be_covered(guard, slot, after) || may_record(guard, slot, Reason::Question)
    };
    if !few || !ticks.iter().all(|tick| known(guard, tick)) {
        return None;
    }
    note_questions(guard, &ticks);
    guard.paged.as_mut()?.orders += 1;
    if own.is_none() {
        return Some(Next::Borrow);
    }
    let uses = ticks.into_iter().map(|(slot, after)| Some((guard.timeline(slot)?.clone(), after)));
    Some(Next::Order(uses.collect::<Option<_>>()?))
}

/// What the host should wait for, rather than let reserved memory exceed the peak in use by
/// `excess` bytes. `None` if it waited too often or if there is nothing to wait for.
fn worth_stalling(guard: &StateGuard, draft: &Draft, excess: u64) -> Option<(Arc<Timeline>, u64)> {
    let paged = guard.paged.as_ref()?;
    let peak = paged.in_use_peak.max(draft.point.in_use);
    if excess <= peak / STALL_SLACK_SHARE {
        return None;
    }
    let quarter = (peak / 4).max(1);
    let more = excess.min(quarter).saturating_mul(STALL_MORE) / quarter;
    if paged.stalls >= STALL_ADVANCE + more + guard.searches() / STALL_SPACING {
        return None;
    }
    let mut not_done = draft.donors.not_done.clone();
    for (tick, bytes) in awaited(guard) {
        *not_done.entry(tick).or_default() += bytes / paged.granule;
    }
    first_enough(guard, &not_done, draft.buy.max(guard.reserved / STALL_SHARE / paged.granule))
}

/// The earliest tick of a stream by which `granules` granules are done, on that stream alone. If no
/// stream has that many, the latest tick of the stream that has the most.
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

/// Asks the device how much it can give if the next plan may want to know. If it does not answer,
/// that stays unknown.
pub(super) fn learn_capacity(allocator: &Allocator) {
    let is_unknown = |paged: &Paged| paged.recurrence.has_settled() && paged.capacity.good_for == 0;
    if !allocator.state().shared().paged.as_ref().is_some_and(is_unknown) {
        return;
    }
    if let Ok(memory) = allocator.device().memory_info() {
        note_capacity(allocator, memory.free);
    }
}

/// Notes that the device has `free` bytes left: none after it refused to give more.
pub(super) fn note_capacity(allocator: &Allocator, free: u64) {
    let mut shared = allocator.state().shared();
    // What is being taken just now may count twice, or not at all. That matters little.
    let held = shared.reserved + shared.growing.now();
    if let Some(paged) = &mut shared.paged {
        paged.capacity.set(held.saturating_add(free));
    }
}

/// True if one more event on the stream is within the budget.
pub(crate) fn may_record(guard: &mut StateGuard, slot: u32, reason: Reason) -> bool {
    guard.try_arena(slot).is_some_and(|arena| arena.milestones.may_record(reason))
}

pub(crate) fn note_recorded(guard: &mut StateGuard, slot: u32, reason: Reason) {
    if let Some(arena) = guard.try_arena(slot) {
        arena.milestones.note_recorded(reason);
    }
}
