//! Measures pairs of an allocation and a free of 1 MiB, the least of ten rounds: the driver's
//! functions, which the interposer serves where it stands before the driver, and with the argument
//! `raw` Aquifer's own functions.

use std::error::Error;
use std::time::Instant;

use aquifer_allocator::Allocator;
use aquifer_cuda as cuda;
use cudarc::driver::CudaContext;
use cudarc::driver::result::{free_async, malloc_async};

const BYTES: usize = 1 << 20;
const PAIRS: u32 = 100_000;

fn main() -> Result<(), Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let is_raw = std::env::args().any(|argument| argument == "raw");
    let nanoseconds = if is_raw {
        let device = cuda::device_of(context.clone())?;
        let (memory, stream) = (Allocator::of(&device)?, cuda::stream(&device, &stream)?);
        measure(|| Ok(memory.free_raw_on(memory.alloc_raw(BYTES as u64, &stream)?, &stream)?))?
    } else {
        let raw = stream.cu_stream();
        measure(|| {
            // SAFETY: the stream lives.
            let ptr = unsafe { malloc_async(raw, BYTES) }?;
            // SAFETY: the memory is freed once, and nothing uses it.
            Ok(unsafe { free_async(ptr, raw) }?)
        })?
    };
    println!("{nanoseconds:.0} ns for each pair");
    Ok(())
}

fn measure(mut pair: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let mut least = f64::INFINITY;
    for _ in 0..10 {
        let start = Instant::now();
        for _ in 0..PAIRS {
            pair()?;
        }
        least = least.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS));
    }
    Ok(least)
}
