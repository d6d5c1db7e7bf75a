//! Keys and strings of statistics and snapshots.

use std::collections::BTreeSet;

use aquifer_allocator::snapshot::{BlockState, FileFormat, Snapshot};
use aquifer_allocator::{Allocator, Config, HistoryOptions, PoolOptions, TagScope};
use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};
use serde_json::{Value, json};

fn allocator(options: &str, ordinal: u32) -> (Device, Allocator) {
    let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).ordinal(ordinal)));
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    (device, allocator)
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

fn sorted<'a>(keys: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut keys: Vec<&str> = keys.into_iter().collect();
    keys.sort_unstable();
    keys
}

fn entry<'a>(json: &'a Value, action: &str) -> &'a Value {
    let traces = json["device_traces"].as_array().unwrap();
    traces.iter().flat_map(|trace| trace.as_array().unwrap()).find(|entry| entry["action"] == action).unwrap()
}

#[test]
fn statistics_have_the_123_keys() {
    let mut expected = BTreeSet::new();
    for metric in [
        "allocation",
        "segment",
        "active",
        "inactive_split",
        "allocated_bytes",
        "reserved_bytes",
        "active_bytes",
        "inactive_split_bytes",
        "requested_bytes",
    ] {
        for pool in ["all", "large_pool", "small_pool"] {
            for part in ["current", "peak", "allocated", "freed"] {
                expected.insert(format!("{metric}.{pool}.{part}"));
            }
        }
    }
    for metric in ["oversize_allocations", "oversize_segments"] {
        for part in ["current", "peak", "allocated", "freed"] {
            expected.insert(format!("{metric}.{part}"));
        }
    }
    let single = "num_alloc_retries num_ooms num_sync_all_streams num_device_alloc num_device_free num_oom_rejections \
                  max_split_size";
    expected.extend(single.split(' ').map(str::to_owned));
    assert_eq!(expected.len(), 123);
    let (_, allocator) = allocator("", 0);
    assert_eq!(allocator.stats().to_map().into_keys().collect::<BTreeSet<String>>(), expected);
}

/// A snapshot with every state of a block and every action.
fn rich_snapshot(is_paged: bool) -> Snapshot {
    let driver = SimDriver::new(SimConfig::new(1 << 30).ordinal(2));
    let device = Device::new(driver.clone());
    let options = if is_paged { "history:1000" } else { "history:1000,backing:segments" };
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    let (stream, other) = (device.default_stream(), device.stream().unwrap());
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    drop(allocator.alloc_bytes(40 << 20, stream).unwrap());
    allocator.empty_cache().unwrap();
    allocator.alloc_bytes(2 << 30, stream).unwrap_err();
    allocator.snapshot();
    let _tagged = {
        let _scope = TagScope::new("weights");
        allocator.alloc_bytes(3000, stream).unwrap()
    };
    let shared = pool.alloc_bytes(5 << 20, stream).unwrap();
    driver.stall(other.raw(), std::time::Duration::from_secs(1)).unwrap();
    other.wait_for(&stream.tick()).unwrap();
    shared.record_stream(&other).unwrap();
    other.fill(shared.ptr(), 0, 64).unwrap();
    drop(shared);
    allocator.snapshot()
}

#[test]
fn snapshots_have_pytorchs_keys() {
    [false, true].into_iter().for_each(snapshots_have_keys);
}

fn snapshots_have_keys(is_paged: bool) {
    let json = serde_json::to_value(rich_snapshot(is_paged)).unwrap();
    let top = "segments device_traces allocator_settings external_annotations host_segments host_traces";
    assert_eq!(keys(&json), sorted(top.split(' ').chain(["entries_overwritten"])));
    for key in ["external_annotations", "host_segments", "host_traces"] {
        assert_eq!(json[key], json!([]));
    }

    let segment_keys = "device address total_size allocated_size active_size requested_size stream segment_type \
                        segment_pool_id is_expandable frames blocks";
    let block_keys = "address size requested_size state frames";
    let segments = json["segments"].as_array().unwrap();
    let (mut types, mut states) = (BTreeSet::new(), BTreeSet::new());
    for segment in segments {
        let tag = segment.get("user_metadata").map(|_| "user_metadata");
        assert_eq!(keys(segment), sorted(segment_keys.split_whitespace().chain(tag)));
        assert_eq!((&segment["device"], &segment["frames"]), (&json!(2), &json!([])));
        assert_eq!(segment["is_expandable"], json!(is_paged));
        assert_eq!(segment["segment_pool_id"].as_array().unwrap().len(), 2);
        types.insert(segment["segment_type"].as_str().unwrap());
        for block in segment["blocks"].as_array().unwrap() {
            let tag = block.get("user_metadata").map(|_| "user_metadata");
            assert_eq!(keys(block), sorted(block_keys.split_whitespace().chain(tag)));
            assert_eq!(block["frames"], json!([]));
            states.insert(block["state"].as_str().unwrap());
        }
    }
    assert_eq!(types.into_iter().collect::<Vec<_>>(), ["large", "small"]);
    assert_eq!(states.into_iter().collect::<Vec<_>>(), ["active_allocated", "active_pending_free", "inactive"]);
}

#[test]
fn files_hold_what_the_snapshot_has() {
    for is_paged in [false, true] {
        let snapshot = rich_snapshot(is_paged);
        let (mut pickle, mut json) = (Vec::new(), Vec::new());
        snapshot.write(FileFormat::Pickle, &mut pickle).unwrap();
        snapshot.write(FileFormat::Json, &mut json).unwrap();
        let value = serde_json::to_value(&snapshot).unwrap();
        assert_eq!(serde_json::from_slice::<Value>(&json).unwrap(), value);
        assert_eq!(serde_pickle::from_slice::<Value>(&pickle, serde_pickle::DeOptions::new()).unwrap(), value);
    }
}

#[test]
fn keys_come_in_pytorchs_order() {
    let text = serde_json::to_string(&rich_snapshot(false)).unwrap();
    let mut at = 0;
    for key in ["segments", "device", "address", "total_size", "blocks", "device_traces", "action", "addr", "time_us"] {
        at += text[at..].find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("{key} is not in its place"));
    }
}

#[test]
fn trace_entries_have_pytorchs_keys() {
    trace_entries_have_keys(false, ["segment_alloc", "segment_free"]);
    trace_entries_have_keys(true, ["segment_map", "segment_unmap"]);
}

fn trace_entries_have_keys(is_paged: bool, of_segments: [&str; 2]) {
    let json = serde_json::to_value(rich_snapshot(is_paged)).unwrap();
    let traces = json["device_traces"].as_array().unwrap();
    assert_eq!(
        traces.iter().map(|trace| !trace.as_array().unwrap().is_empty()).collect::<Vec<_>>(),
        [false, false, true]
    );
    let common = "action size stream time_us compile_context user_metadata pool_id";
    let of_blocks = ["alloc", "free_requested", "free_completed", "snapshot", "oom"];
    for action in of_blocks.into_iter().chain(of_segments) {
        let entry = entry(&json, action);
        let place = if action == "oom" { "device_free" } else { "addr" };
        assert_eq!(keys(entry), sorted(common.split(' ').chain([place])), "{action}");
        assert_eq!(entry["compile_context"], "N/A");
        assert!(entry["time_us"].as_u64().unwrap() > 1_600_000_000_000_000);
    }
    assert_eq!(entry(&json, "oom")["device_free"], json!(1_u64 << 30));
    assert_eq!(entry(&json, "snapshot")["addr"], json!(0));
}

#[test]
fn names_appear_in_entries_segments_and_blocks() {
    let snapshot = rich_snapshot(false);
    let named: Vec<_> = snapshot.trace().iter().filter(|entry| &*entry.user_metadata == "weights").collect();
    assert_eq!(named.len(), 2, "segment_alloc and alloc");
    let (segment, block) = snapshot.blocks().find(|(_, block)| block.requested_size == 3000).unwrap();
    assert_eq!(block.user_metadata.as_deref(), Some("weights"));
    assert_eq!(segment.user_metadata.as_deref(), Some("weights"));
    assert_eq!(block.state, BlockState::ActiveAllocated);
}

#[test]
fn settings_have_pytorchs_keys() {
    let (_, allocator) =
        allocator("max_split_size_mb:40,roundup_power2_divisions:[64:8,>:2],pinned_max_cached_size_mb:3", 0);
    let json = serde_json::to_value(allocator.snapshot()).unwrap();
    let settings = &json["allocator_settings"];
    let expected = "PYTORCH_CUDA_ALLOC_CONF max_split_size garbage_collection_threshold expandable_segments \
                    pinned_num_register_threads release_lock_on_cudamalloc pinned_use_cuda_host_register \
                    graph_capture_record_stream_reuse max_round_threshold max_cached_size roundup_power2_divisions \
                    trace_alloc_overflowed trace_alloc_max_entries";
    assert_eq!(keys(settings), sorted(expected.split_whitespace()));
    assert_eq!(settings["PYTORCH_CUDA_ALLOC_CONF"], allocator.config().to_string());
    assert_eq!(settings["max_split_size"], json!(40 << 20));
    assert_eq!(settings["max_cached_size"], json!(3 << 20));
    assert_eq!(settings["max_round_threshold"], json!(-1));
    let divisions = settings["roundup_power2_divisions"].as_object().unwrap();
    assert_eq!(divisions.len(), 16);
    assert!(divisions.values().all(|value| *value == json!(0)), "no request is rounded up by it");
}

#[test]
fn settings_say_whether_the_history_is_all_there() {
    let (device, allocator) = allocator("", 0);
    let said = |entries| {
        allocator.record_history(HistoryOptions { entries, clear: true, ..HistoryOptions::default() });
        drop(allocator.alloc_bytes(512, device.default_stream()).unwrap());
        let snapshot = allocator.snapshot();
        let settings = snapshot.allocator_settings;
        (settings.trace_alloc_max_entries, settings.trace_alloc_overflowed, snapshot.entries_overwritten > 0)
    };
    assert_eq!(said(0), (0, false, false));
    assert_eq!(said(100), (100, false, false));
    assert_eq!(said(2), (2, true, true));
    assert_eq!(said(usize::MAX), (i64::MAX, false, false));
}
