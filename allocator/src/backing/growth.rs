//! How much a request takes from the device, and how much may be taken: what the limit allows, what
//! must stay free there for libraries (`headroom_mb`), and what is a share of what is free there
//! now (`limit_free_fraction`).
//!
//! The driver says how much is free, but must not be asked under a lock, and meanwhile other
//! threads take memory, too. So before asking, a thread notes how much is about to be taken by
//! whom. Afterwards, under the lock, it counts all of that, and what others began to take since, as
//! if the driver's answer did not include it. This may count too much, never too little; a thread
//! that is refused because of it asks again.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::allocator::Allocator;
use crate::config::SplitFrames;
use crate::core::Core;
use crate::core::heap::{Passed, State};
use crate::core::limits::{Growing, Holding, Refusal};
use crate::core::pools::Which;
use crate::error::AllocError;
use crate::size_class;
use crate::types::{Granted, Request};

/// The memory of the device that could be taken when the driver was asked, and the bytes that other
/// threads were about to take before that question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// `None` where all that is free may be taken.
    free: Option<u64>,
    /// What refuses more.
    refusal: Refusal,
    growing: Growing,
}

impl Room {
    /// Bytes that others took, or are about to take. The answer may include them or not.
    fn taken_meanwhile(&self, core: &Core) -> u64 {
        self.growing.now.saturating_add(core.growing().begun.wrapping_sub(self.growing.begun))
    }

    fn left(&self, core: &Core) -> u64 {
        self.free.map_or(u64::MAX, |free| free.saturating_sub(self.taken_meanwhile(core)))
    }

    /// True if a request that was refused may be served once other threads are done: this count
    /// includes memory taken meanwhile, and the limit includes what is about to be taken, which may
    /// fail, and what is on its way back.
    pub(crate) fn is_uncertain(&self, core: &Core, refusal: Refusal) -> bool {
        let is_old = self.free.is_some() && self.refusal == refusal && self.taken_meanwhile(core) > 0;
        is_old || (refusal == Refusal::Limit && core.held_at_most() > core.reserved())
    }
}

/// Asks the driver, where there is a headroom or the limit is a share of what is free.
pub(crate) fn room(allocator: &Allocator) -> Result<Room, AllocError> {
    let (headroom, limit_free_fraction) = (allocator.headroom(), allocator.config().limit_free_fraction);
    let Holding { bytes: held, growing } = allocator.state().shared().holding();
    if headroom == 0 && limit_free_fraction.is_none() {
        return Ok(Room { free: None, refusal: Refusal::Headroom, growing });
    }
    let free = allocator.device().memory_info()?.free;
    let beyond_headroom = if headroom == 0 { u64::MAX } else { free.saturating_sub(headroom) };
    // Memory that went back meanwhile counts in both, which gives too little.
    let below_limit = allocator.limit_free(free.saturating_add(held)).saturating_sub(held);
    let refusal = if below_limit < beyond_headroom { Refusal::Limit } else { Refusal::Headroom };
    Ok(Room { free: Some(beyond_headroom.min(below_limit)), refusal, growing })
}

/// Bytes that may still be taken from the device, and what would refuse more. To be asked under the
/// lock under which `growing` is raised, so that threads that grow together keep the limit and the
/// headroom.
pub(crate) fn buyable(allocator: &Allocator, core: &Core, room: &Room) -> (u64, Refusal) {
    let held = core.held_at_most();
    let by_limit = allocator.inner().limit.load(Ordering::Relaxed).saturating_sub(held);
    let by_room = room.left(core);
    if by_room < by_limit { (by_room, room.refusal) } else { (by_limit, Refusal::Limit) }
}

impl Allocator {
    /// Bytes that requests outside of private pools can still be granted, in all: what the device
    /// has free, within limit and headroom, and what is cached here. To size a cache that takes the
    /// rest of the memory, where CUDA's `cuMemGetInfo` would leave out the cached memory.
    ///
    /// Where memory is mapped, cached memory counts if it can move, so one request may have all of
    /// it, but for a granule; the rest of frames that are in use in part serves small requests in
    /// addition. In segments, no request is larger than the largest piece. While a stream captures,
    /// cached memory counts, and cannot move. Memory that idle graphs would lend does not count. 0
    /// while the allocator sleeps.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// drop(memory.alloc::<u8>(4 << 30, &stream)?); // stays cached
    /// let cache = memory.alloc::<u8>(memory.available()? as usize, &stream)?;
    /// assert_eq!(cache.bytes(), 24 << 30);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn available(&self) -> Result<u64, AllocError> {
        let free = self.device().memory_info()?.free.saturating_sub(self.headroom());
        let shared = self.state().lock();
        let allowed = self.limit().map_or(u64::MAX, |limit| limit.saturating_sub(shared.reserved()));
        if shared.is_asleep() {
            return Ok(0);
        }
        let mut available = free.min(allowed) + shared.paged().spare_bytes() + shared.paged().given_up_bytes();
        drop(shared);
        let splits = self.config().split_frames == SplitFrames::On;
        let mut run = FreeRun::default();
        self.state().walk(|core, Passed { block, .. }| {
            let is_among = |which| core.pools.is_among(block.pool, which);
            let is_unused = block.state.is_free() || block.state == State::Waiting;
            // Memory that sleeps has gone back.
            if !is_unused || core.sleeps(&block.range()) || !(is_among(Which::NotForGraphs) || is_among(Which::Idle)) {
                return;
            }
            let region = core.heap().region(block.region);
            if !region.is_paged() {
                available += block.size;
            } else if run.base == region.addr && run.range.end == block.addr {
                run.range.end += block.size;
            } else {
                available += run.movable_bytes(core, splits);
                run = FreeRun { base: region.addr, range: block.range() };
            }
        });
        Ok(available + run.movable_bytes(&self.state().shared(), splits))
    }
}

/// Blocks side by side that are free or waiting. They are merged once their streams are known to be
/// done.
#[derive(Default)]
struct FreeRun {
    /// The first address of their region.
    base: u64,
    range: Range<u64>,
}

impl FreeRun {
    /// Bytes that can serve a request elsewhere: whole frames, or, if these may be split, granules.
    fn movable_bytes(&self, core: &Core, splits: bool) -> u64 {
        if self.range.is_empty() {
            return 0;
        }
        let (paged, Range { start, end }) = (core.paged(), self.range.clone());
        let granules = start.next_multiple_of(paged.granule)..end / paged.granule * paged.granule;
        let range = if splits { granules } else { paged.whole_frames(self.base, &self.range).range() };
        if range.is_empty() { 0 } else { range.end - range.start - paged.pinned_bytes(&core.pins, range) }
    }
}

/// How an attempt to take memory from the device ended.
pub(crate) type Growth = Result<Granted, Refusal>;

/// Size of the segment for a request: its own size without caching, where nothing is shared.
pub(crate) fn segment_bytes(allocator: &Allocator, size: u64) -> u64 {
    if allocator.config().no_cache { size } else { size_class::segment_bytes(size) }
}

/// Bytes that the device must give for a request that nothing cached helps to serve.
pub(crate) fn growth_bytes(allocator: &Allocator, core: &Core, request: &Request) -> u64 {
    match core.paged_granule_for(request) {
        Some(granule) => request.size.next_multiple_of(granule),
        None => segment_bytes(allocator, request.size),
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::{Device, Operation};
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_share_of_what_is_free_follows_what_others_hold() {
        for options in ["limit_free_fraction:0.5", "limit_free_fraction:0.5,backing:segments"] {
            let sim = SimDriver::new(SimConfig::new(1024 * MIB).other_process_bytes(512 * MIB));
            let allocator = Allocator::new(&Device::new(sim.clone()), options).unwrap();
            let alloc = |mib: u64| allocator.alloc_bytes(mib * MIB, allocator.device().default_stream());
            let refusal = |mib| alloc(mib).unwrap_err().report().map(|report| (report.refusal, report.limit));
            assert_eq!(allocator.limit(), Some(256 * MIB));
            let first = alloc(200).unwrap();
            assert_eq!(refusal(100), Some((Some(Refusal::Limit), Some(256 * MIB))));
            sim.set_other_process_bytes(0);
            let second = alloc(300).unwrap();
            assert_eq!(allocator.limit(), Some(512 * MIB));
            sim.set_other_process_bytes(400 * MIB);
            assert_eq!(refusal(20), Some((Some(Refusal::Limit), Some(312 * MIB))));
            let asked = || allocator.device().driver_calls().of(Operation::MemoryInfo);
            let before = asked();
            drop(second);
            let cached = alloc(300).unwrap();
            assert_eq!(asked(), before, "a hit asks nothing");
            allocator.set_limit(Some(600 * MIB));
            let third = alloc(80).unwrap();
            assert_eq!(allocator.limit(), Some(600 * MIB), "a limit that was set replaces it");
            drop((first, cached, third));
        }
    }

    /// Frees most of the blocks of a program with several streams.
    fn fragmented(allocator: &Allocator, size: u64, kept: usize) -> Vec<crate::Allocation> {
        let device = allocator.device();
        let streams = [device.stream().unwrap(), device.stream().unwrap()];
        let count = usize::try_from(700 * MIB / size).unwrap();
        let mut blocks: Vec<_> =
            (0..count).map(|number| Some(allocator.alloc_bytes(size, &streams[number / 7 % 2]).unwrap())).collect();
        blocks.iter_mut().enumerate().filter(|(number, _)| number % kept > 0).for_each(|(_, block)| *block = None);
        blocks.into_iter().flatten().collect()
    }

    #[test]
    fn one_request_gets_all_that_is_available() {
        for options in ["", "limit_mb:900", "headroom_mb:100", "split_frames:on", "limit_free_fraction:0.8"] {
            for (size, kept) in [(MIB / 2, 16), (MIB, 16), (3 * MIB, 2), (5 * MIB, 4), (24 * MIB, 3)] {
                let sim = SimDriver::new(SimConfig::new(1024 * MIB));
                let allocator = Allocator::new(&Device::new(sim.clone()), options).unwrap();
                let stream = allocator.device().default_stream();
                let live = fragmented(&allocator, size, kept);
                let pool = allocator.create_pool(crate::PoolOptions::default()).unwrap();
                let of_pool = pool.alloc_bytes(20 * MIB, stream).unwrap();
                drop(pool.alloc_bytes(30 * MIB, stream).unwrap());
                let mut growable = allocator.growable(64 * MIB, stream).unwrap();
                growable.grow_to(40 * MIB, stream).unwrap();
                growable.shrink_to(10 * MIB, stream).unwrap();
                allocator.device().synchronize().unwrap();
                let available = allocator.available().unwrap();
                let all = allocator.alloc_bytes(available / (2 * MIB) * 2 * MIB, stream);
                assert!(all.is_ok(), "{options}, {size}: {available}, {}", all.unwrap_err());
                let left = allocator.available().unwrap();
                assert!(left < 2 * MIB, "{options}, {size}: {left} of {available}");
                assert!(allocator.alloc_bytes(32 * MIB, stream).is_err(), "{options}, {size}: {available}");
                drop((live, of_pool, growable));
            }
        }
    }

    #[test]
    fn what_is_free_in_segments_is_available() {
        let device = Device::new(SimDriver::new(SimConfig::new(1024 * MIB)));
        let allocator = Allocator::new(&device, "backing:segments,limit_mb:800").unwrap();
        let alloc = |mib: u64| allocator.alloc_bytes(mib * MIB, device.default_stream()).unwrap();
        let (live, freed) = (alloc(30), alloc(40));
        drop(freed);
        assert_eq!(allocator.available().unwrap(), (800 - 30) * MIB);
        drop((alloc(40), live));
    }

    #[test]
    fn nothing_is_available_while_the_allocator_sleeps() {
        let device = Device::new(SimDriver::new(SimConfig::new(1024 * MIB)));
        let allocator = Allocator::new(&device, "").unwrap();
        allocator.sleep(crate::Contents::Discard).unwrap();
        assert_eq!(allocator.available().unwrap(), 0);
        allocator.wake().unwrap();
        assert_eq!(allocator.available().unwrap(), 1024 * MIB);
    }
}
