//! Arenas in which nothing happened since a thread with the shared state's lock last looked at
//! them. Slow paths visit the others, and of these only arenas that have what they look for.
//!
//! A thread that settles an arena notes facts about it here, and leaves [`CounterWriter::SETTLED`]
//! in place of the thread that works there. So the next thread that takes a block from the arena,
//! or frees one there, leaves the fast path once: it makes the arena an unsettled one
//! (`Arena::unsettle`) and enters it in the queue of the allocator state. A block that comes by the
//! queue of remote frees does so, too. The fast path itself is the same for settled arenas and
//! others.
//!
//! Invariant: every open arena is either settled, with facts that were true when a thread last had
//! its lock, or in the list of those that are not, or in the allocator state's queue.
//!
//! [`CounterWriter::SETTLED`]: crate::accounting::writer::CounterWriter::SETTLED

use std::collections::{BTreeMap, BTreeSet};

use crate::heap::Heap;
use crate::state::arena::{Arena, ArenaInner};

/// Up to so many open arenas, none is settled: looking at all of them costs less than finding out
/// which to look at. Few in tests and debug builds, so that these settle arenas, too.
pub(super) const FEW: usize = if cfg!(debug_assertions) { 2 } else { 32 };

/// What slow paths need to know of an arena.
#[derive(Debug)]
struct Facts {
    sums: Sums,
    /// Free bytes. No free block is larger.
    free: u64,
    /// The only free block, if there is only one, it is the home stream's in a default pool, and it
    /// is known done.
    single: Option<Single>,
    /// The streams that own foreign free blocks there.
    foreign_owners: Vec<u32>,
    /// True if a reservation there has no memory.
    has_empty: bool,
}

/// A free block, ordered as blocks that may be lent are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Single {
    pool: u16,
    size: u64,
    addr: u64,
    slot: u32,
}

impl Single {
    fn of(heap: &Heap, is_known: impl Fn(u64) -> bool) -> Option<Single> {
        let mut keys = [0, 1].into_iter().filter_map(|pool| Some((pool, heap.index(pool, heap.home)?.best_fit(1)?)));
        let (pool, key) = keys.next()?;
        let block = &heap.blocks[key.block()];
        let is_single = key.size() == heap.free && is_known(block.after);
        is_single.then_some(Single { pool, size: key.size(), addr: block.addr, slot: heap.home })
    }
}

/// Sums over arenas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// Number of live blocks.
    pub(crate) live: u64,
    /// Bytes in live and waiting blocks.
    pub(crate) in_use: u64,
}

impl Sums {
    pub(super) fn add(&mut self, inner: &ArenaInner) {
        self.live += inner.live;
        self.in_use += inner.heap.in_use();
    }

    fn sub(&mut self, other: Sums) {
        self.live -= other.live;
        self.in_use -= other.in_use;
    }
}

/// What a slow path looks for in arenas.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Sought {
    /// Free blocks of at least this many bytes.
    Free(u64),
    /// The best free block of at least this many bytes of a pool, and blocks that are not known
    /// done.
    Lent {
        /// The pool.
        pool: u16,
        /// Bytes.
        size: u64,
    },
    /// Strays of a stream.
    StraysOf(u32),
    /// Strays of any stream.
    Foreign,
    /// Reservations without memory.
    Empty,
}

/// The open arenas, as far as slow paths need not visit all of them.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    facts: BTreeMap<u32, Facts>,
    /// Those with free memory, by its bytes.
    by_free: BTreeSet<(u64, u32)>,
    /// Those of them that have no single, and the singles of the others.
    without_single: BTreeSet<(u64, u32)>,
    singles: BTreeSet<Single>,
    /// Those with foreign free blocks, by the foreign free blocks' owners.
    by_foreign_owner: BTreeSet<(u32, u32)>,
    with_empty: BTreeSet<u32>,
    /// Sums over the settled arenas.
    pub(super) sums: Sums,
    /// The open arenas that are not settled, but for those in the allocator state's queue.
    pub(super) unsettled: Vec<&'static Arena>,
}

impl Settled {
    /// Notes what there is in an arena. `is_done` tells of a tick of its stream whether it is known
    /// done.
    pub(super) fn insert(&mut self, inner: &ArenaInner, is_done: impl Fn(u64) -> bool) {
        let heap: &Heap = &inner.heap;
        let slot = heap.home;
        let mut sums = Sums::default();
        sums.add(inner);
        let mut foreign_owners: Vec<u32> = heap.foreign().map(|id| heap.blocks[id].owner).collect();
        foreign_owners.sort_unstable();
        foreign_owners.dedup();
        let single = if foreign_owners.is_empty() { Single::of(heap, is_done) } else { None };
        let has_empty = heap.empty_reservations().next().is_some();
        let facts = Facts { sums, free: heap.free, single, foreign_owners, has_empty };
        self.sums.add(inner);
        if facts.free > 0 {
            self.by_free.insert((facts.free, slot));
            match single {
                Some(single) => self.singles.insert(single),
                None => self.without_single.insert((facts.free, slot)),
            };
        }
        self.by_foreign_owner.extend(facts.foreign_owners.iter().map(|&owner| (owner, slot)));
        if facts.has_empty {
            self.with_empty.insert(slot);
        }
        self.facts.insert(slot, facts);
    }

    /// Forgets an arena. Returns false if it was not settled.
    pub(super) fn remove(&mut self, slot: u32) -> bool {
        let Some(facts) = self.facts.remove(&slot) else { return false };
        self.sums.sub(facts.sums);
        self.by_free.remove(&(facts.free, slot));
        match facts.single {
            Some(single) => self.singles.remove(&single),
            None => self.without_single.remove(&(facts.free, slot)),
        };
        for owner in facts.foreign_owners {
            self.by_foreign_owner.remove(&(owner, slot));
        }
        self.with_empty.remove(&slot);
        true
    }

    /// Notes that no arena is settled of those that are open.
    pub(super) fn clear(&mut self, open: &[&'static Arena]) {
        let mut unsettled = std::mem::take(&mut self.unsettled);
        unsettled.clear();
        unsettled.extend(open);
        if self.is_empty() {
            self.unsettled = unsettled;
        } else {
            *self = Settled { unsettled, ..Settled::default() };
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.facts.is_empty()
    }

    pub(super) fn has_foreign(&self) -> bool {
        !self.by_foreign_owner.is_empty()
    }

    /// The settled arenas that may have what is sought, by ascending number.
    pub(super) fn find(&self, sought: Sought) -> BTreeSet<u32> {
        match sought {
            Sought::Free(least) => self.by_free.range((least, 0)..).map(|&(_, slot)| slot).collect(),
            Sought::Lent { pool, size } => {
                let least = Single { pool, size, addr: 0, slot: 0 };
                let best = self.singles.range(least..).next().filter(|single| single.pool == pool);
                let others = self.without_single.range((size, 0)..).map(|&(_, slot)| slot);
                others.chain(best.map(|single| single.slot)).collect()
            }
            Sought::StraysOf(owner) => {
                self.by_foreign_owner.range((owner, 0)..=(owner, u32::MAX)).map(|&(_, slot)| slot).collect()
            }
            Sought::Foreign => self.by_foreign_owner.iter().map(|&(_, slot)| slot).collect(),
            Sought::Empty => self.with_empty.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer_device::{Device, Stream};
    use aquifer_sim::{SimConfig, SimDriver};
    use proptest::prelude::*;

    use super::*;
    use crate::{Allocation, Allocator, Config};

    const STREAMS: usize = 6;

    #[derive(Clone, Debug)]
    enum Step {
        Alloc { stream: usize, bytes: u64 },
        Free { which: prop::sample::Index, user: Option<usize> },
        Work { stream: usize },
        Trim { share: u64 },
        Refuse { stream: usize },
    }

    fn step() -> impl Strategy<Value = Step> {
        let bytes = prop_oneof![1..4096_u64, 4096..(1_u64 << 20), (1_u64 << 20)..(24 << 20)];
        prop_oneof![
            6 => (0..STREAMS, bytes).prop_map(|(stream, bytes)| Step::Alloc { stream, bytes }),
            5 => (any::<prop::sample::Index>(), prop::option::weighted(0.2, 0..STREAMS))
                .prop_map(|(which, user)| Step::Free { which, user }),
            2 => (0..STREAMS).prop_map(|stream| Step::Work { stream }),
            1 => (0..4_u64).prop_map(|share| Step::Trim { share }),
            1 => (0..STREAMS).prop_map(|stream| Step::Refuse { stream }),
        ]
    }

    /// An allocator, and what is allocated from it.
    struct Subject {
        allocator: Allocator,
        streams: Vec<Stream>,
        live: Vec<Allocation>,
    }

    impl Subject {
        fn new(options: &str, never_settles: bool) -> Subject {
            let device = Device::new(SimDriver::new(SimConfig::new(256 << 20)));
            let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
            allocator.state().shared().never_settles = never_settles;
            let streams = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
            Subject { allocator, streams, live: Vec::new() }
        }

        /// Takes a step, and tells what came of it.
        fn step(&mut self, step: &Step) -> String {
            match step {
                Step::Alloc { stream, bytes } => match self.allocator.alloc_bytes(*bytes, &self.streams[*stream]) {
                    Ok(block) => {
                        let ptr = block.ptr();
                        self.live.push(block);
                        format!("{ptr:?}")
                    }
                    Err(error) => error.to_string(),
                },
                Step::Free { which, user } => {
                    if !self.live.is_empty() {
                        let block = self.live.swap_remove(which.index(self.live.len()));
                        if let Some(user) = user {
                            block.record_stream(&self.streams[*user]).unwrap();
                        }
                    }
                    String::new()
                }
                Step::Work { stream } => {
                    if let Some(block) = self.live.last() {
                        self.streams[*stream].fill(block.ptr(), 1, 1).unwrap();
                    }
                    String::new()
                }
                Step::Trim { share } => {
                    let bytes = self.allocator.memory_reserved() / 4 * share;
                    self.allocator.trim_to(bytes).unwrap().to_string()
                }
                Step::Refuse { stream } => {
                    self.allocator.alloc_bytes(1 << 40, &self.streams[*stream]).unwrap_err().to_string()
                }
            }
        }

        fn state(&self) -> (String, String, String) {
            let allocator = &self.allocator;
            let snapshot = allocator.snapshot();
            (
                format!("{:?}", allocator.stats()),
                format!("{:?}", allocator.fragmentation(1 << 20)),
                format!("{:?}", snapshot.segments),
            )
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
        #[test]
        fn what_slow_paths_do_is_the_same_whether_they_visit_all_arenas_or_some(
            options in prop_oneof![
                Just(""),
                Just("backing:segments"),
                Just("history:100"),
                Just("backing:segments,max_split_size_mb:20"),
            ],
            steps in prop::collection::vec(step(), 1..120),
        ) {
            let [mut some, mut all] = [false, true].map(|never_settles| Subject::new(options, never_settles));
            for step in &steps {
                prop_assert_eq!(some.step(step), all.step(step), "{:?}", step);
            }
            prop_assert_eq!(some.state(), all.state());
            let state = some.allocator.state();
            let (sums, settled) = {
                let part = state.lock(None);
                ((part.live(), part.in_use_in_heaps()), part.settled.facts.len())
            };
            let guard = state.lock_all();
            prop_assert_eq!(sums, (guard.live(), guard.in_use_in_heaps()));
            prop_assert!(guard.settled.is_empty());
            prop_assert!(guard.arenas.len() <= FEW || settled > 0);
        }
    }
}
