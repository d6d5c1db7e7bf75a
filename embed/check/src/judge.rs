//! What calls mean: two oracles decide about order, and the allocations about lifetimes.
//!
//! The first oracle knows copies, fills and frees; what it finds is *certain*. The second one also
//! knows the addresses among kernels' parameters, and takes each for a write of one byte there.
//! What it finds between a kernel and another call is *possible*; between two kernels, which mostly
//! share what they only read, it says nothing.

use std::collections::HashSet;
use std::ffi::c_void;
use std::ops::Range;
use std::thread;

use aquifer_device::{AccessKind, CopyEnd, DevicePtr, HostPtr, RawEvent, RawGraph, RawPhysical, RawStream};
use aquifer_oracle::{Call, Op, Oracle, Race, RaceKind, Touch};
use serde_json::{Value, json};

use crate::advice::{FREED_IN_USE, FREED_TWICE, STALE_GRAPH, UNORDERED, USED_AFTER_FREE, WRONG_FREE};
use crate::allocations::{Allocations, Block, Family, Made};
use crate::call::{ADDRESS_RANGE, Form, Out};
use crate::findings::{Finding, Findings, program};
use crate::kernels::Kernels;
use crate::stack::{Stack, Stacks};

/// A call that is judged.
#[derive(Debug)]
pub(crate) struct Scene {
    call: &'static str,
    form: Form,
    stack: Stack,
    /// See [`Judge::place`]. 0 if it has none yet.
    place: u64,
    /// The driver's answer, once there is one.
    pub(crate) code: u32,
    /// The address that the call frees, and what was live there.
    freed: Option<(u64, Option<Block>)>,
    /// What it unmaps.
    unmapped: Vec<(u64, Block)>,
}

impl Scene {
    pub(crate) fn new(call: &'static str, form: Form, stack: Stack) -> Scene {
        Scene { call, form, stack, place: 0, code: 0, freed: None, unmapped: Vec::new() }
    }

    fn stream(&self, handle: u64) -> RawStream {
        if handle == 0 && self.form == Form::PerThread { RawStream::PER_THREAD } else { RawStream(handle) }
    }
}

/// Whether the host waits for a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    Now,
    Late,
}

/// An end of a copy: the kind of memory that the function takes it for, if it takes one kind.
pub(crate) type End = (Option<bool>, u64);

pub(crate) fn device(address: u64) -> End {
    (Some(false), address)
}

pub(crate) fn host(address: usize) -> End {
    (Some(true), address as u64)
}

pub(crate) fn any(address: u64) -> End {
    (None, address)
}

#[derive(Debug, Default)]
pub(crate) struct Judge {
    certain: Oracle,
    possible: Oracle,
    allocations: Allocations,
    kernels: Kernels,
    findings: Findings,
    calls: u64,
    /// Events that graphs or contexts record.
    foreign: HashSet<u64>,
    /// The program has set the dependencies of a capture itself.
    is_capture_opaque: bool,
}

impl Judge {
    /// Numbers a call by its order and its stack.
    fn place(&mut self, scene: &mut Scene) -> u64 {
        if scene.place == 0 {
            self.calls += 1;
            scene.place = self.calls * Stacks::END + self.findings.stacks.number(scene.stack);
        }
        scene.place
    }

    fn made(&mut self, scene: &mut Scene, stream: Option<RawStream>) -> Made {
        Made { call: scene.call, stream, place: self.place(scene) }
    }

    /// Gives both oracles a call.
    pub(crate) fn take(&mut self, scene: &mut Scene, mut call: Call) {
        if let Some(stream) = stream_of(&mut call) {
            *stream = scene.stream(stream.0);
        }
        if let Call::StreamComplete { stream } = call
            && stream.is_legacy()
        {
            // CUDA does not say whether waiting for it is an action, which waits for blocking streams:
            // it counts as one.
            self.work(scene, stream.0);
        }
        self.take_both(scene, call.clone(), call);
    }

    fn take_both(&mut self, scene: &mut Scene, certain: Call, possible: Call) {
        let (place, thread) = (self.place(scene), thread::current().id());
        for race in self.certain.at(place).take(thread, certain) {
            self.found_race(scene, true, race);
        }
        for race in self.possible.at(place).take(thread, possible) {
            if is_kernel(race.first.call) != is_kernel(race.second.call) {
                self.found_race(scene, false, race);
            }
        }
    }

    fn found_race(&mut self, scene: &mut Scene, is_certain: bool, race: Race) {
        let kind = if race.kind == RaceKind::Removal { FREED_IN_USE } else { UNORDERED };
        let (first, mut second) = (race.first, race.second);
        if second.launch.is_none() {
            second.call = scene.call;
        }
        self.found(is_certain, kind, first, second, race.range);
    }

    fn found(&mut self, is_certain: bool, kind: &'static str, first: Op, second: Op, range: Range<u64>) {
        let right_free = self.allocations.live(range.start).map_or("", |(_, block)| block.family.right_free());
        self.findings.add((is_certain, kind), [first, second], range, right_free);
    }

    /// Takes the findings that were not written yet.
    pub(crate) fn take_findings(&mut self) -> Vec<Finding> {
        self.findings.take_new()
    }

    /// The findings that were met again, and the summary.
    pub(crate) fn summary(&mut self) -> (Vec<Finding>, Value) {
        let summary = json!({
            "process": std::process::id(), "program": program(), "calls": self.calls,
            "left_out": self.findings.left_out, "kernels": self.kernels.launched,
            "kernels_unread": self.kernels.skipped,
        });
        (self.findings.repeated(), summary)
    }

    /// A use of memory that was freed is found where the driver refuses it, too.
    fn check_use(&mut self, scene: &mut Scene, is_certain: bool, stream: RawStream, touch: &Touch) {
        let start = start_of(touch);
        let freed = self.allocations.freed(start).filter(|(_, block)| match block.family {
            // Host memory may be given out again by calls that are not of the driver.
            Family::Pinned | Family::Registered => false,
            // Other calls allocate, too: of the freed memory, the driver knows nothing any more.
            Family::Plain | Family::Mapped => !is_allocated(start),
            Family::Pool => true,
        });
        if let Some((_, block)) = freed {
            let second = self.made(scene, Some(stream));
            self.found(is_certain, USED_AFTER_FREE, op(block.made), op(second), start..start + touch.bytes);
        }
    }

    fn enqueue(&mut self, scene: &mut Scene, stream: RawStream, mut touches: Vec<Touch>) {
        touches.retain(|touch| touch.bytes > 0);
        if touches.is_empty() {
            return;
        }
        touches.iter().for_each(|touch| self.check_use(scene, true, stream, touch));
        if scene.code == 0 {
            self.hide_captured(stream, &mut touches);
            self.take(scene, Call::Work { call: scene.call, stream, touches });
        }
    }

    /// Of nodes whose order is not known, no accesses are noted.
    fn hide_captured(&self, stream: RawStream, touches: &mut Vec<Touch>) {
        if self.is_capture_opaque && self.certain.is_capturing(thread::current().id(), stream) {
            touches.clear();
        }
    }

    // Memory.

    fn add(&mut self, scene: &mut Scene, start: u64, bytes: u64, family: Family, made: Made, call: Call) {
        self.make_room(scene, start..start + bytes);
        self.allocations.add(start, Block { end: start + bytes, family, made });
        self.take(scene, call);
    }

    fn make_room(&mut self, scene: &mut Scene, range: Range<u64>) {
        for (start, block) in self.allocations.make_room(&range) {
            let call = Call::Unmap { ptr: DevicePtr(start), bytes: block.end - start };
            let (place, thread) = (self.place(scene), thread::current().id());
            for oracle in [&mut self.certain, &mut self.possible] {
                // Nobody frees it twice: its end was not seen.
                oracle.at(place).take(thread, call.clone());
            }
        }
    }

    pub(crate) fn alloc(&mut self, scene: &mut Scene, ptr: Out<'_>, bytes: usize) {
        let (Some(ptr), bytes) = (ptr.map(|ptr| ptr.get()), bytes as u64) else { return };
        let made = self.made(scene, None);
        self.add(scene, ptr, bytes, Family::Plain, made, Call::Alloc { ptr: DevicePtr(ptr), bytes });
    }

    pub(crate) fn alloc_pitch(&mut self, scene: &mut Scene, ptr: Out<'_>, pitch: Out<'_>, height: usize) {
        let pitch = pitch.map_or(0, |pitch| pitch.get());
        self.alloc(scene, ptr, usize::try_from(pitch).unwrap_or(0).saturating_mul(height));
    }

    pub(crate) fn alloc_async(&mut self, scene: &mut Scene, ptr: Out<'_>, bytes: usize, stream: u64) {
        let (Some(ptr), bytes, stream) = (ptr.map(|ptr| ptr.get()), bytes as u64, scene.stream(stream)) else { return };
        let call = Call::AllocAsync { ptr: DevicePtr(ptr), bytes, stream };
        if self.certain.is_capturing(thread::current().id(), stream) {
            // Memory of the graph, which is live while the graph runs.
            self.make_room(scene, ptr..ptr + bytes);
            return self.take(scene, call);
        }
        let made = self.made(scene, Some(stream));
        self.add(scene, ptr, bytes, Family::Pool, made, call);
    }

    pub(crate) fn host_alloc(&mut self, scene: &mut Scene, ptr: Out<'_>, bytes: usize) {
        if let Some(ptr) = ptr {
            self.page_lock(scene, ptr.get(), bytes, Family::Pinned);
        }
    }

    pub(crate) fn register(&mut self, scene: &mut Scene, ptr: u64, bytes: usize) {
        self.page_lock(scene, ptr, bytes, Family::Registered);
    }

    fn page_lock(&mut self, scene: &mut Scene, start: u64, bytes: usize, family: Family) {
        let made = self.made(scene, None);
        self.add(scene, start, bytes as u64, family, made, Call::PageLock { ptr: host_ptr(start), bytes });
    }

    pub(crate) fn create(&mut self, scene: &mut Scene, physical: Out<'_>) {
        if let Some(physical) = physical {
            self.take(scene, Call::CreatePhysical { physical: RawPhysical(physical.get()) });
        }
    }

    pub(crate) fn map(&mut self, scene: &mut Scene, start: u64, bytes: usize, physical: RawPhysical) {
        let (ptr, bytes) = (DevicePtr(start), bytes as u64);
        let made = self.made(scene, None);
        self.add(scene, start, bytes, Family::Mapped, made, Call::Map { ptr, bytes, physical });
    }

    pub(crate) fn unmap(&mut self, scene: &mut Scene, start: u64, bytes: usize) {
        let (ptr, bytes) = (DevicePtr(start), bytes as u64);
        self.take(scene, Call::Unmap { ptr, bytes });
        let made = self.made(scene, None);
        scene.unmapped = self.allocations.free(&ptr.range(bytes), made);
    }

    /// Begins a free: whether the call frees what is live there.
    fn frees(&mut self, scene: &mut Scene, start: u64, families: &[Family]) -> Option<Block> {
        let block = self.allocations.live(start).filter(|(first, _)| *first == start).map(|(_, block)| block);
        scene.freed = (start != 0).then_some((start, block));
        block.filter(|block| families.contains(&block.family))
    }

    fn freed(&mut self, scene: &mut Scene, start: u64, block: Block, stream: Option<RawStream>) {
        let made = self.made(scene, stream);
        self.allocations.free(&(start..block.end), made);
    }

    pub(crate) fn free(&mut self, scene: &mut Scene, start: u64) {
        let (ptr, block) = (DevicePtr(start), self.frees(scene, start, &[Family::Plain, Family::Pool]));
        self.take(scene, Call::Free { ptr });
        if let Some(block) = block {
            self.freed(scene, start, block, None);
        }
    }

    pub(crate) fn free_async(&mut self, scene: &mut Scene, start: u64, stream: u64) {
        let (ptr, stream) = (DevicePtr(start), scene.stream(stream));
        let block = self.frees(scene, start, &[Family::Plain, Family::Pool]);
        self.take(scene, Call::FreeAsync { ptr, stream });
        if let Some(block) = block {
            self.freed(scene, start, block, Some(stream));
        }
    }

    pub(crate) fn host_free(&mut self, scene: &mut Scene, start: u64) {
        if let Some(block) = self.frees(scene, start, &[Family::Pinned]) {
            self.take(scene, Call::HostFree { ptr: host_ptr(start) });
            self.freed(scene, start, block, None);
        }
    }

    pub(crate) fn unregister(&mut self, scene: &mut Scene, start: u64) {
        if let Some(block) = self.frees(scene, start, &[Family::Registered]) {
            self.take(scene, Call::HostUnregister { ptr: host_ptr(start) });
            // The memory itself is still the program's.
            self.allocations.make_room(&(start..block.end));
        }
    }

    /// The driver refused to free: it was freed before, or otherwise allocated, or is still live.
    pub(crate) fn undo_free(&mut self, scene: &mut Scene) {
        /// The codes of captures, which forbid such calls.
        const OF_CAPTURES: Range<u32> = 900..909;
        // After other errors, such as those of earlier work, the memory may be gone.
        if scene.code == INVALID_VALUE || OF_CAPTURES.contains(&scene.code) {
            let place = self.place(scene);
            self.findings.retract(place);
        }
        for (start, block) in std::mem::take(&mut scene.unmapped) {
            let (ptr, bytes) = (DevicePtr(start), block.end - start);
            self.add(scene, start, bytes, block.family, block.made, Call::Alloc { ptr, bytes });
        }
        let Some((start, block)) = scene.freed else { return };
        let still = self.allocations.live(start).is_some();
        let second = self.made(scene, None);
        match block {
            _ if scene.code != INVALID_VALUE && (still || block.is_none()) => {}
            None => {
                if let Some((_, block)) = self.allocations.freed(start).filter(|(first, _)| *first == start) {
                    self.found(true, FREED_TWICE, op(block.made), op(second), start..block.end);
                }
            }
            Some(block) if still => self.found(true, WRONG_FREE, op(block.made), op(second), start..block.end),
            Some(Block { end, family, made }) => {
                let (ptr, bytes) = (DevicePtr(start), end - start);
                let call = if family.is_host() {
                    Call::PageLock { ptr: host_ptr(start), bytes: usize::try_from(bytes).unwrap_or(usize::MAX) }
                } else {
                    Call::Alloc { ptr, bytes }
                };
                self.add(scene, start, bytes, family, made, call);
            }
        }
    }

    // Work.

    fn end(&self, (is_host, address): End) -> CopyEnd {
        let known = self.allocations.live(address).or_else(|| self.allocations.freed(address));
        // Memory that is not known is pageable, or another library's.
        let is_host = known.map_or(is_host.unwrap_or(true), |(_, block)| block.family.is_host());
        if is_host { CopyEnd::Host(host_ptr(address)) } else { CopyEnd::Device(DevicePtr(address)) }
    }

    pub(crate) fn copy(&mut self, scene: &mut Scene, dst: End, src: End, bytes: usize, stream: u64, moment: Moment) {
        let (at, bytes) = ([src, dst].map(|end| self.end(end)), bytes as u64);
        let touch = |(at, kind)| Touch { at, bytes, kind };
        let touches = at.into_iter().zip([AccessKind::Read, AccessKind::Write]).map(touch).collect();
        self.copied(scene, touches, stream, moment);
    }

    fn copied(&mut self, scene: &mut Scene, touches: Vec<Touch>, stream: u64, moment: Moment) {
        // The host waits for copies to its memory, and for those from pinned memory. It does not wait
        // within the device, nor until the device has what came from pageable memory.
        let is_waited_for = |touch: &Touch| match touch.at {
            CopyEnd::Host(_) => touch.kind == AccessKind::Write || self.allocations.live(start_of(touch)).is_some(),
            CopyEnd::Device(_) => false,
        };
        let is_now = moment == Moment::Now && scene.code == 0;
        let waits = is_now && touches.iter().any(is_waited_for);
        // Before it reads pageable memory, the host waits for the stream's earlier work.
        let is_pageable = |touch: &Touch| {
            let is_read_on_host = touch.kind == AccessKind::Read && matches!(touch.at, CopyEnd::Host(_));
            is_read_on_host && self.allocations.live(start_of(touch)).is_none()
        };
        let waited = is_now && touches.iter().any(is_pageable);
        let stream = scene.stream(stream);
        if waited {
            self.take(scene, Call::StreamComplete { stream });
        }
        self.enqueue(scene, stream, touches);
        if waits {
            self.take(scene, Call::StreamComplete { stream });
        }
    }

    /// The arrays are those of a call that the driver accepted.
    pub(crate) fn copy_batch(
        &mut self,
        scene: &mut Scene,
        dsts: *const u64,
        srcs: *const u64,
        sizes: *const usize,
        count: usize,
        stream: u64,
    ) {
        if scene.code != 0 || count == 0 {
            return;
        }
        // SAFETY: the program vouches for the array, which the driver has read.
        let dsts = unsafe { std::slice::from_raw_parts(dsts, count) };
        // SAFETY: as above.
        let srcs = unsafe { std::slice::from_raw_parts(srcs, count) };
        // SAFETY: as above.
        let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
        let copies = dsts.iter().zip(srcs).zip(sizes);
        let touches = copies.flat_map(|((&dst, &src), &bytes)| {
            let touch = |end, kind| Touch { at: self.end(any(end)), bytes: bytes as u64, kind };
            [touch(src, AccessKind::Read), touch(dst, AccessKind::Write)]
        });
        self.copied(scene, touches.collect(), stream, Moment::Late);
    }

    /// The host waits for a fill of its own memory.
    pub(crate) fn fill(&mut self, scene: &mut Scene, ptr: u64, bytes: usize, stream: u64, moment: Moment) {
        let touch = Touch { at: self.end(device(ptr)), bytes: bytes as u64, kind: AccessKind::Write };
        self.copied(scene, vec![touch], stream, moment);
    }

    /// Work whose accesses are not known. It still orders streams.
    pub(crate) fn work(&mut self, scene: &mut Scene, stream: u64) {
        self.take(scene, Call::Work { call: scene.call, stream: RawStream(stream), touches: Vec::new() });
    }

    /// The same, and the host counts as knowing that it is done.
    pub(crate) fn known_work(&mut self, scene: &mut Scene, stream: u64) {
        self.work(scene, stream);
        self.take(scene, Call::StreamComplete { stream: RawStream(stream) });
    }

    pub(crate) fn kernel(&mut self, scene: &mut Scene, function: u64, parameters: *const *const c_void, stream: u64) {
        let stream = scene.stream(stream);
        let mut touches = Vec::new();
        for word in self.kernels.words(function, parameters) {
            if self.allocations.live(word).or_else(|| self.allocations.freed(word)).is_some() {
                let touch = Touch { at: self.end(any(word)), bytes: 1, kind: AccessKind::Write };
                self.check_use(scene, false, stream, &touch);
                touches.push(touch);
            }
        }
        self.hide_captured(stream, &mut touches);
        let of = |touches| Call::Work { call: scene.call, stream, touches };
        self.take_both(scene, of(Vec::new()), of(touches));
    }

    pub(crate) fn forget_kernels(&mut self, _: &mut Scene) {
        self.kernels.forget();
    }

    // Order.

    pub(crate) fn create_stream(&mut self, scene: &mut Scene, stream: Out<'_>, flags: u32) {
        if let Some(stream) = stream {
            self.take(scene, Call::CreateStream { stream: RawStream(stream.get()), non_blocking: flags & 1 != 0 });
        }
    }

    pub(crate) fn wait(&mut self, scene: &mut Scene, stream: u64, event: u64, flags: u32) {
        if self.is_external(scene, stream, flags) {
            // The graph will wait for it, which orders nodes in a way that is not known.
            self.is_capture_opaque = true;
            return;
        }
        if self.foreign.contains(&event) {
            return self.take(scene, Call::WaitPeer { stream: scene.stream(stream) });
        }
        self.take(scene, Call::Wait { stream: scene.stream(stream), event: RawEvent(event) });
    }

    /// In a capture, the graph will record the event, or wait for it.
    fn is_external(&self, scene: &Scene, stream: u64, flags: u32) -> bool {
        /// `CU_EVENT_RECORD_EXTERNAL` and `CU_EVENT_WAIT_EXTERNAL`.
        const EXTERNAL: u32 = 1;
        flags & EXTERNAL != 0 && self.certain.is_capturing(thread::current().id(), scene.stream(stream))
    }

    pub(crate) fn record(&mut self, scene: &mut Scene, event: u64, stream: u64, flags: u32) {
        if self.is_external(scene, stream, flags) {
            self.foreign.insert(event);
            return;
        }
        self.foreign.remove(&event);
        self.take(scene, Call::Record { event: RawEvent(event), stream: scene.stream(stream) });
    }

    /// The context records the event, after work that is not known.
    pub(crate) fn record_context(&mut self, _: &mut Scene, event: u64) {
        self.foreign.insert(event);
    }

    pub(crate) fn event_done(&mut self, scene: &mut Scene, event: u64) {
        if self.foreign.contains(&event) {
            return self.take(scene, Call::DeviceComplete);
        }
        self.take(scene, Call::EventComplete { event: RawEvent(event) });
    }

    pub(crate) fn events_done(&mut self, scene: &mut Scene, start: u64, end: u64) {
        self.event_done(scene, start);
        self.event_done(scene, end);
    }

    pub(crate) fn destroy_event(&mut self, scene: &mut Scene, event: u64) {
        self.foreign.remove(&event);
        self.take(scene, Call::DestroyEvent { event: RawEvent(event) });
    }

    /// The context is gone, and with it all that was known.
    pub(crate) fn forget(&mut self, _: &mut Scene) {
        (self.certain, self.possible, self.allocations) = Default::default();
        self.foreign.clear();
        self.kernels.forget();
    }

    // Graphs.

    /// The program orders nodes itself.
    pub(crate) fn blur_capture(&mut self, _: &mut Scene) {
        self.is_capture_opaque = true;
    }

    pub(crate) fn end_capture(&mut self, scene: &mut Scene, stream: u64, graph: Out<'_>) {
        /// A capture that was broken, or that a stream did not join back to, is over.
        const OVER: [u32; 3] = [0, 901, 904];
        if OVER.contains(&scene.code) {
            let graph = graph.filter(|_| scene.code == 0).map(|graph| RawGraph(graph.get()));
            self.take(scene, Call::EndCapture { stream: scene.stream(stream), graph });
        }
    }

    pub(crate) fn copy_graph(&mut self, scene: &mut Scene, graph: RawGraph, made: Out<'_>) {
        if let Some(made) = made {
            self.take(scene, Call::CopyGraph { graph, copy: RawGraph(made.get()) });
        }
    }

    pub(crate) fn launch_graph(&mut self, scene: &mut Scene, graph: RawGraph, stream: u64) {
        let stream = scene.stream(stream);
        if self.certain.is_capturing(thread::current().id(), stream) {
            // A node of the other graph, whose own nodes are left out.
            return;
        }
        let launch = Some(self.place(scene));
        let stale = |(call, place, touch): (&'static str, u64, &Touch)| {
            let start = start_of(touch);
            let other = match self.allocations.live(start) {
                // Addresses of mapped and registered memory are the program's own to choose.
                Some((_, Block { family: Family::Mapped | Family::Registered, .. })) => None,
                Some((_, block)) => Some(block).filter(|block| block.made.place > place),
                None => self.allocations.freed(start).map(|(_, block)| block).filter(|block| block.made.place > place),
            };
            let mut node = op(Made { call, stream: Some(stream), place });
            node.launch = launch;
            other.map(|block| (op(block.made), node, start..start + touch.bytes))
        };
        let nodes = self.possible.nodes(graph);
        let touches = nodes.flat_map(|(call, place, touches)| touches.iter().map(move |touch| (call, place, touch)));
        let stale: Vec<_> = touches.filter_map(stale).collect();
        for (first, second, range) in stale {
            self.found(!is_kernel(second.call), STALE_GRAPH, first, second, range);
        }
        self.take(scene, Call::LaunchGraph { graph, stream });
    }
}

/// Whether the driver knows of an allocation there.
fn is_allocated(address: u64) -> bool {
    type Ask = unsafe extern "C" fn(*mut u64, *mut usize, u64) -> u32;
    let (mut start, mut bytes) = (0, 0);
    ADDRESS_RANGE.address().is_some_and(|ask| {
        // SAFETY: the driver's function of this name has this signature.
        let ask: Ask = unsafe { std::mem::transmute(ask) };
        // SAFETY: both are writable.
        (unsafe { ask(&raw mut start, &raw mut bytes, address) }) == 0
    })
}

/// The stream that a call names.
fn stream_of(call: &mut Call) -> Option<&mut RawStream> {
    match call {
        Call::AllocAsync { stream, .. }
        | Call::FreeAsync { stream, .. }
        | Call::StreamComplete { stream }
        | Call::Record { stream, .. }
        | Call::Wait { stream, .. }
        | Call::WaitPeer { stream }
        | Call::Work { stream, .. }
        | Call::BeginCapture { stream }
        | Call::EndCapture { stream, .. }
        | Call::LaunchGraph { stream, .. } => Some(stream),
        _ => None,
    }
}

/// The driver does not know the address as one to free.
const INVALID_VALUE: u32 = 1;

fn is_kernel(call: &str) -> bool {
    call.starts_with("cuLaunch")
}

fn op(Made { call, stream, place }: Made) -> Op {
    Op::new(call, stream, place)
}

fn host_ptr(address: u64) -> HostPtr {
    HostPtr(usize::try_from(address).unwrap_or(usize::MAX))
}

fn start_of(touch: &Touch) -> u64 {
    match touch.at {
        CopyEnd::Device(ptr) => ptr.0,
        CopyEnd::Host(ptr) => ptr.0 as u64,
    }
}

#[cfg(test)]
mod tests;
