//! PyTorch's tests of snapshots and history, one by one; `CHECKLIST.md` lists them all.

use aquifer::memory::{HistoryOptions, Snapshot};
use aquifer_allocator::snapshot::BlockState;
use aquifer_tests::prelude::*;

fn record(bench: &Bench, entries: usize, skip: Vec<Action>) {
    bench.allocator.record_history(HistoryOptions { entries, skip, clear: true });
}

fn actions(snapshot: &Snapshot) -> Vec<Action> {
    snapshot.trace().iter().map(|entry| entry.action).collect()
}

#[test]
fn item_90_memory_snapshot() {
    let bench = Bench::new(GIB, "");
    record(&bench, 1000, Vec::new());
    let held = {
        let _scope = TagScope::new("layer 3");
        bench.alloc(311 * 411 * 4)
    };
    let snapshot = bench.allocator.snapshot();
    let last = snapshot.trace().last().unwrap();
    assert_eq!((last.action, last.addr, last.size), (Action::Alloc, Some(held.ptr().0), 311 * 411 * 4));
    assert_eq!(&*last.user_metadata, "layer 3");
    let (segment, block) = snapshot.blocks().next().unwrap();
    assert_eq!((segment.total_size, segment.stream), (2 * MIB, bench.stream.id()));
    assert_eq!((block.state, block.requested_size), (BlockState::ActiveAllocated, 311 * 411 * 4));
    assert_eq!(block.user_metadata.as_deref(), Some("layer 3"));
    // A block that other streams still use.
    bench.drop_in_use(held, Duration::from_millis(5));
    let snapshot = bench.allocator.snapshot();
    assert_eq!(snapshot.blocks().next().unwrap().1.state, BlockState::ActivePendingFree);
    assert_eq!(actions(&snapshot).last(), Some(&Action::FreeRequested));
    bench.assert_returned();
}

#[test]
fn item_93_segment_frees_and_names_are_in_the_trace() {
    let bench = Bench::new(GIB, "backing:segments");
    record(&bench, 1000, Vec::new());
    {
        let _scope = TagScope::new("optimizer");
        drop(bench.alloc(30 * MIB));
    }
    bench.allocator.empty_cache().unwrap();
    let snapshot = bench.allocator.snapshot();
    let frees: Vec<_> = snapshot.trace().iter().filter(|entry| entry.action == Action::SegmentFree).collect();
    assert_eq!(frees.len(), 1);
    assert_eq!((frees[0].size, &*frees[0].user_metadata), (30 * MIB, "optimizer"));
    let requested = snapshot.trace().iter().find(|entry| entry.action == Action::FreeRequested).unwrap();
    assert_eq!((requested.size, &*requested.user_metadata), (30 * MIB, "optimizer"));
}

#[test]
fn item_98_summary_and_snapshot_in_every_state() {
    let bench = Bench::new(64 * MIB, "history:5");
    let ask = |live| {
        check::statistics(&bench.allocator, live);
        check::readers(&bench.allocator);
    };
    ask((0, 0));
    let held = bench.alloc(MIB);
    ask((1, MIB));
    bench.refused(GIB);
    ask((1, MIB));
    let pool = bench.allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let inside = pool.alloc_bytes(700, &bench.side).unwrap();
    ask((2, MIB + 700));
    drop(pool);
    drop((held, inside));
    ask((0, 0));
    bench.allocator.stop_history();
    bench.allocator.empty_cache().unwrap();
    ask((0, 0));
    assert!(bench.allocator.summary().contains("Out of memory: 1"));
}

#[test]
fn kept_2_the_report_names_the_segment_that_it_tried_to_allocate() {
    let begins = |options: &str, bytes: u64, begin: &str| {
        let bench = Bench::new(MIB, options);
        let error = bench.refused(bytes);
        let (text, begin) = (error.to_string(), format!("out of memory. Tried to allocate {begin}. GPU "));
        assert!(text.starts_with(&begin), "{options}: {text}");
        assert_eq!(error.report().unwrap().requested, bytes);
    };
    let segments = "backing:segments";
    begins(segments, 1000, "2.00 MiB for a request of 1000 bytes");
    begins(segments, 3 * MIB, "20.00 MiB for a request of 3.00 MiB");
    begins(segments, 41 * MIB, "42.00 MiB for a request of 41.00 MiB");
    begins(segments, 42 * MIB, "42.00 MiB");
    begins(segments, 42 * MIB - 1, "42.00 MiB");
    begins("backing:segments,no_cache:True", 3 * MIB, "3.00 MiB");
    // Mapped memory has no segments.
    let bench = Bench::new(8 * MIB, "");
    let text = bench.refused(9 * MIB).to_string();
    assert!(text.starts_with("out of memory. Tried to allocate 9.00 MiB. GPU "), "{text}");
}

#[test]
fn defect_3_inactive_blocks_show_no_stale_request() {
    let bench = Bench::new(GIB, "");
    let keeps = [1, 2].map(|_| bench.alloc(1000));
    let [first, second] = keeps;
    drop(first);
    let snapshot = bench.allocator.snapshot();
    let inactive = snapshot.blocks().filter(|(_, block)| block.state == BlockState::Inactive);
    assert!(inactive.map(|(_, block)| block.requested_size).all(|requested| requested == 0));
    drop(second);
}
