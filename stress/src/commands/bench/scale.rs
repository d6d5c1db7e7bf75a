//! `bench --scale`: how the time of operations grows with what an allocator has to keep track of,
//! and how long a cached allocation on another stream waits meanwhile.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use aquifer::device::Graph;
use aquifer::memory::{AllocError, Allocation, Growable, PoolOptions, PrivatePool};
use aquifer::{Allocator, Device, Stream};
use serde::Serialize;

use super::{KIB, MIB, open, too_small};
use crate::cli::{BenchArgs, ConfigArg};
use crate::commands::hundredths;
use crate::exit::{Failure, Outcome};
use crate::random::Random;
use crate::session::Session;
use crate::table::{NOTHING, Table, table};

/// A row of results. `bench --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
struct ScaleRow {
    series: &'static str,
    operation: &'static str,
    device: String,
    n: u32,
    ns_per_operation: f64,
    exponent: Option<f64>,
    hot_p99_ns: Option<f64>,
    hot_max_ns: Option<f64>,
}

/// What there is more and more of.
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
/// How many times fewer there are with `--quick`.
const QUICK: u32 = 16;
/// How long an operation that can be repeated is repeated, at least.
const AT_LEAST: Duration = Duration::from_millis(20);
/// Requests that miss, which are held until all are made.
const MISSES: u64 = 64;
/// The size of a cached allocation.
const SMALL: u64 = 4 * KIB;
/// More than any device has.
const TOO_MUCH: u64 = 1 << 45;
/// Pairs of a thread before it is measured. After a few of other threads, the allocator counts for
/// each stream by itself.
const WARM_UP: u32 = 100;

/// An allocator, and what was measured of it.
struct Scale<'a> {
    n: u32,
    device: Device,
    allocator: Allocator,
    stream: Stream,
    /// The stream of the other thread.
    hot: Stream,
    random: Random,
    rows: &'a mut Vec<Measured>,
}

struct Measured {
    operation: &'static str,
    n: u32,
    ns_per_operation: f64,
    hot: Latencies,
}

/// Runs the series.
pub(super) fn run(session: &Session, config: &ConfigArg, args: &BenchArgs) -> Result<Outcome, Failure> {
    let filter = args.filter.as_deref().unwrap_or_default();
    let chosen: Vec<&Series> = SERIES.iter().filter(|series| series.name.contains(filter)).collect();
    if chosen.is_empty() {
        let names = SERIES.map(|series| series.name).join(", ");
        return Err(Failure::Usage(format!("--filter: no series is named so; there are {names}")));
    }
    let (mut outcome, mut rows) = (Outcome::Done, Vec::new());
    let bar = session.progress(chosen.len() as u64, "bench");
    for series in chosen {
        bar.set_message(series.name);
        match measure(session, config, series, args.quick) {
            Ok(measured) => {
                for row in measured {
                    session.row(&row)?;
                    rows.push(row);
                }
            }
            Err(Failure::Alloc { error, .. }) if matches!(*error, AllocError::NotMapped { .. }) => {
                session.message(format_args!("note: {}: not measured: {error}", series.name));
            }
            Err(failure) => {
                let failure = match failure {
                    failure if failure.outcome() == Outcome::OutOfMemory => {
                        Failure::OutOfMemory(too_small(session, config)?)
                    }
                    other => other,
                };
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {}: {failure}", series.name));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    if !rows.is_empty() {
        session.show(tabulate(&rows))?;
    }
    Ok(outcome)
}

/// The rows of a series, by operation, in the order in which operations were first measured.
fn measure(session: &Session, config: &ConfigArg, series: &Series, quick: bool) -> Result<Vec<ScaleRow>, Failure> {
    let least = if quick { (series.n / QUICK).max(1) } else { series.n };
    let mut measured = Vec::new();
    let steps = if series.n == 1 { &STEPS[..1] } else { &STEPS[..] };
    for step in steps {
        let device = open(session)?;
        let allocator = session.allocator(&device, config)?;
        let (stream, hot) = (device.stream()?, device.stream()?);
        let (n, random) = (least * step, Random::new(session.seed()));
        let mut scale = Scale { n, device, allocator, stream, hot, random, rows: &mut measured };
        scale.warm_up()?;
        (series.run)(&mut scale)?;
    }
    let mut rows: Vec<ScaleRow> = Vec::new();
    let mut operations: Vec<&'static str> = Vec::new();
    for row in &measured {
        if !operations.contains(&row.operation) {
            operations.push(row.operation);
        }
    }
    for operation in operations {
        let of_one = measured.iter().filter(|row| row.operation == operation);
        let first = rows.len();
        for row in of_one {
            let ns_per_operation = hundredths(row.ns_per_operation);
            let before = rows.get(first).map(|first: &ScaleRow| (first.n, first.ns_per_operation));
            rows.push(ScaleRow {
                series: series.name,
                operation,
                device: session.device_text().to_owned(),
                n: row.n,
                ns_per_operation,
                exponent: before.map(|before| exponent(before, (row.n, ns_per_operation))),
                hot_p99_ns: row.hot.quantile(0.99),
                hot_max_ns: row.hot.quantile(1.0),
            });
        }
    }
    Ok(rows)
}

/// The power of n that a time grew with: 0 if it is constant, 1 if it grows as fast as n.
fn exponent((n, time): (u32, f64), (more, later): (u32, f64)) -> f64 {
    let growth = (later.max(0.01) / time.max(0.01)).ln();
    hundredths(growth / (f64::from(more) / f64::from(n)).ln())
}

impl Scale<'_> {
    /// Has the allocator know that several threads use it.
    fn warm_up(&mut self) -> Result<(), Failure> {
        for _ in 0..WARM_UP {
            drop(self.allocator.alloc_bytes(SMALL, &self.stream)?);
            thread::scope(|scope| scope.spawn(|| self.allocator.alloc_bytes(SMALL, &self.hot).map(drop)).join())
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        }
        Ok(())
    }

    /// Measures so many operations, while another thread allocates and frees on its own stream.
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

    /// Measures an operation that is repeated for a while. The closure runs it several times, and
    /// tells how often.
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

    #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
    fn note(&mut self, operation: &'static str, operations: u64, elapsed: Duration, hot: Latencies) {
        let ns_per_operation = elapsed.as_nanos() as f64 / operations.max(1) as f64;
        self.rows.push(Measured { operation, n: self.n, ns_per_operation, hot });
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

    /// What any program does, beside what there is much of. Requests that miss may wait for the
    /// stream that blocks wait for, so that none waits any more: then they are left out.
    fn beside_all_that(&mut self, may_wait: bool) -> Result<(), Failure> {
        self.repeatedly("pair", |this| {
            (0..100).try_for_each(|_| this.allocator.alloc_bytes(SMALL, &this.stream).map(drop))?;
            Ok(100)
        })?;
        self.repeatedly("snapshot", |this| {
            drop(this.allocator.snapshot());
            Ok(1)
        })?;
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
                Ok(_) => Ok(1),
                Err(error) if crate::exit::is_refusal(&error) => Ok(1),
                Err(error) => Err(error.into()),
            })?;
        }
        Ok(())
    }
}

/// How long a cached allocation waits beside a thread that only spins: what is due to the machine.
fn nothing(scale: &mut Scale<'_>) -> Result<(), Failure> {
    scale.repeatedly("spin", |_| {
        std::hint::spin_loop();
        Ok(1)
    })?;
    scale.beside_all_that(true)
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
    scale.beside_all_that(true)?;
    scale.once("drop", n, |_| {
        drop((live, streams));
        Ok(())
    })
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
    scale.beside_all_that(true)?;
    scale.once("drop", n, |_| {
        drop(made);
        Ok(())
    })?;
    scale.repeatedly("snapshot after", |this| {
        drop(this.allocator.snapshot());
        Ok(1)
    })
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
    scale.beside_all_that(true)?;
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
    scale.repeatedly("pair in pool", |this| {
        (0..100).try_for_each(|_| pool.alloc_bytes(SMALL, &this.stream).map(drop))?;
        Ok(100)
    })?;
    scale.beside_all_that(true)?;
    scale.once("drop", n, |_| {
        drop(graphs);
        Ok(())
    })?;
    scale.repeatedly("pair after", |this| {
        (0..100).try_for_each(|_| pool.alloc_bytes(SMALL, &this.stream).map(drop))?;
        Ok(100)
    })
}

fn waiting(scale: &mut Scale<'_>) -> Result<(), Failure> {
    let n = u64::from(scale.n);
    let slow = scale.device.stream()?;
    let large = scale.allocator.alloc_bytes(1 << 30, &slow)?;
    // So that the device is busy for longer than this takes.
    let keep_busy = || (0..2_000).try_for_each(|_| slow.fill(large.ptr(), 1, 1 << 30));
    keep_busy()?;
    // All at once, as a block that was given back serves the next request only when it need not
    // wait.
    let live: Vec<Allocation> =
        (0..n).map(|_| scale.allocator.alloc_bytes(64 * KIB, &scale.stream)).collect::<Result<_, _>>()?;
    scale.once("free", n, |_| {
        for block in live {
            block.record_stream(&slow)?;
        }
        Ok(())
    })?;
    scale.beside_all_that(false)?;
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
    scale.beside_all_that(true)?;
    scale.once("free", n.into(), |_| {
        drop(blocks);
        Ok(())
    })
}

/// How often something took how long: counts by time, in steps of at most a 16th.
#[derive(Debug, Clone)]
struct Latencies {
    counts: Vec<u64>,
    most: u64,
}

/// Steps a doubling.
const STEPS_PER_DOUBLING: u64 = 16;

impl Default for Latencies {
    fn default() -> Latencies {
        Latencies { counts: vec![0; Latencies::step(u64::MAX) + 1], most: 0 }
    }
}

impl Latencies {
    fn step(ns: u64) -> usize {
        let exponent = (ns | STEPS_PER_DOUBLING).ilog2() - STEPS_PER_DOUBLING.ilog2();
        usize::try_from(u64::from(exponent) * STEPS_PER_DOUBLING + (ns >> exponent)).unwrap_or(usize::MAX)
    }

    fn add(&mut self, elapsed: Duration) {
        let ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX);
        self.counts[Latencies::step(ns)] += 1;
        self.most = ns.max(self.most);
    }

    /// The least time, up to a step, that a share of all did not exceed. `None` if nothing was
    /// measured.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "counts are far below 2^52"
    )]
    fn quantile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.counts.iter().sum();
        if all == 0 {
            return None;
        }
        let wanted = (all as f64 * share).ceil() as u64;
        let mut sum = 0;
        let reaches = |&(_, count): &(usize, &u64)| {
            sum += *count;
            sum >= wanted
        };
        let step = self.counts.iter().enumerate().find(reaches).map_or(0, |(step, _)| step as u64);
        let exponent = (step / STEPS_PER_DOUBLING).saturating_sub(1);
        let ns = ((step - exponent * STEPS_PER_DOUBLING) << exponent) | ((1 << exponent) - 1);
        Some(ns.min(self.most) as f64)
    }
}

fn tabulate(rows: &[ScaleRow]) -> Table {
    let headings = ["series", "operation", "n", "ns at n", "4 n", "16 n", "exponent", "hot p99 µs", "hot max µs"];
    let mut table = table(&headings, 2);
    let mut rest = rows;
    while let Some(first) = rest.first() {
        let same = |row: &&ScaleRow| (row.series, row.operation) == (first.series, first.operation);
        let (one, others) = rest.split_at(rest.iter().take_while(same).count());
        rest = others;
        let last = &one[one.len() - 1];
        let time = |step: usize| one.get(step).map_or(NOTHING.to_owned(), |row| format!("{:.0}", row.ns_per_operation));
        let most = |of: fn(&ScaleRow) -> Option<f64>| {
            let most = one.iter().filter_map(of).reduce(f64::max);
            most.map_or(NOTHING.to_owned(), |ns| format!("{:.1}", ns / 1000.0))
        };
        table.add_row([
            first.series.to_owned(),
            first.operation.to_owned(),
            first.n.to_string(),
            time(0),
            time(1),
            time(2),
            last.exponent.map_or(NOTHING.to_owned(), |exponent| format!("{exponent:.2}")),
            most(|row| row.hot_p99_ns),
            most(|row| row.hot_max_ns),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_step() {
        let mut latencies = Latencies::default();
        (1..=1000).for_each(|ns| latencies.add(Duration::from_nanos(ns)));
        for (share, exact) in [(0.01, 10.0), (0.5, 500.0), (0.99, 990.0), (1.0, 1000.0)] {
            let found = latencies.quantile(share).unwrap();
            assert!(found >= exact && found <= exact * 17.0 / 16.0, "{share}: {found}");
        }
        assert_eq!(Latencies::default().quantile(0.99), None);
        latencies.add(Duration::MAX);
        assert_eq!(latencies.quantile(1.0), Some(u64::MAX as f64));
    }

    #[test]
    fn exponents_are_powers_of_n() {
        assert_eq!(exponent((10, 5.0), (160, 5.0)), 0.0);
        assert_eq!(exponent((10, 5.0), (160, 80.0)), 1.0);
        assert_eq!(exponent((1, 1.0), (4, 16.0)), 2.0);
    }
}
