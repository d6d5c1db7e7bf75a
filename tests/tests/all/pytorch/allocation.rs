//! PyTorch's tests of allocation, statistics and limits, one by one; `CHECKLIST.md` lists them all.

use std::sync::{Arc, Mutex};

use aquifer::memory::{AllocError, Config, OomReport};

use aquifer::device::RequestError;
use aquifer_device::Code;
use aquifer_tests::{Bench, GIB, KIB, MIB, Subject, check, write_on};

#[test]
fn item_01_memory_allocation() {
    let bench = Bench::new(GIB, "");
    let before = bench.allocator.memory_allocated();
    let held = bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap();
    assert_eq!(bench.allocator.memory_allocated(), before + 100 * MIB);
    assert!(bench.allocator.memory_reserved() >= bench.allocator.memory_allocated());
    drop(held);
    assert_eq!(bench.allocator.memory_allocated(), before);
    bench.assert_returned();
}

#[test]
fn item_02_memory_stats() {
    let bench = Bench::new(GIB, "");
    let held = bench.allocator.alloc_bytes(1000, &bench.stream).unwrap();
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
    let bench = Bench::new(GIB, "max_split_size_mb:64,roundup_power2_divisions:8");
    let pool = bench.allocator.create_pool(aquifer::memory::PoolOptions::default()).unwrap();
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
        let sum = held.iter().map(aquifer::memory::Allocation::bytes).sum();
        check::statistics(&bench.allocator, (held.len() as u64, sum));
        check::readers(&bench.allocator);
    }
    drop(held);
    drop(pool);
    bench.assert_returned();
}

#[test]
fn item_04_peaks_and_monotone_reserved() {
    let bench = Bench::new(GIB, "");
    let (mut held, mut most, mut reserved) = (Vec::new(), 0, 0);
    for step in 1..40_u64 {
        held.push(bench.allocator.alloc_bytes(step * 300 * KIB, &bench.stream).unwrap());
        most = most.max(bench.allocator.memory_allocated());
        if step % 4 == 0 {
            held.drain(..3);
        }
        let stats = bench.allocator.stats();
        assert_eq!(stats.allocated_bytes.all.peak, most);
        assert!(stats.reserved_bytes.all.current >= reserved, "reserved shrank without empty_cache");
        reserved = stats.reserved_bytes.all.current;
    }
    drop(held);
    bench.allocator.reset_peak_stats();
    assert_eq!(bench.allocator.stats().allocated_bytes.all.peak, 0);
    bench.assert_returned();
}

#[test]
fn item_05_devices_have_their_own_statistics() {
    let (one, other) = (Bench::new(GIB, ""), Bench::new(GIB, ""));
    let first = one.allocator.alloc_bytes(MIB, &one.stream).unwrap();
    let second = other.allocator.alloc_bytes(30 * MIB, &other.stream).unwrap();
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
    let error = bench.allocator.alloc_bytes(800_000_000 * GIB, &bench.stream).unwrap_err();
    assert!(error.is_out_of_memory() && error.report().is_some());
    let text = error.to_string();
    let begins = format!("Tried to allocate 800000000.00 GiB. GPU {}", bench.device.info().ordinal);
    assert!(text.contains(&begins), "{text}");
    assert!(text.contains("has a total capacity of 1.00 GiB of which 1.00 GiB is free"), "{text}");
    let error = bench.allocator.alloc_bytes(1 << 60, &bench.stream).unwrap_err();
    assert!(matches!(error, AllocError::TooLarge { .. }) && error.is_out_of_memory());
    assert!(error.to_string().contains("more than 1EB memory"), "{error}");
    let after = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
    write_on(&bench.stream, after.ptr(), MIB);
    bench.stream.synchronize().unwrap();
    assert_eq!(bench.allocator.stats().num_ooms, 1);
}

#[test]
fn item_07_out_of_memory_retry() {
    let bench = Bench::new(100 * MIB, "backing:segments");
    drop(bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap());
    drop([20, 21].map(|mib| bench.allocator.alloc_bytes(mib * MIB, &bench.stream).unwrap()));
    assert_eq!(bench.allocator.stats().num_alloc_retries, 0);
    let held = bench.allocator.alloc_bytes(90 * MIB, &bench.stream).unwrap();
    let stats = bench.allocator.stats();
    assert_eq!((stats.num_alloc_retries, stats.num_ooms, stats.reserved_bytes.all.current), (1, 0, 90 * MIB));
    drop(held);
    bench.assert_returned();
}

#[test]
fn item_08_set_per_process_memory_fraction() {
    let bench = Bench::new(GIB, "");
    for wrong in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(bench.allocator.set_memory_fraction(wrong), Err(AllocError::Config(_))), "{wrong}");
    }
    bench.allocator.set_memory_fraction(0.5).unwrap();
    let held = bench.allocator.alloc_bytes(510 * MIB, &bench.stream).unwrap();
    let error = bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap_err();
    assert!(error.to_string().contains("out of memory") && error.to_string().contains("512.00 MiB allowed"), "{error}");
    bench.allocator.set_memory_fraction(1.0).unwrap();
    let more = bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap();
    drop((held, more));
    bench.assert_returned();
}

#[test]
fn item_09_get_per_process_memory_fraction() {
    let bench = Bench::new(GIB, "");
    assert_eq!(bench.allocator.limit(), None);
    bench.allocator.set_memory_fraction(0.25).unwrap();
    assert_eq!(bench.allocator.limit(), Some(256 * MIB));
    bench.allocator.set_memory_fraction(1.0).unwrap();
    assert_eq!(bench.allocator.limit(), None);
}

#[test]
fn item_10_memory_fraction_setting() {
    let bench = Bench::new(GIB, "per_process_memory_fraction:0.5");
    assert_eq!(bench.allocator.limit(), Some(512 * MIB));
    assert!(bench.allocator.alloc_bytes(600 * MIB, &bench.stream).unwrap_err().is_out_of_memory());
    for wrong in ["1.5", "-1", "half"] {
        Config::parse(&format!("per_process_memory_fraction:{wrong}")).unwrap_err();
    }
}

#[test]
fn item_11_errors_name_their_code() {
    assert_eq!((Code::OUT_OF_MEMORY.0, Code::OUT_OF_MEMORY.name()), (2, "CUDA_ERROR_OUT_OF_MEMORY"));
    let driver = Subject::new(MIB);
    let error = driver.device().alloc(GIB).unwrap_err();
    assert!(error.is_out_of_memory() && error.to_string().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{error}");
}

#[test]
fn item_12_raises_oom_and_works_after() {
    for options in ["", "max_split_size_mb:1024"] {
        let bench = Bench::new(GIB, options);
        bench.allocator.alloc_bytes(1200 * MIB, &bench.stream).unwrap_err();
        drop(bench.allocator.alloc_bytes(1000 * MIB, &bench.stream).unwrap());
        bench.assert_returned();
    }
}

#[test]
fn item_13_notifies_oom() {
    let bench = Bench::new(GIB, "");
    let seen: Arc<Mutex<Vec<OomReport>>> = Arc::default();
    let sink = seen.clone();
    let registration = bench.allocator.observe_oom(move |report| sink.lock().unwrap().push(report.clone()));
    bench.allocator.alloc_bytes(3 * GIB, &bench.stream).unwrap_err();
    let reports = seen.lock().unwrap().clone();
    assert_eq!(reports.len(), 1);
    assert_eq!((reports[0].requested, reports[0].memory.unwrap().total), (3 * GIB, GIB));
    drop(registration);
    bench.allocator.alloc_bytes(3 * GIB, &bench.stream).unwrap_err();
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[test]
fn item_14_allocator_settings() {
    let growth = |options: &str, bytes: u64| {
        let bench = Bench::new(GIB, options);
        let held = bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap();
        let stats = bench.allocator.stats();
        drop(held);
        (stats.active_bytes.all.allocated, stats.requested_bytes.all.allocated)
    };
    let list = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]";
    let n = 84 * MIB;
    assert_eq!(growth("", n), (n, n));
    assert_eq!(growth("roundup_power2_divisions:4", n), (96 * MIB, n));
    assert_eq!(growth("garbage_collection_threshold:0.5,max_split_size_mb:40", n), (n, n));
    assert_eq!(growth(list, n), (88 * MIB, n));
    assert_eq!(growth(list, 400 * MIB), (512 * MIB, 400 * MIB));
}

#[test]
fn item_15_allocator_backend() {
    Config::parse("backend:native").unwrap();
    Config::parse("backend:cudaMallocAsync").unwrap_err();
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
fn item_22_device_memory_used() {
    let bench = Bench::new(GIB, "");
    let before = bench.device_free();
    let held = bench.allocator.alloc_bytes(100 * MIB, &bench.stream).unwrap();
    assert_eq!(before - bench.device_free(), 100 * MIB);
    drop(held);
    bench.assert_returned();
}

#[test]
fn item_23_asking_makes_no_driver_call() {
    let bench = Bench::new(GIB, "history:10");
    drop(bench.allocator.alloc_bytes(1000, &bench.stream).unwrap());
    let before = bench.driver.calls_made();
    check::statistics(&bench.allocator, (0, 0));
    check::readers(&bench.allocator);
    assert_eq!(bench.driver.calls_made(), before);
}

#[test]
fn item_24_empty_cache_keeps_segments_in_use() {
    let bench = Bench::new(GIB, "backing:segments");
    let small = bench.allocator.alloc_bytes(512, &bench.stream).unwrap();
    let large = bench.allocator.alloc_bytes(2 * MIB, &bench.stream).unwrap();
    drop([30, 40].map(|mib| bench.allocator.alloc_bytes(mib * MIB, &bench.stream).unwrap()));
    assert_eq!(bench.allocator.empty_cache().unwrap(), 70 * MIB);
    assert_eq!(bench.allocator.memory_reserved(), 22 * MIB);
    drop((small, large));
    bench.assert_returned();
}

#[test]
fn kept_5_large_blocks_keep_a_rest_of_up_to_a_mebibyte() {
    let waste = |options: &str, rest: u64| {
        let bench = Bench::new(GIB, options);
        let [first, fence] = [(); 2].map(|()| bench.allocator.alloc_bytes(4 * MIB + rest, &bench.stream).unwrap());
        let place = first.ptr();
        drop(first);
        let held = bench.allocator.alloc_bytes(4 * MIB, &bench.stream).unwrap();
        assert_eq!(held.ptr(), place, "{options}: it takes the free block");
        let stats = bench.allocator.stats();
        drop((held, fence));
        stats.allocated_bytes.all.current - stats.requested_bytes.all.current
    };
    assert_eq!(waste("backing:segments", MIB), MIB);
    assert_eq!(waste("backing:segments", MIB + 512), 0);
    assert_eq!(waste("backing:paged", MIB), 0);
}

#[test]
fn kept_9_of_equal_blocks_the_lowest_is_reused() {
    let bench = Bench::new(GIB, "backing:segments");
    for bytes in [1000, 3 * MIB, 30 * MIB] {
        // Six fit into one segment, and the last is kept: no freed block merges with the segment's
        // rest.
        let held: Vec<_> = (0..6).map(|_| bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap()).collect();
        let (freed, mut kept): (Vec<_>, Vec<_>) = (0..).zip(held).partition(|(number, _)| number % 2 == 0);
        let mut places: Vec<_> = freed.iter().map(|(_, block)| block.ptr()).collect();
        freed.into_iter().rev().for_each(drop);
        places.sort_unstable();
        let again: Vec<_> = places.iter().map(|_| bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap()).collect();
        assert_eq!(again.iter().map(aquifer::memory::Allocation::ptr).collect::<Vec<_>>(), places, "{bytes}");
        // A block that was just given back is the one that serves the next request of its size.
        let place = kept.remove(1).1.ptr();
        assert_eq!(bench.allocator.alloc_bytes(bytes, &bench.stream).unwrap().ptr(), place);
    }
}
