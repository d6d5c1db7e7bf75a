//! A simulated thread: it makes the steps of a program and checks what it can see after each.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use aquifer::device::{DevicePtr, Graph, StreamFlags, Tick};
use aquifer::memory::{AllocError, Config, Contents, Growable, PoolOptions, PrivatePool};
use aquifer::prelude::*;
use aquifer_device::{Operation, executor};

use super::plan::{Ending, Step};
use super::world::{Dropping, Handed, World};

/// Bytes that are compared at either end of a buffer.
const END: usize = 64;

/// The longest buffer that is copied to the host as a whole.
const WHOLE: usize = 64 << 10;

/// A buffer with its contents: one byte everywhere, if that is known.
pub(super) struct Owned {
    pub(super) buffer: Buffer<u8>,
    pub(super) pattern: Option<u8>,
}

struct Raw {
    ptr: DevicePtr,
    stream: Stream,
}

/// A thread.
pub(super) struct Player<'a> {
    world: &'a World,
    /// The thread's own default stream first.
    streams: Vec<Stream>,
    owned: Vec<Owned>,
    raw: Vec<Raw>,
    pools: Vec<PrivatePool>,
    graphs: Vec<Graph>,
    growables: Vec<Growing>,
    /// Captures of its streams that other threads drop, by stream.
    handed: HashMap<u32, Arc<Dropping>>,
    /// A stream whose capture it has dropped, if that did not end it.
    dropped: Option<Stream>,
    next_pattern: u8,
}

/// Memory that grows, with the tick of its last use.
struct Growing {
    memory: Growable,
    used: Tick,
}

impl<'a> Player<'a> {
    pub(super) fn new(world: &'a World, number: usize) -> Player<'a> {
        let mut streams = vec![world.device.per_thread_stream()];
        for at in 0..3 {
            // Both kinds, and the legacy stream for the first thread.
            let made = match (number, at) {
                (0, 0) => Ok(world.device.default_stream().clone()),
                _ => world.device.stream_with(StreamFlags { non_blocking: at != 1, priority: 0 }),
            };
            streams.extend(world.allow(made));
        }
        let next_pattern = u8::try_from(number * 50 % 200).unwrap_or(0);
        let (owned, raw, pools, graphs, growables, handed, dropped) = Default::default();
        Player { world, streams, owned, raw, pools, graphs, growables, handed, dropped, next_pattern }
    }

    /// Makes all steps, and gives everything back that the thread has.
    pub(super) fn play(mut self, steps: &[Step]) {
        for &step in steps {
            if self.world.has_failed() {
                break;
            }
            self.write_after_drop();
            self.step(step);
            self.world.check();
            executor::yield_now();
        }
        while !self.raw.is_empty() {
            self.free_raw(0);
        }
        for pick in 0..self.owned.len() {
            self.verify(u32::try_from(pick).unwrap_or(0), 0);
        }
        let Player { owned, pools, graphs, growables, .. } = self;
        drop((growables, graphs, owned));
        self.world.leave(pools);
    }

    /// Writes a buffer on a stream whose capture another thread has dropped, or its own thread
    /// without ending it: the work must not be lost there.
    fn write_after_drop(&mut self) {
        let done = self.handed.iter().filter(|(_, dropping)| dropping.is_done()).map(|(&id, _)| id).min();
        let id = done.inspect(|id| drop(self.handed.remove(id)));
        let by_others = id.and_then(|id| self.streams.iter().find(|stream| stream.id() == id).cloned());
        let Some(stream) = self.dropped.take().or(by_others) else { return };
        let pattern = self.pattern();
        if let Some(mut owned) = self.owned.pop() {
            self.write_all(&mut owned, &stream, pattern);
            self.owned.push(owned);
        }
    }

    /// The stream that `pick` stands for, or the next one without a capture that another thread may
    /// be ending just now.
    fn stream(&self, pick: u32) -> Stream {
        let first = pick as usize % self.streams.len();
        let from_there = self.streams[first..].iter().chain(&self.streams[..first]);
        from_there.clone().find(|stream| self.runs(stream)).unwrap_or(&self.streams[first]).clone()
    }

    /// True if work that the stream enqueues now is run, not captured.
    fn runs(&self, stream: &Stream) -> bool {
        self.handed.get(&stream.id()).is_none_or(|dropping| dropping.is_done())
    }

    fn write_all(&self, owned: &mut Owned, stream: &Stream, pattern: u8) {
        owned.pattern = None;
        if owned.buffer.is_empty() {
            return;
        }
        let runs = self.runs(stream);
        let filled = stream.with([write(&mut owned.buffer)], |raw, [x]| raw.fill(x.ptr(), pattern, x.bytes()));
        owned.pattern = self.world.allow(filled).filter(|()| runs).map(|()| pattern);
    }

    fn pattern(&mut self) -> u8 {
        self.next_pattern = self.next_pattern.wrapping_add(1);
        self.next_pattern
    }

    #[expect(clippy::too_many_lines, reason = "one line for each step")]
    fn step(&mut self, step: Step) {
        let world = self.world;
        match step {
            Step::Alloc { stream, bytes } => {
                let stream = self.stream(stream);
                let runs = self.runs(&stream);
                let made = world.memory.alloc::<u8>(length(bytes), &stream);
                self.add(made, &stream, runs);
            }
            Step::AllocFrom { pool, stream, bytes } => {
                let stream = self.stream(stream);
                let Some(pool) = at(&self.pools, pool) else { return };
                let runs = self.runs(&stream);
                let made = self.pools[pool].alloc::<u8>(length(bytes), &stream);
                self.add(made, &stream, runs);
            }
            Step::AllocRaw { stream, bytes } => self.alloc_raw(&self.stream(stream), bytes),
            Step::FreeRaw(pick) => self.free_raw(pick),
            Step::Drop(pick) => drop(take(&mut self.owned, pick)),
            Step::Verify { pick, stream } => self.verify(pick, stream),
            Step::Write { pick, stream } => {
                let (stream, pattern) = (self.stream(stream), self.pattern());
                if let Some(mut owned) = take(&mut self.owned, pick) {
                    self.write_all(&mut owned, &stream, pattern);
                    self.owned.push(owned);
                }
            }
            Step::Copy { from, to, stream } => self.copy(from, to, stream),
            Step::Upload { pick, stream } => {
                let (stream, pattern) = (self.stream(stream), self.pattern());
                let Some(owned) = at(&self.owned, pick).map(|at| &mut self.owned[at]) else { return };
                if owned.buffer.len() <= WHOLE {
                    owned.pattern = None;
                    let sent = owned.buffer.upload(vec![pattern; owned.buffer.len()], &stream);
                    let sent = sent.and_then(|pending| pending.wait().map(drop));
                    owned.pattern = world.allow(sent).map(|()| pattern);
                }
            }
            Step::ToVec { pick, stream } => {
                let stream = self.stream(stream);
                let Some(owned) = at(&self.owned, pick).map(|at| &self.owned[at]) else { return };
                if owned.buffer.len() <= WHOLE
                    && let Some(pattern) = owned.pattern
                    && let Some(found) = world.allow(owned.buffer.to_vec(&stream))
                {
                    world.compare(&found, pattern);
                }
            }
            Step::Give(pick) => {
                if let Some(owned) = take(&mut self.owned, pick) {
                    world.hand(Handed::Buffer(owned));
                }
            }
            Step::Take => self.owned.extend(world.take_handed().and_then(Handed::into_buffer)),
            Step::Wait { stream, on } => drop(world.allow(self.stream(stream).wait_for(&self.stream(on).tick()))),
            Step::Synchronize(stream) => drop(world.allow(self.stream(stream).synchronize())),
            Step::Stall { stream, us } => {
                let stream = self.stream(stream);
                // Time passes for streams that no other thread can mean.
                if stream.raw() != aquifer::device::RawStream::PER_THREAD {
                    world.allow(world.driver.stall(stream.raw(), Duration::from_micros(us)));
                }
            }
            Step::NewStream { stream, blocking } => {
                let made = world.device.stream_with(StreamFlags { non_blocking: !blocking, priority: 0 });
                let at = 1 + stream as usize % 3;
                if let Some(new) = world.allow(made)
                    && let Some(old) = self.streams.get_mut(at)
                {
                    *old = new;
                }
            }
            Step::Capture { pool, stream, bytes, ending } => self.capture(pool, stream, bytes, ending),
            Step::Launch { graph, stream } => {
                if let Some(at) = at(&self.graphs, graph) {
                    world.allow(self.graphs[at].launch(&self.stream(stream)));
                }
            }
            Step::DropGraph(pick) => drop(take(&mut self.graphs, pick)),
            Step::CreatePool { lends } => {
                if self.pools.len() < 3 {
                    let options = PoolOptions { use_on_oom: lends, ..PoolOptions::default() };
                    self.pools.extend(world.allow(world.memory.create_pool(options)));
                }
            }
            Step::DropPool(pick) => drop(take(&mut self.pools, pick)),
            Step::EmptyPool(pick) => {
                if let Some(at) = at(&self.pools, pick) {
                    world.allow(self.pools[at].empty_cache());
                }
            }
            Step::MakeGrowable(capacity) => {
                let made = world.memory.growable(capacity, &self.streams[0]);
                let used = self.streams[0].tick();
                self.growables.extend(world.served(made).map(|memory| Growing { memory, used }));
            }
            Step::Resize { pick, stream, bytes } => self.resize(pick, stream, bytes),
            Step::EmptyCache => drop(world.allow(world.memory.empty_cache())),
            Step::TrimTo(bytes) => drop(world.allow(world.memory.trim_to(bytes))),
            Step::SetLimit(limit) => world.memory.set_limit(limit),
            Step::SetShare(bytes) => world.set_share(bytes),
            Step::OtherProcess(bytes) => world.set_other_process(bytes),
            Step::Second { stream, bytes } => {
                let stream = self.stream(stream);
                let runs = self.runs(&stream);
                let made = world.second.alloc::<u8>(length(bytes), &stream);
                self.add(made, &stream, runs);
            }
            Step::Outlive { stream, bytes } => self.outlive(&self.stream(stream), bytes),
            Step::Nap { save } => self.nap(save),
            Step::Look => world.look(),
            Step::Faults(thousandths) => world.inject_rate(thousandths),
            Step::Fault { nth, operation } => world.inject(nth, operation),
            Step::Lose(nth) => world.lose(nth),
        }
    }

    /// Writes a new buffer and keeps it, unless it was allocated in a capture: then it is the graph's,
    /// and other graphs of the pool write it, too.
    fn add(&mut self, made: Result<Buffer<u8>, AllocError>, stream: &Stream, runs: bool) {
        let Some(buffer) = self.world.served(made) else { return };
        let pattern = self.pattern();
        let mut owned = Owned { buffer, pattern: None };
        self.write_all(&mut owned, stream, pattern);
        if runs {
            self.owned.push(owned);
        }
    }

    fn alloc_raw(&mut self, stream: &Stream, bytes: u64) {
        let world = self.world;
        if let Some(ptr) = world.served(world.memory.alloc_raw(bytes, stream)) {
            let pattern = self.pattern();
            world.allow(stream.fill(ptr, pattern, bytes));
            self.raw.push(Raw { ptr, stream: stream.clone() });
        }
    }

    fn free_raw(&mut self, pick: u32) {
        if let Some(Raw { ptr, stream }) = take(&mut self.raw, pick) {
            self.world.allow(self.world.memory.free_raw_on(ptr, &stream));
        }
    }

    fn verify(&self, pick: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(Owned { buffer, pattern: Some(pattern) }) = at(&self.owned, pick).map(|at| &self.owned[at]) else {
            return;
        };
        let mut found = vec![0; buffer.len().min(END)];
        let end = buffer.bytes() - found.len() as u64;
        for offset in [0, end] {
            let read =
                stream.with([read(buffer)], |raw, [x]| raw.download_blocking(&mut found, x.ptr().offset(offset)));
            if world.allow(read).is_some() {
                world.compare(&found, *pattern);
            }
        }
    }

    fn copy(&mut self, from: u32, to: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let (Some(from), Some(to)) = (at(&self.owned, from), at(&self.owned, to)) else { return };
        if from == to || self.owned[to].buffer.len() > self.owned[from].buffer.len() {
            return;
        }
        let mut target = self.owned.swap_remove(to);
        // The last one took the place of the one that was removed.
        let source = &self.owned[if from == self.owned.len() { to } else { from }];
        target.pattern = None;
        let runs = self.runs(&stream);
        let accesses = [read(&source.buffer), write(&mut target.buffer)];
        let copied = stream.with(accesses, |raw, [from, to]| raw.copy(to.ptr(), from.ptr(), to.bytes()));
        if world.allow(copied).is_some() && runs {
            target.pattern = source.pattern;
        }
        self.owned.push(target);
    }

    fn capture(&mut self, pool: u32, stream: u32, bytes: u64, ending: Ending) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(pool) = at(&self.pools, pool).map(|at| &self.pools[at]) else { return };
        if stream.raw().is_legacy() {
            return;
        }
        let Some(capture) = world.allow(stream.begin_capture()) else { return };
        if let Some(route) = world.allow(world.memory.capture(&stream, pool)) {
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

    fn resize(&mut self, pick: u32, stream: u32, bytes: u64) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(at) = at(&self.growables, pick) else { return };
        let Growing { memory, used } = &mut self.growables[at];
        if world.allow(stream.wait_for(used)).is_none() {
            return;
        }
        let bytes = bytes.min(memory.capacity());
        let resized =
            if bytes > memory.bytes() { memory.grow_to(bytes, &stream) } else { memory.shrink_to(bytes, &stream) };
        if world.served(resized).is_some() && bytes > 0 {
            world.allow(stream.fill(memory.ptr(), 3, bytes));
            world.allow(memory.record_stream(&stream));
        }
        *used = stream.tick();
    }

    /// Makes a buffer and drops its allocator.
    fn outlive(&mut self, stream: &Stream, bytes: u64) {
        let Some(memory) = self.world.allow(Allocator::new(&self.world.device, Config::default())) else { return };
        let runs = self.runs(stream);
        let made = memory.alloc::<u8>(length(bytes), stream);
        drop(memory);
        self.add(made, stream, runs);
    }

    fn nap(&mut self, save: bool) {
        let world = self.world;
        // Bare work of other threads would meet memory that is not there, and memory that another
        // process took meanwhile could not come back.
        if world.threads > 1 || world.has_other_process() {
            return;
        }
        let contents = if save { Contents::SaveToHost } else { Contents::Discard };
        let slept = world.memory.sleep(contents);
        if !save {
            self.owned.iter_mut().for_each(|owned| owned.pattern = None);
            world.forget_contents();
        }
        world.served(slept);
        world.served(world.memory.wake());
    }
}

fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The index that `pick` stands for.
fn at<T>(all: &[T], pick: u32) -> Option<usize> {
    (!all.is_empty()).then(|| pick as usize % all.len())
}

fn take<T>(all: &mut Vec<T>, pick: u32) -> Option<T> {
    at(all, pick).map(|at| all.swap_remove(at))
}

impl World {
    /// The value, or `None` where an error is possible. Reports other errors.
    pub(super) fn allow<T, E: Display>(&self, outcome: Result<T, E>) -> Option<T> {
        outcome.inspect_err(|error| self.judge(&error.to_string())).ok()
    }
}
