//! What programs do with memory apart from blocks, and with that of all: exportable and growable
//! memory, pins, sleep.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use aquifer::Allocator;
use aquifer_allocator::{AllocError, Contents, MappingChange, PinnedMapping, Registration};
use aquifer_device::HandleKind;

use super::{Interpreter, take};
use crate::model::{Handle, Live};
use crate::op::FreeHow;

/// Pins, and an observer of mappings that knows the pinned ranges.
#[derive(Debug)]
pub(super) struct Pins {
    held: Vec<PinnedMapping>,
    seen: Arc<Mutex<Seen>>,
    _observer: Registration,
}

#[derive(Debug, Default)]
struct Seen {
    pinned: Vec<Range<u64>>,
    /// What was taken away although it is pinned. Observers do not panic.
    taken: Option<Range<u64>>,
}

impl Pins {
    pub(super) fn new(allocator: &Allocator) -> Pins {
        let seen = Arc::<Mutex<Seen>>::default();
        let observed = seen.clone();
        let observer = allocator.observe_mappings(move |change| {
            let MappingChange::BeforeUnmap { addr, bytes } = *change else { return };
            let mut seen = observed.lock().unwrap_or_else(PoisonError::into_inner);
            let meets = |pinned: &&Range<u64>| pinned.start < addr + bytes && addr < pinned.end;
            let taken = seen.pinned.iter().find(meets).cloned();
            seen.taken = seen.taken.take().or(taken);
        });
        Pins { held: Vec::new(), seen, _observer: observer }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    pub(super) fn unpin(&mut self, pick: usize) {
        take(&mut self.held, pick);
        self.note();
    }

    pub(super) fn clear(&mut self) {
        self.held.clear();
        self.note();
    }

    fn note(&self) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.pinned = self.held.iter().map(PinnedMapping::range).collect();
    }

    /// Panics if pinned memory was taken away.
    pub(super) fn assert_kept(&self) {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(seen.taken, None, "pinned, and unmapped all the same");
    }
}

impl Interpreter {
    pub(super) fn alloc_exportable(&mut self, stream: usize, bytes: u64) {
        let stream = self.stream(stream).clone();
        let outcome = self.allocator.alloc_exportable(bytes, HandleKind::PosixFd, &stream);
        if let Some(exportable) = self.served_dedicated(outcome) {
            let ptr = exportable.ptr();
            self.add(Handle::Exportable(exportable), ptr, bytes, &stream);
        }
    }

    pub(super) fn make_growable(&mut self, stream: usize, capacity: u64) {
        let stream = self.stream(stream).clone();
        if let Some(growable) = self.served_dedicated(self.allocator.growable(capacity, &stream)) {
            let (ptr, own) = (growable.ptr(), stream.id());
            let handle = Handle::Growable(growable);
            self.blocks.add(Live { handle, ptr, bytes: 0, own, pattern: None, uses: Vec::new() });
        }
    }

    pub(super) fn resize(&mut self, pick: usize, stream: usize, bytes: u64) {
        let is_growable = |live: &Live| matches!(live.handle, Handle::Growable(_));
        let growables: Vec<usize> = (0..self.blocks.0.len()).filter(|&at| is_growable(&self.blocks.0[at])).collect();
        let Some(&at) = growables.get(pick % growables.len().max(1)) else { return };
        let stream = self.stream(stream).clone();
        let mut live = self.blocks.0.swap_remove(at);
        let Handle::Growable(growable) = &mut live.handle else { unreachable!("it was looked for") };
        let (before, bytes) = (live.bytes, bytes.min(growable.capacity()));
        let ordered = live.uses.iter().filter(|used| used.stream != stream.id());
        let ordered = ordered.map(|used| stream.wait_for(&used.tick).or_else(|_| used.tick.synchronize()));
        if self.allows(ordered.collect::<Result<Vec<_>, _>>()).is_some() {
            let done =
                if bytes > before { growable.grow_to(bytes, &stream) } else { growable.shrink_to(bytes, &stream) };
            let is_done = self.served_dedicated(done).is_some();
            assert_eq!(growable.bytes(), if is_done { bytes } else { before });
            if is_done {
                self.note_end(&live);
                live.bytes = bytes;
                live.note(&stream, true, true);
            }
            if is_done && bytes > 0 {
                self.lagging.iter().for_each(|lagging| lagging.allocated(live.ptr, bytes));
            }
            if is_done && bytes > 0 {
                self.next_pattern = self.next_pattern.wrapping_add(1);
                self.judge(live.touch(&stream, Some(self.next_pattern), true));
            }
        }
        self.blocks.0.push(live);
    }

    pub(super) fn pin(&mut self, pick: usize) {
        let Some(at) = self.blocks.pick(pick).filter(|_| self.pins.held.len() < 4) else { return };
        if let Handle::Owned(allocation) = &self.blocks.0[at].handle {
            let pinned = self.allocator.pin_mapping(allocation);
            self.pins.held.extend(self.allows(pinned));
            self.pins.note();
        }
    }

    /// Sleeps and wakes up. Contents that were not saved are not compared any more.
    pub(super) fn nap(&mut self, save: bool, frees: usize) {
        // Memory that another process was said to hold, but does not, could not come back. And the
        // checks of a lagging device do not know of sleep.
        let is_lacking = self.allocator.memory_reserved() + self.other > self.device.info().total_bytes;
        if is_lacking || self.lagging.is_some() {
            return;
        }
        let slept = self.allocator.sleep(if save { Contents::SaveToHost } else { Contents::Discard });
        if !save {
            self.blocks.0.iter_mut().for_each(|live| live.pattern = None);
        }
        if self.served_dedicated(slept).is_some() {
            for n in 0..frees {
                self.free(n * 7, FreeHow::Drop, false);
            }
            let refused = self.allocator.alloc_bytes(1, &self.streams[0]);
            assert!(matches!(refused, Err(AllocError::Asleep)), "{refused:?}");
        }
        if self.allows(self.allocator.wake()).is_none() && !self.lost {
            self.driver.clear_faults();
            self.allocator.wake().unwrap_or_else(|error| panic!("it stays asleep: {error}"));
        }
    }

    /// What is served, or `None` where memory was lacking or comes in segments.
    fn served_dedicated<T>(&self, outcome: Result<T, AllocError>) -> Option<T> {
        match outcome {
            Ok(served) => return Some(served),
            Err(AllocError::OutOfMemory(report)) => assert!(!report.advice.is_empty(), "no advice: {report}"),
            Err(AllocError::NotMapped { .. }) => assert!(self.allocator.granule_bytes().is_none()),
            Err(error) => assert!(self.faulty, "without a fault: {error}"),
        }
        None
    }
}
