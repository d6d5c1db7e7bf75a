//! Other threads while the allocator sleeps: requests, access guards, waits.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use aquifer_tests::prelude::*;

use super::*;

#[test]
fn no_access_guard_is_given_for_memory_that_sleeps() {
    let bench = sleeper();
    let buffer: Buffer<u8> = bench.allocator.alloc(1000, &bench.stream).unwrap();
    bench.stream.fill(buffer.ptr(), 5, 1000).unwrap();
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    let access = |kind| AccessGuard::acquire(&bench.stream, &[(buffer.storage(), kind)]).map(drop);
    for kind in [AccessKind::Read, AccessKind::Write] {
        assert!(matches!(access(kind), Err(AllocError::Asleep)));
        assert!(matches!(Reservation::acquire(buffer.storage(), kind), Err(AllocError::Asleep)));
    }
    assert!(matches!(bench.allocator.keep_awake(), Err(AllocError::Asleep)));
    bench.allocator.wake().unwrap();
    access(AccessKind::Read).unwrap();
    assert_eq!(bench.byte(buffer.ptr()), 5);
    bench.assert_contents();
    bench.assert_no_violation();
}

fn patient(contents: Contents) -> SleepOptions {
    SleepOptions::all(contents).waiting(Duration::MAX)
}

/// Puts the allocator to sleep on another thread, which waits for this one. Lets `work` work once
/// others are refused.
fn sleep_beside<T>(bench: &Sleeper, held: T, work: impl FnOnce(T)) {
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| bench.allocator.sleep(patient(Contents::SaveToHost)).unwrap());
        while !bench.allocator.is_asleep() {
            thread::yield_now();
        }
        assert!(scope.spawn(|| bench.allocator.keep_awake().is_err()).join().unwrap() && !sleeper.is_finished());
        work(held);
        assert!(sleeper.join().unwrap() > 0 && bench.allocator.is_asleep());
    });
    bench.allocator.wake().unwrap();
    drop(bench.allocator.keep_awake().unwrap());
}

#[test]
fn access_guards_and_reservations_end_before_their_memory_goes() {
    let bench = sleeper();
    let one: Buffer<u8> = bench.allocator.alloc(usize::try_from(3 * MIB).unwrap(), &bench.stream).unwrap();
    let other: Buffer<u8> = Buffer::of(bench.cache.storage());
    let side = bench.new_stream();
    let reservation = Reservation::acquire(other.storage(), AccessKind::Write).unwrap();
    sleep_beside(&bench, reservation, |reservation| {
        for part in 0..3 {
            let _access = reservation.access(&side).unwrap();
            side.fill(other.ptr().offset(part * MIB), 99, MIB).unwrap();
        }
    });
    let access = AccessGuard::acquire(&side, &[(one.storage(), AccessKind::Write)]).unwrap();
    sleep_beside(&bench, access, |_access| {
        side.fill(one.ptr(), 8, one.bytes()).unwrap();
        // A thread that keeps it awake gets further guards and memory, or it could not end.
        let more: Buffer<u8> = bench.allocator.alloc(usize::try_from(5 * MIB).unwrap(), &side).unwrap();
        let _access = AccessGuard::acquire(&side, &[(more.storage(), AccessKind::Write)]).unwrap();
        side.fill(more.ptr(), 9, more.bytes()).unwrap();
    });
    assert_eq!((bench.byte(one.ptr()), bench.byte(one.ptr().offset(3 * MIB - 1))), (8, 8));
    bench.assert_contents();
    drop((one, other));
    bench.assert_usable_and_returned();
}

/// What keeps the allocator awake: access guards, reservations, wake locks, and whether on this
/// thread.
fn kept_awake(slept: Result<u64, AllocError>) -> (u64, u64, u64, bool) {
    let Err(AllocError::KeptAwake(by)) = slept else { panic!("{slept:?}") };
    (by.access_guards, by.reservations, by.wake_locks, by.is_this_thread)
}

#[test]
fn sleep_refuses_and_says_what_keeps_it_awake() {
    let bench = sleeper();
    let buffer: Buffer<u8> = bench.allocator.alloc(5000, &bench.stream).unwrap();
    let more: Buffer<u8> = bench.allocator.alloc(100, &bench.side).unwrap();
    let (cached, calls) = (bench.allocator.memory_reserved(), bench.driver.calls_made());
    let says = |expected: &str| {
        let refused = bench.allocator.sleep(Contents::Discard).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    };
    let reservation = Reservation::acquire(buffer.storage(), AccessKind::Read).unwrap();
    says("(1 reservation)");
    let another = Reservation::acquire(more.storage(), AccessKind::Read).unwrap();
    says("(2 reservations)");
    drop(another);
    let (held, end) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let _access = AccessGuard::acquire(&bench.side, &[(more.storage(), AccessKind::Write)]).unwrap();
            held.wait();
            end.wait();
        });
        held.wait();
        let soon = SleepOptions::all(Contents::Discard).waiting(Duration::from_millis(1));
        let refused = [bench.allocator.sleep(Contents::Discard), bench.allocator.sleep(soon)];
        let is_asleep = bench.allocator.is_asleep();
        end.wait();
        let text = refused[0].as_ref().unwrap_err().to_string();
        assert!(text.contains("(1 access guard, 1 reservation)"), "{text}");
        refused.into_iter().for_each(|refused| assert_eq!(kept_awake(refused), (1, 1, 0, false)));
        assert!(!is_asleep && !bench.allocator.is_asleep());
    });
    drop(reservation);
    let growable = Buffer::<u8>::of(bench.cache.storage());
    let access = AccessGuard::acquire(&bench.stream, &[(growable.storage(), AccessKind::Read)]).unwrap();
    says("(1 access guard; this thread has some of them)");
    drop(access);
    drop(growable);
    assert_eq!(
        (bench.allocator.memory_reserved(), bench.driver.calls_made()),
        (cached, calls),
        "nothing was given back"
    );
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    bench.allocator.wake().unwrap();
    bench.assert_contents();
    drop((buffer, more));
    bench.assert_usable_and_returned();
}

#[test]
fn a_thread_does_not_wait_for_itself_to_let_the_allocator_sleep() {
    let bench = sleeper();
    let buffer: Buffer<u8> = bench.allocator.alloc(1000, &bench.stream).unwrap();
    let (access, awake) =
        (AccessGuard::acquire(&bench.stream, &[(buffer.storage(), AccessKind::Read)]), bench.allocator.keep_awake());
    for _ in 0..2 {
        assert_eq!(kept_awake(bench.allocator.sleep(patient(Contents::Discard))), (1, 0, 1, true));
        bench.allocator.wake().unwrap();
    }
    drop(access);
    assert_eq!(kept_awake(bench.allocator.sleep(Contents::Discard)), (0, 0, 1, true));
    drop(awake);
    // Another allocator's sleep is none of its business, even if that one is gone otherwise.
    let other = Allocator::new(&bench.device, Config::default()).unwrap();
    let _awake = other.keep_awake().unwrap();
    drop(other);
    let another = Allocator::new(&bench.device, Config::default()).unwrap();
    another.sleep(Contents::Discard).unwrap();
    drop(another);
    bench.allocator.sleep(Contents::SaveToHost).unwrap();
    bench.allocator.wake().unwrap();
    drop(buffer);
    bench.assert_usable_and_returned();
}

#[test]
fn lack_of_memory_is_not_reported_of_an_allocator_that_is_about_to_sleep() {
    let bench = sleeper();
    let awake = bench.allocator.keep_awake().unwrap();
    sleep_beside(&bench, awake, |awake| {
        let beside = thread::scope(|scope| scope.spawn(|| bench.refused(CAPACITY)).join().unwrap());
        assert!(matches!(beside, AllocError::Asleep), "reclaimers get no access guards: {beside}");
        let here = bench.refused(CAPACITY);
        assert!(here.is_out_of_memory(), "they do here: {here}");
        let text = format!("{awake:?}");
        assert!(text.len() < 2000, "{text}");
    });
    bench.assert_usable_and_returned();
}

#[test]
fn threads_that_were_refused_wait_until_it_is_awake() {
    let bench = sleeper();
    let Bench { allocator, stream, .. } = &*bench;
    let (soon, late) = (Duration::from_millis(1), Duration::from_secs(600));
    assert!(allocator.wait_awake(Duration::ZERO));
    allocator.sleep(Contents::SaveToHost).unwrap();
    assert!(!allocator.wait_awake(Duration::ZERO) && !allocator.wait_awake(soon));
    let refused = Barrier::new(4);
    thread::scope(|scope| {
        for timeout in [late, late, Duration::MAX] {
            let refused = &refused;
            scope.spawn(move || {
                assert!(matches!(allocator.alloc_bytes(MIB, stream), Err(AllocError::Asleep)));
                refused.wait();
                assert!(allocator.wait_awake(timeout));
                drop(allocator.alloc_bytes(MIB, stream).unwrap());
            });
        }
        refused.wait();
        allocator.wake().unwrap();
    });
    bench.assert_contents();
    bench.assert_usable_and_returned();
}

#[test]
fn a_thread_that_holds_a_wake_lock_has_nothing_to_wait_for() {
    let bench = sleeper();
    let allocator = &bench.allocator;
    let awake = allocator.keep_awake().unwrap();
    thread::scope(|scope| {
        let sleeper = scope.spawn(|| allocator.sleep(patient(Contents::Discard)).unwrap());
        while !allocator.is_asleep() {
            thread::yield_now();
        }
        assert!(allocator.wait_awake(Duration::MAX));
        let other = scope.spawn(|| allocator.wait_awake(Duration::from_millis(1)));
        assert!(!other.join().unwrap(), "it is about to sleep");
        drop(awake);
        sleeper.join().unwrap();
    });
    // What could not fall asleep is awake.
    allocator.wake().unwrap();
    bench.fail(Operation::Unmap, 1, Code(999));
    allocator.sleep(Contents::SaveToHost).unwrap_err();
    assert!(allocator.wait_awake(Duration::ZERO));
}

/// Puts the allocator to sleep once, while a request makes room.
fn asleep_on_the_ladder(allocator: &Allocator) -> Registration {
    let (sleeper, slept) = (allocator.clone(), AtomicBool::new(false));
    allocator.register_reclaimer(0, "sleeps", move |_| {
        if slept.swap(true, Ordering::Relaxed) { 0 } else { sleeper.sleep(Contents::SaveToHost).unwrap() }
    })
}

#[test]
fn segments_do_not_grow_while_the_allocator_sleeps() {
    let bench = sleeper();
    let Bench { allocator, stream, .. } = &*bench;
    let most = allocator.alloc_bytes(200 * MIB, stream).unwrap();
    // Its memory comes in segments, which stay while the allocator sleeps.
    let pool = allocator.create_pool(PoolOptions { no_split: true, ..PoolOptions::default() }).unwrap();
    let reclaimer = asleep_on_the_ladder(allocator);
    let refused = pool.alloc_bytes(60 * MIB, stream).unwrap_err();
    assert!(matches!(refused, AllocError::Asleep), "{refused}");
    assert_eq!((allocator.is_asleep(), bench.device_free()), (true, CAPACITY));
    allocator.wake().unwrap();
    bench.assert_contents();
    drop((most, reclaimer));
    drop(pool.alloc_bytes(60 * MIB, stream).unwrap());
    drop(pool);
    bench.assert_usable_and_returned();
}

/// The memory that a failed growth had got is not mapped any more.
#[test]
fn a_growth_that_fails_while_the_allocator_falls_asleep_loses_nothing() {
    for nth in 1..12 {
        let bench = sleeper();
        let Bench { allocator, stream, device, driver, .. } = &*bench;
        let mut growable = allocator.growable(20 * MIB, stream).unwrap();
        growable.grow_to(20 * MIB, stream).unwrap();
        for mib in [16, 12, 8] {
            growable.shrink_to(mib * MIB, stream).unwrap();
        }
        device.synchronize().unwrap();
        // One of the three pieces that were given up stays mapped, between two that do not.
        driver.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 3, code: Code::INVALID_VALUE });
        drop(allocator.growable(1, stream));
        driver.clear_faults();
        for nth in [nth, nth + 1] {
            driver.inject(Fault::Nth { operation: Some(Operation::Map), nth, code: Code::OUT_OF_MEMORY });
        }
        let reclaimer = asleep_on_the_ladder(allocator);
        let grown = growable.grow_to(20 * MIB, stream);
        driver.clear_faults();
        assert!(grown.is_ok() || matches!(grown, Err(AllocError::Asleep)), "{grown:?}");
        allocator.wake().unwrap();
        allocator.empty_cache().unwrap();
        let held = CAPACITY - bench.device_free();
        assert_eq!(allocator.memory_reserved(), held);
        let in_use = growable.bytes() + bench.cache.bytes().next_multiple_of(2 * MIB);
        drop((growable, reclaimer));
        assert!(held >= in_use);
        bench.assert_contents();
        bench.assert_usable_and_returned();
    }
}
