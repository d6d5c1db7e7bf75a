//! Mapped memory at its edges: mappings that fail or are stuck, devices of odd sizes, pools,
//! captures and pins.

use aquifer_tests::prelude::*;

use super::block;

#[test]
fn memory_freed_next_to_a_failed_unmap_keeps_its_order() {
    let bench = Bench::new(GIB, "");
    let (done, used) = (block(&bench, 8), block(&bench, 8));
    bench.stream.synchronize().unwrap();
    bench.stream.tick().cover().unwrap();
    drop(done);
    bench.stream.synchronize().unwrap();
    let late = Mutex::new(Some(used));
    let (stream, driver) = (bench.stream.clone(), bench.driver.clone());
    // While one block is on its way back to the device, its neighbour is used and given back; and
    // then it stays after all.
    let registration = bench.allocator.observe_mappings(move |change| {
        if let (MappingChange::BeforeUnmap { .. }, Some(late)) = (change, late.lock().unwrap().take()) {
            stream.tick().cover().unwrap();
            driver.stall(&stream, Duration::from_millis(10)).unwrap();
            write_on(&stream, late.ptr(), late.bytes());
        }
    });
    bench.fail(Operation::Unmap, 1, Code(999));
    bench.allocator.empty_cache().unwrap_err();
    drop(registration);
    let other = bench.written_on(&bench.side, 16 * MIB);
    drop(other);
    bench.assert_returned();
}

#[test]
fn memory_of_a_pool_stays_where_a_graph_uses_it() {
    let bench = Bench::new(GIB, "");
    let pool = bench.pool();
    let capture = bench.stream.begin_capture().unwrap();
    let (inside, beside) =
        (pool.alloc_bytes(20 * MIB, &bench.stream).unwrap(), pool.alloc_bytes(2 * MIB, &bench.stream).unwrap());
    write_on(&bench.stream, inside.ptr(), inside.bytes());
    drop(inside);
    let graph = capture.end().unwrap();
    bench.stream.synchronize().unwrap();
    // Another graph of the pool needs more than there is in one piece.
    drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
    graph.launch(&bench.stream).unwrap();
    bench.stream.synchronize().unwrap();
    bench.assert_no_violation();
    drop((graph, beside, pool));
    bench.assert_returned();
}

#[test]
fn an_observer_that_panics_loses_no_memory() {
    for unmap in [false, true] {
        let bench = Bench::new(64 * MIB, "");
        let held = block(&bench, 8);
        let freed = block(&bench, 24);
        let beside = block(&bench, 2);
        drop(freed);
        bench.stream.synchronize().unwrap();
        let registration = bench.allocator.observe_mappings(move |change| {
            assert!(unmap != matches!(change, MappingChange::BeforeUnmap { .. }), "an observer panics");
        });
        let whole = block(&bench, 40);
        drop(registration);
        check::statistics(&bench.allocator, (3, 50 * MIB));
        drop((held, whole, beside));
        bench.assert_returned();
    }
}

#[test]
fn requests_beyond_the_device_take_no_addresses() {
    for (limit, refusal) in [(None, Refusal::Device), (Some(32 * MIB), Refusal::Limit)] {
        let bench = Bench::new(64 * MIB, "");
        bench.allocator.set_limit(limit);
        for bytes in [65 * MIB, 300 * MIB, 1 << 40, (1 << 60) - 1] {
            let error = bench.refused(bytes);
            assert_eq!(error.report().unwrap().refusal, Some(refusal), "{bytes}: {error}");
            assert_eq!(bench.calls(Operation::Reserve), 1, "the probe alone reserves addresses");
        }
        bench.assert_returned();
    }
}

#[test]
fn a_request_that_the_device_cannot_serve_takes_none_of_its_memory() {
    let bench = Bench::new(GIB, "");
    let live = block(&bench, 300);
    let granules = |bench: &Bench| bench.calls(Operation::CreatePhysical);
    let before = granules(&bench);
    let error = bench.refused(800 * MIB);
    assert!(error.is_out_of_memory());
    assert!(granules(&bench) - before < 10, "granules were created in vain: {}", granules(&bench) - before);
    // What is free is free to others throughout, and the allocator takes it where it is enough.
    let rest = block(&bench, 700);
    drop((live, rest));
    bench.allocator.empty_cache().unwrap();
    // A device that fails to report its free memory is asked for the memory itself.
    bench.fail(Operation::MemoryInfo, 1, Code(999));
    drop(block(&bench, 900));
    bench.assert_returned();
}

#[test]
fn granules_larger_than_the_device_are_none() {
    for (capacity, options) in [(GIB, "granule_mb:8796093022208"), (GIB, "granule_mb:2048"), (3 * MIB, "granule_mb:4")]
    {
        let bench = Bench::new(capacity, options);
        let held = bench.written(1000);
        drop(held);
        bench.allocator.empty_cache().unwrap();
        bench.assert_no_violation();
    }
}

/// Other reservations of any size do not move granules off multiples of their own size.
#[test]
fn granules_are_aligned_next_to_smaller_reservations() {
    for granule in [4, 16] {
        let bench = Bench::new(256 * MIB, &format!("granule_mb:{granule}"));
        let foreign = bench.device.driver().reserve(2 * MIB, 0).unwrap();
        let shared = bench.allocator.alloc_exportable(2 * MIB, HandleKind::PosixFd, &bench.stream).unwrap();
        let mut cache = bench.growable(32 * MIB);
        cache.grow_to(5 * MIB, &bench.stream).unwrap();
        write_on(&bench.stream, cache.ptr(), cache.bytes());
        let mut held: Vec<Allocation> = [1, 3, 7, 2, 30, 5].map(|mib| block(&bench, mib)).into();
        for round in 0..8 {
            drop(held.swap_remove(round % held.len()));
            held.push(block(&bench, 3 + 7 * round as u64));
            bench.allocator.trim_to(64 * MIB).unwrap();
        }
        drop((held, cache, shared));
        bench.device.driver().unreserve(foreign, 2 * MIB).unwrap();
        bench.assert_returned();
    }
}

#[test]
fn devices_of_odd_sizes_are_used_up_to_the_last_granule() {
    for capacity in [2 * MIB, 2 * MIB + 1, 5 * MIB, 63 * MIB + 511] {
        let bench = Bench::new(capacity, "");
        let mut held = Vec::new();
        while let Ok(block) = bench.allocator.alloc_bytes(MIB + 512, &bench.stream) {
            write_on(&bench.stream, block.ptr(), block.bytes());
            held.push(block);
        }
        assert_eq!(bench.allocator.memory_reserved(), capacity / (2 * MIB) * 2 * MIB, "of {capacity}");
        drop(held);
        bench.allocator.empty_cache().unwrap();
        bench.assert_no_violation();
    }
}

#[test]
fn memory_of_a_dropped_allocator_breaks_no_capture() {
    let bench = Bench::new(GIB, "");
    let before = Allocator::new(&bench.device, Config::default()).unwrap();
    drop(before.alloc_bytes(8 * MIB, &bench.side).unwrap());
    let capture = bench.stream.begin_capture().unwrap();
    drop(before);
    drop(bench.alloc_on(&bench.side, 8 * MIB));
    drop(capture.end().unwrap());
    bench.assert_returned();
}

#[test]
fn memory_that_a_capture_keeps_back_is_not_waited_for() {
    let bench = Bench::new(GIB, "");
    let used = bench.written_on(&bench.side, 100 * MIB);
    drop(used);
    let capture = bench.side.begin_capture().unwrap();
    // Without the capture, the host might wait for free memory rather than hold more than is in
    // use.
    let other = block(&bench, 200);
    drop(capture.end().unwrap());
    drop(other);
    bench.assert_returned();
}

#[test]
fn memory_is_given_back_despite_a_mapping_that_is_stuck() {
    let bench = Bench::new(GIB, "frame_mb:2");
    let rest = block(&bench, 8);
    let fault = |operation, nth| Fault::Nth { operation: Some(operation), nth, code: Code(999) };
    bench.driver.inject(fault(Operation::SetAccess, 1));
    bench.driver.inject(fault(Operation::Unmap, 2));
    bench.allocator.alloc_bytes(16 * MIB, &bench.side).unwrap_err();
    bench.driver.clear_faults();
    // The first mapping that is taken back is the stuck one, which stays stuck.
    bench.driver.inject(fault(Operation::Unmap, 1));
    bench.allocator.empty_cache().unwrap_err();
    assert_eq!(bench.allocator.memory_reserved(), 10 * MIB, "the stuck mapping is held in addition to live memory");
    drop(rest);
    bench.assert_returned();
}

#[test]
fn mappings_that_were_stuck_serve_a_request_that_needs_their_memory() {
    let bench = Bench::new(64 * MIB, "");
    let rest = block(&bench, 9);
    bench.fail(Operation::Map, 20, Code::OUT_OF_MEMORY);
    bench.driver.inject(Fault::Rate { operation: Some(Operation::Unmap), rate: 1.0, code: Code::OUT_OF_MEMORY });
    assert!(bench.refused(44 * MIB).is_out_of_memory());
    assert!(bench.refused(44 * MIB).is_out_of_memory(), "still stuck");
    bench.driver.clear_faults();
    drop([rest, block(&bench, 44)]);
    bench.assert_returned();
}

#[test]
fn pinned_memory_stays_while_the_allocator_sleeps() {
    let bench = Bench::new(GIB, "");
    let (allocator, held) = (&bench.allocator, bench.alloc(8 * MIB));
    allocator.sleep(Contents::Discard).unwrap();
    let asleep = allocator.pin_mapping(&held).unwrap_err();
    assert!(matches!(asleep, AllocError::Asleep), "{asleep}");
    allocator.wake().unwrap();
    let pinned = allocator.pin_mapping(&held).unwrap();
    assert_eq!(allocator.sleep(Contents::Discard).unwrap(), 0);
    allocator.wake().unwrap();
    drop((pinned, held));
    bench.assert_no_violation();
}

/// The peaks of reserved and allocated memory of a program whose block sizes change in each phase.
/// At the start it asks for `refused` bytes in vain, if that is not 0.
fn peaks_of_phases(refused: u64) -> (u64, u64) {
    let bench = Bench::new(40 * GIB, "");
    let alloc = |mib: u64| bench.alloc(mib * MIB);
    let mut blocks: Vec<Allocation> = (0..640).map(|_| alloc(16)).collect();
    if refused > 0 {
        assert!(bench.refused(refused).is_out_of_memory());
    }
    (0..1000).for_each(|_| drop(alloc(1)));
    let mut random = 1_u64;
    for phase in 1..8 {
        let mib = 16 + 6 * phase;
        let mut at = 0;
        blocks.retain(|_| {
            at += 1;
            at % 2 == 0
        });
        bench.stream.synchronize().unwrap();
        while bench.allocator.memory_allocated() + mib * MIB <= 10 * GIB {
            blocks.push(alloc(mib));
        }
        for at in (1..blocks.len()).rev() {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            blocks.swap(at, usize::try_from(random >> 33).unwrap() % (at + 1));
        }
    }
    let stats = bench.allocator.stats();
    drop(blocks);
    bench.assert_returned();
    (stats.reserved_bytes.all.peak, stats.allocated_bytes.all.peak)
}

#[test]
fn a_request_that_was_refused_is_no_peak_in_use() {
    let (reserved, allocated) = peaks_of_phases(0);
    for refused in [39 * GIB, 60 * GIB, 1 << 59] {
        let (more, same) = peaks_of_phases(refused);
        assert_eq!(same, allocated);
        assert!(
            more <= reserved + reserved / 64,
            "{more} bytes reserved instead of {reserved} after {refused} were refused"
        );
    }
}

#[test]
fn emptying_or_dropping_a_pool_leaves_spare_frames() {
    let bench = Bench::new(GIB, "");
    let mut cache = bench.growable(GIB);
    cache.grow_to(100 * MIB, &bench.stream).unwrap();
    cache.shrink_to(0, &bench.stream).unwrap();
    bench.stream.synchronize().unwrap();
    // Its memory is recycled, and mapped nowhere.
    let other = bench.growable(MIB);
    let pool = bench.pool();
    assert_eq!(pool.empty_cache().unwrap(), 0);
    drop(pool);
    assert_eq!(bench.allocator.memory_reserved(), 100 * MIB);
    drop((cache, other));
    bench.assert_returned();
}
