//! `fragmentation`, `oom` and `demo`.

use super::*;

fn text(args: &[&str]) -> String {
    let output = stress(args);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn has_keys(row: &Value, keys: &[&str]) {
    let found: Vec<&String> = row.as_object().unwrap().keys().collect();
    assert_eq!(found.len(), keys.len(), "{found:?}");
    keys.iter().for_each(|key| assert!(row.get(key).is_some(), "{key} is missing in {row}"));
}

fn row<'a>(rows: &'a [Value], scenario: &str, policy: &str) -> &'a Value {
    rows.iter().find(|row| row["scenario"] == scenario && row["config"] == policy).unwrap()
}

const FRAGMENTATION_KEYS: [&str; 19] = [
    "scenario",
    "config",
    "device",
    "peak_requested_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "allocated_bytes",
    "reserved_bytes",
    "free_bytes",
    "largest_free_bytes",
    "unusable_index",
    "request_bytes",
    "probe_fits",
    "ooms",
    "retries",
    "driver_calls",
    "cross_stream_reuses",
    "violations",
    "verdict",
];

#[test]
fn every_scenario_shows_fragmentation_and_a_solution() {
    let device = "sim:4GiB";
    let rows = rows(0, &["fragmentation", "--device", device, "--config", "backing:segments,history:100"]);
    for row in &rows {
        has_keys(row, &FRAGMENTATION_KEYS);
        assert_eq!(row["device"], device);
        let (requested, reserved) = (bytes(row, "peak_requested_bytes"), bytes(row, "peak_reserved_bytes"));
        assert!(bytes(row, "allocated_bytes") <= bytes(row, "peak_allocated_bytes"), "{row}");
        assert!(bytes(row, "peak_allocated_bytes") <= reserved && reserved <= 4 << 30, "{row}");
        assert!(bytes(row, "largest_free_bytes") <= bytes(row, "free_bytes"), "{row}");
        assert!((0.0..=1.0).contains(&row["unusable_index"].as_f64().unwrap()), "{row}");
        assert_eq!(bytes(row, "violations"), 0, "{row}");
        if row["config"] == "no_cache:True" {
            assert!(row["probe_fits"] == true && row["verdict"] == "fits" && row["ooms"] == 0, "{row}");
            assert!(reserved - requested < requested / 10, "{row}");
        }
        let fits = row["verdict"].as_str().unwrap().contains("fits");
        assert_eq!(row["probe_fits"], fits, "the verdict says what happened: {row}");
    }
    let names = ["alternating", "sequences", "kv_cache", "images", "streams"];
    let policies = rows.iter().filter(|row| row["config"] == "backing:segments,history:100").count();
    assert_eq!(policies, names.len(), "the user's options are tried on every scenario");
    for name in ["alternating", "kv_cache", "images"] {
        let segments = row(&rows, name, "backing:segments");
        assert_eq!(segments["probe_fits"], false, "{segments}");
        assert!(bytes(segments, "free_bytes") > bytes(segments, "request_bytes"), "{segments}");
    }
    // Memory that moves solves all of them.
    for name in names {
        let paged = row(&rows, name, "");
        assert!(paged["probe_fits"] == true && bytes(paged, "ooms") == 0, "{paged}");
    }
    assert!(bytes(row(&rows, "sequences", "backing:segments"), "retries") > 0);
    let reserved = |policy| bytes(row(&rows, "streams", policy), "peak_reserved_bytes");
    let [off, ready, wait] =
        ["backing:segments,cross_stream:off", "backing:segments", "backing:segments,cross_stream:wait"];
    assert!(reserved(off) > reserved(ready) && reserved(ready) > reserved(wait));
    assert_eq!(row(&rows, "streams", off)["probe_fits"], false);
}

#[test]
fn the_map_of_a_scenario_is_drawn() {
    let args = ["fragmentation", "--device", "sim:1GiB", "--scenario", "alternating", "--ascii"];
    let text = text(&args);
    assert!(text.contains("+#-.+#-.") && text.contains("...____"), "{text}");
    assert!(text.contains("fragmented: ") && text.contains("a character"), "{text}");
    assert!(text.contains("  driver  ") && !text.contains("cuMemAlloc"), "the defaults map memory: {text}");
    assert!(!text.contains('\x1b') && !text.contains('█'), "{text}");
}

#[test]
fn scenarios_and_ways_are_listed_and_unknown_ones_refused() {
    for (command, option, key, count) in [("fragmentation", "--scenario", "scenario", 5), ("oom", "--way", "way", 9)] {
        let listed = rows(0, &[command, "--list"]);
        assert_eq!(listed.len(), count);
        let help = text(&[command, "--help"]);
        for row in &listed {
            has_keys(row, &[key, "summary"]);
            assert!([key, "summary", "--list"].iter().all(|part| help.contains(part)), "{help}");
        }
        let name = listed[0][key].as_str().unwrap();
        assert!(text(&[command, "--list"]).contains(name));
        assert!(!rows(0, &[command, option, name, "--device", "sim:1GiB"]).is_empty());
        assert!(rows(2, &[command, option, "nothing"]).is_empty());
    }
    assert!(rows(2, &["oom", "--config", "", "--config", "history:1"]).is_empty());
    let refused = stress(&["oom", "--config", "", "--config", ""]);
    assert!(refused.status.code() == Some(2) && refused.stdout.is_empty(), "nothing was run");
}

const OOM_KEYS: [&str; 15] = [
    "way",
    "device",
    "requested_bytes",
    "refused",
    "error",
    "advice",
    "recovered_by",
    "recovered",
    "intact",
    "usable",
    "allocated_bytes_before",
    "allocated_bytes_after",
    "reserved_bytes_before",
    "reserved_bytes_after",
    "violations",
];

#[test]
fn every_way_recovers() {
    for device in ["sim:2GiB", "sim:24GiB", "sim:80GiB,seed=3"] {
        let rows = rows(0, &["oom", "--device", device]);
        assert_eq!(rows.len(), 9);
        for row in &rows {
            has_keys(row, &OOM_KEYS);
            for key in ["recovered", "intact", "usable"] {
                assert_eq!(row[key], true, "{key} in {row}");
            }
            assert_eq!(bytes(row, "violations"), 0, "{row}");
            let refused = !["pending", "reclaimers"].contains(&row["way"].as_str().unwrap());
            assert_eq!(row["refused"], refused, "{row}");
            assert_eq!(row["error"].is_string(), refused, "{row}");
            assert_eq!(!row["advice"].as_array().unwrap().is_empty(), refused, "{row}");
        }
    }
    let text = text(&["oom", "--way", "fragmented", "--device", "sim:2GiB"]);
    assert!(text.contains("out of memory. Tried to allocate") && text.contains("\n  try: "), "{text}");
    assert!(text.contains("reads as it was written") && text.contains("serves as before"), "{text}");
}

#[test]
fn a_request_waits_for_memory_that_a_late_stream_uses() {
    for config in ["", "cross_stream:off", "backing:segments"] {
        let args = ["oom", "--device", "sim:24GiB", "--way", "pending", "--config", config];
        let row = &rows(0, &args)[0];
        let how = "waiting for stream 2, which the allocator did by itself";
        assert!(row["recovered_by"].as_str().unwrap().starts_with(how), "{config}: {row}");
    }
}

/// Odd and small sizes, memory of other processes, and options of the user.
#[test]
fn every_way_works_on_all_devices_and_with_most_options() {
    let cases = [
        ("sim:24GB", ""),
        ("sim:1000000007", ""),
        ("sim:33MiB", ""),
        ("sim:32MiB", ""),
        ("sim:1GiB,other=500MiB", ""),
        ("sim:400MiB,vmm=off", ""),
        ("sim:24GiB", "backing:segments"),
        ("sim:24GiB", "limit_mb:700"),
        ("sim:1GiB", "headroom_mb:200"),
    ];
    for (device, config) in cases {
        let rows = rows(0, &["oom", "--device", device, "--config", config]);
        assert_eq!(rows.len(), 9);
        for row in &rows {
            has_keys(row, &OOM_KEYS);
            for key in ["recovered", "intact", "usable"] {
                assert_eq!(row[key], true, "{key} with {config}: {row}");
            }
            let refused = !["pending", "reclaimers"].contains(&row["way"].as_str().unwrap());
            assert_eq!(row["refused"], refused, "with {config}: {row}");
        }
    }
}

#[test]
fn a_way_without_a_refusal_fails() {
    // Without a cache there is no fragmentation.
    let rows = rows(1, &["oom", "--device", "sim:1GiB", "--way", "fragmented", "--config", "no_cache:True"]);
    let failed = rows[0]["failed"].as_str().unwrap();
    assert!(failed.contains("nothing is shown here") && failed.contains("were served"), "{failed}");
}

#[test]
fn after_a_failed_way_the_others_still_run() {
    // The short way ends before the fault.
    let device = "sim:2GiB,fault=cuMemsetD8Async#10:999";
    let args = ["oom", "--device", device, "--way", "fragmented", "--way", "limit"];
    let rows = rows(1, &args);
    assert_eq!(rows.len(), 2);
    has_keys(&rows[0], &["way", "device", "failed"]);
    assert!(rows[0]["way"] == "fragmented" && rows[0]["failed"].as_str().unwrap().contains("999"), "{}", rows[0]);
    assert!(rows[1]["way"] == "limit" && rows[1]["recovered"] == true, "{}", rows[1]);
    let output = stress(&args);
    assert!(errors(&output).contains("error: fragmented: "), "{}", errors(&output));
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(shown.contains("FAILED: ") && shown.contains("serves as before"), "{shown}");
}

#[test]
fn the_demonstration_shows_every_step() {
    let rows = rows(0, &["--config", "backing:segments,cross_stream:off"]);
    let steps: Vec<&str> = rows.iter().map(|row| row["step"].as_str().unwrap()).collect();
    assert_eq!(steps[..3], ["replay", "oom", "remap"]);
    assert_eq!(steps[3..], ["compare"; 18], "eight options and split_frames:on for each of two programs");
    assert!(rows[1..3].iter().all(|row| row["violations"] == 0));
    assert!(rows.iter().filter(|row| row.get("ooms").is_some_and(|ooms| ooms == 0)).count() == 19, "{rows:?}");
    let (replay, oom, remap) = (&rows[0], &rows[1], &rows[2]);
    assert!(bytes(replay, "peak_reserved_bytes") > 3 * bytes(replay, "peak_requested_bytes"), "{replay}");
    assert!(bytes(oom, "free_bytes") > bytes(oom, "requested_bytes"), "{oom}");
    assert!(oom["refused"] == true && oom["damaged"] == 0 && oom["served_again"] == true, "{oom}");
    assert!(bytes(oom, "blocks") > 0 && !oom["advice"].as_array().unwrap().is_empty(), "{oom}");
    assert!(remap["refused"] == false && remap["damaged"] == 0 && bytes(remap, "remaps") > 0, "{remap}");
    assert_eq!(bytes(remap, "device_bytes"), bytes(oom, "device_bytes"), "the same device");
    for compared in &rows[3..] {
        assert!(bytes(compared, "smallest_device_bytes") >= bytes(compared, "peak_requested_bytes"), "{compared}");
    }
    assert!(rows.iter().any(|row| row["config"] == "backing:expandable"), "{rows:?}");
    let text = text(&["demo", "--ascii"]);
    assert!(text.starts_with("Five chapters, a few seconds: "), "{text}");
    assert_eq!(text.matches("When it held most").count(), 2, "of the bad outcome, and of the good one");
    assert!(text.contains(" smallest device ") && !text.contains("OOMs"), "no column is always 0");
    let ways = super::rows(0, &["oom", "--list"]).len();
    assert!(text.contains(&format!("\n      {ways} ways to run out of memory")), "{text}");
    for part in [
        "1. A program that needs",
        "2. On a device of",
        "3. Nothing is lost",
        "4. With memory that moves",
        "5. What helps",
    ] {
        assert!(text.contains(part), "{part}");
    }
}

#[test]
fn the_demonstration_adapts_to_its_device() {
    let words = |code, device: &str| {
        let output = stress(&["demo", "--ascii", "--device", device]);
        assert_eq!(output.status.code(), Some(code), "{}", errors(&output));
        // As words, without line ends.
        String::from_utf8(output.stdout).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = words(3, "sim:rtx4090,vmm=off");
    assert!(text.contains("4. Memory cannot move on this device"), "{text}");
    assert!(text.contains("not possible: the device cannot map memory. So the program runs out of memory"), "{text}");
    assert!(!text.contains("memory that moves"), "{text}");
    let text = words(3, "sim:80GiB,oom_at=10GiB");
    assert!(text.contains("is refused some of it on a device of 80.00 GiB"), "{text}");
}

/// Their memory would be missing from devices of the needed size.
#[test]
fn the_demonstration_has_no_other_programs() {
    let alone = stress(&["--json", "--device", "sim:80GiB"]);
    let beside = stress(&["demo", "--json", "--device", "sim:80GiB,other=70GiB"]);
    assert_eq!(rows_of(0, &beside), rows_of(0, &alone));
    assert!(errors(&beside).contains("warning: other= has no effect here"), "{}", errors(&beside));
    assert!(!errors(&alone).contains("other="), "{}", errors(&alone));
}

#[test]
fn options_that_fit_on_no_device_are_reported_and_the_others_compared() {
    let output = stress(&["--json", "--config", "limit_mb:1000"]);
    let said = errors(&output);
    let rows = rows_of(3, &output);
    let fits = |row: &&Value| !row["smallest_device_bytes"].is_null();
    let (fitting, limited): (Vec<&Value>, Vec<&Value>) =
        rows.iter().filter(|row| row["step"] == "compare").partition(fits);
    assert_eq!((fitting.len(), limited.len()), (16, 2));
    assert!(fitting.iter().all(|row| row["ooms"] == 0), "{fitting:?}");
    for row in limited {
        assert!(bytes(row, "ooms") > 0, "its peak covers served requests only: {row}");
        assert!(row["config"] == "limit_mb:1000" && row["smallest_over_requested"].is_null(), "{row}");
        let named = format!("out of memory: {} with limit_mb:1000: it does not finish", row["trace"].as_str().unwrap());
        assert!(said.contains(&named), "{said}");
    }
}

#[test]
fn after_a_failed_policy_the_others_are_shown() {
    let args = ["fragmentation", "--scenario", "alternating", "--device", "sim:1GiB,fault=cuMemAlloc#3:999"];
    let output = stress(&[&args[..], &["--json"]].concat());
    let policies: Vec<Value> = rows_of(1, &output).into_iter().map(|row| row["config"].clone()).collect();
    assert_eq!(policies, [""], "mapped memory alone makes no such call");
    let said = errors(&output);
    assert!(said.contains("error: alternating under backing:segments: event "), "{said}");
    assert_eq!(said.matches("cuMemAlloc failed on sim:0: CUDA_ERROR_UNKNOWN (999)").count(), 2, "{said}");
    let shown = String::from_utf8(stress(&args).stdout).unwrap();
    assert!(shown.contains("the defaults") && !shown.contains("backing:segments"), "{shown}");
}
