//! Measures of fragmentation.

use std::fmt;

use crate::allocator::Allocator;
use crate::format::Bytes;
use crate::heap::{Block, BlockId, Heap, State, kind_of};
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;

const LARGE_POOL: u16 = 1;

/// The share of free memory that a request of `size` bytes cannot use: 0 when every free block would serve it, 1 when none
/// would or nothing is free.
///
/// Source: the *unusable free space index*, M. Gorman and A. Whitcroft, "The What, The Why and the Where To of
/// Anti-Fragmentation", Ottawa Linux Symposium 2006; here for any size instead of powers of two.
#[expect(clippy::cast_precision_loss, reason = "a ratio")]
pub fn unusable_index(free_blocks: impl Iterator<Item = u64>, size: u64) -> f64 {
    let (free, usable) = free_blocks
        .fold((0, 0), |(free, usable), block| (free + block, usable + if block >= size { block } else { 0 }));
    if free == 0 { 1.0 } else { (free - usable) as f64 / free as f64 }
}

/// How fragmented an allocator's memory is, as of one moment. Sizes are bytes.
///
/// Free blocks count whoever owns them, and private pools' memory with the pool of its kind: it may take more than room to
/// serve a request.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Fragmentation {
    /// The size that [`Fragmentation::unusable`] is for: the request after rounding.
    pub request_bytes: u64,
    /// Number of segments, or contiguous ranges of mapped memory.
    pub segments: u64,
    /// Bytes held from the device: these segments, and what is spare.
    pub reserved_bytes: u64,
    /// Bytes held from the device that are not mapped for use; they count for the large pool.
    pub spare_bytes: u64,
    /// Bytes of addresses that are reserved for memory to be mapped at, whether any is or not.
    pub address_bytes: u64,
    /// Number of contiguous ranges of such addresses without memory.
    pub address_holes: u64,
    /// The longest of them: a request that it does not hold needs addresses elsewhere.
    pub largest_address_hole: u64,
    /// Segments, or mapped ranges, that are wholly free.
    pub releasable_segments: u64,
    /// Bytes that can go back to the device: those of wholly free segments, and granules that lie in free blocks.
    pub releasable_bytes: u64,
    /// Bytes in live blocks.
    pub allocated_bytes: u64,
    /// The part of them that nobody asked for: rounding, and blocks that were not split.
    pub internal_waste: u64,
    /// Bytes given back that other streams still use.
    pub waiting_bytes: u64,
    /// Number of free blocks.
    pub free_blocks: u64,
    /// Bytes in free blocks.
    pub free_bytes: u64,
    /// The largest free block.
    pub largest_free_block: u64,
    /// External fragmentation: the share of free bytes outside the largest free block, 0 to 1; 0 when nothing is free.
    pub external: f64,
    /// The share of free bytes that the request cannot use, 0 to 1: [`unusable_index`].
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
    /// Their bytes.
    pub bytes: u64,
}

impl Allocator {
    /// How fragmented the memory of all pools is, and how much of it a request of `request_bytes` cannot use.
    ///
    /// Costs a pass over all blocks under the heap's lock.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let small = allocator.alloc(600, device.default_stream())?;
    /// let fragmentation = allocator.fragmentation(4 << 20);
    /// assert_eq!(fragmentation.internal_waste, 1024 - 600);
    /// assert_eq!(fragmentation.largest_free_block, (2 << 20) - 1024);
    /// assert_eq!((fragmentation.external, fragmentation.unusable), (0.0, 1.0));
    /// println!("{fragmentation}");
    /// # drop(small);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn fragmentation(&self, request_bytes: u64) -> Fragmentation {
        self.measure(request_bytes, |_| true)
    }

    /// As [`Allocator::fragmentation`], for the pools of one kind.
    pub fn fragmentation_in(&self, kind: PoolKind, request_bytes: u64) -> Fragmentation {
        self.measure(request_bytes, |other| other == kind)
    }

    fn measure(&self, request_bytes: u64, counts: impl Fn(PoolKind) -> bool) -> Fragmentation {
        let request_bytes = self.classes().round_checked(request_bytes).unwrap_or(u64::MAX);
        self.shell().whole().fragmentation(request_bytes, counts)
    }
}

impl Whole {
    fn fragmentation(&self, request_bytes: u64, counts: impl Fn(PoolKind) -> bool) -> Fragmentation {
        let mut found = Fragmentation { request_bytes, ..Fragmentation::default() };
        let counts = |pool: u16| counts(kind_of(pool));
        for heap in self.heaps() {
            for (_, bytes) in
                heap.regions().filter(|region| counts(region.pool)).flat_map(|region| heap.mapped_ranges(region))
            {
                found.segments += 1;
                found.reserved_bytes += bytes;
            }
            let paged = heap.regions().filter(|region| region.is_paged() && counts(region.pool));
            found.address_bytes += paged.map(|region| region.bytes).sum::<u64>();
            for (_, hole) in heap.holes().filter(|(_, hole)| counts(hole.pool)) {
                found.address_holes += 1;
                found.largest_address_hole = found.largest_address_hole.max(hole.size);
            }
        }
        if let Some(paged) = self.paged.as_ref().filter(|_| counts(LARGE_POOL)) {
            found.spare_bytes = paged.spare_bytes();
            found.reserved_bytes += found.spare_bytes;
        }
        let mut sizes = [FreeSizes::default(); 64];
        let mut usable = 0;
        let blocks = self.heaps().flat_map(|heap| heap.blocks.iter().map(move |(_, block)| (heap, block)));
        for (heap, block) in blocks.filter(|(_, block)| counts(block.pool)) {
            match block.state {
                State::Live => {
                    found.allocated_bytes += block.size;
                    found.internal_waste += block.size.saturating_sub(block.requested);
                }
                State::Waiting => found.waiting_bytes += block.size,
                State::Free => {
                    found.free_blocks += 1;
                    found.free_bytes += block.size;
                    found.largest_free_block = found.largest_free_block.max(block.size);
                    usable += if block.size >= request_bytes { block.size } else { 0 };
                    let (whole, bytes) = self.releasable_part(heap, block);
                    found.releasable_segments += u64::from(whole);
                    found.releasable_bytes += bytes;
                    let log2 = block.size.max(1).ilog2();
                    let range = &mut sizes[log2 as usize];
                    (range.at_least, range.count, range.bytes) = (1 << log2, range.count + 1, range.bytes + block.size);
                }
                State::Vacant | State::Hole | State::Held | State::Filling => {}
            }
        }
        found.free_sizes = sizes.into_iter().filter(|range| range.count > 0).collect();
        found.external =
            if found.free_bytes == 0 { 0.0 } else { 1.0 - ratio(found.largest_free_block, found.free_bytes) };
        found.unusable = if found.free_bytes == 0 { 1.0 } else { 1.0 - ratio(usable, found.free_bytes) };
        found
    }
}

impl Whole {
    /// Whether a free block is all of its segment or mapped range, and how many of its bytes can go back to the device.
    fn releasable_part(&self, heap: &Heap, block: &Block) -> (bool, u64) {
        match &self.paged {
            Some(paged) if heap.region(block.region).is_paged() => {
                let has_memory = |id: BlockId| id.some().is_some_and(|id| heap.blocks[id].state.has_memory());
                let end = (block.addr + block.size) / paged.granule;
                let granules = end.saturating_sub(block.addr.div_ceil(paged.granule));
                (!has_memory(block.prev) && !has_memory(block.next), granules * paged.granule)
            }
            _ if block.is_split() => (false, 0),
            _ => (true, block.size),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}

impl fmt::Display for Fragmentation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "reserved:  {} in {} segments", Bytes(self.reserved_bytes), self.segments)?;
        writeln!(f, "           {} in {} of them wholly free", Bytes(self.releasable_bytes), self.releasable_segments)?;
        writeln!(f, "allocated: {}, {} of it waste", Bytes(self.allocated_bytes), Bytes(self.internal_waste))?;
        writeln!(f, "waiting:   {}", Bytes(self.waiting_bytes))?;
        writeln!(
            f,
            "free:      {} in {} blocks, the largest {}",
            Bytes(self.free_bytes),
            self.free_blocks,
            Bytes(self.largest_free_block)
        )?;
        let (external, unusable) = (self.external * 100.0, self.unusable * 100.0);
        write!(
            f,
            "           {external:.1} % outside the largest, {unusable:.1} % unusable for {}",
            Bytes(self.request_bytes)
        )?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unusable_index_is_the_share_of_blocks_too_small() {
        assert!((unusable_index([1, 2, 5].into_iter(), 2) - 0.125).abs() < f64::EPSILON);
        assert!((unusable_index([1, 2, 5].into_iter(), 6) - 1.0).abs() < f64::EPSILON);
        assert!(unusable_index([1, 2, 5].into_iter(), 0).abs() < f64::EPSILON);
        assert!((unusable_index([].into_iter(), 0) - 1.0).abs() < f64::EPSILON);
    }
}
