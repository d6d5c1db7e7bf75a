//! Statistics under PyTorch's names.

use super::*;

/// PyTorch's test_host_memory_stats, with slabs where that has blocks.
#[test]
fn host_memory_stats() {
    let bench = Bench::new();
    let value = |key| bench.pool.stats().iter().find(|&(name, _)| name == key).unwrap().1;
    let first = bench.pool.alloc::<u32>(10 * 1024).unwrap();
    let second = bench.pool.alloc::<u32>(10 * 1024).unwrap();
    assert_eq!((value("active_requests.current"), value("active_bytes.current")), (2, 2 * 40_960));
    assert_eq!((value("allocations.current"), value("allocated_bytes.current")), (1, 2 << 20));
    assert_eq!((value("num_host_alloc"), value("host_alloc_time.count")), (1, 1));
    drop(first);
    assert_eq!((value("active_requests.current"), value("active_requests.peak")), (1, 2));
    assert_eq!((value("active_bytes.allocated"), value("active_bytes.freed")), (2 * 40_960, 40_960));
    bench.pool.reset_peak_stats();
    assert_eq!((value("active_requests.peak"), value("active_bytes.peak")), (1, 40_960));
    drop(second);
    assert_eq!((value("allocations.current"), value("active_bytes.current")), (1, 0), "freed memory is cached");
    bench.pool.empty_cache().unwrap();
    assert_eq!((value("allocations.current"), value("allocated_bytes.freed"), value("num_host_free")), (0, 2 << 20, 1));
    bench.pool.reset_accumulated_stats();
    let accumulated =
        bench.pool.stats().iter().filter(|(name, _)| name.ends_with(".allocated") || name.starts_with("num"));
    assert!(accumulated.into_iter().all(|(_, value)| value == 0));
}

#[test]
fn memory_in_flight_is_active_until_it_is_known_to_be_done() {
    let bench = Bench::new();
    let buffer = bench.pool.alloc_zeroed::<u8>(1 << 20).unwrap();
    bench.upload(&buffer).unwrap();
    drop(buffer);
    assert_eq!(bench.pool.stats().active_bytes.current, 1 << 20);
    let tick = bench.stream.tick();
    tick.synchronize().unwrap();
    assert_eq!(bench.calls_in(|| assert_eq!(bench.pool.stats().active_bytes.current, 0)).total(), 0);
    bench.check_over();
}
