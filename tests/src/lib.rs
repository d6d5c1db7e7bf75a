//! Tests of Aquifer that cross crates; see `tests/`. What they share is here.
//!
//! * [`Bench`] – the fixture of tests of one thing: a device, an allocator, two streams;
//! * [`prelude`] – common imports;
//! * [`runner`] – runs many numbered programs;
//! * of [`aquifer_machine`], which has the random programs: [`subject`], the device under test,
//!   [`check`], checks of statistics, and [`random`], numbers that look random.
//!
//! The simulated device's race detector is on in every test. The programs order everything that
//! they do as CUDA requires, so every violation is the allocator's fault.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc, reason = "helpers of tests panic where a test fails")]

mod bench;
pub mod prelude;
pub mod runner;

use aquifer_allocator::config::Backing;

pub use aquifer_machine::{Subject, check, random, subject};
pub use bench::{At, Bench, write_on};

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

/// The README's example, compiled and run as a documentation test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
#[derive(Debug)]
pub struct Readme;

/// The examples of pages that are not part of `aquifer`'s documentation.
#[cfg(doctest)]
#[doc = include_str!("../../docs/embedding.md")]
#[doc = include_str!("../../docs/from-vpmm.md")]
#[doc = include_str!("../../docs/remapping.md")]
#[derive(Debug)]
pub struct Pages;

/// The examples in the READMEs of the packages.
#[cfg(doctest)]
#[doc = include_str!("../../aquifer/README.md")]
#[doc = include_str!("../../device/README.md")]
#[doc = include_str!("../../device/cuda/README.md")]
#[doc = include_str!("../../device/sim/README.md")]
#[doc = include_str!("../../allocator/README.md")]
#[doc = include_str!("../../kernels/README.md")]
#[derive(Debug)]
pub struct PackageReadmes;
