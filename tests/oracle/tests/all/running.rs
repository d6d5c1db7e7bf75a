//! Runs random programs.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{
    AccessKind, AccessRange, Code, Copy2d, CopyEnd, CopyPart, DevicePtr, HostPtr, Launch, PhysicalOptions, RawEvent,
    RawGraph, RawPhysical, RawStream, StreamFlags,
};
use aquifer_oracle::{Call, Touch};
use aquifer_sim::Fault;
use parking_lot::Mutex;

use crate::bench::GRANULE;
use crate::both::{Both, Found};
use crate::program::{
    Action, EVENTS, GRAPHS, MAPPED, MEMORIES, PAGEABLE, PINNED, PLAIN, POOL, Place, REGISTERED, STREAMS, Step, UNIT,
    UNITS,
};
use crate::threads::Threads;

/// The number of a memory, and how often it was renewed.
type Version = (usize, u64);

/// The objects of a program, by number.
struct Running {
    both: Both,
    streams: [Option<RawStream>; STREAMS],
    events: [Option<RawEvent>; EVENTS],
    graphs: [Option<(RawGraph, Vec<Version>)>; GRAPHS],
    /// The first address of each memory, and how often it was renewed.
    memories: [(Option<u64>, u64); MEMORIES],
    mapped: [bool; MEMORIES],
    physical: [Option<RawPhysical>; 2],
    /// How many other streams come and go before each one is created, so that identities are close
    /// together or far apart.
    passing_streams: usize,
    /// Memory that work touched since a capture began.
    captured: Vec<Version>,
    pageable: Vec<u8>,
    /// The memory of [`REGISTERED`].
    registered: Vec<u8>,
    done: Outcome,
}

/// What a program did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    /// What the detector and the oracle found in the first step that races, and its number.
    pub(crate) first: Option<(usize, Found, Found)>,
    pub(crate) calls: u64,
    pub(crate) launches: u64,
    pub(crate) left_out: u64,
    pub(crate) reports: String,
}

impl Outcome {
    /// Whether the checkers differ.
    pub(crate) fn is_split(&self) -> bool {
        self.first.as_ref().is_some_and(|(_, detector, oracle)| detector != oracle)
    }
}

/// Calls fail in one program of four, and the device is lost in one of sixteen.
fn fault(seed: u64) -> Option<Fault> {
    match seed % 16 {
        0 | 4 | 8 | 12 => Some(Fault::Rate { operation: None, rate: 0.03, code: Code::OUT_OF_MEMORY }),
        1 => Some(Fault::LostAt { nth: 1 + seed / 16 % 64 }),
        _ => None,
    }
}

/// Runs a program until its first race for either checker, or to its end.
pub(crate) fn run(seed: u64, steps: &[Step]) -> Outcome {
    let running = Arc::new(Mutex::new(Running::new(seed)));
    let mut threads = Threads::default();
    for (number, step) in steps.iter().enumerate() {
        if matches!(step.action, Action::EndThread) {
            // CUDA says nothing about captures that a thread leaves behind.
            if running.lock().both.sim.live_objects().captures == 0 {
                threads.end(step.thread);
            }
            continue;
        }
        let (on, step) = (running.clone(), step.clone());
        threads.run(step.thread, move || on.lock().step(&step));
        let mut running = running.lock();
        let (detector, oracle) = running.both.found();
        if !detector.is_empty() || !oracle.is_empty() {
            running.done.reports = running.both.reports();
            running.done.first = Some((number, detector, oracle));
            break;
        }
    }
    let mut running = running.lock();
    running.end();
    std::mem::take(&mut running.done)
}

impl Running {
    fn new(seed: u64) -> Running {
        let mut running = Running {
            streams: [Some(RawStream::LEGACY), Some(RawStream::PER_THREAD), None, None, None, None],
            events: [None; EVENTS],
            graphs: [const { None }; GRAPHS],
            memories: [(None, 0); MEMORIES],
            mapped: [false; MEMORIES],
            physical: [None; 2],
            passing_streams: if seed.is_multiple_of(3) { 30 } else { 0 },
            captured: Vec::new(),
            pageable: vec![0; usize::try_from(UNIT * UNITS).unwrap()],
            registered: vec![0; usize::try_from(UNIT * UNITS).unwrap()],
            done: Outcome::default(),
            both: Both::new(seed),
        };
        running.memories[PAGEABLE].0 = Some(running.pageable.as_mut_ptr().addr() as u64);
        for memory in MAPPED {
            running.memories[memory].0 = running.both.reserve(GRANULE, 0).ok().map(|ptr| ptr.0);
        }
        (0..2).for_each(|physical| running.act(&Action::RenewPhysical(physical)));
        for (memory, physical) in MAPPED.zip([0, 0, 1]) {
            running.act(&Action::Map(memory, physical));
        }
        PLAIN.chain(POOL).chain(PINNED).for_each(|memory| running.act(&Action::Renew(memory, 0)));
        (0..EVENTS).for_each(|event| running.act(&Action::RenewEvent(event)));
        (2..STREAMS).for_each(|stream| running.act(&Action::CreateStream(stream, stream > 3)));
        running.both.synchronize().unwrap();
        fault(seed).into_iter().for_each(|fault| running.both.sim.inject(fault));
        running.done = Outcome::default();
        running
    }

    fn step(&mut self, step: &Step) {
        if !step.bold
            && let Some(call) = self.call(&step.action)
            && !self.both.judged.oracle().take(std::thread::current().id(), call).is_empty()
        {
            self.done.left_out += 1;
            return;
        }
        self.act(&step.action);
    }

    /// Frees pinned memory, which outlives the simulator otherwise.
    fn end(&mut self) {
        self.both.sim.clear_faults();
        // A capture would keep registered memory from being given back.
        self.streams.iter().flatten().for_each(|&stream| drop(self.both.end_capture(stream)));
        for memory in PINNED {
            let _ = self.free(memory);
        }
        let _ = self.both.sim.take_violations();
    }

    /// The first byte of a place, if work may use its memory.
    fn at(&self, place: Place) -> Option<CopyEnd> {
        let (Some(start), _) = self.memories[place.memory] else { return None };
        let first = start + place.from * UNIT;
        if place.memory >= PINNED.start {
            return Some(CopyEnd::Host(host(first)));
        }
        (!MAPPED.contains(&place.memory) || self.mapped[place.memory]).then_some(CopyEnd::Device(DevicePtr(first)))
    }

    fn touch(&self, place: Place, kind: AccessKind) -> Option<Touch> {
        Some(Touch { at: self.at(place)?, bytes: place.bytes(), kind })
    }

    /// Both ends of a copy, if it is possible: one of them on the device, and no overlap.
    fn part(&self, from: Place, to: Place) -> Option<CopyPart> {
        let units = from.units.min(to.units);
        let part = CopyPart { src: self.at(from)?, dst: self.at(to)?, bytes: units * UNIT };
        let is_possible = from.memory < PINNED.start || to.memory < PINNED.start;
        (is_possible && CopyPart::are_independent(&[part])).then_some(part)
    }

    /// What work touches.
    fn touches(&self, action: &Action) -> Option<(usize, Vec<Touch>)> {
        let both = |part: CopyPart| {
            let touch = |at, kind| Touch { at, bytes: part.bytes, kind };
            [touch(part.src, AccessKind::Read), touch(part.dst, AccessKind::Write)]
        };
        Some(match action {
            Action::Kernel(stream, places) => {
                (*stream, places.iter().map(|(place, kind)| self.touch(*place, *kind)).collect::<Option<_>>()?)
            }
            Action::Fill(stream, place) => (*stream, vec![self.touch(*place, AccessKind::Write)?]),
            Action::Copy(stream, from, to) => (*stream, both(self.part(*from, *to)?).to_vec()),
            Action::CopyRows(stream, from, to) => {
                let copy = self.rows(*from, *to)?;
                let row = |end, row: u64| further(end, row * UNIT);
                let part = |at| CopyPart { src: row(copy.src, at), dst: row(copy.dst, at), bytes: copy.width };
                (*stream, (0..copy.height).flat_map(|at| both(part(at))).collect())
            }
            Action::CopyBatch(stream, places) => (*stream, self.batch(places)?.into_iter().flat_map(both).collect()),
            _ => return None,
        })
    }

    /// The call that an action makes, where it may race.
    fn call(&self, action: &Action) -> Option<Call> {
        if let Some((stream, touches)) = self.touches(action) {
            return Some(Call::Work { call: "work", stream: self.streams[stream]?, touches });
        }
        Some(match *action {
            Action::LaunchGraph(graph, stream) => {
                Call::LaunchGraph { graph: self.graphs[graph].as_ref()?.0, stream: self.streams[stream]? }
            }
            Action::HostAccess(place, kind) => {
                let CopyEnd::Host(ptr) = self.at(place)? else { return None };
                Call::HostAccess { ptr, bytes: usize::try_from(place.bytes()).ok()?, kind }
            }
            Action::FreeAsync(memory, stream) => {
                Call::FreeAsync { ptr: DevicePtr(self.memories[memory].0?), stream: self.streams[stream]? }
            }
            Action::Renew(REGISTERED, _) => Call::HostUnregister { ptr: host(self.memories[REGISTERED].0?) },
            Action::Renew(memory, _) if PINNED.contains(&memory) => {
                Call::HostFree { ptr: host(self.memories[memory].0?) }
            }
            Action::Renew(memory, _) if POOL.contains(&memory) => {
                Call::Free { ptr: DevicePtr(self.memories[memory].0?) }
            }
            Action::Unmap(memory) => Call::Unmap { ptr: DevicePtr(self.memories[memory].0?), bytes: GRANULE },
            _ => return None,
        })
    }

    /// Half of each unit of a copy.
    fn rows(&self, from: Place, to: Place) -> Option<Copy2d> {
        let CopyPart { src, dst, bytes } = self.part(from, to)?;
        let is_page_locked = from.memory != PAGEABLE && to.memory != PAGEABLE;
        let (width, height) = (UNIT / 2, bytes / UNIT);
        is_page_locked.then_some(Copy2d { dst, dst_pitch: UNIT, src, src_pitch: UNIT, width, height })
    }

    fn batch(&self, places: &[(Place, Place)]) -> Option<Vec<CopyPart>> {
        let is_page_locked = places.iter().all(|(from, to)| from.memory != PAGEABLE && to.memory != PAGEABLE);
        let parts: Vec<CopyPart> = places.iter().map(|&(from, to)| self.part(from, to)).collect::<Option<_>>()?;
        (is_page_locked && CopyPart::are_independent(&parts)).then_some(parts)
    }

    fn act(&mut self, action: &Action) {
        if self.try_act(action).is_some() {
            self.done.calls += 1;
        }
    }

    /// Makes the calls of an action. `None` if it is impossible now, or failed.
    fn try_act(&mut self, action: &Action) -> Option<()> {
        let both = self.both.clone();
        if let Some((stream, touches)) = self.touches(action) {
            let stream = self.streams[stream]?;
            self.note_touched(action);
            return self.work(action, stream, touches);
        }
        match *action {
            Action::Record(event, stream) => both.record(self.events[event]?, self.streams[stream]?).ok()?,
            Action::Wait(stream, event) => both.wait(self.streams[stream]?, self.events[event]?).ok()?,
            Action::SynchronizeStream(stream) => both.synchronize_stream(self.streams[stream]?).ok()?,
            Action::QueryStream(stream) => drop(both.query_stream(self.streams[stream]?).ok()?),
            Action::SynchronizeEvent(event) => both.synchronize_event(self.events[event]?).ok()?,
            Action::QueryEvent(event) => drop(both.query_event(self.events[event]?).ok()?),
            Action::Elapsed(start, end) => drop(both.elapsed_ms(self.events[start]?, self.events[end]?).ok()?),
            Action::RenewEvent(event) => {
                if let Some(old) = self.events[event] {
                    both.destroy_event(old).ok()?;
                }
                self.events[event] = both.create_event(true).ok();
            }
            Action::Synchronize => both.synchronize().ok()?,
            Action::Advance(ns) => both.sim.advance(Duration::from_nanos(ns)),
            Action::CreateStream(stream, non_blocking) => {
                if self.streams[stream].is_none() {
                    for _ in 0..self.passing_streams {
                        let passing = both.create_stream(StreamFlags::default()).ok()?;
                        both.destroy_stream(passing).ok()?;
                    }
                    self.streams[stream] = Some(both.create_stream(StreamFlags { non_blocking, priority: 0 }).ok()?);
                }
            }
            Action::DestroyStream(stream) => {
                both.destroy_stream(self.streams[stream]?).ok()?;
                self.streams[stream] = None;
            }
            Action::BeginCapture(stream) => both.begin_capture(self.streams[stream]?).ok()?,
            Action::EndCapture(stream, graph) => {
                let made = both.end_capture(self.streams[stream]?).ok()?;
                if let Some((old, _)) = self.graphs[graph].replace((made, self.captured.clone())) {
                    both.destroy_graph(old).ok()?;
                }
            }
            Action::LaunchGraph(graph, stream) => {
                let (graph, memories) = self.graphs[graph].as_ref()?;
                let is_there = |&(memory, version): &Version| {
                    let (ptr, latest) = self.memories[memory];
                    ptr.is_some() && latest == version && (!MAPPED.contains(&memory) || self.mapped[memory])
                };
                if !memories.iter().all(is_there) {
                    return None;
                }
                both.launch_graph(*graph, self.streams[stream]?).ok()?;
                self.captured.extend(memories);
                self.done.launches += 1;
            }
            Action::DestroyGraph(graph) => {
                let (old, _) = self.graphs[graph].take()?;
                both.destroy_graph(old).ok()?;
            }
            Action::HostAccess(place, kind) => {
                let CopyEnd::Host(ptr) = self.at(place)? else { return None };
                both.host_access(ptr, usize::try_from(place.bytes()).unwrap(), kind).ok()?;
            }
            Action::Renew(memory, stream) => return self.renew(memory, stream),
            Action::FreeAsync(memory, stream) => {
                both.free_async(DevicePtr(self.memories[memory].0?), self.streams[stream]?).ok()?;
                self.forget(memory);
            }
            Action::Map(memory, physical) => {
                let ptr = DevicePtr(self.memories[memory].0?);
                if self.mapped[memory] {
                    return None;
                }
                both.map(ptr, GRANULE, self.physical[physical]?).ok()?;
                // Work needs access; without it the addresses stay unused.
                if both.set_access(ptr, GRANULE, &[0]).is_err() {
                    both.unmap(ptr, GRANULE).ok()?;
                    return None;
                }
                self.mapped[memory] = true;
            }
            Action::Unmap(memory) => {
                both.unmap(DevicePtr(self.memories[memory].0?), GRANULE).ok()?;
                self.mapped[memory] = false;
            }
            Action::RenewPhysical(physical) => {
                if let Some(old) = self.physical[physical] {
                    both.release_physical(old).ok()?;
                }
                self.physical[physical] = both.create_physical(GRANULE, PhysicalOptions::default()).ok();
            }
            _ => return None,
        }
        Some(())
    }

    /// Notes memory that a graph may name, if the work is captured.
    fn note_touched(&mut self, action: &Action) {
        if self.both.sim.live_objects().captures == 0 {
            self.captured.clear();
            return;
        }
        let places: Vec<Place> = match action {
            Action::Kernel(_, places) => places.iter().map(|(place, _)| *place).collect(),
            Action::Fill(_, place) => vec![*place],
            Action::Copy(_, from, to) | Action::CopyRows(_, from, to) => vec![*from, *to],
            Action::CopyBatch(_, parts) => parts.iter().flat_map(|(from, to)| [*from, *to]).collect(),
            _ => Vec::new(),
        };
        self.captured.extend(places.iter().map(|place| (place.memory, self.memories[place.memory].1)));
        self.captured.sort_unstable();
        self.captured.dedup();
    }

    fn work(&self, action: &Action, stream: RawStream, touches: Vec<Touch>) -> Option<()> {
        let both = &self.both;
        match action {
            Action::Kernel(..) => {
                let access = |touch: &Touch| match touch.at {
                    CopyEnd::Device(ptr) => AccessRange { ptr, bytes: touch.bytes, kind: touch.kind },
                    CopyEnd::Host(_) => unreachable!("kernels are given device memory"),
                };
                let accesses: Vec<AccessRange> = touches.iter().map(access).collect();
                let busy_ns = 5_000 * accesses.len() as u64;
                let launch = Launch { name: "k", accesses, busy_ns, ..Launch::default() };
                // SAFETY: the kernel has no code.
                unsafe { both.launch(&launch, stream) }
            }
            Action::Fill(_, place) => {
                let CopyEnd::Device(ptr) = self.at(*place)? else { return None };
                both.memset(ptr, 7, place.bytes(), stream)
            }
            Action::Copy(_, from, to) => {
                let CopyPart { src, dst, bytes } = self.part(*from, *to)?;
                let count = usize::try_from(bytes).ok()?;
                match (src, dst) {
                    (CopyEnd::Device(src), CopyEnd::Device(dst)) => both.copy_on_device(dst, src, bytes, stream),
                    // SAFETY: the memory lives as long as the simulator. Only the simulator touches it.
                    (CopyEnd::Host(src), CopyEnd::Device(dst)) => unsafe {
                        both.copy_to_device(dst, src.as_ptr(), count, stream)
                    },
                    // SAFETY: as above.
                    (CopyEnd::Device(src), CopyEnd::Host(dst)) => unsafe {
                        both.copy_to_host(dst.as_ptr(), src, count, stream)
                    },
                    (CopyEnd::Host(_), CopyEnd::Host(_)) => return None,
                }
            }
            // SAFETY: as for copies of one range.
            Action::CopyRows(_, from, to) => unsafe { both.copy_2d(&self.rows(*from, *to)?, stream) },
            // SAFETY: as for copies of one range.
            Action::CopyBatch(_, places) => unsafe { both.copy_batch(&self.batch(places)?, stream) },
            _ => return None,
        }
        .ok()
    }

    fn forget(&mut self, memory: usize) {
        let (ptr, version) = &mut self.memories[memory];
        *ptr = None;
        *version += 1;
    }

    fn free(&mut self, memory: usize) -> Option<()> {
        let both = self.both.clone();
        if let (Some(old), _) = self.memories[memory] {
            if memory == REGISTERED {
                // SAFETY: as for memory that the driver allocated.
                unsafe { both.host_unregister(host(old)) }.ok()?;
            } else if PINNED.contains(&memory) {
                // SAFETY: only the simulator touches it, which knows that its work is done, or reports it.
                unsafe { both.host_free(host(old)) }.ok()?;
            } else {
                both.free(DevicePtr(old)).ok()?;
            }
            self.forget(memory);
        }
        Some(())
    }

    fn renew(&mut self, memory: usize, stream: usize) -> Option<()> {
        let both = self.both.clone();
        if MAPPED.contains(&memory) {
            return None;
        }
        self.free(memory)?;
        let bytes = UNIT * UNITS;
        self.memories[memory].0 = match memory {
            memory if PLAIN.contains(&memory) => Some(both.alloc(bytes).ok()?.0),
            memory if POOL.contains(&memory) => Some(both.alloc_async(bytes, self.streams[stream]?).ok()?.0),
            REGISTERED => {
                let Running { registered, .. } = self;
                // SAFETY: the memory outlives the device, which is dropped before it.
                let at = unsafe { both.host_register(registered.as_mut_ptr(), registered.len()) }.ok()?;
                Some(at.0 as u64)
            }
            _ => Some(both.host_alloc(usize::try_from(bytes).unwrap()).ok()?.0 as u64),
        };
        Some(())
    }
}

/// Memory is kept by number, whether of the device or the host.
fn host(address: u64) -> HostPtr {
    HostPtr(usize::try_from(address).unwrap())
}

/// The place `bytes` bytes further on.
fn further(end: CopyEnd, bytes: u64) -> CopyEnd {
    match end {
        CopyEnd::Device(ptr) => CopyEnd::Device(ptr.offset(bytes)),
        CopyEnd::Host(ptr) => CopyEnd::Host(HostPtr(ptr.0 + usize::try_from(bytes).unwrap())),
    }
}
