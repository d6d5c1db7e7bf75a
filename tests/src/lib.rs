//! Tests of Aquifer that cross crates; see `tests/`. What they share is here.
//!
//! * [`Bench`] – the fixture of tests of one thing: a device, an allocator, two streams;
//! * [`prelude`] and [`random`] – common imports, and numbers that look random;
//! * [`op`] – the steps that programs are made of, and how to draw random ones;
//! * [`setup`] – the device and the allocator that a program runs on;
//! * [`interpreter`] – runs a program step by step and compares it with a model;
//! * [`check`] – checks statistics against values recomputed from other sources;
//! * [`runner`] – runs many numbered programs;
//! * [`subject`] – the device under test, and control over it.
//!
//! The simulated device's race detector is on in every test. The programs order everything that
//! they do as CUDA requires, so every violation is the allocator's fault.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc, reason = "helpers of tests panic where a test fails")]

mod bench;
pub mod check;
pub mod interpreter;
mod model;
pub mod op;
pub mod prelude;
pub mod random;
pub mod runner;
pub mod setup;
pub mod subject;

use aquifer_allocator::config::Backing;

pub use bench::{Bench, write_on};
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
#[doc = include_str!("../../device/cuda/README.md")]
#[doc = include_str!("../../device/sim/README.md")]
#[doc = include_str!("../../allocator/README.md")]
#[doc = include_str!("../../kernels/README.md")]
#[derive(Debug)]
pub struct PackageReadmes;
