//! Tests that cross crates. `CHECKLIST.md` in this package says which behaviours of PyTorch's own
//! tests are tested where.
//!
//! Long runs, with `cargo test --profile long -p aquifer-tests -- --nocapture` and
//! * `AQUIFER_PROGRAMS=40000` and the filter `programs::`: as many random programs on each backing,
//!   and half as many with faults;
//! * `AQUIFER_PROGRAMS=8000` and the filter `fault_sweep`: a fault at every driver call of 20 long
//!   random programs.
//!
//! A program that fails is made small and printed with its number; `AQUIFER_PROGRAM=4711` runs only
//! that one.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

mod allocator;
mod clean_up;
mod conformance;
mod deferred_coalescing;
mod fault_sweep;
mod lending;
mod lost;
mod mapped;
mod misuse;
mod oom;
mod oom_advice;
mod oom_followed;
mod programs;
mod pytorch;
mod reclaimers;
mod soak;
mod threads;
mod timeline;
mod transfers;
