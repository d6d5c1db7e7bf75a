//! The benchmarks from the command line: rows, figures that are known, and exit codes.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// The program without a visible GPU, so that tests give the same results on all machines.
fn program(args: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_aquifer-bench"));
    program.args(args).env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    program
}

fn bench(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The rows of a run that succeeds; standard output must have nothing else.
fn rows(args: &[&str]) -> Vec<Value> {
    rows_of(&bench(&[args, &["--json"]].concat()))
}

fn rows_of(output: &Output) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(0), "{}", errors(output));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn bytes(row: &Value, key: &str) -> u64 {
    row[key].as_u64().unwrap_or_else(|| panic!("{key} in {row}"))
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"))
}

#[test]
fn pairs_are_measured_beside_the_yardstick() {
    let rows = rows(&["pairs", "--quick", "hot_", "raw_hot"]);
    assert_eq!(rows.len(), 4);
    for (row, name) in rows.iter().zip(["hot_512b", "hot_1mib", "hot_64mib", "raw_hot"]) {
        assert_eq!((row["benchmark"].as_str(), row["device"].as_str()), (Some(name), Some("sim:80GiB")));
        assert_eq!((bytes(row, "threads"), bytes(row, "live")), (1, 1));
        let yardstick = if name == "raw_hot" { "aquifer-handles" } else { "offset-allocator" };
        assert_eq!(row["yardstick"], yardstick);
        assert!(number(row, "ns_per_pair") > 0.0 && number(row, "over_yardstick") > 0.0, "{row}");
        assert_eq!(row["rate_vs_one_thread"], 1.0);
    }
    let sizes: Vec<u64> = rows.iter().map(|row| bytes(row, "largest_bytes")).collect();
    assert_eq!(sizes, [512, 1 << 20, 64 << 20, 1 << 20]);
}

#[test]
fn several_threads_are_compared_with_one() {
    let rows = rows(&["pairs", "--quick", "threads", "handover", "raw_parallel"]);
    let threads: Vec<u64> = rows.iter().map(|row| bytes(row, "threads")).collect();
    assert_eq!(threads, [1, 2, 4, 1, 2, 4, 2, 2]);
    for row in &rows {
        let rate = number(row, "rate_vs_one_thread");
        assert!(rate > 0.0 && (bytes(row, "threads") > 1 || (rate - 1.0).abs() < 1e-9), "{row}");
    }
}

#[test]
fn operations_are_measured_at_three_numbers() {
    let measured = rows(&["scale", "--quick", "streams", "pools", "growables", "graphs"]);
    for (series, least, of_it) in [
        ("streams", 4, ["first block", "pair in turn", "drop"]),
        ("pools", 8, ["make", "drop", "snapshot after"]),
        ("growables", 8, ["make", "shrink", "drop, miss"]),
        ("graphs", 8, ["capture", "launch", "pair after"]),
    ] {
        for operation in of_it.into_iter().chain(["pair", "miss", "snapshot", "fragmentation", "refusal"]) {
            let row = |row: &&Value| row["benchmark"] == series && row["operation"] == operation;
            let found: Vec<&Value> = measured.iter().filter(row).collect();
            let numbers: Vec<u64> = found.iter().map(|row| bytes(row, "n")).collect();
            assert_eq!(numbers, [least, 4 * least, 16 * least], "{series}: {operation}");
            for (at, row) in found.into_iter().enumerate() {
                assert!(number(row, "ns_per_operation") > 0.0);
                assert_eq!(row["exponent"].is_null(), at == 0);
                let hot = |key: &str| row[key].as_f64();
                assert!(hot("hot_p99_ns") <= hot("hot_max_ns"), "{row}");
                assert_eq!(row["hot_p99_ns"].is_null(), row["hot_max_ns"].is_null());
            }
        }
    }
}

#[test]
fn operations_are_measured_with_segments_too() {
    for series in ["waiting", "live", "nothing"] {
        let measured = rows(&["scale", "--quick", series, "--config", "backing:segments"]);
        assert!(measured.iter().all(|row| row["benchmark"].as_str() == Some(series)));
        for operation in ["pair", "snapshot", "fragmentation"] {
            assert!(measured.iter().any(|row| row["operation"] == operation), "{series}: {operation}");
        }
        for operation in ["miss", "refusal"] {
            assert_eq!(measured.iter().any(|row| row["operation"] == operation), series != "waiting", "{operation}");
        }
    }
    let output = bench(&["scale", "--quick", "growables", "--config", "backing:segments", "--json"]);
    assert!(output.status.success() && output.stdout.is_empty(), "memory that grows is mapped");
    assert!(errors(&output).contains("note: growables: not measured"), "{}", errors(&output));
}

const PEERS: [&str; 5] = [
    "Aquifer",
    "PyTorch (model)",
    "PyTorch, expandable segments (model)",
    "driver's pool (cuMemAllocAsync)",
    "cuMemAlloc",
];

#[test]
fn published_patterns_are_played_by_every_allocator() {
    let rows = rows(&["peers", "comb"]);
    let held = |benchmark: &str| -> Vec<u64> {
        let rows: Vec<&Value> = rows.iter().filter(|row| row["benchmark"] == benchmark).collect();
        let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
        assert_eq!(names, PEERS);
        rows.iter().map(|row| bytes(row, "peak_reserved_bytes") >> 20).collect()
    };
    // The devlog's figures of PyTorch: four segments of 16 MiB and one of 32, and three pages of 20
    // MiB more than four.
    assert_eq!(held("comb"), [80, 96, 100, 64, 64], "the name itself, not comb_1gib");
    for row in &rows {
        assert!(row["clock"].is_null() && bytes(row, "ooms") == 0, "{row}");
        assert!(bytes(row, "driver_calls") > 0 && row["driver_time_modelled_us"].as_f64().unwrap() > 0.0, "{row}");
        let by_simulator = PEERS[3..].contains(&row["allocator"].as_str().unwrap());
        assert_eq!(row["ns_per_op"].is_null(), by_simulator, "{row}");
    }
}

#[test]
fn captures_of_several_streams_use_memory_again_within_the_capture() {
    let rows = rows(&["peers", "captures/2/1000/10"]);
    let held = |allocator: &str| rows.iter().find(|row| row["allocator"] == allocator).unwrap();
    let ratio = |allocator: &str| held(allocator)["reserved_over_requested"].as_f64().unwrap();
    assert_eq!(rows.len(), 3, "the driver's allocations are nodes of the graph");
    assert!(ratio("Aquifer") < 1.5 && ratio("PyTorch (model)") > 6.0, "{rows:?}");
    assert_eq!(held("Aquifer")["peak_requested_bytes"], held("PyTorch (model)")["peak_requested_bytes"]);
}

#[test]
fn published_patterns_are_traces_for_other_programs() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("patterns");
    let written = bench(&["peers", "comb", "--traces", folder.to_str().unwrap()]);
    assert!(written.status.success(), "{}", errors(&written));
    let path = String::from_utf8(written.stdout).unwrap();
    let programs = aquifer_trace::input::load(path.trim().as_ref()).unwrap();
    assert_eq!((&*programs[0].name, programs[0].allocs()), ("comb", 5));
}

#[test]
fn published_patterns_of_waiting_are_timed() {
    let measured = rows(&["peers", "multi_stream_allocations/4/4/1"]);
    let times: Vec<f64> = measured.iter().map(|row| row["us_per_iteration"].as_f64().unwrap()).collect();
    assert_eq!(times.len(), PEERS.len());
    let (pools, bare) = times.split_at(4);
    assert!(pools.iter().all(|&us| (500.0..1000.0).contains(&us)), "four kernels of 500 µs at once: {times:?}");
    assert!(bare[0] > 2000.0, "each free waits for the device: {times:?}");
    let measured = rows(&["peers", "async_priming"]);
    let first = |benchmark: &str, allocator: &str| {
        let row = measured.iter().find(|row| row["benchmark"] == benchmark && row["allocator"] == allocator).unwrap();
        assert!(row["peak_reserved_bytes"].is_null() && row["clock"] == "virtual", "{row}");
        row["latency_to_first_us"].as_f64().unwrap()
    };
    for allocator in &PEERS[..3] {
        assert!(first("async_priming/primed", allocator) < 10.0, "{allocator}");
        assert!(first("async_priming/unprimed", allocator) > 100.0, "{allocator}");
    }
    let output = program(&["peers", "ascending"]).env("COLUMNS", "240").output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("peak reserved bytes") && text.contains("256.00 MiB"), "{text}");
}

#[test]
fn driver_calls_have_the_costs_of_the_model() {
    let calls = rows(&["calls", "--device", "sim:24GiB", "--rounds", "2"]);
    let create = |row: &&Value| row["call"] == "cuMemCreate" && row["bytes"] == 2 << 20 && row["benchmark"] == "calls";
    let create = calls.iter().find(create).unwrap();
    assert_eq!((create["median_us"].as_f64(), &create["modelled"]), (Some(27.06), &true.into()));
    assert!(create["pool"].is_null() && create["device_name"] == "Simulated H100 24 GiB", "{create}");
    let pooled = calls.iter().filter(|row| row["call"] == "cuMemAllocAsync" && row["bytes"] == 2 << 20);
    assert_eq!(pooled.map(|row| &row["pool"]).collect::<Vec<_>>(), ["cold", "warm"]);
    let pages: Vec<&Value> = calls.iter().filter(|row| row["benchmark"] == "bench_vmm").collect();
    assert_eq!(pages.len(), 4);
    assert!(pages.iter().all(|row| row["pages"] == 4096 && row["p50_us"] == row["max_us"]), "{pages:?}");
    let table = String::from_utf8(bench(&["calls", "calls", "--device", "sim:24GiB"]).stdout).unwrap();
    assert!(table.contains("\ncuMemCreate ") && table.contains("27.06"), "{table}");
    assert!(table.lines().count() < 35 && table.lines().all(|line| line.chars().count() <= 100), "{table}");
    let unmapped = rows(&["calls", "--device", "sim:24GiB,vmm=off", "--rounds", "1"]);
    assert!(unmapped.iter().all(|row| row["benchmark"] == "calls"), "{unmapped:?}");
}

#[test]
fn graphs_need_the_memory_of_one_pass_in_whatever_order_they_are_captured() {
    let rows = rows(&["graphs", "--quick", "--device", "sim:4GiB"]);
    assert_eq!(rows.len(), 7);
    for row in &rows {
        assert_eq!(bytes(row, "wrong_results"), 0, "{row}");
        assert!(number(row, "pool_over_pass") <= 1.1, "{row}");
        assert_eq!((bytes(row, "violations"), row["launch_driver_calls"].as_f64()), (0, Some(1.0)), "{row}");
    }
    for row in &rows[..4] {
        assert!(number(row, "pool_over_largest") <= 1.01, "{row}");
    }
    for row in &rows[4..6] {
        assert!(number(row, "held_over_allocated") <= 4.1, "a block for each stream: {row}");
    }
}

/// The rows of `transfer` on a device without jitter.
fn measured(args: &[&str]) -> Vec<Value> {
    rows(&[&["transfer", "--device", "sim:1GiB,jitter=off", "--rounds", "1"], args].concat())
}

#[test]
fn every_method_is_measured_and_pinned_copies_are_as_fast_as_the_driver_s() {
    let rows = measured(&["copies", "--max-mb", "16"]);
    let of = |direction: &str, method: &str| {
        let found = rows.iter().rfind(|row| row["direction"] == direction && row["method"] == method);
        found.unwrap_or_else(|| panic!("{direction} {method} is missing")).clone()
    };
    for direction in ["upload", "download"] {
        assert_eq!(of(direction, "pinned")["bytes"], 16 << 20);
        assert!(number(&of(direction, "pinned"), "of_driver_pinned") >= 0.99, "{}", of(direction, "pinned"));
        assert!(number(&of(direction, "driver pageable"), "gb_per_s") > 0.0);
        assert!(number(&of(direction, "rows"), "gb_per_s") > 0.0);
    }
    assert!(number(&of("on device", "copy"), "gb_per_s") > number(&of("upload", "pinned"), "gb_per_s"));
    assert!(number(&of("on device", "rows"), "gb_per_s") > 0.0);
    for row in &rows {
        let by_host = row["direction"] == "on host";
        assert_eq!(
            (&row["modelled"], &row["clock"]),
            (&json!(!by_host), &json!(if by_host { "host" } else { "virtual" }))
        );
        assert!(!["staged", "staged rows", "file"].contains(&row["method"].as_str().unwrap()), "{row}");
    }
}

/// They have no reference, and copies on the host have the clock of the host.
#[test]
fn copies_between_devices_are_measured() {
    let rows = measured(&["copies", "--max-mb", "16"]);
    for method in ["copy", "rows"] {
        let of = |row: &&Value| row["direction"] == "from peer" && row["method"] == method;
        let rows: Vec<&Value> = rows.iter().filter(of).collect();
        assert_eq!(rows.len(), 4, "sizes of {method}");
        for row in rows {
            assert!(number(row, "gb_per_s") > 0.0 && row["of_driver_pinned"].is_null(), "{row}");
            assert_eq!((&row["peer"], &row["route"]), (&json!("sim:1"), &json!("from device to device")), "{row}");
        }
    }
}

#[test]
fn batches_of_small_copies_save_calls() {
    let rows = measured(&["small", "--max-mb", "1"]);
    let small: Vec<&Value> = rows.iter().filter(|row| row["bytes"] == 4096).collect();
    assert_eq!(small.len(), 3);
    assert!(small.iter().all(|row| number(row, "speedup") >= 5.0), "{small:?}");
    for row in &rows {
        let (speedup, again) = (number(row, "speedup"), number(row, "single_us") / number(row, "batched_us"));
        assert!((again / speedup - 1.0).abs() < 0.02, "times have the digits that their ratio needs: {row}");
    }
}

#[test]
fn copies_overlap_with_kernels_and_each_other() {
    let rows = measured(&["overlap", "--max-mb", "16"]);
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| number(row, "overlap") >= 0.9), "{rows:?}");
}

/// With nvbandwidth's names; both directions of the link carry as much at the same time.
#[test]
fn both_ways_have_the_names_of_nvbandwidth_and_a_share_of_the_link() {
    let rows = measured(&["nvbandwidth", "--max-mb", "16"]);
    for direction in ["host_to_device", "device_to_host"] {
        for test in [format!("{direction}_memcpy_ce"), format!("{direction}_bidirectional_memcpy_ce")] {
            for method in ["driver", "transfer"] {
                let row = rows.iter().find(|row| row["test"] == *test && row["method"] == method).unwrap();
                assert_eq!(row["bytes"], 16 << 20, "{row}");
                assert!((0.9..=1.0).contains(&number(row, "of_link")), "{row}");
            }
        }
    }
    assert_eq!(rows.len(), 8);
    let slow = rows_of(&bench(&["transfer", "--device", "sim:1GiB,link=5", "nvbandwidth", "--max-mb", "1", "--json"]));
    assert!(slow.iter().all(|row| number(row, "gb_per_s") <= 5.0 && number(row, "of_link") > 0.5), "{slow:?}");
}

#[test]
fn scattered_blocks_are_swapped_both_ways() {
    let rows = measured(&["swap_blocks", "--max-mb", "1"]);
    // 256 × 4 KiB, 128 × 8 KiB, ... 8 × 128 KiB.
    assert_eq!(rows.len(), 6 * 4);
    for test in ["swap_blocks, in", "swap_blocks, out"] {
        let of = |method: &str| {
            let of = |row: &&Value| row["test"] == test && row["method"] == method && row["bytes"] == 4096;
            rows.iter().find(of).unwrap()
        };
        assert_eq!(of("driver")["copies"], 256);
        assert!(number(of("batch"), "gb_per_s") > number(of("driver"), "gb_per_s"), "{rows:?}");
    }
}

#[test]
fn a_model_is_loaded_with_cold_and_warm_page_cache() {
    let rows = measured(&["model", "--max-mb", "4"]);
    assert_eq!(rows.len(), if cfg!(target_os = "linux") { 4 } else { 2 });
    for row in &rows {
        assert_eq!((&row["tensors"], &row["clock"], &row["modelled"]), (&json!(291), &json!("host"), &json!(false)));
        assert!(bytes(row, "bytes") > 3 << 20 && bytes(row, "bytes") <= 4 << 20, "{row}");
        assert!(number(row, "seconds") > 0.0, "{row}");
    }
}

/// The stand-in for NVIDIA's driver, under the driver's name in a folder of the test.
#[cfg(target_os = "linux")]
mod gpu {
    use super::*;

    /// Runs the program where the driver has these GPUs.
    fn rows_on(devices: &str, args: &[&str]) -> (Vec<Value>, String) {
        let built = Path::new(env!("CARGO_BIN_EXE_aquifer-bench")).parent().unwrap();
        let folder: PathBuf = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
        std::fs::create_dir_all(&folder).unwrap();
        // Another test may have made it.
        let _ = std::os::unix::fs::symlink(built.join("deps/libaquifer_standin.so"), folder.join("libcuda.so.1"));
        let mut program = program(&[args, &["--json"]].concat());
        program.env_remove("CUDA_VISIBLE_DEVICES").env("LD_LIBRARY_PATH", &folder);
        let output = program.env("AQUIFER_STANDIN_DEVICES", devices).output().unwrap();
        assert!(errors(&output).contains("stand-in driver"), "the driver was not found: {}", errors(&output));
        (rows_of(&output), errors(&output))
    }

    #[test]
    fn copies_are_timed_by_the_host_with_those_that_are_staged() {
        let args = ["transfer", "copies", "small", "overlap", "--rounds", "1", "--max-mb", "1", "--device", "cuda:0"];
        for (devices, peer) in [("4GiB", None), ("4GiB;2GiB", Some("cuda:1"))] {
            let (rows, _) = rows_on(devices, &args);
            assert!(rows.iter().all(|row| row["clock"] == "host" && row["modelled"] == false), "{rows:?}");
            let of = |direction: &str, method: &str| {
                let of = |row: &&Value| row["direction"] == direction && row["method"] == method;
                rows.iter().filter(of).collect::<Vec<&Value>>()
            };
            let methods = [("upload", "staged"), ("upload", "staged rows"), ("upload", "file")];
            for (direction, method) in methods.into_iter().chain([("download", "staged"), ("download", "staged rows")])
            {
                let rows = of(direction, method);
                assert_eq!(rows.len(), 3, "sizes of {direction} {method}");
                // Shares are rounded; on a busy machine small ones may be 0.
                let is_measured = |row: &&Value| number(row, "us") > 0.0 && row["of_driver_pinned"].is_f64();
                assert!(rows.iter().all(is_measured), "{rows:?}");
            }
            let from_peer = [of("from peer", "copy"), of("from peer", "rows")].concat();
            assert_eq!(from_peer.len(), if peer.is_some() { 6 } else { 0 }, "two methods, three sizes: {from_peer:?}");
            assert!(from_peer.iter().all(|row| row["peer"].as_str() == peer), "{from_peer:?}");
        }
    }

    #[test]
    fn the_driver_s_calls_are_measured_and_its_pool_cold_and_warm() {
        let (rows, _) = rows_on("4GiB", &["calls", "--rounds", "3"]);
        assert!(rows.iter().all(|row| row["device"] == "cuda:0" && row["modelled"] == false), "{rows:?}");
        for (call, bytes) in [("cuMemAllocAsync", 2 << 20), ("cuMemFreeAsync", 2 << 20), ("cuMemAllocAsync", 512 << 20)]
        {
            let of = |row: &&Value| row["call"] == call && row["bytes"] == bytes;
            let pools: Vec<&Value> = rows.iter().filter(of).map(|row| &row["pool"]).collect();
            assert_eq!(pools, ["cold", "warm"], "{call} {bytes}");
        }
        for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemAlloc", "cuMemFree"] {
            let sizes = rows.iter().filter(|row| row["call"] == call && row["benchmark"] == "calls").count();
            assert!(sizes >= 3, "{call}: {sizes}");
        }
        assert!(rows.iter().all(|row| row["pool"].is_null() || row["rounds"] == 3));
    }

    #[test]
    fn sizes_that_do_not_fit_the_gpu_are_reported() {
        let (rows, said) = rows_on("4GiB", &["pairs", "--quick", "churn_1000"]);
        assert_eq!((rows.len(), bytes(&rows[0], "largest_bytes")), (1, 8 << 20), "{rows:?}");
        assert_eq!(said.matches("the device has room for blocks of at most 8.00 MiB").count(), 1, "{said}");
    }
}

#[test]
fn wrong_use_and_lack_of_memory_are_explained() {
    for (args, code, said) in [
        (&["pairs", "nothing"][..], 2, "there are hot_512b, hot_1mib"),
        (&["scale", "hot_1mib"], 2, "there are nothing, streams, pools"),
        (&["peers", "nothing"], 2, "there are random_allocations/1000/1"),
        (&["peers", "--config", "backing:pytorch"], 2, "asks for a model of PyTorch's allocator"),
        (&["pairs", "--config", "", "--config", ""], 2, "takes one --config"),
        (&["calls", "--rounds", "0"], 2, "--rounds"),
        (&["transfer", "--max-mb", "0"], 2, "--max-mb"),
        (&["calls", "bench_vmm", "--config", "limit_mb:100"], 0, "warning: --config has no effect here"),
        (&["pairs", "--quick", "churn_1000", "--config", "limit_mb:100"], 3, "error: churn_1000: "),
        (&["transfer", "small", "--device", "sim:1MiB"], 3, "error: small: "),
    ] {
        let output = bench(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(said), "{args:?}: {}", errors(&output));
    }
}
