//! `bench`: how long pairs of an allocation and a free take, beside the yardstick.
//!
//! Sizes and victims are drawn before the clock starts. The allocator and the yardstick run the same pairs in turns, round
//! by round, so that what else the machine does falls on both; medians are reported.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use aquifer_device::Device;
use comfy_table::Table;
use serde::Serialize;

use crate::cli::{BenchArgs, ConfigArg};
use crate::commands::hundredths;
use crate::exit::{Failure, Outcome};
use crate::harness::Times;
use crate::session::Session;
use crate::subject::{Aquifer, Refused, Subject};
use crate::table::table;
use crate::workload::{Script, Sizes, Work};
use crate::yardstick::Yardstick;

/// Memory that a simulated device has at least, so that the allocator is measured and not the lack of memory.
const SIMULATED_BYTES: u64 = 8 << 40;
/// Rounds that are measured of each benchmark. Many that are shorter than a time slice of the operating system (1 ms), so that
/// on a busy machine, too, most of them run undisturbed.
const ROUNDS: usize = 301;

/// A row of results. `bench --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub benchmark: &'static str,
    pub allocator: &'static str,
    pub ns_per_pair: f64,
    pub threads: u32,
    pub live: u32,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Benchmark {
    name: &'static str,
    threads: u32,
    live: u32,
    sizes: Sizes,
    /// Pairs of each thread in a round.
    pairs: u32,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[rustfmt::skip]
const BENCHMARKS: [Benchmark; 10] = [
    Benchmark { name: "hot_512b", threads: 1, live: 1, sizes: Sizes::one(512), pairs: 3_000 },
    Benchmark { name: "hot_1mib", threads: 1, live: 1, sizes: Sizes::one(MIB), pairs: 3_000 },
    Benchmark { name: "hot_64mib", threads: 1, live: 1, sizes: Sizes::one(64 * MIB), pairs: 3_000 },
    Benchmark { name: "churn_100", threads: 1, live: 100, sizes: Sizes::between(512, 64 * MIB), pairs: 3_000 },
    Benchmark { name: "churn_1000", threads: 1, live: 1_000, sizes: Sizes::between(512, 64 * MIB), pairs: 3_000 },
    Benchmark { name: "churn_10000", threads: 1, live: 10_000, sizes: Sizes::between(512, 64 * MIB), pairs: 3_000 },
    Benchmark { name: "churn_100000", threads: 1, live: 100_000, sizes: Sizes::between(512, MIB), pairs: 3_000 },
    Benchmark { name: "churn_1000000", threads: 1, live: 1_000_000, sizes: Sizes::between(512, 64 * KIB), pairs: 3_000 },
    Benchmark { name: "threads2_streams2", threads: 2, live: 100, sizes: Sizes::between(512, MIB), pairs: 5_000 },
    Benchmark { name: "threads4_streams4", threads: 4, live: 100, sizes: Sizes::between(512, MIB), pairs: 5_000 },
];

/// Runs the command.
///
/// # Errors
/// When there is nothing to measure, or standard output cannot be written.
pub fn run(session: &Session, args: &BenchArgs) -> Result<Outcome, Failure> {
    let config = session.config()?;
    let wanted =
        |benchmark: &&Benchmark| args.filter.as_ref().is_none_or(|text| benchmark.name.contains(text.as_str()));
    let chosen: Vec<&Benchmark> = BENCHMARKS.iter().filter(wanted).collect();
    if chosen.is_empty() {
        let names: Vec<_> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        return Err(Failure::Usage(format!("--filter: no benchmark is named so; there are {}", names.join(", "))));
    }
    let (mut outcome, mut rows) = (Outcome::Done, Vec::new());
    let bar = session.progress(chosen.len() as u64, "bench");
    for benchmark in chosen {
        bar.set_message(benchmark.name);
        let rounds = if args.quick { ROUNDS / 8 } else { ROUNDS };
        match measure(session, config, benchmark, rounds) {
            Ok(measured) => {
                for row in measured {
                    session.row(&row)?;
                    rows.push(row);
                }
            }
            Err(failure) => {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {}: {failure}", benchmark.name));
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

fn measure(session: &Session, config: &ConfigArg, benchmark: &Benchmark, rounds: usize) -> Result<[Row; 2], Failure> {
    let device = open(session)?;
    let room = device.memory_info()?.free / u64::from(benchmark.threads);
    let sizes = benchmark.sizes.within(room / 4, benchmark.live);
    let mut scripts: Vec<Script> = (0..benchmark.threads)
        .map(|thread| Script::new(session.seed() + u64::from(thread), sizes, benchmark.live))
        .collect();

    let first = Aquifer::new(session, &device, config, 1)?;
    let mut aquifers = vec![first];
    for _ in 1..benchmark.threads {
        let other = aquifers[0].on_new_stream()?;
        aquifers.push(other);
    }
    let bytes = sizes.mean().saturating_mul(benchmark.live.into());
    let yardsticks = (0..benchmark.threads).map(|_| Yardstick::new(bytes, benchmark.live));

    let mut ours = Crew::new(aquifers, &scripts)?;
    let mut theirs = Crew::new(yardsticks.collect(), &scripts)?;
    // Before anything is measured, about as many blocks are replaced as there are, so that freshly filled memory gets as
    // fragmented as it will be.
    for round in 0..=rounds {
        let pairs = if round == 0 { benchmark.pairs.max(benchmark.live) } else { benchmark.pairs };
        scripts.iter_mut().for_each(|script| script.draw(pairs));
        let times = [ours.round(&scripts)?, theirs.round(&scripts)?];
        if round > 0 {
            ours.times.add(times[0], pairs.into());
            theirs.times.add(times[1], pairs.into());
        }
    }
    let Benchmark { name, threads, live, .. } = *benchmark;
    let row = |allocator, times: &Times| {
        let ns_per_pair = hundredths(times.median());
        Row { benchmark: name, allocator, ns_per_pair, threads, live }
    };
    let rows = [row("aquifer", &ours.times), row("offset-allocator", &theirs.times)];
    ours.leave();
    theirs.leave();
    Ok(rows)
}

fn open(session: &Session) -> Result<Device, Failure> {
    match session.sim() {
        Some(sim) => session.open_with_capacity(sim.capacity_bytes.max(SIMULATED_BYTES)),
        None => session.open(),
    }
}

/// Subjects at work, each in a thread of its own if there are several.
struct Crew<S: Subject> {
    works: Vec<Work<S>>,
    times: Times,
}

impl<S: Subject + Send> Crew<S>
where
    S::Handle: Send,
{
    fn new(subjects: Vec<S>, scripts: &[Script]) -> Result<Crew<S>, Failure> {
        let works = subjects.into_iter().zip(scripts).map(|(subject, script)| Work::start(subject, script));
        Ok(Crew { works: works.collect::<Result<_, _>>().map_err(refused)?, times: Times::default() })
    }

    /// One round; tells the time until the last has finished.
    fn round(&mut self, scripts: &[Script]) -> Result<Duration, Failure> {
        if let ([work], [script]) = (&mut self.works[..], scripts) {
            let start = Instant::now();
            let done = work.round(script);
            let elapsed = start.elapsed();
            return done.map(|()| elapsed).map_err(refused);
        }
        let together = Barrier::new(self.works.len());
        let one = |work: &mut Work<S>, script: &Script| {
            together.wait();
            let start = Instant::now();
            let done = work.round(script);
            (start, Instant::now(), done)
        };
        let finished: Vec<_> = std::thread::scope(|scope| {
            let pairs = self.works.iter_mut().zip(scripts);
            let threads: Vec<_> = pairs.map(|(work, script)| scope.spawn(move || one(work, script))).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        let mut span: Option<(Instant, Instant)> = None;
        for finished in finished {
            let (start, end, done) = finished.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done.map_err(refused)?;
            span = Some(span.map_or((start, end), |(first, last)| (first.min(start), last.max(end))));
        }
        Ok(span.map_or(Duration::ZERO, |(first, last)| last - first))
    }

    fn leave(self) {
        self.works.into_iter().for_each(Work::leave);
    }
}

fn refused(refused: Refused) -> Failure {
    match refused {
        Refused::OutOfMemory => Failure::OutOfMemory("the device is too small for this benchmark".to_owned()),
        Refused::Failed(error) => Failure::from(*error),
    }
}

fn tabulate(rows: &[Row]) -> Table {
    let mut table = table(&["benchmark", "threads", "live", "aquifer ns/pair", "offset-allocator ns/pair", "times"], 1);
    for rows in rows.chunks_exact(2) {
        let (ours, theirs) = (&rows[0], &rows[1]);
        table.add_row([
            ours.benchmark.to_owned(),
            ours.threads.to_string(),
            ours.live.to_string(),
            format!("{:.1}", ours.ns_per_pair),
            format!("{:.1}", theirs.ns_per_pair),
            format!("{:.2}", ours.ns_per_pair / theirs.ns_per_pair),
        ]);
    }
    table
}
