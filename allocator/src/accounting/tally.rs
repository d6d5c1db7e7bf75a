//! The choice of the counters that an operation writes to: the shared counters while one thread is at work, and the arenas' own counters
//! once several are.
//!
//! While one thread does all the work of an allocator, it writes to the shared counters (`counters.rs`), whatever arena it works
//! in, and every peak is exact. Once several threads do, each arena counts on its own cache lines, under its own lock, and
//! *publishes* a bound of each value, which is at least the value and at most 2 × [`Hot::credit`] more.
//!
//! Which of the two holds is noted in every arena ([`Writer`]) and changes under all locks together.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::accounting::counter::Sum;
use crate::accounting::counters::Hot;
use crate::shell::Shell;
use crate::size_class::PoolKind;

/// The thread that writes to the shared counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Writer(usize);

impl Writer {
    /// None yet.
    pub(crate) const NOBODY: Writer = Writer(0);
    /// Several threads are at work: each arena counts for itself.
    pub(crate) const SEVERAL: Writer = Writer(1);
    /// The writer of an arena in which no thread has worked since a slow path last looked (`shell/settled.rs`).
    pub(crate) const SETTLED: Writer = Writer(2);

    /// A number that no two running threads share.
    pub(crate) const fn number(self) -> usize {
        self.0
    }

    /// The calling thread. It may be mistaken for a thread that has ended, which does no harm, because that one is not at work any more.
    #[cfg(not(aquifer_shuttle))]
    #[inline]
    pub(crate) fn this_thread() -> Writer {
        thread_local! {
            static HERE: u64 = const { 0 };
        }
        // Addresses of thread-local values differ from each other and, being aligned, from the numbers above.
        HERE.with(|here| Writer(std::ptr::from_ref(here).addr()))
    }

    #[cfg(aquifer_shuttle)]
    pub(crate) fn this_thread() -> Writer {
        Writer(3 + usize::from(shuttle::current::me()))
    }
}

/// The counters that an operation writes to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tally {
    /// The shell's shared counters: the caller is the only thread at work, holds every lock, or holds those of the core
    /// and for publishing.
    Shared(&'static Shell),
    /// The arena's own counters.
    Own(&'static Shell, &'static OwnCounters),
}

impl Tally {
    /// Counts that a block of `size` bytes became live.
    #[inline]
    pub(crate) fn allocated(self, kind: PoolKind, size: u64, requested: u64) {
        match self {
            Tally::Shared(shell) => shell.counters.allocated(kind, size, requested),
            Tally::Own(shell, own) => {
                own.add(shell, Hot::Blocks, kind, 1);
                own.add(shell, Hot::Bytes, kind, signed(size));
                own.add(shell, Hot::Requested, kind, signed(requested));
            }
        }
    }

    /// Counts that a block is not live any more. `requested` is 0 if other streams still use the block.
    #[inline(always)]
    pub(crate) fn freed(self, kind: PoolKind, size: u64, requested: u64) {
        match self {
            Tally::Shared(shell) => shell.counters.freed(kind, size, requested),
            Tally::Own(shell, own) => {
                own.add(shell, Hot::Blocks, kind, -1);
                own.add(shell, Hot::Bytes, kind, -signed(size));
                own.add(shell, Hot::Requested, kind, -signed(requested));
            }
        }
    }

    /// Changes one quantity, on a slow path.
    pub(crate) fn change(self, quantity: Hot, kind: PoolKind, n: i64) {
        match self {
            Tally::Shared(shell) => shell.counters.hot(quantity).change(kind, n),
            Tally::Own(shell, own) => own.add(shell, quantity, kind, n),
        }
    }

    /// Changes the count and bytes of free pieces. Not inlined, because it is only for segments, and long.
    #[inline(never)]
    pub(crate) fn pieces(self, kind: PoolKind, count: i64, bytes: i64) {
        match self {
            Tally::Shared(shell) => {
                shell.counters.hot(Hot::Pieces).change(kind, count);
                shell.counters.hot(Hot::PieceBytes).change(kind, bytes);
            }
            Tally::Own(shell, own) => {
                own.add(shell, Hot::Pieces, kind, count);
                own.add(shell, Hot::PieceBytes, kind, bytes);
            }
        }
    }

    /// Has the effect of changing them, and changing them back.
    #[inline(never)]
    pub(crate) fn touch_pieces(self, kind: PoolKind, count: i64, bytes: i64) {
        match self {
            Tally::Shared(shell) => {
                shell.counters.hot(Hot::Pieces).touch(kind, count);
                shell.counters.hot(Hot::PieceBytes).touch(kind, bytes);
            }
            Tally::Own(..) => {
                self.pieces(kind, count, bytes);
                self.pieces(kind, -count, -bytes);
            }
        }
    }

    /// Counts that an oversize block became live, or is not live any more. Such blocks are rare, so they are counted in one place.
    #[cold]
    pub(crate) fn oversize(self, live: bool) {
        let (Tally::Shared(shell) | Tally::Own(shell, _)) = self;
        let _publishing = shell.publishing.lock();
        let counter = &shell.counters.oversize_allocations;
        if live {
            counter.add(1);
        } else {
            counter.sub(1);
        }
    }
}

/// One quantity in one arena and pool. It is negative if blocks are freed here whose allocation was counted elsewhere.
#[derive(Debug, Default)]
struct OwnCounter {
    current: AtomicU64,
    increases: AtomicU64,
    /// The published value: at least `current`, and at most two credits more.
    published: AtomicU64,
}

/// The counters of an arena, by quantity and pool. Only the holder of the arena's lock writes.
#[derive(Debug, Default)]
pub(crate) struct OwnCounters([[OwnCounter; 2]; 5]);

impl OwnCounters {
    #[inline]
    fn add(&self, shell: &Shell, quantity: Hot, kind: PoolKind, n: i64) {
        let counter = &self.0[quantity as usize][kind as usize];
        let current = counter.current.load(Relaxed).wrapping_add(n.cast_unsigned());
        counter.current.store(current, Relaxed);
        if n > 0 {
            let increases = counter.increases.load(Relaxed).wrapping_add(n.cast_unsigned());
            counter.increases.store(increases, Relaxed);
        }
        if counter.published.load(Relaxed).wrapping_sub(current) > 2 * quantity.credit() {
            counter.publish_bound(shell, quantity, kind, current);
        }
    }

    pub(crate) fn sums(&self, quantity: Hot) -> [Sum; 2] {
        self.0[quantity as usize]
            .each_ref()
            .map(|counter| Sum { current: counter.current.load(Relaxed), increases: counter.increases.load(Relaxed) })
    }

    /// Publishes every value exactly. Needs every lock.
    pub(crate) fn publish_exactly(&self, shell: &Shell) {
        for quantity in Hot::ALL {
            for kind in [PoolKind::Small, PoolKind::Large] {
                let counter = &self.0[quantity as usize][kind as usize];
                counter.publish(shell, quantity, kind, counter.current.load(Relaxed));
            }
        }
    }

    /// Sets all counters to zero, for the next allocator in the same shell.
    pub(crate) fn clear(&self) {
        for counter in self.0.iter().flatten() {
            [&counter.current, &counter.increases, &counter.published]
                .into_iter()
                .for_each(|cell| cell.store(0, Relaxed));
        }
    }
}

impl OwnCounter {
    /// Publishes a bound of `current`: on its way up one that is a sixteenth more, so that peaks are that exact, and on its way
    /// down one credit more, so that what goes up and down is published once.
    #[cold]
    fn publish_bound(&self, shell: &Shell, quantity: Hot, kind: PoolKind, current: u64) {
        let rises = self.published.load(Relaxed).wrapping_sub(current).cast_signed() < 0;
        let share = (current.cast_signed() / 16).max(quantity.credit().cast_signed() / 4096 + 1);
        let more = if rises { quantity.credit().min(share.unsigned_abs()) } else { quantity.credit() };
        self.publish(shell, quantity, kind, current.wrapping_add(more));
    }

    #[cold]
    fn publish(&self, shell: &Shell, quantity: Hot, kind: PoolKind, value: u64) {
        let change = value.wrapping_sub(self.published.load(Relaxed));
        self.published.store(value, Relaxed);
        let _publishing = shell.publishing.lock();
        shell.counters.published(quantity, kind, change);
    }
}

/// Bytes of device memory as a signed difference; addresses have at most 57 bits.
#[inline]
fn signed(bytes: u64) -> i64 {
    bytes.cast_signed()
}
