//! The bandwidth of the kernels that memory bounds, compared with the driver's copy on the same
//! device.
//!
//! ```text
//! cargo run --release -p aquifer-kernels --example bandwidth -- cuda:0 [MiB of each operand, default 1024]
//! ```
//!
//! For each it prints the bytes read and written per second, from the best of ten runs timed by
//! events, and their share of the copy's. On a GPU it fails if a kernel reaches less than 90 % of
//! the copy. On a simulated device the times come from its model and do not depend on the kernels.

use std::error::Error;

use aquifer::{Allocator, Buffer};
use aquifer_allocator::{AccessGuard, Config};
use aquifer_device::{AccessKind, Device, Stream};
use aquifer_kernels::{KernelError, Kernels, Strided};
use half::{bf16, f16};

const RUNS: usize = 10;

/// The least share of the copy's bandwidth, in percent.
const ENOUGH: f64 = 90.0;

struct Bench {
    device: Device,
    stream: Stream,
    copy_gb_s: f64,
    /// Kernels that reached less than [`ENOUGH`].
    slow: Vec<String>,
}

impl Bench {
    /// Times `work`, which reads and writes `bytes` bytes in all.
    fn time(
        &mut self,
        name: &str,
        bytes: u64,
        work: &mut dyn FnMut(&Stream) -> Result<(), KernelError>,
    ) -> Result<(), Box<dyn Error>> {
        let (start, end) = (self.device.create_event(true)?, self.device.create_event(true)?);
        work(&self.stream)?;
        let mut best = f64::INFINITY;
        for _ in 0..RUNS {
            start.record(&self.stream)?;
            work(&self.stream)?;
            end.record(&self.stream)?;
            end.synchronize()?;
            best = best.min(start.elapsed_ms(&end)?);
        }
        let gb_s = bytes as f64 / best / 1e6;
        if self.copy_gb_s == 0.0 {
            self.copy_gb_s = gb_s;
        }
        let percent = 100.0 * gb_s / self.copy_gb_s;
        println!("{name:<28} {best:>9.3} ms {gb_s:>9.1} GB/s {percent:>6.1} % of the copy");
        if percent < ENOUGH {
            self.slow.push(name.to_owned());
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let device = aquifer::open(&args.next().unwrap_or_else(|| "sim".into()))?;
    let bytes = args.next().map_or(Ok(1024), |mib| mib.parse::<u64>())? << 20;
    let len = usize::try_from(bytes / 4)?;
    let allocator = Allocator::new(&device, Config::default())?;
    let kernels = Kernels::load(&device)?;
    let stream = device.stream()?;
    println!("{}: operands of {} MiB", device.info().name, bytes >> 20);

    let mut a: Buffer<u8> = allocator.alloc(len * 4, &stream)?;
    let mut b: Buffer<u8> = allocator.alloc(len * 4, &stream)?;
    let mut c: Buffer<f32> = allocator.alloc(len, &stream)?;
    let mut words: Buffer<u64> = allocator.alloc(Kernels::FINDINGS_LEN, &stream)?;
    let mut scratch: Buffer<u64> = allocator.alloc(Kernels::SUM_SCRATCH_LEN, &stream)?;
    kernels.fill(&stream, &mut a, 1u8)?;
    kernels.fill(&stream, &mut b, 1u8)?;
    kernels.fill(&stream, &mut c, 1f32)?;

    let mut bench = Bench { device, stream, copy_gb_s: 0.0, slow: Vec::new() };
    bench.time("copy by the driver", 2 * bytes, &mut |stream| {
        let access = AccessGuard::acquire(stream, &[(a.storage(), AccessKind::Read), (b.storage(), AccessKind::Write)]);
        let _access = access.map_err(|cause| KernelError::Order { kernel: "copy", cause })?;
        Ok(stream.copy(b.ptr(), a.ptr(), bytes)?)
    })?;
    bench.time("fill", bytes, &mut |stream| kernels.fill(stream, &mut a, 7u8))?;
    bench.time("pattern_write", bytes, &mut |stream| kernels.pattern_write(stream, &mut a, 1))?;
    bench.time("pattern_verify", bytes, &mut |stream| kernels.pattern_verify(stream, &a, 1, &mut words))?;

    let (x, mut y): (Buffer<f32>, Buffer<f32>) =
        (allocator.alloc(len, &bench.stream)?, allocator.alloc(len, &bench.stream)?);
    kernels.fill(&bench.stream, &mut x.share(), 0.5f32)?;
    kernels.fill(&bench.stream, &mut y, 0.5f32)?;
    bench.time("axpy f32", 3 * bytes, &mut |stream| kernels.axpy(stream, 1.5, &x, &mut y))?;
    bench.time("add f32", 3 * bytes, &mut |stream| kernels.add(stream, &x, &c.share(), &mut y))?;
    let mut total: Buffer<f32> = allocator.alloc(1, &bench.stream)?;
    bench.time("reduce_sum f32", bytes, &mut |stream| kernels.reduce_sum(stream, &x, &mut scratch, &mut total))?;

    let mut halves: Buffer<f16> = allocator.alloc(len, &bench.stream)?;
    let mut brains: Buffer<bf16> = allocator.alloc(len, &bench.stream)?;
    bench.time("cast f32 to f16", bytes + bytes / 2, &mut |stream| kernels.cast(stream, &x, &mut halves))?;
    bench.time("cast f32 to bf16", bytes + bytes / 2, &mut |stream| kernels.cast(stream, &x, &mut brains))?;
    bench.time("cast bf16 to f32", bytes + bytes / 2, &mut |stream| kernels.cast(stream, &brains, &mut y))?;
    bench.time("cast f16 to bf16", bytes, &mut |stream| kernels.cast(stream, &halves, &mut brains))?;

    let columns = 1 << 12;
    let rows = bytes / 4 / columns;
    let bytes = 4 * rows * columns;
    let half_rows = Strided::new(&[rows, columns / 2], &[columns, 1]).ok_or("a layout that overflows")?;
    let mut dense = y.slice(..usize::try_from(half_rows.len())?).share();
    bench.time("gather f32, half of each row", bytes, &mut |stream| {
        kernels.gather(stream, &x, &half_rows, &mut dense)
    })?;
    bench.time("scatter f32, half of each row", bytes, &mut |stream| {
        kernels.scatter(stream, &dense, &mut c, &half_rows)
    })?;
    let is_real = !bench.device.info().is_virtual;
    if is_real && !bench.slow.is_empty() {
        return Err(format!("below {ENOUGH} % of the copy: {}", bench.slow.join("; ")).into());
    }
    Ok(())
}
