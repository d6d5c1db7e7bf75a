//! `compare`: recorded programs under several options side by side, with figures of PyTorch.

mod pytorch;
mod summary;

use std::path::Path;

use aquifer_trace::input::Program;
use serde::Serialize;

use crate::cli::{CompareArgs, ConfigArg};
use crate::commands::fit::{Job, fit_all, with_splitting, without_same};
use crate::commands::{all_programs, options, out_of_memory, ratio, replay};
use crate::exit::{Failure, Outcome};
use crate::plot::{Axis, Points, save_points};
use crate::session::Session;
use crate::table::{Table, number, optional, table};
use crate::text::Bytes;
use summary::{Summary, summaries};

/// The options that are compared by default: PyTorch's, with expandable segments, memory that
/// streams share, and mapped memory.
const CONFIGS: [&str; 4] = ["backing:pytorch", "backing:expandable", "backing:segments", "backing:paged"];

/// A program under some options, or in PyTorch. `compare --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    trace: String,
    config: String,
    peak_requested_bytes: u64,
    peak_reserved_bytes: u64,
    reserved_over_requested: Option<f64>,
    peak_reserved_bytes_by_pass: Option<Vec<u64>>,
    first_pass_reserved_over_requested: Option<f64>,
    smallest_device_bytes: Option<u64>,
    smallest_over_requested: Option<f64>,
    allocs: u64,
    driver_calls: Option<u64>,
    warm_driver_calls: Option<f64>,
    driver_time_modelled_us: Option<f64>,
    warm_driver_time_modelled_us: Option<f64>,
    worst_alloc_us: Option<f64>,
    ns_per_op: Option<f64>,
    yardstick_ns_per_op: Option<f64>,
    ooms: u64,
    warm_ooms: u64,
    violations: u64,
}

/// A line of JSON.
#[derive(Debug, Serialize)]
#[serde(tag = "row", rename_all = "snake_case")]
enum Line<'a> {
    Trace(&'a Row),
    Mean(&'a Summary),
}

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, PyTorch's figures cannot be read, or standard output cannot be
/// written.
pub fn run(session: &Session, args: &CompareArgs) -> Result<Outcome, Failure> {
    let recorded = args.pytorch.as_deref().map(pytorch::load).transpose()?;
    let mut configs: Vec<ConfigArg> = Vec::new();
    for config in session.configs_or(&CONFIGS) {
        // Repeated options would count every program twice.
        if configs.iter().all(|known| known.text != config.text) {
            configs.push(config);
        }
    }
    let configs = with_splitting(&configs);
    let mut outcome = Outcome::Done;
    let programs = all_programs(session, &args.files, &mut outcome);
    let jobs: Vec<Job<'_>> = programs
        .iter()
        .flat_map(|(name, program)| configs.iter().map(move |config| Job::new(name, program, config)))
        .collect();
    // Searches use several threads, so they end before anything is timed.
    let fits = fit_all(session, &jobs);
    let mut rows = Vec::new();
    let beside = replay::Beside { yardstick: true, ..Default::default() };
    for (jobs, fits) in jobs.chunks(configs.len()).zip(fits.chunks(configs.len())) {
        for (job, fit) in jobs.iter().zip(fits) {
            let mut failed = |failure: &Failure| {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {}: {failure}", job.name));
            };
            let smallest = match fit {
                Ok(row) => Some(row.smallest_device_bytes),
                // The same options without splitting fit nowhere, either, which is reported.
                Err(Failure::OutOfMemory(_)) if job.config.is_trial => None,
                Err(failure) => {
                    failed(failure);
                    None
                }
            };
            match replay::replay(session, job.name, job.program, job.config, &args.passes, beside) {
                Ok((replayed, _)) => {
                    outcome = outcome.max(replayed.outcome());
                    rows.push(Row::new(&replayed, job.program, smallest));
                }
                Err(failure) => failed(&failure),
            }
        }
        let Some(job) = jobs.first() else { continue };
        match recorded.as_ref().map(|recorded| recorded.rows(job.name, job.program)) {
            Some(Ok(recorded)) => rows.extend(recorded),
            Some(Err(missing)) => session.message(missing),
            None => {}
        }
    }
    without_same(
        &mut rows,
        &configs,
        |row| &row.config,
        |row| (row.trace.clone(), row.smallest_device_bytes, row.refused()),
    );
    for row in &rows {
        if !row.finished() {
            session.message(row.failed());
        }
        session.row(&Line::Trace(row))?;
    }
    let means = summaries(&rows);
    for mean in &means {
        session.row(&Line::Mean(mean))?;
    }
    if !rows.is_empty() {
        session.show(tabulate(&rows))?;
        // The means of one program are its own figures.
        if rows.iter().any(|row| row.trace != rows[0].trace) {
            session.show(format_args!("\n{}", summary::tabulate(&means)))?;
        }
        if let Some(path) = &args.plot {
            plot(session, &means, path)?;
        }
    }
    Ok(outcome)
}

/// Draws what each of the options holds against its time in driver calls.
fn plot(session: &Session, means: &[Summary], path: &Path) -> Result<(), Failure> {
    let series = means.iter().filter_map(|mean| {
        let us = mean.driver_time_modelled_us?;
        Some((options(&mean.config), us / 1e3, mean.reserved_over_requested?))
    });
    let points = Points {
        title: "Memory held against driver time: less of both is better",
        across: Axis { name: "driver time of the first passes, modelled, ms", is_logarithmic: true, from: None },
        up: Axis { name: "holds / requested, geometric mean", is_logarithmic: false, from: Some(1.0) },
        series: series.collect(),
    };
    save_points(session, &points, path)
}

impl Row {
    fn new(replayed: &replay::Row, program: &Program, smallest: Option<u64>) -> Row {
        Row {
            trace: replayed.trace.clone(),
            config: replayed.config.clone(),
            peak_requested_bytes: replayed.peak_requested_bytes,
            peak_reserved_bytes: replayed.peak_reserved_bytes,
            reserved_over_requested: replayed.reserved_over_requested,
            peak_reserved_bytes_by_pass: Some(replayed.peak_reserved_bytes_by_pass.clone()),
            first_pass_reserved_over_requested: replayed
                .peak_reserved_bytes_by_pass
                .first()
                .and_then(|&held| ratio(held, program.peak_requested_bytes)),
            smallest_device_bytes: smallest,
            smallest_over_requested: smallest.and_then(|bytes| ratio(bytes, program.peak_requested_bytes)),
            allocs: replayed.allocs,
            driver_calls: Some(replayed.driver_calls.values().sum()),
            warm_driver_calls: replayed.warm_driver_calls,
            driver_time_modelled_us: replayed.driver_time_modelled_us,
            warm_driver_time_modelled_us: replayed.warm_driver_time_modelled_us,
            worst_alloc_us: replayed.worst_alloc_us,
            ns_per_op: replayed.ns_per_op,
            yardstick_ns_per_op: replayed.yardstick_ns_per_op,
            ooms: replayed.ooms,
            warm_ooms: replayed.warm_ooms,
            violations: replayed.violations,
        }
    }

    /// Whether every request of every pass was served. Otherwise other figures are too low.
    fn finished(&self) -> bool {
        self.refused() == 0
    }

    /// A figure, if every request was served.
    fn served<T>(&self, figure: T) -> Option<T> {
        self.finished().then_some(figure)
    }

    /// Requests refused in all passes.
    fn refused(&self) -> u64 {
        self.ooms.saturating_add(self.warm_ooms)
    }

    /// The message about a program that did not finish.
    fn failed(&self) -> String {
        out_of_memory(&self.trace, &self.config, self.refused(), ", so this run is left out of the means")
    }
}

/// The rows of each program under its name.
fn tabulate(rows: &[Row]) -> Table {
    let table = table(
        rows,
        1,
        &[
            ("options", |row| options(&row.config).to_owned()),
            ("holds", |row| optional(row.served(row.peak_reserved_bytes).map(Bytes))),
            ("holds, ratio", |row| number(row.served(row.reserved_over_requested).flatten(), 3)),
            ("OOMs", |row| row.refused().to_string()),
            ("smallest device, ratio", |row| number(row.smallest_over_requested, 3)),
            ("driver calls", |row| optional(row.served(row.driver_calls).flatten())),
            ("driver ms, modelled", |row| {
                number(row.served(row.driver_time_modelled_us).flatten().map(|us| us / 1e3), 1)
            }),
            ("ns/op", |row| number(row.ns_per_op, 1)),
            ("later driver calls", |row| number(row.served(row.warm_driver_calls).flatten(), 1)),
            ("smallest device", |row| optional(row.smallest_device_bytes.map(Bytes))),
            ("holds, first pass", |row| number(row.served(row.first_pass_reserved_over_requested).flatten(), 3)),
            ("worst µs, modelled", |row| number(row.served(row.worst_alloc_us).flatten(), 0)),
            ("times yardstick", |row| {
                number(row.ns_per_op.zip(row.yardstick_ns_per_op).map(|(ours, yardstick)| ours / yardstick), 2)
            }),
        ],
    );
    let title = |row: &Row| format!("{} uses at most {}:", row.trace, Bytes(row.peak_requested_bytes));
    table.grouped(rows.iter().map(title))
}
