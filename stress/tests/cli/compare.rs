//! `fit` and `compare`.

use super::*;

#[test]
fn fit_names_faults_that_end_the_program() {
    let output = stress(&["fit", "--device", "sim:80GiB,oom_at=64MiB", &data("fsdp_start.trace")]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        errors(&output).contains("on any device with oom_at=67108864, as asked for with --device"),
        "{}",
        errors(&output)
    );
}

#[test]
fn fit_finds_a_boundary() {
    const PYTORCH: &str = "backing:pytorch";
    let file = data("gpt2_fp32.trace.gz");
    let row = &rows(0, &["fit", "--config", PYTORCH, &file])[0];
    assert_eq!(row.as_object().unwrap().len(), 8);
    let smallest = bytes(row, "smallest_device_bytes");
    assert_eq!(smallest, 32_335_986_688);
    assert!((row["smallest_over_requested"].as_f64().unwrap() - 1.0807).abs() < 1e-4);
    for (bytes, code) in [(smallest, 0), (smallest - (2 << 20), 3)] {
        let device = format!("sim:{bytes}");
        let args = ["replay", "--repeat", "1", "--device", &device, "--config", PYTORCH, &file];
        assert_eq!(rows(code, &args).len(), 1);
    }
}

pub(super) const COMPARE_KEYS: [&str; 21] = [
    "row",
    "trace",
    "config",
    "smallest_device_bytes",
    "smallest_over_requested",
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
    "driver_calls",
    "peak_requested_bytes",
    "first_pass_reserved_over_requested",
];

pub(super) const MEAN_KEYS: [&str; 20] = [
    "row",
    "config",
    "traces",
    "finished",
    "reserved_over_requested",
    "worst_reserved_over_requested",
    "ooms",
    "warm_ooms",
    "violations",
    "smallest_over_requested",
    "driver_calls",
    "driver_time_modelled_us",
    "ns_per_op",
    "warm_driver_calls",
    "warm_driver_time_modelled_us",
    "worst_smallest_over_requested",
    "first_pass_reserved_over_requested",
    "worst_alloc_us",
    "times_yardstick",
    "allocs",
];

/// The keys of a row whose options may be tried with `split_frames:on`.
pub(super) fn with_splitting(keys: &[&'static str]) -> Vec<&'static str> {
    [keys, &["with_split_frames"]].concat()
}

#[test]
fn options_are_compared_side_by_side() {
    let files = ["gpt2_fp32.trace.gz", "fsdp_start.trace"].map(data);
    let args = ["compare", "--json", "--repeat", "2", &files[0], &files[1]];
    let output = stress(&args);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (traces, means): (Vec<_>, Vec<_>) = text.lines().zip(&rows).partition(|(_, row)| row["row"] == "trace");
    assert!(traces.iter().all(|(line, _)| keys(line) == with_splitting(&COMPARE_KEYS)), "{text}");
    assert!(means.iter().all(|(line, _)| keys(line) == with_splitting(&MEAN_KEYS)), "{text}");
    let find = |trace: &str, config: &str| {
        rows.iter().find(|row| row["trace"] == trace && row["config"] == config).unwrap_or_else(|| panic!("{config}"))
    };
    // As in PyTorch.
    let pytorch = find("gpt2_fp32", "backing:pytorch");
    assert_eq!(bytes(pytorch, "peak_reserved_bytes"), 32_388_415_488);
    assert_eq!(bytes(pytorch, "smallest_device_bytes"), 32_335_986_688);
    assert!(bytes(pytorch, "driver_calls") > 200);
    assert!(find("fsdp_start", "backing:segments")["violations"] == 0);
    let mean = |config: &str| means.iter().map(|(_, row)| row).find(|row| row["config"] == config).unwrap();
    assert_eq!(bytes(mean("backing:segments"), "traces"), 2);
}

#[test]
fn compare_takes_configs_and_prints_tables() {
    let file = data("fsdp_start.trace");
    let plot = Scratch::new("plot.svg", b"");
    let configs = ["--config", "", "--config", "no_cache:True"];
    let output = stress(&[&["compare", "--repeat", "1", "--plot", plot.path()], &configs[..], &[&file]].concat());
    let svg = std::fs::read_to_string(plot.path()).unwrap();
    assert!(
        ["the defaults", "no_cache:True", "holds / requested", "driver time"].iter().all(|part| svg.contains(part)),
        "{svg}"
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        ["fsdp_start uses at most", "the defaults", "no_cache:True"].iter().all(|part| text.contains(part)),
        "{text}"
    );
    assert!(!text.contains("means"), "of one program they are its figures: {text}");
    let other = Scratch::new("other.trace", b"a 0 30000000 0\nf 0 0\n");
    let two = ["--config", "no_cache:True", &file, other.path()];
    let text = String::from_utf8(stress(&[&["compare", "--repeat", "1"], &two[..]].concat()).stdout).unwrap();
    assert!(text.contains("\n\nAll 2 programs: geometric means"), "{text}");
    assert!(!text.contains("backing:segments"), "{text}");
    let rows = rows(4, &["compare", "--config", "no_cache:True", "--repeat", "1", "/no/such/file", &file]);
    assert_eq!(rows.len(), 2);
}

/// Its figures would be too low.
#[test]
fn a_program_that_does_not_finish_is_left_out_of_means() {
    let file = data("gnn_random_graphs.trace.gz");
    let args = ["compare", "--repeat", "1", "--device", "sim:18GiB", "--config", "", &file];
    let rows: Vec<Value> = rows(3, &args).into_iter().filter(|row| row["config"] == "").collect();
    let [run, mean] = &rows[..] else { panic!("{rows:?}") };
    assert!(bytes(run, "ooms") > 0 && bytes(mean, "ooms") == bytes(run, "ooms"), "{rows:?}");
    assert_eq!((bytes(mean, "traces"), bytes(mean, "finished")), (1, 0));
    for key in ["reserved_over_requested", "ns_per_op", "allocs", "driver_calls", "driver_time_modelled_us"] {
        assert!(mean[key].is_null(), "{key} of {mean}");
    }
    assert!(mean["smallest_over_requested"].as_f64().unwrap() >= 1.0, "{mean}");
    let output = stress(&args);
    let said = errors(&output);
    assert!(said.contains("out of memory: gnn_random_graphs with the defaults: "), "{said}");
    assert!(said.contains("refused, so this run is left out of the means"), "{said}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("OOMs") && text.contains(&run["ooms"].to_string()), "{text}");
    assert!(!text.contains("0.85"), "{text}");
}

#[test]
fn repeated_options_count_once() {
    let file = Scratch::new("zeros.trace", (0..1000).map(|id| format!("a {id} 0 0\n")).collect::<String>().as_bytes());
    let args = ["compare", "--config", "", "--config", "", "--repeat", "1", file.path()];
    let rows = rows(0, &args);
    assert_eq!(rows.len(), 2, "a program and a mean: {rows:?}");
    assert_eq!(rows[1]["traces"], 1);
    let said = errors(&stress(&args));
    assert!(!said.contains("yardstick"), "blocks without bytes take little space: {said}");
}
