//! The fixture of tests that need a device with an allocator.

use std::time::Duration;

use aquifer::Allocator;
use aquifer_allocator::{AllocError, Allocation, Config, Growable, OomReport, PoolOptions, PrivatePool};
use aquifer_device::{Code, Device, DevicePtr, Operation, Stream};
use aquifer_sim::Fault;

use crate::{BACKINGS, Subject, on};

/// A device with an allocator and two streams. Its methods panic where the call that they make
/// fails.
#[derive(Debug)]
pub struct Bench {
    /// The driver below the device, and control over it.
    pub driver: Subject,
    /// The device.
    pub device: Device,
    /// The allocator.
    pub allocator: Allocator,
    /// A stream that does not synchronise with the legacy one.
    pub stream: Stream,
    /// Another one.
    pub side: Stream,
}

impl Bench {
    /// A device of `capacity` bytes and an allocator with the given options.
    pub fn new(capacity: u64, options: &str) -> Bench {
        Bench::over(Subject::new(capacity), options)
    }

    /// As [`Bench::new`], once for each backing.
    pub fn on_both(capacity: u64, options: &str) -> impl Iterator<Item = Bench> {
        BACKINGS.into_iter().map(move |backing| Bench::new(capacity, &on(backing, options)))
    }

    /// An allocator with the given options on a device of the test's own.
    pub fn over(driver: Subject, options: &str) -> Bench {
        Bench::with(driver, Config::parse(options).unwrap_or_else(|error| panic!("{options}: {error}")))
    }

    /// An allocator with the given configuration on a device of the test's own. Freed blocks are
    /// not quarantined unless it says so: as on a GPU, the next request gets what was just freed.
    pub fn with(driver: Subject, mut config: Config) -> Bench {
        config.quarantine.get_or_insert(0);
        let device = driver.device();
        let opened = Allocator::new(&device, config).and_then(|allocator| {
            Ok((allocator, device.stream()?, device.stream()?)) // made before any fault is injected
        });
        let (allocator, stream, side) = opened.unwrap_or_else(|error| panic!("{error}"));
        Bench { driver, device, allocator, stream, side }
    }

    /// Memory for the first stream.
    #[track_caller]
    pub fn alloc(&self, bytes: u64) -> Allocation {
        self.alloc_on(&self.stream, bytes)
    }

    /// Memory for a stream.
    #[track_caller]
    pub fn alloc_on(&self, stream: &Stream, bytes: u64) -> Allocation {
        self.allocator.alloc_bytes(bytes, stream).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Memory for the first stream, which has written it.
    #[track_caller]
    pub fn written(&self, bytes: u64) -> Allocation {
        self.written_on(&self.stream, bytes)
    }

    /// Memory for a stream, which has written it.
    #[track_caller]
    pub fn written_on(&self, stream: &Stream, bytes: u64) -> Allocation {
        let allocation = self.alloc_on(stream, bytes);
        write_on(stream, allocation.ptr(), bytes);
        allocation
    }

    /// The error of a request for the first stream.
    #[track_caller]
    pub fn refused(&self, bytes: u64) -> AllocError {
        let Err(error) = self.allocator.alloc_bytes(bytes, &self.stream) else { panic!("{bytes} bytes were served") };
        error
    }

    /// The report of a request for the first stream.
    #[track_caller]
    pub fn report(&self, bytes: u64) -> OomReport {
        let error = self.refused(bytes);
        error.report().unwrap_or_else(|| panic!("{error}")).clone()
    }

    /// A private pool with the default options.
    pub fn pool(&self) -> PrivatePool {
        self.allocator.create_pool(PoolOptions::default()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A private pool that lends its memory before a request is refused.
    pub fn lending_pool(&self) -> PrivatePool {
        let options = PoolOptions { use_on_oom: true, ..PoolOptions::default() };
        self.allocator.create_pool(options).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Memory that grows, for the first stream.
    pub fn growable(&self, capacity: u64) -> Growable {
        self.allocator.growable(capacity, &self.stream).unwrap_or_else(|error| panic!("{error}"))
    }

    /// One more stream.
    pub fn new_stream(&self) -> Stream {
        self.device.stream().unwrap_or_else(|error| panic!("{error}"))
    }

    /// Keeps a stream busy for `time` from the end of its present work.
    pub fn stall(&self, stream: &Stream, time: Duration) {
        self.driver.stall(stream, time).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Gives memory back while the side stream, busy for `time`, uses it.
    pub fn drop_in_use(&self, allocation: Allocation, time: Duration) {
        self.use_on_side(allocation.ptr(), allocation.bytes(), time);
        allocation.record_stream(&self.side).unwrap_or_else(|error| panic!("{error}"));
    }

    /// Uses a range on the side stream, after the first stream and `time` that the side stream is
    /// busy.
    pub fn use_on_side(&self, ptr: DevicePtr, bytes: u64, time: Duration) {
        self.side.wait_for(&self.stream.tick()).unwrap_or_else(|error| panic!("{error}"));
        self.stall(&self.side, time);
        write_on(&self.side, ptr, bytes);
    }

    /// Makes the nth call of an operation from now on fail.
    pub fn fail(&self, operation: Operation, nth: u64, code: Code) {
        self.driver.inject(Fault::Nth { operation: Some(operation), nth, code });
    }

    /// How often the device called an operation of its driver so far.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.device.driver_calls().of(operation)
    }

    /// The byte at an address, read on the first stream.
    pub fn byte(&self, ptr: DevicePtr) -> u8 {
        let mut byte = [0];
        self.stream.download_blocking(&mut byte, ptr).unwrap_or_else(|error| panic!("{error}"));
        byte[0]
    }

    /// Bytes free on the device.
    pub fn device_free(&self) -> u64 {
        self.driver.free()
    }

    /// Panics if the race detector found anything.
    pub fn assert_no_violation(&self) {
        self.driver.assert_no_violation();
    }

    /// Panics unless everything is given back: nothing allocated or reserved, and the device as
    /// free as at the start.
    pub fn assert_returned(&self) {
        self.allocator.empty_cache().unwrap_or_else(|error| panic!("{error}"));
        self.device.settle();
        let held = (self.allocator.memory_allocated(), self.allocator.memory_reserved());
        assert_eq!(held, (0, 0), "bytes are still allocated or reserved");
        assert_eq!(self.device_free(), self.device.info().total_bytes, "memory is missing on the device");
        self.driver.assert_no_reservation();
        self.assert_no_violation();
    }
}

/// Writes a range on a stream.
pub fn write_on(stream: &Stream, ptr: DevicePtr, bytes: u64) {
    stream.fill(ptr, 0x77, bytes).unwrap_or_else(|error| panic!("{error}"));
}

/// Prints where a sweep is if it panics before this is dropped.
#[derive(Debug)]
pub struct At(pub String);

impl Drop for At {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("failed at: {}", self.0);
        }
    }
}
