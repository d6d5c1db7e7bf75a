//! `bench`: the time of a pair of an allocation and a free, compared with the yardstick.
//!
//! Sizes, and which blocks are freed, are drawn before the clock starts. The allocator and the
//! yardstick run the same pairs alternately, round by round, so that other load on the machine
//! affects both; medians are reported. Runs of several threads also alternate with one thread
//! alone, so that their rates are comparable.
//!
//! `--scale` and `--peers` measure other things: see `scale.rs` and `peers.rs`.

mod captures;
mod handover;
mod peers;
mod scale;
mod streams;
mod team;

use std::path::Path;
use std::sync::Mutex;

use aquifer::Device;
use aquifer::memory::AllocError;
use serde::Serialize;

use crate::cli::{BenchArgs, ConfigArg};
use crate::commands::hundredths;
use crate::exit::{Failure, Outcome};
use crate::harness::Times;
use crate::plot::{Axis, Dots, save_dots};
use crate::session::Session;
use crate::subject::{Aquifer, Measured, Raw, Subject};
use crate::table::{Column, Table, table};
use crate::text::Bytes;
use crate::workload::{Replacements, Sizes};
use crate::yardstick::{Shared, Yardstick};
use handover::HandOver;
use team::{Replacers, Team};

/// The least memory of a simulated device, so that memory does not run out.
const SIMULATED_BYTES: u64 = 512 << 30;
/// Measured rounds of each benchmark. They are many, and shorter than a time slice of the operating
/// system (1 ms), so that most of them run undisturbed even on a busy machine.
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

/// The work of the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Each replaces blocks of its own.
    Replace,
    /// One allocates, the other frees.
    HandOver,
    /// As `Replace`, with raw pointers; the yardstick is the same allocator with handles.
    Raw,
}

/// A benchmark.
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
    if args.peers {
        return peers::run(session, config, args);
    }
    let chosen = chosen(args.filter.as_deref().unwrap_or_default());
    if chosen.is_empty() {
        let names: Vec<_> = BENCHMARKS.iter().map(|benchmark| benchmark.name).collect();
        return Err(Failure::Usage(format!("--filter: no benchmark has this name; there are {}", names.join(", "))));
    }
    let measure = |benchmark: &Benchmark| {
        // Rounds of several threads are longer, and one thread alone runs each round, too.
        let rounds = if benchmark.threads > 1 { ROUNDS / 3 } else { ROUNDS };
        let rounds = if args.quick { rounds / 8 } else { rounds };
        measure(session, config, benchmark, rounds).map(Vec::from)
    };
    let (outcome, rows) = measure_all(session, config, &chosen, |benchmark| benchmark.name, measure)?;
    if !rows.is_empty() {
        session.show(tabulate(&rows))?;
        if let Some(path) = &args.plot {
            plot(session, &rows, path)?;
        }
    }
    Ok(outcome)
}

/// Draws the times of both.
fn plot(session: &Session, rows: &[Row], path: &Path) -> Result<(), Failure> {
    let (pairs, _) = rows.as_chunks::<2>();
    let values = |of: fn(&[Row; 2]) -> f64| pairs.iter().map(of).collect();
    let dots = Dots {
        title: &format!("aquifer-stress bench on {}", session.device_text()),
        rows: pairs.iter().map(|[ours, _]| ours.benchmark).collect(),
        series: vec!["aquifer", "yardstick: offset-allocator; for raw_ benchmarks, aquifer with handles"],
        axis: Axis { name: "ns per pair of an allocation and a free", is_logarithmic: true, from: None },
        values: vec![values(|[ours, _]| ours.ns_per_pair), values(|[_, theirs]| theirs.ns_per_pair)],
    };
    save_dots(session, &dots, path)
}

/// Measures one after the other and writes the rows. After a failure the others are still measured.
fn measure_all<T, R: Serialize>(
    session: &Session,
    config: &ConfigArg,
    chosen: &[&T],
    name: fn(&T) -> &'static str,
    measure: impl Fn(&T) -> Result<Vec<R>, Failure>,
) -> Result<(Outcome, Vec<R>), Failure> {
    let (mut outcome, mut rows) = (Outcome::Done, Vec::new());
    let bar = session.progress(chosen.len() as u64, "bench");
    for (number, one) in (1..).zip(chosen) {
        if bar.is_hidden() {
            session.message(format_args!("bench: {number} of {}: {}", chosen.len(), name(one)));
        }
        bar.set_message(name(one));
        match measure(one) {
            Ok(measured) => {
                measured.iter().try_for_each(|row| session.row(row))?;
                rows.extend(measured);
            }
            Err(Failure::Alloc { error, .. }) if matches!(*error, AllocError::NotMapped { .. }) => {
                session.message(format_args!("note: {}: not measured: {error}", name(one)));
            }
            Err(mut failure) => {
                if failure.outcome() == Outcome::OutOfMemory {
                    failure = Failure::OutOfMemory(too_small(session, config)?);
                }
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {}: {failure}", name(one)));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((outcome, rows))
}

fn measure(session: &Session, config: &ConfigArg, benchmark: &Benchmark, rounds: usize) -> Result<[Row; 2], Failure> {
    let room = open(session)?.memory_info()?.free / u64::from(benchmark.threads);
    let sizes = benchmark.sizes.within(room / 4, benchmark.live);
    if sizes.most() < benchmark.sizes.most() {
        let (name, most, meant) = (benchmark.name, Bytes(sizes.most()), Bytes(benchmark.sizes.most()));
        session
            .message(format_args!("note: {name}: the device has room for blocks of at most {most} instead of {meant}"));
    }
    let mut scripts: Vec<Replacements> = (0..benchmark.threads)
        .map(|thread| Replacements::new(session.seed() + u64::from(thread), sizes, benchmark.live))
        .collect();
    let bytes = sizes.mean().saturating_mul(benchmark.live.into());
    let yardstick = || Yardstick::new(bytes, benchmark.live);
    let aquifer = || Aquifer::new(session, &open(session)?, config, 1);
    let rows = match benchmark.kind {
        Kind::Replace => {
            let yardsticks = (0..benchmark.threads).map(|_| yardstick()).collect();
            let ours = Entrant::replacers(on_streams(aquifer()?, benchmark.threads)?, aquifer, &scripts)?;
            let theirs = Entrant::replacers(yardsticks, || Ok(yardstick()), &scripts)?;
            contest(benchmark, &mut scripts, rounds, ours, theirs)?
        }
        Kind::Raw => {
            let raws = on_streams(aquifer()?, benchmark.threads)?.into_iter().map(Raw).collect();
            let ours = Entrant::replacers(raws, || aquifer().map(Raw), &scripts)?;
            let theirs = Entrant::replacers(on_streams(aquifer()?, benchmark.threads)?, aquifer, &scripts)?;
            contest(benchmark, &mut scripts, rounds, ours, theirs)?
        }
        Kind::HandOver => {
            let first = aquifer()?;
            let second = first.on_new_stream()?;
            let ours = Entrant::new(HandOver::between(first, second), Some(HandOver::alone(aquifer()?)));
            let shared = || Shared::new(Mutex::new(yardstick()));
            let both = shared();
            let theirs = HandOver::between(both.clone(), both);
            let theirs = Entrant::new(theirs, Some(HandOver::alone(shared())));
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

/// A team, and one thread alone that does the same.
struct Entrant<T> {
    team: T,
    times: Times,
    alone: Option<(T, Times)>,
}

impl<S: Subject + Send> Entrant<Replacers<S>>
where
    S::Handle: Send,
{
    /// Threads that replace blocks, and one alone if there are several.
    fn replacers(
        subjects: Vec<S>,
        alone: impl FnOnce() -> Result<S, Failure>,
        rounds: &[Replacements],
    ) -> Result<Self, Failure> {
        let alone = if subjects.len() > 1 { Some(Replacers::new(vec![alone()?], &rounds[..1])?) } else { None };
        Ok(Entrant::new(Replacers::new(subjects, rounds)?, alone))
    }
}

impl<T: Team> Entrant<T> {
    fn new(team: T, alone: Option<T>) -> Entrant<T> {
        Entrant { team, times: Times::default(), alone: alone.map(|alone| (alone, Times::default())) }
    }

    fn round(&mut self, scripts: &[Replacements], pairs: u32, measured: bool) -> Result<(), Failure> {
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
        // The caller knows the other fields.
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
    scripts: &mut [Replacements],
    rounds: usize,
    mut ours: Entrant<impl Team>,
    mut theirs: Entrant<impl Team>,
) -> Result<[Row; 2], Failure> {
    // First about as many blocks are replaced as there are, so that the memory is fragmented as in
    // the long run.
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

/// The reason that memory is too small.
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

fn tabulate(rows: &[Row]) -> Table {
    let (pairs, _) = rows.as_chunks::<2>();
    let columns: [Column<[Row; 2]>; 7] = [
        ("benchmark", |[ours, _]| ours.benchmark.to_owned()),
        ("ns/pair", |[ours, _]| format!("{:.1}", ours.ns_per_pair)),
        ("yardstick, ns/pair", |[_, theirs]| format!("{:.1}", theirs.ns_per_pair)),
        ("times yardstick", |[ours, theirs]| format!("{:.2}", ours.ns_per_pair / theirs.ns_per_pair)),
        ("rate vs 1 thread", |[ours, _]| format!("{:.2}", ours.rate_vs_one_thread)),
        ("live", |[ours, _]| ours.live.to_string()),
        ("threads", |[ours, _]| ours.threads.to_string()),
    ];
    table(pairs, 1, &columns)
}
