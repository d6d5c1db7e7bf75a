//! CUDA through the stand-in driver, from the layers above and together with cudarc. Tests of
//! single calls are in `device/cuda/tests`. Without the stand-in (not on Linux) there is nothing
//! here.
#![cfg(target_os = "linux")]
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

mod allocator;
mod captures;
mod interop;
mod process;
mod support;
mod transfers;
