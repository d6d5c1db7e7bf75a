//! `bench`.

use super::*;

#[test]
fn bench_measures_both_allocators() {
    let rows = rows(0, &["bench", "--quick", "--filter", "hot_"]);
    let names = ["hot_512b", "hot_1mib", "hot_64mib"];
    assert_eq!(rows.len(), 2 * names.len());
    for ((pair, name), largest) in rows.chunks(2).zip(names).zip([512, 1 << 20, 64 << 20]) {
        for (row, allocator) in pair.iter().zip(["aquifer", "offset-allocator"]) {
            assert_eq!(row.as_object().unwrap().len(), 8);
            assert_eq!((row["benchmark"].as_str(), row["allocator"].as_str()), (Some(name), Some(allocator)));
            assert_eq!((bytes(row, "threads"), bytes(row, "live")), (1, 1));
            assert!(row["ns_per_pair"].as_f64().unwrap() > 0.0);
            assert_eq!((row["device"].as_str(), bytes(row, "largest_bytes")), (Some("sim:80GiB"), largest));
            assert_eq!(row["rate_vs_one_thread"], 1.0);
        }
    }
}

#[test]
fn bench_compares_several_threads_with_one() {
    let rows = rows(0, &["bench", "--quick", "--filter", "threads"]);
    let threads: Vec<u64> = rows.iter().map(|row| bytes(row, "threads")).collect();
    assert_eq!(threads, [1, 1, 2, 2, 4, 4, 1, 1, 2, 2, 4, 4]);
    for row in &rows {
        let rate = row["rate_vs_one_thread"].as_f64().unwrap();
        assert!(rate > 0.0 && (bytes(row, "threads") > 1 || (rate - 1.0).abs() < 1e-9), "{row}");
    }
}

#[test]
fn bench_passes_blocks_between_threads() {
    let rows = rows(0, &["bench", "--quick", "--filter", "handover"]);
    let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
    assert_eq!(names, ["aquifer", "offset-allocator"]);
    assert!(rows.iter().all(|row| row["ns_per_pair"].as_f64().unwrap() > 0.0 && bytes(row, "threads") == 2));
}

#[test]
fn bench_compares_raw_pointers_with_handles() {
    let rows = rows(0, &["bench", "--quick", "--filter", "raw_"]);
    let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
    assert_eq!(names, ["aquifer", "aquifer-handles"].repeat(3));
    let live: Vec<u64> = rows.iter().map(|row| bytes(row, "live")).collect();
    assert_eq!(live, [1, 1, 10_000, 10_000, 1, 1]);
}

#[test]
fn bench_scale_measures_each_operation_at_three_numbers() {
    let measured = rows(0, &["bench", "--scale", "--quick", "--filter", "s"]);
    let mut names: Vec<&str> = measured.iter().filter_map(|row| row["series"].as_str()).collect();
    names.dedup();
    assert_eq!(names, ["streams", "pools", "growables", "graphs"]);
    for (series, least, of_it) in [
        ("streams", 4, ["first block", "pair in turn", "drop"]),
        ("pools", 8, ["make", "drop", "snapshot after"]),
        ("growables", 8, ["make", "shrink", "drop, miss"]),
        ("graphs", 8, ["capture", "launch", "pair after"]),
    ] {
        for operation in of_it.into_iter().chain(["pair", "miss", "snapshot", "fragmentation", "refusal"]) {
            let row = |row: &&Value| row["series"] == series && row["operation"] == operation;
            let found: Vec<&Value> = measured.iter().filter(row).collect();
            let numbers: Vec<u64> = found.iter().map(|row| bytes(row, "n")).collect();
            assert_eq!(numbers, [least, 4 * least, 16 * least], "{series}: {operation}");
            for (at, row) in found.into_iter().enumerate() {
                assert_eq!(row.as_object().unwrap().len(), 8);
                assert_eq!(row["device"].as_str(), Some("sim:80GiB"));
                assert!(row["ns_per_operation"].as_f64().unwrap() > 0.0);
                assert_eq!(row["exponent"].is_null(), at == 0);
                let hot = |key: &str| row[key].as_f64();
                assert!(hot("hot_p99_ns") <= hot("hot_max_ns"), "{row}");
                assert_eq!(row["hot_p99_ns"].is_null(), row["hot_max_ns"].is_null());
            }
        }
    }
}

#[test]
fn bench_scale_measures_blocks_with_segments_too() {
    for series in ["waiting", "live", "nothing"] {
        let measured = rows(0, &["bench", "--scale", "--quick", "--filter", series, "--config", "backing:segments"]);
        assert!(measured.iter().all(|row| row["series"].as_str() == Some(series)));
        for operation in ["pair", "snapshot", "fragmentation"] {
            assert!(measured.iter().any(|row| row["operation"] == operation), "{series}: {operation}");
        }
        for operation in ["miss", "refusal"] {
            assert_eq!(measured.iter().any(|row| row["operation"] == operation), series != "waiting", "{operation}");
        }
    }
}

#[test]
fn bench_scale_prints_a_table_and_lists_its_series() {
    let output = stress(&["bench", "--scale", "--quick", "--filter", "nothing"]);
    assert!(
        errors(&output).contains("bench: 1 of 1: nothing"),
        "bench does not print progress in lines without a terminal"
    );
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success() && text.contains("spin") && text.contains("hot p99 µs"), "{text}");
    let output = stress(&["bench", "--scale", "--quick", "--filter", "growables", "--config", "backing:segments"]);
    assert!(output.status.success() && output.stdout.is_empty(), "memory that grows is mapped");
    assert!(errors(&output).contains("note: growables: not measured"), "{}", errors(&output));
    let output = stress(&["bench", "--scale", "--filter", "hot_1mib"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("there are nothing, streams, pools"), "{}", errors(&output));
}

#[test]
fn bench_draws_its_rows_and_series() {
    for (args, words) in [
        (&["bench", "--quick", "--filter", "hot_1mib"][..], ["hot_1mib", "ns per pair"]),
        (&["bench", "--scale", "--quick", "--filter", "pools"], ["pair in turn", "snapshot after"]),
    ] {
        let plot = Scratch::new("plot.svg", b"");
        let output = stress(&[args, &["--plot", plot.path()]].concat());
        assert!(output.status.success() && errors(&output).contains(plot.path()), "{}", errors(&output));
        let svg = std::fs::read_to_string(plot.path()).unwrap();
        assert!(words.iter().all(|word| svg.contains(word)), "{svg}");
    }
    let output = stress(&["bench", "--quick", "--filter", "hot_1mib", "--plot", "/no/such/folder/plot.svg"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("/no/such/folder/plot.svg"), "{}", errors(&output));
    let output = stress(&["bench", "--plot", "plot.png"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(errors(&output).contains("plots are written as .svg files"), "{}", errors(&output));
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
    let rows = rows(0, &["bench", "--peers", "--quick", "--filter", "comb"]);
    let held = |benchmark: &str| -> Vec<u64> {
        let rows: Vec<&Value> = rows.iter().filter(|row| row["benchmark"] == benchmark).collect();
        let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
        assert_eq!(names, PEERS);
        rows.iter().map(|row| bytes(row, "peak_reserved_bytes") >> 20).collect()
    };
    // The devlog's figures of PyTorch: four segments of 16 MiB and one of 32, and three pages of 20
    // MiB more than four.
    assert_eq!(held("comb"), [64, 96, 100, 64, 64], "the name itself, not comb_1gib");
    for row in &rows {
        assert!(row["clock"].is_null() && bytes(row, "ooms") == 0, "{row}");
        assert!(bytes(row, "driver_calls") > 0 && row["driver_time_modelled_us"].as_f64().unwrap() > 0.0, "{row}");
        let by_simulator = PEERS[3..].contains(&row["allocator"].as_str().unwrap());
        assert_eq!(row["ns_per_op"].is_null(), by_simulator, "{row}");
    }
}

#[test]
fn captures_of_several_streams_use_memory_again_within_the_capture() {
    let rows = rows(0, &["bench", "--peers", "--quick", "--filter", "captures/2/1000/10"]);
    let held = |allocator: &str| rows.iter().find(|row| row["allocator"] == allocator).unwrap();
    let ratio = |allocator: &str| held(allocator)["reserved_over_requested"].as_f64().unwrap();
    assert_eq!(rows.len(), 3, "the driver's allocations are nodes of the graph");
    assert!(ratio("Aquifer") < 1.5 && ratio("PyTorch (model)") > 6.0, "{rows:?}");
    assert_eq!(held("Aquifer")["peak_requested_bytes"], held("PyTorch (model)")["peak_requested_bytes"]);
}

#[test]
fn published_patterns_are_traces_for_other_programs() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("patterns");
    let folder = folder.to_str().unwrap();
    let written = stress(&["bench", "--peers", "--filter", "comb", "--traces", folder]);
    assert!(written.status.success(), "{}", errors(&written));
    let path = String::from_utf8(written.stdout).unwrap();
    let replayed = &rows(0, &["replay", "--repeat", "1", "--config", "backing:pytorch", path.trim()])[0];
    assert_eq!((&replayed["trace"], bytes(replayed, "peak_reserved_bytes")), (&"comb".into(), 96 << 20));
    assert_eq!(stress(&["bench", "--traces", folder]).status.code(), Some(2), "only --peers has programs");
}

#[test]
fn published_patterns_of_waiting_are_timed() {
    let measured = rows(0, &["bench", "--peers", "--filter", "multi_stream_allocations/4/4/1"]);
    let times: Vec<f64> = measured.iter().map(|row| row["us_per_iteration"].as_f64().unwrap()).collect();
    assert_eq!(times.len(), PEERS.len());
    let (pools, bare) = times.split_at(4);
    assert!(pools.iter().all(|&us| (500.0..1000.0).contains(&us)), "four kernels of 500 µs at once: {times:?}");
    assert!(bare[0] > 2000.0, "each free waits for the device: {times:?}");
    let measured = rows(0, &["bench", "--peers", "--filter", "async_priming"]);
    let first = |benchmark: &str, allocator: &str| {
        let row = measured.iter().find(|row| row["benchmark"] == benchmark && row["allocator"] == allocator).unwrap();
        assert!(row["peak_reserved_bytes"].is_null() && row["clock"] == "virtual", "{row}");
        row["latency_to_first_us"].as_f64().unwrap()
    };
    for allocator in &PEERS[..3] {
        assert!(first("async_priming/primed", allocator) < 10.0, "{allocator}");
        assert!(first("async_priming/unprimed", allocator) > 100.0, "{allocator}");
    }
    for (args, said) in [
        (["--peers", "--filter", "nothing"].as_slice(), "there are random_allocations/1000/1"),
        (&["--peers", "--scale"], "cannot be used with"),
        (&["--peers", "--config", "backing:pytorch"], "asks for a model of PyTorch's allocator"),
    ] {
        let output = stress(&[&["bench"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(errors(&output).contains(said), "{}", errors(&output));
    }
    let output = stress(&["bench", "--peers", "--filter", "ascending"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(" holds ") && text.contains("256.00 MiB"), "{text}");
}
