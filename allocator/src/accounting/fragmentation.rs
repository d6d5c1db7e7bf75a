//! Measures of fragmentation.

use std::collections::BTreeMap;
use std::fmt;

use crate::allocator::Allocator;
use crate::core::Core;
use crate::core::heap::{Block, Passed, Region, State};
use crate::format::Bytes;
use crate::size_class;
use crate::types::BlockId;

/// How fragmented an allocator's memory is. Sizes are bytes.
///
/// Free blocks count regardless of the stream that owns them, and memory of private pools counts
/// with the pool of its kind. So a request may fail although there is room. Growable and exportable
/// memory counts as segments of the large pool; memory that it gave up and that was not recycled
/// yet counts as free. While the allocator sleeps, blocks and segments are those that will be there
/// after waking up, and less memory is held.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Fragmentation {
    /// The size that [`Fragmentation::unusable`] is for: the request after rounding.
    pub request_bytes: u64,
    /// Number of segments, or contiguous ranges of mapped memory.
    pub segments: u64,
    /// Bytes held from the device now: in these segments, and spare.
    pub reserved_bytes: u64,
    /// Bytes held from the device that are not mapped for use; they count for the large pool.
    pub spare_bytes: u64,
    /// Bytes of addresses reserved for mapping memory, whether memory is mapped there or not.
    pub address_bytes: u64,
    /// Number of contiguous ranges of such addresses without memory where memory may be mapped for
    /// blocks.
    pub address_holes: u64,
    /// Bytes of the longest of these ranges. A longer request needs addresses elsewhere.
    pub largest_address_hole: u64,
    /// Segments, or mapped ranges, that are wholly free and not pinned.
    pub releasable_segments: u64,
    /// Bytes that can go back to the device: wholly free segments, and granules in free blocks,
    /// except pinned ones.
    pub releasable_bytes: u64,
    /// Bytes in live blocks.
    pub allocated_bytes: u64,
    /// The part of them that was not requested: rounding, and blocks that were not split.
    pub internal_waste: u64,
    /// Bytes of waiting blocks: freed, but other streams still use them.
    pub waiting_bytes: u64,
    /// Number of free blocks.
    pub free_blocks: u64,
    /// Bytes in free blocks.
    pub free_bytes: u64,
    /// Bytes of the largest free block.
    pub largest_free_block: u64,
    /// External fragmentation: the share of free bytes outside the largest free block, 0 to 1; 0
    /// when nothing is free.
    pub external: f64,
    /// The share of free bytes that the request cannot use, 0 to 1: those in blocks smaller than
    /// it. 1 if nothing is free.
    pub unusable: f64,
    /// Free blocks by power of two, smallest first; sizes without a block are left out.
    pub free_sizes: Vec<FreeSizes>,
}

/// Free blocks of one size range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FreeSizes {
    /// The smallest size of the range, a power of two; the next one is the first beyond it.
    pub at_least: u64,
    /// Number of blocks.
    pub count: u64,
    /// Bytes of these blocks.
    pub bytes: u64,
}

/// Adds what is not in heaps, and how much of mapped memory is held.
fn add_shared(core: &Core, found: &mut Fragmentation, free: &mut Free) {
    let paged = core.paged();
    found.address_bytes += paged.dedicated_address_bytes();
    found.spare_bytes = paged.spare_bytes();
    found.reserved_bytes += paged.mapped_bytes.iter().sum::<u64>() + found.spare_bytes;
    for (range, owned) in paged.dedicated() {
        found.segments += 1;
        found.allocated_bytes += owned.size;
        found.internal_waste += owned.size.saturating_sub(owned.requested);
        let given_up = range.end - range.start - owned.size;
        if given_up > 0 {
            free.add(given_up, &Releasable { whole: owned.size == 0, bytes: given_up, pinned: 0 });
        }
    }
}

/// Adds a block, and with the first one of a region what depends on the region.
fn add_block(core: &Core, found: &mut Fragmentation, free: &mut Free, passed: &Passed) {
    let block = &passed.block;
    if passed.is_first {
        let region = core.heap().region(block.region);
        let bytes = if region.is_paged() { &mut found.address_bytes } else { &mut found.reserved_bytes };
        *bytes += region.bytes;
    }
    found.segments += u64::from(passed.begins_range);
    match block.state {
        State::Live => {
            found.allocated_bytes += block.size;
            found.internal_waste += block.size.saturating_sub(block.requested);
        }
        State::Waiting => found.waiting_bytes += block.size,
        State::Free | State::Quarantined => free.add(block.size, &releasable_part(core, block)),
        State::Hole => {
            found.address_holes += 1;
            found.largest_address_hole = found.largest_address_hole.max(block.size);
        }
        State::Vacant | State::Held | State::Filling => {}
    }
}

/// Sums over free blocks.
#[derive(Default)]
struct Free {
    request_bytes: u64,
    sizes: BTreeMap<u32, FreeSizes>,
    largest: u64,
    /// Bytes in blocks that the request fits.
    usable: u64,
    releasable_segments: u64,
    releasable_bytes: u64,
}

impl Free {
    fn add(&mut self, size: u64, releasable: &Releasable) {
        self.largest = self.largest.max(size);
        self.usable += if size >= self.request_bytes { size } else { 0 };
        self.releasable_segments += u64::from(releasable.whole && releasable.pinned == 0);
        self.releasable_bytes += releasable.bytes;
        let log2 = size.max(1).ilog2();
        let range = self.sizes.entry(log2).or_default();
        (range.at_least, range.count, range.bytes) = (1 << log2, range.count + 1, range.bytes + size);
    }

    fn tell(self, found: &mut Fragmentation) {
        found.free_sizes = self.sizes.into_values().collect();
        found.free_blocks = found.free_sizes.iter().map(|range| range.count).sum();
        found.free_bytes = found.free_sizes.iter().map(|range| range.bytes).sum();
        found.largest_free_block = self.largest;
        (found.releasable_segments, found.releasable_bytes) = (self.releasable_segments, self.releasable_bytes);
        let free = found.free_bytes;
        found.external = if free == 0 { 0.0 } else { 1.0 - ratio(self.largest, free) };
        found.unusable = if free == 0 { 1.0 } else { 1.0 - ratio(self.usable, free) };
    }
}

/// The part of a free block that could go back to the device.
pub(crate) struct Releasable {
    /// True if the block is all of its segment or mapped range.
    whole: bool,
    /// Bytes that can go back.
    pub(crate) bytes: u64,
    /// Bytes that could go back if they were not pinned.
    pub(crate) pinned: u64,
}

pub(crate) fn releasable_part(core: &Core, block: &Block) -> Releasable {
    let heap = &core.heap();
    let region = heap.region(block.region);
    if !region.is_paged() {
        let whole = !block.is_split();
        let (bytes, pinned) = match (whole, core.pins.contains(block.addr)) {
            (false, _) => (0, 0),
            (true, false) => (block.size, 0),
            (true, true) => (0, block.size),
        };
        return Releasable { whole, bytes, pinned };
    }
    let has_memory = |id: BlockId| id.some().is_some_and(|id| heap.block(id).state.has_memory());
    let whole = !has_memory(block.prev) && !has_memory(block.next);
    let range = core.paged().whole_frames(region.addr, &block.range()).range();
    let pinned = core.paged().pinned_bytes(&core.pins, range.clone());
    Releasable { whole, bytes: range.end - range.start - pinned, pinned }
}

/// Bytes that a region holds from the device now.
pub(crate) fn held_in(core: &Core, region: &Region) -> u64 {
    if !region.is_paged() {
        return region.bytes;
    }
    let paged = core.paged();
    let range = region.addr..region.addr + region.bytes;
    let mapped: u64 = paged.mapped_within(&range).iter().map(|range| range.end - range.start).sum();
    // Stuck frames count as spare.
    let stuck = paged.stuck.iter().flat_map(|stuck| &stuck.frames).filter(|frame| range.contains(&frame.start));
    mapped - stuck.map(|frame| frame.end - frame.start).sum::<u64>()
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

impl fmt::Display for Fragmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (segments, free) = (self.segments, self.releasable_segments);
        writeln!(f, "reserved:  {} in {segments} segments, {free} of them wholly free", Bytes(self.reserved_bytes))?;
        writeln!(f, "           {} of it can go back to the device", Bytes(self.releasable_bytes))?;
        writeln!(f, "allocated: {}, {} of it waste", Bytes(self.allocated_bytes), Bytes(self.internal_waste))?;
        writeln!(f, "waiting:   {}", Bytes(self.waiting_bytes))?;
        let (free, largest) = (Bytes(self.free_bytes), Bytes(self.largest_free_block));
        writeln!(f, "free:      {free} in {} blocks, the largest {largest}", self.free_blocks)?;
        let (external, unusable) = (self.external * 100.0, self.unusable * 100.0);
        let request = Bytes(self.request_bytes);
        write!(f, "           {external:.1} % outside the largest, {unusable:.1} % unusable for {request}")?;
        if self.address_bytes > 0 {
            let (holes, largest) = (self.address_holes, Bytes(self.largest_address_hole));
            let all = Bytes(self.address_bytes);
            write!(f, "\naddresses: {all}, without memory in {holes} holes, the largest {largest}")?;
        }
        for FreeSizes { at_least, count, bytes } in &self.free_sizes {
            write!(f, "\n  from {:>10}: {count:>7} blocks, {:>10}", Bytes(*at_least), Bytes(*bytes))?;
        }
        Ok(())
    }
}

impl Allocator {
    /// How fragmented the memory of all pools is, and how much of it a request of `request_bytes`
    /// cannot use.
    ///
    /// Costs a pass over all blocks. Locks are held for some of them at a time: while other threads
    /// allocate, each block counts as it was at some moment of the call, and no byte of memory in
    /// blocks counts twice.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::of(&device)?;
    /// let small = memory.alloc_bytes(600, device.default_stream())?;
    /// let fragmentation = memory.fragmentation(4 << 20);
    /// assert_eq!(fragmentation.internal_waste, 1024 - 600);
    /// assert_eq!(fragmentation.largest_free_block, (2 << 20) - 1024);
    /// assert_eq!((fragmentation.external, fragmentation.unusable), (0.0, 1.0));
    /// println!("{fragmentation}");
    /// # drop(small);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn fragmentation(&self, request_bytes: u64) -> Fragmentation {
        let request_bytes = size_class::round_checked(request_bytes).unwrap_or(u64::MAX);
        let mut found = Fragmentation { request_bytes, ..Fragmentation::default() };
        let mut free = Free { request_bytes, ..Free::default() };
        let shared = self.state().shared();
        add_shared(&shared, &mut found, &mut free);
        let is_asleep = shared.is_asleep();
        drop(shared);
        self.state().walk(|shared, passed| add_block(shared, &mut found, &mut free, passed));
        free.tell(&mut found);
        if is_asleep {
            (found.releasable_segments, found.releasable_bytes) = (0, 0);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::allocation::Allocation;
    use crate::config::Config;

    /// Ends the work of other threads when it is dropped, also by a panic.
    struct Ends<'a>(&'a AtomicBool);

    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Relaxed);
        }
    }

    /// What is read while other threads allocate and free adds up, although no two blocks need be
    /// as of the same moment.
    #[test]
    fn reports_add_up_while_other_threads_work() {
        for options in ["", "backing:segments"] {
            let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
            let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
            let streams = [(); 5].map(|()| device.stream().unwrap());
            // Enough memory of their own for all streams at once, so that none grows later or takes
            // another's.
            let own = |n: u64| move |i: u64| 512 * (1 + (i * 7919 + n) % 60);
            let warm = streams.iter().map(|stream| {
                let small: Vec<_> = (0..200).map(|i| allocator.alloc_bytes(own(0)(i), stream).unwrap()).collect();
                (small, allocator.alloc_bytes(40 << 20, stream).unwrap())
            });
            drop(warm.collect::<Vec<_>>());
            let kept: Vec<_> = streams.iter().map(|stream| allocator.alloc_bytes(3 << 20, stream).unwrap()).collect();
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                for (n, stream) in (1..).zip(&streams[3..]) {
                    let (allocator, done) = (&allocator, &done);
                    scope.spawn(move || {
                        let (mut live, mut i) = (Vec::new(), 0);
                        while !done.load(Relaxed) {
                            i += 1;
                            std::thread::yield_now();
                            live.push(allocator.alloc_bytes(own(n)(i), stream).unwrap());
                            if live.len() > 50 + usize::try_from(i % 50).unwrap() {
                                let _freed = live.swap_remove(usize::try_from(i * 31).unwrap() % live.len());
                                live.truncate(60);
                            }
                        }
                    });
                }
                let _ends = Ends(&done);
                for _ in 0..10 {
                    let found = allocator.fragmentation(1 << 20);
                    let sum = found.allocated_bytes + found.free_bytes + found.waiting_bytes + found.spare_bytes;
                    assert_eq!(sum, found.reserved_bytes, "{found}");
                    assert!(
                        found.internal_waste <= found.allocated_bytes && found.largest_free_block <= found.free_bytes
                    );
                    let snapshot = allocator.snapshot();
                    for segment in &snapshot.segments {
                        let mut at = segment.address;
                        for block in &segment.blocks {
                            assert_eq!(block.address, at, "no gap, and no overlap");
                            at += block.size;
                        }
                        assert_eq!(at, segment.address + segment.total_size);
                    }
                }
                // From here on memory goes back to the device, and comes again.
                for _ in 0..10 {
                    let error = allocator.alloc_bytes(1 << 40, &streams[0]).unwrap_err();
                    let crate::AllocError::OutOfMemory(report) = error else { panic!("{error}") };
                    assert!(report.largest_free <= report.free_in_pool, "{report}");
                    assert!(report.free_in_pool <= device.info().total_bytes, "{report}");
                }
            });
            let live: u64 = kept.iter().map(Allocation::bytes).sum();
            assert_eq!(allocator.fragmentation(0).allocated_bytes, live);
        }
    }
}
