//! The stand-in driver as programs see it: through cudarc, which loads it as if it were the CUDA
//! driver.
//!
//! Each test has a device of its own, so they run side by side. What concerns the process as a
//! whole, such as a driver without devices, is tested in processes of its own (`process.rs`).
#![allow(clippy::unwrap_used, reason = "helpers of tests fail where a test fails")]
#![cfg_attr(not(target_os = "linux"), allow(unused, reason = "the library can only be loaded on Linux"))]

#[cfg(target_os = "linux")]
mod capture;
#[cfg(target_os = "linux")]
mod contexts;
#[cfg(target_os = "linux")]
mod copies;
#[cfg(target_os = "linux")]
mod failures;
#[cfg(target_os = "linux")]
mod kernels;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod peers;
#[cfg(target_os = "linux")]
mod process;
#[cfg(target_os = "linux")]
mod streams;
#[cfg(target_os = "linux")]
mod support;
#[cfg(target_os = "linux")]
mod threads;
#[cfg(target_os = "linux")]
mod vmm;

#[cfg(not(target_os = "linux"))]
#[test]
#[ignore = "the stand-in driver takes the CUDA driver's place on Linux only"]
fn the_stand_in_driver() {}
