//! Serves a request from mapped memory: drafts a remap, plans it, makes the driver calls, and
//! accounts for the result. What is bought, moved or asked is decided in `policy.rs`.

use aquifer_device::{ErrorKind, Tick};

use crate::allocator::Allocator;
use crate::backing::growth::{Growth, buyable, room};
use crate::backing::paged::carry_out::carry_out;
use crate::backing::paged::dedicated::{may_recycle, recycle_deferred_releases};
use crate::backing::trim::{give_addresses_back, unmap_old_mappings};
use crate::core::Core;
use crate::core::limits::Refusal;
use crate::core::paged::layout::ALIGNMENT;
use crate::core::pools::Which;
use crate::core::remap::commit::Committed;
use crate::core::remap::draft::Draft;
use crate::core::remap::plan::{Purchase, Remap, Short};
use crate::cross_stream::{poll, poll_waiting, stall_for};
use crate::error::{AllocError, WhySegments};
use crate::sync::RwLockReadGuard;
use crate::types::{Request, latest_by_stream};

/// How often a request is planned anew at most. It may have to be, because others may take the
/// memory that it waited for.
pub(crate) const ROUNDS: u32 = 64;

/// What may still be tried for a request.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    /// Ask the streams how far they got.
    ask: bool,
    purchase: Purchase,
}

/// The next step for a request.
enum Next<'a> {
    Finished(Growth),
    /// Learn, without waiting, how far these streams got.
    Ask(Vec<Tick>),
    /// Wait on the host until the work is done: the request is refused otherwise.
    Wait(Tick),
    Reserve,
    /// Wait until other threads have finished taking memory or changing mappings: only then is it
    /// known how much there is.
    AwaitOthers,
    /// Make the driver calls. The gate is held from the plan to the commit.
    CarryOut(Box<Remap>, RwLockReadGuard<'a>),
}

/// Serves the request from memory that moves or that comes from the device.
pub(crate) fn grow_paged(allocator: &Allocator, request: &Request) -> Result<Growth, AllocError> {
    let mut allowed = Allowed { ask: true, purchase: Purchase::InsteadOfMoving };
    for _ in 0..ROUNDS {
        recycle_deferred_releases(allocator, false)?;
        if let Err(error) = unmap_old_mappings(allocator) {
            tracing::warn!(%error, "memory stays mapped at addresses that it moved away from");
        }
        match next_step(allocator, request, &allowed)? {
            Next::Finished(growth) => return Ok(growth),
            Next::Ask(ticks) => {
                allowed.ask = false;
                poll(&ticks)?;
            }
            Next::Wait(tick) => {
                if !stall_for(allocator, &tick)? {
                    return Ok(Err(Refusal::Device));
                }
                poll_waiting(allocator)?;
                allowed.ask = true;
            }
            Next::Reserve => {
                if !reserve_addresses(allocator, request)? {
                    return Ok(Err(Refusal::Addresses));
                }
            }
            Next::AwaitOthers => allocator.gate()?.wait(),
            Next::CarryOut(remap, gate) => {
                if let Some(growth) = finish(allocator, request, *remap, gate, &mut allowed.purchase)? {
                    return Ok(growth);
                }
            }
        }
    }
    Ok(Err(Refusal::Device))
}

fn next_step<'a>(allocator: &'a Allocator, request: &Request, allowed: &Allowed) -> Result<Next<'a>, AllocError> {
    let room = if allowed.purchase > Purchase::Nothing { Some(room(allocator)?) } else { None };
    learn_capacity(allocator);
    let gate = allocator.gate()?.shared();
    let mut guard = allocator.state().lock();
    if guard.is_asleep() {
        return Err(AllocError::Asleep);
    }
    // Another thread may have freed memory meanwhile.
    if let Some(granted) = guard.take_own(request) {
        return Ok(Next::Finished(Ok(granted)));
    }
    let nothing = (0, Refusal::Device);
    let (buyable, refusal) = room.as_ref().map_or(nothing, |room| buyable(allocator, &guard, room));
    if request.size > allocator.device().info().total_bytes {
        // Reserving addresses for it is not worth while.
        let refusal = if buyable < request.size { refusal } else { Refusal::Device };
        return Ok(Next::Finished(Err(refusal)));
    }
    let left = guard.left().min(buyable);
    let Some(mut draft) = guard.draft(request, left, allowed.purchase) else { return Ok(Next::Reserve) };
    if let Some(next) = instead_of_buying(&mut guard, request, &mut draft, allowed) {
        return Ok(next);
    }
    Ok(match guard.plan(request, draft, buyable, allowed.purchase >= Purchase::Ahead) {
        Ok(remap) => Next::CarryOut(remap, gate),
        Err(_) if room.is_some_and(|room| room.is_uncertain(&guard, refusal)) || may_recycle(allocator, &mut guard) => {
            Next::AwaitOthers
        }
        Err(Short { missing, not_done }) => match guard.streams.first_enough(&not_done, missing) {
            Some(tick) => Next::Wait(tick),
            None => Next::Finished(Err(refusal)),
        },
    })
}

/// What is tried before memory is bought from the device beyond the peak of use: to ask whether
/// more work is done, or to use memory of the request's own stream before the device is done with
/// it, which changes the draft.
fn instead_of_buying(
    core: &mut Core,
    request: &Request,
    draft: &mut Draft,
    allowed: &Allowed,
) -> Option<Next<'static>> {
    if draft.buy == 0 || draft.bought_though_movable {
        return None;
    }
    if allowed.ask && !draft.donors.not_done.is_empty() {
        return Some(Next::Ask(core.streams.not_done(latest_by_stream(draft.donors.not_done.keys().copied()))));
    }
    core.reuse_unfinished(request, draft);
    None
}

/// Makes the driver calls of a remap and commits it. Returns `None` if the request should be
/// planned anew, where `purchase` then says what may be taken from the device.
fn finish(
    allocator: &Allocator,
    request: &Request,
    mut remap: Remap,
    _gate: RwLockReadGuard<'_>,
    purchase: &mut Purchase,
) -> Result<Option<Growth>, AllocError> {
    let purchased = remap.purchase;
    carry_out(allocator.device(), allocator.hooks(), &mut remap);
    let mut guard = allocator.state().lock();
    let Committed { window, moved, error, at_creation, .. } = guard.commit(remap);
    let granted = window.map(|window| guard.take(request, window));
    drop(guard);
    if moved > 0 {
        let (stream, bytes) = (request.stream.0, request.size);
        tracing::debug!(target: "aquifer::remap", stream, bytes, moved, "free memory was moved to serve a request");
    }
    if let Some(granted) = granted {
        return Ok(Some(Ok(granted)));
    }
    match error {
        // A capture began, so a donor could not be unmapped. The next plan moves nothing: `donors`
        // chooses none during a capture.
        Some(error) if error.kind == ErrorKind::Capture => Ok(None),
        Some(error) if !error.is_out_of_memory() => Err(error.into()),
        Some(_) if at_creation => {
            allocator.state().shared().note_capacity(0);
            let Some(lower) = purchased.lower() else { return Ok(Some(Err(Refusal::Device))) };
            *purchase = lower;
            Ok(None)
        }
        // Out of memory while unmapping, mapping or setting access: buying less does not help.
        _ => Ok(Some(Err(Refusal::Device))),
    }
}

/// Asks the device how much it can give if the next plan may want to know. If it does not answer,
/// that stays unknown.
fn learn_capacity(allocator: &Allocator) {
    if !allocator.state().shared().lacks_capacity() {
        return;
    }
    if let Ok(memory) = allocator.device().memory_info() {
        allocator.state().shared().note_capacity(memory.free);
    }
}

/// At most this many times as many addresses are reserved as the device has memory. Live blocks
/// spread over addresses: on a full device whose program never settles, they took more than four
/// times as many addresses as it had memory.
const ADDRESSES_FOR_MEMORY: u64 = 64;

/// Reserves addresses for the request's pool. Returns false if there are none. Waits for nothing.
///
/// Each reservation gets an equal share of what is left of [`ADDRESSES_FOR_MEMORY`] times the
/// device's memory: the first has room for all memory, later ones for less. Small requests get a
/// sixteenth. A request always gets as many addresses as it needs. If the driver refuses, a quarter
/// is tried, down to what the request needs; then empty reservations are given back, and the least
/// is tried once more.
fn reserve_addresses(allocator: &Allocator, request: &Request) -> Result<bool, AllocError> {
    let shared = allocator.state().shared();
    let paged = shared.paged();
    let (granule, count, held) = (paged.granule, paged.reservations(), paged.address_bytes());
    drop(shared);
    let left = allocator.device().info().total_bytes.saturating_mul(ADDRESSES_FOR_MEMORY).saturating_sub(held);
    let least = request.size.next_multiple_of(granule) + granule;
    let share = if request.size <= crate::size_class::SMALL_SIZE { 16 } else { 1 };
    let mut bytes = (left / (ADDRESSES_FOR_MEMORY + count) / share).next_multiple_of(granule).max(least);
    let (mut gave_back, alignment) = (false, ALIGNMENT.max(granule));
    allocator.device().settle_unused();
    loop {
        let driver = allocator.device().driver();
        let reserved = driver.reserve(bytes, alignment).or_else(|refused| {
            tracing::debug!(%refused, alignment, "addresses are reserved without this alignment");
            driver.reserve(bytes, granule)
        });
        match reserved {
            Ok(ptr) => {
                allocator.state().tell_witness(|witness| witness.managed(ptr.range(bytes)));
                allocator.state().lock().add_reservation(request, ptr.0, bytes);
                return Ok(true);
            }
            Err(error) if error.kind == ErrorKind::OutOfAddresses => {
                if bytes == least && std::mem::replace(&mut gave_back, true) {
                    allocator.note_segments(WhySegments::NoAddresses(error));
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

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::{Device, Operation};
    use aquifer_sim::{Fault, SimConfig, SimDriver};

    use super::*;
    use crate::tags::Tag;
    use crate::types::{PoolId, StreamId};

    const MIB: u64 = 1 << 20;

    fn allocator(options: &str) -> Allocator {
        Allocator::new(&Device::new(SimDriver::new(SimConfig::new(1024 * MIB))), options).unwrap()
    }

    /// What a request finds that another thread leaves too little for now. A stream has enough.
    fn finds(options: &str, other: fn(&mut Core, u64), other_ends: fn(&mut Core, u64)) {
        let allocator = allocator(options);
        let [one, two] = [0; 2].map(|_| allocator.device().stream().unwrap());
        let block = allocator.alloc_bytes(400 * MIB, &one).unwrap();
        one.fill(block.ptr(), 1, block.bytes()).unwrap();
        drop((block, allocator.alloc_bytes(MIB, &two).unwrap()));
        let (pool, size) = (PoolId::LARGE, 300 * MIB);
        let stream = StreamId::of(&two);
        let request = Request { requested: size, size, pool, stream, tag: Tag::default(), is_regular: true };
        let allowed = Allowed { ask: false, purchase: Purchase::Needed };
        let next = || loop {
            match next_step(&allocator, &request, &allowed).unwrap() {
                Next::Reserve => assert!(reserve_addresses(&allocator, &request).unwrap()),
                next => return next,
            }
        };
        other(&mut allocator.state().shared(), 400 * MIB);
        assert!(matches!(next(), Next::AwaitOthers), "{options}");
        other_ends(&mut allocator.state().shared(), 400 * MIB);
        assert!(matches!(next(), Next::CarryOut(..)), "{options}");
    }

    #[test]
    fn no_stream_is_waited_for_while_others_may_leave_enough() {
        for options in ["headroom_mb:100", "limit_free_fraction:0.9", "limit_mb:900"] {
            finds(options, Core::begin_growing, Core::end_growing);
        }
        finds("limit_mb:900", Core::begin_releasing, Core::end_releasing);
    }

    #[test]
    fn a_request_that_the_device_refused_memory_waits_for_no_other_thread() {
        let allocator = allocator("");
        let stream = allocator.device().stream().unwrap();
        let _block = allocator.alloc_bytes(400 * MIB, &stream).unwrap();
        let (pool, size, stream) = (PoolId::LARGE, 300 * MIB, StreamId::of(&stream));
        let request = Request { requested: size, size, pool, stream, tag: Tag::default(), is_regular: true };
        let next = next_step(&allocator, &request, &Allowed { ask: false, purchase: Purchase::Nothing }).unwrap();
        assert!(matches!(next, Next::Finished(Err(Refusal::Device))));
    }

    #[test]
    fn a_request_does_not_wait_for_other_threads_to_unmap_what_was_given_up() {
        let allocator = allocator("");
        let stream = allocator.device().stream().unwrap();
        let mut cache = allocator.growable(64 * MIB, &stream).unwrap();
        cache.grow_to(32 * MIB, &stream).unwrap();
        drop(cache);
        let recycled = || allocator.device().driver_calls().of(Operation::Unmap);
        let before = recycled();
        // As another thread does that changes mappings.
        let others = allocator.gate().unwrap().shared();
        let _first = allocator.alloc_bytes(94 * MIB, &stream).unwrap();
        assert_eq!(recycled(), before);
        drop(others);
        let _second = allocator.alloc_bytes(94 * MIB, &stream).unwrap();
        assert!(recycled() > before);
    }

    #[test]
    fn memory_of_a_lost_device_does_not_grow() {
        let sim = SimDriver::new(SimConfig::new(1024 * MIB));
        let allocator = Allocator::new(&Device::new(sim.clone()), "").unwrap();
        let stream = allocator.device().stream().unwrap();
        let mut cache = allocator.growable(MIB, &stream).unwrap();
        cache.grow_to(1000, &stream).unwrap();
        sim.inject(Fault::LostAt { nth: 1 });
        allocator.device().synchronize().unwrap_err();
        let refused = cache.grow_to(2000, &stream);
        assert!(matches!(refused, Err(AllocError::Device(error)) if error.is_device_lost()));
    }
}
