//! The draft of a remap: which frames would move, and how many granules would be bought from the
//! device. Nothing is changed or held yet.

use crate::backing::paged::dedicated::in_use;
use crate::backing::paged::donors::{Donors, add_reusable, donors};
use crate::backing::paged::frame_size::{BlockLength, Prospect};
use crate::backing::paged::layout::{FrameRoom, Largest};
use crate::backing::paged::recurrence::Point;
use crate::backing::paged::window::{self, Window};
use crate::cross_stream::waiting::waiting_held;
use crate::heap::{State, kind_of};
use crate::pools::table::Which;
use crate::request::Request;
use crate::size_class::PoolKind;
use crate::state::guard::StateGuard;

/// How much memory is taken ahead of need, where there is room behind the window: reserved memory
/// divided by this, and at most [`AHEAD_MAX`] bytes, whether bought from the device or moved.
/// Taking less costs more driver calls; taking more costs memory where it is bought. Figures in
/// docs/notes/2026-11-26-mapped-memory.md.
const AHEAD_SHARE: u64 = 64;
const AHEAD_MAX: u64 = 128 << 20;

/// Memory is bought from the device instead of moved in two cases: if a move would undo an earlier
/// one, to addresses that granules were moved away from; and always once the peak of memory in use
/// has not risen for half as long as it took to reach it. Reserved memory may then exceed that peak
/// by the peak divided by this. So programs that repeat themselves stop moving memory to and fro.
const UNDO_SHARE: u64 = 128;
/// As [`UNDO_SHARE`], if the program recurs and memory would move at a point where it moved before
/// (`recurrence.rs`).
const RECUR_SHARE: u64 = 64;
/// As [`RECUR_SHARE`], if the program has done nothing new for long. It would move memory in each
/// repetition for ever.
const REPEAT_SHARE: u64 = 32;

/// A program is *unsettled* if it makes memory move for more than one allocation in
/// [`UNSETTLED_SPACING`], plus [`UNSETTLED_ADVANCE`] at the start. It would move memory for ever,
/// so what is bought instead may be a share of what had to be bought: one [`UNSETTLED_SHARE`]th; if
/// memory moves twice as often as that, two, and so on up to [`UNSETTLED_MOST`]. The peak in use is
/// no measure here: where a device lags behind, much more has to be bought than is in use, as
/// memory that it is not done with cannot move.
const UNSETTLED_SPACING: u64 = 1024;
const UNSETTLED_ADVANCE: u64 = 512;
const UNSETTLED_SHARE: u64 = 16;
const UNSETTLED_MOST: u64 = 8;

/// The parts of a remap, before anything is held.
#[derive(Debug)]
pub(crate) struct Draft {
    pub(super) window: Window,
    pub(super) point: Point,
    pub(crate) donors: Donors,
    pub(super) spares: u64,
    /// Number of granules that must come from the device.
    pub(crate) buy: u64,
    /// True if they come from the device although granules might move.
    pub(crate) bought_though_movable: bool,
    /// Number of granules beyond the need that are mapped behind the window.
    pub(super) ahead: u64,
}

/// Drafts a remap for a request: finds the cheapest window, and takes the granules that it lacks
/// from the spare ones, from donors, and the rest from the device. Up to `instead_of_moving` bytes
/// may be bought from the device where granules might move. `None` if the request's heap has no
/// window.
pub(crate) fn draft(guard: &mut StateGuard, request: &Request, instead_of_moving: u64) -> Option<Draft> {
    // Waiting blocks do not count as in use: they could be had by waiting.
    let in_use = (in_use(guard) + request.size).saturating_sub(waiting_held(guard));
    let point = Point { requested: request.size, in_use };
    let paged = guard.paged.as_ref()?;
    let (granule, at_hand) = (paged.granule, paged.spares.granules());
    let window = window::cheapest(&guard.arena(request.slot).heap, request.pool, request.size, granule)?;
    let spares = window.lacks.min(at_hand);
    let need = window.lacks - spares;
    if need > 0
        && need <= instead_of_moving / granule
        && buys_instead_of_moving(guard, request.slot, &window, need, point)
    {
        let donors = Donors::default();
        return Some(Draft { window, point, donors, spares, buy: need, bought_though_movable: true, ahead: 0 });
    }
    let reach = reach(guard, &window, request.pool);
    // Granules moved ahead of need serve the next requests of the same kind. At most half of those
    // that could move beyond the need do.
    let wanted = if need > 0 { need + 2 * reach } else { 0 };
    let mut donors = donors(guard, wanted, Some(&window), Which::Unpromised);
    let ahead = (donors.granules.saturating_sub(need) / 2).min(reach);
    donors.truncate(need + ahead, granule);
    // Frames that give more than that are mapped whole rather than broken, if there is room.
    let ahead = donors.granules.saturating_sub(need).min(room(&window, granule));
    let buy = need.saturating_sub(donors.granules);
    Some(Draft { window, point, donors, spares, buy, bought_though_movable: false, ahead })
}

/// Serves what a draft would take from the device from memory that the request's own stream may use
/// again at once although the device is not done with it (`lingering.rs`). Frames stay where they
/// are that would be too large for the request's pool if they moved.
pub(super) fn reuse_unfinished(guard: &mut StateGuard, request: &Request, draft: &mut Draft) {
    let Some(paged) = guard.paged.as_ref().filter(|paged| paged.may_alias && request.pool < 2) else { return };
    let (granule, block) = (paged.granule, BlockLength::new(request.size, paged.granule));
    let pool = paged.mapped_bytes[kind_of(request.pool) as usize] / granule;
    let largest = Largest::in_region(paged.frame_size.largest(pool, block, Prospect::Moves)).kept();
    let room = FrameRoom::new(&draft.window.holes(guard.heap_of(request.slot), granule), largest);
    let before = draft.donors.granules;
    add_reusable(guard, request.slot, draft.buy, &draft.window, room, &mut draft.donors);
    draft.buy -= draft.donors.granules - before;
}

/// Bytes that the device must give for a request beyond the free memory here that may move. `None`
/// if the request is not served from mapped memory, if no addresses are free for it, or if nothing
/// is lacking.
pub(crate) fn lacking_bytes(guard: &mut StateGuard, request: &Request) -> Option<u64> {
    let granule = guard.paged_granule_for(request)?;
    let draft = draft(guard, request, 0)?;
    (draft.buy > 0).then_some(draft.buy * granule)
}

/// True if a request gets `granules` granules from the device although some might move: if an
/// earlier move would be undone, in programs that repeat themselves, and in programs that never
/// settle and would move memory for ever. See [`UNDO_SHARE`].
fn buys_instead_of_moving(guard: &StateGuard, slot: u32, window: &Window, granules: u64, point: Point) -> bool {
    let Some(paged) = &guard.paged else { return false };
    let heap = guard.heap_of(slot);
    let holes = window.pieces.iter().map(|&id| &heap.blocks[id]).filter(|block| block.state == State::Hole);
    let (start, end) = (window.start / paged.granule * paged.granule, window.end);
    let mut lacking = holes.map(|hole| hole.addr.max(start)..(hole.addr + hole.size).min(end));
    let undoes = lacking.any(|range| paged.was_left(&range));
    let settled = point.in_use <= paged.in_use_peak && peak_has_settled(guard);
    let (more, held) = (granules * paged.granule, guard.reserved + guard.growing.now());
    let instead = paged.bought_instead.saturating_sub(point.in_use.saturating_sub(paged.in_use_peak));
    let (grown, needed) = (held + more, held.saturating_sub(instead));
    let often = guard.counters().remaps.read().current / (UNSETTLED_ADVANCE + guard.searches() / UNSETTLED_SPACING);
    let unsettled = instead + more <= needed / UNSETTLED_SHARE * often.min(UNSETTLED_MOST);
    let peak = paged.in_use_peak.max(point.in_use);
    let within = |share| grown <= peak + peak / share;
    let recur_share = if paged.recurrence.repeats() { REPEAT_SHARE } else { RECUR_SHARE };
    (undoes || settled) && within(UNDO_SHARE)
        || settled && paged.recurrence.recurs_at(point) && within(recur_share)
        || unsettled
}

/// Notes what is in use once a request is served. Before, it is not known whether the request will
/// be.
pub(super) fn note_in_use(guard: &mut StateGuard, in_use: u64) {
    let searches = guard.searches();
    let Some(paged) = guard.paged.as_mut().filter(|paged| in_use > paged.in_use_peak) else { return };
    paged.bought_instead = paged.bought_instead.saturating_sub(in_use - paged.in_use_peak);
    (paged.in_use_peak, paged.peak_at) = (in_use, searches);
}

/// True if the peak of memory in use has not risen for half as long as it took to reach it.
pub(super) fn peak_has_settled(guard: &StateGuard) -> bool {
    let peak_at = guard.paged.as_ref().map_or(0, |paged| paged.peak_at);
    guard.searches() > peak_at + peak_at / 2
}

/// Number of granules that may be taken ahead of need and mapped behind a window of a pool. For a
/// small pool, at most as many as small pools have: the next large request would take more of them
/// back. For a private pool, at most as many as it has there: no other pool may use them.
fn reach(guard: &StateGuard, window: &Window, pool: u16) -> u64 {
    let Some(paged) = &guard.paged else { return 0 };
    let ahead = (guard.reserved / AHEAD_SHARE).min(AHEAD_MAX);
    let most = match (pool, kind_of(pool)) {
        (2.., _) => paged.mapped_around(window.start),
        (_, PoolKind::Small) => paged.mapped_bytes[PoolKind::Small as usize],
        (_, PoolKind::Large) => u64::MAX,
    };
    (ahead.min(most) / paged.granule).min(room(window, paged.granule))
}

/// Number of granules to take from the device beyond the need.
pub(super) fn bought_ahead(guard: &StateGuard, draft: &Draft, pool: u16, buyable: u64) -> u64 {
    let ahead = reach(guard, &draft.window, pool).saturating_sub(draft.buy);
    if draft.buy + ahead <= buyable { ahead } else { 0 }
}

/// Number of granules that there is room for behind a window.
fn room(window: &Window, granule: u64) -> u64 {
    window.room.map_or(0, |end| (end - window.end.next_multiple_of(granule)) / granule)
}
