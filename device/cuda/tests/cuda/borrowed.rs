//! Blocking copies whose calls fail: the memory is the caller's again when they return, so nothing
//! may use it any more.

use std::time::Duration;

use aquifer_device::{Code, Device, DevicePtr, Driver, ErrorKind, HostPtr, Stream, StreamFlags};

use crate::bench::{Bench, standin};

const HALF: usize = 4096;
const BYTES: usize = 2 * HALF;

/// The function that fails, the number of the call from now on, and its code.
type Order = (&'static str, u64, Code);

/// Host memory of which the first half is pinned, so that it is copied in two pieces and read
/// when the first is done.
struct Copies {
    bench: Bench,
    device: Device,
    stream: Stream,
    ptr: DevicePtr,
    host: Vec<u8>,
    registered: HostPtr,
}

impl Copies {
    /// Its device's work is held up, and functions fail.
    fn failing(orders: &[Order]) -> Copies {
        let bench = Bench::new();
        let device = Device::new(bench.driver.clone());
        let (stream, ptr) = (device.stream().unwrap(), device.alloc(BYTES as u64).unwrap());
        let mut host = vec![0; BYTES];
        // SAFETY: the memory outlives its registration, which `Drop` undoes.
        let registered = unsafe { bench.driver.host_register(host.as_mut_ptr(), HALF) }.unwrap();
        stream.fill(ptr, 7, BYTES as u64).unwrap();
        stream.synchronize().unwrap();
        bench.device.stall(stream.raw().0, Duration::from_secs(1)).unwrap();
        for &(function, nth, code) in orders {
            standin().fail(function, nth, code).unwrap();
        }
        Copies { bench, device, stream, ptr, host, registered }
    }

    /// What the device has once it is idle.
    fn on_device(&self) -> Vec<u8> {
        assert_eq!(standin().clear_orders(), 0, "each order struck");
        self.stream.synchronize().unwrap();
        self.bench.download(self.ptr, BYTES, self.stream.raw()).unwrap()
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        standin().clear_orders();
        let _ = self.device.synchronize();
        // SAFETY: registered in `failing`, and the device was waited for.
        let _ = unsafe { self.bench.driver.host_unregister(self.registered) };
    }
}

const UNKNOWN: Code = Code(999);

/// Failures after which all of an upload is under way, or its first half.
fn orders_of_uploads() -> Vec<(Vec<Order>, usize)> {
    let waits = |of_stream: u64, of_device: u64| {
        let of_stream = (1..=of_stream).map(|nth| ("cuStreamSynchronize", nth, UNKNOWN));
        of_stream.chain((1..=of_device).map(|nth| ("cuCtxSynchronize", nth, UNKNOWN))).collect::<Vec<_>>()
    };
    let half = |waits: Vec<_>| [vec![("cuMemcpyHtoDAsync_v2", 2, UNKNOWN)], waits].concat();
    vec![
        (waits(1, 0), BYTES),
        (waits(2, 0), BYTES),
        (waits(6, 5), BYTES),
        (half(waits(1, 0)), HALF),
        (half(waits(4, 2)), HALF),
    ]
}

#[test]
fn a_partial_upload_reads_nothing_after_it_returned() {
    for (orders, copied) in orders_of_uploads() {
        let mut copies = Copies::failing(&orders);
        let error = copies.stream.upload_blocking(copies.ptr, &copies.host).unwrap_err();
        assert_eq!(error.code, UNKNOWN, "the error of the copy itself");
        copies.host.fill(9);
        let expected = [vec![0; copied], vec![7; BYTES - copied]].concat();
        assert!(copies.on_device() == expected, "{orders:?}");
        copies.bench.assert_no_violation();
    }
}

#[test]
fn a_partial_download_writes_nothing_after_it_returned() {
    let orders = [
        vec![("cuStreamSynchronize", 1, UNKNOWN)],
        vec![("cuMemcpyDtoHAsync_v2", 2, UNKNOWN), ("cuStreamSynchronize", 1, UNKNOWN)],
    ];
    for orders in orders {
        let mut copies = Copies::failing(&orders);
        let error = copies.stream.download_blocking(&mut copies.host, copies.ptr).unwrap_err();
        assert_eq!(error.code, UNKNOWN);
        copies.host.fill(9);
        assert_eq!(copies.on_device(), [7; BYTES]);
        assert!(copies.host == [9; BYTES], "{orders:?}");
        copies.bench.assert_no_violation();
    }
}

#[test]
fn a_failed_wait_for_an_enqueued_copy_is_tried_again() {
    let waits = [("cuStreamSynchronize", 1, UNKNOWN), ("cuCtxSynchronize", 1, UNKNOWN)];
    let mut copies = Copies::failing(&waits);
    let (stream, ptr) = (copies.stream.clone(), copies.ptr);
    // All of it is pinned, so that the copy itself waits for nothing.
    stream.upload_blocking(ptr, &copies.host[..HALF]).unwrap();
    copies.host.fill(9);
    assert_eq!(copies.on_device()[..HALF], [0; HALF]);
    copies.bench.assert_no_violation();
}

#[test]
fn a_lost_device_is_not_waited_for() {
    let lost = Copies::failing(&[("cuStreamSynchronize", 1, Code::LAUNCH_FAILED)]);
    let before = lost.bench.device.calls("cuStreamSynchronize").unwrap();
    let error = lost.stream.upload_blocking(lost.ptr, &lost.host).unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    assert_eq!(lost.bench.device.calls("cuStreamSynchronize").unwrap(), before);
}

/// Its thread is this one, so it could not end before the copy returned.
#[test]
fn a_blocking_copy_is_refused_at_once_during_an_unannounced_capture() {
    let copies = Copies::failing(&[]);
    let (driver, legacy) = (&copies.bench.driver, copies.device.default_stream());
    let blocking = driver.create_stream(StreamFlags { non_blocking: false, priority: 0 }).unwrap();
    driver.begin_capture(blocking).unwrap();
    for half in [&copies.host[..HALF], &copies.host[HALF..]] {
        assert_eq!(legacy.upload_blocking(copies.ptr, half).unwrap_err().kind, ErrorKind::Capture);
    }
    let graph = driver.end_capture(blocking).expect("no call broke it");
    driver.destroy_graph(graph).unwrap();
}
