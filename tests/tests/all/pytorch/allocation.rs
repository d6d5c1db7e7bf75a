//! PyTorch's tests of allocation, statistics and limits, one by one; `CHECKLIST.md` lists them all.

use aquifer_tests::prelude::*;

#[test]
fn items_01_and_22_memory_allocation() {
    let bench = Bench::new(GIB, "");
    let before = bench.allocator.memory_allocated();
    let held = bench.alloc(100 * MIB);
    assert_eq!(bench.allocator.memory_allocated(), before + 100 * MIB);
    assert!(bench.allocator.memory_reserved() >= bench.allocator.memory_allocated());
    assert_eq!(GIB - bench.device_free(), 100 * MIB);
    drop(held);
    assert_eq!(bench.allocator.memory_allocated(), before);
    bench.assert_returned();
}

#[test]
fn item_02_memory_stats() {
    let bench = Bench::new(GIB, "");
    let held = bench.alloc(1000);
    let stats = bench.allocator.stats();
    assert_eq!((stats.active.all.allocated, stats.active_bytes.small_pool.current), (1, 1024));
    assert_eq!((stats.allocated_bytes.all.allocated, stats.requested_bytes.all.current), (1024, 1000));
    drop(held);
    let stats = bench.allocator.stats();
    assert_eq!((stats.active.all.freed, stats.allocated_bytes.all.freed, stats.active.all.peak), (1, 1024, 1));
    bench.allocator.reset_peak_stats();
    bench.allocator.reset_accumulated_stats();
    let stats = bench.allocator.stats();
    assert_eq!((stats.active.all.peak, stats.active.all.allocated, stats.active.all.freed), (0, 0, 0));
    assert_eq!((stats.reserved_bytes.all.peak, stats.num_device_alloc), (2 * MIB, 0));
}

#[test]
fn item_03_statistics_are_those_of_the_snapshot() {
    let bench = Bench::new(GIB, "");
    let pool = bench.pool();
    let mut held = Vec::new();
    for step in 1..60_u64 {
        let bytes = step * step * 37_001 % (90 * MIB) + 1;
        let made = if step % 5 == 0 {
            pool.alloc_bytes(bytes, &bench.side)
        } else {
            bench.allocator.alloc_bytes(bytes, &bench.stream)
        };
        held.extend(made.ok());
        if step % 3 == 0 {
            let at = usize::try_from(step).unwrap() % held.len();
            held.swap_remove(at).record_stream(&bench.side).unwrap();
        }
        let sum = held.iter().map(Allocation::bytes).sum();
        check::statistics(&bench.allocator, (held.len() as u64, sum));
        check::readers(&bench.allocator);
    }
    drop(held);
    drop(pool);
    bench.assert_returned();
}

#[test]
fn item_05_devices_have_their_own_statistics() {
    let (one, other) = (Bench::new(GIB, ""), Bench::new(GIB, ""));
    let first = one.alloc(MIB);
    let second = other.alloc(30 * MIB);
    assert_eq!((one.allocator.memory_allocated(), other.allocator.memory_allocated()), (MIB, 30 * MIB));
    drop(first);
    assert_eq!((one.allocator.memory_allocated(), other.allocator.memory_allocated()), (0, 30 * MIB));
    let wrong = one.allocator.alloc_bytes(MIB, &other.stream);
    assert!(matches!(wrong, Err(AllocError::Request(RequestError::WrongDevice { .. }))));
    drop(second);
    one.assert_returned();
    other.assert_returned();
}

#[test]
fn item_06_out_of_memory() {
    let bench = Bench::new(GIB, "");
    let error = bench.refused(800_000_000 * GIB);
    assert!(error.is_out_of_memory() && error.report().is_some());
    let text = error.to_string();
    let begins = format!("Tried to allocate 800000000.00 GiB. GPU {}", bench.device.info().ordinal);
    assert!(text.contains(&begins), "{text}");
    assert!(text.contains("has a total capacity of 1.00 GiB of which 1.00 GiB is free"), "{text}");
    let error = bench.refused(1 << 60);
    assert!(matches!(error, AllocError::TooLarge { .. }) && error.is_out_of_memory());
    assert!(error.to_string().contains("more than 1EB memory"), "{error}");
    let _after = bench.written(MIB);
    bench.stream.synchronize().unwrap();
    assert_eq!(bench.allocator.stats().num_ooms, 1);
}

#[test]
fn items_08_to_10_memory_fraction() {
    let bench = Bench::new(GIB, "");
    for wrong in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(bench.allocator.set_memory_fraction(wrong), Err(AllocError::Config(_))), "{wrong}");
    }
    assert_eq!(bench.allocator.limit(), None);
    bench.allocator.set_memory_fraction(0.5).unwrap();
    assert_eq!(bench.allocator.limit(), Some(512 * MIB));
    let held = bench.alloc(510 * MIB);
    let error = bench.refused(100 * MIB);
    assert!(error.to_string().contains("out of memory") && error.to_string().contains("512.00 MiB allowed"), "{error}");
    bench.allocator.set_memory_fraction(1.0).unwrap();
    assert_eq!(bench.allocator.limit(), None);
    let more = bench.alloc(100 * MIB);
    drop((held, more));
    bench.assert_returned();
    assert_eq!(Bench::new(GIB, "per_process_memory_fraction:0.5").allocator.limit(), Some(512 * MIB));
}

#[test]
fn item_13_notifies_oom() {
    let bench = Bench::new(GIB, "");
    let seen: Arc<Mutex<Vec<OomReport>>> = Arc::default();
    let sink = seen.clone();
    let registration = bench.allocator.observe_oom(move |report| sink.lock().unwrap().push(report.clone()));
    bench.refused(3 * GIB);
    let reports = seen.lock().unwrap().clone();
    assert_eq!(reports.len(), 1);
    assert_eq!((reports[0].requested, reports[0].memory.unwrap().total), (3 * GIB, GIB));
    drop(registration);
    bench.refused(3 * GIB);
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[test]
fn item_20_raw_alloc() {
    let bench = Bench::new(GIB, "");
    let ptr = bench.allocator.alloc_raw(1025, &bench.stream).unwrap();
    assert_eq!((bench.allocator.size_of_raw(ptr).unwrap(), bench.allocator.memory_allocated()), (1536, 1536));
    write_on(&bench.stream, ptr, 1025);
    bench.allocator.record_stream_raw(ptr, &bench.side).unwrap();
    let foreign = bench.allocator.free_raw(ptr.offset(512)).unwrap_err();
    assert!(foreign.to_string().starts_with("invalid device pointer"), "{foreign}");
    bench.allocator.free_raw(ptr).unwrap();
    assert!(matches!(bench.allocator.free_raw(ptr), Err(AllocError::InvalidPointer { .. })));
    let null = bench.allocator.alloc_raw(0, &bench.stream).unwrap();
    assert_eq!(null.0, 0);
    bench.allocator.free_raw(null).unwrap();
    bench.assert_returned();
}

#[test]
fn item_23_asking_makes_no_driver_call() {
    let bench = Bench::new(GIB, "history:10");
    drop(bench.alloc(1000));
    let before = bench.driver.calls_made();
    check::statistics(&bench.allocator, (0, 0));
    check::readers(&bench.allocator);
    assert_eq!(bench.driver.calls_made(), before);
}

#[test]
fn item_24_empty_cache_keeps_segments_in_use() {
    let bench = Bench::new(GIB, "backing:segments");
    let small = bench.alloc(512);
    let large = bench.alloc(2 * MIB);
    drop([30, 40].map(|mib| bench.alloc(mib * MIB)));
    assert_eq!(bench.allocator.empty_cache().unwrap(), 70 * MIB);
    assert_eq!(bench.allocator.memory_reserved(), 22 * MIB);
    drop((small, large));
    bench.assert_returned();
}

#[test]
fn kept_5_large_blocks_are_cut_however_little_is_left() {
    let waste = |options: &str, rest: u64| {
        let bench = Bench::new(GIB, options);
        let [first, fence] = [(); 2].map(|()| bench.alloc(4 * MIB + rest));
        let place = first.ptr();
        drop(first);
        let held = bench.alloc(4 * MIB);
        assert_eq!(held.ptr(), place, "{options}: it takes the free block");
        let stats = bench.allocator.stats();
        drop((held, fence));
        stats.allocated_bytes.all.current - stats.requested_bytes.all.current
    };
    for options in ["backing:segments", "backing:paged"] {
        assert_eq!([512, MIB, MIB + 512].map(|rest| waste(options, rest)), [0; 3], "{options}");
    }
}

#[test]
fn kept_9_of_equal_blocks_the_lowest_is_reused() {
    let bench = Bench::new(GIB, "backing:segments");
    for bytes in [1000, 3 * MIB, 30 * MIB] {
        // Six fit into one segment, and the last is kept: no freed block merges with the segment's
        // rest.
        let held: Vec<_> = (0..6).map(|_| bench.alloc(bytes)).collect();
        let (freed, mut kept): (Vec<_>, Vec<_>) = (0..).zip(held).partition(|(number, _)| number % 2 == 0);
        let mut places: Vec<_> = freed.iter().map(|(_, block)| block.ptr()).collect();
        freed.into_iter().rev().for_each(drop);
        places.sort_unstable();
        let again: Vec<_> = places.iter().map(|_| bench.alloc(bytes)).collect();
        assert_eq!(again.iter().map(Allocation::ptr).collect::<Vec<_>>(), places, "{bytes}");
        // A block that was just given back is the one that serves the next request of its size.
        let place = kept.remove(1).1.ptr();
        assert_eq!(bench.alloc(bytes).ptr(), place);
    }
}
