//! The oracle: takes calls one by one and returns the races that each completes.
//!
//! # What the two checkers agree on
//!
//! The oracle and the simulator's race detector judge the same calls, and must agree, for every
//! program, on **the first call that races, and on the [`RaceKind`]s found in it**. A program
//! without such a call is free of races for both. Nodes of one graph race in the call that captures
//! the later one, whether or not the graph is launched; if they race because mappings changed
//! since, in the launch.
//!
//! Beyond the first race the two may differ: which of several unordered accesses counts as the last
//! one is a matter of choice. So are the pairs and ranges that a report names.
//!
//! # Rules of memory
//!
//! Those of order are in `world`.
//!
//! * Two operations race if they touch a byte, one of them writes, and neither comes before the
//!   other. Mappings of the same physical memory are the same bytes.
//! * A copy from pageable host memory has read it when the call returns; the device may still write
//!   the target. A copy to pageable host memory is complete when the call returns, and with it the
//!   earlier work of its stream ("API synchronization behavior").
//! * The device may touch pinned memory at any time until the copy is complete.
//! * `cuMemFree` waits for all work of the device. Unmapping device memory and freeing pinned
//!   memory wait for nothing, so work through these addresses must be known to be complete. So must
//!   it before `cuMemHostUnregister`, although the driver waits there. Releasing a handle of
//!   physical memory takes nothing away from its mappings (`cuMemRelease`).
//! * An allocation from the pool is usable by work that comes after it on its stream, and freed like
//!   a write to all of it ("Stream Ordered Memory Allocator").
//!
//! # Not judged
//!
//! * Other misuse of memory: bounds, use after free, missing access rights, bytes never written.
//! * Other devices: a wait for a peer's event orders the stream after everything, and a copy from a
//!   peer is a write here alone. So a race may be missed there, and none is invented.
//! * Order among host threads: the host's own accesses race with work only, never with each other.
//! * Pageable memory: the host's use of it is a matter of Rust's own rules.
//! * Captures that a thread leaves behind on its default stream when it ends.
//! * Modules that are unloaded while their kernels may still run.

use std::thread::ThreadId;

use aquifer_device::{AccessKind, CopyEnd, DevicePtr, HostPtr, RawEvent, RawGraph, RawPhysical, RawStream};

use crate::memory::{Conflict, Memory, Side, Touch};
use crate::race::{Op, Race, RaceKind};
use crate::world::{Started, World};

#[cfg(doc)]
use aquifer_device::Driver;

/// A call of a [`Driver`] that succeeded, as far as it matters for order and memory.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the arguments of the calls that the variants name")]
pub enum Call {
    /// Memory was allocated, without regard to streams.
    Alloc { ptr: DevicePtr, bytes: u64 },
    /// An allocation was freed, after all work was done.
    Free { ptr: DevicePtr },
    /// Memory was allocated in the order of a stream.
    AllocAsync { ptr: DevicePtr, bytes: u64, stream: RawStream },
    /// Memory was freed in the order of a stream.
    FreeAsync { ptr: DevicePtr, stream: RawStream },
    /// Physical memory was created.
    CreatePhysical { physical: RawPhysical },
    /// A handle of physical memory was released.
    ReleasePhysical { physical: RawPhysical },
    /// Physical memory was mapped.
    Map { ptr: DevicePtr, bytes: u64, physical: RawPhysical },
    /// Addresses were unmapped.
    Unmap { ptr: DevicePtr, bytes: u64 },
    /// Host memory became pinned: it was allocated so, or registered.
    PageLock { ptr: HostPtr, bytes: usize },
    /// Pinned memory was freed.
    HostFree { ptr: HostPtr },
    /// Host memory was unregistered; then all work was done.
    HostUnregister { ptr: HostPtr },
    /// The host accesses pinned memory.
    HostAccess { ptr: HostPtr, bytes: usize, kind: AccessKind },
    /// A stream was created.
    CreateStream { stream: RawStream, non_blocking: bool },
    /// A stream was destroyed.
    DestroyStream { stream: RawStream },
    /// The host learned that a stream is complete.
    StreamComplete { stream: RawStream },
    /// The host learned that the device is complete.
    DeviceComplete,
    /// The host learned that an event is complete.
    EventComplete { event: RawEvent },
    /// An event was destroyed.
    DestroyEvent { event: RawEvent },
    /// An event was recorded.
    Record { event: RawEvent, stream: RawStream },
    /// A stream waits for an event.
    Wait { stream: RawStream, event: RawEvent },
    /// A stream waits for an event of another device.
    WaitPeer { stream: RawStream },
    /// Work was enqueued: a copy, a fill or a kernel.
    Work { call: &'static str, stream: RawStream, touches: Vec<Touch> },
    /// A capture began.
    BeginCapture { stream: RawStream },
    /// A capture ended, with a graph unless it failed.
    EndCapture { stream: RawStream, graph: Option<RawGraph> },
    /// A graph was launched.
    LaunchGraph { graph: RawGraph, stream: RawStream },
    /// A copy of a graph was made, or replaced another graph.
    CopyGraph { graph: RawGraph, copy: RawGraph },
    /// A graph was destroyed.
    DestroyGraph { graph: RawGraph },
}

/// Judges the calls of one device. See the [crate documentation](crate) for the rules.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    world: World,
    memory: Memory,
}

impl Oracle {
    /// The oracle, which takes calls of `place` from now on: a number of the caller's, by which it
    /// finds them again in races.
    pub fn at(&mut self, place: u64) -> &mut Oracle {
        self.world.place = place;
        self
    }

    /// The call, place and accesses of each node of a graph.
    pub fn nodes(&self, graph: RawGraph) -> impl Iterator<Item = (&'static str, u64, &[Touch])> {
        self.world.nodes(graph)
    }

    /// Whether the stream takes part in a capture.
    pub fn is_capturing(&self, thread: ThreadId, stream: RawStream) -> bool {
        self.world.is_capturing(thread, stream)
    }

    /// Takes a call that `thread` made. Calls must come in the order in which the driver took them.
    /// Returns the races with earlier calls.
    pub fn take(&mut self, thread: ThreadId, call: Call) -> Vec<Race> {
        let Oracle { world, memory } = self;
        match call {
            Call::Alloc { ptr, bytes } => memory.allocate(Side::Device, ptr.0, bytes),
            Call::Free { ptr } => {
                world.all_is_complete();
                if let Some(range) = memory.allocation(Side::Device, ptr.0) {
                    memory.remove(Side::Device, range, |_| true);
                }
            }
            Call::AllocAsync { ptr, bytes, stream } => {
                memory.allocate(Side::Device, ptr.0, bytes);
                let whole = Touch { at: CopyEnd::Device(ptr), bytes, kind: AccessKind::Write };
                return self.work(thread, stream, "cuMemAllocAsync", vec![whole]);
            }
            Call::FreeAsync { ptr, stream } => {
                let Some(range) = memory.allocation(Side::Device, ptr.0) else { return Vec::new() };
                let bytes = range.end - range.start;
                let whole = Touch { at: CopyEnd::Device(ptr), bytes, kind: AccessKind::Write };
                let mut races = self.work(thread, stream, "cuMemFreeAsync", vec![whole]);
                races.iter_mut().for_each(|race| race.kind = RaceKind::Removal);
                self.memory.remove(Side::Device, range, |_| true);
                return races;
            }
            Call::CreatePhysical { physical } => memory.create(physical),
            Call::ReleasePhysical { physical } => memory.release(physical),
            Call::Map { ptr, bytes, physical } => memory.map(ptr.0, bytes, physical),
            Call::Unmap { ptr, bytes } => {
                let pending = memory.remove(Side::Device, ptr.range(bytes), |op| world.is_known(op));
                return races(RaceKind::Removal, host("cuMemUnmap", world.place), pending);
            }
            Call::PageLock { ptr, bytes } => memory.allocate(Side::Host, ptr.0 as u64, bytes as u64),
            Call::HostFree { ptr } => {
                let Some(range) = memory.allocation(Side::Host, ptr.0 as u64) else { return Vec::new() };
                let pending = memory.remove(Side::Host, range, |op| world.is_known(op));
                return races(RaceKind::Removal, host("cuMemFreeHost", world.place), pending);
            }
            Call::HostUnregister { ptr } => {
                let Some(range) = memory.allocation(Side::Host, ptr.0 as u64) else { return Vec::new() };
                let pending = memory.remove(Side::Host, range, |op| world.is_known(op));
                world.all_is_complete();
                return races(RaceKind::Removal, host("cuMemHostUnregister", world.place), pending);
            }
            Call::HostAccess { ptr, bytes, kind } => {
                let touch = Touch { at: CopyEnd::Host(ptr), bytes: bytes as u64, kind };
                let pending = memory.host_access(touch, |op| world.is_known(op));
                return races(RaceKind::Host, host("host access", world.place), pending);
            }
            Call::CreateStream { stream, non_blocking } => world.create_stream(stream, non_blocking),
            Call::DestroyStream { stream } => world.destroy_stream(stream),
            Call::StreamComplete { stream } => world.stream_is_complete(thread, stream),
            Call::DeviceComplete => world.all_is_complete(),
            Call::EventComplete { event } => world.event_is_complete(event),
            Call::DestroyEvent { event } => world.forget_event(event),
            Call::Record { event, stream } => world.record(thread, event, stream),
            Call::Wait { stream, event } => world.wait(thread, stream, event),
            Call::WaitPeer { stream } => world.wait_for_all(thread, stream),
            Call::Work { call, stream, touches } => return self.work(thread, stream, call, touches),
            Call::BeginCapture { stream } => world.begin_capture(thread, stream),
            Call::EndCapture { stream, graph } => world.end_capture(thread, stream, graph),
            Call::LaunchGraph { graph, stream } => {
                let started = world.launch(thread, graph, stream);
                return started.into_iter().flat_map(|node| self.run(node)).collect();
            }
            Call::CopyGraph { graph, copy } => world.copy_graph(graph, copy),
            Call::DestroyGraph { graph } => world.destroy_graph(graph),
        }
        Vec::new()
    }

    fn work(&mut self, thread: ThreadId, stream: RawStream, call: &'static str, touches: Vec<Touch>) -> Vec<Race> {
        let is_download = touches.iter().any(|touch| match touch.at {
            CopyEnd::Host(ptr) => touch.kind == AccessKind::Write && !self.memory.is_page_locked(ptr.0 as u64),
            CopyEnd::Device(_) => false,
        });
        let started = self.world.enqueue(thread, stream, call, touches);
        let races = started.map(|started| self.run(started)).unwrap_or_default();
        if is_download {
            self.world.stream_is_complete(thread, stream);
        }
        races
    }

    fn run(&mut self, Started { op, before, touches, capture }: Started) -> Vec<Race> {
        let is_before = |earlier: &Op| before.covers(earlier.line, earlier.number) || *earlier == op;
        let found = if let Some(accesses) = capture.and_then(|capture| self.world.accesses(capture)) {
            accesses.add(op, &self.memory.pieces(&touches), is_before)
        } else {
            self.memory.access(op, &touches, |earlier| is_before(earlier) || self.world.is_known(earlier))
        };
        races(RaceKind::Work, op, found)
    }
}

/// An action of the host.
fn host(call: &'static str, place: u64) -> Op {
    Op::new(call, None, place)
}

fn races(kind: RaceKind, second: Op, conflicts: Vec<Conflict>) -> Vec<Race> {
    conflicts.into_iter().map(|(first, range)| Race { kind, first, second, range }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAMS: [RawStream; 2] = [RawStream(8), RawStream(9)];

    fn fill() -> Vec<Touch> {
        vec![Touch { at: CopyEnd::Device(DevicePtr(4096)), bytes: 64, kind: AccessKind::Write }]
    }

    /// An oracle that knows memory, two streams without an order, and a graph that fills the memory.
    fn with_graph(graph: RawGraph) -> (Oracle, ThreadId) {
        let (mut oracle, thread) = (Oracle::default(), std::thread::current().id());
        oracle.take(thread, Call::Alloc { ptr: DevicePtr(4096), bytes: 64 });
        for stream in STREAMS {
            oracle.take(thread, Call::CreateStream { stream, non_blocking: true });
        }
        let stream = STREAMS[0];
        oracle.take(thread, Call::BeginCapture { stream });
        assert!(oracle.is_capturing(thread, stream) && !oracle.is_capturing(thread, STREAMS[1]));
        oracle.at(5).take(thread, Call::Work { call: "fill", stream, touches: fill() });
        oracle.take(thread, Call::EndCapture { stream, graph: Some(graph) });
        assert!(!oracle.is_capturing(thread, stream));
        (oracle, thread)
    }

    #[test]
    fn a_copy_of_a_graph_has_its_nodes_and_outlives_it() {
        let [graph, copy] = [RawGraph(1), RawGraph(2)];
        let (mut oracle, thread) = with_graph(graph);
        oracle.take(thread, Call::CopyGraph { graph, copy });
        oracle.take(thread, Call::DestroyGraph { graph });
        assert_eq!(oracle.nodes(graph).count(), 0);
        assert!(oracle.nodes(copy).eq([("fill", 5, &fill()[..])]));
        assert_eq!(oracle.at(6).take(thread, Call::LaunchGraph { graph: copy, stream: STREAMS[0] }), []);
        let races = oracle.at(7).take(thread, Call::Work { call: "fill", stream: STREAMS[1], touches: fill() });
        let [race] = &races[..] else { panic!("one race, not {races:?}") };
        assert_eq!((race.first.place, race.first.launch), (5, Some(6)));
        assert_eq!((race.second.place, race.second.launch), (7, None));
    }

    #[test]
    fn launches_of_a_graph_that_was_replaced_stay_in_order() {
        let [graph, copy] = [RawGraph(1), RawGraph(2)];
        let (mut oracle, thread) = with_graph(graph);
        oracle.take(thread, Call::CopyGraph { graph, copy });
        oracle.take(thread, Call::LaunchGraph { graph: copy, stream: STREAMS[0] });
        oracle.take(thread, Call::CopyGraph { graph, copy });
        assert_eq!(oracle.take(thread, Call::LaunchGraph { graph: copy, stream: STREAMS[1] }), []);
        assert_eq!(oracle.take(thread, Call::LaunchGraph { graph, stream: STREAMS[0] }).len(), 1);
    }
}
