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
    assert_eq!(row.as_object().unwrap().len(), 5);
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
    "peak_requested_bytes",
    "peak_reserved_bytes",
    "reserved_over_requested",
    "peak_reserved_bytes_by_pass",
    "first_pass_reserved_over_requested",
    "smallest_device_bytes",
    "smallest_over_requested",
    "allocs",
    "driver_calls",
    "warm_driver_calls",
    "driver_time_modelled_us",
    "warm_driver_time_modelled_us",
    "worst_alloc_us",
    "ns_per_op",
    "yardstick_ns_per_op",
    "ooms",
    "warm_ooms",
    "violations",
];

pub(super) const MEAN_KEYS: [&str; 20] = [
    "row",
    "config",
    "traces",
    "finished",
    "reserved_over_requested",
    "worst_reserved_over_requested",
    "first_pass_reserved_over_requested",
    "smallest_over_requested",
    "worst_smallest_over_requested",
    "allocs",
    "driver_calls",
    "warm_driver_calls",
    "driver_time_modelled_us",
    "warm_driver_time_modelled_us",
    "worst_alloc_us",
    "ns_per_op",
    "times_yardstick",
    "ooms",
    "warm_ooms",
    "violations",
];

#[test]
fn options_are_compared_side_by_side() {
    let pytorch = br#"{"gpt2_fp32": {"events": 1, "configs": {
        "default": {"options": "", "peak_reserved_bytes": 32388415488, "ooms": 0,
                    "smallest_device_bytes": 32335986688, "ns_per_op_torch_2_15": 207.0},
        "expandable": {"options": "expandable_segments:True", "peak_reserved_bytes": 30000000000,
                       "ooms": 0}}}}"#;
    let (figures, files) =
        (Scratch::new("pytorch.json", pytorch), ["gpt2_fp32.trace.gz", "fsdp_start.trace"].map(data));
    let args = ["compare", "--json", "--repeat", "2", "--pytorch", figures.path(), &files[0], &files[1]];
    let output = stress(&args);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (traces, means): (Vec<_>, Vec<_>) = text.lines().zip(&rows).partition(|(_, row)| row["row"] == "trace");
    assert!(traces.iter().all(|(line, _)| keys(line) == COMPARE_KEYS), "{text}");
    assert!(means.iter().all(|(line, _)| keys(line) == MEAN_KEYS), "{text}");
    let find = |trace: &str, config: &str| {
        rows.iter().find(|row| row["trace"] == trace && row["config"] == config).unwrap_or_else(|| panic!("{config}"))
    };
    let (ours, theirs) = (find("gpt2_fp32", "backing:pytorch"), find("gpt2_fp32", "pytorch"));
    for key in ["peak_reserved_bytes", "smallest_device_bytes", "reserved_over_requested"] {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert!(bytes(ours, "driver_calls") > 200 && theirs["driver_calls"].is_null(), "the file has none");
    assert!(find("gpt2_fp32", "pytorch expandable_segments:True")["smallest_device_bytes"].is_null());
    assert!(find("fsdp_start", "backing:segments")["violations"] == 0);
    assert!(
        rows.iter().all(|row| row["trace"] != "fsdp_start" || !row["config"].as_str().unwrap().starts_with("pytorch"))
    );
    let mean = |config: &str| means.iter().map(|(_, row)| row).find(|row| row["config"] == config).unwrap();
    assert_eq!(bytes(mean("backing:segments"), "traces"), 2);
    assert_eq!(mean("pytorch")["reserved_over_requested"], theirs["reserved_over_requested"]);
    assert!(mean("pytorch")["worst_alloc_us"].is_null());
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
    let two = ["--config", "no_cache:True", &file, &data("two.trace.xz")];
    let text = String::from_utf8(stress(&[&["compare", "--repeat", "1"], &two[..]].concat()).stdout).unwrap();
    assert!(text.contains("\n\nAll 2 programs: geometric means"), "{text}");
    assert!(!text.contains("backing:segments"), "{text}");
    let figures = |reserved: &str, ns: &str| {
        format!(
            "{{\"x\": {{\"configs\": {{\"default\": {{\"options\": \"\", \"peak_reserved_bytes\": {reserved}, \
             \"ooms\": 0, \"ns_per_op_torch_2_15\": {ns}}}}}}}}}"
        )
    };
    for (content, reason) in [
        ("{", "EOF"),
        ("# name: x", ": not valid JSON: expected value at line 1 column 1"),
        ("{\"x\": 1}", "invalid type: integer `1`, expected struct Measured"),
        (&figures("-1", "1.0"), "integer `-1`, expected u64"),
        (&figures("1", "\"x\""), "string \"x\", expected f64"),
    ] {
        let figures = Scratch::new("damaged.json", content.as_bytes());
        let output = stress(&["compare", "--pytorch", figures.path(), &file]);
        assert_eq!(output.status.code(), Some(4));
        assert!(errors(&output).contains(figures.path()) && errors(&output).contains(reason), "{}", errors(&output));
    }
    if cfg!(unix) {
        let output = stress(&["compare", "--pytorch", "/dev/zero", &file]);
        assert!(errors(&output).contains("/dev/zero: the file is longer than 16 MiB"), "{}", errors(&output));
        assert_eq!(output.status.code(), Some(4));
    }
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
