//! `transfer`.

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
fn every_method_is_measured_and_pinned_copies_are_as_fast_as_the_driver_s() {
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

/// They have no reference, and copies on the host have the clock of the host.
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

#[test]
fn the_size_up_to_which_batches_pay_is_printed() {
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
fn wrong_arguments_are_refused() {
    for args in [["transfer", "--max-mb", "0"], ["transfer", "--rounds", "0"], ["transfer", "--only", "all"]] {
        let output = stress(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
}
