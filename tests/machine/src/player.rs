//! A simulated thread: it makes the steps of a program and checks what it can see after each.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{env, fs, process};

use aquifer::Error;
use aquifer::device::{Graph, StreamFlags};
use aquifer::kernels::Kernels;
use aquifer::memory::{Config, PoolOptions, PrivatePool, TagScope};
use aquifer::prelude::*;
use aquifer::transfer::FilePart;
use aquifer_allocator::{PoolRoute, WakeLock};
use aquifer_device::{HandleKind, RawStream, executor};

use crate::held::{Dropping, Growing, Handed, Owned, Raw, Replayed};
use crate::plan::Step;
use crate::sleeping::TAGS;
use crate::world::World;

/// Bytes that are compared at either end of a buffer.
pub(crate) const END: usize = 64;

/// The longest buffer that is copied to the host as a whole.
const WHOLE: usize = 256 << 10;

/// How many files were made.
static FILES: AtomicU64 = AtomicU64::new(0);

/// Most pieces that an allocator takes to fill the device.
const PIECES_MAX: u32 = 200;

/// A thread.
pub(crate) struct Player<'a> {
    pub(crate) world: &'a World,
    /// The thread's own default stream first.
    pub(crate) streams: Vec<Stream>,
    owned: Vec<Owned>,
    pub(crate) raw: Vec<Raw>,
    pub(crate) pools: Vec<PrivatePool>,
    routes: Vec<PoolRoute>,
    pub(crate) graphs: Vec<Graph>,
    pub(crate) replayed: Vec<Replayed>,
    pub(crate) growables: Vec<Growing>,
    /// Captures of its streams that other threads drop, by stream.
    pub(crate) handed: HashMap<u32, Arc<Dropping>>,
    /// A stream whose capture it has dropped, if that did not end it.
    pub(crate) dropped: Option<Stream>,
    next_pattern: u8,
}

impl<'a> Player<'a> {
    pub(crate) fn new(world: &'a World, number: usize) -> Player<'a> {
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
        let (owned, raw, pools, routes, graphs, replayed, growables, handed, dropped) = Default::default();
        Player { world, streams, owned, raw, pools, routes, graphs, replayed, growables, handed, dropped, next_pattern }
    }

    /// Makes all steps, and gives everything back that the thread has.
    pub(crate) fn play(mut self, steps: &[Step]) {
        for &step in steps {
            if self.world.found.lock().is_some() || (self.world.is_over)() {
                break;
            }
            self.write_after_drop();
            self.step(step);
            self.world.check();
            executor::yield_now();
        }
        self.free_all_raw();
        for pick in 0..self.owned.len() {
            self.verify(u32::try_from(pick).unwrap_or(0), 0);
        }
        let Player { world, owned, pools, routes, graphs, replayed, growables, .. } = self;
        drop((growables, graphs, replayed, owned, routes));
        pools.into_iter().for_each(|pool| world.hand(Handed::Pool(pool)));
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
    pub(crate) fn stream(&self, pick: u32) -> Stream {
        let first = pick as usize % self.streams.len();
        let from_there = self.streams[first..].iter().chain(&self.streams[..first]);
        from_there.clone().find(|stream| self.runs(stream)).unwrap_or(&self.streams[first]).clone()
    }

    /// True if work that the stream enqueues now is run, not captured.
    pub(crate) fn runs(&self, stream: &Stream) -> bool {
        self.handed.get(&stream.id()).is_none_or(|dropping| dropping.is_done())
    }

    fn write_all(&self, owned: &mut Owned, stream: &Stream, pattern: u8) {
        (owned.pattern, owned.coming) = (None, None);
        if owned.buffer.is_empty() {
            return;
        }
        owned.lost = self.world.sleeping.lost(owned.kind);
        let runs = self.runs(stream);
        let filled = match &self.world.kernels {
            Some(kernels) if owned.buffer.len() > WHOLE => {
                self.world.allow(kernels.pattern_write(stream, &mut owned.buffer, pattern.into()))
            }
            _ => self
                .world
                .allow(with(stream, [write(&mut owned.buffer)], |raw, [x]| raw.fill(x.ptr(), pattern, x.bytes()))),
        };
        owned.pattern = filled.filter(|()| runs).map(|()| pattern);
    }

    pub(crate) fn pattern(&mut self) -> u8 {
        self.next_pattern = self.next_pattern.wrapping_add(1);
        self.next_pattern
    }

    /// The contents of a buffer, if they are known, and what keeps them while it is held.
    fn contents(&mut self, at: usize) -> Option<(u8, Option<WakeLock>)> {
        let world = self.world;
        let awake = if world.sleeping.may_refuse(world.threads) { Some(world.keep_awake()?) } else { None };
        let owned = &mut self.owned[at];
        if let Some(coming) = owned.coming.take()
            && world.allow(coming.wait()).is_none()
        {
            owned.pattern = None;
        }
        let is_lost = owned.lost != world.sleeping.lost(owned.kind);
        owned.pattern.filter(|_| !is_lost).map(|pattern| (pattern, awake))
    }

    #[expect(clippy::too_many_lines, reason = "one line for each step")]
    fn step(&mut self, step: Step) {
        let world = self.world;
        match step {
            Step::Alloc { stream, bytes, tag } => {
                let stream = self.stream(stream);
                let tag = tag as usize % TAGS.len();
                let _scope = (tag > 0).then(|| TagScope::new(TAGS[tag]));
                self.add(&world.memory, bytes, &stream, tag, || world.memory.alloc(length(bytes), &stream));
            }
            Step::AllocFrom { pool, stream, bytes } => {
                let stream = self.stream(stream);
                let Some(pool) = take(&mut self.pools, pool) else { return };
                self.add(&world.memory, bytes, &stream, 0, || world.memory.alloc_in(&pool, length(bytes), &stream));
                self.pools.push(pool);
            }
            Step::AllocExportable { stream, bytes } => {
                let stream = self.stream(stream);
                let memory = &world.memory;
                let ask = || Ok(Buffer::of(memory.alloc_exportable(bytes, HandleKind::PosixFd, &stream)?.storage()));
                let runs = self.runs(&stream);
                let made = world.request(memory, (bytes, false), ask);
                self.keep(made, &stream, 0, runs);
            }
            Step::AllocRaw { stream, bytes, align } => self.alloc_raw(&self.stream(stream), bytes, align),
            Step::UseRaw { pick, stream, writes, is_recorded } => self.use_raw(pick, stream, writes, is_recorded),
            Step::FreeRaw { pick, how } => self.free_raw(pick, how),
            Step::FreeWrong(pick) => self.free_wrong(pick),
            Step::Replace { pick, stream, blocks, bytes } => self.replace(pick, stream, blocks, bytes),
            Step::Pin(pick) => self.pin(pick),
            Step::Unpin(pick) => drop(world.pin(|pinned| take(pinned, pick))),
            Step::GiveRaw(pick) => self.give_raw(pick),
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
            Step::Upload { pick, stream, is_file, waits, is_kept } => {
                self.upload(pick, stream, is_file, is_kept);
                if waits {
                    (0..self.owned.len()).for_each(|at| drop(self.contents(at)));
                }
            }
            Step::ToVec { pick, stream } => {
                let stream = self.stream(stream);
                let Some(at) = at(&self.owned, pick) else { return };
                if self.owned[at].buffer.len() <= WHOLE
                    && let Some((pattern, _awake)) = self.contents(at)
                {
                    let transfer = world.transfer.on(&stream);
                    let found = transfer.and_then(|transfer| self.owned[at].buffer.to_vec(&transfer));
                    let lost = || self.owned[at].pattern = None;
                    world.allow(found).map_or_else(lost, |found| world.compare(&found, pattern));
                }
            }
            Step::Give(pick) => take(&mut self.owned, pick).into_iter().for_each(|one| world.hand(Handed::Buffer(one))),
            Step::GivePool(pick) => {
                take(&mut self.pools, pick).into_iter().for_each(|one| world.hand(Handed::Pool(one)))
            }
            Step::GiveGraph(pick) => {
                take(&mut self.graphs, pick).into_iter().for_each(|one| world.hand(Handed::Graph(one)));
                let replayed = take(&mut self.replayed, pick).map(Box::new);
                replayed.into_iter().for_each(|one| world.hand(Handed::Replayed(one)));
            }
            Step::Take => {
                let taken = world.handed.lock().pop();
                match taken {
                    None => {}
                    Some(Handed::Buffer(owned)) => self.owned.push(owned),
                    Some(Handed::Raw(raw)) => self.take_raw(raw, &self.stream(0)),
                    Some(Handed::Pool(pool)) => self.pools.push(pool),
                    Some(Handed::Graph(graph)) => self.graphs.push(graph),
                    Some(Handed::Replayed(graph)) => self.replayed.push(*graph),
                    Some(Handed::Capture(capture, dropping)) => dropping.finish(capture),
                }
            }
            Step::Wait { stream, on } => drop(world.allow(self.stream(stream).wait_for(&self.stream(on).tick()))),
            Step::Synchronize(stream) => drop(world.allow(self.stream(stream).synchronize())),
            Step::Stall { stream, us } => {
                let stream = self.stream(stream);
                // Time passes for streams that no other thread can mean.
                if stream.raw() != RawStream::PER_THREAD {
                    world.allow(world.subject.stall(&stream, Duration::from_micros(us)));
                }
            }
            Step::Advance(us) => world.subject.advance(Duration::from_micros(us)),
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
            Step::Launch { graph, stream } => self.launch(graph, stream),
            Step::MakeGraph { pool, stream, bytes, temporary } => self.make_graph(pool, stream, bytes, temporary),
            Step::ReplayGraph { graph, stream } => self.replay_graph(graph, stream),
            Step::DropInput { graph, stream } => self.drop_input(graph, stream),
            Step::DropGraph(pick) => drop((take(&mut self.graphs, pick), take(&mut self.replayed, pick))),
            Step::CreatePool { lends, lends_when_idle, no_split } => {
                if self.pools.len() < 3 {
                    let options = PoolOptions { use_on_oom: lends, lends_when_idle, no_split, limit: None };
                    self.pools.extend(world.allow(world.memory.create_pool(options)));
                }
            }
            Step::DropPool(pick) => drop(take(&mut self.pools, pick)),
            Step::EmptyPool(pick) => {
                if let Some(at) = at(&self.pools, pick) {
                    world.allow(self.pools[at].empty_cache());
                }
            }
            Step::Route(pick) => {
                if let Some(at) = at(&self.pools, pick).filter(|_| self.routes.len() < 3) {
                    self.routes.push(self.pools[at].route_thread());
                }
            }
            Step::EndRoute(pick) => drop(take(&mut self.routes, pick)),
            Step::MakeGrowable(capacity) => self.make_growable(capacity),
            Step::Resize { pick, stream, bytes } => self.resize(pick, stream, bytes),
            Step::EmptyCache => drop(world.allow(world.memory.empty_cache())),
            Step::TrimTo(bytes) => drop(world.allow(world.memory.trim_to(bytes))),
            Step::SetLimit(limit) => world.memory.set_limit(limit),
            Step::SetShare(bytes) => world.set_share(bytes),
            Step::OtherProcess(bytes) => {
                world.others.store(bytes > 0, Ordering::Relaxed);
                world.subject.set_other_process_bytes(bytes);
            }
            Step::Second { stream, bytes } => {
                let stream = self.stream(stream);
                self.add(&world.second, bytes, &stream, 0, || world.second.alloc(length(bytes), &stream));
            }
            Step::Outlive { stream, bytes } => {
                let (stream, made) = (self.stream(stream), Allocator::new(&world.device, Config::default()));
                let Some(memory) = world.allow(made) else { return };
                self.add(&memory, bytes, &stream, 0, || memory.alloc(length(bytes), &stream));
            }
            Step::Fill { second, stream, bytes, keep } => self.fill(second, &self.stream(stream), bytes, keep),
            Step::Sleep { what, save, waits } => self.sleep(what, save, waits),
            Step::Wake(what) => self.wake(what),
            Step::Look => world.look(),
            Step::Faults(thousandths) => world.inject_rate(thousandths),
            Step::Fault { nth, operation, code } => world.inject(nth, operation, code),
            Step::Lose(nth) => world.lose(nth),
        }
    }

    /// Asks for a buffer, writes it and keeps it, unless it was allocated in a capture: then it is
    /// the graph's, and other graphs of the pool write it, too.
    pub(crate) fn add(
        &mut self,
        of: &Allocator,
        bytes: u64,
        stream: &Stream,
        kind: usize,
        ask: impl FnOnce() -> Result<Buffer<u8>, Error>,
    ) {
        let runs = self.runs(stream);
        let made = self.world.request(of, (bytes, true), ask);
        self.keep(made, stream, kind, runs);
    }

    fn keep(&mut self, made: Option<Buffer<u8>>, stream: &Stream, kind: usize, runs: bool) {
        let Some(buffer) = made else { return };
        let pattern = self.pattern();
        let mut owned = Owned { buffer, pattern: None, kind, lost: 0, coming: None };
        self.write_all(&mut owned, stream, pattern);
        if runs {
            self.owned.push(owned);
        }
    }

    fn fill(&mut self, second: bool, stream: &Stream, bytes: u64, keep: u32) {
        let of = if second { &self.world.second } else { &self.world.memory };
        if !self.runs(stream) {
            return;
        }
        let first = self.owned.len();
        for _ in 0..PIECES_MAX {
            let before = self.owned.len();
            self.add(of, bytes, stream, 0, || of.alloc(length(bytes), stream));
            if self.owned.len() == before {
                break;
            }
        }
        self.owned.truncate(first + keep as usize);
    }

    pub(crate) fn upload(&mut self, pick: u32, stream: u32, is_file: bool, is_kept: bool) {
        let (world, stream, pattern) = (self.world, self.stream(stream), self.pattern());
        let Some(owned) = at(&self.owned, pick).map(|at| &mut self.owned[at]) else { return };
        if owned.buffer.is_empty() || owned.buffer.len() > WHOLE {
            return;
        }
        (owned.pattern, owned.coming) = (None, None);
        owned.lost = world.sleeping.lost(owned.kind);
        let (contents, transfer) = (vec![pattern; owned.buffer.len()], world.transfer.on(&stream));
        let coming = if is_file {
            // Programs of several processes and threads have a file each.
            let number = FILES.fetch_add(1, Ordering::Relaxed);
            let path = env::temp_dir().join(format!("aquifer-simulate-{}-{number}", process::id()));
            if let Err(error) = fs::write(&path, contents) {
                world.report(format!("{} cannot be written: {error}", path.display()));
                return;
            }
            let sent = transfer.and_then(|transfer| owned.buffer.upload(FilePart::new(&path), &transfer));
            // The upload has opened it.
            drop(fs::remove_file(path));
            sent
        } else {
            transfer.and_then(|transfer| owned.buffer.upload(contents, &transfer))
        };
        let Some(coming) = world.allow(coming) else { return };
        owned.pattern = Some(pattern);
        world.uploads.store(true, Ordering::Relaxed);
        // Only its handle has the error of an upload that failed.
        owned.coming = Some(coming).filter(|_| is_kept || world.may_fail);
    }

    fn verify(&mut self, pick: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(at) = at(&self.owned, pick) else { return };
        let Some((pattern, _awake)) = self.contents(at) else { return };
        let buffer = &self.owned[at].buffer;
        if let Some(kernels) = world.kernels.as_ref().filter(|_| buffer.len() > WHOLE) {
            return world.verify_pattern(kernels, &stream, buffer, pattern);
        }
        let mut found = vec![0; buffer.len().min(END)];
        let end = buffer.bytes() - found.len() as u64;
        for offset in [0, end] {
            let read =
                with(&stream, [read(buffer)], |raw, [x]| raw.download_blocking(&mut found, x.ptr().offset(offset)));
            if world.allow(read).is_none() {
                // It may be the error of an upload whose handle was dropped.
                self.owned[at].pattern = None;
                return;
            }
            world.compare(&found, pattern);
        }
    }

    fn copy(&mut self, from: u32, to: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let (Some(from), Some(to)) = (at(&self.owned, from), at(&self.owned, to)) else { return };
        if from == to || self.owned[to].buffer.len() > self.owned[from].buffer.len() {
            return;
        }
        let Some((pattern, _awake)) = self.contents(from) else { return };
        let mut target = self.owned.swap_remove(to);
        // The last one took the place of the one that was removed.
        let from = if from == self.owned.len() { to } else { from };
        let source = &self.owned[from];
        (target.pattern, target.coming) = (None, None);
        target.lost = world.sleeping.lost(target.kind);
        let runs = self.runs(&stream);
        let accesses = [read(&source.buffer), write(&mut target.buffer)];
        let copied = with(&stream, accesses, |raw, [from, to]| raw.copy(to.ptr(), from.ptr(), to.bytes()));
        if world.allow(copied).is_none() {
            self.owned[from].pattern = None;
        } else if runs && (world.kernels.is_none() || source.buffer.len() <= WHOLE) {
            target.pattern = Some(pattern);
        }
        self.owned.push(target);
    }
}

impl World {
    /// Lets the device compare a buffer with its pattern.
    fn verify_pattern(&self, kernels: &Kernels, stream: &Stream, buffer: &Buffer<u8>, pattern: u8) {
        let verify = || {
            let mut findings = self.memory.alloc_zeros::<u64>(Kernels::FINDINGS_LEN, stream)?;
            kernels.pattern_verify(stream, buffer, pattern.into(), &mut findings)?;
            Ok::<_, Error>(kernels.mismatches(stream, &findings)?)
        };
        self.counts.lock().compared += buffer.bytes();
        if let Some(Some(found)) = self.served(verify()) {
            self.report(format!("{} words differ of {} bytes, from {} on", found.words, buffer.bytes(), found.first));
        }
    }
}

pub(crate) fn length(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The index that `pick` stands for.
pub(crate) fn at<T>(all: &[T], pick: u32) -> Option<usize> {
    (!all.is_empty()).then(|| pick as usize % all.len())
}

pub(crate) fn take<T>(all: &mut Vec<T>, pick: u32) -> Option<T> {
    at(all, pick).map(|at| all.swap_remove(at))
}
