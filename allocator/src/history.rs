//! History: a ring of what happened, with PyTorch's actions.
//!
//! It has a lock of its own, a leaf. Entries of an arena are made under the arena's lock too, and snapshots are taken under all
//! locks, so that a snapshot's history and segments agree. Off by default; then it costs one branch an operation. Only entries are stored, never formatted, until somebody takes a snapshot.

use std::collections::VecDeque;

use serde::Serialize;

use crate::allocator::Allocator;
use crate::clock::{self, Stamp};
use crate::tags::Tag;

/// What happened, under PyTorch's names of trace actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Action {
    /// A block became live; size is the bytes asked for.
    Alloc,
    /// A block was given back by its holder.
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
    /// A snapshot was taken; size is the bytes active then.
    Snapshot,
    /// An allocation failed; the address is the device's free bytes.
    Oom,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) action: Action,
    pub(crate) addr: u64,
    pub(crate) size: u64,
    pub(crate) slot: u32,
    pub(crate) tag: Tag,
    /// The private pool, as [`crate::pools::PoolTable::history_id`] numbers them; 0 is the default pools.
    pub(crate) pool: u32,
    pub(crate) stamp: Stamp,
}

const _: () = assert!(size_of::<Entry>() == 40, "an entry has no room to spare");

/// What [`Allocator::record_history`] records.
///
/// ```
/// use aquifer_allocator::{Action, Allocator, Config, HistoryOptions};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// allocator.record_history(HistoryOptions { entries: 100_000, skip: vec![Action::FreeRequested], clear: true });
/// drop(allocator.alloc(512, device.default_stream())?);
/// let actions: Vec<Action> = allocator.snapshot().trace().iter().map(|entry| entry.action).collect();
/// assert_eq!(actions, [Action::SegmentMap, Action::Alloc, Action::FreeCompleted]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistoryOptions {
    /// Entries that are kept, the oldest giving way, at 40 bytes of host memory each; 0 stops recording and forgets
    /// everything.
    pub entries: usize,
    /// Actions that are not recorded.
    pub skip: Vec<Action>,
    /// Whether what was recorded before is forgotten.
    pub clear: bool,
}

impl Allocator {
    /// Starts recording history, or changes how it is recorded. Snapshots contain it.
    ///
    /// What was recorded before is kept, as far as there is room, unless `clear` says otherwise.
    pub fn record_history(&self, options: HistoryOptions) {
        let mut whole = self.shell().whole();
        let mut history = self.shell().history.lock();
        if options.clear {
            history.clear();
        }
        history.record(options.entries, &options.skip);
        whole.record_history(history.is_on());
    }

    /// Stops recording history and forgets what was recorded.
    pub fn stop_history(&self) {
        self.record_history(HistoryOptions::default());
    }
}

/// The ring. Empty and off by default.
#[derive(Debug, Default)]
pub(crate) struct History {
    capacity: usize,
    entries: VecDeque<Entry>,
    /// Entries that were overwritten since recording began.
    pub(crate) overwritten: u64,
    skipped: u32,
    latest: Stamp,
}

impl History {
    /// Starts recording into a ring of `capacity` entries, or stops (0). Stopping forgets what was recorded.
    pub(crate) fn record(&mut self, capacity: usize, skip: &[Action]) {
        if capacity > 0 {
            clock::prepare();
        }
        self.capacity = capacity;
        self.skipped = skip.iter().fold(0, |bits, &action| bits | 1 << action as u32);
        let excess = self.entries.len().saturating_sub(capacity);
        self.entries.drain(..excess);
        self.overwritten += excess as u64;
        if capacity == 0 {
            self.entries = VecDeque::new();
            self.overwritten = 0;
        }
    }

    /// Whether anything is recorded.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.capacity > 0
    }

    /// Notes what happened now.
    pub(crate) fn note(&mut self, action: Action, pool: u32, addr: u64, size: u64, slot: u32, tag: Tag) {
        self.push(Entry { action, addr, size, slot, tag, pool, stamp: Stamp::now() });
    }

    /// Adds an entry, unless its action is not recorded. Stamps that two processors took at nearly the same moment may be the
    /// wrong way round; then the later entry has the time of the earlier one.
    #[inline]
    pub(crate) fn push(&mut self, mut entry: Entry) {
        if self.capacity == 0 || self.skipped & (1 << entry.action as u32) != 0 {
            return;
        }
        self.latest = self.latest.max(entry.stamp);
        entry.stamp = self.latest;
        if self.entries.len() >= self.capacity {
            self.entries.pop_front();
            self.overwritten += 1;
        }
        self.entries.push_back(entry);
    }

    /// What is recorded, oldest first.
    pub(crate) fn entries(&self) -> impl ExactSizeIterator<Item = &Entry> + '_ {
        self.entries.iter()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
        self.overwritten = 0;
    }
}
