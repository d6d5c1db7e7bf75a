//! The configuration as snapshots show it.

use serde::ser::{SerializeMap, Serializer};

use crate::config::Config;

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
    /// By the size in MiB that an interval starts at; all 0, because no request is rounded up by it.
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
