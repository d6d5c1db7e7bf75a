//! `transfer` as people run it.

use serde_json::json;

use super::*;

/// The rows of `transfer` on a device without jitter.
fn measured(args: &[&str]) -> Vec<Value> {
    rows(0, &[&["--device", "sim:1GiB,jitter=off", "transfer", "--rounds", "1"], args].concat())
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key} of {row}"))
}

#[test]
fn copies_are_measured_by_every_way_and_page_locked_ones_are_as_fast_as_the_driver_s() {
    let rows = measured(&["--only", "copies", "--max-mb", "16"]);
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

/// Neither the driver's copies to and from the host are a measure for them, nor is a simulated device's time for the host's own work.
#[test]
fn copies_between_devices_and_on_the_host_are_measured() {
    let rows = measured(&["--only", "copies", "--max-mb", "16"]);
    for (direction, peer, route) in
        [("from peer", json!("sim:1"), json!("from device to device")), ("on host", Value::Null, Value::Null)]
    {
        for method in ["copy", "rows"] {
            let of = |row: &&Value| row["direction"] == direction && row["method"] == method;
            let rows: Vec<&Value> = rows.iter().filter(of).collect();
            assert_eq!(rows.len(), 4, "sizes of {direction} {method}");
            for row in rows {
                assert!(number(row, "gb_per_s") > 0.0 && row["of_driver_pinned"].is_null(), "{row}");
                assert_eq!((&row["peer"], &row["route"]), (&peer, &route), "{row}");
            }
        }
    }
    let output = stress(&["--device", "sim:1GiB", "transfer", "--only", "copies", "--max-mb", "1", "--rounds", "1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("come from sim:1, and go from device to device"), "{text}");
    assert!(text.contains("on the host are timed by its own clock"), "{text}");
}

#[test]
fn batches_of_small_copies_save_calls() {
    let rows = measured(&["--only", "small", "--max-mb", "1"]);
    let small: Vec<&Value> = rows.iter().filter(|row| row["bytes"] == 4096).collect();
    assert_eq!(small.len(), 3);
    assert!(small.iter().all(|row| number(row, "speedup") >= 5.0), "{small:?}");
    for row in &rows {
        let (speedup, again) = (number(row, "speedup"), number(row, "single_us") / number(row, "batched_us"));
        assert!((again / speedup - 1.0).abs() < 0.02, "times have the digits that their ratio needs: {row}");
    }
}

/// Also to those who read the table.
#[test]
fn up_to_which_size_batches_pay_is_told() {
    let output = stress(&["--device", "sim:1GiB", "transfer", "--only", "small", "--max-mb", "1", "--rounds", "1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.matches("one driver call for many copies pays").count() == 3, "{text}");
}

#[test]
fn copies_overlap_with_kernels_and_each_other() {
    let rows = measured(&["--only", "overlap", "--max-mb", "16"]);
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| number(row, "overlap") >= 0.9), "{rows:?}");
}

#[test]
fn the_ring_leaves_the_link_idle_for_at_most_a_tenth() {
    let rows = measured(&["--only", "schedule"]);
    assert_eq!(rows.len(), 4);
    for row in &rows {
        assert!(number(row, "idle_share") <= 0.1 && row["intact"] == true, "{row}");
        assert_eq!(row["clock"], "virtual");
    }
}

/// And with them what the program takes.
#[test]
fn the_schedule_is_no_larger_than_copies_are() {
    let sizes = |args: &[&str]| {
        let rows = measured(&[&["--only", "schedule"], args].concat());
        rows.iter().map(|row| bytes(row, "bytes")).collect::<Vec<_>>()
    };
    let of_the_ring = |row: u64| row << 20;
    assert_eq!(sizes(&["--max-mb", "1"]), [64, 176, 64, 176].map(of_the_ring), "four times the ring");
    assert_eq!(sizes(&["--max-mb", "64"]), [256; 4].map(of_the_ring));
}

/// The pieces of a transfer are made up and compared as they go, rather than held.
#[test]
#[cfg(target_os = "linux")]
fn the_schedule_takes_little_memory() {
    let script = r#"ulimit -v 700000 && exec "$@""#;
    let run = Command::new("bash")
        .args([
            "-c",
            script,
            "bash",
            env!("CARGO_BIN_EXE_aquifer-stress"),
            "--json",
            "--device",
            "sim:1GiB",
            "transfer",
        ])
        .args(["--only", "schedule", "--max-mb", "1"])
        .output();
    let Ok(output) = run else {
        eprintln!("SKIPPED: there is no bash to limit the address space with");
        return;
    };
    assert_eq!(rows_of(0, &output).len(), 4, "{}", errors(&output));
}

#[test]
fn wrong_arguments_are_refused() {
    for args in [["transfer", "--max-mb", "0"], ["transfer", "--rounds", "0"], ["transfer", "--only", "all"]] {
        let output = stress(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
}
