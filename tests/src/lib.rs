//! Tests of Aquifer that cross crates; see `tests/`. What they share is here.
//!
//! * [`op`] – the steps that programs are made of, and how to draw random ones;
//! * [`setup`] – the device and the allocator that a program runs on;
//! * [`world`] – runs a program, step by step, and checks it against a model of what must hold;
//! * [`check`] – checks statistics against values recomputed from other sources;
//! * [`runner`] – runs many numbered programs;
//! * [`subject`] – the device under test, and control over it.
//!
//! The simulated device's race detector is on in every test. The programs order everything that
//! they do as CUDA requires, so whatever it finds is the allocator's fault.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc, reason = "helpers of tests panic where a test fails")]

pub mod check;
mod model;
pub mod op;
pub mod runner;
pub mod setup;
pub mod subject;
pub mod world;

use aquifer_allocator::config::Backing;
use aquifer_allocator::{Allocator, Config};
use aquifer_device::{Device, DevicePtr, Stream};

pub use subject::Subject;

/// 2^10 bytes.
pub const KIB: u64 = 1 << 10;
/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;
/// 2^30 bytes.
pub const GIB: u64 = 1 << 30;

/// What memory may come from.
pub const BACKINGS: [Backing; 2] = [Backing::Paged, Backing::Segments];

/// An option string that also picks the backing.
pub fn on(backing: Backing, options: &str) -> String {
    if options.is_empty() { format!("backing:{backing}") } else { format!("{options},backing:{backing}") }
}

/// A device with an allocator, for tests of one thing.
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
        Bench::with(capacity, Config::parse(options).unwrap_or_else(|error| panic!("{options}: {error}")))
    }

    /// As [`Bench::new`], once for each backing: for what must hold wherever memory comes from.
    pub fn on_both(capacity: u64, options: &str) -> impl Iterator<Item = Bench> {
        BACKINGS.into_iter().map(move |backing| Bench::new(capacity, &on(backing, options)))
    }

    /// A device of `capacity` bytes and an allocator with the given configuration.
    pub fn with(capacity: u64, config: Config) -> Bench {
        let driver = Subject::new(capacity);
        let device = driver.device();
        let opened = Allocator::new(&device, config).and_then(|allocator| {
            Ok((allocator, device.stream()?, device.stream()?)) // made before any fault is injected
        });
        let (allocator, stream, side) = opened.unwrap_or_else(|error| panic!("{error}"));
        Bench { driver, device, allocator, stream, side }
    }

    /// Bytes free on the device.
    pub fn device_free(&self) -> u64 {
        self.driver.free()
    }

    /// Panics if the race detector found anything.
    pub fn assert_no_violation(&self) {
        self.driver.assert_no_violation();
    }

    /// Panics unless everything is given back: nothing reserved, and the device as free as at the
    /// start.
    pub fn assert_returned(&self) {
        self.allocator.empty_cache().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(self.allocator.memory_reserved(), 0, "bytes are still reserved");
        assert_eq!(self.device_free(), self.device.info().total_bytes, "memory is missing on the device");
        self.driver.assert_no_reservation();
        self.assert_no_violation();
    }
}

/// Writes a range on a stream.
pub fn write_on(stream: &Stream, ptr: DevicePtr, bytes: u64) {
    let done = stream.fill(ptr, 0x77, bytes);
    done.unwrap_or_else(|error| panic!("{error}"));
}

/// The README's example, compiled and run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[derive(Debug)]
pub struct Readme;

/// The examples of the page about hosts.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
#[derive(Debug)]
pub struct Embedding;

/// The examples in the READMEs of the packages.
#[cfg(doctest)]
#[doc = include_str!("../../aquifer/README.md")]
#[doc = include_str!("../../device/README.md")]
#[doc = include_str!("../../allocator/README.md")]
#[doc = include_str!("../../transfer/README.md")]
#[doc = include_str!("../../kernels/README.md")]
#[derive(Debug)]
pub struct PackageReadmes;
