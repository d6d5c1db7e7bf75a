//! The objects of a simulated device that calls name by handles: events, captures and their graphs,
//! physical memory.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::checks::Needed;
use super::clock::OpClock;
use super::handle::HandleTable;
use super::mappings::Mappings;
use super::memory::StoreId;
use super::race::{Conflict, Epoch, Shadow, Space};
use super::refused::{Answer, Refused};
use super::work::Body;
use crate::driver::RawPhysical;
use crate::physical::PhysicalOptions;

/// What an event stands for.
#[derive(Clone, Debug)]
pub(super) enum EventRecord {
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
pub(super) struct EventState {
    pub(super) timing: bool,
    pub(super) record: EventRecord,
}

/// A stream's part in a capture.
#[derive(Debug)]
pub(super) struct Membership {
    pub(super) capture: u64,
    /// What its next work is ordered after, within the capture.
    pub(super) clock: OpClock,
    pub(super) seq: u64,
}

/// A capture in progress.
#[derive(Debug, Default)]
pub(super) struct CaptureState {
    pub(super) origin: u32,
    pub(super) members: BTreeSet<u32>,
    pub(super) graph: CapturedGraph,
    pub(super) invalid: bool,
    pub(super) accesses: GraphAccesses,
}

/// The accesses of a graph's nodes.
#[derive(Debug, Default)]
pub(super) struct GraphAccesses {
    device: Shadow,
    host: Shadow,
}

impl GraphAccesses {
    /// Notes the accesses of a node, and returns those of other nodes that no edge orders before
    /// it.
    pub(super) fn add(
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
pub(super) struct GraphNode {
    pub(super) body: Body,
    pub(super) epoch: Epoch,
    /// What it is ordered after, within the capture.
    pub(super) clock: OpClock,
}

/// A captured graph.
#[derive(Clone, Debug, Default)]
pub(super) struct CapturedGraph {
    pub(super) nodes: Vec<GraphNode>,
    /// Whether a race among its nodes was reported.
    pub(super) races: bool,
    /// Blocks that must be live whenever it is launched.
    pub(super) needed: BTreeSet<Needed>,
    /// When its latest launch is done, and the clock after it. The next launch waits for it.
    pub(super) launched: Option<(u64, Arc<OpClock>)>,
}

/// A piece of physical memory.
#[derive(Debug)]
pub(super) struct Physical {
    pub(super) bytes: u64,
    pub(super) options: PhysicalOptions,
    pub(super) store: StoreId,
    /// The addresses that it is mapped at.
    pub(super) mapped_at: Vec<u64>,
    /// False once its handle was released. It lives on while it is mapped.
    pub(super) has_handle: bool,
    /// Work that was not known complete when it was last unmapped.
    pub(super) unfinished: Vec<Epoch>,
}

/// Physical memory by handle, and by a number of our own that it keeps until it is gone.
#[derive(Debug)]
pub(super) struct PhysicalTable {
    pub(super) handles: HandleTable<u64>,
    pub(super) live: HandleTable<Physical>,
    /// Number of pieces that are mapped at more than one address.
    aliased: usize,
}

impl PhysicalTable {
    pub(super) fn new(first_handle: u64) -> Self {
        PhysicalTable { handles: HandleTable::new(first_handle), live: HandleTable::new(0), aliased: 0 }
    }

    pub(super) fn get(&self, handle: RawPhysical) -> Answer<(u64, &Physical)> {
        let number = self.handles.get(handle.0).copied();
        let physical = number.and_then(|number| Some((number, self.live.get(number)?)));
        physical.ok_or_else(|| Refused::handle("physical memory", handle.0))
    }

    /// Notes that the memory with this number is mapped at an address.
    pub(super) fn note_mapped(&mut self, number: u64, at: u64) {
        if let Some(physical) = self.live.get_mut(number) {
            physical.mapped_at.push(at);
            self.aliased += usize::from(physical.mapped_at.len() == 2);
        }
    }

    /// Notes that the memory with this number is not mapped at an address any more, and returns it.
    pub(super) fn note_unmapped(&mut self, number: u64, at: u64) -> Option<&mut Physical> {
        let physical = self.live.get_mut(number)?;
        physical.mapped_at.retain(|&other| other != at);
        self.aliased -= usize::from(physical.mapped_at.len() == 1);
        Some(physical)
    }

    /// Whether any memory is mapped at more than one address.
    pub(super) fn has_aliases(&self) -> bool {
        self.aliased > 0
    }

    /// The other addresses of the memory that is mapped in a range.
    pub(super) fn aliases(&self, mappings: &Mappings, range: &Range<u64>) -> Vec<Range<u64>> {
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
