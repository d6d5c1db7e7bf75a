//! Sums over a snapshot.

use aquifer_allocator::Snapshot;
use aquifer_allocator::size_class::PoolKind;
use aquifer_allocator::snapshot::{BlockState, Segment};

/// The current values of [`MemoryStats`](aquifer_allocator::MemoryStats), but summed up from a
/// snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Both pools together.
    pub(super) all: PoolTotals,
    /// Allocations above 1 MiB.
    pub(super) large_pool: PoolTotals,
    /// Allocations up to 1 MiB.
    pub(super) small_pool: PoolTotals,
}

/// Sums over the segments of one pool, or of both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PoolTotals {
    /// Number of segments.
    pub(super) segment: u64,
    /// Bytes of segments.
    pub(super) reserved_bytes: u64,
    /// Number of live blocks.
    pub(super) allocation: u64,
    /// Bytes in live blocks.
    pub(super) allocated_bytes: u64,
    /// Number of live blocks and of freed ones that other streams still use.
    pub(super) active: u64,
    /// Bytes in these blocks.
    pub(super) active_bytes: u64,
    /// Bytes requested for active blocks.
    pub(super) requested_bytes: u64,
    /// Number of inactive blocks that are not whole segments.
    pub(super) inactive_split: u64,
    /// Bytes in these blocks.
    pub(super) inactive_split_bytes: u64,
}

/// Sums over all segments, by pool. The statistics must agree with them, except that spare memory
/// is in no segment, and that they do not count `inactive_split`.
pub(super) fn totals(snapshot: &Snapshot) -> Totals {
    let mut totals = Totals::default();
    for segment in &snapshot.segments {
        let pool = match segment.segment_type {
            PoolKind::Small => &mut totals.small_pool,
            PoolKind::Large => &mut totals.large_pool,
        };
        pool.add(segment);
        totals.all.add(segment);
    }
    totals
}

impl PoolTotals {
    fn add(&mut self, segment: &Segment) {
        // As in PyTorch, mapped memory is in no segment, and its free pieces are not counted.
        let is_segment = !segment.is_expandable;
        self.segment += u64::from(is_segment);
        self.reserved_bytes += segment.total_size;
        for block in &segment.blocks {
            if block.state.is_active() {
                self.active += 1;
                self.active_bytes += block.size;
                self.requested_bytes += block.requested_size;
            } else if is_segment && block.size != segment.total_size {
                self.inactive_split += 1;
                self.inactive_split_bytes += block.size;
            }
            if block.state == BlockState::ActiveAllocated {
                self.allocation += 1;
                self.allocated_bytes += block.size;
            }
        }
    }
}
