//! `replay`: the memory, driver calls and time of a recorded program.

mod timing;

use std::collections::BTreeMap;

use aquifer::Device;
use aquifer::device::sim::{SimConfig, SimDriver};
use aquifer::memory::{MemoryStats, Snapshot};
use aquifer_sim::CAPACITY_BYTES_MAX;
use aquifer_trace::input::Program;
use aquifer_trace::{Aquifer, Costs, FirstRefusal, Observed, OnOom, Player, PyTorch, Spent};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::cli::{ConfigArg, PassArgs, ReplayArgs};
use crate::commands::{all_programs, hundredths, options, out_of_memory, ratio, record_history, save, us, violations};
use crate::exit::{Failure, Outcome};
use crate::lag_bound::lag_bound;
use crate::map::Style;
use crate::opened::Opened;
use crate::session::Session;
use crate::table::{Column, Table, in_terminal, number, optional, table};
use crate::text::Bytes;
use timing::{Timings, time};

pub(crate) use timing::Beside;

/// A row of results. `replay --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
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
    pub peak_reserved_bytes_by_pass: Vec<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lag_bound_over_requested: Option<f64>,
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
    pub frames_split: u64,
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
    pub violations: u64,
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
    let programs = all_programs(session, &args.files, &mut outcome);
    if args.snapshot.is_some() && programs.len() > 1 {
        let (file, number) = (args.files[0].display(), programs.len());
        return Err(Failure::Usage(format!("--snapshot takes one program, and {file} has {number}")));
    }
    let mut rows = Vec::new();
    for (name, program) in &programs {
        for config in session.configs() {
            let mut failed = |failure: Failure| {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {name}: {failure}"));
            };
            let (row, refusal) = match replay(session, name, program, config, &args.passes, beside) {
                Ok(replayed) => replayed,
                Err(failure) => {
                    failed(failure);
                    continue;
                }
            };
            let split = replay_splitting(session, &row, program, config, &args.passes, beside);
            let split = split.unwrap_or_else(|failure| {
                failed(failure);
                None
            });
            if let Some(path) = &args.snapshot {
                let snapshot = snapshot(session, program, config, args.passes.lag);
                snapshot.and_then(|snapshot| save(session, &snapshot, path)).unwrap_or_else(&mut failed);
            }
            if row.refused() {
                let is_default = session.is_default_device();
                session.message(if is_default {
                    larger(session, name, program, config, &args.passes)?
                } else {
                    row.failed()
                });
            }
            if let Some(refusal) = refusal {
                session.show(refused(name, &refusal))?;
            }
            for row in std::iter::once(row).chain(split) {
                outcome = outcome.max(row.outcome());
                session.row(&row)?;
                rows.push(row);
            }
        }
    }
    if !rows.is_empty() {
        session.show(tabulate(&rows, beside))?;
    }
    Ok(outcome)
}

/// The message about a program that does not finish on the default device. It names a simulated
/// device on which the program finishes, found by trying.
fn larger(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
) -> Result<String, Failure> {
    let config = &config.clone().trial();
    let play = |bytes| match &config.pytorch {
        None => all_passes::<Aquifer>(session, bytes, program, config, passes),
        Some(_) => all_passes::<PyTorch>(session, bytes, program, config, passes),
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

/// The most memory held during all passes on a simulated device of this size; `None` if a request
/// was refused.
fn all_passes<S: Opened>(
    session: &Session,
    bytes: u64,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
) -> Result<Option<u64>, Failure> {
    let streams = program.streams.len();
    let mut subject = match session.sim() {
        Some(_) => S::lagging(&session.resized(bytes), config, streams, passes.lag)?,
        None => S::open(session, &Device::new(SimDriver::new(SimConfig::new(bytes))), config, streams)?,
    };
    let mut player = Player::new(program);
    for _ in 0..passes.repeat {
        if player.pass(&mut subject, OnOom::Stop)?.ooms > 0 {
            return Ok(None);
        }
    }
    Ok(Some(subject.stats().reserved_bytes.all.peak))
}

/// Replays a program that was refused a request once more, with frames split. `None` if nothing was
/// split, so that all figures would be the same.
fn replay_splitting(
    session: &Session,
    refused: &Row,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
) -> Result<Option<Row>, Failure> {
    let Some(splitting) = config.splitting().filter(|_| refused.refused()) else { return Ok(None) };
    let (row, _) = replay(session, &refused.trace, program, &splitting, passes, beside)?;
    Ok((row.frames_split > 0).then_some(row))
}

/// Replays a program twice, each time in several passes: timed, and observed.
pub(super) fn replay(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
) -> Result<(Row, Option<FirstRefusal>), Failure> {
    let bar = session.progress(2 * u64::from(passes.repeat), name);
    let (times, observed) = match &config.pytorch {
        None => measure::<Aquifer>(session, name, program, config, passes, beside, &bar)?,
        Some(_) => measure::<PyTorch>(session, name, program, config, passes, beside, &bar)?,
    };
    bar.finish_and_clear();
    let Observations { costs, stats, ooms, warm_ooms, violations, first_refusal } = observed;
    let peak = |of: fn(&Costs) -> u64| costs.iter().map(of).max().unwrap_or(0);
    let reserved = peak(|costs| costs.peaks.0);
    let (first, warm) = costs.split_first().map_or((None, &[][..]), |(first, warm)| (Some(first), warm));
    let modelled = |ns: fn(&Spent) -> u64| first.and_then(|costs| costs.modelled.as_ref()).map(|m| us(ns(m)));
    let measured = first.and_then(|costs| costs.measured);
    let warm_modelled: Vec<Spent> = warm.iter().filter_map(|costs| costs.modelled).collect();
    let worst = warm_modelled.iter().map(|modelled| modelled.worst_alloc_ns).max();
    let calls = first.iter().flat_map(|costs| costs.calls.iter());
    let row = Row {
        trace: name.to_owned(),
        config: config.text.clone(),
        device: session.device_text().to_owned(),
        lag: passes.lag,
        events: program.operations(),
        allocs: first.map_or(0, |costs| costs.allocs),
        peak_requested_bytes: program.peak_requested_bytes,
        peak_allocated_bytes: peak(|costs| costs.peaks.1),
        peak_reserved_bytes: reserved,
        reserved_over_requested: ratio(reserved, program.peak_requested_bytes),
        peak_reserved_bytes_by_pass: costs.iter().map(|costs| costs.peaks.0).collect(),
        lag_bound_over_requested: if passes.lag > 0 {
            ratio(lag_bound(program, passes.lag), program.peak_requested_bytes)
        } else {
            None
        },
        ns_per_op: times.ours.later().map(hundredths),
        first_pass_ns_per_op: times.ours.first().map(hundredths),
        seconds: times.ours.all().as_secs_f64(),
        driver_calls: calls.map(|(operation, count)| (operation.name(), count)).collect(),
        driver_allocs: first.map_or(0, |costs| costs.driver_allocs),
        driver_time_modelled_us: modelled(|modelled| modelled.total_ns),
        worst_alloc_us: modelled(|modelled| modelled.worst_alloc_ns),
        driver_allocs_measured_us: measured.map(|measured| us(measured.total_ns)),
        worst_alloc_measured_us: measured.map(|measured| us(measured.worst_alloc_ns)),
        stalls: first.map_or(0, |costs| costs.stalls),
        remaps: stats.remaps,
        granules_moved: stats.granules_moved,
        frames_split: stats.frames_split,
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
        violations,
        yardstick_ns_per_op: times.yardstick.and_then(|times| times.later()).map(hundredths),
        pool_ns_per_op: times.driver_pool.as_ref().and_then(|pool| pool.times.later()).map(hundredths),
        pool_first_pass_ns_per_op: times.driver_pool.as_ref().and_then(|pool| pool.times.first()).map(hundredths),
        pool_seconds: times.driver_pool.as_ref().map(|pool| pool.times.all().as_secs_f64()),
        pool_peak_reserved_bytes: times.driver_pool.as_ref().map(|pool| pool.reserved),
        pool_ooms: times.driver_pool.map(|pool| pool.ooms),
    };
    Ok((row, first_refusal))
}

fn measure<S: Opened>(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    beside: Beside,
    bar: &ProgressBar,
) -> Result<(Timings, Observations), Failure> {
    let times = time::<S>(session, name, program, config, passes, beside, bar)?;
    Ok((times, observe::<S>(session, name, program, config, passes, bar)?))
}

/// The first refusal of a program, with the allocator's report and what lay where.
fn refused(name: &str, first: &FirstRefusal) -> String {
    let FirstRefusal { event, refusal, map } = first;
    let report = refusal.report.as_ref().map_or_else(String::new, |report| in_terminal(&report.to_string()) + "\n\n");
    let map = Style::of_stdout(false).draw(map);
    format!("{name}: event {event} was the first to be refused, for {}:\n{report}{map}\n", Bytes(refusal.bytes))
}

/// Replays a program once more and takes a snapshot, with all of the history, before its blocks are
/// freed.
pub(crate) fn snapshot(
    session: &Session,
    program: &Program,
    config: &ConfigArg,
    lag: u64,
) -> Result<Snapshot, Failure> {
    let mut subject = Aquifer::lagging(session, config, program.streams.len(), lag)?;
    record_history(subject.allocator(), usize::MAX);
    let mut player = Player::new(program);
    player.play(&mut subject, OnOom::Skip)?;
    Ok(subject.allocator().snapshot())
}

/// Observations of some passes: their costs, the statistics in the end, and the refusals of the
/// first and of the later ones.
struct Observations {
    costs: Vec<Costs>,
    stats: MemoryStats,
    ooms: u64,
    warm_ooms: u64,
    violations: u64,
    first_refusal: Option<FirstRefusal>,
}

fn observe<S: Opened>(
    session: &Session,
    name: &str,
    program: &Program,
    config: &ConfigArg,
    passes: &PassArgs,
    bar: &ProgressBar,
) -> Result<Observations, Failure> {
    let mut subject = S::observed(session, config, program.streams.len(), passes.lag)?;
    let mut player = Player::new(program);
    let mut pass = |subject: &mut Observed<S>| {
        let (pass, costs) = subject.pass(|subject| player.pass(subject, OnOom::Skip))?;
        bar.inc(1);
        Ok::<_, Failure>((costs, pass.ooms))
    };
    let (first, ooms) = pass(&mut subject)?;
    let (mut costs, mut warm_ooms) = (vec![first], 0);
    for _ in 1..passes.repeat {
        let (later, ooms) = pass(&mut subject)?;
        costs.push(later);
        warm_ooms += ooms;
    }
    let (stats, first_refusal) = (subject.stats(), subject.take_first_refusal()?);
    // Dropping the allocator is observed, too.
    let device = subject.device().clone();
    drop(subject);
    Ok(Observations { costs, stats, ooms, warm_ooms, violations: violations(session, name, &device), first_refusal })
}

/// The mean, if there are counts.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52, and a rounded one would do")]
fn mean(counts: impl ExactSizeIterator<Item = u64>) -> Option<f64> {
    let number = counts.len();
    (number > 0).then(|| hundredths(counts.sum::<u64>() as f64 / number as f64))
}

impl Row {
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Row { violations: 1.., .. } => Outcome::Violations,
            _ if self.refused() => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }

    /// Whether a request of any pass was refused.
    fn refused(&self) -> bool {
        self.refusals() > 0
    }

    /// Requests refused in all passes.
    fn refusals(&self) -> u64 {
        self.ooms.saturating_add(self.warm_ooms)
    }

    /// The ratio of what a pass held to what is requested. Of a run that was refused a request, it
    /// would be too low.
    fn ratio(&self, held: Option<&u64>) -> String {
        let held = held.filter(|_| !self.refused());
        number(held.and_then(|&held| ratio(held, self.peak_requested_bytes)), 3)
    }

    /// The message about a program that does not finish on the device that was asked for.
    fn failed(&self) -> String {
        let more = "; the command fit finds the smallest device";
        out_of_memory(&self.trace, &self.config, self.refusals(), more)
    }
}

fn tabulate(rows: &[Row], beside: Beside) -> Table {
    let has_options = rows.iter().any(|row| !row.config.is_empty());
    let mut columns: Vec<Column<Row>> = vec![("program", |row| row.trace.clone())];
    if has_options {
        columns.push(("options", |row| options(&row.config).to_owned()));
    }
    let memory: [Column<Row>; 6] = [
        ("holds", |row| Bytes(row.peak_reserved_bytes).to_string()),
        ("holds, ratio", |row| row.ratio(Some(&row.peak_reserved_bytes))),
        ("bound", |row| number(row.lag_bound_over_requested, 3)),
        ("stalls", |row| row.stalls.to_string()),
        ("OOMs", |row| row.refusals().to_string()),
        ("violations", |row| row.violations.to_string()),
    ];
    let driver: [Column<Row>; 2] = [
        ("driver calls", |row| row.driver_calls.values().sum::<u64>().to_string()),
        ("driver ms, modelled", |row| number(row.driver_time_modelled_us.map(|us| us / 1e3), 1)),
    ];
    let times: [Column<Row>; 4] = [
        ("ns/op", |row| number(row.ns_per_op, 1)),
        ("times yardstick", |row| {
            number(row.ns_per_op.zip(row.yardstick_ns_per_op).map(|(ours, yardstick)| ours / yardstick), 2)
        }),
        ("driver's pool, ns/op", |row| number(row.pool_ns_per_op, 1)),
        ("driver's pool holds", |row| optional(row.pool_peak_reserved_bytes.map(Bytes))),
    ];
    columns.extend(memory);
    // Times beside which the user asked for others come first.
    if beside.yardstick || beside.driver_pool {
        columns.extend(times.into_iter().chain(driver));
    } else {
        columns.extend(driver.into_iter().chain(times));
    }
    columns.push(("later driver calls", |row| number(row.warm_driver_calls, 1)));
    columns.push(("later driver ms, modelled", |row| number(row.warm_driver_time_modelled_us.map(|us| us / 1e3), 1)));
    // Most programs hold as much in later passes as in the first one.
    if rows.iter().any(|row| row.peak_reserved_bytes_by_pass.iter().any(|&held| held != row.peak_reserved_bytes)) {
        columns.push(("holds, first pass", |row| row.ratio(row.peak_reserved_bytes_by_pass.first())));
        columns.push(("holds, last pass", |row| row.ratio(row.peak_reserved_bytes_by_pass.last())));
    }
    columns.push(("requested", |row| Bytes(row.peak_requested_bytes).to_string()));
    table(rows, 1 + usize::from(has_options), &columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_that_decide_fit_into_80_columns() {
        let row = Row {
            trace: "gnn_random_graphs".into(),
            peak_requested_bytes: 100 << 30,
            peak_reserved_bytes: 101 << 30,
            peak_reserved_bytes_by_pass: vec![101 << 30; 5],
            ns_per_op: Some(1234.5),
            driver_calls: [("cuMemMap", 123_456)].into(),
            driver_time_modelled_us: Some(1_234_567.0),
            warm_driver_calls: Some(112.5),
            ..Row::default()
        };
        let shown = |row: &Row| tabulate(std::slice::from_ref(row), Beside::default()).render(Some(80));
        let text = shown(&row);
        for figure in ["gnn_random_graphs", "101.00 GiB", "1.010", "123456", "1234.6", "1234.5", "112.5"] {
            assert!(text.contains(figure), "{figure}:\n{text}");
        }
        assert!(!text.contains("options") && !text.contains("OOMs") && !text.contains("pass"), "{text}");
        let refused = shown(&Row { warm_ooms: 7, config: "backing:segments".into(), ..row });
        let lines: Vec<&str> = refused.lines().collect();
        assert!(lines[0].contains("options") && lines[0].contains("OOMs"), "{refused}");
        assert!(refused.contains("backing:segments") && refused.contains("  7  "), "{refused}");
    }
}
