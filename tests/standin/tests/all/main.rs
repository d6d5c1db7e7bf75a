//! The stand-in driver as programs see it: through cudarc, which loads it as if it were the CUDA driver.
//!
//! Each test has a device of its own, so they run side by side. What concerns the process as a whole, such as a driver without
//! devices, is tested in processes of its own: `process.rs`.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "the driver's raw functions are what is tested")]

mod contexts;
mod support;
