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

use serde::ser::{SerializeMap, Serializer};

use crate::config::Config;
use crate::history::Action;
use crate::size_class::PoolKind;

pub use save::{FileFormat, SaveError};

mod pickle;
mod save;
pub(crate) mod take;

/// A list that is always empty.
type Nothing = &'static [()];

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
    pub segment_type: PoolKind,
    /// Id of the private pool that it belongs to; `(0, 0)` if none.
    pub segment_pool_id: (u64, u64),
    /// True for mapped memory, false for a segment from the driver.
    pub is_expandable: bool,
    frames: Nothing,
    /// Name that was in scope when it was taken from the device.
    #[serde(skip_serializing_if = "Option::is_none")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
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

/// The configuration under the keys of PyTorch's `allocator_settings`. Sizes are bytes; -1 is
/// unlimited.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct Settings {
    /// The options that differ from the default, as an option string of this library.
    #[serde(rename = "PYTORCH_CUDA_ALLOC_CONF")]
    pub options: String,
    max_split_size: i64,
    garbage_collection_threshold: f64,
    /// Whether the option `expandable_segments` asked for them, which has no effect.
    pub expandable_segments: bool,
    pinned_num_register_threads: i64,
    /// Always true: no lock is held while the driver allocates.
    pub release_lock_on_cudamalloc: bool,
    pinned_use_cuda_host_register: bool,
    graph_capture_record_stream_reuse: bool,
    max_round_threshold: i64,
    max_cached_size: i64,
    /// By the size in MiB that an interval starts at; all 0, because no request is rounded up by
    /// it.
    #[serde(serialize_with = "serialize_divisions")]
    roundup_power2_divisions: [u64; 16],
    /// True if entries of the history were overwritten by later ones:
    /// [`Snapshot::entries_overwritten`](super::Snapshot::entries_overwritten).
    pub trace_alloc_overflowed: bool,
    /// Number of history entries that are kept; 0 if none is recorded.
    pub trace_alloc_max_entries: i64,
}

impl Settings {
    pub(super) fn new(config: &Config, history_capacity: usize, overwritten: u64) -> Settings {
        // Those that concern snapshots are without effect on any memory.
        let ignored = config.ignored(config.backing);
        let asked = |key: &str| ignored.iter().find(|option| option.key == key).map(|option| option.value.as_str());
        let number = |key: &str| asked(key).and_then(|value| value.parse::<i64>().ok());
        let mib = |key: &str| number(key).map_or(-1, |mib| mib.saturating_mul(1 << 20));
        Settings {
            options: config.to_string(),
            max_split_size: mib("max_split_size_mb"),
            garbage_collection_threshold: asked("garbage_collection_threshold")
                .and_then(|value| value.parse().ok())
                .unwrap_or(0.0),
            expandable_segments: asked("expandable_segments").is_some(),
            pinned_num_register_threads: number("pinned_num_register_threads").unwrap_or(1),
            release_lock_on_cudamalloc: true,
            pinned_use_cuda_host_register: asked("pinned_use_cuda_host_register").is_some(),
            graph_capture_record_stream_reuse: asked("graph_capture_record_stream_reuse").is_some(),
            max_round_threshold: mib("pinned_max_round_threshold_mb"),
            max_cached_size: mib("pinned_max_cached_size_mb"),
            roundup_power2_divisions: [0; 16],
            trace_alloc_overflowed: overwritten > 0,
            trace_alloc_max_entries: i64::try_from(history_capacity).unwrap_or(i64::MAX),
        }
    }
}

fn serialize_divisions<S: Serializer>(divisions: &[u64; 16], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(divisions.len()))?;
    for (log2, divisions) in divisions.iter().enumerate() {
        map.serialize_entry(&(1_u64 << log2).to_string(), divisions)?;
    }
    map.end()
}
