//! The draft of a remap: which frames would move, and how many granules would be bought from the
//! device. Nothing is changed or held yet.

use crate::core::Core;
use crate::core::paged::layout::Slots;
use crate::core::policy::{Facts, SLOT_SHARE};
use crate::core::pools::Which;
use crate::core::remap::donors::Donors;
use crate::core::remap::plan::Purchase;
use crate::core::remap::window::{self, Window};
use crate::size_class::PoolKind;
use crate::types::{PoolId, Request};

/// The parts of a remap, before anything is held.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) window: Window,
    pub(crate) facts: Facts,
    pub(crate) slots: Slots,
    /// Bytes of the largest frames that are made.
    pub(crate) frame: u64,
    pub(crate) donors: Donors,
    pub(crate) spares: u64,
    /// Number of granules that must come from the device.
    pub(crate) buy: u64,
    /// True if they come from the device although granules might move.
    pub(crate) bought_though_movable: bool,
    /// Number of granules beyond the need that are mapped behind the window.
    pub(crate) ahead: u64,
}

impl Core {
    /// Drafts a remap for a request: finds the cheapest window, and takes the granules that it
    /// lacks from the spare ones, from donors, and the rest from the device, which is to give no
    /// more than `most`. The device, and the limit, have `left` bytes as far as is known. `None` if
    /// the request's heap has no window.
    pub(crate) fn draft(&mut self, request: &Request, left: u64, most: Purchase) -> Option<Draft> {
        self.heap.end_quarantine(|block| block.pool == request.pool);
        // Blocks that wait for other streams count.
        let live = self.in_use() + request.size;
        let held = self.reserved + self.growing.now;
        let paged = &self.paged;
        let (weights, granule, at_hand) = (paged.weights, paged.granule, paged.spares.granules());
        let facts = Facts { weights, peak: paged.peak.max(live), held, left, moves: paged.moves };
        // The reserve serves in whole slots, too.
        let in_reserve = if self.reserve > 0 { at_hand * granule } else { 0 };
        let with_reserve = Facts { left: left.saturating_add(in_reserve), ..facts };
        let captured = self.pools.keeps_for_graphs(request.pool);
        // Whole slots are ahead of need. Captures need none, as their pool keeps what it has.
        let (slot, frame) = if captured || most < Purchase::Ahead {
            (granule, granule)
        } else {
            let pool = request.pool;
            let mapped = if pool.is_private() { 0 } else { paged.mapped_bytes[pool.kind() as usize] };
            with_reserve.slot_and_frame(request.size, request.size.max(mapped), granule, paged.frame)
        };
        let slots = Slots { granule, bytes: slot };
        let window = window::cheapest(&self.heap, request.recipient(), request.size, slots)?;
        let donors = Donors::default();
        let (spares, need) = (window.lacks.min(at_hand), window.lacks.saturating_sub(at_hand));
        let mut draft =
            Draft { window, facts, slots, frame, donors, spares, buy: need, bought_though_movable: false, ahead: 0 };
        if captured {
            // They have the memory of their pool in whatever pieces if its frames are small.
            let share = (paged.mapped_around(draft.window.start) + request.size) / SLOT_SHARE;
            draft.frame = with_reserve.slot_and_frame(request.size, u64::MAX, granule, Some(share)).1;
            draft.donors = self.shared_by_graphs(request, &draft.window);
            let need = draft.window.lacks - draft.donors.granules;
            (draft.spares, draft.buy) = (need.min(at_hand), need.saturating_sub(at_hand));
            return Some(draft);
        }
        if need > 0 && most >= Purchase::InsteadOfMoving && facts.buys_rather_than_moves(need * granule) {
            draft.bought_though_movable = true;
            return Some(draft);
        }
        let reach = self.reach(&draft.window, request.pool, slots.whole(facts.ahead(0)));
        // Granules moved ahead of need serve the next requests of the same kind. At most half of
        // those that could move beyond the need do.
        let wanted = if need > 0 { need + 2 * reach } else { 0 };
        let mut donors = self.donors(wanted, Some(&draft.window), Which::For(request.pool));
        let ahead = slots.whole((donors.granules.saturating_sub(need) / 2).min(reach) * granule);
        donors.truncate(need + ahead, granule);
        // Frames that give more than that are mapped whole rather than broken, if there is room.
        draft.ahead = donors.granules.saturating_sub(need).min(room(&draft.window, granule));
        draft.buy = need.saturating_sub(donors.granules);
        if draft.buy > 0 {
            let of_others = donors.not_done.iter().filter(|(last, _)| last.stream != request.stream);
            let waited_for = of_others.map(|(_, granules)| granules * granule).sum::<u64>();
            draft.facts.peak = facts.peak.max(live + waited_for);
        }
        draft.donors = donors;
        Some(draft)
    }

    /// Serves what a draft would take from the device from memory that the request's own stream may
    /// use again at once although the device is not done with it (`trim.rs`).
    pub(crate) fn reuse_unfinished(&mut self, request: &Request, draft: &mut Draft) {
        if self.streams.any_captures() || self.pools.keeps_for_graphs(request.pool) {
            return;
        }
        let before = draft.donors.granules;
        self.add_reusable(request, draft.buy, &draft.window, &mut draft.donors);
        draft.buy -= draft.donors.granules - before;
    }

    /// Frames for a window of a capture: those in the free memory of its pool, in whatever pieces.
    /// They stay mapped where other graphs use them, as graphs that share a pool run one after the
    /// other (A7).
    fn shared_by_graphs(&mut self, request: &Request, window: &Window) -> Donors {
        let mut donors = Donors::default();
        self.add_reusable(request, window.lacks, window, &mut donors);
        donors
    }

    /// Bytes that the device must give for a request beyond the free memory here that may move.
    /// `None` if the request is not served from mapped memory, if no addresses are free for it, or
    /// if nothing is lacking.
    pub(crate) fn lacking_bytes(&mut self, request: &Request) -> Option<u64> {
        let granule = self.paged_granule_for(request)?;
        let draft = self.draft(request, 0, Purchase::Needed)?;
        (draft.buy > 0).then_some(draft.buy * granule)
    }

    /// Number of granules, of `most` that may be taken ahead of need, to map behind a window of a
    /// pool. For a small pool, at most as many as small pools have: the next large request would
    /// take more of them back. For a private pool, at most as many as it has there: no other pool
    /// may use them. For captures, none: their pool would keep them.
    fn reach(&self, window: &Window, pool: PoolId, most: u64) -> u64 {
        let paged = &self.paged;
        let bytes = match pool.kind() {
            _ if self.pools.keeps_for_graphs(pool) => 0,
            _ if pool.is_private() => paged.mapped_around(window.start),
            PoolKind::Small => paged.mapped_bytes[PoolKind::Small as usize],
            PoolKind::Large => u64::MAX,
        };
        (bytes / paged.granule).min(most).min(room(window, paged.granule))
    }

    /// Number of granules to take from the device beyond the need.
    pub(crate) fn bought_ahead(&self, draft: &Draft, pool: PoolId, granule: u64, buyable: u64) -> u64 {
        let most = draft.slots.whole(draft.facts.ahead(draft.buy * granule));
        let ahead = self.reach(&draft.window, pool, most).saturating_sub(draft.buy);
        if draft.buy + ahead <= buyable { ahead } else { 0 }
    }

    /// Forgets what moved, and so what may be held because of it.
    pub(crate) fn forget_moves(&mut self) {
        self.paged.moves = 0;
    }

    /// Bytes that the device can still give, as far as that is known.
    pub(crate) fn left(&mut self) -> u64 {
        let held = self.reserved + self.growing.now;
        self.paged.capacity.left(held)
    }

    /// True if a plan would want to know how much the device can give, and does not: where it may
    /// soon be too little, an answer is old at once, as other programs take memory, too.
    pub(crate) fn lacks_capacity(&self) -> bool {
        let held = self.reserved + self.growing.now;
        self.paged.capacity.is_old(held, self.paged.peak)
    }

    /// Notes that the device has `free` bytes left: none after it refused to give more.
    pub(crate) fn note_capacity(&mut self, free: u64) {
        // What is being taken just now may count twice, or not at all. That matters little.
        let held = self.reserved + self.growing.now;
        self.paged.capacity.set(held.saturating_add(free));
    }
}

/// Number of granules that there is room for behind a window.
fn room(window: &Window, granule: u64) -> u64 {
    window.room.map_or(0, |end| (end - window.fill.end) / granule)
}
