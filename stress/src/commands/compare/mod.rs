//! `compare`: recorded programs under several options side by side.

mod summary;

use std::path::Path;

use crate::cli::CompareArgs;
use crate::commands::fit::{fit_all, found, jobs, show_rows, with_splitting, without_same};
use crate::commands::replay::{self, Replayed};
use crate::commands::{all_programs, failed, options, out_of_memory};
use crate::exit::{Failure, Outcome};
use crate::plot::{Axis, Points, save_points};
use crate::row::Row;
use crate::session::Session;
use crate::text::Bytes;
use summary::{Compared, Summary, summaries};

/// The options that are compared by default: PyTorch's, with expandable segments, memory that
/// streams share, and mapped memory.
const CONFIGS: [&str; 4] = ["backing:pytorch", "backing:expandable", "backing:segments", "backing:paged"];

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, or standard output cannot be written.
pub fn run(session: &Session, args: &CompareArgs) -> Result<Outcome, Failure> {
    let configs = with_splitting(&session.configs_or(&CONFIGS));
    let mut outcome = Outcome::Done;
    let programs = all_programs(session, &args.recordings.files, &mut outcome);
    let jobs = jobs(&programs, &configs);
    // Searches use several threads, so they end before anything is timed.
    let fits = fit_all(session, &jobs);
    let mut rows = Vec::new();
    let beside = replay::Beside { yardstick: true, ..Default::default() };
    for (job, fit) in jobs.iter().zip(fits) {
        let smallest = found(session, job, fit, &mut outcome);
        match replay::replay(session, job, &args.passes, beside) {
            Ok((Replayed { run, .. }, _)) => {
                outcome = outcome.max(run.outcome());
                rows.push(Compared::new(job, smallest.map(|fit| fit.smallest_device_bytes), run));
            }
            Err(failure) => failed(session, job.name, &failure, &mut outcome),
        }
    }
    without_same(
        &mut rows,
        &configs,
        |row| &row.config,
        |row| (row.trace.clone(), row.smallest_device_bytes, row.run.refused()),
    );
    for row in &rows {
        if row.run.refused() > 0 {
            let more = ", so this run is left out of the means";
            session.message(out_of_memory(&row.trace, &row.config, row.run.refused_in_pass(), more));
        }
    }
    show_rows(session, &rows, &configs, |row| &row.config)?;
    let means = summaries(&rows);
    show_rows(session, &means, &configs, |mean| &mean.config)?;
    if !rows.is_empty() {
        let title = |row: &Compared| format!("{} uses at most {}:", row.trace, Bytes(row.peak_requested_bytes));
        session.show(Compared::table(&rows).grouped(rows.iter().map(title)))?;
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

/// The help of the keys.
pub(crate) fn help() -> String {
    [Compared::help(), Summary::help()].join("\n")
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
