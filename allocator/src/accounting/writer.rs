//! The choice of the counters that an operation writes to: the shared counters while one thread is
//! at work, and the arenas' own counters once several are.
//!
//! While one thread does all the work of an allocator, it writes to the shared counters
//! (`counters.rs`), in any arena, and every peak is exact. Once several threads do,
//! each arena counts on its own cache lines, under its own lock, and *publishes* a bound of each
//! value, which is at least the value and at most 2 × [`Hot::credit`] more.
//!
//! Which of the two holds is noted in every arena ([`Writer`]) and changes under all locks
//! together.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::accounting::counter::Sum;
use crate::accounting::counters::Hot;
use crate::size_class::PoolKind;
use crate::state::AllocatorState;

/// The thread that writes to the shared counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CounterWriter(usize);

impl CounterWriter {
    /// None yet.
    pub(crate) const NONE: CounterWriter = CounterWriter(0);
    /// Several threads are at work: each arena counts for itself.
    pub(crate) const SEVERAL: CounterWriter = CounterWriter(1);
    /// The writer of an arena in which no thread has worked since a slow path last looked
    /// (`state/settled.rs`).
    pub(crate) const SETTLED: CounterWriter = CounterWriter(2);

    /// A number that no two running threads share.
    pub(crate) const fn number(self) -> usize {
        self.0
    }

    /// The calling thread. It may be mistaken for a thread that has ended, which does no harm,
    /// because that one is not at work any more.
    #[cfg(not(aquifer_shuttle))]
    #[inline]
    pub(crate) fn this_thread() -> CounterWriter {
        thread_local! {
            static HERE: u64 = const { 0 };
        }
        // Addresses of thread-local values differ from each other and, being aligned, from the
        // numbers above.
        HERE.with(|here| CounterWriter(std::ptr::from_ref(here).addr()))
    }

    #[cfg(aquifer_shuttle)]
    pub(crate) fn this_thread() -> CounterWriter {
        CounterWriter(3 + usize::from(shuttle::current::me()))
    }
}

/// The counters that an operation writes to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CounterTarget {
    /// The allocator state's shared counters: the caller is the only thread at work, holds every
    /// lock, or holds those of the shared state and for publishing.
    Shared(&'static AllocatorState),
    /// The arena's own counters.
    Own(&'static AllocatorState, &'static ArenaCounters),
}

impl CounterTarget {
    /// Counts that a block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(self, kind: PoolKind, size: u64, requested: u64) {
        match self {
            CounterTarget::Shared(state) => state.counters.allocated(kind, size, requested),
            CounterTarget::Own(state, own) => {
                own.add(state, Hot::Blocks, kind, 1);
                own.add(state, Hot::Bytes, kind, signed(size));
                own.add(state, Hot::Requested, kind, signed(requested));
            }
        }
    }

    /// Counts that a block is not live any more. `requested` is 0 if other streams still use the
    /// block.
    #[inline(always)]
    pub(crate) fn freed(self, kind: PoolKind, size: u64, requested: u64) {
        match self {
            CounterTarget::Shared(state) => state.counters.freed(kind, size, requested),
            CounterTarget::Own(state, own) => {
                own.add(state, Hot::Blocks, kind, -1);
                own.add(state, Hot::Bytes, kind, -signed(size));
                own.add(state, Hot::Requested, kind, -signed(requested));
            }
        }
    }

    /// Changes one quantity, on a slow path.
    pub(crate) fn change(self, quantity: Hot, kind: PoolKind, n: i64) {
        match self {
            CounterTarget::Shared(state) => state.counters.hot(quantity).change(kind, n),
            CounterTarget::Own(state, own) => own.add(state, quantity, kind, n),
        }
    }
}

/// One quantity in one arena and pool. It is negative if blocks are freed here whose allocation was
/// counted elsewhere.
#[derive(Debug, Default)]
struct ArenaCounter {
    current: AtomicU64,
    increases: AtomicU64,
    /// The published value: at least `current`, and at most two credits more.
    published: AtomicU64,
}

/// The counters of an arena, by quantity and pool. Only the holder of the arena's lock writes.
#[derive(Debug, Default)]
pub(crate) struct ArenaCounters([[ArenaCounter; 2]; 3]);

impl ArenaCounters {
    #[inline]
    fn add(&self, state: &AllocatorState, quantity: Hot, kind: PoolKind, n: i64) {
        let counter = &self.0[quantity as usize][kind as usize];
        let current = counter.current.load(Relaxed).wrapping_add(n.cast_unsigned());
        counter.current.store(current, Relaxed);
        if n > 0 {
            let increases = counter.increases.load(Relaxed).wrapping_add(n.cast_unsigned());
            counter.increases.store(increases, Relaxed);
        }
        if counter.published.load(Relaxed).wrapping_sub(current) > 2 * quantity.credit() {
            counter.publish_bound(state, quantity, kind, current);
        }
    }

    pub(crate) fn sums(&self, quantity: Hot) -> [Sum; 2] {
        self.0[quantity as usize]
            .each_ref()
            .map(|counter| Sum { current: counter.current.load(Relaxed), increases: counter.increases.load(Relaxed) })
    }

    /// Publishes every value exactly. Needs every lock.
    pub(crate) fn publish_exactly(&self, state: &AllocatorState) {
        for quantity in Hot::ALL {
            for kind in [PoolKind::Small, PoolKind::Large] {
                let counter = &self.0[quantity as usize][kind as usize];
                counter.publish(state, quantity, kind, counter.current.load(Relaxed));
            }
        }
    }

    /// Sets all counters to zero, for the next allocator in the same allocator state.
    pub(crate) fn clear(&self) {
        for counter in self.0.iter().flatten() {
            [&counter.current, &counter.increases, &counter.published]
                .into_iter()
                .for_each(|cell| cell.store(0, Relaxed));
        }
    }
}

impl ArenaCounter {
    /// Publishes a bound of `current`: on its way up one that is a sixteenth more, so that peaks
    /// are that exact, and on its way down one credit more, so that what goes up and down is
    /// published once.
    #[cold]
    fn publish_bound(&self, state: &AllocatorState, quantity: Hot, kind: PoolKind, current: u64) {
        let rises = self.published.load(Relaxed).wrapping_sub(current).cast_signed() < 0;
        let share = (current.cast_signed() / 16).max(quantity.credit().cast_signed() / 4096 + 1);
        let more = if rises { quantity.credit().min(share.unsigned_abs()) } else { quantity.credit() };
        self.publish(state, quantity, kind, current.wrapping_add(more));
    }

    #[cold]
    fn publish(&self, state: &AllocatorState, quantity: Hot, kind: PoolKind, value: u64) {
        let change = value.wrapping_sub(self.published.load(Relaxed));
        self.published.store(value, Relaxed);
        let _publishing = state.publishing.lock();
        state.counters.published(quantity, kind, change);
    }
}

/// Bytes of device memory as a signed difference; addresses have at most 57 bits.
#[inline]
fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}
