//! The draft of a remap: which frames would move, and how many granules would be bought from the
//! device. Nothing is changed or held yet.

use crate::core::Core;
use crate::core::policy::Facts;
use crate::core::pools::Which;
use crate::core::remap::donors::Donors;
use crate::core::remap::window::{self, Of, Window};
use crate::size_class::PoolKind;
use crate::types::{PoolId, Request};

/// The parts of a remap, before anything is held.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(crate) window: Window,
    pub(crate) facts: Facts,
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
    /// lacks from the spare ones, from donors, and the rest from the device. Granules are bought
    /// where others might move only if `may_buy_rather`. The device, and the limit, have `left`
    /// bytes as far as is known. `None` if the request's heap has no window.
    pub(crate) fn draft(&mut self, request: &Request, left: u64, may_buy_rather: bool) -> Option<Draft> {
        self.heap.end_quarantine(|block| block.pool == request.pool);
        // Blocks that wait for other streams count.
        let live = self.in_use() + request.size;
        let held = self.reserved + self.growing.now;
        let paged = self.paged.as_ref()?;
        let (granule, at_hand) = (paged.granule, paged.spares.granules());
        let mut facts = Facts { peak: paged.peak.max(live), held, left };
        let of = Of { pool: request.pool, stream: request.stream };
        let window = window::cheapest(&self.heap, of, request.size, granule)?;
        if self.pools.keeps_for_graphs(request.pool) {
            let donors = self.shared_by_graphs(request, &window);
            let need = window.lacks - donors.granules;
            let (spares, buy) = (need.min(at_hand), need.saturating_sub(at_hand));
            return Some(Draft { window, facts, donors, spares, buy, bought_though_movable: false, ahead: 0 });
        }
        let spares = window.lacks.min(at_hand);
        let need = window.lacks - spares;
        if need > 0 && may_buy_rather && facts.buys_rather_than_moves(need * granule) {
            let donors = Donors::default();
            return Some(Draft { window, facts, donors, spares, buy: need, bought_though_movable: true, ahead: 0 });
        }
        let reach = self.reach(&window, request.pool, facts.ahead(0));
        // Granules moved ahead of need serve the next requests of the same kind. At most half of
        // those that could move beyond the need do.
        let wanted = if need > 0 { need + 2 * reach } else { 0 };
        let mut donors = self.donors(wanted, Some(&window), Which::For(request.pool));
        let ahead = (donors.granules.saturating_sub(need) / 2).min(reach);
        donors.truncate(need + ahead, granule);
        // Frames that give more than that are mapped whole rather than broken, if there is room.
        let ahead = donors.granules.saturating_sub(need).min(room(&window, granule));
        let buy = need.saturating_sub(donors.granules);
        if buy > 0 {
            let of_others = donors.not_done.iter().filter(|(last, _)| last.stream != request.stream);
            facts.peak = facts.peak.max(live + of_others.map(|(_, granules)| granules * granule).sum::<u64>());
        }
        Some(Draft { window, facts, donors, spares, buy, bought_though_movable: false, ahead })
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
        let draft = self.draft(request, 0, false)?;
        (draft.buy > 0).then_some(draft.buy * granule)
    }

    /// Number of granules, of `bytes` that may be taken ahead of need, to map behind a window of a
    /// pool. For a small pool, at most as many as small pools have: the next large request would
    /// take more of them back. For a private pool, at most as many as it has there: no other pool
    /// may use them. For captures, none: their pool would keep them.
    fn reach(&self, window: &Window, pool: PoolId, bytes: u64) -> u64 {
        let Some(paged) = &self.paged else { return 0 };
        let most = match pool.kind() {
            _ if self.pools.keeps_for_graphs(pool) => 0,
            _ if pool.is_private() => paged.mapped_around(window.start),
            PoolKind::Small => paged.mapped_bytes[PoolKind::Small as usize],
            PoolKind::Large => u64::MAX,
        };
        (bytes.min(most) / paged.granule).min(room(window, paged.granule))
    }

    /// Number of granules to take from the device beyond the need.
    pub(crate) fn bought_ahead(&self, draft: &Draft, pool: PoolId, granule: u64, buyable: u64) -> u64 {
        let bytes = draft.facts.ahead(draft.buy * granule);
        let ahead = self.reach(&draft.window, pool, bytes).saturating_sub(draft.buy);
        if draft.buy + ahead <= buyable { ahead } else { 0 }
    }

    /// Bytes that the device can still give, as far as that is known.
    pub(crate) fn left(&mut self) -> u64 {
        let held = self.reserved + self.growing.now;
        self.paged.as_mut().map_or(u64::MAX, |paged| paged.capacity.left(held))
    }

    /// True if a plan would want to know how much the device can give, and does not.
    pub(crate) fn lacks_capacity(&self) -> bool {
        self.paged.as_ref().is_some_and(|paged| paged.capacity.good_for == 0)
    }

    /// Notes that the device has `free` bytes left: none after it refused to give more.
    pub(crate) fn note_capacity(&mut self, free: u64) {
        // What is being taken just now may count twice, or not at all. That matters little.
        let held = self.reserved + self.growing.now;
        if let Some(paged) = &mut self.paged {
            paged.capacity.set(held.saturating_add(free));
        }
    }
}

/// Number of granules that there is room for behind a window.
fn room(window: &Window, granule: u64) -> u64 {
    window.room.map_or(0, |end| (end - window.end.next_multiple_of(granule)) / granule)
}
