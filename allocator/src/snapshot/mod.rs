//! Snapshots: every segment, every block and the history, consistent with each other, in PyTorch's format.
//!
//! [`Snapshot`] serializes to the keys and strings of `torch.cuda.memory._snapshot()`. Written as JSON it opens in PyTorch's
//! memory viewer.
//!
//! * Streams are identified by [`Stream::id`](aquifer_device::Stream::id); 0 is the legacy default stream, as in PyTorch.
//! * Call stacks are not recorded. As in PyTorch when it records none, `frames` of segments and blocks are empty, and those of trace entries
//!   absent.
//! * Names given with [`TagScope`](crate::TagScope) become the `user_metadata` of trace entries. Segments and blocks with a name have that
//!   key, too, which they do not have in PyTorch.
//! * `requested_size` of an inactive block is 0. In PyTorch it is the size of an earlier request.

mod settings;
mod take;
mod totals;

use std::sync::Arc;

use serde::ser::{Serialize, SerializeSeq, Serializer};

pub use settings::Settings;
pub use totals::{PoolTotals, Totals};

use crate::history::Action;
use crate::size_class::PoolKind;

/// The memory of an allocator as of one moment, with the history up to it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// Segments by address.
    pub segments: Vec<Segment>,
    /// History, oldest entry first, in the list of the device's ordinal; lists of other devices are empty.
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// The configuration.
    pub allocator_settings: Settings,
    external_annotations: Nothing,
    /// Entries that were recorded and gave way to later ones.
    #[serde(skip)]
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
    /// Length: the sum of its blocks.
    pub total_size: u64,
    /// Bytes in live blocks.
    pub allocated_size: u64,
    /// Bytes in live blocks and those given back that other streams still use.
    pub active_size: u64,
    /// Bytes that holders of these asked for.
    pub requested_size: u64,
    /// The stream that it belongs to, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream: u32,
    /// The pool: `"large"` or `"small"`.
    #[serde(serialize_with = "serialize_kind")]
    pub segment_type: PoolKind,
    /// Id of the private pool it belongs to; `(0, 0)` is none.
    pub segment_pool_id: (u64, u64),
    /// Whether it is mapped piece by piece.
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
    /// Bytes that its holder asked for; 0 if it is inactive.
    pub requested_size: u64,
    /// Whether it is in use.
    pub state: BlockState,
    frames: Nothing,
    /// Name that was in scope when it was allocated.
    #[serde(serialize_with = "serialize_name", skip_serializing_if = "Option::is_none")]
    pub user_metadata: Option<Arc<str>>,
}

/// Whether a block is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BlockState {
    /// Somebody holds it.
    ActiveAllocated,
    /// It was given back, but other streams still use it.
    ActivePendingFree,
    /// It is free.
    Inactive,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[non_exhaustive]
pub struct TraceEntry {
    /// What.
    pub action: Action,
    /// Where; absent for [`Action::Oom`], 0 for [`Action::Snapshot`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub addr: Option<u64>,
    /// Free bytes of the device; for [`Action::Oom`] alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_free: Option<u64>,
    /// Bytes: see [`Action`].
    pub size: u64,
    /// The stream, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream: u32,
    /// When: microseconds since 1970.
    pub time_us: u64,
    compile_context: &'static str,
    /// Name that was in scope; empty for none.
    #[serde(serialize_with = "serialize_str")]
    pub user_metadata: Arc<str>,
    /// Id of the private pool; `(0, 0)` is none.
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
    /// Whether it is in use by its holder or by other streams.
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
