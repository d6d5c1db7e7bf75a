//! Snapshots: every segment, every block and the history, consistent with each other, in PyTorch's
//! format.
//!
//! [`Snapshot`] serializes to the keys and strings of `torch.cuda.memory._snapshot()`.
//! [`Snapshot::save`] writes it as a pickle or as JSON. PyTorch's memory viewer opens both;
//! PyTorch's Python tools, which read pickles, show it, too.
//!
//! * Streams are identified by [`Stream::id`](aquifer_device::Stream::id); 0 is the legacy default
//!   stream, as in PyTorch.
//! * Call stacks are not recorded. As in PyTorch when it records none, `frames` of segments and
//!   blocks are empty, and those of trace entries absent.
//! * Names given with [`TagScope`](crate::TagScope) become the `user_metadata` of trace entries.
//!   Segments and blocks with a name have that key, too, which they do not have in PyTorch.
//! * `requested_size` of an inactive block is 0. In PyTorch it is the size of an earlier request.
//! * `external_annotations`, which PyTorch's profiler makes, are empty. So are `host_segments` and
//!   `host_traces`, as in PyTorch unless it records the history of pinned host memory: a snapshot
//!   is of an allocator, which has none.
//! * `entries_overwritten` is no key of PyTorch.

use std::sync::Arc;

use serde::ser::{Serialize, SerializeSeq, Serializer};

use crate::history::Action;
use crate::size_class::PoolKind;

mod pickle;
mod save;
mod settings;
pub(crate) mod take;
mod totals;

pub use save::{FileFormat, SaveError};
pub use settings::Settings;
pub use totals::{PoolTotals, Totals};

/// The memory of an allocator as of one moment, with the history up to it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Segments by address.
    pub segments: Vec<Segment>,
    /// History, oldest entry first, in the list of the device's ordinal; lists of other devices are
    /// empty.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// The configuration.
    pub allocator_settings: Settings,
    external_annotations: Nothing,
    host_segments: Nothing,
    host_traces: Nothing,
    /// Number of history entries that were overwritten by later ones.
    pub entries_overwritten: u64,
}

/// A segment, tiled by its blocks. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Segment {
    /// Ordinal of the device.
    pub device: u32,
    /// First address.
    pub address: u64,
    /// Length: the sum of its blocks' sizes.
    pub total_size: u64,
    /// Bytes in live blocks.
    pub allocated_size: u64,
    /// Bytes in live blocks and in freed ones that other streams still use.
    pub active_size: u64,
    /// Bytes requested for these blocks.
    pub requested_size: u64,
    /// The stream that it belongs to, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream: u32,
    /// The pool: `"large"` or `"small"`.
    #[serde(serialize_with = "serialize_kind")]
    pub segment_type: PoolKind,
    /// Id of the private pool that it belongs to; `(0, 0)` if none.
    pub segment_pool_id: (u64, u64),
    /// True for mapped memory, false for a segment from the driver.
    pub is_expandable: bool,
    frames: Nothing,
    /// Name that was in scope when it was taken from the device.
    #[serde(serialize_with = "serialize_name", skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Arc<str>>,
    /// Blocks by address.
    pub blocks: Vec<Block>,
}

/// A piece of a segment.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct Block {
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
    /// Requested bytes; 0 if it is inactive.
    pub requested_size: u64,
    /// State of the block.
    pub state: BlockState,
    frames: Nothing,
    /// Name that was in scope when it was allocated.
    #[serde(serialize_with = "serialize_name", skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Arc<str>>,
}

/// State of a block: in use, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockState {
    /// A live block: its holder uses it.
    ActiveAllocated,
    /// It was freed, but other streams still use it.
    ActivePendingFree,
    /// It is free.
    Inactive,
}

/// An entry of the history.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TraceEntry {
    /// Kind of the entry.
    pub action: Action,
    /// Address; absent for [`Action::Oom`], 0 for [`Action::Snapshot`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    /// Free bytes of the device; only for [`Action::Oom`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<u64>,
    /// Size in bytes: see [`Action`].
    pub size: u64,
    /// The stream, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream: u32,
    /// Time: microseconds since 1970.
    pub time_us: u64,
    compile_context: &'static str,
    /// Name that was in scope; empty for none.
    #[serde(serialize_with = "serialize_str")]
    pub user_metadata: Arc<str>,
    /// Id of the private pool; `(0, 0)` if none.
    pub pool_id: (u64, u64),
}

impl Snapshot {
    /// The history of the allocator's device, oldest entry first.
    pub fn trace(&self) -> &[TraceEntry] {
        self.device_traces.last().map_or(&[], Vec::as_slice)
    }

    /// Every block with its segment, by address.
    pub fn blocks(&self) -> impl Iterator<Item = (&Segment, &Block)> + '_ {
        self.segments.iter().flat_map(|segment| segment.blocks.iter().map(move |block| (segment, block)))
    }
}

impl BlockState {
    /// True if its holder or other streams use the block.
    pub fn is_active(self) -> bool {
        self != BlockState::Inactive
    }
}

/// A list that is always empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Nothing;

impl Serialize for Nothing {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_seq(Some(0))?.end()
    }
}

fn serialize_kind<S: Serializer>(kind: &PoolKind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(match kind {
        PoolKind::Small => "small",
        PoolKind::Large => "large",
    })
}

fn serialize_str<S: Serializer>(name: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(name)
}

fn serialize_name<S: Serializer>(name: &Option<Arc<str>>, serializer: S) -> Result<S::Ok, S::Error> {
    name.as_deref().serialize(serializer)
}
