//! Inspection and control of the simulated device, for drivers and tests built on it, without
//! driver calls: nothing is counted, no time passes and no fault occurs.

use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{DevicePtr, RawEvent, RawGraph, RawStream};

use crate::SimDriver;
use crate::clock::OpClock;
use crate::engine::EngineTimes;
use crate::objects::{CapturedGraph, GraphNode};

/// The capture that a stream is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CaptureRef {
    /// Number of the capture on its device, from 1, never reused.
    pub number: u64,
    /// An earlier call broke it; it can only be ended.
    pub broken: bool,
}

/// The end of a launch of a graph.
#[derive(Clone, Debug)]
pub struct LaunchEnd {
    done_ns: u64,
    clock: Arc<OpClock>,
}

/// How many objects of each kind a program has made and not given back, apart from memory of the
/// device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LiveObjects {
    /// Streams, and default streams that were used.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Captures in progress.
    pub captures: usize,
    /// Graphs.
    pub graphs: usize,
    /// Modules of kernels.
    pub modules: usize,
    /// Pieces of pinned host memory.
    pub host: usize,
}

impl SimDriver {
    /// How many objects of each kind the program has.
    pub fn live_objects(&self) -> LiveObjects {
        let mut machine = self.machine.lock();
        LiveObjects {
            streams: machine.streams.iter_mut().count(),
            events: machine.events.iter().count(),
            captures: machine.captures.len(),
            graphs: machine.graphs.iter().count(),
            modules: machine.modules.iter().count(),
            host: machine.host.count(),
        }
    }

    /// The plain or pool allocation that holds an address and was not freed by the program.
    pub fn allocation_at(&self, ptr: DevicePtr) -> Option<Range<u64>> {
        self.machine.lock().address.allocation_at(ptr.0)
    }

    /// The other addresses of the physical memory that is mapped in a range.
    pub(crate) fn aliases(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let machine = self.machine.lock();
        machine.physicals.aliases(&machine.address.mappings, range)
    }

    /// The reservation that holds an address, whether or not anything is mapped there.
    pub fn reservation_at(&self, ptr: DevicePtr) -> Option<Range<u64>> {
        self.machine.lock().address.mappings.reservation_holding(ptr.0)
    }

    /// For how long copy engines and compute were booked so far.
    pub fn engines(&self) -> EngineTimes {
        self.machine.lock().engine.times
    }

    /// Whether an event of this device has this handle.
    pub fn is_event(&self, event: RawEvent) -> bool {
        self.machine.lock().events.get(event.0).is_some()
    }

    /// Bytes of the device that this program holds: allocations, the driver's pool, and physical
    /// memory.
    pub fn held_bytes(&self) -> u64 {
        self.machine.lock().memory.used()
    }

    /// The capture that the stream is part of, if it is.
    pub fn capture_of(&self, stream: RawStream) -> Option<CaptureRef> {
        let mut machine = self.machine.lock();
        let id = machine.streams.find(stream).ok()?;
        let number = machine.streams.get(id).ok()?.capture.as_ref()?.capture;
        Some(CaptureRef { number, broken: machine.is_broken(number) })
    }

    /// Breaks the capture that the stream is part of, as a call does that is not allowed meanwhile.
    pub fn break_capture(&self, stream: RawStream) {
        let mut machine = self.machine.lock();
        if let Ok(id) = machine.streams.find(stream) {
            machine.invalidate_capture_of(id);
        }
    }

    /// Another graph with the work of a live one, as a second instantiation makes it: launches of
    /// the two do not wait for each other. `frees_on_launch` if each launch frees memory that the
    /// one before left allocated.
    pub fn copy_graph(&self, graph: RawGraph, frees_on_launch: bool) -> Option<RawGraph> {
        let mut machine = self.machine.lock();
        let copy = CapturedGraph { launched: None, frees_on_launch, ..machine.graphs.get(graph.0)?.clone() };
        Some(RawGraph(machine.graphs.insert(copy)))
    }

    /// Whether a live graph allocates memory.
    pub fn graph_allocates(&self, graph: RawGraph) -> Option<bool> {
        Some(!self.machine.lock().graphs.get(graph.0)?.memory.is_empty())
    }

    /// Gives later launches of a graph the work of another one. Returns false, and changes nothing,
    /// unless both have the same kinds of nodes, and neither allocates. `None` if one is gone.
    pub fn update_graph(&self, graph: RawGraph, from: RawGraph) -> Option<bool> {
        let mut machine = self.machine.lock();
        let CapturedGraph { nodes, races, needed, conditionals, memory, .. } = machine.graphs.get(from.0)?.clone();
        let old = machine.graphs.get(graph.0)?.clone();
        let kind = |node: &GraphNode| (node.body.operation(), node.within.len());
        let is_like = nodes.iter().map(kind).eq(old.nodes.iter().map(kind))
            && conditionals.len() == old.conditionals.len()
            && conditionals
                .iter()
                .zip(&old.conditionals)
                .all(|(new, old)| new == old || machine.are_children(new, old))
            && memory.is_empty()
            && old.memory.is_empty();
        if is_like {
            let (launched, frees_on_launch) = (old.launched.clone(), old.frees_on_launch);
            *machine.graphs.get_mut(graph.0)? =
                CapturedGraph { nodes, races, needed, conditionals, memory, launched, frees_on_launch };
            machine.forget_conditionals(&old);
        }
        Some(is_like)
    }

    /// The end of the latest launch of a live graph.
    pub fn launch_end(&self, graph: RawGraph) -> Option<LaunchEnd> {
        self.machine.lock().graphs.get(graph.0)?.launched.clone().map(|(done_ns, clock)| LaunchEnd { done_ns, clock })
    }

    /// True if the launch is done, which the host then knows.
    pub fn is_over(&self, launch: &LaunchEnd) -> bool {
        let machine = self.machine.lock();
        let is_over = launch.done_ns <= machine.now;
        if is_over {
            machine.detector.known.learn(&launch.clock);
        }
        is_over
    }

    /// How many nodes a live graph has, those of bodies of conditional nodes aside.
    pub fn graph_len(&self, graph: RawGraph) -> Option<usize> {
        let machine = self.machine.lock();
        let graph = machine.graphs.get(graph.0)?;
        let work = graph.nodes.iter().filter(|node| node.within.is_empty()).count();
        Some(work + graph.conditionals.iter().filter(|(_, outermost)| *outermost).count())
    }
}
