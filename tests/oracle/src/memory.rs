//! Memory: who wrote each byte last, and who has read it since.
//!
//! A *space* is memory of its own: an allocation, a piece of physical memory, a block of pinned
//! host memory. A *mapping* makes a space, or a part of it, visible at a range of addresses of the
//! device or the host. Accesses are noted in the space, so mappings of one space are one memory
//! ("virtual aliasing" in the CUDA Programming Guide). Each mapping also notes the operations that
//! went through it, because they need its addresses until they are complete.
//!
//! Of each byte the last write and the reads since are kept. As long as nothing raced, all earlier
//! accesses happened before those, so nothing is lost up to the first race.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use aquifer_device::{AccessKind, CopyEnd, RawPhysical};

use crate::race::Op;

/// A range of device or host memory that an operation reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch {
    /// The first byte.
    pub at: CopyEnd,
    /// Length in bytes.
    pub bytes: u64,
    /// Whether it is read or written.
    pub kind: AccessKind,
}

impl Touch {
    /// The address space and the range of addresses.
    fn range(&self) -> (Side, Range<u64>) {
        let (side, start) = match self.at {
            CopyEnd::Device(ptr) => (Side::Device, ptr.0),
            CopyEnd::Host(ptr) => (Side::Host, ptr.0 as u64),
        };
        (side, start..start.saturating_add(self.bytes))
    }
}

/// Which addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Device,
    Host,
}

type SpaceId = u64;

/// A piece of a range of addresses.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    space: SpaceId,
    bytes: Range<u64>,
    kind: AccessKind,
    /// What to add to the bytes for addresses.
    shift: u64,
}

/// The latest accesses to each space.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accesses(HashMap<SpaceId, Cells>);

/// By first byte.
#[derive(Clone, Debug, Default)]
struct Cells(BTreeMap<u64, Cell>);

/// Bytes with the same accesses.
#[derive(Clone, Debug)]
struct Cell {
    end: u64,
    write: Option<Op>,
    reads: Latest,
}

#[derive(Clone, Debug)]
struct Mapping {
    end: u64,
    space: SpaceId,
    /// The first byte in the space.
    offset: u64,
    uses: Latest,
}

/// Operations that nothing orders among themselves. What comes before one of them is left out: what
/// is ordered after the later one is ordered after both.
#[derive(Clone, Debug, Default)]
struct Latest(Vec<Op>);

impl Latest {
    fn note(&mut self, op: Op, is_before: impl Fn(&Op) -> bool) {
        self.0.retain(|earlier| !is_before(earlier));
        self.0.push(op);
    }
}

/// Two accesses that nothing orders: the earlier one, and the addresses at which the later one
/// meets it.
pub(crate) type Conflict = (Op, Range<u64>);

/// All memory that is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    device: BTreeMap<u64, Mapping>,
    host: BTreeMap<u64, Mapping>,
    /// For each space, how many mappings and handles it has.
    holders: HashMap<SpaceId, u32>,
    accesses: Accesses,
    physical: HashMap<RawPhysical, SpaceId>,
    next: SpaceId,
}

impl Memory {
    /// An allocation at `start`: a new space with one mapping.
    pub(crate) fn allocate(&mut self, side: Side, start: u64, bytes: u64) {
        let space = self.new_space();
        self.side(side).insert(start, Mapping { end: start + bytes, space, offset: 0, uses: Latest::default() });
    }

    /// Physical memory that is mapped nowhere yet.
    pub(crate) fn create(&mut self, physical: RawPhysical) {
        let space = self.new_space();
        self.physical.insert(physical, space);
    }

    /// The handle is gone; the memory lasts as long as its mappings.
    pub(crate) fn release(&mut self, physical: RawPhysical) {
        if let Some(space) = self.physical.remove(&physical) {
            self.drop_holder(space);
        }
    }

    /// Maps all of `physical` at `start`.
    pub(crate) fn map(&mut self, start: u64, bytes: u64, physical: RawPhysical) {
        let Some(&space) = self.physical.get(&physical) else { return };
        *self.holders.entry(space).or_default() += 1;
        self.device.insert(start, Mapping { end: start + bytes, space, offset: 0, uses: Latest::default() });
    }

    /// The allocation at `start`, if one starts there.
    pub(crate) fn allocation(&self, side: Side, start: u64) -> Option<Range<u64>> {
        let mappings = if side == Side::Device { &self.device } else { &self.host };
        mappings.get(&start).map(|mapping| start..mapping.end)
    }

    /// Whether the address is in pinned host memory.
    pub(crate) fn is_page_locked(&self, address: u64) -> bool {
        self.host.range(..=address).next_back().is_some_and(|(_, mapping)| address < mapping.end)
    }

    /// Takes the mappings in `range` away. Returns the operations through them that `is_over` does
    /// not know to be complete.
    pub(crate) fn remove(&mut self, side: Side, range: Range<u64>, is_over: impl Fn(&Op) -> bool) -> Vec<Conflict> {
        let starts: Vec<u64> = self.side(side).range(range).map(|(&start, _)| start).collect();
        let mut pending = Vec::new();
        for start in starts {
            let Some(Mapping { end, space, uses, .. }) = self.side(side).remove(&start) else { continue };
            self.drop_holder(space);
            pending.extend(uses.0.into_iter().filter(|op| !is_over(op)).map(|op| (op, start..end)));
        }
        pending
    }

    /// Accesses by one operation: see [`Accesses::add`]. Notes that it went through the mappings.
    pub(crate) fn access(&mut self, op: Op, touches: &[Touch], is_before: impl Fn(&Op) -> bool) -> Vec<Conflict> {
        for touch in touches {
            let (side, range) = touch.range();
            for (_, mapping) in overlapping(self.side(side), range) {
                mapping.uses.note(op, &is_before);
            }
        }
        let pieces = self.pieces(touches);
        self.accesses.add(op, &pieces, is_before)
    }

    /// The accesses that an access by the host conflicts with, unless `is_before` puts them before
    /// it. It is over when the next operation begins, so it is not noted.
    pub(crate) fn host_access(&mut self, touch: Touch, is_before: impl Fn(&Op) -> bool) -> Vec<Conflict> {
        let pieces = self.pieces(&[touch]);
        pieces.iter().flat_map(|piece| self.accesses.conflicts(piece, &is_before)).collect()
    }

    /// The pieces of memory that are touched.
    pub(crate) fn pieces(&mut self, touches: &[Touch]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for touch in touches {
            let (side, range) = touch.range();
            pieces.extend(overlapping(self.side(side), range.clone()).map(|(&start, mapping)| {
                let shift = start.wrapping_sub(mapping.offset);
                let (from, to) = (range.start.max(start), range.end.min(mapping.end));
                let bytes = from.wrapping_sub(shift)..to.wrapping_sub(shift);
                Piece { space: mapping.space, bytes, kind: touch.kind, shift }
            }));
        }
        pieces
    }

    fn side(&mut self, side: Side) -> &mut BTreeMap<u64, Mapping> {
        match side {
            Side::Device => &mut self.device,
            Side::Host => &mut self.host,
        }
    }

    fn new_space(&mut self) -> SpaceId {
        self.next += 1;
        self.holders.insert(self.next, 1);
        self.next
    }

    fn drop_holder(&mut self, space: SpaceId) {
        if let Some(holders) = self.holders.get_mut(&space) {
            *holders -= 1;
            if *holders == 0 {
                self.holders.remove(&space);
                self.accesses.0.remove(&space);
            }
        }
    }
}

/// The mappings that hold addresses of a range.
fn overlapping(mappings: &mut BTreeMap<u64, Mapping>, range: Range<u64>) -> impl Iterator<Item = (&u64, &mut Mapping)> {
    let first = mappings.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
    let within = mappings.range_mut(first..range.end.max(first));
    within.filter(move |(_, mapping)| mapping.end > range.start && !range.is_empty())
}

impl Accesses {
    /// Notes the accesses of one operation. Returns those that it conflicts with and that
    /// `is_before` does not put before it.
    pub(crate) fn add(&mut self, op: Op, pieces: &[Piece], is_before: impl Fn(&Op) -> bool) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        for piece in pieces {
            conflicts.extend(self.conflicts(piece, &is_before));
            self.0.entry(piece.space).or_default().note(op, piece.bytes.clone(), piece.kind, &is_before);
        }
        conflicts
    }

    fn conflicts(&self, piece: &Piece, is_before: impl Fn(&Op) -> bool) -> Vec<Conflict> {
        let Piece { space, bytes, kind, shift } = piece;
        let Some(Cells(cells)) = self.0.get(space) else { return Vec::new() };
        let first = cells.range(..=bytes.start).next_back().map_or(bytes.start, |(&start, _)| start);
        let mut conflicts = Vec::new();
        for (&start, cell) in cells.range(first..bytes.end).filter(|(_, cell)| cell.end > bytes.start) {
            let at = start.max(bytes.start).wrapping_add(*shift)..cell.end.min(bytes.end).wrapping_add(*shift);
            let reads = cell.reads.0.iter().filter(|_| *kind == AccessKind::Write);
            let earlier = cell.write.iter().chain(reads).filter(|op| !is_before(op));
            conflicts.extend(earlier.map(|op| (*op, at.clone())));
        }
        conflicts
    }
}

impl Cells {
    fn note(&mut self, op: Op, range: Range<u64>, kind: AccessKind, is_before: impl Fn(&Op) -> bool) {
        self.split(range.start);
        self.split(range.end);
        let covered: Vec<u64> = self.0.range(range.clone()).map(|(&start, _)| start).collect();
        if kind == AccessKind::Write {
            covered.iter().for_each(|start| drop(self.0.remove(start)));
            self.0.insert(range.start, Cell { end: range.end, write: Some(op), reads: Latest::default() });
            return;
        }
        let mut gap = range.start;
        for start in covered {
            if gap < start {
                self.0.insert(gap, Cell { end: start, write: None, reads: Latest(vec![op]) });
            }
            if let Some(cell) = self.0.get_mut(&start) {
                cell.reads.note(op, &is_before);
                gap = cell.end;
            }
        }
        if gap < range.end {
            self.0.insert(gap, Cell { end: range.end, write: None, reads: Latest(vec![op]) });
        }
    }

    /// Makes cells end or begin at `at`.
    fn split(&mut self, at: u64) {
        if let Some((_, cell)) = self.0.range_mut(..at).next_back()
            && at < cell.end
        {
            let rest = cell.clone();
            cell.end = at;
            self.0.insert(at, rest);
        }
    }
}
