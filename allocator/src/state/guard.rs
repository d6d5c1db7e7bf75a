//! The shared state's lock and those of arenas, for slow paths: of all arenas where a consistent
//! view of everything is needed, otherwise of those that a slow path works with.
//!
//! Nothing here calls the driver, waits, or runs foreign code.

use std::cmp::Reverse;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use aquifer_device::Stream;

use crate::accounting::counters::Counters;
use crate::accounting::writer::CounterWriter;
use crate::cross_stream::waiting_list::Waiting;
use crate::heap::{Block, Heap, Passed, Walk, kind_of};
use crate::history::Action;
use crate::request::{Place, Request};
use crate::state::arena::{Arena, ArenaGuard, ArenaInner, Granted};
use crate::state::settled::{FEW, Sought, Sums};
use crate::state::shared::SharedState;
use crate::state::{AllocatorState, DeferredFree, special};
use crate::sync::MutexGuard;

/// How often the work may pass from one thread to another, between two resets of peaks, before each
/// arena counts for itself.
const HANDOVERS: u32 = 8;

/// The shared state's lock and those of arenas, held, and access to everything that they protect.
///
/// Made by [`AllocatorState::lock_all`], it has the locks of all open arenas. Made by
/// [`AllocatorState::lock`], it takes those of settled arenas (`settled.rs`) when they are asked
/// for: by [`StateGuard::look_for`], before all arenas are looked through for something, or by
/// number.
#[derive(Debug)]
pub(crate) struct StateGuard {
    pub(crate) state: &'static AllocatorState,
    shared: MutexGuard<'static, SharedState>,
    /// The arenas whose locks are held, by ascending stream.
    pub(crate) arenas: Vec<ArenaGuard>,
}

impl Deref for StateGuard {
    type Target = SharedState;

    fn deref(&self) -> &SharedState {
        &self.shared
    }
}

impl DerefMut for StateGuard {
    fn deref_mut(&mut self) -> &mut SharedState {
        &mut self.shared
    }
}

impl AllocatorState {
    /// Passes the blocks of all arenas on, a few at a time, under the locks of the shared state and
    /// of their arena. Frees that were queued before are applied.
    pub(crate) fn walk(&'static self, mut pass: impl FnMut(&SharedState, &Heap, &Passed)) {
        drop(self.lock(None));
        let (mut slot, mut walk) = (0, Walk::default());
        let mut step = |shared: &SharedState, arena: &ArenaGuard, walk: &mut Walk| {
            arena.heap.step(walk, |passed| pass(shared, &arena.heap, passed))
        };
        while let Some((at, more)) = self.look_into(slot, |shared, arena| step(shared, arena, &mut walk)) {
            slot = if more { at } else { at + 1 };
            if !more {
                walk = Walk::default();
            }
        }
    }

    /// Looks into all arenas, one at a time, under its lock and that of the shared state.
    pub(crate) fn each_arena(&'static self, mut look: impl FnMut(&SharedState, &ArenaGuard)) {
        drop(self.lock(None));
        let mut slot = 0;
        while let Some((next, ())) = self.look_into(slot, &mut look) {
            slot = next + 1;
        }
    }

    /// Looks into the first open arena from a number on, in which no block is deferred meanwhile, and
    /// returns its number; `None` if there is none.
    fn look_into<R>(&'static self, from: u32, look: impl FnOnce(&SharedState, &ArenaGuard) -> R) -> Option<(u32, R)> {
        let shared = self.shared();
        let at = shared.arenas.partition_point(|arena| arena.slot < from);
        let &arena = shared.arenas.get(at)?;
        // With segments, merging deferred blocks is counted.
        if shared.paged.is_none() && !shared.may_count_here() {
            let mut guard = StateGuard::lock(self, shared);
            let (shared, arenas) = guard.shared_and_arenas();
            return Some((arena.slot, look(shared, &arenas[at])));
        }
        let mut locked = arena.lock_with_all();
        locked.coalesce_deferred();
        Some((arena.slot, look(&shared, &locked)))
    }
}

impl SharedState {
    /// True if arenas are settled, and only some of them are locked where that will do.
    fn settles(&self) -> bool {
        #[cfg(test)]
        if self.never_settles {
            return false;
        }
        self.arenas.len() > FEW && self.may_count_here()
    }
}

impl StateGuard {
    /// Takes every lock, and applies all frees queued so far.
    pub(crate) fn lock(state: &'static AllocatorState, shared: MutexGuard<'static, SharedState>) -> StateGuard {
        let mut guard = StateGuard { state, shared, arenas: Vec::new() };
        guard.lock_all();
        guard.arenas.iter_mut().for_each(ArenaGuard::tidy);
        guard.drain_deferred();
        guard
    }

    /// Takes the locks of the shared state and of the arena `own`, if it is open, visits every
    /// arena in which anything happened since it was last visited, and applies all frees queued so
    /// far.
    pub(crate) fn lock_part(
        state: &'static AllocatorState,
        shared: MutexGuard<'static, SharedState>,
        own: Option<u32>,
    ) -> StateGuard {
        if !shared.settles() {
            return StateGuard::lock(state, shared);
        }
        let mut guard = StateGuard { state, shared, arenas: Vec::new() };
        let visited = guard.visit(|arena| Some(arena.lock_with_all()), own);
        debug_assert!(visited);
        guard.drain_deferred();
        guard
    }

    /// As [`StateGuard::lock_part`]; `None` if another thread holds a lock that it takes.
    pub(crate) fn try_lock_part(
        state: &'static AllocatorState,
        shared: MutexGuard<'static, SharedState>,
    ) -> Option<StateGuard> {
        let is_part = shared.settles();
        let mut guard = StateGuard { state, shared, arenas: Vec::new() };
        if is_part {
            if !guard.visit(Arena::try_lock_with_all, None) {
                return None;
            }
        } else {
            let arenas: Option<Vec<ArenaGuard>> =
                guard.shared.arenas.iter().map(|arena| arena.try_lock_with_all()).collect();
            guard.arenas = arenas?;
            guard.unsettle_all();
            guard.arenas.iter_mut().for_each(ArenaGuard::tidy);
        }
        guard.drain_deferred();
        Some(guard)
    }

    /// Takes the locks of all arenas that are not held yet.
    pub(crate) fn lock_all(&mut self) {
        let held = std::mem::replace(&mut self.arenas, Vec::with_capacity(self.shared.arenas.len()));
        let mut held = held.into_iter().peekable();
        for arena in &self.shared.arenas {
            let locked =
                held.next_if(|locked| locked.arena.slot == arena.slot).unwrap_or_else(|| arena.lock_with_all());
            self.arenas.push(locked);
        }
        self.unsettle_all();
    }

    /// Makes every arena an unsettled one. All locks are held.
    fn unsettle_all(&mut self) {
        let SharedState { settled, arenas, .. } = &mut *self.shared;
        settled.clear(arenas);
        while self.state.unsettled.pop().is_some() {}
        self.arenas.iter_mut().for_each(ArenaGuard::unsettle_held);
    }

    /// Applies the queued frees of every arena that is not settled, merges deferred blocks there, and
    /// settles it. Keeps the locks of the arena `own` and of those in which frees were queued
    /// meanwhile, which are not settled. Returns false if `lock` fails.
    fn visit(&mut self, lock: impl Fn(&'static Arena) -> Option<ArenaGuard>, own: Option<u32>) -> bool {
        let state = self.state;
        let settled = &mut self.shared.settled;
        while let Some(arena) = state.unsettled.pop() {
            if settled.remove(arena.slot) {
                settled.unsettled.push(arena);
            }
        }
        let mut left = std::mem::take(&mut settled.unsettled);
        // By ascending number, from the end on.
        left.sort_unstable_by_key(|arena| Reverse(arena.slot));
        let mut kept = Vec::new();
        while let Some(arena) = left.pop() {
            let Some(mut locked) = lock(arena) else {
                left.push(arena);
                break;
            };
            locked.unsettle_held();
            locked.tidy();
            if own != Some(arena.slot) && locked.settle() {
                let known = self.shared.done_until(arena.slot);
                self.shared.settled.insert(&locked, |after| after <= known);
            } else {
                // Frees were queued meanwhile. Free memory there is still considered.
                kept.push(arena);
                self.arenas.push(locked);
            }
        }
        let done = left.is_empty();
        self.shared.settled.unsettled = left;
        self.shared.settled.unsettled.extend(kept);
        done
    }

    /// Takes the locks of settled arenas that may have what is sought. Called before all arenas are
    /// looked through for it.
    pub(crate) fn look_for(&mut self, sought: Sought) {
        if !self.shared.settled.is_empty() {
            for slot in self.shared.settled.find(sought) {
                self.hold(slot);
            }
        }
    }

    /// The place of an arena in the list of those whose locks are held. Takes its lock if it is
    /// open.
    fn hold(&mut self, slot: u32) -> Option<usize> {
        let at = match self.arenas.binary_search_by_key(&slot, |locked| locked.arena.slot) {
            Ok(at) => return Some(at),
            Err(at) => at,
        };
        let arena = self.shared.arenas[self.shared.arenas.binary_search_by_key(&slot, |arena| arena.slot).ok()?];
        let mut locked = arena.lock_with_all();
        locked.unsettle_held();
        locked.tidy();
        if self.shared.settled.remove(slot) {
            self.shared.settled.unsettled.push(arena);
        }
        self.arenas.insert(at, locked);
        Some(at)
    }

    /// Sums over all open arenas.
    fn sums(&self) -> Sums {
        let mut sums = self.shared.settled.sums;
        self.arenas.iter().for_each(|arena| sums.add(arena));
        sums
    }

    fn drain_deferred(&mut self) {
        for DeferredFree { arena, block, on } in self.state.take_deferred() {
            apply_deferred_free(self, Place { arena: arena.slot, block }, on);
        }
    }

    pub(crate) fn shared_and_arenas(&mut self) -> (&mut SharedState, &mut [ArenaGuard]) {
        (&mut self.shared, &mut self.arenas)
    }

    /// Number of live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.sums().live
    }

    /// Bytes in live and waiting blocks of heaps.
    pub(crate) fn in_use_in_heaps(&self) -> u64 {
        self.sums().in_use
    }

    fn position(&self, slot: u32) -> Option<usize> {
        self.arenas.binary_search_by_key(&slot, |locked| locked.arena.slot).ok()
    }

    /// The arena of a stream that has allocated.
    pub(crate) fn arena(&mut self, slot: u32) -> &mut ArenaGuard {
        let at = self.hold(slot).unwrap_or_else(|| unreachable!("stream {slot} has no arena"));
        &mut self.arenas[at]
    }

    /// The arena of a stream, if it has one.
    pub(crate) fn try_arena(&mut self, slot: u32) -> Option<&mut ArenaGuard> {
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

    /// The heaps of the arenas whose locks are held: see [`StateGuard::look_for`].
    pub(crate) fn heaps(&self) -> impl Iterator<Item = &Heap> + '_ {
        self.arenas.iter().map(|arena| &arena.heap)
    }

    /// True if any free block is away from home.
    pub(crate) fn has_foreign(&self) -> bool {
        self.shared.settled.has_foreign() || self.heaps().any(Heap::has_foreign)
    }

    pub(crate) fn block(&self, place: Place) -> &Block {
        &self.heap(place).blocks[place.block]
    }

    fn heap(&self, place: Place) -> &Heap {
        let at = self.position(place.arena).unwrap_or_else(|| unreachable!("a block without an arena"));
        &self.arenas[at].heap
    }

    /// Serves a request from the free blocks of its stream's arena that the stream may reuse at
    /// once.
    pub(crate) fn take_own(&mut self, request: &Request) -> Option<Granted> {
        self.try_arena(request.slot)?.take_own(request)
    }

    /// Opens the arena of a stream, unless it is open.
    pub(crate) fn open_arena(&mut self, stream: &Stream) {
        let slot = self.shared.slot(stream);
        let Err(at) = self.shared.arenas.binary_search_by_key(&slot, |arena| arena.slot) else { return };
        let state = self.state;
        let arena = state.arenas.get_or_insert(slot, || Box::leak(Box::new(Arena::new(state, slot))));
        // No thread waits for another lock while it holds this one, because no thread works in an
        // arena before it is open.
        let mut locked = arena.lock_with_all();
        let inner: &mut ArenaInner = &mut locked;
        inner.open(stream.timeline(), self.shared.paged.is_some());
        arena.lenders.clear();
        inner.crosses_streams = self.shared.crosses_streams;
        inner.records_history = state.history.lock().is_on();
        inner.heap.add_pools();
        locked.set_writer(self.shared.writer);
        self.shared.arenas.insert(at, arena);
        self.shared.settled.unsettled.push(arena);
        let held = self.arenas.partition_point(|locked| locked.arena.slot < slot);
        self.arenas.insert(held, locked);
    }

    /// Makes the calling thread known as being at work here.
    pub(crate) fn admit_thread(&mut self) {
        let (writer, thread) = (self.shared.writer, CounterWriter::this_thread());
        if writer == thread || writer == CounterWriter::SEVERAL {
            return;
        }
        self.lock_all();
        if writer != CounterWriter::NONE {
            self.shared.handovers += 1;
        }
        self.set_writer(if self.shared.handovers > HANDOVERS { CounterWriter::SEVERAL } else { thread });
    }

    fn set_writer(&mut self, writer: CounterWriter) {
        self.shared.writer = writer;
        self.arenas.iter_mut().for_each(|arena| arena.set_writer(writer));
    }

    /// Sets whether operations are recorded in the history.
    pub(crate) fn record_history(&mut self, records: bool) {
        self.arenas.iter_mut().for_each(|arena| arena.records_history = records);
    }

    /// Sets every peak to the current value. From here on they are exact again while one thread
    /// does all the work.
    pub(crate) fn reset_peaks(&mut self) {
        self.arenas.iter().for_each(|arena| arena.arena.own.publish_exactly(self.state));
        self.state.counters.reset_peaks();
        self.shared.handovers = 0;
        self.set_writer(CounterWriter::this_thread());
    }

    /// Starts every accumulated value from zero.
    pub(crate) fn reset_accumulated(&mut self) {
        self.state.counters.reset_accumulated(|quantity| self.state.sums(quantity));
    }

    pub(crate) fn counters(&self) -> &'static Counters {
        &self.state.counters
    }

    /// Takes everything out and leaves an idle allocator state. Returns the shared state and the
    /// contents of the arenas.
    pub(crate) fn empty(&mut self) -> (SharedState, Vec<ArenaInner>) {
        let inners = self.arenas.iter_mut().map(|arena| {
            arena.arena.own.clear();
            std::mem::take(&mut **arena)
        });
        let inners = inners.collect();
        (std::mem::take(&mut *self.shared), inners)
    }
}

/// Enters a block in the list of waiting blocks, when it is freed and other streams used it, too.
#[cold]
pub(crate) fn apply_deferred_free(guard: &mut StateGuard, place: Place, on: Option<u32>) {
    let Place { arena, block: id } = place;
    let arena = guard.arena(arena);
    let block = &arena.heap.blocks[id];
    let (kind, size) = (kind_of(block.pool), block.size);
    arena.note(Action::FreeRequested, id);
    arena.given_back(size);
    arena.counter_target().freed(kind, size, 0);
    arena.heap.set_waiting(id);
    // Arenas may publish meanwhile: not all of their locks are held.
    let publishing = guard.state.publishing.lock();
    guard.counters().waits(kind, size);
    drop(publishing);
    let users = guard.other_users.remove(&place);
    // A block that only sleeps has an empty list.
    if users.as_ref().is_some_and(|users| !users.is_empty()) {
        guard.arena(place.arena).arena.blocks_used_elsewhere.fetch_sub(1, Ordering::Relaxed);
    }
    let block = *guard.block(place);
    let mut streams = users.unwrap_or_default();
    streams.extend(on.filter(|on| *on != block.owner && !streams.contains(on)));
    let uses = streams.iter().map(|&slot| (slot, guard.tick_of(slot))).collect();
    let own_use = guard.tick_of(block.owner);
    let waiting = Waiting { place, block, uses, own_use };
    match &mut guard.paged {
        // Until its memory wakes up.
        Some(paged) if paged.sleeps(&block.range()) => return paged.cordon.freed.push(waiting),
        _ => {}
    }
    guard.waiting.push(waiting);
    guard.state.special().fetch_or(special::WAITING, Ordering::Relaxed);
}
