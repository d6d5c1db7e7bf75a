//! The CUDA driver, call by call, on the stand-in driver: the simulated device behind the CUDA
//! driver's C interface.
//!
//! Each test has a device of its own, so they run side by side. What concerns the whole process (no
//! driver, no device, an old one) is tested in processes of their own in `tests/tests/cuda`.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

mod bench;
mod borrowed;
mod calls;
mod captures;
mod clean_up;
mod faults;
mod library;
#[cfg(feature = "nvml")]
mod memory_users;
mod missing;
mod peers;
mod refused;
mod shared;
mod streams;
mod threads;
