//! Memory: who wrote each byte last, and who has read it since.
//!
//! A *space* is memory of its own: an allocation, a piece of physical memory, a block of page-locked
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

#[derive(Clone, Debug, Default)]
struct Space {
    /// By first byte.
    cells: BTreeMap<u64, Cell>,
    /// Mappings, and the handle of physical memory.
    holders: u32,
}

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

/// The latest operation of each line.
#[derive(Clone, Debug, Default)]
struct Latest(Vec<Op>);

impl Latest {
    fn note(&mut self, op: Op) {
        match self.0.iter_mut().find(|latest| latest.line == op.line) {
            Some(latest) => *latest = op,
            None => self.0.push(op),
        }
    }
}

/// Two accesses that nothing orders: the earlier one, and the addresses at which the later one meets
/// it.
pub(crate) type Conflict = (Op, Range<u64>);

/// All memory that is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Memory {
    device: BTreeMap<u64, Mapping>,
    host: BTreeMap<u64, Mapping>,
    spaces: HashMap<SpaceId, Space>,
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
        if let Some(space) = self.spaces.get_mut(&space) {
            space.holders += 1;
        }
        self.device.insert(start, Mapping { end: start + bytes, space, offset: 0, uses: Latest::default() });
    }

    /// The allocation at `start`, if one starts there.
    pub(crate) fn allocation(&self, side: Side, start: u64) -> Option<Range<u64>> {
        let mappings = if side == Side::Device { &self.device } else { &self.host };
        mappings.get(&start).map(|mapping| start..mapping.end)
    }

    /// Whether the address is in page-locked host memory.
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

    /// Accesses by one operation. Returns the accesses that it conflicts with and that `is_before`
    /// does not put before it. `op` is `None` for an access by the host, which is over when the next
    /// operation begins.
    pub(crate) fn access(
        &mut self,
        op: Option<Op>,
        touches: &[Touch],
        is_before: impl Fn(&Op) -> bool,
    ) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        for touch in touches {
            let (side, range) = touch.range();
            for (space, bytes, shift) in self.resolve(side, range, op) {
                let Some(space) = self.spaces.get_mut(&space) else { continue };
                let found = space.access(op, bytes, touch.kind, &is_before);
                conflicts.extend(found.into_iter().map(|(first, at)| {
                    (first, at.start.wrapping_add(shift)..at.end.wrapping_add(shift))
                }));
            }
        }
        conflicts
    }

    /// The pieces of a range of addresses: the space, the bytes in it, and what to add to them for
    /// addresses. Notes that `op` went through the mappings.
    fn resolve(&mut self, side: Side, range: Range<u64>, op: Option<Op>) -> Vec<(SpaceId, Range<u64>, u64)> {
        let mappings = self.side(side);
        let first = mappings.range(..=range.start).next_back().map_or(range.start, |(&start, _)| start);
        let mut pieces = Vec::new();
        for (&start, mapping) in mappings.range_mut(first..range.end) {
            let (from, to) = (range.start.max(start), range.end.min(mapping.end));
            if from < to {
                op.into_iter().for_each(|op| mapping.uses.note(op));
                let shift = start.wrapping_sub(mapping.offset);
                pieces.push((mapping.space, from.wrapping_sub(shift)..to.wrapping_sub(shift), shift));
            }
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
        self.spaces.insert(self.next, Space { cells: BTreeMap::new(), holders: 1 });
        self.next
    }

    fn drop_holder(&mut self, id: SpaceId) {
        if let Some(space) = self.spaces.get_mut(&id) {
            space.holders -= 1;
            if space.holders == 0 {
                self.spaces.remove(&id);
            }
        }
    }
}

impl Space {
    fn access(
        &mut self,
        op: Option<Op>,
        range: Range<u64>,
        kind: AccessKind,
        is_before: impl Fn(&Op) -> bool,
    ) -> Vec<Conflict> {
        self.split(range.start);
        self.split(range.end);
        let mut conflicts = Vec::new();
        for (&start, cell) in self.cells.range(range.clone()) {
            let reads = cell.reads.0.iter().filter(|_| kind == AccessKind::Write);
            let earlier = cell.write.iter().chain(reads).filter(|op| !is_before(op));
            conflicts.extend(earlier.map(|op| (*op, start..cell.end)));
        }
        let Some(op) = op else { return conflicts };
        let covered: Vec<u64> = self.cells.range(range.clone()).map(|(&start, _)| start).collect();
        if kind == AccessKind::Write {
            covered.iter().for_each(|start| drop(self.cells.remove(start)));
            self.cells.insert(range.start, Cell { end: range.end, write: Some(op), reads: Latest::default() });
            return conflicts;
        }
        let mut gap = range.start;
        for start in covered {
            if gap < start {
                self.cells.insert(gap, Cell { end: start, write: None, reads: Latest(vec![op]) });
            }
            if let Some(cell) = self.cells.get_mut(&start) {
                cell.reads.note(op);
                gap = cell.end;
            }
        }
        if gap < range.end {
            self.cells.insert(gap, Cell { end: range.end, write: None, reads: Latest(vec![op]) });
        }
        conflicts
    }

    /// Makes cells end or begin at `at`.
    fn split(&mut self, at: u64) {
        if let Some((_, cell)) = self.cells.range_mut(..at).next_back()
            && at < cell.end
        {
            let rest = cell.clone();
            cell.end = at;
            self.cells.insert(at, rest);
        }
    }
}
