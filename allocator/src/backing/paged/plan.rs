//! The plan of a remap. A remap moves frames (physical memory) from free blocks to a window of addresses (`window.rs`) that a request
//! needs. Under all locks, it is first drafted, without changing anything; then planned, which holds all memory that takes part; and, after
//! the driver's work (`carry_out.rs`), settled.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::backing::headroom::Refusal;
use crate::backing::paged::carry_out::{Done, Filled, Work};
use crate::backing::paged::donors::{Donor, Donors};
use crate::backing::paged::granules::Stuck;
use crate::backing::paged::recurrence::Point;
use crate::backing::paged::window::{self, Window};
use crate::heap::{BlockId, Holding, State, kind_of};
use crate::history::{Action, Subject};
use crate::shell::core::Request;
use crate::shell::whole::Whole;
use crate::size_class::PoolKind;
use crate::tags::Tag;

/// How much memory is taken ahead of need, where there is room behind the window: reserved memory divided by this, and at most
/// [`AHEAD_MAX`] bytes, whether bought from the device or moved. Taking less costs more driver calls; taking more costs memory where it is
/// bought. Figures in ARCHITECTURE.md.
const AHEAD_SHARE: u64 = 64;
const AHEAD_MAX: u64 = 128 << 20;

/// Memory is bought from the device instead of moved in two cases: if a move would undo an earlier one, to addresses that granules were
/// moved away from; and always once the peak of memory in use has not risen for half as long as it took to reach it. Reserved memory may
/// then exceed that peak by the peak divided by this. So programs that repeat themselves stop moving memory to and fro.
const UNDO_SHARE: u64 = 128;
/// As [`UNDO_SHARE`], if the program recurs and memory would move at a point where it moved before (`recurrence.rs`).
const RECUR_SHARE: u64 = 64;

/// A program is *unsettled* if it makes memory move for more than one allocation in [`UNSETTLED_SPACING`], plus [`UNSETTLED_ADVANCE`] at
/// the start. It may reserve more than the peak in use by that peak divided by [`UNSETTLED_SHARE`].
const UNSETTLED_SPACING: u64 = 1024;
const UNSETTLED_ADVANCE: u64 = 512;
const UNSETTLED_SHARE: u64 = 16;

/// Limits of a plan.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Bytes that may still be taken from the device.
    pub(crate) buyable: u64,
    /// Why the device cannot give more than that.
    pub(crate) refusal: Refusal,
    /// Whether to take memory ahead of need.
    pub(crate) ahead: bool,
}

/// A remap that was decided: the driver's work, and the memory held for it.
#[derive(Debug)]
pub(crate) struct Plan {
    work: Work,
    held: Held,
    /// True if the plan takes more from the device than the request needs.
    pub(crate) buys_ahead: bool,
}

/// Memory held while the driver is at work, so that nobody else takes it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Pieces of the window, by address.
    window: Vec<BlockId>,
    donors: Vec<Donor>,
    /// Number of granules to create.
    create: u64,
    /// Number of granules of spare frames that take part.
    spares: u64,
}

/// The result of planning.
#[derive(Debug)]
pub(crate) enum Planned {
    /// A plan to carry out.
    Ready(Plan),
    /// No run of free blocks and holes is long enough.
    NoAddresses,
    /// `missing` granules are lacking beyond those that may move and those that the device may give.
    Short { missing: u64, not_done: BTreeMap<(u32, u64), u64>, refusal: Refusal },
}

/// The parts of a remap, before anything is held.
#[derive(Debug)]
pub(crate) struct Draft {
    window: Window,
    point: Point,
    pub(crate) donors: Donors,
    spares: u64,
    /// Number of granules that must come from the device.
    pub(crate) buy: u64,
    /// True if they come from the device although granules might move.
    pub(crate) bought_though_movable: bool,
    /// Number of granules beyond the need that are mapped behind the window.
    ahead: u64,
    /// Bytes in waiting blocks, which other streams still use, by the tick that they wait for.
    pub(crate) awaited: BTreeMap<(u32, u64), u64>,
}

impl Whole {
    /// Drafts a remap for a request: finds the cheapest window, and takes the granules that it lacks from the spare ones, from donors, and
    /// the rest from the device. Up to `instead_of_moving` bytes may be bought from the device where granules might move. `None` if the
    /// request's heap has no window.
    pub(crate) fn draft(&mut self, request: &Request, instead_of_moving: u64) -> Option<Draft> {
        // Waiting blocks do not count as in use: they could be had by waiting.
        let (waiting, awaited) = self.awaited();
        let in_use = (self.in_use() + request.size).saturating_sub(waiting);
        let point = Point { requested: request.size, in_use };
        let searches = self.searches();
        let paged = self.paged.as_mut()?;
        if in_use > paged.in_use_peak {
            (paged.in_use_peak, paged.peak_at) = (in_use, searches);
        }
        let (granule, at_hand) = (paged.granule, paged.spares.granules());
        let window = window::cheapest(&self.arena(request.slot).heap, request.pool, request.size, granule)?;
        let spares = window.lacks.min(at_hand);
        let need = window.lacks - spares;
        if need > 0
            && need <= instead_of_moving / granule
            && self.buys_instead_of_moving(request.slot, &window, need, point)
        {
            let (donors, awaited) = (Donors::default(), BTreeMap::new());
            return Some(Draft {
                window,
                point,
                donors,
                spares,
                buy: need,
                bought_though_movable: true,
                ahead: 0,
                awaited,
            });
        }
        let reach = self.reach(&window, request.pool);
        // Granules moved ahead of need serve the next requests of the same kind. At most half of those that could move beyond the need do.
        let wanted = if need > 0 { need + 2 * reach } else { 0 };
        let mut donors = self.donors(wanted, Some(&window), self.may_donate());
        let ahead = (donors.granules.saturating_sub(need) / 2).min(reach);
        donors.truncate(need + ahead, granule);
        // Frames that give more than that are mapped whole rather than broken, if there is room.
        let ahead = donors.granules.saturating_sub(need).min(room(&window, granule));
        let buy = need.saturating_sub(donors.granules);
        Some(Draft { window, point, donors, spares, buy, bought_though_movable: false, ahead, awaited })
    }

    /// Bytes that the device must give for a request beyond the free memory here that may move. `None` if the request is not served from
    /// mapped memory, if no addresses are free for it, or if nothing is lacking.
    pub(crate) fn lacking_bytes(&mut self, request: &Request) -> Option<u64> {
        let granule = self.paged_granule_for(request)?;
        let draft = self.draft(request, 0)?;
        (draft.buy > 0).then_some(draft.buy * granule)
    }

    /// True if a request gets `granules` granules from the device although some might move: if an earlier move would be undone, in programs
    /// that repeat themselves, and in programs that never settle and would move memory for ever. See [`UNDO_SHARE`].
    fn buys_instead_of_moving(&self, slot: u32, window: &Window, granules: u64, point: Point) -> bool {
        let Some(paged) = &self.paged else { return false };
        let heap = self.heap_of(slot);
        let holes = window.pieces.iter().map(|&id| &heap.blocks[id]).filter(|block| block.state == State::Hole);
        let (start, end) = (window.start / paged.granule * paged.granule, window.end);
        let mut lacking = holes.map(|hole| hole.addr.max(start)..(hole.addr + hole.size).min(end));
        let undoes = lacking.any(|range| paged.was_left(&range));
        let settled = self.peak_has_settled();
        let often = self.counters().remaps.read().current > UNSETTLED_ADVANCE + self.searches() / UNSETTLED_SPACING;
        let grown = self.reserved + self.growing.now() + granules * paged.granule;
        let within = |share| grown <= paged.in_use_peak + paged.in_use_peak / share;
        (undoes || settled) && within(UNDO_SHARE)
            || settled && paged.recurrence.recurs_at(point) && within(RECUR_SHARE)
            || often && within(UNSETTLED_SHARE)
    }

    /// True if the peak of memory in use has not risen for half as long as it took to reach it.
    fn peak_has_settled(&self) -> bool {
        let peak_at = self.paged.as_ref().map_or(0, |paged| paged.peak_at);
        self.searches() > peak_at + peak_at / 2
    }

    /// Number of granules that may be taken ahead of need and mapped behind a window of a pool. For a small pool, at most as many as it
    /// has: the next large request would take more of them back.
    fn reach(&self, window: &Window, pool: u16) -> u64 {
        let Some(paged) = &self.paged else { return 0 };
        let ahead = (self.reserved / AHEAD_SHARE).min(AHEAD_MAX);
        let kind = kind_of(pool);
        let most = if kind == PoolKind::Small { paged.mapped_bytes[kind as usize] } else { u64::MAX };
        (ahead.min(most) / paged.granule).min(room(window, paged.granule))
    }

    /// Turns a draft into a plan: checks it against the limits and holds all memory that takes part.
    pub(crate) fn plan(&mut self, request: &Request, draft: Draft, terms: &Terms) -> Planned {
        let Some(paged) = &self.paged else { return Planned::NoAddresses };
        let granule = paged.granule;
        let buyable = terms.buyable / granule;
        if draft.buy > buyable {
            let (missing, not_done, refusal) = (draft.buy - buyable, draft.donors.not_done, terms.refusal);
            return Planned::Short { missing, not_done, refusal };
        }
        let more = draft.buy > 0 && terms.ahead && !draft.bought_though_movable;
        let bought_ahead = if more { self.bought_ahead(&draft, request.pool, buyable) } else { 0 };
        let Draft { window, point, donors, spares, buy, ahead, bought_though_movable, .. } = draft;
        if buy > 0 || !donors.chosen.is_empty() {
            let settled = self.peak_has_settled();
            self.paged.as_mut().into_iter().for_each(|paged| paged.recurrence.note(point, settled));
        }
        let create = buy + bought_ahead;
        let largest = self.largest_frame(request, &donors, (buy, create), bought_though_movable);
        let (held, fill, changed) = self.hold_window(request.slot, &window, (ahead + bought_ahead) * granule);
        let donors = self.hold_donors(request.slot, donors.into_joined(), &changed, window.end);
        let work = self.work(&donors, (spares, create), fill, largest);
        let spares = work.spares.granules();
        Planned::Ready(Plan { work, held: Held { window: held, donors, create, spares }, buys_ahead: bought_ahead > 0 })
    }

    /// Granules of the largest frame that a plan makes. The plan needs `buy` granules from the device, and takes `create`.
    fn largest_frame(
        &mut self,
        request: &Request,
        donors: &Donors,
        (buy, create): (u64, u64),
        bought_though_movable: bool,
    ) -> u32 {
        let reserved = self.reserved;
        let stranded = (buy > 0 && !bought_though_movable).then(|| self.stranded(self.may_donate()));
        let Some(paged) = self.paged.as_mut() else { return 1 };
        let granules = |bytes: u64| bytes / paged.granule;
        if let Some(stranded) = stranded {
            paged.frame_size.note(&stranded, granules(reserved) + buy, granules(paged.in_use_peak));
        }
        let pool = granules(paged.mapped_bytes[kind_of(request.pool) as usize]) + create;
        let moves = buy == 0 || bought_though_movable || donors.move_ever();
        paged.frame_size.largest(pool, request.size.div_ceil(paged.granule), moves)
    }

    /// The driver's work: unmap the held `donors`, and map their frames, `spares` granules of spare ones and `create` new granules at the
    /// ranges `fill`. No frame of more than `largest` granules is mapped.
    pub(crate) fn work(
        &mut self,
        donors: &[Donor],
        (spares, create): (u64, u64),
        fill: Vec<Range<u64>>,
        largest: u32,
    ) -> Work {
        let Some(paged) = self.paged.as_mut() else { return Work::default() };
        let range = |donor: &Donor| donor.addr..donor.addr + donor.bytes;
        let unmap = donors.iter().map(|donor| (range(donor), paged.forget_mapped(donor.addr, donor.bytes))).collect();
        let spares = paged.spares.take(spares);
        paged.in_hands += spares.granules();
        let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
        self.growing.begin(create * granule);
        Work { granule, options, access, create, largest, unmap, spares, fill }
    }

    /// Number of granules to take from the device beyond the need.
    fn bought_ahead(&self, draft: &Draft, pool: u16, buyable: u64) -> u64 {
        let ahead = self.reach(&draft.window, pool).saturating_sub(draft.buy);
        if draft.buy + ahead <= buyable { ahead } else { 0 }
    }

    /// Holds the window, and some bytes of the hole behind it. Returns the held pieces, the ranges to be filled, and the remainders of the
    /// blocks of which only a part was held.
    fn hold_window(
        &mut self,
        slot: u32,
        window: &Window,
        ahead: u64,
    ) -> (Vec<BlockId>, Vec<Range<u64>>, BTreeMap<BlockId, Holding>) {
        let granule = self.paged.as_ref().map_or(1, |paged| paged.granule);
        let heap = &mut self.arena(slot).heap;
        let (mut held, mut changed) = (Vec::new(), BTreeMap::new());
        let mut fill: Vec<Range<u64>> = Vec::new();
        let mut pieces = window.pieces.clone();
        let filled_to = window.end.next_multiple_of(granule) + ahead;
        // The hole that memory is taken ahead in may begin where the window ends.
        let beyond = window.pieces.last().and_then(|&id| heap.blocks[id].next.some());
        pieces.extend(beyond.filter(|&id| ahead > 0 && heap.blocks[id].state == State::Hole));
        for id in pieces {
            let block = heap.blocks[id];
            let is_hole = block.state == State::Hole;
            let (from, to) =
                if is_hole { (window.start / granule * granule, filled_to) } else { (window.start, window.end) };
            let (from, to) = (from.max(block.addr), to.min(block.addr + block.size));
            if from >= to {
                continue;
            }
            let holding = heap.hold(id, from, to);
            held.push(holding.id);
            changed.insert(id, holding);
            if is_hole {
                match fill.last_mut() {
                    Some(last) if last.end == from => last.end = to,
                    _ => fill.push(from..to),
                }
            }
        }
        (held, fill, changed)
    }

    /// Holds donors of a remap without a window.
    pub(crate) fn hold_all(&mut self, chosen: Vec<Donor>) -> Vec<Donor> {
        self.hold_donors(0, chosen, &BTreeMap::new(), 0)
    }

    /// Holds donors, in each block from high addresses to low ones.
    fn hold_donors(
        &mut self,
        slot: u32,
        chosen: Vec<Donor>,
        changed: &BTreeMap<BlockId, Holding>,
        window_end: u64,
    ) -> Vec<Donor> {
        let mut donors = Vec::with_capacity(chosen.len());
        // The remainder of the block that the last donor was in.
        let mut left: Option<(Donor, Option<BlockId>)> = None;
        for donor in chosen {
            let same_block = |last: &Donor| last.arena == donor.arena && last.block == donor.block;
            let in_window = (donor.arena == slot).then(|| changed.get(&donor.block)).flatten();
            let id = match (left.filter(|(last, _)| same_block(last)), in_window) {
                // Parts of the window's own blocks lie below it and above it.
                (Some((last, below)), Some(holding)) => {
                    let crossed = last.addr >= window_end && donor.addr < window_end;
                    if crossed { holding.below } else { below }
                }
                (Some((_, below)), None) => below,
                (None, Some(holding)) => {
                    if donor.addr >= window_end {
                        holding.above
                    } else {
                        holding.below
                    }
                }
                (None, None) => Some(donor.block),
            };
            let id = id.unwrap_or_else(|| unreachable!("a donor outside of its block"));
            let holding = self.arena(donor.arena).heap.hold(id, donor.addr, donor.addr + donor.bytes);
            left = Some((donor, holding.below));
            donors.push(Donor { block: holding.id, ..donor });
        }
        donors
    }

    /// Accounts for what the driver did, and releases the held memory to the heap. Returns the free block that the window became, if all
    /// went well.
    pub(crate) fn settle_plan(&mut self, request: &Request, held: Held, done: &Done) -> Option<BlockId> {
        self.settle_work(&held.donors, (held.spares, held.create), request.pool, done);
        let (usable, stuck) = done.filled.iter().partition::<Vec<&Filled>, _>(|filled| filled.usable);
        // Memory that is mapped without access is of no use to a pool.
        if let Some(paged) = self.paged.as_mut() {
            let bytes = stuck.iter().map(|filled| filled.range.end - filled.range.start).sum::<u64>();
            paged.mapped_bytes[kind_of(request.pool) as usize] -= bytes;
        }
        let last = held.window.iter().filter_map(|&id| self.let_go(request, id, &usable, &stuck)).last();
        self.account_for_granules();
        last.filter(|_| done.error.is_none())
    }

    /// Accounts for what the driver did with donors, with `spares` granules of spare frames and with `create` granules to be created for
    /// `pool`.
    pub(crate) fn settle_work(&mut self, donors: &[Donor], (spares, create): (u64, u64), pool: u16, done: &Done) {
        self.settle_donors(donors, done);
        let Some(paged) = self.paged.as_mut() else { return };
        let (kind, granule) = (kind_of(pool), paged.granule);
        paged.in_hands -= spares;
        paged.spares.extend(done.spares.iter());
        for filled in &done.filled {
            paged.put_all(filled.range.start, &filled.frames);
            paged.mapped_bytes[kind as usize] += filled.range.end - filled.range.start;
        }
        self.growing.end(create * granule);
        if done.created {
            self.counters().num_device_alloc.add(1);
        }
        if done.unmapped > 0 {
            let moved = donors[..done.unmapped].iter().map(|donor| donor.bytes).sum::<u64>();
            self.counters().remaps.add(1);
            self.counters().granules_moved.add(moved / granule);
        }
    }

    fn settle_donors(&mut self, donors: &[Donor], done: &Done) {
        let mut still_mapped = done.still_mapped.iter();
        for (at, donor) in donors.iter().enumerate() {
            let heap = &mut self.arena(donor.arena).heap;
            let pool = heap.blocks[donor.block].pool;
            if at < done.unmapped {
                heap.unhold_as_hole(donor.block);
                self.note_mapping(Action::SegmentUnmap, pool, donor.arena, donor.addr, donor.bytes);
                if let Some(paged) = &mut self.paged {
                    paged.mapped_bytes[kind_of(pool) as usize] -= donor.bytes;
                    paged.leave(&(donor.addr..donor.addr + donor.bytes));
                }
            } else {
                heap.unhold_as_free(donor.block);
                let frames = still_mapped.next();
                if let (Some(paged), Some(frames)) = (&mut self.paged, frames) {
                    paged.put_all(donor.addr, frames);
                }
            }
        }
    }

    /// Releases a piece of the window to the heap. Returns the free block that it is in now, if it is in one.
    fn let_go(&mut self, request: &Request, id: BlockId, usable: &[&Filled], stuck: &[&Filled]) -> Option<BlockId> {
        let heap = &mut self.arena(request.slot).heap;
        let block = heap.blocks[id];
        if block.state == State::Held {
            return Some(heap.unhold_as_free(id));
        }
        let range = block.range();
        // Mapped without access, and not unmapped again: nobody gets these addresses before they are unmapped.
        let frames = stuck.iter().map(|filled| filled.range.clone());
        let frames: Vec<Range<u64>> = frames.filter(|frame| range.contains(&frame.start)).collect();
        if !frames.is_empty() {
            if let Some(paged) = &mut self.paged {
                paged.stuck.push(Stuck { arena: request.slot, block: id, frames });
            }
            return None;
        }
        if !usable.iter().any(|filled| filled.range.contains(&block.addr)) {
            self.arena(request.slot).heap.unhold_as_hole(id);
            return None;
        }
        let free = self.arena(request.slot).heap.unhold_as_free(id);
        self.note_mapping(Action::SegmentMap, request.pool, request.slot, block.addr, block.size);
        Some(free)
    }

    pub(crate) fn note_mapping(&self, action: Action, pool: u16, slot: u32, addr: u64, bytes: u64) {
        let pool = self.pools.history_id(pool);
        let subject = Subject { addr, size: bytes, slot, tag: Tag::default(), pool };
        self.shell.history.lock().note(action, subject);
    }

    /// Makes `reserved` the sum of granules and segments (P3). Losses are counted before gains, so that memory which moved between pools
    /// raises no peak.
    pub(crate) fn account_for_granules(&mut self) {
        let Some(paged) = &mut self.paged else { return };
        let now = [paged.mapped_bytes[0], paged.mapped_bytes[1] + paged.spare_bytes()];
        let before = std::mem::replace(&mut paged.accounted, now);
        let counters = &self.shell.counters;
        let kinds = [PoolKind::Small, PoolKind::Large];
        for (kind, (before, now)) in kinds.into_iter().zip(before.into_iter().zip(now)) {
            counters.reserved_bytes.sub(kind, before.saturating_sub(now));
        }
        for (kind, (before, now)) in kinds.into_iter().zip(before.into_iter().zip(now)) {
            counters.reserved_bytes.add(kind, now.saturating_sub(before));
        }
        let (before, now): (u64, u64) = (before.iter().sum(), now.iter().sum());
        self.reserved = self.reserved + now - before;
    }
}

/// Number of granules that there is room for behind a window.
fn room(window: &Window, granule: u64) -> u64 {
    window.room.map_or(0, |end| (end - window.end.next_multiple_of(granule)) / granule)
}

impl Plan {
    /// Splits the plan into the driver's work and the memory held meanwhile.
    pub(crate) fn part(self) -> (Work, Held) {
        (self.work, self.held)
    }
}
