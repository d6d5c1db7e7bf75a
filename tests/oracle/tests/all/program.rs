//! Random programs: the steps, how they are drawn, and how they run.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::sim::Fault;
use aquifer_device::{
    Access, AccessKind, Code, Copy2d, CopyEnd, CopyPart, DevicePtr, HostPtr, Launch, PhysicalOptions, RawEvent,
    RawGraph, RawPhysical, RawStream, StreamFlags,
};
use aquifer_oracle::{Call, Touch};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::both::{Both, Found};
use crate::crew::Crew;

/// Bytes of a unit of memory, in which places are given.
const UNIT: u64 = 64;
/// Units that programs use of each memory.
const UNITS: u64 = 4;
const GRANULE: u64 = 2 << 20;

/// Memory by number.
const PLAIN: std::ops::Range<usize> = 0..2;
const POOL: std::ops::Range<usize> = 2..4;
const MAPPED: std::ops::Range<usize> = 4..7;
const PINNED: std::ops::Range<usize> = 7..9;
/// Among those that are page-locked, memory of the program's own.
const REGISTERED: usize = 8;
const PAGEABLE: usize = 9;
const MEMORIES: usize = 10;

const STREAMS: usize = 6;
const EVENTS: usize = 3;
const GRAPHS: usize = 2;

/// Units of a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    memory: usize,
    from: u64,
    units: u64,
}

impl Place {
    fn bytes(self) -> u64 {
        self.units * UNIT
    }
}

/// One call, or a few that belong together. Those that the state makes impossible do nothing.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Kernel(usize, Vec<(Place, AccessKind)>),
    Fill(usize, Place),
    /// Copies from one place to the start of another memory's unit.
    Copy(usize, Place, Place),
    CopyRows(usize, Place, Place),
    CopyBatch(usize, Vec<(Place, Place)>),
    Record(usize, usize),
    Wait(usize, usize),
    SynchronizeStream(usize),
    QueryStream(usize),
    SynchronizeEvent(usize),
    QueryEvent(usize),
    Elapsed(usize, usize),
    RenewEvent(usize),
    Synchronize,
    Advance(u64),
    CreateStream(usize, bool),
    DestroyStream(usize),
    BeginCapture(usize),
    EndCapture(usize, usize),
    LaunchGraph(usize, usize),
    DestroyGraph(usize),
    HostAccess(Place, AccessKind),
    /// Frees memory of any kind and allocates new memory in its place.
    Renew(usize, usize),
    FreeAsync(usize, usize),
    Map(usize, usize),
    Unmap(usize),
    RenewPhysical(usize),
    EndThread,
}

/// An action of one of the host's threads.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) thread: usize,
    /// Whether it is made even if it races. Others are left out then, so that programs get far.
    pub(crate) bold: bool,
    pub(crate) action: Action,
}

fn place(memories: std::ops::Range<usize>) -> impl Strategy<Value = Place> {
    let units = prop_oneof![16 => 1..=2_u64, 2 => 3..=UNITS, 1 => Just(0)];
    (memories, 0..UNITS, units).prop_map(|(memory, from, units)| Place { memory, from, units: units.min(UNITS - from) })
}

fn kind() -> impl Strategy<Value = AccessKind> {
    prop_oneof![Just(AccessKind::Read), Just(AccessKind::Write)]
}

fn action() -> impl Strategy<Value = Action> {
    use Action::*;
    let device = || place(0..PINNED.start);
    let any = || place(0..MEMORIES);
    let (stream, event, graph) = (|| 0..STREAMS, || 0..EVENTS, || 0..GRAPHS);
    let touches = prop::collection::vec((device(), kind()), 0..3);
    prop_oneof![
        14 => (stream(), touches).prop_map(|(stream, touches)| Kernel(stream, touches)),
        8 => (stream(), device()).prop_map(|(stream, place)| Fill(stream, place)),
        12 => (stream(), any(), any()).prop_map(|(stream, from, to)| Copy(stream, from, to)),
        2 => (stream(), any(), any()).prop_map(|(stream, from, to)| CopyRows(stream, from, to)),
        2 => (stream(), prop::collection::vec((any(), any()), 1..3)).prop_map(|(stream, parts)| CopyBatch(stream, parts)),
        10 => (event(), stream()).prop_map(|(event, stream)| Record(event, stream)),
        10 => (stream(), event()).prop_map(|(stream, event)| Wait(stream, event)),
        4 => stream().prop_map(SynchronizeStream),
        3 => stream().prop_map(QueryStream),
        3 => event().prop_map(SynchronizeEvent),
        3 => event().prop_map(QueryEvent),
        1 => (event(), event()).prop_map(|(start, end)| Elapsed(start, end)),
        1 => event().prop_map(RenewEvent),
        1 => Just(Synchronize),
        2 => (1..50_000_u64).prop_map(Advance),
        1 => (2..STREAMS, prop::bool::ANY).prop_map(|(stream, non_blocking)| CreateStream(stream, non_blocking)),
        1 => (2..STREAMS).prop_map(DestroyStream),
        3 => (1..STREAMS).prop_map(BeginCapture),
        4 => (1..STREAMS, graph()).prop_map(|(stream, graph)| EndCapture(stream, graph)),
        5 => (graph(), stream()).prop_map(|(graph, stream)| LaunchGraph(graph, stream)),
        1 => graph().prop_map(DestroyGraph),
        4 => (place(PINNED), kind()).prop_map(|(place, kind)| HostAccess(place, kind)),
        2 => (0..PAGEABLE, stream()).prop_map(|(memory, stream)| Renew(memory, stream)),
        1 => (POOL, stream()).prop_map(|(memory, stream)| FreeAsync(memory, stream)),
        4 => (MAPPED, 0..2_usize).prop_map(|(memory, physical)| Map(memory, physical)),
        2 => MAPPED.prop_map(Unmap),
        1 => (0..2_usize).prop_map(RenewPhysical),
        1 => Just(EndThread),
    ]
}

/// A capture of one stream or two, and launches of its graph.
fn capture() -> impl Strategy<Value = Vec<Action>> {
    use Action::*;
    let memory = || prop_oneof![3 => place(0..PINNED.start), 1 => place(PINNED)];
    let node = move |stream: usize| {
        prop_oneof![
            prop::collection::vec((place(0..PINNED.start), kind()), 0..3)
                .prop_map(move |touches| Kernel(stream, touches)),
            place(0..PINNED.start).prop_map(move |place| Fill(stream, place)),
            (memory(), memory()).prop_map(move |(from, to)| Copy(stream, from, to)),
        ]
    };
    (1..STREAMS, 1..STREAMS, 0..GRAPHS).prop_flat_map(move |(origin, other, graph)| {
        let link = move |from: usize, to: usize| {
            (0..EVENTS, prop::bool::weighted(0.9))
                .prop_map(move |(event, waits)| (Record(event, from), if waits { Wait(to, event) } else { Advance(1) }))
        };
        let nodes = move || prop::collection::vec(prop_oneof![node(origin), node(other)], 0..3);
        let after = prop_oneof![
            3 => (0..STREAMS).prop_map(move |stream| LaunchGraph(graph, stream)),
            1 => action(),
        ];
        let launches = prop::collection::vec(after, 1..5);
        (node(origin), link(origin, other), nodes(), nodes(), link(other, origin), launches).prop_map(
            move |(first, fork, one, two, join, launches)| {
                let mut actions = vec![BeginCapture(origin), first, fork.0, fork.1];
                actions.extend(one.into_iter().chain(two));
                actions.extend([join.0, join.1, EndCapture(origin, graph)]);
                actions.extend(launches);
                actions
            },
        )
    })
}

/// The steps of a program.
pub(crate) fn program() -> impl Strategy<Value = Vec<Step>> {
    let thread = prop_oneof![12 => Just(0), 2 => Just(1), 1 => Just(2)];
    let actions = prop_oneof![16 => action().prop_map(|action| vec![action]), 1 => capture()];
    let steps = (thread, prop::bool::weighted(0.1), actions).prop_map(|(thread, bold, actions)| {
        actions.into_iter().map(|action| Step { thread, bold, action }).collect::<Vec<_>>()
    });
    let steps = prop::collection::vec(steps, 1..60).prop_map(|steps| steps.concat());
    (steps, prop::bool::weighted(0.3)).prop_map(|(mut steps, has_threads)| {
        steps.iter_mut().for_each(|step| step.thread *= usize::from(has_threads));
        steps
    })
}

/// The objects of a program, by number.
struct Running {
    both: Both,
    streams: [Option<RawStream>; STREAMS],
    events: [Option<RawEvent>; EVENTS],
    graphs: [Option<(RawGraph, Vec<(usize, u64)>)>; GRAPHS],
    /// The first address of each memory, and how often it was renewed.
    memories: [(Option<u64>, u64); MEMORIES],
    mapped: [bool; MEMORIES],
    physical: [Option<RawPhysical>; 2],
    /// Memory that work touched since a capture began.
    captured: Vec<(usize, u64)>,
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
        1 => Some(Fault::LostAt { nth: 40 + seed % 64 }),
        _ => None,
    }
}

/// Runs a program until its first race for either checker, or to its end.
pub(crate) fn run(seed: u64, steps: &[Step]) -> Outcome {
    let both = Both::new(seed, fault(seed));
    let running = Arc::new(Mutex::new(Running::new(both)));
    let mut crew = Crew::default();
    for (number, step) in steps.iter().enumerate() {
        if matches!(step.action, Action::EndThread) {
            // CUDA says nothing about captures that a thread leaves behind.
            if running.lock().both.sim.live_objects().captures == 0 {
                crew.end(step.thread);
            }
            continue;
        }
        let (on, step) = (running.clone(), step.clone());
        crew.run(step.thread, move || on.lock().step(&step));
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
    fn new(both: Both) -> Running {
        let mut running = Running {
            streams: [Some(RawStream::LEGACY), Some(RawStream::PER_THREAD), None, None, None, None],
            events: [None; EVENTS],
            graphs: [const { None }; GRAPHS],
            memories: [(None, 0); MEMORIES],
            mapped: [false; MEMORIES],
            physical: [None; 2],
            captured: Vec::new(),
            pageable: vec![0; usize::try_from(UNIT * UNITS).unwrap()],
            registered: vec![0; usize::try_from(UNIT * UNITS).unwrap()],
            done: Outcome::default(),
            both,
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
        let _ = running.both.synchronize();
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

    /// Frees page-locked memory, which outlives the simulator otherwise.
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
            return Some(CopyEnd::Host(HostPtr(usize::try_from(first).unwrap())));
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
            Action::Renew(REGISTERED, _) => {
                Call::HostUnregister { ptr: HostPtr(usize::try_from(self.memories[REGISTERED].0?).ok()?) }
            }
            Action::Renew(memory, _) if PINNED.contains(&memory) => {
                Call::HostFree { ptr: HostPtr(usize::try_from(self.memories[memory].0?).ok()?) }
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
                let is_there = |&(memory, version): &(usize, u64)| {
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
                    CopyEnd::Device(ptr) => Access { ptr, bytes: touch.bytes, kind: touch.kind },
                    CopyEnd::Host(_) => unreachable!("kernels are given device memory"),
                };
                let accesses: Vec<Access> = touches.iter().map(access).collect();
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
                unsafe { both.host_unregister(HostPtr(usize::try_from(old).unwrap())) }.ok()?;
            } else if PINNED.contains(&memory) {
                // SAFETY: only the simulator touches it, which knows that its work is done, or reports it.
                unsafe { both.host_free(HostPtr(usize::try_from(old).unwrap())) }.ok()?;
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
            // SAFETY: the memory outlives the device's use of it: the program ends by unregistering it.
            REGISTERED => {
                Some(unsafe { both.host_register(self.registered.as_mut_ptr(), self.registered.len()) }.ok()?.0 as u64)
            }
            _ => Some(both.host_alloc(usize::try_from(bytes).unwrap()).ok()?.0 as u64),
        };
        Some(())
    }
}

/// The place `bytes` bytes further on.
fn further(end: CopyEnd, bytes: u64) -> CopyEnd {
    match end {
        CopyEnd::Device(ptr) => CopyEnd::Device(ptr.offset(bytes)),
        CopyEnd::Host(ptr) => CopyEnd::Host(HostPtr(ptr.0 + usize::try_from(bytes).unwrap())),
    }
}
