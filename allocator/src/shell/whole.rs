//! The core's lock and those of arenas, for slow paths: of all arenas where a consistent view of everything is needed,
//! otherwise of those that a slow path works with.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::cmp::Reverse;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use aquifer_device::Stream;

use crate::accounting::counters::Counters;
use crate::accounting::tally::Writer;
use crate::cross_stream::waiting_list::Waiting;
use crate::heap::{Block, Heap, Passed, Region, Walk, kind_of};
use crate::history::Action;
use crate::request::{Place, Request};
use crate::shell::arena::{Arena, Desk, Granted, Guard};
use crate::shell::core::Core;
use crate::shell::settled::{FEW, Sought, Sums};
use crate::shell::{SharedFree, Shell, special};
use crate::size_class::PoolKind;
use crate::sync::MutexGuard;

/// How often the work may pass from one thread to another, between two resets of peaks, before each arena counts for itself.
const HANDOVERS: u32 = 8;

/// The core's lock and those of arenas, held, and access to everything that they protect.
///
/// Made by [`Shell::whole`], it has the locks of all open arenas. Made by [`Shell::part`], it takes those of settled
/// arenas (`settled.rs`) when they are asked for: by [`Whole::look_for`], before all arenas are looked through for
/// something, or by number.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) shell: &'static Shell,
    core: MutexGuard<'static, Core>,
    /// The arenas whose locks are held, by ascending stream.
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

impl Shell {
    /// Passes the blocks of all arenas on, a few at a time, under the locks of the core and of their arena. Frees that
    /// were queued before are applied.
    pub(crate) fn walk(&'static self, mut pass: impl FnMut(&Core, &Heap, &Passed)) {
        drop(self.part(None));
        let (mut slot, mut walk) = (0, Walk::default());
        let mut step = |core: &Core, arena: &Guard, walk: &mut Walk| {
            arena.heap.step(walk, |passed| pass(core, &arena.heap, passed))
        };
        while let Some((at, more)) = self.look_into(slot, |core, arena| step(core, arena, &mut walk)) {
            slot = if more { at } else { at + 1 };
            if !more {
                walk = Walk::default();
            }
        }
    }

    /// Looks into all arenas, one at a time, under its lock and that of the core.
    pub(crate) fn each_arena(&'static self, mut look: impl FnMut(&Core, &Guard)) {
        drop(self.part(None));
        let mut slot = 0;
        while let Some((next, ())) = self.look_into(slot, &mut look) {
            slot = next + 1;
        }
    }

    /// Looks into the first open arena from a number on, in which no block rests meanwhile, and returns its number;
    /// `None` if there is none.
    fn look_into<R>(&'static self, from: u32, look: impl FnOnce(&Core, &Guard) -> R) -> Option<(u32, R)> {
        let core = self.core();
        let at = core.arenas.partition_point(|arena| arena.slot < from);
        let &arena = core.arenas.get(at)?;
        // With segments, merging what rests is counted.
        if core.paged.is_none() && !core.may_count_here() {
            let mut whole = Whole::lock(self, core);
            let (core, arenas) = whole.core_and_arenas();
            return Some((arena.slot, look(core, &arenas[at])));
        }
        let mut guard = arena.lock_with_all();
        guard.merge_resting();
        Some((arena.slot, look(&core, &guard)))
    }
}

impl Core {
    /// True if arenas are settled, and only some of them are locked where that will do.
    fn settles(&self) -> bool {
        #[cfg(test)]
        if self.never_settles {
            return false;
        }
        self.arenas.len() > FEW && self.may_count_here()
    }
}

impl Whole {
    /// Takes every lock, and applies all frees queued so far.
    pub(crate) fn lock(shell: &'static Shell, core: MutexGuard<'static, Core>) -> Whole {
        let mut whole = Whole { shell, core, arenas: Vec::new() };
        whole.lock_all();
        whole.arenas.iter_mut().for_each(Guard::tidy);
        whole.drain_shared();
        whole
    }

    /// Takes the locks of the core and of the arena `own`, if it is open, visits every arena in which anything happened
    /// since it was last visited, and applies all frees queued so far.
    pub(crate) fn lock_part(shell: &'static Shell, core: MutexGuard<'static, Core>, own: Option<u32>) -> Whole {
        if !core.settles() {
            return Whole::lock(shell, core);
        }
        let mut whole = Whole { shell, core, arenas: Vec::new() };
        let visited = whole.visit(|arena| Some(arena.lock_with_all()), own);
        debug_assert!(visited);
        whole.drain_shared();
        whole
    }

    /// As [`Whole::lock_part`]; `None` if another thread holds a lock that it takes.
    pub(crate) fn try_lock_part(shell: &'static Shell, core: MutexGuard<'static, Core>) -> Option<Whole> {
        let is_part = core.settles();
        let mut whole = Whole { shell, core, arenas: Vec::new() };
        if is_part {
            if !whole.visit(Arena::try_lock_with_all, None) {
                return None;
            }
        } else {
            let arenas: Option<Vec<Guard>> = whole.core.arenas.iter().map(|arena| arena.try_lock_with_all()).collect();
            whole.arenas = arenas?;
            whole.unsettle_all();
            whole.arenas.iter_mut().for_each(Guard::tidy);
        }
        whole.drain_shared();
        Some(whole)
    }

    /// Takes the locks of all arenas that are not held yet.
    pub(crate) fn lock_all(&mut self) {
        let held = std::mem::replace(&mut self.arenas, Vec::with_capacity(self.core.arenas.len()));
        let mut held = held.into_iter().peekable();
        for arena in &self.core.arenas {
            let guard = held.next_if(|guard| guard.arena.slot == arena.slot).unwrap_or_else(|| arena.lock_with_all());
            self.arenas.push(guard);
        }
        self.unsettle_all();
    }

    /// Makes every arena an unsettled one. All locks are held.
    fn unsettle_all(&mut self) {
        let Core { settled, arenas, .. } = &mut *self.core;
        settled.clear(arenas);
        while self.shell.unsettled.pop().is_some() {}
        self.arenas.iter_mut().for_each(Guard::unsettle_held);
    }

    /// Applies the queued frees of every arena that is not settled, merges what rests there, and settles it. Keeps the
    /// locks of the arena `own` and of those in which frees were queued meanwhile, which are not settled. Returns false
    /// if `lock` fails.
    fn visit(&mut self, lock: impl Fn(&'static Arena) -> Option<Guard>, own: Option<u32>) -> bool {
        let shell = self.shell;
        let settled = &mut self.core.settled;
        while let Some(arena) = shell.unsettled.pop() {
            if settled.remove(arena.slot) {
                settled.unsettled.push(arena);
            }
        }
        let mut left = std::mem::take(&mut settled.unsettled);
        // By ascending number, from the end on.
        left.sort_unstable_by_key(|arena| Reverse(arena.slot));
        let mut kept = Vec::new();
        while let Some(arena) = left.pop() {
            let Some(mut guard) = lock(arena) else {
                left.push(arena);
                break;
            };
            guard.unsettle_held();
            guard.tidy();
            if own != Some(arena.slot) && guard.settle() {
                let known = self.core.done_until(arena.slot);
                self.core.settled.insert(&guard, |after| after <= known);
            } else {
                // Frees were queued meanwhile. What is free there is looked at all the same.
                kept.push(arena);
                self.arenas.push(guard);
            }
        }
        let done = left.is_empty();
        self.core.settled.unsettled = left;
        self.core.settled.unsettled.extend(kept);
        done
    }

    /// Takes the locks of settled arenas that may have what is sought. Called before all arenas are looked through for
    /// it.
    pub(crate) fn look_for(&mut self, sought: Sought) {
        if !self.core.settled.is_empty() {
            for slot in self.core.settled.find(sought) {
                self.hold(slot);
            }
        }
    }

    /// The place of an arena in the list of those whose locks are held. Takes its lock if it is open.
    fn hold(&mut self, slot: u32) -> Option<usize> {
        let at = match self.arenas.binary_search_by_key(&slot, |guard| guard.arena.slot) {
            Ok(at) => return Some(at),
            Err(at) => at,
        };
        let arena = self.core.arenas[self.core.arenas.binary_search_by_key(&slot, |arena| arena.slot).ok()?];
        let mut guard = arena.lock_with_all();
        guard.unsettle_held();
        guard.tidy();
        if self.core.settled.remove(slot) {
            self.core.settled.unsettled.push(arena);
        }
        self.arenas.insert(at, guard);
        Some(at)
    }

    /// Sums over all open arenas.
    fn sums(&self) -> Sums {
        let mut sums = self.core.settled.sums;
        self.arenas.iter().for_each(|arena| sums.add(arena));
        sums
    }

    fn drain_shared(&mut self) {
        for SharedFree { arena, block, on } in self.shell.take_shared() {
            free_shared(self, Place { arena: arena.slot, block }, on);
        }
    }

    pub(crate) fn core_and_arenas(&mut self) -> (&mut Core, &mut [Guard]) {
        (&mut self.core, &mut self.arenas)
    }

    /// Number of live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.sums().live
    }

    /// Bytes in live and waiting blocks of heaps.
    pub(crate) fn in_use_in_heaps(&self) -> u64 {
        self.sums().in_use
    }

    /// Number of allocations so far, on all streams.
    pub(crate) fn searches(&self) -> u64 {
        self.sums().searches
    }

    fn position(&self, slot: u32) -> Option<usize> {
        self.arenas.binary_search_by_key(&slot, |guard| guard.arena.slot).ok()
    }

    /// The arena of a stream that has allocated.
    pub(crate) fn arena(&mut self, slot: u32) -> &mut Guard {
        let at = self.hold(slot).unwrap_or_else(|| unreachable!("stream {slot} has no arena"));
        &mut self.arenas[at]
    }

    /// The arena of a stream, if it has one.
    pub(crate) fn try_arena(&mut self, slot: u32) -> Option<&mut Guard> {
        let at = self.hold(slot)?;
        Some(&mut self.arenas[at])
    }

    /// The heap of a stream whose arena's lock is held.
    pub(crate) fn heap_of(&self, slot: u32) -> &Heap {
        self.held_heap(slot).unwrap_or_else(|| unreachable!("stream {slot} has no arena"))
    }

    /// The heap of a stream, if its arena's lock is held.
    pub(crate) fn held_heap(&self, slot: u32) -> Option<&Heap> {
        Some(&self.arenas[self.position(slot)?].heap)
    }

    /// The heaps of the arenas whose locks are held: see [`Whole::look_for`].
    pub(crate) fn heaps(&self) -> impl Iterator<Item = &Heap> + '_ {
        self.arenas.iter().map(|arena| &arena.heap)
    }

    /// True if any free block is away from home.
    pub(crate) fn has_strays(&self) -> bool {
        self.core.settled.has_strays() || self.heaps().any(|heap| heap.strays().len() > 0)
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
        self.try_arena(request.slot)?.take_own(request)
    }

    /// Opens the arena of a stream, unless it is open.
    pub(crate) fn open_arena(&mut self, stream: &Stream) {
        let slot = self.core.slot(stream);
        let Err(at) = self.core.arenas.binary_search_by_key(&slot, |arena| arena.slot) else { return };
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
        self.core.settled.unsettled.push(arena);
        let held = self.arenas.partition_point(|guard| guard.arena.slot < slot);
        self.arenas.insert(held, guard);
        if self.core.collects_garbage {
            self.lock_all();
            self.synchronize_searches();
        }
    }

    /// Raises every arena's number of searches in the default pools, which is its clock for garbage collection, to the
    /// greatest of all. All locks are held.
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
        self.lock_all();
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

/// Enters a block in the list of waiting blocks, when it is freed and other streams used it, too.
#[cold]
pub(crate) fn free_shared(whole: &mut Whole, place: Place, on: Option<u32>) {
    let Place { arena, block: id } = place;
    let arena = whole.arena(arena);
    let block = &arena.heap.blocks[id];
    let (kind, size) = (kind_of(block.pool), block.size);
    arena.note(Action::FreeRequested, id);
    arena.given_back(size);
    arena.tally().freed(kind, size, 0);
    arena.heap.set_waiting(id);
    // Arenas may publish meanwhile: not all of their locks are held.
    let publishing = whole.shell.publishing.lock();
    whole.counters().waits(kind, size);
    drop(publishing);
    let users = whole.shared.remove(&place);
    if users.is_some() {
        whole.arena(place.arena).arena.shared_blocks.fetch_sub(1, Ordering::Relaxed);
    }
    let block = *whole.block(place);
    let mut streams = users.unwrap_or_default();
    streams.extend(on.filter(|on| *on != block.owner && !streams.contains(on)));
    let uses = streams.iter().map(|&slot| (slot, whole.tick_of(slot))).collect();
    let own_use = whole.tick_of(block.owner);
    whole.waiting.push(Waiting { place, block, uses, own_use });
    whole.shell.special().fetch_or(special::WAITING, Ordering::Relaxed);
}
