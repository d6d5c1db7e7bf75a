//! A crowd: several free blocks of one size, of which the lowest address is asked for.
//!
//! A crowd is a tournament. A block keeps the slot that it was given when it came in, and each slot knows the lowest address of all below
//! it; so neither blocks that come nor blocks that go move others. Slots are in groups of eight. The first group is the root, and below each
//! slot there is one group, made when it is needed: below slot `n` group `n + 1`. Eight blocks fit into the root alone, 72 into two levels, 584
//! into three, and 2.4 million into seven. A step compares all of a group, without branches, because which block is the lowest follows
//! no pattern.
//!
//! Invariants:
//! * a vacant slot has the address [`VACANT`] and names the next vacant one in place of a block;
//! * the `least` of a slot is the lowest address in it and in all slots below it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::heap::block::BlockId;

/// Slots of a group.
const GROUP: usize = 8;
/// The address of a vacant slot, higher than that of any block.
const VACANT: u64 = u64::MAX;
/// The end of the list of vacant slots.
const NO_SLOT: u32 = u32::MAX;

/// Free blocks of one size, by address.
#[derive(Debug)]
pub(super) struct Crowd {
    root: Group,
    /// The groups below: that below slot `n` is `below[n]`.
    below: Vec<Group>,
    /// The lowest address of all.
    least: u64,
    /// The first vacant slot.
    vacant: u32,
    /// Number of blocks.
    len: u32,
}

#[derive(Clone, Debug)]
#[repr(align(64))]
struct Group {
    least: [u64; GROUP],
    addrs: [u64; GROUP],
    blocks: [u32; GROUP],
}

impl Crowd {
    pub(super) fn new() -> Crowd {
        Crowd { root: Group::vacant(0, NO_SLOT), below: Vec::new(), least: VACANT, vacant: 0, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The lowest address of a block.
    #[inline]
    pub(super) fn least(&self) -> u64 {
        self.least
    }

    /// Takes a block in, and returns its slot.
    #[inline]
    pub(super) fn insert(&mut self, addr: u64, block: BlockId) -> u32 {
        if self.vacant == NO_SLOT {
            self.grow();
        }
        let slot = self.vacant;
        let mut at = slot as usize;
        let group = self.group_mut(at);
        group.addrs[at % GROUP] = addr;
        self.vacant = std::mem::replace(&mut group.blocks[at % GROUP], block.0);
        self.len += 1;
        self.least = self.least.min(addr);
        while at >= GROUP {
            let above = at / GROUP - 1;
            self.below[above].lower(at, addr);
            at = above;
        }
        self.root.lower(at, addr);
        slot
    }

    /// Lets the block in a slot go.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let vacant = std::mem::replace(&mut self.vacant, slot);
        let mut at = slot as usize;
        let group = self.group_mut(at);
        (group.addrs[at % GROUP], group.blocks[at % GROUP]) = (VACANT, vacant);
        self.len -= 1;
        let mut least_below = self.below.get(at).map_or(VACANT, Group::least);
        while at >= GROUP {
            let above = at / GROUP - 1;
            let group = &mut self.below[above];
            group.note(at, least_below);
            least_below = group.least();
            at = above;
        }
        self.root.note(at, least_below);
        self.least = self.root.least();
    }

    /// The block at the lowest address; [`BlockId::NONE`] if there is none.
    #[inline]
    pub(super) fn first(&self) -> BlockId {
        let mut group = &self.root;
        let mut before = 0;
        loop {
            let at = group.first();
            if group.addrs[at] == group.least[at] {
                return if self.len == 0 { BlockId::NONE } else { BlockId(group.blocks[at]) };
            }
            let slot = before + at;
            group = &self.below[slot];
            before = (slot + 1) * GROUP;
        }
    }

    /// Every block, the lowest address first. What comes next is found when it is asked for.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        // What is still to come: single slots, and all that is below slots, by the lowest address there.
        let mut to_come = BinaryHeap::new();
        let push_group = |to_come: &mut BinaryHeap<_>, number: usize| {
            let group = if number == 0 { Some(&self.root) } else { self.below.get(number - 1) };
            for (at, group) in group.into_iter().flat_map(|group| (0..GROUP).map(move |at| (at, group))) {
                if group.least[at] != VACANT {
                    to_come.push(Reverse((group.least[at], number * GROUP + at, true)));
                }
            }
        };
        push_group(&mut to_come, 0);
        std::iter::from_fn(move || {
            loop {
                let Reverse((_, slot, with_below)) = to_come.pop()?;
                let group = self.group(slot);
                if !with_below {
                    return Some(BlockId(group.blocks[slot % GROUP]));
                }
                if group.addrs[slot % GROUP] != VACANT {
                    to_come.push(Reverse((group.addrs[slot % GROUP], slot, false)));
                }
                push_group(&mut to_come, slot + 1);
            }
        })
    }

    /// True if the block is in the slot.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn has(&self, slot: u32, addr: u64, block: BlockId) -> bool {
        let at = slot as usize;
        (at < GROUP || at / GROUP <= self.below.len())
            && (self.group(at).addrs[at % GROUP], self.group(at).blocks[at % GROUP]) == (addr, block.0)
    }

    /// The group of a slot.
    #[inline]
    fn group(&self, slot: usize) -> &Group {
        if slot < GROUP { &self.root } else { &self.below[slot / GROUP - 1] }
    }

    #[inline]
    fn group_mut(&mut self, slot: usize) -> &mut Group {
        if slot < GROUP { &mut self.root } else { &mut self.below[slot / GROUP - 1] }
    }

    /// Adds a group of vacant slots. There must be no other ones.
    #[cold]
    fn grow(&mut self) {
        // A slot is a block of 2^32 at most, so slots have numbers below `NO_SLOT`.
        let first = u32::try_from((self.below.len() + 1) * GROUP).unwrap_or(NO_SLOT);
        self.below.push(Group::vacant(first, NO_SLOT));
        self.vacant = first;
    }
}

impl Group {
    /// A group of vacant slots, whose first slot has the given number.
    fn vacant(first: u32, then: u32) -> Group {
        let mut blocks = [then; GROUP];
        for (at, next) in (0..).zip(&mut blocks[..GROUP - 1]) {
            *next = first + at + 1;
        }
        Group { least: [VACANT; GROUP], addrs: [VACANT; GROUP], blocks }
    }

    /// Notes that a block came into this slot or below it.
    #[inline]
    fn lower(&mut self, slot: usize, addr: u64) {
        let least = &mut self.least[slot % GROUP];
        *least = addr.min(*least);
    }

    /// Notes what is in a slot and below it.
    #[inline]
    fn note(&mut self, slot: usize, below: u64) {
        self.least[slot % GROUP] = self.addrs[slot % GROUP].min(below);
    }

    /// The lowest address in the group and below.
    #[inline]
    fn least(&self) -> u64 {
        let [a, b, c, d, e, f, g, h] = self.least;
        a.min(b).min(c.min(d)).min(e.min(f).min(g.min(h)))
    }

    /// In or below which of the slots the lowest address is.
    #[inline]
    fn first(&self) -> usize {
        let lower =
            |one: (u64, usize), other: (u64, usize)| std::hint::select_unpredictable(other.0 < one.0, other, one);
        let slot = |at: usize| (self.least[at], at);
        let (low, high) = (
            lower(lower(slot(0), slot(1)), lower(slot(2), slot(3))),
            lower(lower(slot(4), slot(5)), lower(slot(6), slot(7))),
        );
        lower(low, high).1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn equals_an_ordered_map(
            steps in prop::collection::vec((0..2000_u64, 0..4_u8), 1..1500),
            most in prop::sample::select(vec![8_usize, 72, 584, 2000]),
        ) {
            let (mut crowd, mut model) = (Crowd::new(), BTreeMap::new());
            for (addr, action) in steps {
                let id = |addr: u64| BlockId(u32::try_from(addr).unwrap() + 1);
                if action == 0 && let Some((_, slot)) = model.pop_first() {
                    crowd.remove(slot);
                } else if let Some(slot) = model.remove(&addr) {
                    prop_assert!(crowd.has(slot, addr, id(addr)));
                    crowd.remove(slot);
                } else if model.len() < most {
                    model.insert(addr, crowd.insert(addr, id(addr)));
                }
                let first = model.keys().next().map_or(BlockId::NONE, |&addr| id(addr));
                prop_assert_eq!((crowd.first(), crowd.len() as usize), (first, model.len()));
            }
            let ids = model.keys().map(|&addr| BlockId(u32::try_from(addr).unwrap() + 1));
            prop_assert!(crowd.iter().eq(ids));
        }
    }
}
