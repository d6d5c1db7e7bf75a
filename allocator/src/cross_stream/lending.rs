//! Lending: reuse of a free block by another stream than the one that owns it.
//!
//! Stream S may use a block once the block's tick is known done on the host, or once S's later work
//! is ordered after that tick. Both can be learned without waiting. Making S wait would couple the
//! streams, so it is done only where the policy says so, or as a rung of the ladder before memory
//! runs out. It is counted and traced.
//!
//! A borrowed block stays in the arena of its region's home stream, and its handle refers to that
//! arena. Only a whole segment that is done for every stream moves to the borrower's arena.
//!
//! Borrowing is tried only when the stream's own free blocks at home do not serve a request, just
//! before memory would be taken from the device. Blocks that the stream owns away from home
//! (*foreign free blocks*) are tried first. Where the stream borrowed before, this happens without
//! the ladder (`reuse.rs`). A stream that borrows all the time gets memory of its own instead, as
//! long as that costs little. Asking whether ticks are done may record an event on a stream, at
//! most one each time.

use std::sync::Arc;

use aquifer_device::internal::{Clock, Timeline};

use crate::allocator::Allocator;
use crate::backing::growth::growth_bytes;
use crate::cross_stream::progress::{Pending, cannot_be_asked, poll};
use crate::cross_stream::waiting::{send_foreign_home, sweep_ordered, unknown};
use crate::error::AllocError;
use crate::heap::{Heap, IndexView, Key};
use crate::pools::lookup::heap_with_pool;
use crate::request::{Place, Request};
use crate::state::arena::{ArenaGuard, Granted};
use crate::state::guard::StateGuard;
use crate::state::settled::Sought;
use crate::state::shared::SharedState;
use crate::sync::atomic::Ordering;

/// How many blocks of one owner are considered, smallest first.
const CANDIDATES: usize = 32;

/// A stream that borrows often gets memory of its own instead, as long as all such memory together
/// is little. *Often* means for more than one allocation in this many, plus [`BORROW_ADVANCE`] at
/// the start.
const BORROW_SPACING: u64 = 16;
/// See [`BORROW_SPACING`].
const BORROW_ADVANCE: u64 = 8;
/// *Little* means at most reserved memory divided by this, or [`OWN_LEAST`], or [`OWN_GRANULES`],
/// whichever is most.
const OWN_SHARE: u64 = 128;
/// In bytes: see [`OWN_SHARE`].
const OWN_LEAST: u64 = 32 << 20;
/// In granules: see [`OWN_SHARE`]. Mapped memory grows by whole granules, however large they are.
const OWN_GRANULES: u64 = 16;

/// The owner of a block that would serve a request if its stream waited for the tick `after`.
struct Lender {
    timeline: Arc<Timeline>,
    after: u64,
}

/// The blocks that might serve a request without growth.
struct Lendable {
    /// True if another stream has a block that is large enough, done or not.
    fits: bool,
    /// Ticks, not known to be done, that would let such blocks be used, or foreign free blocks of
    /// any stream merge.
    ticks: Pending,
}

/// How many bytes a request gets of its own although its stream might borrow; 0 if it borrows.
/// Borrowing takes several locks each time, so a stream that borrows often gets more memory of its
/// own.
pub(crate) fn growth_instead_of_borrowing(allocator: &Allocator, guard: &mut StateGuard, request: &Request) -> u64 {
    if !guard.try_arena(request.slot).is_some_and(|arena| arena.borrows_often()) {
        return 0;
    }
    let bytes = growth_bytes(allocator, guard, request);
    let sum = guard.unborrowed.saturating_add(bytes);
    let granules = guard.paged.as_ref().map_or(0, |paged| OWN_GRANULES.saturating_mul(paged.granule));
    let is_little = sum <= (guard.reserved / OWN_SHARE).max(OWN_LEAST).max(granules);
    guard.arena(request.slot).keeps_borrowing = !is_little;
    if is_little { bytes } else { 0 }
}

impl ArenaGuard {
    /// True if the stream borrows often.
    pub(crate) fn borrows_often(&self) -> bool {
        self.arena.lenders.served() >= BORROW_ADVANCE + self.milestones.searches / BORROW_SPACING
    }
}

/// Serves the request from foreign free blocks of its own stream or from blocks of other streams,
/// without waiting. Releases the locks.
pub(crate) fn borrow(
    allocator: &Allocator,
    request: &Request,
    mut guard: StateGuard,
) -> Result<Option<Granted>, AllocError> {
    if let Some(place) = best_foreign(&mut guard, request) {
        return Ok(Some(take_lent(&mut guard, request, place)));
    }
    let Lendable { fits, ticks } = lendable(&mut guard, request);
    if !fits && ticks.is_empty() && !guard.has_foreign() && guard.waiting.is_empty() {
        return Ok(None);
    }
    let own = guard.timeline(request.slot).cloned();
    drop(guard);
    poll(&ticks)?;
    let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
    let mut guard = allocator.state().lock(Some(request.slot));
    send_foreign_home(&mut guard);
    sweep_ordered(&mut guard, request.slot, &clock);
    if let Some(granted) = guard.take_own(request) {
        return Ok(Some(granted));
    }
    let Some(place) = best_ordered(&mut guard, request, &clock) else { return Ok(None) };
    if guard.block(place).owner != request.slot {
        guard.counters().cross_stream_reuses.add_from_any_thread(1);
    }
    Ok(Some(take_lent(&mut guard, request, place)))
}

/// Serves the request from a block of another stream, for which it makes the request's stream wait.
pub(crate) fn borrow_waiting(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let mut guard = allocator.state().lock(Some(request.slot));
    let Some(own) = guard.timeline(request.slot).cloned() else { return Ok(None) };
    let Some(lender) = best_of_any(&mut guard, request).and_then(|place| lender(&guard, place)) else {
        return Ok(None);
    };
    drop(guard);
    if let Err(error) = own.wait_for(&lender.timeline, lender.after.saturating_sub(1)) {
        return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
    }
    let clock = own.clock();
    let mut guard = allocator.state().lock(Some(request.slot));
    // Another thread may have taken the block meanwhile; any block that is ordered now will do.
    let Some(place) = best_ordered(&mut guard, request, &clock) else { return Ok(None) };
    guard.counters().cross_stream_reuses.add_from_any_thread(1);
    guard.counters().cross_stream_waits.add(1);
    let granted = take_lent(&mut guard, request, place);
    drop(guard);
    tracing::debug!(
        target: "aquifer::wait",
        stream = request.slot,
        waits_for = lender.timeline.id(),
        bytes = request.size,
        "a stream was made to wait for another one to reuse its memory"
    );
    Ok(Some(granted))
}

/// Reserved memory is about to become `reserved` bytes. Of what goes back to the device, memory
/// that streams got instead of borrowing is taken to be as large a share as of all.
pub(crate) fn forget_unborrowed(shared: &mut SharedState, reserved: u64) {
    if reserved < shared.reserved {
        let left = u128::from(shared.unborrowed) * u128::from(reserved) / u128::from(shared.reserved);
        shared.unborrowed = u64::try_from(left).unwrap_or(u64::MAX);
    }
}

/// The blocks that other streams have for the request, in any heap.
fn lendable(guard: &mut StateGuard, request: &Request) -> Lendable {
    look_for_lenders(guard, request);
    guard.look_for(Sought::Foreign);
    let (mut fits, mut latest) = (false, Latest::default());
    for heap in guard.heaps() {
        for (owner, index) in heap.indexes(request.pool).filter(|&(owner, _)| owner != request.slot) {
            if index.best_fit(request.size).is_none() {
                continue;
            }
            let mut tick = 0;
            for key in candidates(index, request) {
                fits |= key.size() >= request.size;
                tick = heap.blocks[key.block()].after.max(tick);
                // No block's tick is later than its owner's one now.
                if fits && tick >= guard.tick_of(owner) {
                    break;
                }
            }
            latest.raise(owner, tick);
        }
        // Strays can merge once they are done.
        let foreign = heap.foreign().map(|id| &heap.blocks[id]).filter(|block| block.pool == request.pool);
        foreign.for_each(|block| latest.raise(block.owner, block.after));
    }
    Lendable { fits, ticks: unknown(guard, latest.0.into_iter()) }
}

/// Takes the locks of arenas that may have a block to lend for the request.
fn look_for_lenders(guard: &mut StateGuard, request: &Request) {
    // The stream's own blocks at home are not lent.
    guard.try_arena(request.slot);
    guard.look_for(Sought::Lent { pool: request.pool, size: request.size });
}

/// The best block by size among those that other streams own or that are away from home. `until`
/// gives for an owner the latest tick that its block may have.
fn best_lent(guard: &mut StateGuard, request: &Request, until: impl Fn(&SharedState, u32) -> u64) -> Option<Place> {
    look_for_lenders(guard, request);
    let mut best = None;
    for heap in guard.heaps() {
        for (owner, index) in heap.indexes(request.pool) {
            if owner != request.slot || owner != heap.home {
                best = better(best, best_in(heap, index, request, || until(guard, owner)));
            }
        }
    }
    best.map(|(_, place)| place)
}

/// The best of the request's own stream's blocks away from home.
fn best_foreign(guard: &mut StateGuard, request: &Request) -> Option<Place> {
    guard.look_for(Sought::StraysOf(request.slot));
    let mut best = None;
    for heap in guard.heaps().filter(|heap| heap.home != request.slot) {
        if let Some(index) = heap.index(request.pool, request.slot) {
            best = better(best, best_in(heap, index, request, || u64::MAX));
        }
    }
    best.map(|(_, place)| place)
}

/// The best of the blocks that are done, or after whose uses the later work of a stream with this
/// clock is ordered.
fn best_ordered(guard: &mut StateGuard, request: &Request, clock: &Clock) -> Option<Place> {
    best_lent(guard, request, |shared, owner| shared.done_until(owner).max(clock.of(owner)))
}

/// The best of all blocks, including those that must be waited for.
fn best_of_any(guard: &mut StateGuard, request: &Request) -> Option<Place> {
    best_lent(guard, request, |_, _| u64::MAX)
}

/// The first block of an owner that fits the request and whose tick is at most the result of
/// `until`, which is called only if some block is large enough.
fn best_in(heap: &Heap, index: IndexView<'_>, request: &Request, until: impl FnOnce() -> u64) -> Option<(Key, Place)> {
    index.best_fit(request.size)?;
    let until = until();
    let serves = |key: &Key| key.size() >= request.size && heap.blocks[key.block()].after <= until;
    let key = candidates(index, request).find(serves)?;
    Some((key, Place { arena: heap.home, block: key.block() }))
}

fn lender(guard: &StateGuard, place: Place) -> Option<Lender> {
    let block = guard.block(place);
    Some(Lender { timeline: guard.timeline(block.owner)?.clone(), after: block.after })
}

fn take_lent(guard: &mut StateGuard, request: &Request, place: Place) -> Granted {
    guard.arena(request.slot).arena.lenders.count();
    let block = guard.block(place);
    let is_segment = !block.is_split() && !guard.heap_of(place.arena).region(block.region).is_paged();
    if is_segment && guard.is_known_done(block.owner, block.after) {
        let region = guard.arena(place.arena).heap.remove_region(place.block);
        guard.pools.note_region(region.pool, request.slot);
        guard.pools.forget_region(region.pool, region.home);
        let own = heap_with_pool(guard, request.slot, region.pool);
        let block = own.add_region(region.addr, region.bytes, region.pool);
        return guard.arena(request.slot).take(request, block);
    }
    let borrower = guard.timeline(request.slot).cloned();
    let lender = guard.arena(place.arena);
    borrower.iter().for_each(|borrower| lender.know(borrower));
    lender.arena.has_lent.store(true, Ordering::Relaxed);
    lender.take(request, place.block)
}

/// The blocks of an index that are considered for a request: the first one that is large enough,
/// and the next ones by size.
fn candidates<'a>(index: IndexView<'a>, request: &Request) -> impl Iterator<Item = Key> + 'a {
    index.iter_from_best_fit(request.size).take(CANDIDATES)
}

/// The better of two blocks, if there is any: the smaller one, and of equally large ones that at
/// the lower address.
fn better(one: Option<(Key, Place)>, other: Option<(Key, Place)>) -> Option<(Key, Place)> {
    match (one, other) {
        (Some(one), Some(other)) => Some(if one.0 < other.0 { one } else { other }),
        (one, other) => one.or(other),
    }
}

/// The latest tick of each stream, by ascending stream.
#[derive(Debug, Default)]
struct Latest(Vec<(u32, u64)>);

impl Latest {
    /// Notes a tick, unless it is 0, which means none.
    fn raise(&mut self, slot: u32, after: u64) {
        if after == 0 {
            return;
        }
        match self.0.binary_search_by_key(&slot, |&(other, _)| other) {
            Ok(at) => self.0[at].1 = self.0[at].1.max(after),
            Err(at) => self.0.insert(at, (slot, after)),
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;
    use crate::heap::BlockId;

    #[test]
    fn streams_that_borrow_often_get_a_granule_whatever_its_size() {
        for granule in [2, 16, 32, 64].map(|mib: u64| mib << 20) {
            let device = Device::new(SimDriver::new(SimConfig::new(4 << 30)));
            let config = Config { granule: Some(granule), ..Config::default() };
            let allocator = Allocator::new(&device, config).unwrap();
            let streams = [(); 4].map(|()| device.stream().unwrap());
            let _kept = allocator.alloc_bytes(1 << 20, &streams[0]).unwrap();
            for _ in 0..100 {
                for stream in &streams {
                    drop(allocator.alloc_bytes(1 << 20, stream).unwrap());
                }
            }
            let reserved = allocator.memory_reserved();
            assert!(reserved >= 2 * granule, "{reserved} bytes in granules of {granule}");
        }
    }

    /// How often streams borrow from each other if two of them take turns, after one of them
    /// allocated so often by itself.
    fn loans(allocator: &Allocator, before: u32) -> u64 {
        let loans = allocator.stats().cross_stream_reuses;
        let streams = [(); 2].map(|()| allocator.device().stream().unwrap());
        let _kept = allocator.alloc_bytes(1 << 20, &streams[0]).unwrap();
        (0..before).for_each(|_| drop(allocator.alloc_bytes(1 << 20, &streams[0]).unwrap()));
        for _ in 0..500 {
            streams.iter().for_each(|stream| drop(allocator.alloc_bytes(1 << 20, stream).unwrap()));
        }
        allocator.stats().cross_stream_reuses - loans
    }

    fn allocator() -> Allocator {
        Allocator::new(&Device::new(SimDriver::new(SimConfig::new(4 << 30))), Config::default()).unwrap()
    }

    #[test]
    fn a_stream_that_comes_late_borrows_no_longer_than_others() {
        let (early, late) = (loans(&allocator(), 0), loans(&allocator(), 100_000));
        assert!(early > 0 && late <= 2 * early, "{late} loans instead of {early}");
    }

    #[test]
    fn memory_that_went_back_belongs_to_no_stream() {
        let allocator = allocator();
        let rounds: Vec<u64> = (0..40)
            .map(|_| {
                let loans = loans(&allocator, 0);
                allocator.empty_cache().unwrap();
                assert_eq!(allocator.memory_reserved(), 0);
                loans
            })
            .collect();
        assert!(rounds.iter().all(|&loans| loans <= 2 * rounds[1] + 20), "{rounds:?}");
    }

    #[test]
    fn the_latest_tick_of_each_stream_counts() {
        let mut latest = Latest::default();
        for (slot, after) in [(7, 2), (3, 5), (7, 9), (4, 0), (3, 1)] {
            latest.raise(slot, after);
        }
        assert_eq!(latest.0, [(3, 5), (7, 9)]);
    }

    #[test]
    fn the_smaller_block_is_better_and_any_is_better_than_none() {
        let at = |size, addr| Some((Key::new(size, addr, BlockId(0)), Place { arena: 0, block: BlockId(0) }));
        assert_eq!(better(at(1024, 0), at(512, 4096)), at(512, 4096));
        assert_eq!(better(at(512, 0), at(512, 4096)), at(512, 0));
        assert_eq!((better(None, at(512, 0)), better(at(512, 0), None)), (at(512, 0), at(512, 0)));
        assert_eq!(better(None, None), None);
    }
}
