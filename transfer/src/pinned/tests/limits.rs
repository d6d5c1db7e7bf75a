//! Memory that the pool holds and releases.

use std::collections::VecDeque;

use super::*;

const MIB: u64 = 1 << 20;

#[test]
fn waste_is_bounded_where_powers_of_two_double_it() {
    let bench = Bench::new();
    let buffer = bench.pool.alloc::<u8>(129 * (1 << 20) + (1 << 19)).unwrap();
    let stats = bench.pool.stats();
    assert_eq!((stats.active_bytes.current, stats.allocated_bytes.current), (144 * MIB, 144 * MIB));
    drop(buffer);
    bench.check_over();
}

#[test]
fn the_limit_holds_and_the_error_has_the_facts() {
    let bench = Bench::limited(8 * MIB);
    let first = bench.pool.alloc::<u8>(5 << 20).unwrap();
    let error = bench.pool.alloc::<u8>(4 << 20).unwrap_err();
    let text = error.to_string();
    let TransferError::OutOfPinned { requested, reserved, free, limit, source, .. } = error else { panic!("{text}") };
    assert_eq!((requested, reserved, free, limit), (4 * MIB, 5 * MIB, 0, Some(8 * MIB)));
    assert!(source.is_none(), "the driver was not asked");
    assert!(text.contains("0 of them unused in pieces of at most 0, 0 dropped and still used by copies"), "{text}");
    assert_eq!(bench.pool.stats().num_ooms, 1);
    let second = bench.pool.alloc::<u8>(2 << 20).expect("this fits");
    bench.pool.set_limit(None);
    let third = bench.pool.alloc::<u8>(4 << 20).expect("nothing limits it now");
    drop((first, second, third));
    bench.check_over();
}

#[test]
fn a_limit_below_a_slab_still_serves_what_fits() {
    let bench = Bench::limited(64 << 10);
    let all = bench.pool.alloc::<u8>(64 << 10).unwrap();
    assert!(bench.pool.alloc::<u8>(1).is_err());
    drop(all);
    let small = bench.pool.alloc::<u8>(1).expect("the unused slab of another shape goes back first");
    assert_eq!(bench.pool.stats().num_host_free, 1);
    drop(small);
    bench.check_over();
}

#[test]
fn under_a_limit_unused_slabs_of_other_sizes_are_released_before_a_wait() {
    let bench = Bench::limited(64 * MIB);
    let (unused, in_flight) =
        (bench.pool.alloc::<u8>(32 << 20).unwrap(), bench.pool.alloc_zeroed::<u8>(24 << 20).unwrap());
    (0..50).for_each(|_| bench.upload(&in_flight).unwrap());
    drop((unused, in_flight));
    let wanted = bench.pool.alloc::<u8>(40 << 20).unwrap();
    let stats = bench.pool.stats();
    assert_eq!((stats.num_host_free, stats.num_waits), (1, 0));
    let waited_for = bench.pool.alloc::<u8>(20 << 20).unwrap();
    let stats = bench.pool.stats();
    assert_eq!((stats.num_host_free, stats.num_waits, stats.num_ooms), (2, 1, 0), "one of its size takes its place");
    assert!(stats.allocated_bytes.peak <= 64 * MIB);
    drop((wanted, waited_for));
    bench.check_over();
}

#[test]
fn trimming_releases_the_largest_unused_slabs_and_no_others() {
    let bench = Bench::new();
    let sizes = [4 << 20, 16 << 20, 32 << 20, 20 << 20];
    let mut buffers: Vec<_> = sizes.iter().map(|&bytes| bench.pool.alloc::<u8>(bytes).unwrap()).collect();
    let in_flight = buffers.pop().unwrap();
    bench.upload(&in_flight).unwrap();
    drop(in_flight);
    let kept = buffers.remove(0);
    drop(buffers);
    let reserved = bench.pool.stats().allocated_bytes.current;
    assert_eq!(bench.pool.trim_to(reserved).unwrap(), 0);
    assert_eq!(bench.pool.trim_to(reserved - 1).unwrap(), 32 * MIB);
    assert_eq!(bench.pool.empty_cache().unwrap(), 16 * MIB, "what is in use or in flight stays");
    bench.stream.synchronize().unwrap();
    assert_eq!(bench.pool.empty_cache().unwrap(), 20 * MIB);
    drop(kept);
    bench.check_over();
}

#[test]
fn growth_is_by_an_eighth_so_that_small_buffers_take_few_slabs() {
    let bench = Bench::new();
    let buffers: Vec<_> = (0..10_000).map(|_| bench.pool.alloc::<u8>(16 << 10).unwrap()).collect();
    let stats = bench.pool.stats();
    assert_eq!(stats.active_bytes.current, 10_000 << 14);
    assert!(stats.allocated_bytes.current * 8 <= stats.active_bytes.current * 9 + 16 * MIB, "{stats:?}");
    assert!(stats.num_host_alloc < 45, "{stats:?}");
    drop(buffers);
    bench.check_over();
}

/// A large unused slab stays whole only while that wastes little.
#[test]
fn an_idle_large_slab_serves_small_requests_before_the_pool_doubles() {
    let bench = Bench::new();
    drop(bench.pool.alloc::<u8>(512 << 20).unwrap());
    let buffers: Vec<_> = (0..400).map(|_| bench.pool.alloc::<u8>(1 << 20).unwrap()).collect();
    let stats = bench.pool.stats();
    let most = 512 * MIB;
    assert!(stats.allocated_bytes.peak > most, "the first ones get slabs of their own");
    assert!(stats.allocated_bytes.peak <= most + most / 8 + 32 * MIB, "{stats:?}");
    drop(buffers);
    let large = bench.pool.alloc::<u8>(512 << 20).unwrap();
    assert_eq!(bench.pool.stats().num_host_alloc, stats.num_host_alloc, "and it is whole again");
    drop(large);
    bench.check_over();
}

#[test]
fn a_small_request_leaves_a_large_unused_slab_whole() {
    let bench = Bench::new();
    drop(bench.pool.alloc::<u8>(256 << 20).unwrap());
    let small = bench.pool.alloc::<u8>(1 << 20).unwrap();
    assert_eq!(bench.pool.stats().num_host_alloc, 2, "it gets a slab of its own");
    let eighth = bench.pool.alloc::<u8>(32 << 20).unwrap();
    assert_eq!(bench.pool.stats().num_host_alloc, 2, "an eighth is worth a split");
    drop((small, eighth));
    drop(bench.pool.alloc::<u8>(256 << 20).unwrap());
    assert_eq!(bench.pool.stats().num_host_alloc, 2, "and it is whole again");
    bench.check_over();
}

#[test]
fn the_smallest_unused_block_serves() {
    let bench = Bench::new();
    let blocks = [12, 4, 8].map(|mib| bench.pool.alloc::<u8>(mib << 20).unwrap());
    let [_, four, eight] = blocks.each_ref().map(address);
    drop(blocks);
    for (mib, place) in [(4, four), (3, four), (6, eight)] {
        let taken = bench.pool.alloc::<u8>(mib << 20).unwrap();
        assert_eq!(address(&taken), place, "{mib} MiB");
    }
    assert_eq!(bench.pool.stats().num_host_alloc, 3);
    bench.check_over();
}

#[test]
fn sizes_that_vary_settle_on_few_slabs() {
    let bench = Bench::new();
    for round in 0..1_000_usize {
        drop(bench.pool.alloc::<u8>((16 << 20) + (round * 7919 % 1000) * 1000).unwrap());
    }
    let stats = bench.pool.stats();
    assert!(stats.num_host_alloc <= 5, "{stats:?}");
    bench.check_over();
}

/// A request is refused only where buffers that are alive, and what their sizes are rounded up by,
/// leave no room.
#[test]
fn under_a_limit_idle_memory_is_made_anew_before_a_request_is_refused() {
    for (copies, waits, rounds) in [(false, false, 3000), (true, false, 1000), (true, true, 1000)] {
        let bench = Bench::limited(64 * MIB);
        let (mut random, mut live, mut refused, mut unfair) = (12345_u64, VecDeque::new(), 0, 0);
        for _ in 0..rounds {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = 1 + (random >> 33) % (20 * MIB);
            match bench.pool.alloc::<u8>(usize::try_from(bytes).unwrap()) {
                Ok(block) => {
                    if copies {
                        bench.upload(&block).unwrap();
                    }
                    live.push_back((bytes, block));
                }
                Err(error) => {
                    assert!(matches!(error, TransferError::OutOfPinned { .. }), "{error}");
                    refused += 1;
                    let used: u64 = live.iter().map(|(bytes, _)| bytes).sum();
                    unfair += u64::from((used + bytes) * 9 / 8 <= 64 * MIB);
                    live.pop_front();
                }
            }
            if random & 7 == 0 {
                live.pop_front();
            }
            if waits {
                bench.stream.synchronize().unwrap();
            }
        }
        assert!(refused > 100 && unfair == 0, "copies {copies}, waits {waits}: {unfair} of {refused}");
        live.clear();
        bench.check_over();
    }
}
