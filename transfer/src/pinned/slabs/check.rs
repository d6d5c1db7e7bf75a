//! The invariants of slabs, asserted, and programs of random operations that must keep them.

use proptest::prelude::*;

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
        assert_eq!(listed, self.count(State::Free), "the indexes hold the free blocks");
        let resting: usize = self.resting.iter().map(Vec::len).sum();
        assert_eq!((resting, self.rests), (self.count(State::Resting), resting), "resting blocks are in their classes");
        assert_eq!(self.vacant.len(), self.count(State::Vacant));
    }

    fn check_slab(&self, number: u32, slab: &Slab<M>) {
        let first = |block: &&Block| block.slab == number && block.before.is_none() && block.state != State::Vacant;
        let mut block = self.blocks.iter().find(first).expect("a slab has a first block");
        let (mut at, mut free_before) = (slab.start, false);
        let grain = if slab.grain == Grain::Paged { class::PAGE } else { class::UNIT };
        loop {
            assert_eq!((block.slab, block.start), (number, at), "blocks lie side by side");
            assert!(block.bytes > 0 && block.bytes.is_multiple_of(grain));
            let free = block.state == State::Free;
            assert!(!(free && free_before), "free neighbours merge");
            if block.state == State::Resting {
                let here = &self.resting[class::index(block.bytes)];
                assert!(here.iter().any(|&resting| self.block(resting).start == at));
            }
            (at, free_before) = (at + block.bytes, free);
            match block.after {
                Some(after) => block = self.block(after),
                None => break,
            }
        }
        assert_eq!(at, slab.start + slab.bytes, "blocks add up to their slab");
    }

    fn count(&self, state: State) -> usize {
        self.blocks.iter().filter(|block| block.state == state).count()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take { bytes: usize, any: bool },
    Give { which: usize, waits: bool },
    Done { which: usize },
    Merge,
    Remove { bytes: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let sizes = prop_oneof![1..5_000_usize, 1..100_000_usize, 1..4_000_000_usize, 1..200_000_000_usize];
    let step = prop_oneof![
        6 => (sizes, any::<bool>()).prop_map(|(bytes, any)| Step::Take { bytes, any }),
        5 => (any::<usize>(), any::<bool>()).prop_map(|(which, waits)| Step::Give { which, waits }),
        3 => any::<usize>().prop_map(|which| Step::Done { which }),
        1 => Just(Step::Merge),
        1 => (1..64_000_000_usize).prop_map(|bytes| Step::Remove { bytes }),
    ];
    proptest::collection::vec(step, 1..200)
}

/// The slabs, and the blocks of the program.
#[derive(Default)]
struct Program {
    slabs: Slabs<()>,
    live: Vec<BlockId>,
    waiting: Vec<BlockId>,
    next_slab: usize,
}

impl Program {
    fn run(&mut self, step: &Step) {
        match *step {
            Step::Take { bytes, any } => self.take(bytes, any),
            Step::Give { which, waits } if !self.live.is_empty() => {
                let block = self.live.swap_remove(which % self.live.len());
                if waits {
                    self.slabs.wait(block);
                    self.waiting.push(block);
                } else {
                    self.slabs.rest(block);
                }
            }
            Step::Done { which } if !self.waiting.is_empty() => {
                self.slabs.rest(self.waiting.swap_remove(which % self.waiting.len()));
            }
            Step::Merge => self.slabs.merge_resting(),
            Step::Remove { bytes } => {
                let before = self.slabs.reserved();
                let removed: usize = self.slabs.remove_unused(bytes).iter().map(|slab| slab.bytes).sum();
                assert_eq!(self.slabs.reserved(), before - removed);
            }
            Step::Give { .. } | Step::Done { .. } => {}
        }
    }

    fn take(&mut self, bytes: usize, any: bool) {
        let class = class::round_up(bytes).unwrap();
        let block = self.slabs.take(class, any).unwrap_or_else(|| {
            if any {
                let fits = |block: &&Block| block.state == State::Free && block.bytes >= class;
                let grain = Grain::of(class);
                let same = |block: &&Block| self.slabs.slabs[block.slab as usize].as_ref().unwrap().grain == grain;
                assert_eq!(self.slabs.blocks.iter().filter(fits).filter(same).count(), 0, "what fits is found");
            }
            let bytes = class.next_multiple_of(class::SLAB);
            let start = self.next_slab;
            self.next_slab += bytes + class::SLAB;
            self.slabs.add(start, bytes, class, ())
        });
        assert_eq!(self.slabs.bytes(block), class, "a block is no larger than its class");
        if class >= PAGED {
            assert!(self.slabs.start(block).is_multiple_of(class::PAGE));
        }
        self.live.push(block);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn slabs_keep_their_invariants(steps in steps()) {
        let mut program = Program::default();
        for step in &steps {
            program.run(step);
            program.slabs.check();
        }
        let (live, waiting) = (std::mem::take(&mut program.live), std::mem::take(&mut program.waiting));
        live.into_iter().chain(waiting).for_each(|block| program.slabs.rest(block));
        program.slabs.check();
        prop_assert_eq!(program.slabs.unused(), program.slabs.reserved());
        program.slabs.remove_unused(usize::MAX);
        program.slabs.check();
        prop_assert_eq!((program.slabs.reserved(), program.slabs.count(State::Vacant)), (0, program.slabs.blocks.len()));
    }
}

#[test]
fn a_large_unused_slab_is_split_for_small_requests_only_if_allowed() {
    let mut slabs: Slabs<()> = Slabs::default();
    let large = slabs.add(0, 256 << 20, 256 << 20, ());
    slabs.rest(large);
    assert_eq!(slabs.take(1 << 20, false), None);
    let eighth = slabs.take(32 << 20, false).expect("an eighth is worth it");
    let small = slabs.take(1 << 20, false).expect("it is split already");
    slabs.rest(eighth);
    slabs.rest(small);
    slabs.merge_resting();
    assert_eq!(slabs.take(1 << 20, false), None, "it is whole again");
    assert!(slabs.take(1 << 20, true).is_some());
    slabs.check();
}

#[test]
fn the_smallest_block_that_fits_serves_and_a_slab_of_the_very_size_before_parts() {
    let mut slabs: Slabs<()> = Slabs::default();
    let part = slabs.add(0, 16 << 20, 12 << 20, ());
    let whole = slabs.add(32 << 20, 4 << 20, 4 << 20, ());
    let other = slabs.add(64 << 20, 8 << 20, 8 << 20, ());
    slabs.rest(whole);
    slabs.rest(other);
    slabs.merge_resting();
    let taken = slabs.take(4 << 20, false).unwrap();
    assert_eq!(slabs.start(taken), 32 << 20, "the whole slab of 4 MiB");
    let taken = slabs.take(3 << 20, false).unwrap();
    assert_eq!(slabs.start(taken), 12 << 20, "the part of 4 MiB");
    slabs.rest(part);
    slabs.check();
}
