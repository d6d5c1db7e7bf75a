//! Copies of untyped memory, as programs make them through the crate `aquifer`.
#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

mod counters;
mod dropped;
mod files;
mod memory;
mod on_host;
mod owners;
mod peers;
mod regions;

use std::sync::Arc;

use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Allocator, Buffer, Error, Pending};
use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use bytemuck::Pod;

/// New device memory, and a copy of these values to it.
fn to_device<T: Pod + Send + Sync>(
    by: &Transfer,
    values: Vec<T>,
    stream: &Stream,
) -> Result<Pending<Buffer<T>>, Error> {
    let mut buffer = by.allocator().alloc(values.len(), stream)?;
    Ok(buffer.upload(values, by)?.map(|()| buffer))
}

/// A ring of few small chunks.
fn small() -> TransferConfig {
    TransferConfig::default().chunk_bytes(64 << 10).chunks(3).threads(3).ring_bytes_max(1 << 20)
}

fn sim() -> SimConfig {
    SimConfig::new(1 << 30)
}

/// A runtime on a device of its own.
fn runtime(config: TransferConfig) -> (Arc<SimDriver>, Transfer) {
    // As on a GPU: the next request gets what was just freed.
    runtime_with(config, "quarantine_mb:0")
}

fn runtime_with(config: TransferConfig, options: &str) -> (Arc<SimDriver>, Transfer) {
    let sim = SimDriver::new(sim());
    let allocator = Allocator::new(&Device::new(sim.clone()), options).unwrap();
    (sim, Transfer::with_config(&allocator, config).unwrap())
}

fn content(bytes: usize, seed: usize) -> Vec<u8> {
    (seed..seed + bytes).map(|index| (index.wrapping_mul(0x9E37_79B1) >> 11).to_le_bytes()[0]).collect()
}
