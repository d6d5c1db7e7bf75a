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
fn bench_measures_threads_beside_one_alone() {
    let rows = rows(0, &["bench", "--quick", "--filter", "threads"]);
    let threads: Vec<u64> = rows.iter().map(|row| bytes(row, "threads")).collect();
    assert_eq!(threads, [1, 1, 2, 2, 4, 4, 1, 1, 2, 2, 4, 4]);
    for row in &rows {
        let rate = row["rate_vs_one_thread"].as_f64().unwrap();
        assert!(rate > 0.0 && (bytes(row, "threads") > 1 || (rate - 1.0).abs() < 1e-9), "{row}");
    }
}

#[test]
fn bench_hands_blocks_over() {
    let rows = rows(0, &["bench", "--quick", "--filter", "handover"]);
    let names: Vec<&str> = rows.iter().filter_map(|row| row["allocator"].as_str()).collect();
    assert_eq!(names, ["aquifer", "offset-allocator"]);
    assert!(rows.iter().all(|row| row["ns_per_pair"].as_f64().unwrap() > 0.0 && bytes(row, "threads") == 2));
}
