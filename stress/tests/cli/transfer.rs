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
        assert_eq!((&row["modelled"], &row["clock"]), (&json!(true), &json!("virtual")));
        assert!(!["staged", "staged rows", "file"].contains(&row["method"].as_str().unwrap()), "{row}");
    }
}

/// They have no reference.
#[test]
fn copies_between_devices_are_measured() {
    let rows = measured(&["--only", "copies", "--max-mb", "16"]);
    for method in ["copy", "rows"] {
        let of = |row: &&Value| row["direction"] == "from peer" && row["method"] == method;
        let rows: Vec<&Value> = rows.iter().filter(of).collect();
        assert_eq!(rows.len(), 4, "sizes of {method}");
        for row in rows {
            assert!(number(row, "gb_per_s") > 0.0 && row["of_driver_pinned"].is_null(), "{row}");
            assert_eq!((&row["peer"], &row["route"]), (&json!("sim:1"), &json!("from device to device")), "{row}");
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
fn copies_overlap_with_kernels_and_each_other() {
    let rows = measured(&["--only", "overlap", "--max-mb", "16"]);
    assert_eq!(rows.len(), 3);
    assert!(rows.iter().all(|row| number(row, "overlap") >= 0.9), "{rows:?}");
}

/// With nvbandwidth's names; both directions of the link carry as much at the same time.
#[test]
fn both_ways_have_the_names_of_nvbandwidth_and_a_share_of_the_link() {
    let rows = measured(&["--only", "nvbandwidth", "--max-mb", "16"]);
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
    let slow = super::rows(0, &["--device", "sim:1GiB,link=5", "transfer", "--only", "nvbandwidth", "--max-mb", "1"]);
    assert!(slow.iter().all(|row| number(row, "gb_per_s") <= 5.0 && number(row, "of_link") > 0.5), "{slow:?}");
}

#[test]
fn scattered_blocks_are_swapped_both_ways() {
    let rows = measured(&["--only", "swap-blocks", "--max-mb", "1"]);
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
    let rows = measured(&["--only", "model", "--max-mb", "4"]);
    assert_eq!(rows.len(), if cfg!(target_os = "linux") { 4 } else { 2 });
    for row in &rows {
        assert_eq!((&row["tensors"], &row["clock"], &row["modelled"]), (&json!(291), &json!("host"), &json!(false)));
        assert!(bytes(row, "bytes") > 3 << 20 && bytes(row, "bytes") <= 4 << 20, "{row}");
        assert!(number(row, "seconds") > 0.0, "{row}");
    }
}

#[test]
fn wrong_arguments_are_refused() {
    for args in [["transfer", "--max-mb", "0"], ["transfer", "--rounds", "0"], ["transfer", "--only", "all"]] {
        let output = stress(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(output.stdout.is_empty());
    }
}
