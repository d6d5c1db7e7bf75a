//! Remedies: all minimal sets of changes that would make room for a request.
//!
//! Remedies change how much stays reserved, how much is allowed, or how much the device has available. All of these are sums, so every set
//! can be tried. Where a sum is not known, the estimate errs towards asking for more, so that following the advice suffices.

use crate::recovery::oom::captures::Captured;
use crate::recovery::oom::{Advice, OomReport};

/// The remedies, most helpful first; a set of them is a sum.
const CACHE: u16 = 1;
const CAPTURE: u16 = 2;
const LIMIT: u16 = 4;
const HEADROOM: u16 = 8;
const POOLS: u16 = 16;
const OWN_POOL: u16 = 32;
const PINS: u16 = 64;
const LIVE: u16 = 128;
const OTHERS: u16 = 256;
/// All of them.
const ALL: u16 = 511;

/// Reserved bytes, by the remedy that gives them back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Holds {
    /// Unused bytes that are promised to nobody.
    pub(super) loose: u64,
    /// Unused bytes that are pinned.
    pub(super) pinned_free: u64,
    /// All pinned bytes outside of `pools`.
    pub(super) pinned: u64,
    /// Bytes held by private pools that do not serve the request.
    pub(super) pools: u64,
    /// The part of it that is pinned, and stays when they are released.
    pub(super) pinned_in_pools: u64,
    /// The part of it in live blocks.
    pub(super) live_in_pools: u64,
    /// Bytes that the request's own private pool holds.
    pub(super) own_pool: u64,
    /// The part of it that emptying the pool gives back,
    pub(super) own_pool_loose: u64,
    /// once the graphs are dropped, if this is true.
    pub(super) own_pool_has_graphs: bool,
    /// True if the request is served from there once nothing in it is live.
    pub(super) own_pool_serves: bool,
    /// Bytes that the request's owner has and keeps as it grows.
    pub(super) own: u64,
    /// Bytes of addresses that are reserved outside of heaps.
    pub(super) addresses_apart: u64,
    /// True if the limit refuses the request at once (`throw_on_cudamalloc_oom`), so that freed memory stays cached,
    pub(super) stays_cached: bool,
    /// and these bytes that went back in vain do so, too, next time.
    pub(super) kept_next_time: u64,
    /// The parts of these sums that cannot go back to the device while a stream captures.
    pub(super) captured: Captured,
}

/// A report, and the memory that stands in the way of its request.
pub(super) struct Remedies<'a> {
    pub(super) report: &'a OomReport,
    pub(super) holds: &'a Holds,
}

impl Remedies<'_> {
    /// Bytes lacking below the limit, and on the device, without any remedy.
    pub(super) fn lacking(&self) -> (u64, u64) {
        self.lacks(0)
    }

    /// Bytes that this allocator holds once it has the request's memory, too, beside all that is live.
    pub(super) fn beside_live(&self) -> u64 {
        let (stays, needs) = self.left(if self.holds.stays_cached { 0 } else { CACHE });
        stays.saturating_add(needs)
    }

    /// All minimal sets that suffice, by ascending number of remedies.
    pub(super) fn sufficient(&self) -> Vec<u16> {
        let mut found: Vec<u16> = Vec::new();
        if self.lacking() == (0, 0) {
            return found;
        }
        let available = self.available();
        let mut sets: Vec<u16> = (1..=ALL).filter(|set| set & !available == 0).collect();
        sets.sort_by_key(|set| (set.count_ones(), *set));
        for set in sets {
            if !found.iter().any(|smaller| smaller & set == *smaller) && self.lacks(set) == (0, 0) {
                found.push(set);
            }
        }
        found
    }

    fn available(&self) -> u16 {
        let (report, holds) = (self.report, self.holds);
        let remedies = [
            (CACHE, holds.stays_cached),
            (CAPTURE, holds.captured.any()),
            (LIMIT, report.limit.is_some()),
            (HEADROOM, report.headroom > 0 && report.memory.is_some()),
            (POOLS, holds.pools > 0),
            (OWN_POOL, holds.own_pool > 0),
            (PINS, holds.pinned + holds.pinned_in_pools > 0),
            (LIVE, self.live() > 0),
            (OTHERS, self.others() > 0),
        ];
        remedies.into_iter().filter(|&(_, is_there)| is_there).map(|(remedy, _)| remedy).sum()
    }

    /// Live bytes that may be freed for the request.
    fn live(&self) -> u64 {
        self.report.allocated.saturating_sub(self.holds.live_in_pools).saturating_sub(self.holds.own)
    }

    fn others(&self) -> u64 {
        self.report.held_by_others.unwrap_or(0)
    }

    /// Bytes that stay reserved, and bytes that the device must give, after all remedies of a set.
    fn left(&self, set: u16) -> (u64, u64) {
        let (report, holds) = (self.report, self.holds);
        let unless = |remedy: u16, bytes: u64| if set & remedy == 0 { bytes } else { 0 };
        let goes_back = !holds.stays_cached || set & CACHE != 0;
        let kept = if set & CAPTURE == 0 { holds.captured } else { Captured::default() };
        // Where nothing is live that might be freed, frames are in use in part only because captures keep their blocks apart.
        let nothing_live = set & LIVE != 0 || set & CAPTURE != 0 && self.live() == 0;
        if nothing_live && goes_back {
            let pools = unless(POOLS, holds.pools).max(kept.pools).max(unless(PINS, holds.pinned_in_pools))
                + unless(OWN_POOL, holds.own_pool).max(kept.own_pool);
            let stays = pools + unless(PINS, holds.pinned) + holds.own + kept.outside();
            let serves = holds.own_pool_serves && set & OWN_POOL == 0;
            return (stays.min(report.reserved), if serves { 0 } else { report.segment });
        }
        let reserved = report.reserved.saturating_add(if goes_back { 0 } else { holds.kept_next_time });
        // Live memory of a released pool is cached when it is freed, and so is other memory that cannot go back when the pool is released.
        let released = set & POOLS != 0 && (goes_back || holds.live_in_pools + holds.captured.pools == 0);
        let stays_in_pools = kept.pools.max(unless(PINS, holds.pinned_in_pools));
        let mut goes = if released { holds.pools.saturating_sub(stays_in_pools) } else { 0 };
        if set & (CACHE | CAPTURE | OWN_POOL | PINS) == 0 {
            return (reserved.saturating_sub(goes), report.from_device);
        }
        // A part of the free memory here may be where the request's memory would be. It is not counted twice.
        if goes_back {
            goes += holds.loose - kept.loose + if set & PINS == 0 { 0 } else { holds.pinned_free - kept.pinned_free };
            goes += if set & CAPTURE == 0 { 0 } else { holds.captured.waiting };
        }
        if set & OWN_POOL != 0 {
            goes += holds.own_pool_loose - kept.own_pool_loose;
        }
        (reserved.saturating_sub(goes), report.segment)
    }

    /// Bytes that the device has for this allocator after all remedies of a set.
    fn ours(&self, set: u16) -> u64 {
        let free = self.report.memory.map_or(0, |memory| memory.free);
        let others = if set & OTHERS == 0 { 0 } else { self.others() };
        free.saturating_add(self.report.reserved).saturating_add(others)
    }

    /// Bytes lacking below the limit, and on the device, after all remedies of a set.
    fn lacks(&self, set: u16) -> (u64, u64) {
        let (stays, needs) = self.left(set);
        if needs == 0 {
            return (0, 0);
        }
        let takes = stays.saturating_add(needs);
        let limit = self.report.limit.filter(|_| set & LIMIT == 0).unwrap_or(u64::MAX);
        let headroom = if set & HEADROOM == 0 { self.report.headroom } else { 0 };
        let on_device = match self.report.memory {
            Some(_) => takes.saturating_add(headroom).saturating_sub(self.ours(set)),
            // Unknown, but at least the memory freed here is there.
            None if set & LIVE != 0 => 0,
            None => needs,
        };
        (takes.saturating_sub(limit), on_device)
    }

    /// Advice to apply all remedies of a sufficient set.
    pub(super) fn advice(&self, set: u16) -> Advice {
        // The cache comes last, because freed memory is in it, and does not go back before a capture has ended.
        let remedies = [LIMIT, HEADROOM, POOLS, OWN_POOL, PINS, LIVE, OTHERS, CAPTURE, CACHE];
        let parts = remedies.into_iter().filter(|remedy| set & remedy != 0).map(|remedy| self.part(remedy, set));
        let mut parts: Vec<Advice> = parts.collect();
        if parts.len() == 1 { parts.swap_remove(0) } else { Advice::All(parts) }
    }

    fn part(&self, remedy: u16, set: u16) -> Advice {
        let holds = self.holds;
        let (stays, needs) = self.left(set);
        let (limit, on_device) = self.lacks(set & !remedy);
        match remedy {
            CACHE => Advice::EmptyCache { cached: holds.loose },
            CAPTURE => Advice::AfterCapture { cached: holds.captured.cached() },
            LIMIT => Advice::RaiseLimit { to: stays.saturating_add(needs) },
            HEADROOM => Advice::LowerHeadroom { to: self.ours(set).saturating_sub(stays.saturating_add(needs)) },
            POOLS => Advice::ReleasePools { held: holds.pools },
            OWN_POOL if holds.own_pool_has_graphs => Advice::DropGraphs { held: holds.own_pool },
            OWN_POOL => Advice::EmptyPool { held: holds.own_pool },
            PINS => {
                let in_pools = if set & POOLS == 0 { 0 } else { holds.pinned_in_pools };
                Advice::EndPins { held: in_pools + if set & LIVE == 0 { holds.pinned_free } else { holds.pinned } }
            }
            LIVE => self.free_more(limit.max(on_device)),
            _ => {
                let held = self.others();
                // Beside what has a least, too, others give all: one of two leasts can be told.
                let all = set & (HEADROOM | LIVE) != 0;
                Advice::OthersHold { held, missing: if all { held } else { on_device.min(held) } }
            }
        }
    }

    fn free_more(&self, bytes: u64) -> Advice {
        let largest = self.report.largest_tags.first();
        let largest = largest.and_then(|(tag, bytes)| Some((tag.clone()?, *bytes)));
        Advice::FreeMore { bytes: bytes.min(self.live()), largest }
    }
}

/// True if a set consists only of freeing live memory here.
pub(super) fn frees_alone(set: u16) -> bool {
    set == LIVE
}
