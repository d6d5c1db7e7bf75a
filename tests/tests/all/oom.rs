//! The out-of-memory ladder: each rung alone serves a request, and the report advises a remedy.

use aquifer_tests::prelude::*;

/// Allocates, uses and gives back a block; the stream is busy with it for 10 ms.
fn busy(bench: &Bench, bytes: u64, stream: &Stream) {
    let block = bench.alloc_on(stream, bytes);
    bench.stall(stream, Duration::from_millis(10));
    write_on(stream, block.ptr(), bytes);
}

fn served(bench: &Bench, bytes: u64) -> (Allocation, MemoryStats) {
    let served = bench.written(bytes);
    bench.assert_no_violation();
    let stats = bench.allocator.stats();
    assert_eq!(stats.num_ooms, 0);
    (served, stats)
}

#[test]
fn rung_blocks_of_other_streams_that_are_done() {
    let bench = Bench::new(64 * MIB, "");
    busy(&bench, 60 * MIB, &bench.side);
    bench.side.synchronize().unwrap();
    let (held, stats) = served(&bench, 60 * MIB);
    assert_eq!((stats.cross_stream_reuses, stats.cross_stream_waits, stats.num_device_free), (1, 0, 0));
    drop(held);
    bench.assert_returned();
}

#[test]
fn rung_a_wait_for_another_stream() {
    // As a policy before growth, and otherwise as a rung before release.
    for (options, capacity) in [("cross_stream:wait,backing:segments", GIB), ("backing:segments", 64 * MIB)] {
        let bench = Bench::new(capacity, options);
        busy(&bench, 60 * MIB, &bench.side);
        let (held, stats) = served(&bench, 60 * MIB);
        assert_eq!((stats.cross_stream_reuses, stats.cross_stream_waits, stats.num_device_free), (1, 1, 0));
        drop(held);
        bench.assert_returned();
    }
}

#[test]
fn rung_a_lending_pool() {
    let bench = Bench::new(64 * MIB, "");
    let pool = bench.lending_pool();
    drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    let (held, stats) = served(&bench, 40 * MIB);
    assert_eq!((stats.num_alloc_retries, stats.num_device_free), (0, 0));
    assert_eq!(bench.allocator.snapshot().segments[0].segment_pool_id, pool.id());
    drop((held, pool));
    bench.assert_returned();
}

#[test]
fn rung_waiting_blocks() {
    let bench = Bench::new(64 * MIB, "cross_stream:off,backing:segments");
    let block = bench.alloc(60 * MIB);
    bench.drop_in_use(block, Duration::from_millis(10));
    let (held, stats) = served(&bench, 60 * MIB);
    assert_eq!((stats.num_sync_all_streams, stats.num_alloc_retries), (1, 0));
    drop(held);
    bench.assert_returned();
}

#[test]
fn rung_release_everything() {
    let bench = Bench::new(64 * MIB, "cross_stream:off,backing:segments");
    busy(&bench, 30 * MIB, &bench.side);
    busy(&bench, 20 * MIB, &bench.stream);
    drop(bench.alloc_on(&bench.side, 1000));
    let (held, stats) = served(&bench, 60 * MIB);
    assert_eq!((stats.num_alloc_retries, stats.num_device_free), (1, 3));
    drop(held);
    bench.assert_returned();
}

#[test]
fn rung_reclaimers() {
    let bench = Bench::new(64 * MIB, "");
    let cache: Arc<Mutex<Vec<Allocation>>> = Arc::default();
    cache.lock().unwrap().push(bench.alloc_on(&bench.side, 60 * MIB));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (log, allocator, stream) = (asked.clone(), bench.allocator.clone(), bench.side.clone());
    let reluctant = bench.allocator.register_reclaimer(-5, "reluctant", |_| panic!("asked although not needed"));
    let (taken, log_too) = (cache.clone(), asked.clone());
    let willing = bench.allocator.register_reclaimer(1, "cache", move |request| {
        // It may itself allocate and free, from the same allocator.
        let scratch = allocator.alloc_bytes(MIB, &stream).unwrap();
        log.lock().unwrap().push(("cache", request.bytes));
        drop(scratch);
        taken.lock().unwrap().drain(..).map(|block| block.bytes()).sum()
    });
    let empty = bench.allocator.register_reclaimer(9, "empty", move |request| {
        log_too.lock().unwrap().push(("empty", request.bytes));
        0
    });
    let (held, _) = served(&bench, 50 * MIB);
    assert_eq!(*asked.lock().unwrap(), [("empty", 50 * MIB), ("cache", 50 * MIB)]);
    drop((held, reluctant, willing, empty));
    bench.assert_returned();
}

/// A refused request, after which everything but the counts of failures is as before.
fn refused(bench: &Bench, bytes: u64) -> OomReport {
    let before = (bench.allocator.stats(), bench.allocator.snapshot());
    let error = bench.refused(bytes);
    let text = error.to_string();
    let report = error.report().unwrap().clone();
    assert_eq!((report.requested, report.allocated), (bytes, before.0.allocated_bytes.all.current));
    assert!(text.starts_with("out of memory. Tried to allocate") && text.contains("\n  try: "), "{text}");
    let after = (bench.allocator.stats(), bench.allocator.snapshot());
    assert_eq!(after.0.num_ooms, before.0.num_ooms + 1);
    assert_eq!(after.0.allocation, before.0.allocation);
    assert_eq!(after.0.allocated_bytes, before.0.allocated_bytes);
    if report.released == 0 {
        assert_eq!(after.0.reserved_bytes, before.0.reserved_bytes);
        assert_eq!(after.1.segments, before.1.segments);
    }
    assert_eq!(after.0.reserved_bytes.all.current + report.released, before.0.reserved_bytes.all.current);
    report
}

pub(crate) fn says(report: &OomReport, text: &str) {
    assert!(report.to_string().contains(text), "not {text:?}: {report}");
}

#[test]
fn report_too_big() {
    let bench = Bench::new(64 * MIB, "");
    let report = refused(&bench, 100 * MIB);
    assert_eq!((report.refusal, report.growth), (Some(Refusal::Device), 100 * MIB));
    assert_eq!(report.advice, [Advice::LargerDevice { bytes: 100 * MIB }]);
    says(&report, "total capacity of 64.00 MiB of which 64.00 MiB is free");
    says(&report, "try: use a device of at least 100.00 MiB");
    let _scope = TagScope::new("weights");
    let held = bench.alloc(50 * MIB);
    let report = refused(&bench, 30 * MIB);
    says(
        &report,
        "\n  refused by: the device, for 30.00 MiB more of physical memory\n  lacking: 16.00 MiB on the device\n",
    );
    says(&report, "try: free at least 16.00 MiB; most is held by \"weights\" (50.00 MiB)");
    drop(held);
}

#[test]
fn report_fragmented() {
    let bench = Bench::new(20 * MIB, "backing:segments");
    let mut held: Vec<_> = (0..5).map(|_| bench.alloc(4 * MIB)).collect();
    drop(held.remove(3));
    drop(held.remove(1));
    let report = refused(&bench, 8 * MIB);
    assert_eq!((report.largest_free, report.free_in_pool, report.pieces), (4 * MIB, 8 * MIB, 2));
    assert_eq!(report.advice, [Advice::FreeMore { least: 0, largest: None }], "{report}");
    says(&report, "Tried to allocate 20.00 MiB for a request of 8.00 MiB. GPU ");
    says(&report, "\n  unallocated in segments that other memory uses in part: 8.00 MiB");
    says(&report, "\n  free in its pool: 8.00 MiB in 2 pieces, the largest of 4.00 MiB");
    says(&report, "try: free live memory: larger pieces come together then");
    drop(held);

    // Mapped memory comes in frames.
    let bench = Bench::new(16 * MIB, "backing:paged,frame_mb:8");
    let mut held: Vec<_> = (0..16).map(|_| bench.alloc(MIB)).collect();
    drop((held.remove(12), held.remove(4)));
    let report = refused(&bench, 2 * MIB);
    says(&report, "Tried to allocate 2.00 MiB. GPU ");
    says(&report, "\n  unallocated in frames that other memory uses in part: 2.00 MiB");
    says(&report, "try: free live memory: larger pieces come together then");
}

#[test]
fn report_other_process() {
    let bench = Bench::new(64 * MIB, "");
    bench.driver.set_other_process_bytes(40 * MIB);
    let report = refused(&bench, 50 * MIB);
    let memory = report.attribution.as_ref().unwrap();
    assert_eq!(memory.held_by_others(), 40 * MIB);
    assert!(report.advice.contains(&Advice::OthersHold { held: 40 * MIB }));
    let is_known = memory.rest_of_process.is_some();
    let who = if is_known { "another process. " } else { "others than this allocator. " };
    says(&report, &format!("40.00 MiB is held by {who}"));
    says(&report, "lacking: 26.00 MiB on the device");
}

#[test]
fn report_limit() {
    let bench = Bench::new(GIB, "limit_mb:100");
    bench.driver.set_other_process_bytes(100 * MIB);
    let held = bench.alloc(90 * MIB);
    let report = refused(&bench, 20 * MIB);
    assert_eq!((report.refusal, report.limit), (Some(Refusal::Limit), Some(100 * MIB)));
    assert!(report.advice.contains(&Advice::RaiseLimit { to: 110 * MIB }));
    says(&report, "100.00 MiB allowed");
    says(
        &report,
        "lacking: 10.00 MiB below the limit\n  live: 90.00 MiB (without a tag)\n  try: raise the limit to 110.00 MiB",
    );
    let blames_others = report.advice.iter().any(|advice| matches!(advice, Advice::OthersHold { .. }));
    assert!(!blames_others, "the device has enough, so it is not for others to free: {report}");
    bench.allocator.set_limit(Some(110 * MIB));
    drop(bench.alloc(20 * MIB));
    drop(held);
}

#[test]
fn report_headroom() {
    let bench = Bench::new(100 * MIB, "headroom_mb:30");
    let report = refused(&bench, 80 * MIB);
    assert_eq!((report.refusal, report.headroom), (Some(Refusal::Headroom), 30 * MIB));
    assert!(report.advice.contains(&Advice::LowerHeadroom { to: 20 * MIB }));
    says(&report, "refused by: the headroom of 30.00 MiB, for 80.00 MiB more");
    says(&report, "try: lower the headroom to 20.00 MiB");
}

#[test]
fn report_private_pool() {
    let bench = Bench::new(64 * MIB, "backing:segments");
    let pool = bench.pool();
    drop(pool.alloc_bytes(40 * MIB, &bench.stream).unwrap());
    // So that the segment cannot go back.
    let _live = pool.alloc_bytes(4 * MIB, &bench.stream).unwrap();
    let report = refused(&bench, 30 * MIB);
    assert_eq!(report.reserved_by_private_pools, 40 * MIB);
    assert!(report.advice.contains(&Advice::PrivatePool { pool: pool.id(), block: 36 * MIB }));
    says(&report, "of both together, private pools hold 40.00 MiB");
    assert!(report.advice.contains(&Advice::ReleasePools { held: 40 * MIB }));
    says(&report, "lend its memory (use_on_oom): it has 36.00 MiB free");
    says(&report, "try: release private pools, which hold 40.00 MiB");
}

#[test]
fn report_of_a_request_that_the_limit_rejects_at_once() {
    let bench = Bench::new(GIB, "throw_on_cudamalloc_oom:True,limit_mb:64,backing:segments");
    drop(bench.alloc_on(&bench.side, 40 * MIB));
    let report = refused(&bench, 50 * MIB);
    assert_eq!((report.refusal, report.released), (Some(Refusal::Limit), 0));
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_oom_rejections, stats.num_alloc_retries), (1, 0));
    assert_eq!(stats.reserved_bytes.all.current, 40 * MIB);
}

#[test]
fn the_padding_of_an_alignment_is_reported() {
    let bench = Bench::new(GIB, "");
    let report = bench.allocator.alloc_aligned(GIB, 2 * MIB, &bench.stream).unwrap_err().report().unwrap().clone();
    assert_eq!((report.requested, report.padding), (GIB, 2 * MIB - 512));
    assert_eq!(report.advice, [Advice::LargerDevice { bytes: GIB + 2 * MIB }], "{report}");
    says(&report, "Tried to allocate 1.00 GiB, and 2.00 MiB more for its alignment. GPU ");
    says(&report, "use a device of at least 1.00 GiB (1075838976 bytes)");

    let bench = Bench::new(64 * MIB, "no_cache:True");
    let report = bench.allocator.alloc_aligned(64 * MIB, 4096, &bench.stream).unwrap_err().report().unwrap().clone();
    says(&report, "Tried to allocate 64.00 MiB, and 3.50 KiB more for its alignment. GPU ");
    says(&report, "use a device of at least 64.00 MiB (67112448 bytes)");
    let report = refused(&bench, 64 * MIB + 1);
    assert_eq!(report.padding, 0, "rounding is no padding");
}

#[test]
fn the_first_refusal_saves_a_snapshot_if_asked_to() {
    // Other processes run this test at the same time.
    let name = format!("first_refusal_{}", std::process::id());
    let folder = std::env::temp_dir();
    let asked = folder.join(&name).with_extension("json");
    let bench = Bench::new(64 * MIB, &format!("history:100,oom_snapshot:{}", asked.display()));
    let path_of = |bench: &Bench| match bench.device.info().ordinal {
        0 => asked.clone(),
        ordinal => folder.join(format!("{name}.{ordinal}.json")),
    };
    let path = path_of(&bench);
    let held = bench.alloc(40 * MIB);
    let refuse = || bench.allocator.alloc_bytes(40 * MIB, bench.device.default_stream()).unwrap_err();
    says(refuse().report().unwrap(), &format!("snapshot: saved as {}", path.display()));
    let saved = std::fs::read_to_string(&path).unwrap();
    assert!(
        saved.contains("\"action\":\"oom\"") && saved.contains(&format!("\"requested_size\":{}", 40 * MIB)),
        "{saved}"
    );
    std::fs::remove_file(&path).unwrap();
    assert!(refuse().is_out_of_memory());
    assert!(!path.exists(), "only the first");
    drop(held);
    bench.assert_returned();
    // The refused request stands there without a history, too.
    let bench = Bench::new(64 * MIB, &format!("oom_snapshot:{}", asked.display()));
    let path = path_of(&bench);
    let held = bench.alloc(40 * MIB);
    let scope = TagScope::new("scores");
    assert!(bench.allocator.alloc_bytes(30 * MIB, bench.device.default_stream()).unwrap_err().is_out_of_memory());
    drop(scope);
    let saved = std::fs::read_to_string(&path).unwrap();
    let (entry, _) = saved.split_once("\"action\":\"oom\"").unwrap().1.split_once('}').unwrap();
    assert!(entry.contains(&format!("\"size\":{}", 30 * MIB)) && entry.contains("\"scores\""), "{entry}");
    std::fs::remove_file(&path).unwrap();
    drop(held);
    bench.assert_returned();
    // The report tells of a file that cannot be written.
    let bench = Bench::new(64 * MIB, "oom_snapshot:/nowhere/at/all.pickle");
    let observed = Arc::new(Mutex::new(String::new()));
    let _observer = bench.allocator.observe_oom({
        let observed = observed.clone();
        move |report| *observed.lock().unwrap() = report.to_string()
    });
    let report = refused(&bench, GIB);
    assert!(matches!(&report.snapshot, Some(Err(aquifer_allocator::snapshot::SaveError::Create { .. }))), "{report}");
    says(&report, "snapshot: cannot save a snapshot as /nowhere/at/all");
    assert_eq!(*observed.lock().unwrap(), report.to_string());
    assert!(refused(&bench, GIB).snapshot.is_none(), "only the first");
    let held = bench.alloc(40 * MIB);
    drop(held);
    bench.assert_returned();
}
