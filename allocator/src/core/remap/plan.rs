//! The plan of a remap: the driver's work, and the memory that is held meanwhile.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{DeviceError, PhysicalOptions};

use crate::core::Core;
use crate::core::heap::{Holding, State};
use crate::core::paged::frames::{Frame, LooseFrames};
use crate::core::paged::layout::FrameSizes;
use crate::core::remap::donors::{Donor, Donors};
use crate::core::remap::draft::Draft;
use crate::core::remap::window::Window;
use crate::types::{After, BlockId, Recipient, Request, Use};

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

/// A remap that was decided. What takes part is held, so that no other operation takes it, until
/// [`Core::commit`] ends the remap, whatever the driver did.
#[derive(Debug)]
pub(crate) struct Remap {
    pub(super) target: Target,
    pub(super) of: Recipient,
    pub(super) donors: Vec<Donor>,
    /// Donors that stay mapped where they are until the device is done with them.
    pub(super) reused: Vec<Donor>,
    /// Number of granules of spare frames that take part.
    pub(super) spares: u64,
    /// What it takes from the device.
    pub(crate) purchase: Purchase,
    pub(crate) work: Work,
    pub(crate) done: Done,
}

/// Where memory comes to be.
#[derive(Debug)]
pub(crate) enum Target {
    /// A window of the heap: its pieces, by address. `peak` is the peak of use once its request is
    /// served. What moves `earns` credit (`policy.rs`), or does not.
    Window { pieces: Vec<BlockId>, peak: u64, earns: bool },
    /// Memory outside of heaps, in the reservation at `base`.
    Dedicated { base: u64 },
    /// Nowhere: the frames become spare, and the donors' pools have lent them.
    Spares,
}

/// Where memory comes from that is mapped at given addresses.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) donors: Donors,
    /// Number of granules of spare frames, and of granules to create.
    pub(crate) spares: u64,
    pub(crate) create: u64,
}

impl Remap {
    /// A remap that reuses nothing.
    pub(super) fn new(target: Target, of: Recipient, donors: Vec<Donor>, spares: u64, work: Work) -> Remap {
        let (reused, purchase, done) = (Vec::new(), Purchase::Needed, Done::default());
        Remap { target, of, donors, reused, spares, purchase, work, done }
    }
}

/// What a plan lacks.
#[derive(Debug)]
pub(crate) struct Short {
    /// Granules beyond those that may move and those that the device may give.
    pub(crate) missing: u64,
    /// Granules that may move once these uses are done.
    pub(crate) not_done: BTreeMap<Use, u64>,
}

impl Core {
    /// Turns a draft into a plan: checks it against the limits and holds all memory that takes
    /// part. `buyable` bytes may be taken from the device, some of them ahead of need.
    pub(crate) fn plan(
        &mut self,
        request: &Request,
        draft: Draft,
        buyable: u64,
        may_buy_ahead: bool,
    ) -> Result<Box<Remap>, Short> {
        let captured = self.pools.keeps_for_graphs(request.pool);
        let granule = draft.slots.granule;
        let buyable = buyable / granule;
        if draft.buy > buyable {
            return Err(Short { missing: draft.buy - buyable, not_done: draft.donors.not_done });
        }
        let more = draft.buy > 0 && may_buy_ahead && !draft.bought_though_movable;
        let bought_ahead = if more { self.bought_ahead(&draft, request.pool, granule, buyable) } else { 0 };
        let Draft { window, facts, slots, frame, donors, spares, buy, ahead, bought_though_movable } = draft;
        let create = buy + bought_ahead;
        // Frames that slots are to have are made, too, which may fail.
        let purchase = match (buy, bought_though_movable) {
            (1.., true) => Purchase::InsteadOfMoving,
            _ if bought_ahead > 0 || slots.bytes > granule => Purchase::Ahead,
            (1.., _) => Purchase::Needed,
            _ => Purchase::Nothing,
        };
        let sizes = FrameSizes::in_slots(slots, frame);
        let (pieces, fill, changed) = self.hold_window(&window, (ahead + bought_ahead) * granule);
        let donors = self.hold_donors(donors.into_joined(), &changed, window.end);
        let moves = |donor: &Donor| !captured && donor.after == After::NOTHING;
        let (donors, reused) = donors.into_iter().partition::<Vec<Donor>, _>(moves);
        // Private pools have no choice.
        let earns = facts.has_room() && !request.pool.is_private();
        let target = Target::Window { pieces, peak: facts.peak, earns };
        let work = Work { create, sizes, fill, ..Work::default() };
        let done = Done::default();
        Ok(Box::new(self.begin(Remap {
            target,
            of: request.recipient(),
            donors,
            reused,
            spares,
            purchase,
            work,
            done,
        })))
    }

    /// Plans to map memory at the ranges `fill` of dedicated memory. It can shrink by a granule, so
    /// frames are no larger.
    pub(crate) fn plan_dedicated(&mut self, base: u64, of: Recipient, fill: Vec<Range<u64>>, from: Sources) -> Remap {
        let donors = self.hold_all(from.donors.into_joined());
        let work = Work { create: from.create, sizes: FrameSizes::GRANULE, fill, ..Work::default() };
        self.begin(Remap::new(Target::Dedicated { base }, of, donors, from.spares, work))
    }

    /// Takes all frames of a remap that was planned, and completes the driver's work.
    pub(super) fn begin(&mut self, mut remap: Remap) -> Remap {
        let (unmap, reused) = (self.mappings_of(&remap.donors), self.mappings_of(&remap.reused));
        let paged = &mut self.paged;
        let spares = paged.spares.take(remap.spares);
        remap.spares = spares.granules();
        paged.in_flight += remap.spares;
        let Work { create, sizes, fill, .. } = remap.work;
        let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
        self.growing.begin(create * granule);
        remap.work = Work { granule, options, access, create, sizes, unmap, reused, spares, fill };
        remap
    }

    /// Takes the frames of donors out of the table of what is mapped where.
    fn mappings_of(&mut self, donors: &[Donor]) -> Vec<(Range<u64>, Vec<Frame>)> {
        let paged = &mut self.paged;
        let range = |donor: &Donor| donor.addr..donor.addr + donor.bytes;
        donors.iter().map(|donor| (range(donor), paged.forget_mapped(donor.addr, donor.bytes))).collect()
    }

    /// Holds the window and what is filled around it, and some bytes of the hole behind that. Returns
    /// the held pieces, the ranges to be filled, and the remainders of the blocks of which only a part
    /// was held.
    fn hold_window(
        &mut self,
        window: &Window,
        ahead: u64,
    ) -> (Vec<BlockId>, Vec<Range<u64>>, BTreeMap<BlockId, Holding>) {
        let heap = &mut self.heap;
        let (mut held, mut changed) = (Vec::new(), BTreeMap::new());
        let mut fill: Vec<Range<u64>> = Vec::new();
        let mut pieces = window.pieces.clone();
        let filled_to = window.fill.end + ahead;
        // The hole that memory is taken ahead in may begin where the window ends.
        let beyond = window.pieces.last().and_then(|&id| heap.block(id).next.some());
        pieces.extend(beyond.filter(|&id| ahead > 0 && heap.block(id).state == State::Hole));
        for id in pieces {
            let block = *heap.block(id);
            let is_hole = block.state == State::Hole;
            let (from, to) = if is_hole { (window.fill.start, filled_to) } else { (window.start, window.end) };
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

    /// Holds free memory without a window, in any order.
    pub(crate) fn hold_all(&mut self, mut chosen: Vec<Donor>) -> Vec<Donor> {
        // Each block from its high end down.
        chosen.sort_unstable_by_key(|donor| (donor.block, Reverse(donor.addr)));
        self.hold_donors(chosen, &BTreeMap::new(), 0)
    }

    /// Holds donors, in each block from high addresses to low ones.
    fn hold_donors(&mut self, chosen: Vec<Donor>, changed: &BTreeMap<BlockId, Holding>, window_end: u64) -> Vec<Donor> {
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
            let holding = self.heap.hold(id, donor.addr, donor.addr + donor.bytes);
            left = Some((donor, holding.below));
            donors.push(Donor { block: holding.id, ..donor });
        }
        donors
    }
}

/// The driver's work.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) granule: u64,
    pub(crate) options: PhysicalOptions,
    /// Devices that get access: this one and its peers.
    pub(crate) access: Vec<u32>,
    /// Granules to create.
    pub(crate) create: u64,
    pub(crate) sizes: FrameSizes,
    /// Mapped ranges to unmap, and the frames that are mapped there.
    pub(crate) unmap: Vec<(Range<u64>, Vec<Frame>)>,
    /// Mapped ranges whose frames are mapped elsewhere in addition, and these frames.
    pub(crate) reused: Vec<(Range<u64>, Vec<Frame>)>,
    /// Spare frames to map.
    pub(crate) spares: LooseFrames,
    /// Ranges to map frames at.
    pub(crate) fill: Vec<Range<u64>>,
}

/// The result of the work. Every frame of the work that was not broken, and every one created, is
/// in exactly one of the lists.
#[derive(Debug, Default)]
pub(crate) struct Done {
    /// The error that stopped the work, if any.
    pub(crate) error: Option<DeviceError>,
    /// True if creating a frame failed.
    pub(crate) at_creation: bool,
    /// True if memory was taken from the device and not given back.
    pub(crate) created: bool,
    /// How many of the ranges to unmap were unmapped; they are the first ones.
    pub(crate) unmapped: usize,
    /// Frames of the other ranges to unmap, by range.
    pub(crate) still_mapped: Vec<Vec<Frame>>,
    /// The frames of each range of [`Work::reused`] that are mapped only there.
    pub(crate) unmoved: Vec<Vec<Frame>>,
    /// The ranges at which frames are mapped now.
    pub(crate) filled: Vec<Filled>,
    /// Frames that are mapped nowhere.
    pub(crate) spares: LooseFrames,
}

/// Frames mapped side by side in a range to fill.
#[derive(Debug)]
pub(crate) struct Filled {
    pub(crate) range: Range<u64>,
    /// The frames, by address. If they are not usable, there is one.
    pub(crate) frames: Vec<Frame>,
    /// False if the driver neither gave access to them nor unmapped them again.
    pub(crate) usable: bool,
}

impl Filled {
    pub(super) fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }
}
