//! A device that lags: its position, the calls that wait, and the violations that it finds.

use std::sync::Arc;

use aquifer_device::{Code, Device, DevicePtr, Driver, PhysicalOptions, RawStream};
use aquifer_sim::{Lagging, SimConfig, SimDriver};

use crate::common::{GRANULE, Short, code};

fn lagging(lag: u64) -> Arc<Lagging> {
    Lagging::new(SimDriver::new(SimConfig::new(1 << 30)), lag)
}

fn advance(driver: &Lagging, events: u64) {
    (0..events).for_each(|_| driver.advance());
}

fn violations(driver: &Lagging) -> Vec<String> {
    std::iter::from_fn(|| driver.take_violation()).collect()
}

#[test]
fn the_position_is_the_later_of_the_last_wait_and_now_less_the_lag() {
    let driver = lagging(10);
    let (stream, early, late) = (driver.stream(), driver.event(), driver.event());
    assert!(driver.query_event(early).unwrap(), "never recorded");
    advance(&driver, 5);
    driver.record(early, stream).unwrap();
    advance(&driver, 3);
    driver.record(late, stream).unwrap();
    let done = || [early, late].map(|event| driver.query_event(event).unwrap());
    assert_eq!((driver.now(), driver.position(), done()), (8, 0, [false, false]));
    advance(&driver, 7);
    assert_eq!((driver.now(), driver.position(), done()), (15, 5, [true, false]));
    driver.synchronize_event(early).unwrap();
    assert_eq!((driver.position(), driver.stalls()), (5, 0), "an event that is reached needs no waiting");
    driver.synchronize_event(late).unwrap();
    assert_eq!((driver.position(), driver.stalls(), done()), (8, 1, [true, true]));
    advance(&driver, 2);
    assert_eq!(driver.position(), 8, "now - lag is behind the last wait");
    advance(&driver, 3);
    assert_eq!(driver.position(), 10);
    driver.record(early, stream).unwrap();
    assert_eq!(done(), [false, true], "the latest record counts");
    driver.destroy_event(early).unwrap();
    assert!(driver.query_event(driver.event()).unwrap(), "the handle comes back for an event never recorded");
}

#[test]
fn without_lag_everything_is_done_at_once() {
    let driver = lagging(0);
    let (stream, event) = (driver.stream(), driver.event());
    for _ in 0..3 {
        driver.advance();
        driver.record(event, stream).unwrap();
        assert!(driver.query_event(event).unwrap() && driver.query_stream(stream).unwrap());
        driver.synchronize_event(event).unwrap();
        driver.synchronize().unwrap();
    }
    assert_eq!((driver.position(), driver.stalls()), (3, 0));
}

#[test]
fn calls_that_wait_for_everything_move_the_position_to_now() {
    type Call = fn(&Lagging, RawStream, DevicePtr);
    let calls: [Call; 3] = [
        |driver, stream, _| driver.synchronize_stream(stream).unwrap(),
        |driver, _, _| driver.synchronize().unwrap(),
        |driver, _, memory| driver.free(memory).unwrap(),
    ];
    for call in calls {
        let driver = lagging(100);
        let (stream, memory) = (driver.stream(), driver.alloc(GRANULE).unwrap());
        advance(&driver, 7);
        assert_eq!((driver.position(), driver.query_stream(stream).unwrap()), (0, false));
        call(&driver, stream, memory);
        assert_eq!((driver.position(), driver.stalls(), driver.query_stream(stream).unwrap()), (7, 1, true));
        driver.synchronize().unwrap();
        assert_eq!(driver.stalls(), 1);
    }
}

#[test]
fn times_are_not_ready_before_the_device_gets_there() {
    let driver = lagging(1);
    let (stream, [start, end]) = (driver.stream(), [0; 2].map(|_| driver.create_event(true).unwrap()));
    driver.record(start, stream).unwrap();
    driver.advance();
    driver.record(end, stream).unwrap();
    assert_eq!(code(driver.elapsed_ms(start, end)), Code::NOT_READY);
    driver.advance();
    assert!(driver.elapsed_ms(start, end).unwrap() >= 0.0);
}

#[test]
fn ticks_follow_the_position() {
    let driver = lagging(3);
    let device = Device::new(driver.clone());
    let stream = device.stream().unwrap();
    driver.advance();
    let tick = stream.tick();
    stream.timeline().cover(tick.n()).unwrap();
    for done in [false, false, false, true] {
        assert_eq!(tick.is_done().unwrap(), done, "at event {}", driver.now());
        driver.advance();
    }
    assert_eq!(driver.stalls(), 0);
    let tick = stream.tick();
    tick.synchronize().unwrap();
    assert_eq!((driver.stalls(), driver.position()), (1, driver.now()));
}

/// One granule, used by an allocation at its start that is freed at event 1.
fn used_granule(driver: &Lagging) -> DevicePtr {
    let (memory, _) = driver.mapped();
    driver.allocated(memory, 512);
    driver.advance();
    driver.freed(memory);
    memory
}

#[test]
fn unmapping_before_the_device_is_done_is_a_violation() {
    let driver = lagging(5);
    let memory = used_granule(&driver);
    advance(&driver, 4);
    driver.unmap(memory, GRANULE).unwrap();
    let found = violations(&driver);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("cuMemUnmap at event 5") && found[0].contains("last used at event 1"), "{found:?}");
    assert!(found[0].contains("only reached event 0"), "{found:?}");
}

#[test]
fn unmapping_after_the_last_use_is_no_violation() {
    for wait in [false, true] {
        let driver = lagging(5);
        let memory = used_granule(&driver);
        if wait {
            driver.synchronize().unwrap()
        } else {
            advance(&driver, 5)
        }
        assert_eq!(code(driver.unmap(memory, 2 * GRANULE)), Code::INVALID_VALUE, "refused: changes nothing");
        driver.unmap(memory, GRANULE).unwrap();
        assert_eq!(violations(&driver), [""; 0]);
    }
}

#[test]
fn each_use_counts() {
    let driver = lagging(5);
    let (memory, _) = driver.mapped();
    driver.allocated(memory, 512);
    advance(&driver, 2);
    driver.used(memory);
    driver.freed(memory.offset(512)); // no allocation starts there
    advance(&driver, 1);
    driver.freed(memory);
    driver.allocated(memory, 256);
    driver.freed(memory);
    advance(&driver, 4);
    driver.unmap(memory, GRANULE).unwrap();
    assert_eq!(violations(&driver).len(), 1, "all of it was last used at event 3");
}

#[test]
fn live_memory_that_is_freed_or_given_out_again_is_a_violation() {
    let driver = lagging(0);
    let ((mapped, _), plain) = (driver.mapped(), driver.alloc(GRANULE).unwrap());
    for memory in [mapped, plain] {
        driver.allocated(memory.offset(1024), 1024);
    }
    driver.unmap(mapped, GRANULE).unwrap();
    driver.free(plain).unwrap();
    let found = violations(&driver);
    assert!(found[0].contains("cuMemUnmap") && found[1].contains("cuMemFree"), "{found:?}");
    assert!(found.len() == 2 && found.iter().all(|violation| violation.ends_with("which are live")), "{found:?}");
    driver.allocated(mapped, 1024);
    driver.allocated(mapped.offset(512), 8);
    assert!(violations(&driver)[0].contains("were given out"));
}

#[test]
fn live_memory_that_is_given_out_again_at_another_address_is_a_violation() {
    let driver = lagging(0);
    let (first, physical) = driver.mapped();
    let second = driver.reserve(GRANULE, 0).unwrap();
    driver.map(second, GRANULE, physical).unwrap();
    driver.allocated(first, 1024);
    driver.allocated(second.offset(1024), 8);
    assert_eq!(violations(&driver), [""; 0], "other bytes");
    driver.allocated(second.offset(512), 8);
    assert_eq!(violations(&driver).len(), 1);
    driver.freed(first);
    driver.allocated(second, 8);
    assert_eq!(violations(&driver), [""; 0]);
}

#[test]
fn violations_of_the_inner_device_are_reported() {
    let driver = lagging(3);
    let (one, two, memory) = (driver.stream(), driver.stream(), driver.alloc(GRANULE).unwrap());
    driver.memset(memory, 1, 8, one).unwrap();
    driver.memset(memory, 2, 8, two).unwrap();
    assert_eq!(violations(&driver).len(), 1);
    let physical = driver.create_physical(GRANULE, PhysicalOptions::default()).unwrap();
    driver.release_physical(physical).unwrap();
    assert_eq!(violations(&driver), [""; 0]);
}

#[test]
fn queries_cost_time_before_the_device_gets_there() {
    let sim = SimDriver::new(SimConfig::new(1 << 30));
    let driver = Lagging::new(sim.clone(), 5);
    let (stream, event) = (driver.stream(), driver.create_event(true).unwrap());
    driver.advance();
    driver.record(event, stream).unwrap();
    let price = |ask: &dyn Fn()| {
        let before = (sim.calls_made(), sim.time_in_calls_ns());
        ask();
        (sim.calls_made() - before.0, sim.time_in_calls_ns() - before.1)
    };
    let asking: [&dyn Fn(); 3] =
        [&|| assert!(driver.query_event(event).is_ok()), &|| assert!(driver.query_stream(stream).is_ok()), &|| {
            drop(driver.elapsed_ms(event, event))
        }];
    let early = asking.map(price);
    driver.synchronize().unwrap();
    assert_eq!(early, asking.map(price));
    assert!(early.iter().all(|&(calls, ns)| calls == 1 && ns > 0), "{early:?}");
}
