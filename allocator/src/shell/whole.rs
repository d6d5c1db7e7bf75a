//! The whole of an allocator: the core's lock and those of all open arenas, for slow paths that need a consistent view.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::ops::{Deref, DerefMut};

use aquifer_device::Stream;

use crate::accounting::counters::Counters;
use crate::accounting::tally::Writer;
use crate::heap::{Block, Heap, Region};
use crate::shell::arena::{Arena, Desk, Guard};
use crate::shell::core::{Core, Granted, Place, Request};
use crate::shell::{SharedFree, Shell};
use crate::size_class::PoolKind;
use crate::sync::MutexGuard;

/// How often the work may pass from one thread to another, between two resets of peaks, before each arena counts for itself.
const HANDOVERS: u32 = 8;

/// All locks, held, and access to everything that they protect.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) shell: &'static Shell,
    core: MutexGuard<'static, Core>,
    /// The open arenas, by ascending stream.
    pub(crate) arenas: Vec<Guard>,
}

impl Deref for Whole {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl DerefMut for Whole {
    fn deref_mut(&mut self) -> &mut Core {
        &mut self.core
    }
}

impl Whole {
    /// Takes every lock, and applies all frees queued so far.
    pub(crate) fn lock(shell: &'static Shell, core: MutexGuard<'static, Core>) -> Whole {
        let arenas = core.arenas.iter().map(|arena| arena.lock_with_all()).collect();
        Whole { shell, core, arenas }.drained()
    }

    /// As [`Whole::lock`]; `None` if another thread holds a lock.
    pub(crate) fn try_lock(shell: &'static Shell, core: MutexGuard<'static, Core>) -> Option<Whole> {
        let arenas: Option<Vec<Guard>> = core.arenas.iter().map(|arena| arena.try_lock_with_all()).collect();
        Some(Whole { shell, core, arenas: arenas? }.drained())
    }

    fn drained(mut self) -> Whole {
        for arena in &mut self.arenas {
            arena.forget_other_threads();
            arena.drain();
        }
        self.drain_shared();
        self.merge_resting();
        self
    }

    /// Merges all resting blocks, so that a thread that holds every lock sees none.
    fn merge_resting(&mut self) {
        self.arenas.iter_mut().for_each(Guard::merge_resting);
    }

    fn drain_shared(&mut self) {
        for SharedFree { arena, block, on } in self.shell.take_shared() {
            self.free_shared(Place { arena: arena.slot, block }, on);
        }
    }

    pub(crate) fn core_and_arenas(&mut self) -> (&mut Core, &mut [Guard]) {
        (&mut self.core, &mut self.arenas)
    }

    /// Number of live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.live).sum()
    }

    fn position(&self, slot: u32) -> Option<usize> {
        self.arenas.binary_search_by_key(&slot, |guard| guard.arena.slot).ok()
    }

    /// The arena of a stream that has allocated.
    pub(crate) fn arena(&mut self, slot: u32) -> &mut Guard {
        let at = self.position(slot).unwrap_or_else(|| unreachable!("stream {slot} has no arena"));
        &mut self.arenas[at]
    }

    /// The arena of a stream, if it has one.
    pub(crate) fn try_arena(&mut self, slot: u32) -> Option<&mut Guard> {
        let at = self.position(slot)?;
        Some(&mut self.arenas[at])
    }

    /// The heap of a stream that has allocated.
    pub(crate) fn heap_of(&self, slot: u32) -> &Heap {
        let at = self.position(slot).unwrap_or_else(|| unreachable!("stream {slot} has no arena"));
        &self.arenas[at].heap
    }

    pub(crate) fn heaps(&self) -> impl Iterator<Item = &Heap> + '_ {
        self.arenas.iter().map(|arena| &arena.heap)
    }

    /// Every free block of a pool, arena by arena, in each in the order of [`Heap::free_blocks`].
    pub(crate) fn free_blocks(&self, pool: u16) -> impl Iterator<Item = &Block> + '_ {
        self.heaps().flat_map(move |heap| heap.free_blocks(pool).map(|key| &heap.blocks[key.block()]))
    }

    /// True if any free block is away from home.
    pub(crate) fn has_strays(&self) -> bool {
        self.heaps().any(|heap| heap.strays().len() > 0)
    }

    pub(crate) fn block(&self, place: Place) -> &Block {
        &self.heap(place).blocks[place.block]
    }

    /// The region of a block.
    pub(crate) fn region(&self, place: Place) -> &Region {
        self.heap(place).region(self.block(place).region)
    }

    fn heap(&self, place: Place) -> &Heap {
        let at = self.position(place.arena).unwrap_or_else(|| unreachable!("a block without an arena"));
        &self.arenas[at].heap
    }

    /// Serves a request from the free blocks of its stream's arena that the stream may reuse at once.
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        let at = self.position(request.slot)?;
        self.arenas[at].take_own(request)
    }

    /// Opens the arena of a stream, unless it is open.
    pub(crate) fn open_arena(&mut self, stream: &Stream) {
        let slot = self.core.slot(stream);
        let Err(at) = self.arenas.binary_search_by_key(&slot, |guard| guard.arena.slot) else { return };
        let shell = self.shell;
        let arena = shell.arenas.get_or_insert(slot, || Box::leak(Box::new(Arena::new(shell, slot))));
        // No thread waits for another lock while it holds this one, because nobody works in an arena before it is open.
        let mut guard = arena.lock_with_all();
        let desk: &mut Desk = &mut guard;
        desk.open(stream.timeline(), self.core.paged.is_some());
        desk.classes = self.core.classes.clone();
        desk.crosses_streams = self.core.crosses_streams;
        desk.records_history = shell.history.lock().is_on();
        desk.heap.add_pools();
        guard.set_writer(self.core.writer);
        self.core.arenas.insert(at, arena);
        self.arenas.insert(at, guard);
        self.synchronize_searches();
    }

    /// Raises every arena's number of searches in the default pools, which is its clock for garbage collection, to the greatest of all.
    pub(crate) fn synchronize_searches(&mut self) {
        for pool in [PoolKind::Small as u16, PoolKind::Large as u16] {
            let latest = self.heaps().map(|heap| heap.pools[pool].searches).max().unwrap_or(0);
            self.arenas.iter_mut().for_each(|arena| arena.heap.pools[pool].searches = latest);
        }
    }

    /// Makes the calling thread known as being at work here.
    pub(crate) fn admit_thread(&mut self) {
        let (writer, thread) = (self.core.writer, Writer::this_thread());
        if writer == thread || writer == Writer::SEVERAL {
            return;
        }
        if writer != Writer::NOBODY {
            self.core.handovers += 1;
        }
        self.set_writer(if self.core.handovers > HANDOVERS { Writer::SEVERAL } else { thread });
    }

    fn set_writer(&mut self, writer: Writer) {
        self.core.writer = writer;
        self.arenas.iter_mut().for_each(|arena| arena.set_writer(writer));
    }

    /// Sets whether operations are recorded in the history.
    pub(crate) fn record_history(&mut self, records: bool) {
        self.arenas.iter_mut().for_each(|arena| arena.records_history = records);
    }

    /// Sets every peak to the current value. From here on they are exact again while one thread does all the work.
    pub(crate) fn reset_peaks(&mut self) {
        self.arenas.iter().for_each(|arena| arena.arena.own.publish_exactly(self.shell));
        self.shell.counters.reset_peaks();
        self.core.handovers = 0;
        self.set_writer(Writer::this_thread());
    }

    /// Starts every accumulated value from zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.shell.counters.reset_accumulated(|quantity| self.shell.sums(quantity));
    }

    pub(crate) fn counters(&self) -> &'static Counters {
        &self.shell.counters
    }

    /// Takes everything out and leaves an idle shell. Returns the core and the contents of the arenas.
    pub(crate) fn empty(&mut self) -> (Core, Vec<Desk>) {
        let desks = self.arenas.iter_mut().map(|arena| {
            arena.arena.own.clear();
            std::mem::take(&mut **arena)
        });
        let desks = desks.collect();
        (std::mem::take(&mut *self.core), desks)
    }
}
