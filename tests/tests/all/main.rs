//! Tests that cross crates. `CHECKLIST.md` in this package says which behaviours of PyTorch's own tests are tested where.
//!
//! The long run: `AQUIFER_PROGRAMS=10000 cargo test --profile long -p aquifer-tests programs -- --nocapture`.
#![forbid(unsafe_code)]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

mod fault_sweep;
mod found;
mod named_core;
mod named_history;
mod named_pools;
mod named_streams;
mod oom;
mod programs;
mod threads;
