//! Steps that use memory without access guards: bare pointers, captures and graphs, memory that
//! grows.

use std::sync::Arc;

use aquifer::Stream;
use aquifer::device::{DevicePtr, Tick};
use aquifer::memory::{Growable, TagScope};
use aquifer_device::Operation;
use aquifer_device::RawStream;

use crate::plan::{Ending, Freeing};
use crate::player::{END, Player, at, length};
use crate::sleep::{BARE, BARE_KIND};
use crate::world::{Dropping, Handed};

/// A bare pointer.
pub(crate) struct Raw {
    pub(crate) ptr: DevicePtr,
    bytes: u64,
    /// The stream that it was allocated for, and the one that used it last, after all others.
    stream: Stream,
    last: Stream,
    used: Tick,
    /// Its contents, if they are known, and how often contents were lost before.
    pattern: Option<u8>,
    lost: u64,
}

/// Memory that grows, with the tick of its last use.
pub(crate) struct Growing {
    memory: Growable,
    used: Tick,
    /// As of [`Raw`].
    pattern: Option<u8>,
    lost: u64,
}

impl Player<'_> {
    pub(crate) fn alloc_raw(&mut self, stream: &Stream, bytes: u64) {
        let world = self.world;
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let scope = TagScope::new(BARE);
        let made = world.request(&world.memory, bytes, || Ok(world.memory.alloc_raw(bytes, stream)?));
        drop(scope);
        if let Some(ptr) = made {
            let (used, stream) = (stream.tick(), stream.clone());
            let raw = Raw { ptr, bytes, last: stream.clone(), stream, used, pattern: None, lost: 0 };
            self.raw.push(raw);
            let last = self.raw.len() - 1;
            self.write_raw(last);
        }
    }

    /// Writes the memory of a bare pointer on the stream that used it last.
    fn write_raw(&mut self, at: usize) {
        let (world, pattern) = (self.world, self.pattern());
        let runs = self.runs(&self.raw[at].last);
        let raw = &mut self.raw[at];
        raw.lost = world.sleeping.lost(BARE_KIND);
        let written = world.allow(raw.last.fill(raw.ptr, pattern, raw.bytes));
        raw.pattern = written.filter(|()| runs).map(|()| pattern);
        raw.used = raw.last.tick();
    }

    /// Makes a stream the last one that uses a bare pointer.
    fn order_raw(&mut self, at: usize, stream: &Stream) -> bool {
        let raw = &mut self.raw[at];
        let ordered = self.world.allow(stream.wait_for(&raw.used));
        if ordered.is_some() {
            raw.last = stream.clone();
            raw.used = stream.tick();
        }
        ordered.is_some()
    }

    pub(crate) fn use_raw(&mut self, pick: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(_work) = world.sleeping.begin_bare_work() else { return };
        let Some(at) = at(&self.raw, pick) else { return };
        if !self.runs(&stream) || !self.order_raw(at, &stream) {
            return;
        }
        let raw = &self.raw[at];
        let mut found = vec![0; END.min(length(raw.bytes))];
        if raw.lost == world.sleeping.lost(BARE_KIND)
            && let Some(pattern) = raw.pattern
            && world.allow(stream.download_blocking(&mut found, raw.ptr)).is_some()
        {
            world.compare(&found, pattern);
        }
        self.write_raw(at);
    }

    pub(crate) fn free_raw(&mut self, pick: u32, how: Freeing) {
        let memory = &self.world.memory;
        let Some(at) = at(&self.raw, pick) else { return };
        let stream = self.raw[at].stream.clone();
        // Another thread's default stream cannot be made to wait.
        let takes_waits = self.runs(&stream) && self.streams.iter().any(|own| own.id() == stream.id());
        let is_ordered = matches!(how, Freeing::OnItsStream) && takes_waits && self.order_raw(at, &stream);
        let raw = self.raw.swap_remove(at);
        let freed = match how {
            Freeing::OnItsStream if is_ordered => memory.free_raw(raw.ptr),
            Freeing::Recorded => memory.record_stream_raw(raw.ptr, &raw.last).and_then(|()| memory.free_raw(raw.ptr)),
            _ => memory.free_raw_on(raw.ptr, &raw.last),
        };
        if self.world.allow(freed).is_none() {
            self.world.hand(Handed::Raw(raw));
        }
    }

    /// Leaves a bare pointer to the other threads, which can wait for its last use.
    pub(crate) fn give_raw(&mut self, pick: u32) {
        let Some(at) = at(&self.raw, pick) else { return };
        let is_default = self.raw[at].last.raw() == RawStream::PER_THREAD;
        if is_default && self.world.allow(self.raw[at].used.cover()).is_none() {
            return;
        }
        let raw = self.raw.swap_remove(at);
        self.world.hand(Handed::Raw(raw));
    }

    /// Takes a bare pointer that another thread left, if a stream of this one can be ordered after
    /// its last use.
    pub(crate) fn take_raw(&mut self, raw: Raw, stream: &Stream) {
        self.raw.push(raw);
        let at = self.raw.len() - 1;
        if !self.runs(stream) || !self.order_raw(at, stream) {
            self.raw.pop().into_iter().for_each(|raw| self.world.hand(Handed::Raw(raw)));
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
                    world.inject(1, Some(Operation::EndCapture));
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
            world.request(&world.memory, bytes - before, || Ok(memory.grow_to(bytes, &stream)?))
        } else {
            world.served(memory.shrink_to(bytes, &stream))
        };
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

    /// Frees what bare pointers are left.
    pub(crate) fn free_all_raw(&mut self) {
        while !self.raw.is_empty() {
            self.free_raw(0, Freeing::OnLastStream);
        }
    }
}
