//! Two devices: waits for each other's events, copies between them, and which arguments of both
//! sides are checked.

use std::sync::Arc;

use aquifer_cuda::CudaDriver;
use aquifer_device::{Code, DevicePtr, Driver, ErrorKind, Operation, PhysicalOptions, RawEvent, RawStream};
use aquifer_sim::{SimConfig, SimDriver};
use aquifer_standin::Number;

use crate::bench::{Bench, MIB, code, kind, standin};

/// A device to copy from and one that copies.
struct Pair {
    one: Bench,
    two: Bench,
    from: RawStream,
    to: RawStream,
    src: DevicePtr,
    dst: DevicePtr,
}

impl Pair {
    fn new() -> Pair {
        Pair::without(&[])
    }

    /// The copying driver lacks functions.
    fn without(missing: &[&str]) -> Pair {
        let (one, two) = (Bench::new(), Bench::without(missing));
        let (from, to) = (one.stream(), two.stream());
        let (src, dst) = (one.driver.alloc(MIB).unwrap(), two.driver.alloc(MIB).unwrap());
        Pair { one, two, from, to, src, dst }
    }

    fn copy(&self) -> aquifer_device::Result<()> {
        self.two.driver.copy_peer(self.dst, &*self.one.driver, self.src, MIB, self.to)
    }

    /// Makes the copying stream wait for the other one.
    fn before(&self) {
        order(&self.one.driver, self.from, &self.two.driver, self.to);
    }

    /// Makes the other stream wait for the copying one.
    fn after(&self) {
        order(&self.two.driver, self.to, &self.one.driver, self.from);
    }

    fn assert_no_violation(&self) {
        self.one.assert_no_violation();
        self.two.assert_no_violation();
    }
}

fn order(one: &CudaDriver, from: RawStream, two: &CudaDriver, to: RawStream) {
    let event = one.create_event(false).unwrap();
    one.record(event, from).unwrap();
    Driver::wait_peer(two, to, one, event).unwrap();
    one.destroy_event(event).unwrap();
}

#[test]
fn bytes_arrive_in_order_and_access_is_enabled_once() {
    let pair = Pair::new();
    for value in 0..5 {
        pair.one.driver.memset(pair.src, value, MIB, pair.from).unwrap();
        pair.before();
        pair.copy().unwrap();
        pair.after();
        assert_eq!(pair.two.download(pair.dst.offset(MIB - 4), 4, pair.to).unwrap(), [value; 4]);
    }
    let enabled = [&pair.one, &pair.two].map(|bench| bench.device.number(Number::Peers));
    assert_eq!(enabled, [0, 1], "the copying side reaches the other one");
    pair.one.driver.free(pair.src).unwrap();
    pair.assert_no_violation();
}

/// Access between contexts is for plain memory: that of mapped memory is set with its mappings.
#[test]
fn copies_of_mapped_memory_ask_for_no_access_between_contexts() {
    let pair = Pair::new();
    let (driver, src) = (&pair.one.driver, pair.one.driver.reserve(2 * MIB, 0).unwrap());
    let memory = driver.create_physical(2 * MIB, PhysicalOptions::default()).unwrap();
    driver.map(src, 2 * MIB, memory).unwrap();
    driver.set_access(src, 2 * MIB, &[pair.one.device.ordinal()]).unwrap();
    driver.memset(src, 9, MIB, pair.from).unwrap();
    pair.before();
    pair.two.driver.copy_peer(pair.dst, &**driver, src, MIB, pair.to).unwrap();
    pair.after();
    assert_eq!(pair.two.download(pair.dst, 4, pair.to).unwrap(), [9; 4]);
    assert_eq!(pair.two.device.number(Number::Peers), 0);
    pair.assert_no_violation();
}

#[test]
fn races_between_devices_are_found() {
    let pair = Pair::new();
    pair.one.driver.memset(pair.src, 1, MIB, pair.from).unwrap();
    pair.copy().unwrap();
    assert_eq!(pair.one.device.take_violations().len(), 1, "the source was written without a wait");
    pair.one.driver.memset(pair.src, 1, MIB, pair.from).unwrap();
    assert_eq!(pair.one.device.take_violations().len(), 1, "the source is overwritten too early");
    pair.before();
    pair.copy().unwrap();
    pair.one.driver.free(pair.src).unwrap();
    assert_eq!(pair.one.device.take_violations().len(), 1, "the source is freed too early");
    pair.two.assert_no_violation();
}

#[test]
fn without_access_copies_go_through_the_host() {
    // Other code enabled it already, it fails, the driver cannot be asked, or it cannot be enabled
    // at all.
    let already = Pair::new();
    already.copy().unwrap();
    let again = CudaDriver::open(already.two.device.ordinal()).unwrap();
    let (stream, dst) = (again.create_stream(Default::default()).unwrap(), again.alloc(MIB).unwrap());
    Driver::copy_peer(&*again, dst, &*already.one.driver, already.src, MIB, stream).unwrap();
    already.assert_no_violation();

    for function in ["cuCtxEnablePeerAccess", "cuDeviceCanAccessPeer"] {
        let failing = Pair::new();
        standin().fail(function, 1, Code(999)).unwrap();
        failing.copy().unwrap();
        assert_eq!(standin().orders_left(), 0, "{function} was called");
        assert_eq!(failing.two.device.number(Number::Peers), 0);
        failing.copy().unwrap();
        failing.assert_no_violation();

        let lacking = Pair::without(&[function]);
        lacking.copy().unwrap();
        assert_eq!(lacking.two.device.number(Number::Peers), 0);
        lacking.assert_no_violation();
    }
}

#[test]
fn access_is_enabled_again_for_a_device_that_was_opened_again() {
    let pair = Pair::new();
    pair.copy().unwrap();
    let Pair { one, two, to, dst, .. } = pair;
    drop(one);
    let next = Bench::new();
    let src = next.driver.alloc(MIB).unwrap();
    two.driver.copy_peer(dst, &*next.driver, src, MIB, to).unwrap();
    two.driver.synchronize().unwrap();
    assert!(two.device.number(Number::Peers) >= 1);
    next.assert_no_violation();
    two.assert_no_violation();
}

#[test]
fn both_sides_are_checked() {
    let pair = Pair::new();
    let (one, two): (&CudaDriver, &CudaDriver) = (&pair.one.driver, &pair.two.driver);
    let event = one.create_event(false).unwrap();
    let wait = |stream, event| Driver::wait_peer(two, stream, one, event);
    let copy = |dst, src, stream| Driver::copy_peer(two, dst, one, src, 4096, stream);
    assert_eq!(code(wait(RawStream(0xdead_0000), event)), Code::INVALID_HANDLE);
    assert_eq!(code(wait(pair.from, event)), Code::INVALID_HANDLE, "a stream of the other device");
    assert_eq!(code(wait(pair.to, RawEvent(0xdead_0000))), Code::INVALID_HANDLE);
    wait(pair.to, event).unwrap();
    one.destroy_event(event).unwrap();
    assert_eq!(code(wait(pair.to, event)), Code::INVALID_HANDLE);
    assert_eq!(code(copy(pair.dst, pair.src, pair.from)), Code::INVALID_HANDLE);
    assert_eq!(code(copy(DevicePtr(8), pair.src, pair.to)), Code::INVALID_VALUE);
    assert_eq!(code(copy(pair.dst.offset(MIB - 8), pair.src, pair.to)), Code::INVALID_VALUE);
    let error = copy(pair.dst, pair.src.offset(MIB - 8), pair.to).unwrap_err();
    let ordinal = pair.one.device.ordinal();
    assert!(error.to_string().contains(&format!("not all live memory of the peer, cuda:{ordinal} (")), "{error}");
    one.free(pair.src).unwrap();
    assert_eq!(code(copy(pair.dst, pair.src, pair.to)), Code::INVALID_VALUE);
    Driver::copy_peer(two, DevicePtr(8), one, DevicePtr(8), 0, pair.to).unwrap();
    pair.assert_no_violation();
}

#[test]
fn devices_of_two_kinds_are_no_peers() {
    let pair = Pair::new();
    let simulated = SimDriver::new(SimConfig::new(1 << 30));
    let (stream, event, memory) = (
        simulated.create_stream(Default::default()).unwrap(),
        simulated.create_event(false).unwrap(),
        simulated.alloc(MIB).unwrap(),
    );
    let cuda: Arc<CudaDriver> = pair.two.driver.clone();
    let ours = cuda.create_event(false).unwrap();
    let refused = [
        Driver::wait_peer(&*cuda, pair.to, &*simulated, event),
        Driver::copy_peer(&*cuda, pair.dst, &*simulated, memory, 8, pair.to),
        simulated.wait_peer(stream, &*cuda, ours),
        simulated.copy_peer(memory, &*cuda, pair.dst, 8, stream),
    ];
    for result in refused {
        let error = result.unwrap_err();
        assert_eq!((error.code, error.kind), (Code::INVALID_VALUE, ErrorKind::InvalidUse));
        assert!(error.to_string().contains("two kinds"), "{error}");
    }
}

#[test]
fn a_device_is_its_own_peer() {
    let pair = Pair::new();
    let driver: &CudaDriver = &pair.two.driver;
    driver.memset(pair.dst, 6, MIB, pair.to).unwrap();
    Driver::copy_peer(driver, pair.dst.offset(64), driver, pair.dst, 64, pair.to).unwrap();
    let overlapping = Driver::copy_peer(driver, pair.dst.offset(8), driver, pair.dst, 64, pair.to);
    assert_eq!(code(overlapping), Code::INVALID_VALUE);
    // Another driver of the same device.
    let other = CudaDriver::open(pair.two.device.ordinal()).unwrap();
    let memory = other.alloc(MIB).unwrap();
    let stream = other.create_stream(Default::default()).unwrap();
    order(driver, pair.to, &other, stream);
    Driver::copy_peer(&*other, memory, driver, pair.dst, MIB, stream).unwrap();
    other.synchronize().unwrap();
    assert_eq!(pair.two.device.number(Number::Peers), 0);
    pair.assert_no_violation();
}

#[test]
fn copies_between_devices_are_refused_in_captures() {
    let pair = Pair::new();
    let driver: &CudaDriver = &pair.two.driver;
    let event = pair.one.driver.create_event(false).unwrap();
    pair.one.driver.record(event, pair.from).unwrap();
    driver.begin_capture(pair.to).unwrap();
    assert_eq!(kind(pair.copy()), ErrorKind::Capture);
    driver.end_capture(pair.to).unwrap();
    driver.begin_capture(pair.to).unwrap();
    assert_eq!(kind(Driver::wait_peer(driver, pair.to, &*pair.one.driver, event)), ErrorKind::Capture);
    driver.end_capture(pair.to).unwrap_err();
    pair.copy().unwrap();
    pair.assert_no_violation();
}

#[test]
fn a_lost_device_fails_and_the_other_one_works_on() {
    let pair = Pair::new();
    let event = pair.one.driver.create_event(false).unwrap();
    pair.one.driver.record(event, pair.from).unwrap();
    pair.one.device.inject("lost_at=1").unwrap();
    assert!(pair.one.driver.synchronize().unwrap_err().is_device_lost());
    let driver: &CudaDriver = &pair.two.driver;
    let waited = Driver::wait_peer(driver, pair.to, &*pair.one.driver, event).unwrap_err();
    let copied = pair.copy().unwrap_err();
    assert_eq!((waited.operation, copied.operation), (Operation::Wait, Operation::CopyPeer));
    assert!(waited.is_device_lost() && copied.is_device_lost());
    driver.memset(pair.dst, 3, MIB, pair.to).unwrap();
    assert_eq!(pair.two.download(pair.dst, 4, pair.to).unwrap(), [3; 4]);

    let pair = Pair::new();
    pair.copy().unwrap();
    pair.two.device.inject("lost_at=1").unwrap();
    assert!(pair.copy().unwrap_err().is_device_lost());
    pair.one.driver.memset(pair.src, 3, MIB, pair.from).unwrap();
    pair.one.driver.free(pair.src).unwrap();
    pair.one.assert_no_violation();
}

#[test]
fn every_call_of_the_driver_fails_once() {
    let mut struck = 0;
    for nth in 1.. {
        let pair = Pair::new();
        let event = pair.one.driver.create_event(false).unwrap();
        pair.one.driver.memset(pair.src, 7, MIB, pair.from).unwrap();
        pair.one.driver.record(event, pair.from).unwrap();
        let attempt =
            || Driver::wait_peer(&*pair.two.driver, pair.to, &*pair.one.driver, event).and_then(|()| pair.copy());
        standin().fail("any", nth, Code(999)).unwrap();
        let outcome = attempt();
        let left = standin().clear_orders();
        if outcome.is_err() {
            assert_eq!((left, kind(outcome)), (0, ErrorKind::Other), "call {nth}");
            attempt().unwrap();
        }
        assert_eq!(pair.two.download(pair.dst, 4, pair.to).unwrap(), [7; 4], "call {nth}");
        pair.assert_no_violation();
        if left > 0 {
            break;
        }
        struck = nth;
    }
    assert!(struck > 10, "the attempt makes {struck} calls");
}

#[test]
fn a_host_that_waits_for_an_event_sleeps() {
    let bench = Bench::new();
    let events = [true, false].map(|timing| bench.driver.create_event(timing).unwrap());
    let stream = bench.stream();
    for event in events {
        bench.driver.record(event, stream).unwrap();
        bench.driver.synchronize_event(event).unwrap();
    }
    bench.driver.elapsed_ms(events[0], events[0]).unwrap();
    assert_eq!(bench.device.number(Number::SpinningEvents), 0);
}
