//! How the time of operations grows with the number of streams, pools, blocks and others, and how
//! long a cached allocation on another stream waits meanwhile.
//!
//! Each series has n, 4 n and 16 n objects (`--quick`: a 16th), while another thread allocates and
//! frees a cached block of 4 KiB on a stream of its own:
//!
//! * `nothing`: no objects; the operation `spin` makes no call, so its `hot_max_ns` is the effect of
//!   the machine's scheduler alone on the other thread.
//! * `streams`: 64 streams with a block each: first block, pair in turn on all, drop.
//! * `pools`: 128 private pools with a block each: make, pair in turn in all, drop; a snapshot after.
//! * `growables`: 128 growables: make (of 6 MiB), shrink, drop and the request that misses next.
//! * `graphs`: 128 graphs of one pool: capture, launch, pair in the pool, drop; a pair after that.
//! * `waiting`: 1000 blocks that another stream uses when they are freed: free, and end of the wait.
//! * `live`: 6250 blocks of 512 B to 64 KiB: allocate, replace a random one, free.
//!
//! Each also measures, with all of these there, a pair of 4 KiB, a snapshot, `fragmentation` and,
//! except where blocks wait, a miss (a held block of 8 to 15 MiB) and a refusal (of 32 TiB). The
//! `exponent` is the power of n that the time of an operation grew with since the first n: 0 is
//! constant, 1 is as fast as n.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer::device::Graph;
use aquifer::memory::{AllocError, Allocation, Growable, PoolOptions, PrivatePool};
use aquifer::{Allocator, Device, Stream};
use aquifer_stress::exit::Failure;
use aquifer_trace::Random;

use crate::pairs::open;
use crate::row::Row;
use crate::{Bench, Benchmark};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Objects of a kind, in growing numbers.
#[derive(Clone, Copy)]
struct Series {
    name: &'static str,
    /// The smallest number; the others are 4 and 16 times as many.
    n: u32,
    run: fn(&mut Scale<'_>) -> Result<(), Failure>,
}

const SERIES: [Series; 7] = [
    Series { name: "nothing", n: 1, run: nothing },
    Series { name: "streams", n: 64, run: streams },
    Series { name: "pools", n: 128, run: pools },
    Series { name: "growables", n: 128, run: growables },
    Series { name: "graphs", n: 128, run: graphs },
    Series { name: "waiting", n: 1_000, run: waiting },
    Series { name: "live", n: 6_250, run: live },
];

/// The numbers of a series, as multiples of the first.
const STEPS: [u32; 3] = [1, 4, 16];
/// The factor by which `--quick` reduces the numbers.
const QUICK: u32 = 16;
/// The least time for which an operation is repeated.
const AT_LEAST: Duration = Duration::from_millis(20);
/// Requests that miss; their blocks are held until all are made.
const MISSES: u64 = 64;
/// The size of a cached allocation.
const SMALL: u64 = 4 * KIB;
/// More memory than any device has.
const TOO_MUCH: u64 = 1 << 45;
/// Pairs of a thread before it is measured. After a few pairs of other threads, the allocator
/// counts for each stream separately.
const WARM_UP: u32 = 100;
/// The most times of the other thread that are kept for their percentile.
const SAMPLES_MAX: usize = 1 << 20;

/// An allocator, and its measurements.
struct Scale<'a> {
    n: u32,
    device: Device,
    allocator: Allocator,
    stream: Stream,
    /// The stream of the other thread.
    hot: Stream,
    random: Random,
    measured: &'a mut Vec<Time>,
}

pub(crate) fn all() -> Vec<Benchmark> {
    SERIES.map(|series| Benchmark::new(series.name, move |bench| measure(bench, series))).into()
}

/// The rows of a series, by operation, in the order of their first measurement.
fn measure(bench: &Bench, series: Series) -> Result<Vec<Row>, Failure> {
    let session = &bench.session;
    let least = if bench.args.quick { (series.n / QUICK).max(1) } else { series.n };
    let mut measured = Vec::new();
    let steps = if series.n == 1 { &STEPS[..1] } else { &STEPS[..] };
    for step in steps {
        let device = open(session)?;
        let allocator = session.allocator(&device, &bench.config)?;
        let (stream, hot) = (device.stream()?, device.stream()?);
        let (n, random) = (least * step, Random::new(session.seed()));
        let mut scale = Scale { n, device, allocator, stream, hot, random, measured: &mut measured };
        scale.warm_up()?;
        (series.run)(&mut scale)?;
    }
    let order: Vec<&str> = measured.iter().map(|one| one.operation).collect();
    measured.sort_by_key(|one| order.iter().position(|operation| *operation == one.operation));
    let of_operation = measured.chunk_by(|one, other| one.operation == other.operation);
    Ok(of_operation.flat_map(|all| all.iter().map(|one| one.row(&all[0]))).collect())
}

/// The power of n that a time grew with: 0 if it is constant, 1 if it grows as fast as n.
fn exponent((n, time): (u32, f64), (more, later): (u32, f64)) -> f64 {
    let growth = (later.max(0.01) / time.max(0.01)).ln();
    growth / (f64::from(more) / f64::from(n)).ln()
}

impl Scale<'_> {
    /// Lets the allocator see that several threads use it.
    fn warm_up(&mut self) -> Result<(), Failure> {
        for _ in 0..WARM_UP {
            drop(self.allocator.alloc_bytes(SMALL, &self.stream)?);
            thread::scope(|scope| scope.spawn(|| self.allocator.alloc_bytes(SMALL, &self.hot).map(drop)).join())
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    }

    /// Measures `operations` operations, while another thread allocates and frees on its own
    /// stream.
    fn once<T>(
        &mut self,
        operation: &'static str,
        operations: u64,
        work: impl FnOnce(&Self) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let (done, elapsed, hot) = self.beside(work)?;
        self.note(operation, operations, elapsed, hot);
        Ok(done)
    }

    /// Measures dropping `all`.
    fn drop<T>(&mut self, operation: &'static str, all: T) -> Result<(), Failure> {
        self.once(operation, self.n.into(), |_| {
            drop(all);
            Ok(())
        })
    }

    /// Measures an operation that is repeated for a while. The closure runs it several times and
    /// returns their number.
    fn repeatedly(
        &mut self,
        operation: &'static str,
        mut work: impl FnMut(&Self) -> Result<u64, Failure>,
    ) -> Result<(), Failure> {
        work(self)?;
        let (operations, elapsed, hot) = self.beside(|this| {
            let (start, mut operations) = (Instant::now(), 0);
            while start.elapsed() < AT_LEAST {
                operations += work(this)?;
            }
            Ok(operations)
        })?;
        self.note(operation, operations, elapsed, hot);
        Ok(())
    }

    /// Measures pairs of an allocation and a free.
    fn pairs(
        &mut self,
        operation: &'static str,
        alloc: impl Fn(&Self) -> Result<Allocation, AllocError>,
    ) -> Result<(), Failure> {
        self.repeatedly(operation, |this| {
            (0..100).try_for_each(|_| alloc(this).map(drop))?;
            Ok(100)
        })
    }

    fn snapshots(&mut self, operation: &'static str) -> Result<(), Failure> {
        self.repeatedly(operation, |this| {
            drop(this.allocator.snapshot());
            Ok(1)
        })
    }

    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    fn note(&mut self, operation: &'static str, operations: u64, elapsed: Duration, hot: Latencies) {
        let ns = elapsed.as_nanos() as f64 / operations.max(1) as f64;
        self.measured.push(Time { operation, n: self.n, ns, hot });
    }

    fn beside<T>(&self, work: impl FnOnce(&Self) -> Result<T, Failure>) -> Result<(T, Duration, Latencies), Failure> {
        let (together, stop) = (Barrier::new(2), AtomicBool::new(false));
        let other = || {
            let mut latencies = Latencies::default();
            let warm = (0..WARM_UP).try_for_each(|_| self.allocator.alloc_bytes(SMALL, &self.hot).map(drop));
            together.wait();
            warm?;
            while !stop.load(Ordering::Relaxed) {
                let start = Instant::now();
                drop(self.allocator.alloc_bytes(SMALL, &self.hot)?);
                latencies.add(start.elapsed());
            }
            Ok::<_, Failure>(latencies)
        };
        thread::scope(|scope| {
            let hot = scope.spawn(other);
            together.wait();
            let start = Instant::now();
            let done = work(self);
            let elapsed = start.elapsed();
            stop.store(true, Ordering::Relaxed);
            let hot = hot.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            Ok((done?, elapsed, hot))
        })
    }

    /// Measures common operations. Requests that miss may wait for the stream that blocks wait for,
    /// which ends the wait of these blocks; with `may_wait` off they are left out.
    fn common_operations(&mut self, may_wait: bool) -> Result<(), Failure> {
        self.pairs("pair", |this| this.allocator.alloc_bytes(SMALL, &this.stream))?;
        self.snapshots("snapshot")?;
        self.repeatedly("fragmentation", |this| {
            let _measured = this.allocator.fragmentation(MIB);
            Ok(1)
        })?;
        if may_wait {
            let held = self.once("miss", MISSES, |this| {
                let misses =
                    (0..MISSES).map(|miss| Ok(this.allocator.alloc_bytes((8 + miss % 8) * MIB, &this.stream)?));
                misses.collect::<Result<Vec<Allocation>, Failure>>()
            })?;
            drop(held);
            self.repeatedly("refusal", |this| match this.allocator.alloc_bytes(TOO_MUCH, &this.stream) {
                Err(error) if !error.is_out_of_memory() => Err(error.into()),
                _ => Ok(1),
            })?;
        }
        Ok(())
    }
}

/// Measures a cached allocation while the first thread only spins: the noise of the machine.
fn nothing(scale: &mut Scale<'_>) -> Result<(), Failure> {
    scale.repeatedly("spin", |_| {
        std::hint::spin_loop();
        Ok(1)
    })?;
    scale.common_operations(true)
}

fn streams(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let streams: Vec<Stream> = (0..n).map(|_| scale.device.stream()).collect::<Result<_, _>>()?;
    let live = scale.once("first block", n, |this| {
        let blocks = streams.iter().map(|stream| Ok(this.allocator.alloc_bytes(MIB, stream)?));
        blocks.collect::<Result<Vec<_>, Failure>>()
    })?;
    scale.repeatedly("pair in turn", |this| {
        streams.iter().try_for_each(|stream| this.allocator.alloc_bytes(SMALL, stream).map(drop))?;
        Ok(n)
    })?;
    scale.common_operations(true)?;
    scale.drop("drop", (live, streams))
}

fn pools(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let made = scale.once("make", n, |this| {
        let made = (0..n).map(|_| {
            let pool = this.allocator.create_pool(PoolOptions::default())?;
            let block = pool.alloc_bytes(MIB, &this.stream)?;
            Ok((block, pool))
        });
        made.collect::<Result<Vec<(Allocation, PrivatePool)>, Failure>>()
    })?;
    scale.repeatedly("pair in turn", |this| {
        made.iter().try_for_each(|(_, pool)| pool.alloc_bytes(SMALL, &this.stream).map(drop))?;
        Ok(n)
    })?;
    scale.common_operations(true)?;
    scale.drop("drop", made)?;
    scale.snapshots("snapshot after")
}

fn growables(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let mut made = scale.once("make", n, |this| {
        let made = (0..n).map(|_| {
            let mut growable = this.allocator.growable(64 * MIB, &this.stream)?;
            growable.grow_to(6 * MIB, &this.stream)?;
            Ok(growable)
        });
        made.collect::<Result<Vec<Growable>, Failure>>()
    })?;
    scale.common_operations(true)?;
    scale.once("shrink", n, |this| {
        Ok(made.iter_mut().try_for_each(|growable| growable.shrink_to(2 * MIB, &this.stream))?)
    })?;
    scale.once("drop, miss", n, |this| {
        drop(made);
        drop(this.allocator.alloc_bytes(100 * MIB, &this.stream)?);
        Ok(())
    })
}

fn graphs(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let pool = scale.allocator.create_pool(PoolOptions::default())?;
    let graphs = scale.once("capture", n, |this| {
        let captured = (0..n).map(|_| {
            let capture = this.stream.begin_capture()?;
            let route = this.allocator.capture(&this.stream, &pool)?;
            let scratch = this.allocator.alloc_bytes(MIB, &this.stream)?;
            this.stream.fill(scratch.ptr(), 1, MIB)?;
            drop(scratch);
            let graph = capture.end()?;
            drop(route);
            Ok(graph)
        });
        captured.collect::<Result<Vec<Graph>, Failure>>()
    })?;
    scale.once("launch", n, |this| Ok(graphs.iter().try_for_each(|graph| graph.launch(&this.stream))?))?;
    scale.pairs("pair in pool", |this| pool.alloc_bytes(SMALL, &this.stream))?;
    scale.common_operations(true)?;
    scale.drop("drop", graphs)?;
    scale.pairs("pair after", |this| pool.alloc_bytes(SMALL, &this.stream))
}

fn waiting(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let slow = scale.device.stream()?;
    let large = scale.allocator.alloc_bytes(1 << 30, &slow)?;
    // Keep the device busy beyond the measurements.
    let keep_busy = || (0..2_000).try_for_each(|_| slow.fill(large.ptr(), 1, 1 << 30));
    keep_busy()?;
    // All at once, as a freed block serves the next request only if it need not wait.
    let live: Vec<Allocation> =
        (0..n).map(|_| scale.allocator.alloc_bytes(64 * KIB, &scale.stream)).collect::<Result<_, _>>()?;
    scale.once("free", n, |_| {
        for block in live {
            block.record_stream(&slow)?;
        }
        Ok(())
    })?;
    scale.common_operations(false)?;
    scale.once("end", n, |this| {
        slow.synchronize()?;
        drop(this.allocator.alloc_bytes(SMALL, &this.stream)?);
        Ok(())
    })
}

fn live(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let mut random = scale.random.clone();
    let n = scale.n;
    let mut blocks = scale.once("allocate", n.into(), |this| {
        let blocks = (0..n).map(|_| Ok(this.allocator.alloc_bytes(random.size(512, 64 * KIB), &this.stream)?));
        blocks.collect::<Result<Vec<Allocation>, Failure>>()
    })?;
    scale.repeatedly("replace", |this| {
        for _ in 0..100 {
            let block = &mut blocks[random.below(n) as usize];
            *block = this.allocator.alloc_bytes(random.size(512, 64 * KIB), &this.stream)?;
        }
        Ok(100)
    })?;
    scale.common_operations(true)?;
    scale.drop("free", blocks)
}

/// The time of an operation, and of the other thread's pairs meanwhile.
struct Time {
    operation: &'static str,
    n: u32,
    ns: f64,
    hot: Latencies,
}

impl Time {
    /// The row; `first` is the same operation with the first n.
    fn row(&self, first: &Time) -> Row {
        let exponent = (first.n < self.n).then(|| exponent((first.n, first.ns), (self.n, self.ns)));
        let row = Row::new().with("operation", self.operation).with("n", self.n);
        let row = row.with("ns_per_operation", self.ns).with("exponent", exponent);
        row.with("hot_p99_ns", self.hot.p99()).with("hot_max_ns", self.hot.p99().map(|_| self.hot.most))
    }
}

/// Times of the other thread's pairs, in nanoseconds.
#[derive(Debug, Default)]
struct Latencies {
    /// The first [`SAMPLES_MAX`] ones.
    samples: Vec<u64>,
    most: u64,
}

impl Latencies {
    fn add(&mut self, elapsed: Duration) {
        let ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        if self.samples.len() < SAMPLES_MAX {
            self.samples.push(ns);
        }
        self.most = ns.max(self.most);
    }

    /// The 99th percentile of the samples.
    fn p99(&self) -> Option<u64> {
        let mut samples = self.samples.clone();
        let last = samples.len().checked_sub(1)?;
        Some(*samples.select_nth_unstable(last * 99 / 100).1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_percentile_is_one_of_the_samples() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.p99(), None);
        (1..=1000).for_each(|ns| latencies.add(Duration::from_nanos(ns)));
        assert_eq!((latencies.p99(), latencies.most), (Some(990), 1000));
    }

    #[test]
    fn exponents_are_powers_of_n() {
        assert_eq!(exponent((10, 5.0), (160, 5.0)), 0.0);
        assert_eq!(exponent((10, 5.0), (160, 80.0)), 1.0);
        assert_eq!(exponent((1, 1.0), (4, 16.0)), 2.0);
    }
}
