//! `bench --peers`: benchmarks that other projects published, with several allocators side by side.
//!
//! Each allocator gets a device of its own. What it holds, its driver calls and their time are
//! observed in two passes of the pattern; its speed is timed in other passes, on another device.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use aquifer::Device;
use aquifer::device::sim::SimDriver;
use serde::Serialize;

use super::captures::{Captured, Captures};
use super::{SIMULATED_BYTES, streams};
use crate::bare::Bare;
use crate::cli::{BenchArgs, ConfigArg};
use crate::commands::{hundredths, ratio, us};
use crate::driver_pool::DriverPool;
use crate::exit::{Failure, Outcome};
use crate::harness::{OnOom, Player, Times};
use crate::input::Program;
use crate::output;
use crate::patterns;
use crate::pytorch::PyTorch;
use crate::session::Session;
use crate::subject::{Aquifer, Measured, Refusal, Refused, Subject};
use crate::table::{Column, Table, number, optional, table};
use crate::text::Bytes;

/// Timed passes of each pattern.
const PASSES: u32 = 4;

/// An allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Aquifer,
    PyTorch,
    Expandable,
    DriverPool,
    Bare,
}

const PEERS: [(Peer, &str); 5] = [
    (Peer::Aquifer, "Aquifer"),
    (Peer::PyTorch, "PyTorch (model)"),
    (Peer::Expandable, "PyTorch, expandable segments (model)"),
    (Peer::DriverPool, "driver's pool (cuMemAllocAsync)"),
    (Peer::Bare, "cuMemAlloc"),
];

/// A row of results. `bench --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    benchmark: String,
    source: &'static str,
    allocator: &'static str,
    device: String,
    #[serde(flatten)]
    memory: Option<Memory>,
    #[serde(flatten)]
    times: Option<RoundTimes>,
    #[serde(flatten)]
    captured: Option<Captured>,
}

/// What an allocator made of a pattern.
#[derive(Debug, Clone, Default, Serialize)]
struct Memory {
    peak_requested_bytes: u64,
    peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    driver_calls: u64,
    driver_time_modelled_us: Option<f64>,
    warm_driver_calls: u64,
    warm_driver_time_modelled_us: Option<f64>,
    ns_per_op: Option<f64>,
    ooms: u64,
}

/// The times of a benchmark that has no pattern to replay.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct RoundTimes {
    pub(super) clock: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) us_per_iteration: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) latency_to_first_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) first_round_throughput_gb_s: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) second_round_throughput_gb_s: Option<f64>,
}

/// A benchmark.
enum Benchmark {
    Pattern(patterns::Pattern),
    Streams(streams::Iterations),
    Priming(streams::Priming),
    Captures(Captures),
}

impl Benchmark {
    fn name(&self) -> &str {
        match self {
            Benchmark::Pattern(pattern) => &pattern.name,
            Benchmark::Streams(iterations) => &iterations.name,
            Benchmark::Priming(priming) => priming.name,
            Benchmark::Captures(captures) => &captures.name,
        }
    }
}

fn all() -> impl Iterator<Item = Benchmark> {
    let patterns = patterns::all().into_iter().map(Benchmark::Pattern);
    let streams = streams::Iterations::all().into_iter().map(Benchmark::Streams);
    let captures = Captures::all().into_iter().map(Benchmark::Captures);
    patterns.chain(streams).chain(streams::Priming::ALL.map(Benchmark::Priming)).chain(captures)
}

/// Runs the benchmarks.
///
/// # Errors
/// When none has such a name, a device cannot be opened, or standard output cannot be written.
pub(super) fn run(session: &Session, config: &ConfigArg, args: &BenchArgs) -> Result<Outcome, Failure> {
    config.refuse_pytorch()?;
    let filter = args.filter.as_deref().unwrap_or_default();
    let is_quick = |name: &str| !name.contains("000/") || name.contains("/1000/") || name == filter;
    let mut chosen: Vec<Benchmark> =
        all().filter(|one| one.name().contains(filter) && (!args.quick || is_quick(one.name()))).collect();
    if chosen.iter().any(|one| one.name() == filter) {
        chosen.retain(|one| one.name() == filter);
    }
    if chosen.is_empty() {
        let names: Vec<String> = all().map(|one| one.name().to_owned()).collect();
        return Err(Failure::Usage(format!("--filter: no benchmark has this name; there are {}", names.join(", "))));
    }
    if let Some(folder) = &args.traces {
        return write_traces(session, &chosen, folder);
    }
    let (mut outcome, mut rows) = (Outcome::Done, Vec::new());
    let bar = session.progress((chosen.len() * PEERS.len()) as u64, "bench");
    for (index, one) in (1..).zip(&chosen) {
        if bar.is_hidden() {
            session.message(format_args!("bench: {index} of {}: {}", chosen.len(), one.name()));
        }
        bar.set_message(one.name().to_owned());
        for (peer, allocator) in PEERS {
            bar.inc(1);
            // The driver's own allocations within a capture are nodes of the graph, not memory of a
            // pool.
            if matches!(one, Benchmark::Captures(_)) && matches!(peer, Peer::DriverPool | Peer::Bare) {
                continue;
            }
            match measure(session, config, one, peer) {
                Ok(row) => {
                    let row = Row { allocator, device: session.device_text().to_owned(), ..row };
                    session.row(&row)?;
                    rows.push(row);
                }
                Err(failure) => {
                    outcome = outcome.max(failure.outcome());
                    session.message(format_args!("error: {} with {allocator}: {failure}", one.name()));
                }
            }
        }
    }
    bar.finish_and_clear();
    let (patterns, others): (Vec<Row>, Vec<Row>) = rows.into_iter().partition(|row| row.memory.is_some());
    let (captures, times): (Vec<Row>, Vec<Row>) = others.into_iter().partition(|row| row.captured.is_some());
    let tables = [(patterns, tabulate as fn(&[Row]) -> Table), (times, tabulate_times), (captures, tabulate_captures)];
    let tables = tables.iter().filter(|(rows, _)| !rows.is_empty());
    let tables: Vec<String> = tables.map(|(rows, tabulate)| tabulate(rows).to_string()).collect();
    session.show(tables.join("\n\n"))?;
    Ok(outcome)
}

/// Writes a trace of each pattern.
fn write_traces(session: &Session, chosen: &[Benchmark], folder: &Path) -> Result<Outcome, Failure> {
    std::fs::create_dir_all(folder).map_err(|cause| Failure::File { path: folder.to_owned(), cause })?;
    for one in chosen {
        if let Benchmark::Pattern(pattern) = one {
            let path = folder.join(pattern.name.replace('/', "-") + ".trace");
            output::write(&path, &pattern.program().to_trace())?;
            session.show(path.display())?;
        }
    }
    Ok(Outcome::Done)
}

fn measure(session: &Session, config: &ConfigArg, one: &Benchmark, peer: Peer) -> Result<Row, Failure> {
    let (benchmark, source) = match one {
        Benchmark::Pattern(pattern) => (pattern.name.clone(), pattern.source),
        Benchmark::Captures(captures) => (captures.name.clone(), "PyTorch 158352"),
        other => (other.name().to_owned(), "RMM"),
    };
    let job = Job { session, one };
    let row = match (peer, one) {
        (Peer::Aquifer, Benchmark::Captures(captures)) => {
            let captured = captures.capture(session, &Lab::open(session, None)?, config)?;
            Row { captured: Some(captured), ..Row::default() }
        }
        (Peer::Aquifer, _) => job.measure(|lab, streams| Aquifer::new(session, &lab.device, config, streams))?,
        (Peer::PyTorch | Peer::Expandable, _) => {
            let backing = if peer == Peer::PyTorch { "backing:pytorch" } else { "backing:expandable" };
            let config = parsed(backing)?;
            job.measure(|lab, streams| PyTorch::new(session, &lab.device, &config, streams))?
        }
        (Peer::DriverPool, _) => job.measure(|lab, streams| DriverPool::new(lab.device.clone(), streams))?,
        (Peer::Bare, _) => job.measure(|lab, _| Ok(Bare::new(lab.device.clone())))?,
    };
    let mut row = Row { benchmark, source, ..row };
    // There the host's time is that of the simulator.
    if session.sim().is_some()
        && matches!(peer, Peer::DriverPool | Peer::Bare)
        && let Some(memory) = &mut row.memory
    {
        memory.ns_per_op = None;
    }
    Ok(row)
}

fn parsed(options: &str) -> Result<ConfigArg, Failure> {
    options.parse::<ConfigArg>().map_err(|error| Failure::Usage(error.to_string()))
}

/// A benchmark to run with an allocator.
struct Job<'a> {
    session: &'a Session,
    one: &'a Benchmark,
}

impl Job<'_> {
    /// Runs it with what `make` makes for a device and a number of streams.
    fn measure<S: Subject>(&self, make: impl Fn(&Lab, usize) -> Result<S, Failure>) -> Result<Row, Failure> {
        match self.one {
            Benchmark::Pattern(pattern) => {
                let program = pattern.program();
                let memory = Some(self.play(&program, |lab| make(lab, program.streams.len()))?);
                Ok(Row { memory, ..Row::default() })
            }
            Benchmark::Captures(captures) => {
                let program = captures.of_pytorch();
                let held = self.play(&program, |lab| make(lab, program.streams.len()))?.peak_reserved_bytes;
                Ok(Row { captured: Some(captures.figures(held)), ..Row::default() })
            }
            Benchmark::Streams(iterations) => {
                let lab = Lab::open(self.session, None)?;
                let times = Some(iterations.time(&lab, make(&lab, iterations.streams)?)?);
                Ok(Row { times, ..Row::default() })
            }
            Benchmark::Priming(priming) => {
                let lab = Lab::open(self.session, None)?;
                let times = Some(priming.time(&lab, make(&lab, 1)?)?);
                Ok(Row { times, ..Row::default() })
            }
        }
    }

    fn play<S: Subject>(
        &self,
        program: &Program,
        make: impl Fn(&Lab) -> Result<S, Failure>,
    ) -> Result<Memory, Failure> {
        let lab = Lab::open(self.session, Some(SIMULATED_BYTES))?;
        let mut subject = Held { subject: make(&lab)?, lab: &lab, before: lab.free_bytes()?, most: 0, failed: None };
        let mut player = Player::new(program);
        let mut ooms = 0;
        let mut pass = || {
            let (calls, time) = (lab.device.driver_calls(), lab.driver_ns());
            ooms += player.pass(&mut subject, OnOom::Skip)?.ooms;
            let spent = lab.simulated.is_some().then(|| us(lab.driver_ns() - time));
            // A real device is asked what it has left after each request.
            let asked = if lab.simulated.is_some() { 0 } else { program.allocs() };
            Ok::<_, Failure>((lab.device.driver_calls().since(&calls).total().saturating_sub(asked), spent))
        };
        let (first, warm) = (pass()?, pass()?);
        let (held, failed) = (subject.most, subject.failed.take());
        failed.map_or(Ok(()), Err)?;
        subject.subject.check()?;
        drop((player, subject));
        let timed = Lab::open(self.session, Some(SIMULATED_BYTES))?;
        let (mut subject, mut player, mut times) = (make(&timed)?, Player::new(program), Times::default());
        for _ in 0..PASSES {
            times.add(player.pass(&mut subject, OnOom::Skip)?.elapsed, program.operations());
        }
        Ok(Memory {
            peak_requested_bytes: program.peak_requested_bytes,
            peak_reserved_bytes: held,
            reserved_over_requested: ratio(held, program.peak_requested_bytes).filter(|_| ooms == 0),
            driver_calls: first.0,
            driver_time_modelled_us: first.1,
            warm_driver_calls: warm.0,
            warm_driver_time_modelled_us: warm.1,
            ns_per_op: times.later().map(hundredths),
            ooms,
        })
    }
}

/// A device and its clock.
pub(super) struct Lab {
    pub(super) device: Device,
    pub(super) simulated: Option<Arc<SimDriver>>,
    begun: Instant,
}

impl Lab {
    /// The session's device; a simulated one with at least `least` bytes, if given.
    fn open(session: &Session, least: Option<u64>) -> Result<Lab, Failure> {
        let sized = session.sim().zip(least).map(|(sim, least)| session.resized(sim.capacity_bytes.max(least)));
        let (device, simulated) = match &sized {
            Some(sized) => sized.open_with_simulator()?,
            None => session.open_with_simulator()?,
        };
        Ok(Lab { device, simulated, begun: Instant::now() })
    }

    fn free_bytes(&self) -> Result<u64, Failure> {
        Ok(self.device.memory_info()?.free)
    }

    fn driver_ns(&self) -> u64 {
        self.simulated.as_ref().map_or(0, |driver| driver.time_in_calls_ns())
    }

    /// The time of the device's clock: a virtual one, or the host's.
    pub(super) fn now_ns(&self) -> u64 {
        match &self.simulated {
            Some(driver) => driver.now_ns(),
            None => u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }

    /// The name of the clock.
    pub(super) fn clock(&self) -> &'static str {
        if self.simulated.is_some() { "virtual" } else { "host" }
    }
}

/// A subject, and the most memory that the device lacked after any of its requests.
struct Held<'a, S> {
    subject: S,
    lab: &'a Lab,
    /// Free before the subject was made.
    before: u64,
    most: u64,
    failed: Option<Failure>,
}

impl<S: Subject> Subject for Held<'_, S> {
    type Handle = S::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<S::Handle, Refused> {
        let handle = self.subject.alloc(bytes, stream)?;
        let held = match &self.lab.simulated {
            Some(driver) => Ok(driver.held_bytes()),
            None => self.lab.free_bytes().map(|free| self.before.saturating_sub(free)),
        };
        match held {
            Ok(held) => self.most = self.most.max(held),
            Err(failure) => drop(self.failed.get_or_insert(failure)),
        }
        Ok(handle)
    }

    fn free(&mut self, handle: S::Handle) {
        self.subject.free(handle);
    }

    fn record_stream(&mut self, handle: &mut S::Handle, stream: u16) -> Result<(), Refused> {
        self.subject.record_stream(handle, stream)
    }

    fn refused(&mut self, refusal: Refusal) {
        self.subject.refused(refusal);
    }
}

fn tabulate(rows: &[Row]) -> Table {
    fn memory<T>(row: &Row, of: impl FnOnce(&Memory) -> T) -> Option<T> {
        row.memory.as_ref().map(of)
    }
    let columns: [Column<Row>; 11] = [
        ("benchmark", |row| row.benchmark.clone()),
        ("allocator", |row| row.allocator.to_owned()),
        ("holds", |row| optional(memory(row, |memory| Bytes(memory.peak_reserved_bytes)))),
        ("holds, ratio", |row| number(memory(row, |memory| memory.reserved_over_requested).flatten(), 3)),
        ("OOMs", |row| optional(memory(row, |memory| memory.ooms))),
        ("driver calls", |row| optional(memory(row, |memory| memory.driver_calls))),
        ("driver ms, modelled", |row| {
            number(memory(row, |memory| memory.driver_time_modelled_us).flatten().map(|us| us / 1e3), 1)
        }),
        ("ns/op", |row| number(memory(row, |memory| memory.ns_per_op).flatten(), 1)),
        ("later driver calls", |row| optional(memory(row, |memory| memory.warm_driver_calls))),
        ("later driver ms, modelled", |row| {
            number(memory(row, |memory| memory.warm_driver_time_modelled_us).flatten().map(|us| us / 1e3), 1)
        }),
        ("requested", |row| optional(memory(row, |memory| Bytes(memory.peak_requested_bytes)))),
    ];
    table(rows, 2, &columns)
}

fn tabulate_captures(rows: &[Row]) -> Table {
    let columns: [Column<Row>; 5] = [
        ("benchmark", |row| row.benchmark.clone()),
        ("allocator", |row| row.allocator.to_owned()),
        ("requested", |row| optional(row.captured.as_ref().map(|captured| Bytes(captured.peak_requested_bytes)))),
        ("holds", |row| optional(row.captured.as_ref().map(|captured| Bytes(captured.peak_reserved_bytes)))),
        ("holds, ratio", |row| number(row.captured.as_ref().and_then(|captured| captured.reserved_over_requested), 3)),
    ];
    table(rows, 2, &columns)
}

fn tabulate_times(rows: &[Row]) -> Table {
    fn figure(row: &Row, digits: usize, of: fn(&RoundTimes) -> Option<f64>) -> String {
        number(row.times.as_ref().and_then(of), digits)
    }
    let columns: [Column<Row>; 7] = [
        ("benchmark", |row| row.benchmark.clone()),
        ("allocator", |row| row.allocator.to_owned()),
        ("clock", |row| row.times.as_ref().map_or("", |times| times.clock).to_owned()),
        ("µs/iteration", |row| figure(row, 1, |times| times.us_per_iteration)),
        ("µs to the first", |row| figure(row, 1, |times| times.latency_to_first_us)),
        ("first round GB/s", |row| figure(row, 0, |times| times.first_round_throughput_gb_s)),
        ("second round GB/s", |row| figure(row, 0, |times| times.second_round_throughput_gb_s)),
    ];
    table(rows, 3, &columns)
}
