//! A crowd: several free blocks of one size, of which that at the lowest address is asked for.
//!
//! A crowd is a tournament. Its slots are in groups of eight. A slot has either a block in it or a
//! group below it, and knows the lowest address there; so neither blocks that come nor blocks that
//! go move others, unless the crowd grows. The first group is the root, and group `n + 1` is below
//! slot `n`, so groups are added level by level: 64 blocks fit into two levels, 512 into three, a
//! million into seven. A step compares all of a group, without branches, because which block is the
//! lowest follows no pattern.
//!
//! Invariants:
//! * a slot without a block has the address [`VACANT`]. If it has no group below it, either, it
//!   names the next such slot in place of a block;
//! * a slot with a group below it has the lowest address there;
//! * a block knows its slot ([`Block::slot`](crate::heap::block::Block::slot)).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::heap::block::{BlockId, Records};

/// Slots of a group.
const GROUP: usize = 8;
/// Groups that a crowd has room for from the start. Crowds go from size to size, and should not
/// each have to grow; memory that is not used is not touched.
const GROUPS: usize = 8;
/// The address of a vacant slot, higher than that of any block.
const VACANT: u64 = u64::MAX;
/// The end of the list of vacant slots.
const NO_SLOT: u32 = u32::MAX;

/// Free blocks of one size, by address.
#[derive(Debug)]
pub(super) struct Crowd {
    /// The root, and the groups below: that below slot `n` is `groups[n + 1]`.
    groups: Vec<Group>,
    /// The block at the lowest address, and that address.
    first: BlockId,
    least: u64,
    /// The first vacant slot.
    vacant: u32,
    /// Number of blocks.
    len: u32,
}

#[derive(Clone, Debug)]
#[repr(align(64))]
struct Group {
    addrs: [u64; GROUP],
    blocks: [u32; GROUP],
}

impl Crowd {
    pub(super) fn new() -> Crowd {
        let mut groups = Vec::with_capacity(GROUPS);
        groups.push(Group::vacant(0));
        Crowd { groups, first: BlockId::NONE, least: VACANT, vacant: 0, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The block at the lowest address; [`BlockId::NONE`] if there is none.
    #[inline]
    pub(super) fn first(&self) -> BlockId {
        self.first
    }

    /// Takes a block in.
    #[inline]
    pub(super) fn insert(&mut self, blocks: &mut Records<'_>, id: BlockId) {
        if self.vacant == NO_SLOT {
            self.grow(blocks);
        }
        let (slot, addr) = (self.vacant, blocks[id].addr);
        blocks[id].set_slot(slot);
        let mut at = slot as usize;
        self.vacant = std::mem::replace(&mut self.groups[at / GROUP].blocks[at % GROUP], id.0);
        self.len += 1;
        self.first = std::hint::select_unpredictable(addr < self.least, id, self.first);
        self.least = addr.min(self.least);
        loop {
            let lowest = &mut self.groups[at / GROUP].addrs[at % GROUP];
            let before = std::mem::replace(lowest, addr.min(*lowest));
            // If it was lower before, so it is above.
            if (before < addr) | (at < GROUP) {
                return;
            }
            at = at / GROUP - 1;
        }
    }

    /// Lets the block in a slot go.
    #[inline]
    pub(super) fn remove(&mut self, slot: u32) {
        let mut at = slot as usize;
        let group = &mut self.groups[at / GROUP];
        group.blocks[at % GROUP] = std::mem::replace(&mut self.vacant, slot);
        let addr = std::mem::replace(&mut group.addrs[at % GROUP], VACANT);
        self.len -= 1;
        while at >= GROUP {
            let lowest = self.groups[at / GROUP].least();
            at = at / GROUP - 1;
            let before = std::mem::replace(&mut self.groups[at / GROUP].addrs[at % GROUP], lowest);
            // If it was as low before, nothing changes above.
            if before == lowest {
                return;
            }
        }
        if addr == self.least {
            self.find_first();
        }
    }

    #[inline]
    fn find_first(&mut self) {
        let mut at = self.groups[0].first();
        while let Some(group) = self.groups.get(at + 1) {
            at = (at + 1) * GROUP + group.first();
        }
        let group = &self.groups[at / GROUP];
        self.least = group.addrs[at % GROUP];
        self.first = if self.len == 0 { BlockId::NONE } else { BlockId(group.blocks[at % GROUP]) };
    }

    /// Every block, the lowest address first. What comes next is found when it is asked for.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        // The slots whose blocks, or blocks below, are still to come, by the lowest address there.
        let mut to_come = BinaryHeap::new();
        let extend = |to_come: &mut BinaryHeap<_>, number: usize| {
            let slots = (number * GROUP..).zip(self.groups[number].addrs);
            to_come.extend(slots.filter(|&(_, addr)| addr != VACANT).map(|(slot, addr)| Reverse((addr, slot))));
        };
        extend(&mut to_come, 0);
        std::iter::from_fn(move || {
            loop {
                let Reverse((_, slot)) = to_come.pop()?;
                if slot + 1 >= self.groups.len() {
                    return Some(BlockId(self.groups[slot / GROUP].blocks[slot % GROUP]));
                }
                extend(&mut to_come, slot + 1);
            }
        })
    }

    /// True if the block is in the slot.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn has(&self, slot: u32, addr: u64, id: BlockId) -> bool {
        let at = slot as usize;
        let group = self.groups.get(at / GROUP);
        at + 1 >= self.groups.len()
            && group.is_some_and(|group| (group.addrs[at % GROUP], group.blocks[at % GROUP]) == (addr, id.0))
    }

    /// Adds a group below the first slot that has none. That slot has a block, because none is
    /// vacant; the block goes to the new group.
    #[cold]
    fn grow(&mut self, blocks: &mut Records<'_>) {
        let above = self.groups.len() - 1;
        // There are fewer slots than twice the number of blocks, which is below 2^32; and a heap
        // with 2^31 free blocks of one size would need 128 GiB for its records.
        let first = u32::try_from(self.groups.len() * GROUP).unwrap_or(NO_SLOT);
        let mut group = Group::vacant(first);
        let upper = &self.groups[above / GROUP];
        (group.addrs[0], group.blocks[0]) = (upper.addrs[above % GROUP], upper.blocks[above % GROUP]);
        blocks[BlockId(group.blocks[0])].set_slot(first);
        self.groups.push(group);
        self.vacant = first + 1;
    }
}

impl Group {
    /// A group of vacant slots, of which the first has the given number. The last one is the end of
    /// the list.
    fn vacant(first: u32) -> Group {
        let mut blocks = [NO_SLOT; GROUP];
        (first + 1..).zip(&mut blocks[..GROUP - 1]).for_each(|(next, block)| *block = next);
        Group { addrs: [VACANT; GROUP], blocks }
    }

    /// The lowest address.
    #[inline]
    fn least(&self) -> u64 {
        let [a, b, c, d, e, f, g, h] = self.addrs;
        a.min(b).min(c.min(d)).min(e.min(f).min(g.min(h)))
    }

    /// Which slot has the lowest address.
    #[inline]
    fn first(&self) -> usize {
        let lower =
            |one: (u64, usize), other: (u64, usize)| std::hint::select_unpredictable(other.0 < one.0, other, one);
        let slot = |at: usize| (self.addrs[at], at);
        let low = lower(lower(slot(0), slot(1)), lower(slot(2), slot(3)));
        let high = lower(lower(slot(4), slot(5)), lower(slot(6), slot(7)));
        lower(low, high).1
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::heap::block::{Block, Slab};

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
        #[test]
        fn equals_an_ordered_map(
            steps in prop::collection::vec((0..2000_u64, 0..4_u8), 1..2500),
            most in prop::sample::select(vec![8_usize, 64, 512, 2000]),
        ) {
            let (mut crowd, mut blocks, mut model) = (Crowd::new(), Slab::default(), BTreeMap::new());
            for (addr, action) in steps {
                let gone = if action == 0 { model.pop_first() } else { model.remove_entry(&addr) };
                if let Some((addr, id)) = gone {
                    prop_assert!(crowd.has(blocks[id].slot(), addr, id));
                    crowd.remove(blocks[id].slot());
                    blocks.remove(id);
                } else if model.len() < most {
                    let id = blocks.insert(Block { addr, ..Block::default() });
                    crowd.insert(&mut blocks.records(), id);
                    model.insert(addr, id);
                }
                let first = model.values().next().copied().unwrap_or(BlockId::NONE);
                prop_assert_eq!((crowd.first(), crowd.len() as usize), (first, model.len()));
            }
            prop_assert!(crowd.iter().eq(model.values().copied()));
            prop_assert!(model.iter().all(|(&addr, &id)| crowd.has(blocks[id].slot(), addr, id)));
        }
    }
}
