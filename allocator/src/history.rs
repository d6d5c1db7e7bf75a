//! History: a ring buffer of trace entries, with PyTorch's actions. It is off by default, and then
//! costs one branch per operation.
//!
//! Entries are made, and snapshots taken, under the allocator's lock, so that a snapshot's history
//! and segments agree. Nothing is formatted until a snapshot is taken.
//!
//! The actions of one moment have one stamp, so that an operation reads the clock once. The ring has
//! a place for each entry that is to be kept.

use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use crate::tags::Tag;
use crate::types::StreamId;

/// Kind of a history entry, under PyTorch's names of trace actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Action {
    /// A block became live; the size is that requested.
    Alloc,
    /// A block's holder freed it.
    FreeRequested,
    /// A block became free: no stream uses it any more.
    FreeCompleted,
    /// A segment came from the device.
    SegmentAlloc,
    /// A segment went back to the device.
    SegmentFree,
    /// Memory was mapped at these addresses.
    SegmentMap,
    /// Memory was unmapped from these addresses.
    SegmentUnmap,
    /// A snapshot was taken; the size is that of active blocks then.
    Snapshot,
    /// An allocation failed; in place of an address, the entry has the device's free bytes.
    Oom,
}

/// A free that completes as it is requested.
pub(crate) const FREE: &[Action] = &[Action::FreeRequested, Action::FreeCompleted];

/// The subject of an action: the memory that something happened to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Subject {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    /// The private pool, numbered as by [`crate::core::pools::PoolTable::history_id`]; 0 is the
    /// default pools.
    pub(crate) pool: u32,
}

/// An action with its subject and its time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) addr: u64,
    pub(crate) size: u64,
    pub(crate) stamp: Stamp,
    pub(crate) stream: StreamId,
    pub(crate) tag: Tag,
    pub(crate) pool: u32,
    pub(crate) action: Action,
}

const _: () = assert!(size_of::<Entry>() == 40, "an entry has no room to spare");

impl Entry {
    /// The entry of an action that happens at `stamp`.
    pub(crate) fn new(action: Action, subject: Subject, stamp: Stamp) -> Entry {
        let Subject { addr, size, stream, tag, pool } = subject;
        Entry { addr, size, stamp, stream, tag, pool, action }
    }
}

/// Options of [`Allocator::record_history`](crate::Allocator::record_history).
///
/// ```
/// use aquifer::memory::{Action, HistoryOptions};
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let memory = Allocator::of(&device)?;
/// memory.record_history(HistoryOptions { entries: 100_000, skip: vec![Action::FreeRequested], clear: true });
/// drop(memory.alloc_bytes(512, device.default_stream())?);
/// let actions: Vec<Action> = memory.snapshot().trace().iter().map(|entry| entry.action).collect();
/// assert_eq!(actions, [Action::SegmentMap, Action::Alloc, Action::FreeCompleted]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistoryOptions {
    /// Number of entries that are kept, at 40 bytes of host memory each; newer entries
    /// replace the oldest ones. 0 stops recording and forgets everything.
    pub entries: usize,
    /// Actions that are not recorded.
    pub skip: Vec<Action>,
    /// True to forget the entries recorded before.
    pub clear: bool,
}

/// The ring. Empty and off by default.
///
/// Invariants: it holds the latest entries, at most `capacity` of them; they are in order from
/// `next` on and then from the start, and `next` is their number while there are fewer.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// Number of entries that are kept.
    capacity: usize,
    ring: Vec<Entry>,
    /// Place of the next entry.
    next: usize,
    /// Number of entries since recording began.
    noted: usize,
    /// Actions that are not recorded, as bits.
    skipped: u16,
    latest: Stamp,
}

impl History {
    /// Starts recording into a ring of `capacity` entries, or stops (0). Stopping forgets all
    /// entries.
    pub(crate) fn record(&mut self, capacity: usize, skip: &[Action]) {
        if capacity > 0 {
            Stamp::prepare();
        }
        self.capacity = capacity;
        self.skipped = skip.iter().fold(0, |bits, &action| bits | bit(action));
        if capacity == 0 {
            self.ring = Vec::new();
            self.clear();
            return;
        }
        let next = self.next.min(self.ring.len());
        self.ring.rotate_left(next);
        let excess = self.ring.len().saturating_sub(capacity);
        self.ring.drain(..excess);
        self.next = if self.ring.len() < capacity { self.ring.len() } else { 0 };
    }

    /// True if recording is on.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Notes actions that happen now, except those that are not to be recorded.
    #[inline]
    pub(crate) fn note(&mut self, actions: &[Action], subject: Subject) {
        if self.capacity == 0 {
            return;
        }
        // Stamps that two processors took at nearly the same moment may be the wrong way round;
        // then the later entry has the time of the earlier one.
        self.latest = self.latest.max(Stamp::now());
        for &action in actions.iter().filter(|&&action| self.skipped & bit(action) == 0) {
            let entry = Entry::new(action, subject, self.latest);
            match self.ring.get_mut(self.next) {
                Some(place) => *place = entry,
                None => self.ring.push(entry),
            }
            self.noted += 1;
            self.next += 1;
            if self.next == self.capacity {
                self.next = 0;
            }
        }
    }

    /// The recorded entries, oldest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> + '_ {
        let (later, earlier) = self.ring.split_at(self.next.min(self.ring.len()));
        earlier.iter().chain(later).copied()
    }

    /// Number of entries that are kept; 0 if recording is off.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of entries overwritten since recording began.
    pub(crate) fn overwritten(&self) -> u64 {
        (self.noted - self.ring.len()) as u64
    }

    pub(crate) fn clear(&mut self) {
        self.ring.clear();
        (self.next, self.noted) = (0, 0);
    }
}

fn bit(action: Action) -> u16 {
    1 << action as u16
}

/// A moment, as a value of the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stamp(u64);

/// The counter, and a moment whose wall-clock time is known.
struct Anchor {
    clock: quanta::Clock,
    stamp: u64,
    since_1970_us: u64,
}

static ANCHOR: LazyLock<Anchor> = LazyLock::new(|| {
    let clock = quanta::Clock::new();
    let stamp = clock.raw();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Anchor { clock, stamp, since_1970_us: u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX) }
});

impl Stamp {
    /// Measures the counter's rate, if that was not done yet: it takes a millisecond or so, which
    /// no allocation should wait for.
    pub(crate) fn prepare() {
        LazyLock::force(&ANCHOR);
    }

    #[inline]
    pub(crate) fn now() -> Stamp {
        Stamp(ANCHOR.clock.raw())
    }

    /// Microseconds since 1970.
    pub(crate) fn time_us(self) -> u64 {
        let since_anchor = ANCHOR.clock.delta_as_nanos(ANCHOR.stamp, self.0) / 1000;
        ANCHOR.since_1970_us.saturating_add(since_anchor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::StreamId;

    fn sizes(history: &History) -> Vec<(Action, u64)> {
        history.entries().map(|entry| (entry.action, entry.size)).collect()
    }

    fn subject(size: u64) -> Subject {
        Subject { addr: 0, size, stream: StreamId(0), tag: Tag::default(), pool: 0 }
    }

    #[test]
    fn the_latest_entries_are_kept() {
        use Action::{Alloc, FreeCompleted, FreeRequested};
        let mut history = History::default();
        history.note(&[Alloc], subject(1));
        assert!(sizes(&history).is_empty(), "off");
        history.record(4, &[]);
        history.note(&[Alloc], subject(1));
        history.note(FREE, subject(1));
        assert_eq!(sizes(&history), [(Alloc, 1), (FreeRequested, 1), (FreeCompleted, 1)]);
        assert_eq!(history.overwritten(), 0);
        for size in 2..=9 {
            history.note(&[Alloc], subject(size));
            history.note(FREE, subject(size));
            let latest = [(FreeCompleted, size - 1), (Alloc, size), (FreeRequested, size), (FreeCompleted, size)];
            assert_eq!(sizes(&history), latest);
            assert_eq!(history.overwritten(), 3 * size - 4);
        }
        history.record(3, &[FreeRequested]);
        assert_eq!(sizes(&history), [(Alloc, 9), (FreeRequested, 9), (FreeCompleted, 9)]);
        history.note(FREE, subject(10));
        history.note(&[FreeRequested], subject(11));
        assert_eq!(sizes(&history), [(FreeRequested, 9), (FreeCompleted, 9), (FreeCompleted, 10)]);
        history.record(5, &[]);
        history.note(&[Alloc], subject(12));
        let left = [(FreeRequested, 9), (FreeCompleted, 9), (FreeCompleted, 10), (Alloc, 12)];
        assert_eq!((sizes(&history), history.overwritten()), (left.to_vec(), 25), "more room, for later entries");
        history.clear();
        history.note(&[Alloc], subject(13));
        assert_eq!((sizes(&history), history.overwritten()), (vec![(Alloc, 13)], 0));
        history.record(0, &[]);
        assert!(sizes(&history).is_empty() && !history.is_on());
    }
}

#[cfg(test)]
mod clock_tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn stamps_are_as_far_apart_as_the_events() {
        Stamp::prepare();
        let (wall, clock) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap(), Instant::now());
        let first = Stamp::now();
        std::thread::sleep(Duration::from_millis(20));
        let second = Stamp::now();
        let passed = u64::try_from(clock.elapsed().as_micros()).unwrap();
        let between = second.time_us() - first.time_us();
        assert!(between >= 19_900 && between <= passed + passed / 100 + 100, "{between} of {passed}");
        assert!(u128::from(first.time_us()).abs_diff(wall.as_micros()) < 1_000_000);
    }
}
