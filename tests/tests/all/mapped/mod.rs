//! Mapped memory: its basics, frames, devices that lag, repeating programs, and edge cases.

mod basics;
mod edge_cases;
mod frames;
mod lagging_devices;
mod repeating_programs;

use aquifer_tests::prelude::*;

/// Memory of so many MiB for the first stream, which has written it.
fn block(bench: &Bench, mib: u64) -> Allocation {
    bench.written(mib * MIB)
}
