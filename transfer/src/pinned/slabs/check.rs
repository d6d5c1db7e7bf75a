//! The invariants of slabs, asserted. The random programs of the pool check them after each step.

use super::*;

impl<M> Slabs<M> {
    /// Asserts the invariants of the module.
    pub(crate) fn check(&self) {
        let mut reserved = 0;
        for (number, slab) in self.slabs.iter().enumerate() {
            let Some(slab) = slab else { continue };
            reserved += slab.bytes;
            self.check_slab(u32::try_from(number).unwrap(), slab);
        }
        assert_eq!(self.reserved, reserved, "reserved is the sum of slabs");
        let listed: usize = self.parts.iter().chain(&self.whole).map(BTreeSet::len).sum();
        assert_eq!(listed, self.count(BlockState::Free), "the indexes hold the free blocks");
        let deferred: usize = self.deferred.iter().map(Vec::len).sum();
        assert_eq!(
            (deferred, self.deferred_count),
            (self.count(BlockState::Deferred), deferred),
            "deferred blocks are in their classes"
        );
        assert_eq!(self.vacant.len(), self.count(BlockState::Vacant));
    }

    fn check_slab(&self, number: u32, slab: &Slab<M>) {
        let first =
            |block: &&Block| block.slab == number && block.before.is_none() && block.state != BlockState::Vacant;
        let mut block = self.blocks.iter().find(first).expect("a slab has a first block");
        let (mut at, mut free_before) = (slab.start, false);
        let grain = if slab.grain == Grain::Paged { class::PAGE } else { class::UNIT };
        loop {
            assert_eq!((block.slab, block.start), (number, at), "blocks lie side by side");
            assert!(block.bytes > 0 && block.bytes.is_multiple_of(grain));
            let free = block.state == BlockState::Free;
            assert!(!(free && free_before), "free neighbours merge");
            if block.state == BlockState::Deferred {
                let here = &self.deferred[class::index(block.bytes)];
                assert!(here.iter().any(|&deferred| self.block(deferred).start == at));
            }
            (at, free_before) = (at + block.bytes, free);
            match block.after {
                Some(after) => block = self.block(after),
                None => break,
            }
        }
        assert_eq!(at, slab.start + slab.bytes, "blocks add up to their slab");
    }

    fn count(&self, state: BlockState) -> usize {
        self.blocks.iter().filter(|block| block.state == state).count()
    }
}

#[test]
fn a_large_unused_slab_is_split_for_small_requests_only_if_allowed() {
    let mut slabs: Slabs<()> = Slabs::default();
    let large = slabs.add(0, 256 << 20, 256 << 20, ());
    slabs.defer(large);
    assert_eq!(slabs.take(1 << 20, false), None);
    let eighth = slabs.take(32 << 20, false).expect("an eighth is worth it");
    let small = slabs.take(1 << 20, false).expect("it is split already");
    slabs.defer(eighth);
    slabs.defer(small);
    slabs.merge_deferred();
    assert_eq!(slabs.take(1 << 20, false), None, "it is whole again");
    assert!(slabs.take(1 << 20, true).is_some());
    slabs.check();
}

#[test]
fn the_smallest_block_serves_and_a_whole_slab_of_the_exact_size_first() {
    let mut slabs: Slabs<()> = Slabs::default();
    let part = slabs.add(0, 16 << 20, 12 << 20, ());
    let whole = slabs.add(32 << 20, 4 << 20, 4 << 20, ());
    let other = slabs.add(64 << 20, 8 << 20, 8 << 20, ());
    slabs.defer(whole);
    slabs.defer(other);
    slabs.merge_deferred();
    let taken = slabs.take(4 << 20, false).unwrap();
    assert_eq!(slabs.start(taken), 32 << 20, "the whole slab of 4 MiB");
    let taken = slabs.take(3 << 20, false).unwrap();
    assert_eq!(slabs.start(taken), 12 << 20, "the part of 4 MiB");
    slabs.defer(part);
    slabs.check();
}
