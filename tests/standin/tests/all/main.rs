//! The stand-in driver as programs see it: through cudarc, which loads it as if it were the CUDA
//! driver.
//!
//! Each test has a device of its own, so they run side by side. What concerns the process as a
//! whole, such as a driver without devices, is tested in processes of its own (`process.rs`).
// The library can only be loaded on Linux.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "helpers of tests fail where a test fails")]

mod capture;
mod conditional;
mod contexts;
mod copies;
mod failures;
mod graphs;
mod kernels;
mod memory;
mod peers;
mod process;
mod streams;
mod support;
mod threads;
mod user_objects;
mod vmm;
