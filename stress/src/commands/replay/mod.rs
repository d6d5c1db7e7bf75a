//! `replay`: what a recorded program needs of memory, driver and time.

mod timing;

use std::collections::BTreeMap;

use aquifer::Device;
use aquifer::memory::{MemoryStats, Snapshot};
use aquifer_device::sim::CAPACITY_BYTES_MAX;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{ConfigArg, PassArgs, ReplayArgs};
use crate::commands::{Names, hundredths, options, programs, ratio, record_history, save};
use crate::exit::{Failure, Outcome};
use crate::harness::{OnOom, Player};
use crate::input::Program;
use crate::observe::{Costs, Modelled, Observed, Paced};
use crate::session::Session;
use crate::subject::Aquifer;
use crate::table::{NOTHING, Table, table};
use crate::text::Bytes;
use timing::time;

pub(crate) use timing::Beside;

/// A row of results. `replay --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub trace: String,
    pub config: String,
    pub device: String,
    pub lag: u64,
    pub events: u64,
    pub allocs: u64,
    pub peak_requested_bytes: u64,
    pub peak_allocated_bytes: u64,
    pub peak_reserved_bytes: u64,
    pub reserved_over_requested: Option<f64>,
    pub ns_per_op: Option<f64>,
    pub first_pass_ns_per_op: Option<f64>,
    pub seconds: f64,
    pub driver_calls: BTreeMap<&'static str, u64>,
    pub driver_allocs: u64,
    pub driver_time_modelled_us: Option<f64>,
    pub worst_alloc_us: Option<f64>,
    pub driver_allocs_measured_us: Option<f64>,
    pub worst_alloc_measured_us: Option<f64>,
    pub stalls: u64,
    pub remaps: u64,
    pub granules_moved: u64,
    pub warm_driver_calls: Option<f64>,
    pub warm_driver_allocs: Option<f64>,
    pub warm_driver_time_modelled_us: Option<f64>,
    pub warm_worst_alloc_us: Option<f64>,
    pub warm_stalls: Option<f64>,
    pub driver_calls_by_pass: Vec<u64>,
    pub ooms: u64,
    pub warm_ooms: u64,
    pub retries: u64,
    pub events_recorded: u64,
    pub stream_waits: u64,
    pub hazards: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub yardstick_ns_per_op: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_ns_per_op: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_first_pass_ns_per_op: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_peak_reserved_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_ooms: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written, and when a snapshot is to be saved of several programs
/// or under several options.
pub fn run(session: &Session, args: &ReplayArgs) -> Result<Outcome, Failure> {
    let (files, configs) = (args.files.len(), session.configs().len());
    if args.snapshot.is_some() && (files, configs) != (1, 1) {
        let given = if files > 1 { format!("{files} files") } else { format!("{configs} of --config") };
        return Err(Failure::Usage(format!("--snapshot takes one program and one --config, not {given}")));
    }
    let beside = Beside { yardstick: args.yardstick, driver_pool: args.driver_pool };
    let mut outcome = Outcome::Done;
    let (mut rows, mut names) = (Vec::new(), Names::default());
    for file in &args.files {
        let programs = match programs(session, file, &args.files, &mut names) {
            Ok(programs) => programs,
            Err(failure) => {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {failure}"));
                continue;
            }
        };
        if args.snapshot.is_some() && programs.len() > 1 {
            let (file, number) = (file.display(), programs.len());
            return Err(Failure::Usage(format!("--snapshot takes one program, and {file} has {number}")));
        }
        for (name, program) in &programs {
            for config in session.configs() {
                let row = match replay(session, name, program, config, &args.passes, beside) {
                    Ok(row) => row,
                    Err(failure) => {
                        outcome = outcome.max(failure.outcome());
                        session.message(format_args!("error: {name}: {failure}"));
                        continue;
                    }
                };
                outcome = outcome.max(row.outcome());
                if row.refused() {
                    let message = if session.is_default_device() {
                        larger(session, name, program, config)?
                    } else {
                        row.failed()
                    };
                    session.message(message);
                }
                session.row(&row)?;
                rows.push(row);
                if let Some(path) = &args.snapshot {
                    let snapshot = snapshot(session, program, config, args.passes.lag);
                    if let Err(failure) = snapshot.and_then(|snapshot| save(session, &snapshot, path)) {
                        outcome = outcome.max(failure.outcome());
                        session.message(format_args!("error: {name}: {failure}"));
                    }
                }
            }
        }
    }
    if !rows.is_empty() {
        session.show(tabulate(&rows, args))?;
    }
    Ok(outcome)
}

/// What to say of a program that does not finish on the default device: a simulated one on which it
/// does, tried out.
fn larger(session: &Session, name: &str, program: &Program, config: &ConfigArg) -> Result<String, Failure> {
    // Later passes may need a little more than the first.
    let play = |bytes| -> Result<Option<u64>, Failure> {
        let device = session.open_simulated(bytes);
        let mut subject = Aquifer::new(session, &device, config, program.streams.len())?;
        let mut player = Player::new(program);
        for _ in 0..2 {
            if player.pass(&mut subject, OnOom::Stop)?.ooms > 0 {
                return Ok(None);
            }
        }
        Ok(Some(subject.allocator().stats().reserved_bytes.all.peak))
    };
    let default = session.device_text();
    let mut bytes = play(CAPACITY_BYTES_MAX)?.unwrap_or(CAPACITY_BYTES_MAX);
    while bytes < CAPACITY_BYTES_MAX {
        bytes = bytes.next_multiple_of(1 << 30);
        if play(bytes)?.is_some() {
            let size = bytes >> 30;
            return Ok(format!(
                "note: {name} does not finish on {default}, the default; it does with --device sim:{size}GiB"
            ));
        }
        bytes += bytes / 8;
    }
    let most = Bytes(CAPACITY_BYTES_MAX);
    Ok(format!("note: {name} does not finish with these options on any simulated device, of at most {most}"))
}

/// Replays a program twice, each time in several passes: timed, and observed.
pub(super) fn replay(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
) -> Result<Row, Failure> {
    let bar = session.progress(2 * u64::from(passes.repeat), name);
    let times = time(session, name, program, config, passes, beside, &bar)?;
    let observed = observe(session, name, program, config, passes, &bar)?;
    bar.finish_and_clear();
    let Observations { costs, stats, ooms, warm_ooms, hazards } = observed;
    let (first, warm) = costs.split_first().map_or((None, &[][..]), |(first, warm)| (Some(first), warm));
    let modelled = |ns: fn(&Modelled) -> u64| first.and_then(|costs| costs.modelled.as_ref()).map(|m| us(ns(m)));
    let measured = first.and_then(|costs| costs.measured);
    let warm_modelled: Vec<Modelled> = warm.iter().filter_map(|costs| costs.modelled).collect();
    let worst = warm_modelled.iter().map(|modelled| modelled.worst_alloc_ns).max();
    let calls = first.iter().flat_map(|costs| costs.calls.iter());
    Ok(Row {
        trace: name.to_owned(),
        config: config.text.clone(),
        device: session.device_text().to_owned(),
        lag: passes.lag,
        events: program.operations(),
        allocs: first.map_or(0, |costs| costs.allocs),
        peak_requested_bytes: program.peak_requested_bytes,
        peak_allocated_bytes: stats.allocated_bytes.all.peak,
        peak_reserved_bytes: stats.reserved_bytes.all.peak,
        reserved_over_requested: ratio(stats.reserved_bytes.all.peak, program.peak_requested_bytes),
        ns_per_op: times.ours.later().map(hundredths),
        first_pass_ns_per_op: times.ours.first().map(hundredths),
        seconds: times.ours.all().as_secs_f64(),
        driver_calls: calls.map(|(operation, count)| (operation.name(), count)).collect(),
        driver_allocs: first.map_or(0, |costs| costs.driver_allocs),
        driver_time_modelled_us: modelled(|modelled| modelled.total_ns),
        worst_alloc_us: modelled(|modelled| modelled.worst_alloc_ns),
        driver_allocs_measured_us: measured.map(|measured| us(measured.driver_allocs_ns)),
        worst_alloc_measured_us: measured.map(|measured| us(measured.worst_alloc_ns)),
        stalls: first.map_or(0, |costs| costs.stalls),
        remaps: stats.remaps,
        granules_moved: stats.granules_moved,
        warm_driver_calls: mean(warm.iter().map(|costs| costs.calls.total())),
        warm_driver_allocs: mean(warm.iter().map(|costs| costs.driver_allocs)),
        warm_driver_time_modelled_us: mean(warm_modelled.iter().map(|modelled| modelled.total_ns))
            .map(|ns| hundredths(ns / 1e3)),
        warm_worst_alloc_us: worst.map(us),
        warm_stalls: mean(warm.iter().map(|costs| costs.stalls)),
        driver_calls_by_pass: costs.iter().map(|costs| costs.calls.total()).collect(),
        ooms,
        warm_ooms,
        retries: stats.num_alloc_retries,
        events_recorded: first.map_or(0, |costs| costs.timeline.events_recorded),
        stream_waits: first.map_or(0, |costs| costs.timeline.waits_inserted),
        hazards,
        yardstick_ns_per_op: times.yardstick.and_then(|times| times.later()).map(hundredths),
        pool_ns_per_op: times.driver_pool.as_ref().and_then(|pool| pool.times.later()).map(hundredths),
        pool_first_pass_ns_per_op: times.driver_pool.as_ref().and_then(|pool| pool.times.first()).map(hundredths),
        pool_seconds: times.driver_pool.as_ref().map(|pool| pool.times.all().as_secs_f64()),
        pool_peak_reserved_bytes: times.driver_pool.as_ref().map(|pool| pool.reserved),
        pool_ooms: times.driver_pool.map(|pool| pool.ooms),
    })
}

/// Replays a program once more and takes a snapshot, with all of the history, before its blocks are
/// freed.
pub(crate) fn snapshot(
    session: &Session,
    program: &Program,
    config: &ConfigArg,
    lag: u64,
) -> Result<Snapshot, Failure> {
    let mut subject = Paced::new(session, config, program.streams.len(), lag)?;
    record_history(subject.allocator(), usize::MAX);
    let mut player = Player::new(program);
    player.play(&mut subject, OnOom::Skip)?;
    Ok(subject.allocator().snapshot())
}

/// What was seen of some passes: their costs; statistics and refusals of the first, refusals of the
/// later ones.
struct Observations {
    costs: Vec<Costs>,
    stats: MemoryStats,
    ooms: u64,
    warm_ooms: u64,
    hazards: u64,
}

fn observe(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    bar: &ProgressBar,
) -> Result<Observations, Failure> {
    let mut subject = Observed::new(session, config, program.streams.len(), passes.lag)?;
    let mut player = Player::new(program);
    let mut pass = |subject: &mut Observed| {
        let start = subject.begin();
        let ooms = player.pass(subject, OnOom::Skip)?.ooms;
        bar.inc(1);
        Ok::<_, Failure>((subject.end(&start), ooms))
    };
    let (first, ooms) = pass(&mut subject)?;
    let (mut costs, stats, mut warm_ooms) = (vec![first], subject.stats(), 0);
    for _ in 1..passes.repeat {
        let (later, ooms) = pass(&mut subject)?;
        costs.push(later);
        warm_ooms += ooms;
    }
    // The end of the allocator is watched, too.
    let device = subject.device().clone();
    drop(subject);
    Ok(Observations { costs, stats, ooms, warm_ooms, hazards: hazards(session, name, &device) })
}

/// The mean, unless there is nothing to take it of.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52, and a rounded one would do")]
fn mean(counts: impl ExactSizeIterator<Item = u64>) -> Option<f64> {
    let number = counts.len();
    (number > 0).then(|| hundredths(counts.sum::<u64>() as f64 / number as f64))
}

/// Nanoseconds as microseconds.
#[expect(clippy::cast_precision_loss, reason = "a time for people")]
fn us(ns: u64) -> f64 {
    hundredths(ns as f64 / 1e3)
}

impl Row {
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Row { hazards: 1.., .. } => Outcome::Hazards,
            _ if self.refused() => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }

    /// Whether a request of any pass was refused.
    fn refused(&self) -> bool {
        self.ooms > 0 || self.warm_ooms > 0
    }

    /// What to say of a program that does not finish on the device that was asked for.
    fn failed(&self) -> String {
        let refused = self.ooms.saturating_add(self.warm_ooms);
        let requests = if refused == 1 { "request was" } else { "requests were" };
        let (trace, config) = (&self.trace, options(&self.config));
        format!(
            "out of memory: {trace} with {config}: {refused} {requests} refused; the command fit finds the smallest device"
        )
    }
}

/// Counts what the race detector found and shows the beginning of it.
pub(super) fn hazards(session: &Session, name: &str, device: &Device) -> u64 {
    const SHOWN: u64 = 3;
    let mut count = 0;
    while let Some(violation) = device.driver().take_violation() {
        count += 1;
        if count <= SHOWN {
            session.message(format_args!("hazard: {name}: {violation}"));
        }
    }
    count
}

fn tabulate(rows: &[Row], args: &ReplayArgs) -> Table {
    let mut headings = vec!["trace", "config", "requested", "reserved", "ratio", "ns/op", "first pass"];
    headings.extend(args.yardstick.then_some(["yardstick", "times"]).into_iter().flatten());
    headings.extend(args.driver_pool.then_some(["driver's pool", "its reserved"]).into_iter().flatten());
    headings.extend(["driver calls", "warm calls", "driver ms", "warm ms", "worst µs"]);
    headings.extend((args.passes.lag > 0).then_some("stalls"));
    headings.extend(["OOMs", "later OOMs", "retries", "waits", "hazards"]);
    let mut table = table(&headings, 2);
    for row in rows {
        table.add_row(cells(row, args));
    }
    table
}

fn cells(row: &Row, args: &ReplayArgs) -> Vec<String> {
    let text =
        |number: Option<f64>, digits| number.map_or_else(|| NOTHING.to_owned(), |number| format!("{number:.digits$}"));
    let mut cells = vec![
        row.trace.clone(),
        row.config.clone(),
        Bytes(row.peak_requested_bytes).to_string(),
        Bytes(row.peak_reserved_bytes).to_string(),
        text(row.reserved_over_requested, 3),
        text(row.ns_per_op, 1),
        text(row.first_pass_ns_per_op, 1),
    ];
    if args.yardstick {
        let times = row.ns_per_op.zip(row.yardstick_ns_per_op).map(|(ours, yardstick)| ours / yardstick);
        cells.extend([text(row.yardstick_ns_per_op, 1), text(times, 2)]);
    }
    if args.driver_pool {
        let reserved =
            row.pool_peak_reserved_bytes.map_or_else(|| NOTHING.to_owned(), |bytes| Bytes(bytes).to_string());
        cells.extend([text(row.pool_ns_per_op, 1), reserved]);
    }
    cells.push(row.driver_calls.values().sum::<u64>().to_string());
    cells.push(text(row.warm_driver_calls, 1));
    cells.push(text(row.driver_time_modelled_us.map(|us| us / 1e3), 1));
    cells.push(text(row.warm_driver_time_modelled_us.map(|us| us / 1e3), 1));
    cells.push(text(row.worst_alloc_us, 0));
    cells.extend((args.passes.lag > 0).then(|| row.stalls.to_string()));
    cells.extend([row.ooms, row.warm_ooms, row.retries, row.stream_waits, row.hazards].map(|count| count.to_string()));
    cells
}
