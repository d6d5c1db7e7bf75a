//! The plan of a remap. A remap moves frames (physical memory) from free blocks to a window of
//! addresses (`window.rs`) that a request needs. Under the allocator's lock, it is first drafted,
//! without changing anything (`draft.rs`); then planned, which holds all memory that takes part; and,
//! after the driver's work (`carry_out.rs`), settled (`settle.rs`).

use std::collections::BTreeMap;
use std::ops::Range;

use crate::backing::limits::Refusal;
use crate::backing::paged::carry_out::Work;
use crate::backing::paged::donors::Donor;
use crate::backing::paged::draft::{Draft, bought_ahead};
use crate::backing::paged::frames::Frame;
use crate::backing::paged::layout::Largest;
use crate::backing::paged::window::Window;
use crate::heap::{BlockId, Holding, State};
use crate::state::guard::StateGuard;
use crate::types::Request;

/// What a plan takes from the device. If the device refuses, the next plan takes less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Purchase {
    /// Nothing: only memory that moves serves the request.
    Nothing,
    /// What the request needs.
    Needed,
    /// Also more, ahead of need.
    Ahead,
    /// Also memory where granules could move instead.
    InsteadOfMoving,
}

impl Purchase {
    /// What to try after the device refused this.
    pub(crate) fn lower(self) -> Option<Purchase> {
        match self {
            Purchase::Nothing => None,
            Purchase::Needed => Some(Purchase::Nothing),
            Purchase::Ahead => Some(Purchase::Needed),
            Purchase::InsteadOfMoving => Some(Purchase::Ahead),
        }
    }
}

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
    /// What it takes from the device.
    pub(crate) purchase: Purchase,
}

/// Memory held while the driver is at work, so that no other operation takes it.
#[derive(Debug)]
pub(crate) struct Held {
    /// Pieces of the window, by address.
    pub(super) window: Vec<BlockId>,
    pub(super) donors: Vec<Donor>,
    /// Donors that stay mapped where they are until the device is done with them.
    pub(super) reused: Vec<Donor>,
    /// Number of granules to create.
    pub(super) create: u64,
    /// Number of granules of spare frames that take part.
    pub(super) spares: u64,
    /// The peak of use once the request is served.
    pub(super) peak: u64,
}

/// The result of planning.
#[derive(Debug)]
pub(crate) enum Planned {
    /// A plan to carry out.
    Ready(Box<Plan>),
    /// No run of free blocks and holes is long enough.
    NoAddresses,
    /// `missing` granules are lacking beyond those that may move and those that the device may
    /// give.
    Short { missing: u64, not_done: BTreeMap<(u32, u64), u64>, refusal: Refusal },
}

/// Turns a draft into a plan: checks it against the limits and holds all memory that takes part.
pub(crate) fn plan(guard: &mut StateGuard, request: &Request, draft: Draft, terms: &Terms) -> Planned {
    let Some(paged) = &guard.paged else { return Planned::NoAddresses };
    let (granule, frame) = (paged.granule, paged.frame);
    let buyable = terms.buyable / granule;
    if draft.buy > buyable {
        let (missing, not_done, refusal) = (draft.buy - buyable, draft.donors.not_done, terms.refusal);
        return Planned::Short { missing, not_done, refusal };
    }
    let more = draft.buy > 0 && terms.ahead && !draft.bought_though_movable;
    let bought_ahead = if more { bought_ahead(guard, &draft, request.pool, granule, buyable) } else { 0 };
    let Draft { window, facts, donors, spares, buy, ahead, bought_though_movable } = draft;
    let create = buy + bought_ahead;
    let purchase = match (bought_though_movable, bought_ahead, buy) {
        (true, ..) => Purchase::InsteadOfMoving,
        (_, 1.., _) => Purchase::Ahead,
        (.., 1..) => Purchase::Needed,
        _ => Purchase::Nothing,
    };
    let made = u32::try_from(facts.frame(request.size, create * granule, granule, frame) / granule).unwrap_or(1);
    let largest = Largest::in_region(made);
    let (held, fill, changed) = hold_window(guard, &window, (ahead + bought_ahead) * granule);
    let donors = hold_donors(guard, donors.into_joined(), &changed, window.end);
    let (donors, reused) = donors.into_iter().partition::<Vec<Donor>, _>(|donor| donor.after == 0);
    let mut work = work(guard, &donors, (spares, create), fill, largest);
    work.reused = mappings_of(guard, &reused);
    let spares = work.spares.granules();
    Planned::Ready(Box::new(Plan {
        work,
        held: Held { window: held, donors, reused, create, spares, peak: facts.peak },
        purchase,
    }))
}

/// The driver's work: unmap the held `donors`, and map their frames, `spares` granules of spare
/// ones and `create` new granules at the ranges `fill`, in frames that are no larger than `largest`
/// allows.
pub(crate) fn work(
    guard: &mut StateGuard,
    donors: &[Donor],
    (spares, create): (u64, u64),
    fill: Vec<Range<u64>>,
    largest: Largest,
) -> Work {
    let unmap = mappings_of(guard, donors);
    let Some(paged) = guard.paged.as_mut() else { return Work::default() };
    let spares = paged.spares.take(spares);
    paged.in_hands += spares.granules();
    let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
    guard.growing.begin(create * granule);
    Work { granule, options, access, create, largest, unmap, reused: Vec::new(), spares, fill }
}

/// Takes the frames of donors out of the table of what is mapped where.
fn mappings_of(guard: &mut StateGuard, donors: &[Donor]) -> Vec<(Range<u64>, Vec<Frame>)> {
    let Some(paged) = guard.paged.as_mut() else { return Vec::new() };
    let range = |donor: &Donor| donor.addr..donor.addr + donor.bytes;
    donors.iter().map(|donor| (range(donor), paged.forget_mapped(donor.addr, donor.bytes))).collect()
}

/// Holds the window, and some bytes of the hole behind it. Returns the held pieces, the ranges to
/// be filled, and the remainders of the blocks of which only a part was held.
fn hold_window(
    guard: &mut StateGuard,
    window: &Window,
    ahead: u64,
) -> (Vec<BlockId>, Vec<Range<u64>>, BTreeMap<BlockId, Holding>) {
    let granule = guard.paged.as_ref().map_or(1, |paged| paged.granule);
    let heap = &mut guard.heap;
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
pub(crate) fn hold_all(guard: &mut StateGuard, chosen: Vec<Donor>) -> Vec<Donor> {
    hold_donors(guard, chosen, &BTreeMap::new(), 0)
}

/// Holds donors, in each block from high addresses to low ones.
fn hold_donors(
    guard: &mut StateGuard,
    chosen: Vec<Donor>,
    changed: &BTreeMap<BlockId, Holding>,
    window_end: u64,
) -> Vec<Donor> {
    let mut donors = Vec::with_capacity(chosen.len());
    // The remainder of the block that the last donor was in.
    let mut left: Option<(Donor, Option<BlockId>)> = None;
    for donor in chosen {
        let same_block = |last: &Donor| last.block == donor.block;
        let in_window = changed.get(&donor.block);
        let id = match (left.filter(|(last, _)| same_block(last)), in_window) {
            // A donor in a block that the window cut lies in the remainder above or below the
            // held part.
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
        let holding = guard.heap.hold(id, donor.addr, donor.addr + donor.bytes);
        left = Some((donor, holding.below));
        donors.push(Donor { block: holding.id, ..donor });
    }
    donors
}

impl Plan {
    /// Splits the plan into the driver's work and the memory held meanwhile.
    pub(crate) fn into_parts(self) -> (Work, Held) {
        (self.work, self.held)
    }
}
