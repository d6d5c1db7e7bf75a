//! The loop of the training tutorials, with batches that are on the device before they are needed.
//!
//! On a simulated device it shows, and asserts, that a step takes as long as the longer of
//! computing and copying: the other hides behind it. With `cuda` as argument it runs on a real GPU,
//! and prints the measured times.

use std::error::Error;
use std::time::Duration;

use aquifer::kernels::Kernels;
use aquifer::prelude::*;
use aquifer::transfer::{Prefetcher, Timer, Transfer};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const STEPS: u32 = 16;
/// Batches in flight or on the device before they are requested.
const AHEAD: usize = 2;
/// Steps that are not measured: the first take memory from the device.
const WARM_UP: u32 = 4;
const BATCH_BYTES: usize = 32 << 20;

fn main() -> Result<()> {
    let real = std::env::args().nth(1).as_deref() == Some("cuda");
    let device = aquifer::open(if real { "cuda:0" } else { "sim:jitter=off" })?;
    println!("{}: {STEPS} steps, {AHEAD} batches ahead", device.info().name);
    for (name, compute) in [("compute-bound", Duration::from_millis(3)), ("copy-bound", Duration::from_micros(200))] {
        let transfer = Transfer::new(&Allocator::of(&device)?)?;
        show(name, &transfer, compute, !real)?;
    }
    Ok(())
}

/// Times one loop and its parts.
fn show(name: &str, transfer: &Transfer, compute: Duration, assert: bool) -> Result<()> {
    let (device, kernels) = (transfer.device(), transfer.allocator().kernels()?);
    let stream = device.stream()?;
    // A loader with threads of its own has batches ready in pinned memory.
    let batches: Vec<Tensor> = (0..STEPS)
        .map(|_| Tensor::zeros(&[BATCH_BYTES], DType::U8, transfer.pinned()))
        .collect::<std::result::Result<_, _>>()?;
    let copy = time_of_a_copy(transfer, &stream, &batches[0])?;
    let mut timer = None;
    let mut step = 0;
    train(transfer, &stream, batches, |batch| {
        forward_and_backward(batch, &stream, &kernels, compute)?;
        step += 1;
        if step == WARM_UP {
            timer = Some(Timer::start(device, &stream)?);
        }
        Ok(())
    })?;
    let measured = timer.ok_or("too few steps")?.stop(&stream)?.wait()?;
    let (step, longer, one_after_the_other) = (measured / (STEPS - WARM_UP), compute.max(copy), compute + copy);
    println!(
        "{name}: compute {compute:.2?}, copy {copy:.2?}; a step takes {step:.2?}, {:.1} % of the longer, {:.1} % of both",
        100.0 * step.as_secs_f64() / longer.as_secs_f64(),
        100.0 * step.as_secs_f64() / one_after_the_other.as_secs_f64(),
    );
    assert!(!assert || step <= longer.mul_f64(1.05), "{name}: copies and computing do not overlap");
    Ok(())
}

/// The loop itself.
fn train(
    transfer: &Transfer,
    stream: &Stream,
    loader: Vec<Tensor>,
    mut forward_and_backward: impl FnMut(&Tensor) -> Result<()>,
) -> Result<()> {
    for batch in Prefetcher::new(loader, transfer, stream, AHEAD)? {
        let batch = batch?; // on the device
        forward_and_backward(&batch)?;
    }
    Ok(())
}

/// Stands for a model: keeps the stream busy.
fn forward_and_backward(_batch: &Tensor, stream: &Stream, kernels: &Kernels, compute: Duration) -> Result<()> {
    Ok(kernels.spin(stream, compute)?)
}

fn time_of_a_copy(transfer: &Transfer, stream: &Stream, batch: &Tensor) -> Result<Duration> {
    let on_stream = transfer.on(stream)?;
    drop(batch.to(&on_stream)?.wait()?); // the first time, memory is taken from the device
    let timer = Timer::start(transfer.device(), stream)?;
    let pending = batch.to(&on_stream)?;
    let copy = timer.stop(stream)?.wait()?;
    drop(pending.wait()?);
    Ok(copy)
}
