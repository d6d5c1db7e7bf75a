//! RMM's `multi_stream_allocations` and `async_priming` (`cpp/benchmarks`): how long the device and
//! the host wait for an allocator.

use std::time::Duration;

use aquifer::kernels::Kernels;
use aquifer_stress::exit::Failure;
use aquifer_trace::{Subject, streams_of};

use super::Lab;
use crate::row::Row;
use crate::team::refused;

/// A million clock cycles of a GPU of 2 GHz, as long as a kernel of the original runs.
const KERNEL: Duration = Duration::from_micros(500);
/// Measured iterations, after a first one.
const ITERATIONS: u64 = 20;

/// Kernels on streams in turn, each with a block of 8 bytes that is freed as soon as the kernel is
/// enqueued. The device is waited for after each iteration.
pub(super) struct Iterations {
    pub(super) name: String,
    pub(super) streams: usize,
    kernels: usize,
    is_prewarmed: bool,
}

impl Iterations {
    pub(super) fn all() -> Vec<Iterations> {
        let (kernels, both) = (4, [false, true]);
        let of = |streams, is_prewarmed| Iterations {
            name: format!("multi_stream_allocations/{streams}/{kernels}/{}", u8::from(is_prewarmed)),
            streams,
            kernels,
            is_prewarmed,
        };
        [1, 2, 4].into_iter().flat_map(|streams| both.map(|is_prewarmed| of(streams, is_prewarmed))).collect()
    }

    pub(super) fn time<S: Subject>(&self, lab: &Lab, mut subject: S) -> Result<Row, Failure> {
        const BYTES: u64 = 8;
        let kernels = Kernels::load(&lab.device)?;
        // The kernels touch no memory, so they may run on other streams than those of the subject.
        let streams = streams_of(&lab.device, self.streams)?;
        let numbers = || (0..).take(self.streams);
        if self.is_prewarmed {
            let blocks: Result<Vec<_>, _> = numbers().map(|stream| subject.alloc(BYTES, stream)).collect();
            blocks.map_err(refused)?.into_iter().for_each(|block| subject.free(block));
        }
        lab.device.synchronize()?;
        let mut total = 0;
        for iteration in 0..=ITERATIONS {
            let start = lab.now_ns();
            for (stream, number) in streams.iter().zip(numbers()).cycle().take(self.kernels) {
                let block = subject.alloc(BYTES, number).map_err(refused)?;
                kernels.spin(stream, KERNEL)?;
                subject.free(block);
            }
            lab.device.synchronize()?;
            // A subject that is not prewarmed takes memory in the first one.
            if iteration > 0 || !self.is_prewarmed {
                total += lab.now_ns() - start;
            }
        }
        let counted = ITERATIONS + u64::from(!self.is_prewarmed);
        #[expect(clippy::cast_precision_loss, reason = "a time to display")]
        Ok(Row::new().with("clock", lab.clock()).us("us_per_iteration", total as f64 / counted as f64))
    }
}

/// Two rounds of ten blocks that each have 9 % of the device.
#[derive(Clone, Copy)]
pub(super) struct Priming {
    pub(super) name: &'static str,
    /// Whether half of the device was allocated and freed before.
    is_primed: bool,
}

impl Priming {
    pub(super) const ALL: [Priming; 2] = [
        Priming { name: "async_priming/unprimed", is_primed: false },
        Priming { name: "async_priming/primed", is_primed: true },
    ];

    pub(super) fn time<S: Subject>(self, lab: &Lab, mut subject: S) -> Result<Row, Failure> {
        const BLOCKS: u64 = 10;
        let total = lab.device.info().total_bytes;
        let size = total / 100 * 9;
        if self.is_primed {
            let half = subject.alloc(total / 2, 0).map_err(refused)?;
            subject.free(half);
        }
        let start = lab.now_ns();
        let mut blocks = vec![subject.alloc(size, 0).map_err(refused)?];
        let first = lab.now_ns();
        for _ in 1..BLOCKS {
            blocks.push(subject.alloc(size, 0).map_err(refused)?);
        }
        let first_round = lab.now_ns();
        // Frees count for the second round, as in the original.
        blocks.drain(..).for_each(|block| subject.free(block));
        for _ in 0..BLOCKS {
            blocks.push(subject.alloc(size, 0).map_err(refused)?);
        }
        let second_round = lab.now_ns();
        blocks.into_iter().for_each(|block| subject.free(block));
        let rate = |ns| (ns > 0).then(|| rate(BLOCKS * size, ns));
        let row = Row::new().with("clock", lab.clock()).us("latency_to_first_us", (first - start) as f64);
        let row = row.with("first_round_throughput_gb_s", rate(first_round - start));
        Ok(row.with("second_round_throughput_gb_s", rate(second_round - first_round)))
    }
}

/// Gigabytes (10^9) a second.
#[expect(clippy::cast_precision_loss, reason = "a rate to display")]
fn rate(bytes: u64, ns: u64) -> f64 {
    bytes as f64 / ns as f64
}
