//! Donors: frames that may move, because they lie wholly in free blocks and their last use is done.
//!
//! Frames of the blocks that were used longest ago are chosen first, as they may stay unused for
//! longest, and of equals those at the highest addresses; those larger than what is still wanted are
//! passed over, unless nothing else helps. Granules whose last use is not known done are counted by
//! the tick that would let them move; those of the request's own stream may serve it before that
//! (`trim.rs`). While a stream captures, nothing moves: unmapping might break the capture. A capture
//! gets frames of its own pool, which stay mapped where they are.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use crate::core::Core;
use crate::core::heap::{Block, LastUses};
use crate::core::paged::granules::Paged;
use crate::core::paged::layout::FrameRoom;
use crate::core::pools::Which;
use crate::core::remap::window::Window;
use crate::types::{After, BlockId, Request, Use};

/// The most blocks that donors are taken from while locks are held without a break, where many
/// donors are wanted.
pub(crate) const BATCH: usize = if cfg!(debug_assertions) { 2 } else { 32 };

/// Contiguous frames of one free block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Donor {
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
    pub(crate) bytes: u64,
    /// The work of their owner that must be done before the frames may be unmapped. The owner may
    /// use them at other addresses at once.
    pub(crate) after: After,
}

/// Frames that may move, and granules that could once ticks are done.
#[derive(Debug, Default)]
pub(crate) struct Donors {
    /// The chosen frames, each a donor.
    pub(crate) chosen: Vec<Donor>,
    /// Number of chosen granules.
    pub(crate) granules: u64,
    /// Number of granules that are not known done, by last use.
    pub(crate) not_done: BTreeMap<Use, u64>,
}

impl Donors {
    /// Keeps as many of the chosen frames as it takes for `granules` granules, which have `granule`
    /// bytes each.
    pub(crate) fn truncate(&mut self, granules: u64, granule: u64) {
        while let Some(last) = self.chosen.last()
            && self.granules - last.bytes / granule >= granules
        {
            self.granules -= last.bytes / granule;
            self.chosen.pop();
        }
    }

    /// The chosen frames in order, block by block, those side by side as one donor.
    pub(crate) fn into_joined(mut self) -> Vec<Donor> {
        self.chosen.sort_by_key(|donor| (donor.block, Reverse(donor.addr)));
        let mut joined: Vec<Donor> = Vec::with_capacity(self.chosen.len());
        for donor in self.chosen {
            match joined.last_mut() {
                Some(last)
                    if last.block == donor.block
                        && last.addr == donor.addr + donor.bytes
                        && last.after == donor.after =>
                {
                    last.addr = donor.addr;
                    last.bytes += donor.bytes;
                }
                _ => joined.push(donor),
            }
        }
        joined
    }
}

/// A free block that holds at least one whole frame.
struct Candidate {
    addr: u64,
    block: BlockId,
}

impl Core {
    /// Chooses frames of `wanted` granules that may move, if there are as many, from some pools,
    /// outside the window. Each donor is one frame. They have more granules than wanted only if no
    /// frames have exactly as many.
    pub(crate) fn donors(&mut self, wanted: u64, window: Option<&Window>, from: Which) -> Donors {
        let mut donors = Donors::default();
        if wanted == 0 || self.streams.any_captures() {
            return donors;
        }
        self.note_recent_uses();
        let paged = &self.paged;
        if from.has_default() {
            self.add_deferred_release(&mut donors.not_done);
        }
        let window = window.map_or(0..0, |window| window.granules(paged.granule));
        let mut passed_over: Option<Donor> = None;
        let mut candidates = self.donor_candidates(paged, from);
        candidates.sort_by_key(|candidate| self.heap.block(candidate.block).after);
        for candidate in candidates {
            let larger = self.choose_in(&candidate, wanted, &window, &mut donors);
            passed_over = passed_over.into_iter().chain(larger).min_by_key(|donor| donor.bytes);
            if donors.granules >= wanted {
                break;
            }
        }
        if donors.granules < wanted
            && let Some(donor) = passed_over
        {
            donors.granules += donor.bytes / paged.granule;
            donors.chosen.push(donor);
        }
        donors
    }

    /// Adds frames of up to `wanted` granules that the request's stream may use at other addresses
    /// at once, while they stay mapped where they are: those that it used last and that are not
    /// done, as far as the host was told when it last asked, because an event covers their last
    /// use. For a capture, whose graph's pool keeps them mapped (`trim.rs`), all that are the
    /// stream's or done. Only frames that there is room for are added: others would have to be
    /// broken, which does not free their memory as long as they are mapped where they were. Memory
    /// of other private pools stays.
    pub(crate) fn add_reusable(&mut self, request: &Request, mut wanted: u64, window: &Window, donors: &mut Donors) {
        self.note_recent_uses();
        let paged = &self.paged;
        if !paged.may_alias {
            return;
        }
        let (granule, heap) = (paged.granule, &self.heap);
        let captured = self.pools.keeps_for_graphs(request.pool);
        let mut room = FrameRoom::new(&window.holes(heap, granule));
        let window = window.granules(granule);
        for candidate in self.donor_candidates(paged, Which::For(request.pool)) {
            let block = heap.block(candidate.block);
            let (is_own, is_done) = (block.owner == request.stream, self.streams.is_done(block.last_use()));
            let serves = if captured { is_own || is_done } else { is_own && !is_done };
            if !serves {
                if captured && !self.streams.captures(block.owner) {
                    *donors.not_done.entry(block.last_use()).or_default() += block.size / granule;
                }
                continue;
            }
            let frames = paged.whole_frames(heap.region(block.region).addr, &block.range());
            let mut last_use = LastUse::of(heap.last_uses_of(block), frames.range());
            for frame in frames {
                let (addr, bytes, after) = (frame.start, frame.end - frame.start, last_use.of_frame(&frame));
                let is_in_window = frame.start < window.end && window.start < frame.end;
                let last = Use { stream: block.owner, after };
                let is_covered = captured || (!self.streams.is_done(last) && self.streams.may_be_covered(last));
                let stays = is_in_window || self.pins.are_in(frame) || !is_covered;
                if stays || bytes / granule > wanted || !room.take(bytes / granule) {
                    continue;
                }
                wanted -= bytes / granule;
                donors.granules += bytes / granule;
                let after = if is_own { after } else { After::NOTHING };
                donors.chosen.push(Donor { block: candidate.block, addr, bytes, after });
            }
            if wanted == 0 {
                return;
            }
        }
    }

    /// As [`donors`], from at most [`BATCH`] blocks that begin below an address, and without frames
    /// of more granules than are wanted. Frames side by side may be one donor. Returns the address
    /// below which to go on; `None` if there are no more such blocks.
    pub(crate) fn donors_below(&mut self, below: u64, wanted: u64, from: Which) -> (Vec<Donor>, Option<u64>) {
        self.note_recent_uses();
        let paged = &self.paged;
        if self.streams.any_captures() {
            return (Vec::new(), None);
        }
        let mut donors = Donors::default();
        let mut candidates = self.donor_candidates(paged, from);
        candidates.retain(|candidate| candidate.addr < below);
        let more = candidates.len() > BATCH;
        candidates.truncate(BATCH);
        for candidate in &candidates {
            if donors.granules >= wanted {
                break;
            }
            if !self.choose_all_of(paged, candidate, wanted, &mut donors) {
                self.choose_in(candidate, wanted, &(0..0), &mut donors);
            }
        }
        let next = candidates.last().filter(|_| more).map(|candidate| candidate.addr);
        (donors.into_joined(), next)
    }

    /// Chooses all frames of a block as one donor, if all of them may move and are wanted.
    fn choose_all_of(&self, paged: &Paged, candidate: &Candidate, wanted: u64, donors: &mut Donors) -> bool {
        let block = self.heap.block(candidate.block);
        let range = paged.whole_frames(self.heap.region(block.region).addr, &block.range()).range();
        let granules = (range.end - range.start) / paged.granule;
        let may_move = self.streams.is_done(block.last_use()) && !self.pins.are_in(range.clone());
        if !may_move || donors.granules + granules > wanted {
            return false;
        }
        let (addr, bytes) = (range.start, range.end - range.start);
        donors.granules += granules;
        donors.chosen.push(Donor { block: candidate.block, addr, bytes, after: After::NOTHING });
        true
    }

    /// The free blocks that hold a whole frame, those at high addresses first. Most free blocks
    /// hold none.
    fn donor_candidates(&self, paged: &Paged, from: Which) -> Vec<Candidate> {
        let mut found = Vec::new();
        self.for_each_block_with_granules(paged.granule, from, |id, block| {
            if !paged.whole_frames(self.heap.region(block.region).addr, &block.range()).range().is_empty() {
                found.push(Candidate { addr: block.addr, block: id });
            }
        });
        found.sort_unstable_by_key(|candidate| Reverse(candidate.addr));
        found
    }

    /// The whole granules of the free blocks of some pools, whatever frames they belong to: for
    /// memory whose frames are gone, or are to be split.
    pub(crate) fn free_granules(&self, from: Which) -> Vec<Donor> {
        let mut found = Vec::new();
        let granule = self.paged.granule;
        self.for_each_block_with_granules(granule, from, |id, block| {
            let Range { start, end } = block.range();
            let (addr, end) = (start.next_multiple_of(granule), end / granule * granule);
            if addr < end {
                found.push(Donor { block: id, addr, bytes: end - addr, after: After::NOTHING });
            }
        });
        found
    }

    /// Calls a function for each free block of some pools that is as large as a granule or larger
    /// and whose memory comes in granules.
    fn for_each_block_with_granules(&self, granule: u64, from: Which, mut with: impl FnMut(BlockId, &Block)) {
        for pool in self.pools_among(from) {
            self.heap.free_blocks_from(pool, granule).for_each(|key| {
                let block = self.heap.block(key.block);
                if self.heap.region(block.region).is_paged() {
                    with(key.block, block);
                }
            });
        }
    }

    /// Chooses frames from one block, from its high end on. Returns the smallest of those that may
    /// move and are larger than what was still wanted.
    fn choose_in(&self, candidate: &Candidate, wanted: u64, window: &Range<u64>, donors: &mut Donors) -> Option<Donor> {
        let paged = &self.paged;
        let granule = paged.granule;
        let heap = &self.heap;
        let block = heap.block(candidate.block);
        let frames = paged.whole_frames(heap.region(block.region).addr, &block.range());
        let mut last_use = LastUse::of(heap.last_uses_of(block), frames.range());
        let mut passed_over: Option<Donor> = None;
        for frame in frames {
            if donors.granules >= wanted {
                break;
            }
            let is_in_window = frame.start < window.end && window.start < frame.end;
            if is_in_window || self.pins.are_in(frame.clone()) {
                continue;
            }
            let (bytes, after) = (frame.end - frame.start, last_use.of_frame(&frame));
            let last = Use { stream: block.owner, after };
            if !self.streams.is_done(last) {
                *donors.not_done.entry(last).or_default() += bytes / granule;
                continue;
            }
            let donor = Donor { block: candidate.block, addr: frame.start, bytes, after: After::NOTHING };
            if donors.granules + bytes / granule <= wanted {
                donors.granules += bytes / granule;
                donors.chosen.push(donor);
            } else if passed_over.is_none_or(|other| bytes < other.bytes) {
                passed_over = Some(donor);
            }
        }
        passed_over
    }
}

/// The last uses of a block's frames, asked for from the high end down.
struct LastUse<'a> {
    uses: LastUses<'a>,
    low: u64,
    /// The granules down to this address were used until this tick.
    from: u64,
    after: After,
}

impl LastUse<'_> {
    fn of(uses: LastUses<'_>, range: Range<u64>) -> LastUse<'_> {
        LastUse { uses, low: range.start, from: range.end, after: After::NOTHING }
    }

    /// The tick that the owner's timeline must reach for all of a frame to be done.
    fn of_frame(&mut self, frame: &Range<u64>) -> After {
        // Granules side by side mostly share their last use.
        let mut latest = if self.from < frame.end { self.after } else { After::NOTHING };
        while self.from > frame.start {
            let to = self.from.min(frame.end);
            (self.after, self.from) = self.uses.highest_run(&(self.low..to));
            latest = latest.max(self.after);
        }
        latest
    }
}
