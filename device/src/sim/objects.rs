//! The objects of a simulated device that calls name by handles: events, captures and their graphs,
//! physical memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::checks::Needed;
use super::clock::OpClock;
use super::handle::HandleTable;
use super::memory::StoreId;
use super::race::{Epoch, Shadow};
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
    pub(super) device: Shadow,
    pub(super) host: Shadow,
}

/// The work that a capture recorded.
#[derive(Clone, Debug, Default)]
pub(super) struct CapturedGraph {
    pub(super) works: Vec<Body>,
    /// Blocks that must be live whenever it is launched.
    pub(super) needed: BTreeSet<Needed>,
}

/// A piece of physical memory.
#[derive(Debug)]
pub(super) struct Physical {
    pub(super) bytes: u64,
    pub(super) options: PhysicalOptions,
    pub(super) store: StoreId,
    /// The address that it is mapped at.
    pub(super) mapped_at: Option<u64>,
}

/// Physical memory by handle, and by a number of our own that it keeps until it is gone.
#[derive(Debug)]
pub(super) struct PhysicalTable {
    pub(super) handles: HandleTable<u64>,
    pub(super) live: HandleTable<Physical>,
    /// Memory that is mapped, and whose handle is gone.
    pub(super) released: BTreeSet<u64>,
    /// Work that was not known complete when memory was last unmapped, if there was any.
    pub(super) unfinished: BTreeMap<u64, Vec<Epoch>>,
}

impl PhysicalTable {
    pub(super) fn new(first_handle: u64) -> Self {
        let (released, unfinished) = (BTreeSet::new(), BTreeMap::new());
        PhysicalTable { handles: HandleTable::new(first_handle), live: HandleTable::new(0), released, unfinished }
    }

    pub(super) fn get(&self, handle: RawPhysical) -> Answer<(u64, &Physical)> {
        let number = self.handles.get(handle.0).copied();
        let physical = number.and_then(|number| Some((number, self.live.get(number)?)));
        physical.ok_or_else(|| Refused::handle("physical memory", handle.0))
    }

    /// Notes the address that memory is mapped at.
    pub(super) fn mapped(&mut self, number: u64, at: Option<u64>) {
        if let Some(physical) = self.live.get_mut(number) {
            physical.mapped_at = at;
        }
    }

    /// Notes that memory was unmapped, which `unfinished` work may still use. Returns true if its
    /// handle is gone, so that nothing holds it any more.
    pub(super) fn unmapped(&mut self, number: u64, unfinished: Vec<Epoch>) -> bool {
        self.mapped(number, None);
        if self.released.remove(&number) {
            return true;
        }
        if unfinished.is_empty() {
            self.unfinished.remove(&number);
        } else {
            self.unfinished.insert(number, unfinished);
        }
        false
    }
}
