//! The objects of a simulated device that calls name by handles: events, captures and their graphs,
//! physical memory.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{PhysicalOptions, RawPhysical};

use crate::checks::Needed;
use crate::clock::OpClock;
use crate::conditional::BodyRef;
use crate::handle::HandleTable;
use crate::mappings::Mappings;
use crate::memory::StoreId;
use crate::race::{Conflict, Epoch, Shadow, Space};
use crate::refused::{Answer, Refused};
use crate::work::Body;

/// What an event stands for.
#[derive(Clone, Debug)]
pub(crate) enum EventRecord {
    /// Nothing yet.
    Never,
    /// All work of a stream until it was recorded.
    Work {
        /// When the stream gets there, in virtual ns.
        at: u64,
        clock: Arc<OpClock>,
    },
    /// A node of a capture.
    Captured { capture: u64, clock: Arc<OpClock> },
}

/// A live event.
#[derive(Debug)]
pub(crate) struct EventState {
    pub(crate) timing: bool,
    pub(crate) record: EventRecord,
}

/// A stream's part in a capture.
#[derive(Debug)]
pub(crate) struct Membership {
    pub(crate) capture: u64,
    /// What its next work is ordered after, within the capture.
    pub(crate) clock: OpClock,
    pub(crate) seq: u64,
}

/// A capture in progress.
#[derive(Debug, Default)]
pub(crate) struct CaptureState {
    pub(crate) origin: u32,
    pub(crate) members: BTreeSet<u32>,
    pub(crate) graph: CapturedGraph,
    pub(crate) invalid: bool,
    pub(crate) accesses: GraphAccesses,
    /// The body of a conditional node that it makes, whose work belongs to the graph with the node.
    pub(crate) body: Option<BodyRef>,
    /// The last places in its graph of streams that took part in bodies.
    pub(crate) last: BTreeMap<u32, u64>,
}

/// The accesses of a graph's nodes.
#[derive(Debug, Default)]
pub(crate) struct GraphAccesses {
    device: Shadow,
    host: Shadow,
}

impl GraphAccesses {
    /// Notes the accesses of a node, and returns those of other nodes that no edge orders before
    /// it.
    pub(crate) fn add(
        &mut self,
        node: &GraphNode,
        physicals: &PhysicalTable,
        mappings: &Mappings,
    ) -> Vec<(Space, Conflict)> {
        let ordered = |earlier: &Epoch| node.clock.get(earlier.stream) >= earlier.seq;
        let mut found = Vec::new();
        for touch in node.body.touches() {
            let shadow = if touch.space == Space::Device { &mut self.device } else { &mut self.host };
            let mut conflicts: Vec<Conflict> = Vec::new();
            for alias in touch.aliases(physicals, mappings) {
                conflicts.extend(shadow.conflicts(alias, touch.kind, ordered));
            }
            conflicts.extend(shadow.access(touch.range, touch.kind, node.epoch, ordered));
            found.extend(conflicts.into_iter().map(|conflict| (touch.space, conflict)));
        }
        found
    }
}

/// Work that a capture recorded.
#[derive(Clone, Debug)]
pub(crate) struct GraphNode {
    pub(crate) body: Body,
    pub(crate) epoch: Epoch,
    /// What it is ordered after, within the capture.
    pub(crate) clock: OpClock,
    /// The bodies of conditional nodes that it is within: it runs if all of them do.
    pub(crate) within: Vec<BodyRef>,
    /// How many blocks of allocators had begun when it was captured.
    pub(crate) blocks: u64,
}

/// A captured graph.
#[derive(Clone, Debug, Default)]
pub(crate) struct CapturedGraph {
    pub(crate) nodes: Vec<GraphNode>,
    /// Whether a race among its nodes was reported.
    pub(crate) races: bool,
    /// Blocks that must be live whenever it is launched.
    pub(crate) needed: BTreeSet<Needed>,
    /// When its latest launch is done, and the clock after it. The next launch waits for it.
    pub(crate) launched: Option<(u64, Arc<OpClock>)>,
    /// The memory that it allocates, which its copies share.
    pub(crate) memory: Arc<BTreeSet<u64>>,
    /// Whether a launch frees what the one before left allocated.
    pub(crate) frees_on_launch: bool,
    /// Its conditional nodes, each with whether it is within no body of another one.
    pub(crate) conditionals: Vec<(u64, bool)>,
}

/// A piece of physical memory.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) bytes: u64,
    pub(crate) options: PhysicalOptions,
    pub(crate) store: StoreId,
    /// The addresses that it is mapped at.
    pub(crate) mapped_at: Vec<u64>,
    /// False once its handle was released. It lives on while it is mapped.
    pub(crate) has_handle: bool,
    /// Work that was not known complete when it was last unmapped.
    pub(crate) unfinished: Vec<Epoch>,
}

/// Physical memory by handle, and by a number of our own that it keeps until it is gone.
#[derive(Debug)]
pub(crate) struct PhysicalTable {
    pub(crate) handles: HandleTable<u64>,
    pub(crate) live: HandleTable<Physical>,
    /// Number of pieces that are mapped at more than one address.
    aliased: usize,
}

impl PhysicalTable {
    pub(crate) fn new(first_handle: u64) -> Self {
        PhysicalTable { handles: HandleTable::new(first_handle), live: HandleTable::new(0), aliased: 0 }
    }

    pub(crate) fn get(&self, handle: RawPhysical) -> Answer<(u64, &Physical)> {
        let number = self.handles.get(handle.0).copied();
        let physical = number.and_then(|number| Some((number, self.live.get(number)?)));
        physical.ok_or_else(|| Refused::handle("physical memory", handle.0))
    }

    /// Notes that the memory with this number is mapped at an address.
    pub(crate) fn note_mapped(&mut self, number: u64, at: u64) {
        if let Some(physical) = self.live.get_mut(number) {
            physical.mapped_at.push(at);
            self.aliased += usize::from(physical.mapped_at.len() == 2);
        }
    }

    /// Notes that the memory with this number is not mapped at an address any more, and returns it.
    pub(crate) fn note_unmapped(&mut self, number: u64, at: u64) -> Option<&mut Physical> {
        let physical = self.live.get_mut(number)?;
        physical.mapped_at.retain(|&other| other != at);
        self.aliased -= usize::from(physical.mapped_at.len() == 1);
        Some(physical)
    }

    /// Whether any memory is mapped at more than one address.
    pub(crate) fn has_aliases(&self) -> bool {
        self.aliased > 0
    }

    /// The other addresses of the memory that is mapped in a range.
    pub(crate) fn aliases(&self, mappings: &Mappings, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        if !self.has_aliases() {
            return found;
        }
        for mapping in mappings.overlapping(range) {
            let Some(physical) = self.live.get(mapping.physical) else { continue };
            let (start, end) = (range.start.max(mapping.start), range.end.min(mapping.end()));
            let others = physical.mapped_at.iter().filter(|&&at| at != mapping.start);
            found.extend(others.map(|at| at + (start - mapping.start)..at + (end - mapping.start)));
        }
        found
    }
}
