//! `bench`: the time of a pair of an allocation and a free, compared with the yardstick.
//!
//! Sizes, and which blocks are freed, are drawn before the clock starts. The allocator and the
//! yardstick run the same pairs alternately, round by round, so that other load on the machine
//! affects both; medians are reported. Runs of several threads also alternate with one thread
//! alone, so that their rates are comparable.

mod crew;
mod handover;
mod scale;

use std::time::Duration;

use aquifer::Device;
use serde::Serialize;

use crate::cli::{BenchArgs, ConfigArg};
use crate::commands::hundredths;
use crate::exit::{Failure, Outcome};
use crate::harness::Times;
use crate::session::Session;
use crate::subject::{Aquifer, Raw, Refused};
use crate::table::{Table, table};
use crate::text::Bytes;
use crate::workload::{Script, Sizes};
use crate::yardstick::{Shared, Yardstick};
use crew::Crew;
use handover::HandOver;

/// Memory that a simulated device has at least, so that the allocator is measured and not the lack
/// of memory.
const SIMULATED_BYTES: u64 = 512 << 30;
/// Rounds that are measured of each benchmark. Many that are shorter than a time slice of the
/// operating system (1 ms), so that on a busy machine, too, most of them run undisturbed.
const ROUNDS: usize = 301;

/// A row of results. `bench --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub benchmark: &'static str,
    pub allocator: &'static str,
    pub device: String,
    pub largest_bytes: u64,
    pub ns_per_pair: f64,
    pub threads: u32,
    pub live: u32,
    pub rate_vs_one_thread: f64,
}

/// What threads do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Each replaces blocks of its own.
    Replace,
    /// One allocates, the other frees.
    HandOver,
    /// As `Replace`, with raw pointers; the yardstick is the same allocator with handles.
    Raw,
}

/// What is measured.
#[derive(Debug, Clone, Copy)]
struct Benchmark {
    name: &'static str,
    kind: Kind,
    threads: u32,
    live: u32,
    sizes: Sizes,
    /// Pairs of each thread in a round.
    pairs: u32,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

impl Benchmark {
    const fn new(name: &'static str, threads: u32, live: u32, sizes: Sizes) -> Benchmark {
        Benchmark { name, kind: Kind::Replace, threads, live, sizes, pairs: if threads > 1 { 5_000 } else { 3_000 } }
    }
}

const BENCHMARKS: [Benchmark; 18] = [
    Benchmark::new("hot_512b", 1, 1, Sizes::one(512)),
    Benchmark::new("hot_1mib", 1, 1, Sizes::one(MIB)),
    Benchmark::new("hot_64mib", 1, 1, Sizes::one(64 * MIB)),
    Benchmark::new("churn_100", 1, 100, Sizes::between(512, 64 * MIB)),
    Benchmark::new("churn_1000", 1, 1_000, Sizes::between(512, 64 * MIB)),
    Benchmark::new("churn_10000", 1, 10_000, Sizes::between(512, 64 * MIB)),
    Benchmark::new("churn_100000", 1, 100_000, Sizes::between(512, MIB)),
    Benchmark::new("churn_1000000", 1, 1_000_000, Sizes::between(512, 64 * KIB)),
    Benchmark::new("threads1_streams1", 1, 1, Sizes::one(MIB)),
    Benchmark::new("threads2_streams2", 2, 1, Sizes::one(MIB)),
    Benchmark::new("threads4_streams4", 4, 1, Sizes::one(MIB)),
    Benchmark::new("threads1_churn", 1, 100, Sizes::between(512, MIB)),
    Benchmark::new("threads2_churn", 2, 100, Sizes::between(512, MIB)),
    Benchmark::new("threads4_churn", 4, 100, Sizes::between(512, MIB)),
    Benchmark { kind: Kind::HandOver, ..Benchmark::new("handover", 2, handover::RING, Sizes::between(512, MIB)) },
    Benchmark { kind: Kind::Raw, ..Benchmark::new("raw_hot", 1, 1, Sizes::one(MIB)) },
    Benchmark { kind: Kind::Raw, ..Benchmark::new("raw_churn_10000", 1, 10_000, Sizes::between(512, 64 * MIB)) },
    Benchmark { kind: Kind::Raw, ..Benchmark::new("raw_parallel", 2, 1, Sizes::one(MIB)) },
];

/// Runs the command.
///
/// # Errors
/// When there is nothing to measure, or standard output cannot be written.
pub fn run(session: &Session, args: &BenchArgs) -> Result<Outcome, Failure> {
    let config = session.config()?;
    if args.scale {
        return scale::run(session, config, args);
    }
    let chosen = chosen(args.filter.as_deref().unwrap_or_default());
    if chosen.is_empty() {
        let names: Vec<_> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        return Err(Failure::Usage(format!("--filter: no benchmark is named so; there are {}", names.join(", "))));
    }
    let (mut outcome, mut rows) = (Outcome::Done, Vec::new());
    let bar = session.progress(chosen.len() as u64, "bench");
    for benchmark in chosen {
        bar.set_message(benchmark.name);
        // Rounds of threads are longer, and each is run by one thread alone, too.
        let rounds = if benchmark.threads > 1 { ROUNDS / 3 } else { ROUNDS };
        let rounds = if args.quick { rounds / 8 } else { rounds };
        match measure(session, config, benchmark, rounds) {
            Ok(measured) => {
                for row in measured {
                    session.row(&row)?;
                    rows.push(row);
                }
            }
            Err(failure) => {
                let failure = match failure {
                    Failure::OutOfMemory(_) => Failure::OutOfMemory(too_small(session, config)?),
                    other => other,
                };
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
    let aquifer = |device: &Device| Aquifer::new(session, device, config, 1);
    let device = open(session)?;
    let room = device.memory_info()?.free / u64::from(benchmark.threads);
    let sizes = benchmark.sizes.within(room / 4, benchmark.live);
    if sizes.most() < benchmark.sizes.most() {
        let (name, most, meant) = (benchmark.name, Bytes(sizes.most()), Bytes(benchmark.sizes.most()));
        session
            .message(format_args!("note: {name}: the device has room for blocks of at most {most} instead of {meant}"));
    }
    let mut scripts: Vec<Script> = (0..benchmark.threads)
        .map(|thread| Script::new(session.seed() + u64::from(thread), sizes, benchmark.live))
        .collect();
    let bytes = sizes.mean().saturating_mul(benchmark.live.into());
    let yardstick = || Yardstick::new(bytes, benchmark.live);
    let several = benchmark.threads > 1;
    let rows = match benchmark.kind {
        Kind::Replace => {
            let aquifers = on_streams(aquifer(&device)?, benchmark.threads)?;
            let yardsticks = (0..benchmark.threads).map(|_| yardstick()).collect();
            let mut ours = Entrant::new(Crew::new(aquifers, &scripts)?);
            let mut theirs = Entrant::new(Crew::new(yardsticks, &scripts)?);
            if several {
                ours.alone = Some((Crew::new(vec![aquifer(&open(session)?)?], &scripts[..1])?, Times::default()));
                theirs.alone = Some((Crew::new(vec![yardstick()], &scripts[..1])?, Times::default()));
            }
            contest(benchmark, &mut scripts, rounds, ours, theirs)?
        }
        Kind::Raw => {
            let raws = on_streams(aquifer(&device)?, benchmark.threads)?.into_iter().map(Raw).collect();
            let handles = on_streams(aquifer(&open(session)?)?, benchmark.threads)?;
            let mut ours = Entrant::new(Crew::new(raws, &scripts)?);
            let mut theirs = Entrant::new(Crew::new(handles, &scripts)?);
            if several {
                let alone = || aquifer(&open(session)?);
                ours.alone = Some((Crew::new(vec![Raw(alone()?)], &scripts[..1])?, Times::default()));
                theirs.alone = Some((Crew::new(vec![alone()?], &scripts[..1])?, Times::default()));
            }
            contest(benchmark, &mut scripts, rounds, ours, theirs)?
        }
        Kind::HandOver => {
            let first = aquifer(&device)?;
            let second = first.on_new_stream()?;
            let alone = HandOver::alone(aquifer(&open(session)?)?);
            let mut ours = Entrant::new(HandOver::between(first, second));
            ours.alone = Some((alone, Times::default()));
            let shared = Shared::new(yardstick());
            let mut theirs = Entrant::new(HandOver::between(shared.clone(), shared));
            theirs.alone = Some((HandOver::alone(Shared::new(yardstick())), Times::default()));
            contest(benchmark, &mut scripts, rounds, ours, theirs)?
        }
    };
    let names =
        if benchmark.kind == Kind::Raw { ["aquifer", "aquifer-handles"] } else { ["aquifer", "offset-allocator"] };
    let device = session.device_text();
    let [ours, theirs] = rows;
    let rows = [Row { allocator: names[0], ..ours }, Row { allocator: names[1], ..theirs }];
    Ok(rows.map(|row| Row { device: device.to_owned(), largest_bytes: sizes.most(), ..row }))
}

/// Handles of one allocator, each but the first with a new stream.
fn on_streams(first: Aquifer, count: u32) -> Result<Vec<Aquifer>, Failure> {
    let mut all = vec![first];
    for _ in 1..count {
        let other = all[0].on_new_stream()?;
        all.push(other);
    }
    Ok(all)
}

/// Threads that work together.
trait Team {
    /// One round; tells the time until the last thread has finished.
    fn round(&mut self, scripts: &[Script]) -> Result<Duration, Failure>;

    /// Frees what is live.
    fn leave(self);
}

/// A team, and one thread alone that does the same.
struct Entrant<T> {
    team: T,
    times: Times,
    alone: Option<(T, Times)>,
}

impl<T: Team> Entrant<T> {
    fn new(team: T) -> Entrant<T> {
        Entrant { team, times: Times::default(), alone: None }
    }

    fn round(&mut self, scripts: &[Script], pairs: u32, measured: bool) -> Result<(), Failure> {
        let elapsed = self.team.round(scripts)?;
        let alone = self.alone.as_mut().map(|(team, _)| team.round(&scripts[..1])).transpose()?;
        if measured {
            self.times.add(elapsed, pairs.into());
            if let (Some((_, times)), Some(elapsed)) = (&mut self.alone, alone) {
                times.add(elapsed, pairs.into());
            }
        }
        Ok(())
    }

    /// The row; frees everything.
    fn finish(self, benchmark: &Benchmark) -> Row {
        let Benchmark { name, threads, live, .. } = *benchmark;
        let ns_per_pair = self.times.median();
        let alone = self.alone.map(|(team, times)| {
            team.leave();
            times.median()
        });
        self.team.leave();
        let rate_vs_one_thread = hundredths(alone.unwrap_or(ns_per_pair) / ns_per_pair);
        // The caller knows what was measured, where, and with which sizes.
        let (allocator, device, largest_bytes) = ("", String::new(), 0);
        let ns_per_pair = hundredths(ns_per_pair);
        Row { benchmark: name, allocator, device, largest_bytes, ns_per_pair, threads, live, rate_vs_one_thread }
    }
}

/// The benchmark of this name, or those whose names contain it.
fn chosen(filter: &str) -> Vec<&'static Benchmark> {
    match BENCHMARKS.iter().find(|benchmark| benchmark.name == filter) {
        Some(benchmark) => vec![benchmark],
        None => BENCHMARKS.iter().filter(|benchmark| benchmark.name.contains(filter)).collect(),
    }
}

fn contest(
    benchmark: &Benchmark,
    scripts: &mut [Script],
    rounds: usize,
    mut ours: Entrant<impl Team>,
    mut theirs: Entrant<impl Team>,
) -> Result<[Row; 2], Failure> {
    // Before anything is measured, about as many blocks are replaced as there are, so that freshly
    // filled memory gets as fragmented as it will be.
    for round in 0..=rounds {
        let pairs = if round == 0 { benchmark.pairs.max(benchmark.live) } else { benchmark.pairs };
        scripts.iter_mut().for_each(|script| script.draw(pairs));
        ours.round(scripts, pairs, round > 0)?;
        theirs.round(scripts, pairs, round > 0)?;
    }
    Ok([ours.finish(benchmark), theirs.finish(benchmark)])
}

fn open(session: &Session) -> Result<Device, Failure> {
    match session.sim() {
        Some(sim) => session.open_with_capacity(sim.capacity_bytes.max(SIMULATED_BYTES)),
        None => session.open(),
    }
}

/// What has too little memory.
fn too_small(session: &Session, config: &ConfigArg) -> Result<String, Failure> {
    let memory = open(session)?.memory_info()?;
    let limit = config.config.limit_bytes(memory.total, memory.free).filter(|limit| *limit < memory.free);
    Ok(match (limit, config.config.headroom) {
        (Some(limit), _) => {
            format!("the limit of {} that the options set is too small for this benchmark", Bytes(limit))
        }
        (None, 0) => format!("the device is too small for this benchmark: {} are enough", Bytes(SIMULATED_BYTES)),
        (None, headroom) => format!("the device is too small for this benchmark and a headroom of {}", Bytes(headroom)),
    })
}

fn refused(refused: Refused) -> Failure {
    match refused {
        Refused::OutOfMemory => Failure::OutOfMemory("the device is too small for this benchmark".to_owned()),
        Refused::Failed(error) => *error,
    }
}

fn tabulate(rows: &[Row]) -> Table {
    let headings =
        ["benchmark", "threads", "live", "aquifer ns/pair", "yardstick ns/pair", "times", "rate vs 1 thread"];
    let mut table = table(&headings, 1);
    for rows in rows.chunks_exact(2) {
        let (ours, theirs) = (&rows[0], &rows[1]);
        table.add_row([
            ours.benchmark.to_owned(),
            ours.threads.to_string(),
            ours.live.to_string(),
            format!("{:.1}", ours.ns_per_pair),
            format!("{:.1}", theirs.ns_per_pair),
            format!("{:.2}", ours.ns_per_pair / theirs.ns_per_pair),
            format!("{:.2}", ours.rate_vs_one_thread),
        ]);
    }
    table
}
