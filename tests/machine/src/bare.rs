//! Steps that use memory without access guards: raw pointers, plain allocations, captures and
//! graphs, memory that grows.

use std::sync::Arc;

use aquifer::Stream;
use aquifer::memory::{AllocError, TagScope};
use aquifer_allocator::ALIGNMENT;
use aquifer_device::{Code, Operation, RawStream};

use crate::held::{Dropping, Growing, Handed, Raw, Use};
use crate::plan::{Ending, Freeing};
use crate::player::{END, Player, at, length};
use crate::sleeping::{BARE, BARE_KIND};

impl Player<'_> {
    pub(crate) fn alloc_raw(&mut self, stream: &Stream, bytes: u64, align: u32) {
        let (world, memory) = (self.world, &self.world.memory);
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let _scope = TagScope::new(BARE);
        let runs = self.runs(stream);
        let padded = bytes.saturating_add((1_u64 << align).saturating_sub(ALIGNMENT));
        let made = world.request(memory, (padded, true), || {
            if align == 0 {
                return Ok((memory.alloc_raw(bytes, stream)?, None));
            }
            let owner = memory.alloc_aligned(bytes, 1 << align, stream)?;
            Ok((owner.ptr(), Some(owner)))
        });
        let Some((ptr, owner)) = made.filter(|(ptr, _)| ptr.0 != 0) else { return };
        if !ptr.0.is_multiple_of(1 << align) || (align == 0 && !memory.size_of_raw(ptr).is_ok_and(|size| size >= bytes))
        {
            world.report(format!("{bytes} bytes at {ptr} are not aligned to {align} bits, or of another size"));
        }
        if let Some(lagging) = world.watch() {
            lagging.allocated(ptr, bytes);
        }
        let (uses, stream) = (Vec::new(), stream.clone());
        let mut raw = Raw { ptr, bytes, owner, stream: stream.clone(), uses, pattern: None, lost: 0 };
        self.write_raw(&mut raw, &stream);
        // Memory of a capture is the graph's.
        if runs || raw.owner.is_none() {
            self.raw.push(raw);
        }
    }

    fn write_raw(&mut self, raw: &mut Raw, stream: &Stream) {
        let (world, pattern) = (self.world, self.pattern());
        raw.lost = world.sleeping.lost(BARE_KIND);
        let written = world.allow(stream.fill(raw.ptr, pattern, raw.bytes));
        raw.pattern = written.filter(|()| self.runs(stream)).map(|()| pattern);
        raw.note(stream, true);
    }

    /// Tells the allocator of the uses that it does not know.
    fn record_raw(&self, raw: &mut Raw) {
        for used in raw.uses.iter_mut().filter(|used| !used.is_recorded) {
            let recorded = match &raw.owner {
                Some(owner) => owner.record_stream(&used.stream),
                None => self.world.memory.record_stream_raw(raw.ptr, &used.stream),
            };
            used.is_recorded = self.world.allow(recorded).is_some();
        }
    }

    pub(crate) fn use_raw(&mut self, pick: u32, stream: u32, writes: bool, is_recorded: bool) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let Some(at) = at(&self.raw, pick).filter(|_| self.runs(&stream)) else { return };
        let mut raw = self.raw.swap_remove(at);
        if world.allow(raw.order(&stream, |used| writes || used.writes)).is_some() {
            if let Some(lagging) = world.watch() {
                lagging.used(raw.ptr);
            }
            let mut found = vec![0; END.min(length(raw.bytes))];
            if raw.lost == world.sleeping.lost(BARE_KIND)
                && let Some(pattern) = raw.pattern
                && world.allow(stream.download_blocking(&mut found, raw.ptr)).is_some()
            {
                world.compare(&found, pattern);
            }
            raw.note(&stream, false);
            if writes {
                self.write_raw(&mut raw, &stream);
            }
            if is_recorded {
                self.record_raw(&mut raw);
            }
        }
        self.raw.push(raw);
    }

    pub(crate) fn free_raw(&mut self, pick: u32, how: Freeing) {
        let (world, memory) = (self.world, &self.world.memory);
        let Some(at) = at(&self.raw, pick) else { return };
        let mut raw = self.raw.swap_remove(at);
        let on = match how {
            Freeing::OnStream(stream) => self.stream(stream),
            _ => raw.stream.clone(),
        };
        // Another thread's default stream cannot be made to wait.
        let takes_waits = self.runs(&on) && self.streams.iter().any(|own| own.id() == on.id());
        let is_needed = |used: &Use| !used.is_recorded || matches!(how, Freeing::OnStream(_));
        let is_ordered =
            !matches!(how, Freeing::Recorded) && takes_waits && world.allow(raw.order(&on, is_needed)).is_some();
        if !is_ordered {
            self.record_raw(&mut raw);
        }
        if let Some(lagging) = world.watch() {
            lagging.freed(raw.ptr);
        }
        let is_on_other = is_ordered && on.id() != raw.stream.id();
        let is_pointer = raw.owner.is_none();
        let freed = match raw.owner.take() {
            Some(owner) if is_on_other => owner.drop_on(&on),
            Some(owner) => {
                drop(owner);
                Ok(())
            }
            None if is_on_other => memory.free_raw_on(raw.ptr, &on),
            None => memory.free_raw(raw.ptr),
        };
        if world.allow(freed).is_none() && is_pointer {
            world.hand(Handed::Raw(raw));
        }
    }

    /// Frees as a raw pointer what is none, which must be refused.
    pub(crate) fn free_wrong(&self, pick: u32) {
        let Some(at) = at(&self.raw, pick) else { return };
        let raw = &self.raw[at];
        let wrong = if raw.owner.is_none() { raw.ptr.offset(512) } else { raw.ptr };
        let is_live = self.raw.iter().any(|other| other.is_raw_at(wrong)) || self.world.has_handed(wrong);
        if self.world.threads == 1 && !is_live {
            let freed = self.world.memory.free_raw(wrong);
            if !matches!(freed, Err(AllocError::InvalidPointer { .. })) {
                self.world.report(format!("{wrong} is no raw pointer, and is freed as one: {freed:?}"));
            }
        }
    }

    pub(crate) fn replace(&mut self, pick: u32, stream: u32, blocks: u32, bytes: u64) {
        for n in 0..blocks {
            self.free_raw(pick.wrapping_add(n * 31), Freeing::OnItsStream);
            self.alloc_raw(&self.stream(stream), 1 + (bytes + u64::from(n) * 997) % (4 * bytes), 1);
        }
    }

    pub(crate) fn pin(&self, pick: u32) {
        let Some(owner) = at(&self.raw, pick).and_then(|at| self.raw[at].owner.as_ref()) else { return };
        let pinned = self.world.allow(self.world.memory.pin_mapping(owner));
        self.world.pin(|all| all.extend(pinned.filter(|_| all.len() < 4)));
    }

    /// Leaves bare memory to the other threads, which can wait for its uses.
    pub(crate) fn give_raw(&mut self, pick: u32) {
        let Some(at) = at(&self.raw, pick) else { return };
        let mut own = self.raw[at].uses.iter().filter(|used| used.stream.raw() == RawStream::PER_THREAD);
        if own.all(|used| self.world.allow(used.tick.cover()).is_some()) {
            let raw = self.raw.swap_remove(at);
            self.world.hand(Handed::Raw(raw));
        }
    }

    /// Takes bare memory that another thread left, if a stream of this one can be ordered after its
    /// uses.
    pub(crate) fn take_raw(&mut self, mut raw: Raw, stream: &Stream) {
        if self.runs(stream) && self.world.allow(raw.order(stream, |_| true)).is_some() {
            raw.uses.clear();
            raw.note(stream, true);
            self.raw.push(raw);
        } else {
            self.world.hand(Handed::Raw(raw));
        }
    }

    pub(crate) fn capture(&mut self, pool: u32, stream: u32, bytes: u64, ending: Ending) {
        if bytes.is_multiple_of(4) {
            // Under way when the capture begins.
            self.upload(pool, stream, true, false);
        }
        let (world, stream) = (self.world, self.stream(stream));
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let Some(pool) = at(&self.pools, pool).map(|at| &self.pools[at]) else { return };
        if stream.raw().is_legacy() {
            return;
        }
        let Some(capture) = world.allow(stream.begin_capture()) else { return };
        world.note_graph();
        if let Some(route) = world.allow(world.memory.capture(&stream, pool)) {
            let _scope = TagScope::new(BARE);
            if let Some(scratch) = world.served(world.memory.alloc_bytes(bytes, &stream)) {
                world.allow(stream.fill(scratch.ptr(), 1, bytes));
            }
            drop(route);
        }
        match ending {
            Ending::Drop | Ending::Refuse => {
                if matches!(ending, Ending::Refuse) {
                    world.inject(1, Some(Operation::EndCapture), Code(999));
                }
                drop(capture);
                self.dropped = stream.is_capturing().then_some(stream);
            }
            Ending::Hand => {
                let dropping = Arc::<Dropping>::default();
                self.handed.insert(stream.id(), dropping.clone());
                world.hand(Handed::Capture(capture, dropping));
            }
            Ending::Keep => self.graphs.extend(world.allow(capture.end())),
        }
    }

    pub(crate) fn launch(&mut self, graph: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        if let Some(at) = at(&self.graphs, graph) {
            world.allow(self.graphs[at].launch(&stream));
        }
    }

    pub(crate) fn make_growable(&mut self, capacity: u64) {
        let world = self.world;
        let _scope = TagScope::new(BARE);
        let made = world.memory.growable(capacity, &self.streams[0]);
        let used = self.streams[0].tick();
        self.growables.extend(world.served(made).map(|memory| Growing { memory, used, pattern: None, lost: 0 }));
    }

    /// Grows or shrinks memory, compares what was there before, and writes it.
    pub(crate) fn resize(&mut self, pick: u32, stream: u32, bytes: u64) {
        let (world, stream, pattern) = (self.world, self.stream(stream), self.pattern());
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let Some(at) = at(&self.growables, pick) else { return };
        let _scope = TagScope::new(BARE);
        let runs = self.runs(&stream);
        let growing = &mut self.growables[at];
        if world.allow(stream.wait_for(&growing.used)).is_none() {
            return;
        }
        let memory = &mut growing.memory;
        let (bytes, before) = (bytes.min(memory.capacity()), memory.bytes());
        let resized = if bytes > before {
            world.request(&world.memory, (bytes - before, false), || Ok(memory.grow_to(bytes, &stream)?))
        } else {
            world.served(memory.shrink_to(bytes, &stream))
        };
        if memory.bytes() != if resized.is_some() { bytes } else { before } {
            world.report(format!("{before} bytes became {} instead of {bytes}", memory.bytes()));
        }
        let mut found = vec![0; END.min(length(bytes.min(before)))];
        if resized.is_some()
            && growing.lost == world.sleeping.lost(BARE_KIND)
            && let Some(pattern) = growing.pattern
            && world.allow(stream.download_blocking(&mut found, growing.memory.ptr())).is_some()
        {
            world.compare(&found, pattern);
        }
        if resized.is_some() && bytes > 0 {
            growing.lost = world.sleeping.lost(BARE_KIND);
            let written = world.allow(stream.fill(growing.memory.ptr(), pattern, bytes));
            growing.pattern = written.filter(|()| runs).map(|()| pattern);
            world.allow(growing.memory.record_stream(&stream));
        }
        growing.used = stream.tick();
    }

    /// Frees what bare memory is left.
    pub(crate) fn free_all_raw(&mut self) {
        while !self.raw.is_empty() {
            self.free_raw(0, Freeing::OnStream(0));
        }
    }
}
