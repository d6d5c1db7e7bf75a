//! Clean-up that a failing driver cut short is tried again until the driver recovers. Until then
//! nothing says that it is done.

use std::any::Any;
use std::time::Duration;

use aquifer::transfer::Transfer;
use aquifer_device::CaptureStatus;
use aquifer_standin::in_process;
use aquifer_tests::prelude::*;

const CAPACITY: u64 = 256 * MIB;

/// Every operation by which a program gives something back, or learns that it may.
const CLEAN_UP: [Operation; 17] = [
    Operation::EndCapture,
    Operation::CaptureStatus,
    Operation::DestroyStream,
    Operation::DestroyEvent,
    Operation::DestroyGraph,
    Operation::UnloadModule,
    Operation::Free,
    Operation::Unmap,
    Operation::Unreserve,
    Operation::ReleasePhysical,
    Operation::HostFree,
    Operation::HostUnregister,
    Operation::CreateEvent,
    Operation::Record,
    Operation::QueryEvent,
    Operation::SynchronizeEvent,
    Operation::Synchronize,
];

const CODES: [Code; 2] = [Code(999), Code::INVALID_VALUE];

/// Lets the next `times` calls of an operation fail.
fn fail(driver: &Subject, operation: Operation, times: u64, code: Code) {
    (1..=times).for_each(|nth| driver.inject(Fault::Nth { operation: Some(operation), nth, code }));
}

/// Opens and settles a device, which also does deferred clean-up of other devices.
fn settle_the_process() {
    Subject::new(MIB).device().settle();
}

#[test]
fn a_capture_that_could_not_be_ended_is_ended_when_the_driver_recovers() {
    for (ends, asks, destroys) in
        [(0, 0, 1), (1, 0, 1), (3, 0, 1), (4, 0, 0), (4, 0, 1), (5, 0, 3), (1, 1, 1), (4, 4, 0), (4, 4, 1), (9, 0, 9)]
    {
        let bench = Bench::new(CAPACITY, "");
        let stream = bench.new_stream();
        let raw = stream.raw();
        let capture = stream.begin_capture().unwrap();
        fail(&bench.driver, Operation::EndCapture, ends, Code(999));
        fail(&bench.driver, Operation::CaptureStatus, asks, Code(999));
        fail(&bench.driver, Operation::DestroyStream, destroys, Code(999));
        drop(capture);
        drop(stream);
        bench.driver.clear_faults();
        let goes_on = matches!(bench.driver.capture_status(raw), Ok(CaptureStatus::Active));
        assert_eq!(bench.device.is_capturing(), goes_on, "{ends} {asks} {destroys}");
        let block = bench.written_on(&bench.side, 64 * MIB);
        drop(block);
        bench.device.synchronize().unwrap_or_else(|error| panic!("{ends} {asks} {destroys}: {error}"));
        assert!(!bench.device.is_capturing());
        bench.assert_returned();
        // The stream is gone; another test's may have its handle by now.
        let captures = matches!(bench.driver.capture_status(raw), Ok(CaptureStatus::Active));
        assert!(!captures, "{ends} {asks} {destroys}");
    }
}

/// Freeing, unmapping and creating a stream recover without a call of `settle`.
#[test]
fn calls_that_an_unended_capture_blocks_end_it_first() {
    type Then = fn(&Bench);
    let then: [(&str, Then); 4] = [
        ("synchronize", |bench| bench.device.synchronize().unwrap()),
        ("free", |bench| bench.device.free(bench.device.driver().alloc(MIB).unwrap()).unwrap()),
        ("empty_cache", |bench| {
            assert_eq!(bench.allocator.empty_cache().unwrap(), 8 * MIB);
        }),
        ("settle", |bench| bench.device.settle()),
    ];
    for (name, then) in then {
        let bench = Bench::new(CAPACITY, "");
        drop(bench.alloc(8 * MIB));
        bench.device.synchronize().unwrap();
        let capture = bench.side.begin_capture().unwrap();
        fail(&bench.driver, Operation::EndCapture, 4, Code(999));
        drop(capture);
        assert!(bench.device.is_capturing() && bench.side.is_capturing(), "{name}");
        assert_eq!(bench.allocator.memory_reserved(), 8 * MIB);
        bench.driver.clear_faults();
        then(&bench);
        assert!(!bench.device.is_capturing() && !bench.side.is_capturing(), "{name}");
        write_on(&bench.side, bench.alloc_on(&bench.side, MIB).ptr(), MIB);
        bench.assert_returned();
    }
}

/// CUDA does not document a capture whose stream is destroyed.
#[test]
fn no_stream_is_destroyed_while_it_captures() {
    for announced in [false, true] {
        let bench = Bench::new(CAPACITY, "");
        let [one, two] = [(); 2].map(|()| bench.new_stream());
        let event = bench.device.create_event(false).unwrap();
        let before = bench.device.driver_calls();
        let (capture, theirs) = if announced {
            bench.device.driver().begin_capture(one.raw()).unwrap();
            (None, Some(one.announce_capture().unwrap()))
        } else {
            (Some(one.begin_capture().unwrap()), None)
        };
        event.record(&one).unwrap();
        two.wait_event(&event).unwrap();
        event.record(&two).unwrap();
        one.wait_event(&event).unwrap();
        let (one_raw, tick) = (one.raw(), two.tick());
        drop((one, two));
        bench.device.settle();
        let destroyed = || bench.device.driver_calls().since(&before).of(Operation::DestroyStream);
        assert_eq!((destroyed(), bench.device.is_capturing()), (0, true), "{announced}");
        if announced {
            let graph = bench.device.driver().end_capture(one_raw).unwrap();
            bench.device.driver().destroy_graph(graph).unwrap();
        }
        capture.map(|capture| capture.end().expect("dropping a stream that joined and came back breaks nothing"));
        drop(theirs);
        assert!(!bench.device.is_capturing(), "{announced}");
        bench.device.settle();
        assert_eq!(destroyed(), 2, "{announced}");
        tick.synchronize().unwrap();
        drop((tick, event));
        bench.assert_returned();
    }
}

/// One of everything that a program can hold, in an order drawn from `seed`.
fn everything(driver: &Subject, seed: u64, with_device: bool) -> Vec<Box<dyn Any>> {
    let device = driver.device();
    let options = if seed.is_multiple_of(3) { "backing:segments" } else { "" };
    let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
    let streams = [(); 4].map(|()| device.stream().unwrap());
    let [one, two, captured, left] = &streams;
    let event = device.create_event(true).unwrap();
    event.record(one).unwrap();
    let shared = allocator.alloc_bytes(3 * MIB, one).unwrap();
    write_on(two, shared.ptr(), MIB);
    shared.record_stream(two).unwrap();
    two.wait_for(&one.tick()).unwrap();
    let kept = allocator.alloc_bytes(20 * MIB, two).unwrap();
    write_on(two, kept.ptr(), MIB);
    let exportable = allocator.alloc_exportable(2 * MIB, HandleKind::PosixFd, one).ok();
    let mut growable = allocator.growable(64 * MIB, one).ok();
    if let Some(growable) = &mut growable {
        growable.grow_to(6 * MIB, one).unwrap();
        write_on(one, growable.ptr(), MIB);
    }
    let transfer = Transfer::new(&allocator).unwrap();
    transfer.allocator().kernels().unwrap();
    let pinned = transfer.pinned().alloc_zeroed::<u8>(1 << 20).unwrap();
    let registered = transfer.pinned().register(vec![0_u8; 1 << 20]).unwrap();
    let mut target = allocator.alloc::<u8>(1 << 20, one).unwrap();
    drop(target.upload(&pinned, &transfer).unwrap());
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = captured.begin_capture().unwrap();
    let route = allocator.capture(captured, &pool).unwrap();
    let scratch = allocator.alloc_bytes(4 * MIB, captured).unwrap();
    write_on(captured, scratch.ptr(), 4 * MIB);
    drop((scratch, route));
    let graph = capture.end().unwrap();
    graph.launch(one).unwrap();
    let open = left.begin_capture().unwrap();
    let mut held: Vec<Box<dyn Any>> = vec![
        Box::new(open),
        Box::new(graph),
        Box::new(pool),
        Box::new((pinned, target)),
        Box::new(registered),
        Box::new(transfer),
        Box::new(exportable),
        Box::new(growable),
        Box::new((shared, kept)),
        Box::new(event),
        Box::new(allocator),
    ];
    held.extend(streams.into_iter().map(|stream| Box::new(stream) as Box<dyn Any>));
    if !with_device {
        held.push(Box::new(device));
    }
    let mut draw = random::draws(seed);
    for at in (1..held.len()).rev() {
        held.swap(at, usize::try_from(draw(at as u64 + 1)).unwrap());
    }
    held
}

/// Drops one of everything while calls fail; when they fail no more, all is given back, and the
/// device can be waited for.
fn assert_all_goes_back(seed: u64, inject: impl FnOnce(&Subject)) {
    // Its last handle is dropped with everything else, or kept until the driver recovers.
    let with_device = seed.is_multiple_of(2);
    let driver = Subject::open(&SimConfig::new(CAPACITY).seed(seed));
    let device = with_device.then(|| driver.device());
    let before = driver.live_objects();
    let held = everything(&driver, seed, with_device);
    inject(&driver);
    for one in held {
        drop(one);
        if let Some(device) = &device {
            device.settle_unused();
        }
    }
    aquifer_allocator::close_abandoned();
    driver.clear_faults();
    // A thread of another test may be about to do this device's deferred clean-up, and be
    // preempted.
    let soon = |is_over: &dyn Fn() -> bool| {
        (0..5000).any(|_| {
            is_over() || {
                std::thread::sleep(Duration::from_millis(1));
                false
            }
        })
    };
    if let Some(device) = device {
        let is_over = || {
            device.settle();
            device.synchronize().is_ok()
        };
        assert!(soon(&is_over), "nothing captures any more");
    }
    soon(&|| {
        settle_the_process();
        // Objects that only the CUDA driver knows go back when its context is waited for.
        let _ = driver.synchronize();
        driver.free() == CAPACITY && (before.is_none() || driver.live_objects() == before)
    });
    assert_eq!(driver.free(), CAPACITY);
    // NVIDIA's driver keeps a captured graph that it refused to destroy three times with its
    // context.
    let kept = u64::from(!driver.info().is_virtual);
    assert!(driver.live_objects() <= before.map(|before| before + kept), "{:?} {before:?}", driver.live_objects());
    driver.assert_no_reservation();
    driver.synchronize().expect("nothing captures any more");
    driver.assert_no_violation();
}

#[test]
fn clean_up_that_fails_is_tried_again_until_the_driver_recovers() {
    let mut seed = 0;
    // All on the simulated device, fewer elsewhere.
    let every = 30 / Subject::share(30);
    for operation in CLEAN_UP {
        for times in [1, 4, 100] {
            for code in CODES {
                seed += 1;
                if seed % every != 0 {
                    continue;
                }
                let _at = At(format!("{times} calls of {operation} fail with {code:?}, seed {seed}"));
                assert_all_goes_back(seed, |driver| fail(driver, operation, times, code));
            }
        }
    }
}

#[test]
fn clean_up_that_fails_at_random_is_tried_again_until_the_driver_recovers() {
    for seed in 0..Subject::share(100.max(runner::count(0))) {
        let _at = At(format!("seed {seed}"));
        let rate = [0.1, 0.5, 0.9, 1.0][usize::try_from(seed % 4).unwrap()];
        assert_all_goes_back(seed, |driver| driver.inject(Fault::Rate { operation: None, rate, code: Code(999) }));
    }
}

/// In a process of its own, because the next allocator of the process does the deferred clean-up.
#[test]
fn item_25_any_order_of_teardown() {
    in_process(&[], || {
        for options in ["", "backing:segments"] {
            let driver = Subject::new(GIB);
            let device = driver.device();
            let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
            let held = [1, 30].map(|mib| allocator.alloc_bytes(mib * MIB, device.default_stream()).unwrap());
            write_on(device.default_stream(), held[1].ptr(), 30 * MIB);
            drop(allocator);
            drop(device);
            let calls = driver.calls_made();
            std::thread::spawn(move || drop(held)).join().unwrap();
            assert_eq!(driver.calls_made(), calls, "dropping a handle made a driver call");
            // Closing the device is left to the next allocator of the process.
            drop(Bench::new(64 * MIB, ""));
            assert_eq!(driver.free(), driver.memory_info().unwrap().total);
            driver.assert_no_violation();
        }
    });
}
