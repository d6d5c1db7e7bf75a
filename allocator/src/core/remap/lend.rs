//! Memory of idle graphs that is lent: it leaves its addresses, which become holes, and is brought
//! back behind them before a launch.
//!
//! Invariants: no launch begins while addresses of its pool are listed as lent; they are listed
//! before their memory goes, and until it is back. While a pool is *busy*, nothing of it is lent: a
//! thread is about to launch one of its graphs, or to capture one.

use std::ops::Range;

use crate::core::Core;
use crate::core::heap::State;
use crate::core::paged::layout::FrameSizes;
use crate::core::pools::{PoolKey, Private, Which};
use crate::core::remap::donors::Donor;
use crate::core::remap::plan::{Remap, Sources, Target, Work};
use crate::core::sleep::{outside, united, within};
use crate::types::{BlockId, PoolId, Recipient};

/// What a pool has lent.
#[derive(Debug)]
pub(crate) enum LentMemory {
    /// Nothing, or all of it is back.
    Nothing,
    /// Other threads change mappings there, or the driver refused to take one back.
    Changing,
    /// Holes of one region, with what they are parts of, from the high end down.
    Holes { of: Recipient, holes: Vec<(BlockId, Range<u64>)> },
}

impl Core {
    /// Notes that a thread is about to launch a graph of a pool, or to capture one into it. Returns
    /// the bytes that the pool has lent.
    pub(crate) fn begin_busy(&mut self, key: PoolKey) -> u64 {
        let Some(private) = self.pools.find_mut(key) else { return 0 };
        private.busy += 1;
        if !private.graphs.any() {
            private.lent.clear();
        }
        private.lent_bytes()
    }

    /// Ends [`Core::begin_busy`].
    pub(crate) fn end_busy(&mut self, key: PoolKey) {
        if let Some(private) = self.pools.find_mut(key) {
            private.busy -= 1;
        }
    }

    /// Bytes that a pool has lent.
    pub(crate) fn lent_by(&self, key: PoolKey) -> u64 {
        self.pools.find(key).map_or(0, Private::lent_bytes)
    }

    /// Bytes that all pools have lent and launches will bring back.
    pub(crate) fn lent(&self) -> u64 {
        self.pools.iter().filter(|private| private.graphs.any()).map(Private::lent_bytes).sum()
    }

    /// Plans to take frames of about `bytes` from the free memory of idle graphs. `None` if none
    /// may go.
    pub(crate) fn plan_lending(&mut self, bytes: u64) -> Option<Remap> {
        let paged = &self.paged;
        let granule = paged.granule;
        let shared: u64 = paged.old_mappings.iter().map(|one| (one.window.end - one.window.start) / granule).sum();
        let wanted = bytes.div_ceil(granule);
        let mut donors = self.donors(wanted.saturating_add(shared), None, Which::OfIdleGraphs);
        // What graphs have at several addresses stays.
        if shared > 0 {
            donors.chosen.retain(|donor| !self.paged.has_old_mapping(&range_of(donor)));
            donors.granules = donors.chosen.iter().map(|donor| donor.bytes / granule).sum();
        }
        donors.truncate(wanted, granule);
        if donors.chosen.is_empty() {
            return None;
        }
        let donors = self.hold_all(donors.into_joined());
        for donor in &donors {
            let pool = self.heap.block(donor.block).pool;
            let Some(private) = self.pools.owner_mut(pool) else { continue };
            let lent = std::mem::take(&mut private.lent).into_iter().chain([range_of(donor)]);
            private.lent = united(lent.collect());
        }
        let work = Work { sizes: FrameSizes::GRANULE, ..Work::default() };
        Some(self.begin(Remap::new(Target::Spares, Recipient::default(), donors, 0, work)))
    }

    /// Accounts for what was lent: the memory of the first `unmapped` donors. The others have
    /// theirs still.
    pub(super) fn commit_lent(&mut self, donors: &[Donor], unmapped: usize) {
        let (gone, mut kept) = donors.split_at(unmapped);
        self.counters.events.graph_bytes_lent += gone.iter().map(|donor| donor.bytes).sum::<u64>();
        if kept.is_empty() {
            return;
        }
        let kept = united(std::mem::take(&mut kept).iter().map(range_of).collect());
        for private in self.pools.iter_mut() {
            private.lent = private.lent.iter().flat_map(|range| outside(range, &kept)).collect();
        }
    }

    /// Looks at what a pool has lent, region by region, and forgets what has memory again, or whose
    /// addresses are gone.
    pub(crate) fn lent_memory(&mut self, key: PoolKey) -> LentMemory {
        let Some(private) = self.pools.find(key).filter(|private| !private.lent.is_empty()) else {
            return LentMemory::Nothing;
        };
        let (mut lacking, mut first, mut changes) = (Vec::new(), None, false);
        for region in self.heap.regions().filter(|region| private.owns(region.pool)) {
            let mut holes = Vec::new();
            for (id, block) in self.heap.blocks_of(region) {
                if block.state.has_memory() && block.state != State::Held {
                    continue;
                }
                let parts = within(&private.lent, &block.range());
                lacking.extend(parts.iter().cloned());
                match block.state {
                    State::Hole => holes.extend(parts.into_iter().map(|part| (id, part))),
                    _ => changes |= !parts.is_empty(),
                }
            }
            if first.is_none() && !holes.is_empty() {
                holes.reverse();
                first = Some((Recipient { pool: region.pool, stream: region.stream }, holes));
            }
        }
        if let Some(private) = self.pools.find_mut(key) {
            private.lent = united(lacking);
        }
        match first {
            Some((of, holes)) => LentMemory::Holes { of, holes },
            None if changes => LentMemory::Changing,
            None => LentMemory::Nothing,
        }
    }

    /// Plans to map memory at lent addresses of one region.
    pub(crate) fn plan_bringing_back(
        &mut self,
        of: Recipient,
        holes: &[(BlockId, Range<u64>)],
        from: Sources,
    ) -> Remap {
        let (mut pieces, mut fill) = (Vec::new(), Vec::new());
        // The rest of the hole that the last part was cut from.
        let mut below: Option<(BlockId, Option<BlockId>)> = None;
        for (hole, range) in holes {
            let left = below.filter(|(last, _)| last == hole).and_then(|(_, left)| left);
            let holding = self.heap.hold(left.unwrap_or(*hole), range.start, range.end);
            below = Some((*hole, holding.below));
            pieces.push(holding.id);
            fill.push(range.clone());
        }
        let donors = self.hold_all(from.donors.into_joined());
        let target = Target::Window { pieces, peak: 0, earns: false };
        // As small as they can be, because memory is scarce where some was lent.
        let work = Work { create: from.create, sizes: FrameSizes::SMALL, fill, ..Work::default() };
        self.begin(Remap::new(target, of, donors, from.spares, work))
    }

    /// Forgets what was lent within an address range that goes.
    pub(super) fn forget_lent(&mut self, pool: PoolId, range: &Range<u64>) {
        let Some(private) = self.pools.owner_mut(pool) else { return };
        private.lent = private.lent.iter().flat_map(|lent| outside(lent, std::slice::from_ref(range))).collect();
    }

    /// True if graphs need addresses within a range although nothing is mapped there now.
    pub(super) fn keeps_lent(&self, pool: PoolId, range: &Range<u64>) -> bool {
        let owner = self.pools.owner_of(pool).filter(|private| private.keeps_for_graphs(pool));
        owner.is_some_and(|private| !within(&private.lent, range).is_empty())
    }
}

fn range_of(donor: &Donor) -> Range<u64> {
    donor.addr..donor.addr + donor.bytes
}
