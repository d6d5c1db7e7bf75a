//! Memory by address: what is live, and what was freed and not given out again.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::RawStream;

/// How memory was allocated, which decides how it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Plain,
    Pool,
    Mapped,
    Pinned,
    Registered,
}

impl Family {
    pub(crate) fn is_host(self) -> bool {
        matches!(self, Family::Pinned | Family::Registered)
    }

    /// The call that frees it.
    pub(crate) fn right_free(self) -> &'static str {
        match self {
            Family::Plain => "cuMemFree",
            Family::Pool => "cuMemFreeAsync",
            Family::Mapped => "cuMemUnmap",
            Family::Pinned => "cuMemFreeHost",
            Family::Registered => "cuMemHostUnregister",
        }
    }
}

/// What a call was: its name, its stream if it has one, and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Made {
    pub(crate) call: &'static str,
    pub(crate) stream: Option<RawStream>,
    /// Greater for later calls.
    pub(crate) place: u64,
}

/// A range of memory and the call that made it live, or freed it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) end: u64,
    pub(crate) family: Family,
    pub(crate) made: Made,
}

#[derive(Debug, Default)]
pub(crate) struct Allocations {
    live: BTreeMap<u64, Block>,
    /// Never overlaps `live`.
    freed: BTreeMap<u64, Block>,
}

/// The block that holds an address.
fn holding(blocks: &BTreeMap<u64, Block>, address: u64) -> Option<(u64, Block)> {
    let (&start, block) = blocks.range(..=address).next_back()?;
    (address < block.end).then_some((start, *block))
}

/// Removes the blocks that overlap a range.
fn clear(blocks: &mut BTreeMap<u64, Block>, range: &Range<u64>) -> Vec<(u64, Block)> {
    let first = holding(blocks, range.start).map_or(range.start, |(start, _)| start);
    let starts: Vec<u64> = blocks.range(first..range.end.max(first)).map(|(&start, _)| start).collect();
    starts.into_iter().filter_map(|start| Some((start, blocks.remove(&start)?))).collect()
}

impl Allocations {
    /// How many freed blocks are remembered.
    const FREED_MAX: usize = 1 << 20;

    pub(crate) fn live(&self, address: u64) -> Option<(u64, Block)> {
        holding(&self.live, address)
    }

    pub(crate) fn freed(&self, address: u64) -> Option<(u64, Block)> {
        holding(&self.freed, address)
    }

    /// The range is given out. Returns live blocks there, whose end was not seen.
    pub(crate) fn make_room(&mut self, range: &Range<u64>) -> Vec<(u64, Block)> {
        clear(&mut self.freed, range);
        clear(&mut self.live, range)
    }

    /// Adds a block where there is room.
    pub(crate) fn add(&mut self, start: u64, block: Block) {
        self.live.insert(start, block);
    }

    /// Frees the live blocks in a range, and returns them as they were.
    pub(crate) fn free(&mut self, range: &Range<u64>, by: Made) -> Vec<(u64, Block)> {
        let freed = clear(&mut self.live, range);
        for &(start, block) in &freed {
            self.freed.insert(start, Block { made: by, ..block });
        }
        while self.freed.len() > Allocations::FREED_MAX {
            self.freed.pop_first();
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_is_remembered_until_its_addresses_are_given_out_again() {
        let mut all = Allocations::default();
        let made = |place| Made { call: "call", stream: None, place };
        for start in [100, 200] {
            all.add(start, Block { end: start + 100, family: Family::Pool, made: made(start) });
        }
        assert_eq!(all.live(199).map(|found| found.0), Some(100));
        all.free(&(100..200), made(1));
        assert!(all.live(100).is_none() && all.live(200).is_some());
        assert_eq!(all.freed(199).map(|(start, block)| (start, block.made.place)), Some((100, 1)));
        assert!(all.make_room(&(50..101)).is_empty());
        assert!(all.freed(100).is_none());
        assert_eq!(all.make_room(&(250..300)).len(), 1, "its end was not seen");
    }
}
