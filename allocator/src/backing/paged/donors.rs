//! Donors: granules that may move, because they lie wholly in free blocks and their last use is done.
//!
//! Granules at the highest addresses are chosen first, so that memory in use gathers at low addresses, and steady programs find their
//! memory where they left it. Granules whose last use is not known done are counted by the tick that would let them move.

use std::collections::{BTreeMap, BinaryHeap};

use crate::backing::paged::apart::POOL;
use crate::backing::paged::window::Window;
use crate::heap::{BlockId, Heap};
use crate::pools::table::Private;
use crate::shell::arena::Guard;
use crate::shell::whole::Whole;

/// Contiguous granules of one free block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Donor {
    /// The stream in whose arena the block is.
    pub(crate) arena: u32,
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
}

/// Granules that may move, and granules that could once ticks are done.
#[derive(Debug, Default)]
pub(crate) struct Donors {
    /// The chosen granules, in each block from high addresses to low ones.
    pub(crate) chosen: Vec<Donor>,
    /// Number of chosen granules.
    pub(crate) granules: u64,
    /// Number of granules that are not known done, by stream and by the tick that its timeline must have reached.
    pub(crate) not_done: BTreeMap<(u32, u64), u64>,
}

impl Donors {
    /// Keeps the first `granules` chosen ones, which have `granule` bytes each.
    pub(crate) fn truncate(&mut self, granules: u64, granule: u64) {
        while self.granules > granules
            && let Some(last) = self.chosen.last_mut()
        {
            let surplus = ((self.granules - granules) * granule).min(last.bytes);
            // The low end was chosen last.
            last.addr += surplus;
            last.bytes -= surplus;
            self.granules -= surplus / granule;
            if last.bytes == 0 {
                self.chosen.pop();
            }
        }
    }
}

/// A free block that holds at least one granule. Ordered by address.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    addr: u64,
    arena: u32,
    block: BlockId,
}

impl Whole {
    /// Chooses up to `wanted` granules that may move, from pools for which `from` is true, outside the window.
    pub(crate) fn donors(&mut self, wanted: u64, window: Option<&Window>, from: impl Fn(u16) -> bool) -> Donors {
        let mut donors = Donors::default();
        if wanted == 0 {
            return donors;
        }
        self.arenas.iter_mut().for_each(Guard::note_recent_uses);
        let Some(paged) = &self.paged else { return donors };
        if from(POOL) {
            self.add_retired(&mut donors.not_done);
        }
        let window = window.map_or(0..0, |window| {
            let granule = paged.granule;
            window.start / granule * granule..window.end.next_multiple_of(granule)
        });
        let mut candidates = self.candidates(paged.granule, from);
        while let Some(candidate) = candidates.pop() {
            let heap = self.heap_of(candidate.arena);
            self.choose_in(heap, &candidate, wanted, &window, &mut donors);
            if donors.granules == wanted {
                break;
            }
        }
        donors
    }

    fn candidates(&self, granule: u64, from: impl Fn(u16) -> bool) -> BinaryHeap<Candidate> {
        let mut found = Vec::new();
        for heap in self.heaps() {
            for pool in (0..heap.pools.len()).filter_map(|pool| u16::try_from(pool).ok()).filter(|&pool| from(pool)) {
                heap.free_blocks_from(pool, granule).for_each(|key| {
                    let block = &heap.blocks[key.block()];
                    if heap.region(block.region).is_paged() {
                        found.push(Candidate { addr: block.addr, arena: heap.home, block: key.block() });
                    }
                });
            }
        }
        // A heap, because mostly few of them are needed.
        found.into()
    }

    /// Chooses granules from one block, from its high end on.
    fn choose_in(
        &self,
        heap: &Heap,
        candidate: &Candidate,
        wanted: u64,
        window: &std::ops::Range<u64>,
        donors: &mut Donors,
    ) {
        let Some(paged) = &self.paged else { return };
        let granule = paged.granule;
        let block = &heap.blocks[candidate.block];
        let last_uses = heap.last_uses_of(block);
        let low = block.addr.next_multiple_of(granule);
        let mut at = (block.addr + block.size) / granule * granule;
        let mut open: Option<Donor> = None;
        while donors.granules < wanted && at > low {
            let highest = at - granule;
            if window.contains(&highest) || self.pins.contains(highest) {
                at = highest;
                donors.chosen.extend(open.take());
                continue;
            }
            // Granules side by side mostly share their last use. They are taken or left together.
            let stays_below = self.pins.highest_within(low..at).map_or(low, |pinned| pinned + granule);
            let floor = if window.end <= highest { stays_below.max(window.end) } else { stays_below };
            let (after, from) = last_uses.highest_run(&(floor..at));
            let granules = (at - from) / granule;
            if !self.is_known_done(block.owner, after) {
                *donors.not_done.entry((block.owner, after)).or_default() += granules;
                donors.chosen.extend(open.take());
                at = from;
                continue;
            }
            let taken = granules.min(wanted - donors.granules);
            donors.granules += taken;
            at -= taken * granule;
            let bytes = taken * granule + open.map_or(0, |donor| donor.bytes);
            open = Some(Donor { arena: candidate.arena, block: candidate.block, addr: at, bytes });
        }
        donors.chosen.extend(open);
    }

    /// Returns a function that is true for pools whose granules may move. Granules of an open private pool do not move, not even for the
    /// pool's own requests: a graph captured there uses its memory again whenever it is launched, and the allocator does not see that.
    pub(crate) fn may_donate(&self) -> impl Fn(u16) -> bool + 'static {
        let unpromised = self.unpromised_pools();
        move |pool| unpromised.contains(&pool)
    }

    /// The pools whose free memory is promised to nobody: the default ones, and private pools that were closed, once no graph that they
    /// served runs any more.
    pub(crate) fn unpromised_pools(&self) -> Vec<u16> {
        let released = self.pools.private.iter().filter(|private| private.is_released());
        [0, 1].into_iter().chain(released.flat_map(Private::numbers)).collect()
    }
}
