//! `replay`: its figures and exit codes.

use super::compare::with_splitting;
use super::*;

pub(super) const REPLAY_KEYS: [&str; 44] = [
    "trace",
    "config",
    "device",
    "lag",
    "peak_reserved_bytes",
    "reserved_over_requested",
    "peak_reserved_bytes_by_pass",
    "ooms",
    "warm_ooms",
    "violations",
    "ns_per_op",
    "yardstick_ns_per_op",
    "driver_time_modelled_us",
    "warm_driver_calls",
    "warm_driver_time_modelled_us",
    "worst_alloc_us",
    "allocs",
    "lag_bound_over_requested",
    "stalls",
    "events",
    "peak_allocated_bytes",
    "first_pass_ns_per_op",
    "seconds",
    "driver_calls",
    "driver_calls_by_pass",
    "driver_time_modelled_us_by_pass",
    "driver_allocs",
    "driver_allocs_measured_us",
    "worst_alloc_measured_us",
    "warm_driver_allocs",
    "warm_worst_alloc_us",
    "warm_stalls",
    "remaps",
    "granules_moved",
    "frames_split",
    "retries",
    "events_recorded",
    "stream_waits",
    "pool_ns_per_op",
    "pool_first_pass_ns_per_op",
    "pool_seconds",
    "pool_peak_reserved_bytes",
    "pool_ooms",
    "peak_requested_bytes",
];

#[test]
fn replay_prints_exactly_the_documented_keys() {
    let file = data("fsdp_start.trace");
    let output = stress(&["replay", "--json", &file]);
    let line = String::from_utf8(output.stdout).unwrap();
    assert_eq!(keys(line.trim()), with_splitting(&REPLAY_KEYS));
    let output = stress(&["replay", "--json", "--yardstick", "--repeat", "2", &file]);
    let line = String::from_utf8(output.stdout).unwrap();
    assert_eq!(keys(line.trim()), with_splitting(&REPLAY_KEYS));
    let row: Value = serde_json::from_str(&line).unwrap();
    assert!(row["ns_per_op"].as_f64().unwrap() > 0.0 && row["yardstick_ns_per_op"].as_f64().unwrap() > 0.0);
    assert_eq!((row["trace"].as_str(), row["device"].as_str()), (Some("fsdp_start"), Some("sim:80GiB")));
    assert_eq!(bytes(&row, "violations"), 0);
}

#[test]
fn bundled_traces_have_the_figures_of_pytorch() {
    // Trace, options, peaks of allocated and reserved bytes, driver allocations, as in PyTorch.
    type Figures = (u64, u64, u64);
    let figures: [(&str, [(&str, Figures); 3]); 2] = [
        (
            "gpt2_fp32.trace.gz",
            [
                ("", (29_936_449_024, 32_388_415_488, 212)),
                (",max_split_size_mb:128", (0, 31_251_759_104, 239)),
                (",roundup_power2_divisions:8", (0, 33_181_138_944, 214)),
            ],
        ),
        (
            "gnn_random_graphs.trace.gz",
            [
                ("", (21_222_508_032, 67_649_929_216, 50)),
                (",max_split_size_mb:128", (0, 192 << 30, 0)),
                (",roundup_power2_divisions:8", (0, 70_801_948_672, 50)),
            ],
        ),
    ];
    for (file, configs) in figures {
        for (options, (allocated, reserved, calls)) in configs {
            let config = format!("backing:pytorch{options}");
            let file = data(file);
            let rows = rows(0, &["replay", "--device", "sim:192GiB", "--config", &config, "--repeat", "1", &file]);
            let [row] = &rows[..] else { panic!("{rows:?}") };
            assert_eq!(bytes(row, "peak_reserved_bytes"), reserved, "{file} {config}");
            assert!(allocated == 0 || bytes(row, "peak_allocated_bytes") == allocated, "{file} {config}");
            assert!(calls == 0 || bytes(&row["driver_calls"], "cuMemAlloc") == calls, "{file} {config}");
            assert_eq!((bytes(row, "ooms"), bytes(row, "violations")), (0, 0));
            assert_eq!(row["config"], Value::from(config));
        }
    }
}

/// A program that holds 38 MiB at first. Later, its first block splits another segment.
const GROWS: &[u8] = b"a 0 5242880 0\na 1 18874368 0\na 2 15728640 0\nf 0 0\nf 1 0\nf 2 0\n";

#[test]
fn what_later_passes_hold_is_shown() {
    let file = Scratch::new("grows.trace", GROWS);
    let options = ["--device", "sim:1GiB", "--config", "backing:pytorch", file.path()];
    let row = |repeat: &str| rows(0, &[&["replay", "--repeat", repeat], &options[..]].concat()).remove(0);
    let (one, three) = (row("1"), row("3"));
    assert_eq!(one["peak_reserved_bytes_by_pass"], serde_json::json!([38 << 20]));
    assert_eq!(bytes(&one, "peak_reserved_bytes"), 38 << 20);
    assert_eq!(three["peak_reserved_bytes_by_pass"], serde_json::json!([38 << 20, 54 << 20, 54 << 20]));
    assert_eq!(bytes(&three, "peak_reserved_bytes"), 54 << 20);
    assert!((three["reserved_over_requested"].as_f64().unwrap() - 54.0 / 38.0).abs() < 1e-9, "{three}");
    let replayed = program(&[&["replay", "--repeat", "3"], &options[..]].concat()).env("COLUMNS", "200").output();
    let text = String::from_utf8(replayed.unwrap().stdout).unwrap();
    for part in ["holds, first pass", "holds, last pass", "54.00 MiB", " 1.421 ", " 1.000 "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = String::from_utf8(stress(&[&["replay", "--repeat", "1"], &options[..]].concat()).stdout).unwrap();
    assert!(!text.contains("pass") && !text.contains("OOMs"), "only figures that say something: {text}");
    let rows = rows(0, &[&["compare", "--repeat", "3"], &options[..]].concat());
    assert_eq!(bytes(&rows[0], "peak_reserved_bytes"), 54 << 20);
    assert_eq!(rows[0]["peak_reserved_bytes_by_pass"], three["peak_reserved_bytes_by_pass"]);
    for row in &rows {
        assert_eq!(row["first_pass_reserved_over_requested"], 1.0, "{row}");
        assert_eq!(row["reserved_over_requested"], three["reserved_over_requested"], "{row}");
    }
}

/// What peaks there are is what the allocator counts.
#[test]
fn expandable_segments_have_figures_of_each_pass() {
    let file = Scratch::new("grows.trace", GROWS);
    let row = &rows(0, &["replay", "--repeat", "3", "--config", "backing:expandable", file.path()])[0];
    let passes = row["peak_reserved_bytes_by_pass"].as_array().unwrap();
    assert_eq!(passes.len(), 3);
    assert_eq!(passes.iter().filter_map(Value::as_u64).max(), Some(bytes(row, "peak_reserved_bytes")), "{row}");
}

/// A program with small blocks in all frames, which only splitting frees for its last request.
fn split_program() -> Scratch {
    let mut text = "# name: split\n".to_owned();
    text.extend((500..508).map(|id| format!("a {id} 67108864 0\n")));
    text.extend((500..508).map(|id| format!("f {id} 0\n")));
    text.extend((1..=256).map(|id| format!("a {id} 2097152 0\n")));
    text.extend((1..=256).filter(|id| id % 8 != 1).map(|id| format!("f {id} 0\n")));
    text += "a 300 440401920 0\n";
    Scratch::new("split.trace", text.as_bytes())
}

#[test]
fn figures_are_of_the_default_and_split_frames_are_shown_where_they_differ() {
    let file = split_program();
    let options = ["--config", "frame_mb:16", file.path()];
    let splitting = "frame_mb:16,split_frames:on";
    let replay = |code, device| rows(code, &[&["replay", "--repeat", "2", "--device", device], &options[..]].concat());
    let [off] = &replay(3, "sim:514MiB")[..] else { panic!("a row for each of the options") };
    let on = &off["with_split_frames"];
    assert_eq!((&off["config"], &on["config"]), (&"frame_mb:16".into(), &splitting.into()));
    assert_eq!((bytes(off, "ooms"), bytes(off, "frames_split")), (1, 0));
    assert_eq!((bytes(on, "ooms"), bytes(on, "warm_ooms"), bytes(on, "frames_split") >= 20), (0, 0, true), "{on}");
    assert_eq!(replay(0, "sim:4GiB").len(), 1, "nothing is split where memory suffices");
    // Options that say it are played alone.
    for said in ["split_frames:off", "split_frames:on"] {
        let said = format!("frame_mb:16,{said}");
        let output = stress(&["replay", "--json", "--device", "sim:514MiB", "--config", &said, file.path()]);
        assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1, "{said}");
    }
    let [off] = &rows(0, &[&["fit"], &options[..]].concat())[..] else { panic!("a row for each of the options") };
    let on = &off["with_split_frames"];
    assert_eq!((&off["config"], &on["config"]), (&"frame_mb:16".into(), &splitting.into()));
    assert!(bytes(on, "smallest_device_bytes") < bytes(off, "smallest_device_bytes"), "{off} {on}");
    let compared = rows(0, &[&["compare", "--repeat", "1"], &options[..]].concat());
    let [trace, mean] = &compared[..] else { panic!("{compared:?}") };
    let smallest = [trace, &trace["with_split_frames"]].map(|row| &row["smallest_device_bytes"]);
    assert_eq!(smallest, [&off["smallest_device_bytes"], &on["smallest_device_bytes"]], "{compared:?}");
    assert_eq!((&mean["row"], &mean["with_split_frames"]["config"]), (&"mean".into(), &splitting.into()));
    let explained = &rows(0, &[&["explain", "--device", "sim:514MiB"], &options[..]].concat())[0];
    let allocators = explained["allocators"].as_array().unwrap();
    let ooms = |config: &str| bytes(allocators.iter().find(|one| one["config"] == config).unwrap(), "ooms");
    assert_eq!((ooms("frame_mb:16"), ooms(splitting)), (1, 0));
    let advised = explained["advice"].as_array().unwrap().iter().find(|one| one["config"] == splitting);
    let text = advised.unwrap()["text"].as_str().unwrap();
    assert!(text.contains("one thread enqueues all work"), "{text}");
}

#[test]
fn options_that_change_nothing_have_no_rows() {
    let file = Scratch::new("one.trace", b"a 0 30000000 0\nf 0 0\n");
    for command in ["replay", "fit"] {
        assert_eq!(rows(0, &[command, file.path()]).len(), 1, "{command}");
    }
    assert_eq!(rows(0, &["compare", "--config", "", "--repeat", "1", file.path()]).len(), 2, "a program and a mean");
}

#[test]
fn the_driver_s_pool_plays_the_same_program() {
    let trace = data("gpt2_fp32.trace.gz");
    let row = &rows(0, &["--device", "sim:40GiB", "replay", "--repeat", "2", "--driver-pool", &trace])[0];
    // The pool does not round sizes, and the simulated one keeps no unused memory.
    assert_eq!((&row["pool_peak_reserved_bytes"], &row["pool_ooms"]), (&row["peak_requested_bytes"], &0.into()));
    for key in ["ns_per_op", "first_pass_ns_per_op", "seconds"] {
        assert!(row[format!("pool_{key}")].as_f64().unwrap() > 0.0 && row[key].as_f64().unwrap() > 0.0, "{key}: {row}");
    }
}

#[test]
fn a_snapshot_replays_as_the_trace_of_the_same_run() {
    let files = ["fsdp_start.trace", "fsdp_start.pickle.gz", "fsdp_start.json.gz"].map(data);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let mut rows = rows(
        0,
        &[&["replay", "--device", "sim:192GiB", "--config", "backing:segments,cross_stream:off"], &files[..]].concat(),
    );
    assert_eq!(rows.len(), 3);
    let mut names = std::collections::BTreeSet::new();
    for row in &mut rows {
        let row = row.as_object_mut().unwrap();
        // Files of the same name differ by their paths.
        let name = row.remove("trace").unwrap().as_str().unwrap().to_owned();
        assert!(name.starts_with("fsdp_start (") && names.insert(name));
        // Blocks that a pass leaves are freed in another order, so later passes differ.
        row.retain(|key, _| !["ns_per_op", "seconds", "warm_", "by_pass"].iter().any(|part| key.contains(part)));
    }
    assert_eq!(rows[0], rows[1]);
    assert_eq!(rows[0], rows[2]);
}

#[test]
fn configs_are_compared_in_one_run_and_figures_are_repeatable() {
    let file = data("gnn_random_graphs.trace.gz");
    let args = ["replay", "--repeat", "1", "--config", "", "--config", "backing:pytorch,max_split_size_mb:128", &file];
    let [one, two] = [rows(0, &args), rows(0, &args)];
    assert_eq!(one.len(), 2);
    assert_eq!(
        (one[0]["config"].as_str(), one[1]["config"].as_str()),
        (Some(""), Some("backing:pytorch,max_split_size_mb:128"))
    );
    for (one, two) in one.iter().zip(&two) {
        assert_eq!(one["ns_per_op"], one["first_pass_ns_per_op"]);
        let keys = ["peak_reserved_bytes", "driver_calls", "driver_time_modelled_us", "worst_alloc_us"];
        let figures = |row: &Value| keys.map(|key| row[key].clone());
        assert_eq!(figures(one), figures(two));
    }
    let output = stress(&args);
    assert!(String::from_utf8(output.stdout).unwrap().lines().count() > 4, "a table");
}

#[test]
fn driver_time_is_modelled_for_first_and_later_passes() {
    let file = data("gpt2_fp32.trace.gz");
    let row = |args: &[&str]| rows(0, &[&["replay", "--device", "sim:192GiB", &file], args].concat()).remove(0);
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key} in {row}"));
    let one = row(&["--repeat", "1", "--config", "backing:pytorch"]);
    let allocations = bytes(&one["driver_calls"], "cuMemAlloc");
    assert_eq!(bytes(&one, "driver_allocs"), allocations, "each took one segment");
    assert_eq!(bytes(&one, "allocs") * 2, bytes(&one, "events"));
    let (all, worst) = (number(&one, "driver_time_modelled_us"), number(&one, "worst_alloc_us"));
    #[expect(clippy::cast_precision_loss, reason = "a small count")]
    let least = allocations as f64 * 66.0;
    assert!(all >= least && (66.0..all).contains(&worst), "{one}");
    assert!(one["driver_allocs_measured_us"].is_null() && one["worst_alloc_measured_us"].is_null(), "{one}");
    for key in ["warm_driver_calls", "warm_driver_allocs", "warm_driver_time_modelled_us", "warm_worst_alloc_us"] {
        assert!(one[key].is_null(), "{key} in {one}");
    }
    let calls = |row: &Value| row["driver_calls"].as_object().unwrap().values().filter_map(Value::as_u64).sum::<u64>();
    let warm = row(&["--repeat", "3", "--config", "backing:pytorch"]);
    assert_eq!(warm["driver_calls_by_pass"], serde_json::json!([calls(&warm), 0, 0]));
    assert_eq!((number(&warm, "warm_driver_calls"), number(&warm, "warm_worst_alloc_us")), (0.0, 0.0));
    let uncached = row(&["--repeat", "3", "--config", "no_cache:True"]);
    let passes: Vec<u64> =
        uncached["driver_calls_by_pass"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    // Blocks that a pass leaves are released in the next one.
    assert!(passes[0] == calls(&uncached) && passes[1] > passes[0] && passes[1] == passes[2], "{passes:?}");
    assert!(number(&uncached, "warm_driver_time_modelled_us") > number(&uncached, "driver_time_modelled_us"));
    assert_eq!(bytes(&uncached, "driver_allocs"), bytes(&uncached, "allocs"));
}

#[test]
fn a_device_may_lag() {
    let file = Scratch::new("two.trace", b"a 0 30000000 0\nr 0 1\nf 0 0\na 1 30000000 0\nf 1 0\n");
    let row = |lag: &str, device: &str, code| {
        rows(
            code,
            &["replay", "--repeat", "2", "--lag", lag, "--device", device, "--config", "backing:segments", file.path()],
        )
        .remove(0)
    };
    // The device has memory for one block only: the second one needs that of the first, which
    // another stream used.
    for (lag, stalls) in [("0", 0), ("1000", 1)] {
        let small = row(lag, "sim:32MiB", 0);
        assert_eq!(
            (small["lag"].to_string(), bytes(&small, "stalls"), bytes(&small, "violations")),
            (lag.into(), stalls, 0)
        );
    }
    let large = row("1000", "sim:1GiB", 0);
    assert_eq!((bytes(&large, "stalls"), &large["peak_reserved_bytes_by_pass"][0]), (0, &(60 << 20).into()), "{large}");
    let at_once = row("0", "sim:1GiB", 0);
    assert_eq!(
        (bytes(&at_once, "peak_reserved_bytes"), &at_once["lag_bound_over_requested"]),
        (30 << 20, &Value::Null)
    );
    let two_streams = Scratch::new("streams.trace", b"a 0 30000000 0\nr 0 1\nf 0 0\na 1 30000000 1\nf 1 1\n");
    let row = rows(0, &["replay", "--repeat", "1", "--lag", "1000", two_streams.path()]).remove(0);
    assert_eq!(row["lag_bound_over_requested"], 2.0, "each stream needs its own: {row}");
}

#[test]
fn lack_of_memory_is_counted_and_has_its_own_code() {
    let file = data("gpt2_fp32.trace.gz");
    let rows = rows(3, &["replay", "--device", "sim:20GiB", "--repeat", "1", &file]);
    assert!(bytes(&rows[0], "ooms") > 0 && bytes(&rows[0], "retries") >= bytes(&rows[0], "ooms"), "{rows:?}");
    assert!(bytes(&rows[0], "peak_reserved_bytes") <= 20 << 30);
    let output = stress(&["replay", "--device", "sim:20GiB", "--repeat", "1", &file]);
    let said =
        format!("out of memory: gpt2_fp32 with the defaults: {} requests were refused in one pass; ", rows[0]["ooms"]);
    assert!(errors(&output).contains(&said) && errors(&output).contains("fit finds"), "{}", errors(&output));
}

#[test]
fn a_failing_driver_ends_the_replay_of_a_program_only() {
    let file = data("fsdp_start.trace");
    let output = stress(&["replay", "--json", "--device", "sim:80GiB,fault=any#40:999", &file, &file]);
    assert_eq!(output.status.code(), Some(1));
    let errors = errors(&output);
    assert_eq!(errors.matches("error: fsdp_start: event ").count(), 2, "{errors}");
    assert!(output.stdout.is_empty());
}

#[test]
fn damaged_files_are_named_and_the_others_still_replayed() {
    let gzip = std::fs::read(data("gpt2_fp32.trace.gz")).unwrap();
    let pickle = std::fs::read(data("fsdp_start.pickle.gz")).unwrap();
    let cases: [(&str, &[u8], &str); 10] = [
        ("empty.trace", b"", "the file is empty"),
        ("blank.trace", b"# name: nothing\n\n\n", "the file has no events"),
        ("text.trace", b"hello\n", "not an allocation trace"),
        ("line.trace", b"# name: x\na 0 1024 0\na 1 many 0\n", ":3: \"many\" is not a valid"),
        ("twice.trace", b"a 0 1024 0\nf 0 0\nf 0 0\n", ":3: ID 0 is not allocated"),
        ("huge.trace", b"a 0 18446744073709551615 0\na 1 18446744073709551615 0\n", ":2: the bytes allocated exceed"),
        ("cut.trace.gz", &gzip[..gzip.len() / 2], "the gzip data is incomplete"),
        ("followed.trace.gz", &[&gzip[..], b"x"].concat(), "the gzip data is incomplete"),
        ("cut.pickle.gz", &pickle[..pickle.len() / 2], "the gzip data is incomplete"),
        ("snapshot.json", b"{\"segments\": [], \"device_traces\": [[{]]}", "line 1"),
    ];
    let good = data("fsdp_start.trace");
    for (name, content, reason) in cases {
        let file = Scratch::new(name, content);
        for command in ["replay", "fit"] {
            let output = stress(&[command, "--json", "--config", "backing:segments", file.path(), &good]);
            let errors = errors(&output);
            assert_eq!(output.status.code(), Some(4), "{name}: {errors}");
            assert!(errors.contains(file.path()) && errors.contains(reason), "{name}: {errors}");
            assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1, "{name}");
        }
    }
    let output = stress(&["replay", "/no/such/file.trace"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(errors(&output).contains("/no/such/file.trace: "));
}

/// The next file is still replayed.
#[test]
#[cfg(target_os = "linux")]
fn a_file_that_needs_too_much_memory_is_an_error() {
    let lines: String = (0..3_000_000).map(|id| format!("a {id} 512 0\n")).collect();
    let large = Scratch::new("large.trace", lines.as_bytes());
    let script = r#"ulimit -v 150000 && exec "$@""#;
    let run = Command::new("bash")
        .args(["-c", script, "bash", env!("CARGO_BIN_EXE_aquifer-stress"), "--json", "--device", "sim:1GiB", "replay"])
        .args([large.path(), &data("fsdp_start.trace")])
        .output();
    let Ok(output) = run else {
        eprintln!("SKIPPED: there is no bash to limit the address space with");
        return;
    };
    assert_eq!(rows_of(4, &output).len(), 1, "{}", errors(&output));
    assert!(errors(&output).contains("the host does not have enough memory for its content"), "{}", errors(&output));
}

#[test]
fn refusals_in_later_passes_are_reported_too() {
    let file = Scratch::new("later.trace", b"a 0 1000000 0\nf 0 0\n");
    // The first pass makes one call, the second one several.
    let faults: String = (2..50).map(|nth| format!(",fault=cuMemAlloc#{nth}:out_of_memory")).collect();
    let device = format!("sim:1GiB{faults}");
    let options = ["--device", &device, "--config", "backing:segments,no_cache:True"];
    let rows = rows(3, &[&["replay", "--repeat", "2", file.path()], &options[..]].concat());
    assert_eq!((bytes(&rows[0], "ooms"), bytes(&rows[0], "warm_ooms")), (0, 1), "{rows:?}");
}

#[test]
fn requests_that_no_device_can_serve_are_ooms() {
    let file = Scratch::new("impossible.trace", b"a 0 18446744073709551615 0\nf 0 0\na 1 0 3\nr 1 4\nf 1 3\n");
    let rows = rows(3, &["replay", "--yardstick", file.path()]);
    assert_eq!((bytes(&rows[0], "ooms"), bytes(&rows[0], "events")), (1, 4));
    let output = stress(&["fit", file.path()]);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
}

#[test]
fn a_program_without_events_has_no_time_per_event() {
    let file = Scratch::new("empty.trace", b"# name: nothing\ni 1\n");
    let file = file.path();
    let row = &rows(0, &["replay", "--yardstick", file])[0];
    assert_eq!(row["events"], 0);
    assert!(row["ns_per_op"].is_null() && row["first_pass_ns_per_op"].is_null(), "{row}");
    let output = stress(&["replay", "--yardstick", file]);
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.contains("nothing")).unwrap();
    assert!(line.contains("0 bytes") && !text.contains("ns/op"), "{text}");
}

#[test]
fn a_program_too_large_for_the_default_device_is_given_a_larger_one() {
    let file = Scratch::new("large.trace", b"# name: large\na 0 60000000000 0\na 1 50000000000 0\nf 0 0\nf 1 0\n");
    let output = stress(&["replay", file.path()]);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
    let note = "note: large does not finish on sim:80GiB, the default; it does with --device sim:103GiB";
    assert!(errors(&output).contains(note), "{}", errors(&output));
    let row = &rows(0, &["replay", "--device", "sim:103GiB", file.path()])[0];
    assert_eq!((bytes(row, "ooms"), bytes(row, "warm_ooms")), (0, 0));
    let chosen = stress(&["replay", "--device", "sim:80GiB", file.path()]);
    assert!(!errors(&chosen).contains("does not finish"), "a device that was asked for: {}", errors(&chosen));
    let limited = stress(&["replay", "--config", "limit_mb:1024", file.path()]);
    assert!(errors(&limited).contains("for the limit of 1.00 GiB that the options set"), "{}", errors(&limited));
}

#[test]
fn errors_are_one_short_line_whatever_the_input() {
    let long = "x".repeat(10_000);
    for content in [
        format!("# name: {long}\na 0 1 0\n{long}"),
        format!("# name: {long}\u{1b}[31m\na 0 18446744073709551615 0\n"),
        format!("{{\"{long}\": \"{long}\"}}"),
        format!("Thread,Time,Action,Pointer,Size,Stream\n1,t,{long},0x1,1,0"),
    ] {
        let file = Scratch::new("long.trace", content.as_bytes());
        let output = stress(&["replay", "--device", "sim:1GiB", file.path()]);
        let said = errors(&output);
        assert!(matches!(output.status.code(), Some(3 | 4)), "{said}");
        assert!(said.lines().all(|line| line.chars().count() <= 300 && !line.contains('\u{1b}')), "{said}");
    }
}

#[test]
fn a_file_of_many_recordings_has_few_notes() {
    let one = r#"[{"action":"alloc","addr":1,"size":1,"stream":0}]"#;
    let ranks = [one; 50].join(",");
    let snapshot = Scratch::new("ranks.json", format!(r#"{{"segments":[],"device_traces":[{ranks}]}}"#).as_bytes());
    let output = stress(&["replay", snapshot.path()]);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let said = errors(&output);
    let notes = said.lines().filter(|line| line.starts_with("note: ")).count();
    assert!(notes <= 21 && said.contains("more notes are left out"), "{said}");
}
