//! Streams, events, and the host's knowledge of them.

use std::thread;
use std::time::Duration;

use aquifer_device::AccessKind::Read;
use aquifer_device::{Code, Device, Driver, Operation, RawEvent, RawStream};
use aquifer_sim::{SimConfig, SimDriver};

use crate::common::{MIB, Short, code, device};

#[test]
fn an_event_on_an_idle_stream_is_complete_at_once() {
    let driver = device(0);
    let (stream, event) = (driver.stream(), driver.event());
    assert!(driver.query_event(event).unwrap(), "never recorded");
    driver.synchronize_event(event).unwrap();
    driver.wait(stream, event).unwrap();
    driver.record(event, stream).unwrap();
    assert!(driver.query_event(event).unwrap());
    assert!(driver.query_stream(stream).unwrap());
}

#[test]
fn work_runs_only_as_the_clock_advances() {
    let driver = device(0);
    let (stream, event) = (driver.stream(), driver.event());
    let memory = driver.alloc(MIB).unwrap();
    driver.stall(stream, Duration::from_millis(3)).unwrap();
    driver.memset(memory, 1, MIB, stream).unwrap();
    driver.record(event, stream).unwrap();
    assert!(!driver.query_event(event).unwrap() && !driver.query_stream(stream).unwrap());
    driver.advance(Duration::from_millis(4));
    assert!(driver.query_event(event).unwrap() && driver.query_stream(stream).unwrap());
    driver.stall(stream, Duration::from_secs(5)).unwrap();
    let before = driver.now_ns();
    driver.synchronize().unwrap();
    assert!(driver.now_ns() - before >= 4_999_000_000);
}

#[test]
fn elapsed_time_needs_two_complete_timing_events() {
    let driver = device(0);
    let stream = driver.stream();
    let (start, end) = (driver.create_event(true).unwrap(), driver.create_event(true).unwrap());
    assert_eq!(code(driver.elapsed_ms(start, end)), Code::INVALID_HANDLE);
    driver.record(start, stream).unwrap();
    driver.stall(stream, Duration::from_millis(2)).unwrap();
    driver.record(end, stream).unwrap();
    assert_eq!(code(driver.elapsed_ms(start, end)), Code::NOT_READY);
    driver.synchronize_event(end).unwrap();
    assert!((2.0..2.1).contains(&driver.elapsed_ms(start, end).unwrap()));
    let plain = driver.event();
    driver.record(plain, stream).unwrap();
    assert_eq!(code(driver.elapsed_ms(start, plain)), Code::INVALID_HANDLE);
}

#[test]
fn handles_come_back_and_dead_ones_are_refused() {
    let driver = device(0);
    let (one, two) = (driver.stream(), driver.stream());
    let (first, second) = (driver.event(), driver.event());
    driver.destroy_stream(one).unwrap();
    driver.destroy_event(first).unwrap();
    assert_eq!(code(driver.record(second, one)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.record(first, two)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.wait(two, RawEvent(7))), Code::INVALID_HANDLE);
    assert_eq!(code(driver.synchronize_stream(one)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.destroy_stream(one)), Code::INVALID_HANDLE);
    assert_eq!(code(driver.destroy_stream(RawStream::LEGACY)), Code::INVALID_HANDLE);
    assert_eq!((driver.stream(), driver.event()), (one, first));
}

#[test]
fn work_of_a_destroyed_stream_still_runs_and_device_waits_cover_it() {
    let driver = device(0);
    let (stream, memory) = (driver.stream(), driver.alloc(MIB).unwrap());
    driver.stall(stream, Duration::from_millis(1)).unwrap();
    driver.memset(memory, 5, MIB, stream).unwrap();
    driver.destroy_stream(stream).unwrap();
    driver.synchronize().unwrap();
    let other = driver.stream();
    assert_eq!(driver.get(memory, 1, other).unwrap(), [5]);
    assert_eq!(driver.violations(), []);
}

#[test]
fn work_of_a_destroyed_blocking_stream_is_still_waited_for_by_the_legacy_stream() {
    let driver = device(0);
    let (stream, memory) = (driver.blocking_stream(), driver.alloc(MIB).unwrap());
    driver.stall(stream, Duration::from_millis(1)).unwrap();
    driver.memset(memory, 5, MIB, stream).unwrap();
    driver.destroy_stream(stream).unwrap();
    assert_eq!(driver.get(memory, 1, RawStream(0)).unwrap(), [5]);
    assert_eq!(driver.violations(), []);
}

#[test]
fn blocking_streams_wait_for_the_legacy_stream_and_it_for_them() {
    for seed in 0..50 {
        let driver = device(seed);
        let (one, two, memory) = (driver.blocking_stream(), driver.blocking_stream(), driver.alloc(MIB).unwrap());
        driver.memset(memory, 1, MIB, one).unwrap();
        driver.kernel("middle", &[(memory, MIB, Read)], None, RawStream(0)).unwrap();
        driver.memset(memory, 2, MIB, two).unwrap();
        driver.memset(memory, 3, MIB, RawStream::PER_THREAD).unwrap();
        let kinds: Vec<_> = driver.violations().iter().map(|found| found.kind).collect();
        assert_eq!(kinds.len(), 1, "only the two writers after the legacy stream's kernel are unordered: {kinds:?}");
    }
}

#[test]
fn each_thread_has_a_default_stream_of_its_own() {
    let driver = device(0);
    driver.stall(RawStream::PER_THREAD, Duration::from_millis(1)).unwrap();
    thread::scope(|scope| {
        assert!(scope.spawn(|| driver.query_stream(RawStream::PER_THREAD).unwrap()).join().unwrap());
    });
    assert!(!driver.query_stream(RawStream::PER_THREAD).unwrap());
}

#[test]
fn a_wait_for_one_stream_covers_earlier_waits_of_that_stream() {
    let driver = device(0);
    let (a, b, c) = (driver.stream(), driver.stream(), driver.stream());
    let memory = driver.alloc(MIB).unwrap();
    driver.memset(memory, 1, MIB, a).unwrap();
    driver.order(a, b);
    driver.order(b, c);
    driver.memset(memory, 2, MIB, c).unwrap();
    driver.synchronize_stream(c).unwrap();
    driver.put(memory, &[3], b).unwrap();
    assert_eq!(driver.violations(), []);
}

#[test]
fn many_operations_are_fast_and_keep_little_memory() {
    let driver = device(0);
    let streams: Vec<_> = (0..8).map(|_| driver.stream()).collect();
    let memory = driver.alloc(512 * MIB).unwrap();
    let start = std::time::Instant::now();
    for step in 0..100_000u64 {
        let stream = usize::try_from(step % 8).unwrap();
        let place = (step % 8) * 64 * MIB + (step * 4096) % (63 * MIB);
        driver.memset(memory.offset(place), 1, 4096 + step % 1000, streams[stream]).unwrap();
    }
    driver.synchronize().unwrap();
    assert_eq!(driver.violations(), []);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    println!("{:?} an operation", start.elapsed() / 100_000);
}

#[test]
fn blocking_copies_leave_no_events_behind() {
    let sim = SimDriver::new(SimConfig::new(1 << 30));
    let device = Device::new(sim);
    let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
    let mut bytes = [0; 64];
    for _ in 0..100 {
        stream.upload_blocking(memory, &bytes).unwrap();
        let tick = stream.tick();
        stream.download_blocking(&mut bytes, memory).unwrap();
        assert!(tick.is_done().unwrap(), "earlier work is known to be done");
    }
    assert_eq!(device.driver_calls().of(Operation::CreateEvent), 0);
    device.free(memory).unwrap();
}
