//! `replay`: the memory, driver calls and time of a recorded program.

mod timing;

use std::collections::BTreeMap;

use aquifer::memory::{MemoryStats, Snapshot};
use aquifer_trace::input::Program;
use aquifer_trace::profile::Profile;
use aquifer_trace::{Aquifer, Costs, FirstRefusal, Observed, OnOom, Player, PyTorch, Spent};

use crate::cli::{ConfigArg, PassArgs, ReplayArgs};
use crate::commands::fit::{Job, WithSplitting, fit_all, jobs};
use crate::commands::study::answers::{held_by, too_large};
use crate::commands::study::asked_bytes;
use crate::commands::{
    all_programs, failed, hundredths, options, out_of_memory, ratio, record_history, save, us, violations,
};
use crate::exit::{Failure, Outcome};
use crate::lag_bound::lag_bound;
use crate::map::Style;
use crate::opened::Opened;
use crate::row::{Row, row};
use crate::session::Session;
use crate::table::{Table, bytes, factor, in_terminal, ms, number, optional, tenths};
use crate::text::Bytes;
use timing::{Pool, Replay};

pub(crate) use timing::Beside;

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written, and when a snapshot is to be saved of several programs
/// or under several options.
pub fn run(session: &Session, args: &ReplayArgs) -> Result<Outcome, Failure> {
    let (files, configs) = (args.recordings.files.len(), session.configs().len());
    if args.snapshot.is_some() && (files, configs) != (1, 1) {
        let given = if files > 1 { format!("{files} files") } else { format!("{configs} of --config") };
        return Err(Failure::Usage(format!("--snapshot takes one program and one --config, not {given}")));
    }
    if let Some(config) = session.configs().iter().find(|config| args.snapshot.is_some() && config.pytorch.is_some()) {
        return Err(Failure::Usage(format!(
            "--snapshot saves what Aquifer has, and --config '{}' asks for a model of PyTorch's allocator: use --snapshot \
             with options of Aquifer, or leave it out; report makes a page of what PyTorch's allocator holds",
            config.text
        )));
    }
    let beside = Beside { yardstick: args.yardstick, driver_pool: args.driver_pool };
    let mut outcome = Outcome::Done;
    let programs = all_programs(session, &args.recordings.files, &mut outcome);
    if args.snapshot.is_some() && programs.len() > 1 {
        let (file, number) = (args.recordings.files[0].display(), programs.len());
        return Err(Failure::Usage(format!("--snapshot takes one program, and {file} has {number}")));
    }
    let mut rows = Vec::new();
    for job in jobs(&programs, session.configs()) {
        let name = job.name;
        let (row, refusal) = match replay(session, &job, &args.passes, beside) {
            Ok(replayed) => replayed,
            Err(failure) => {
                failed(session, name, &failure, &mut outcome);
                continue;
            }
        };
        let mut split = None;
        // A row of frames that were not split would have the same figures.
        if let Some(config) = job.config.splitting().filter(|_| row.run.refused() > 0) {
            match replay(session, &Job { config: &config, ..job }, &args.passes, beside) {
                Ok((row, _)) => split = Some(row).filter(|row| row.details.frames_split > 0),
                Err(failure) => failed(session, name, &failure, &mut outcome),
            }
        }
        if let Some(path) = &args.snapshot {
            let snapshot = snapshot(session, job.program, job.config, args.passes.lag);
            if let Err(failure) = snapshot.and_then(|snapshot| save(session, &snapshot, path)) {
                failed(session, name, &failure, &mut outcome);
            }
        }
        if row.run.refused() > 0 {
            let more = " in one pass; the command fit finds the smallest device";
            if let Some(why) = asked_bytes(session).and_then(|bytes| too_large(job.program.peak_requested_bytes, bytes))
            {
                session.message(format_args!("{name}: {why}. {}", held_by(&Profile::of(job.program))));
            }
            session.message(if session.is_default_device() {
                larger(session, job)?
            } else {
                out_of_memory(name, &job.config.text, row.run.refused_in_pass(), more)
            });
        }
        if let Some(refusal) = refusal {
            session.show(refused(name, &refusal))?;
        }
        session.row(&WithSplitting { row: &row, with_split_frames: split.as_ref() })?;
        for row in std::iter::once(row).chain(split) {
            outcome = outcome.max(row.run.outcome());
            rows.push(row);
        }
    }
    if !rows.is_empty() {
        session.show(tabulate(&rows))?;
    }
    Ok(outcome)
}

row! {
    /// Counts are of the first pass unless stated otherwise. The table has the ratios of the first and
    /// the last pass if they differ from the greatest, and neither memory nor ratios of a program that
    /// was refused a request. Such a program with split_frames:off, the default, has another row with
    /// split_frames:on if frames were split then; in JSON that is the key with_split_frames, else null.
    ///
    /// Times are taken in separate passes on another device, where nothing is counted; they include
    /// neither reading the file nor freeing leftover blocks of a pass. Modelled times are those of the
    /// simulator's cost model, and null on a real device. Measured times are of the first counted pass,
    /// without the counting itself.
    ///
    /// JSON keys, per program and config
    #[derive(Default)]
    pub(crate) struct Replayed {
        /// the program
        pub(super) trace: String => ["program"],
        /// the options
        pub(super) config: String => ["options", |row| options(&row.config)],
        /// the device
        device: String,
        /// by how many events the device lagged behind
        lag: u64,
        #[serde(flatten)]
        pub(super) run: Run,
        /// with --lag, the least that reserved_over_requested can be in one pass if nothing waits for
        /// the device: the most, over all times, of the sum over streams of the most that was live on
        /// the stream within the last LAG events
        lag_bound_over_requested: Option<f64> => ["bound", |row| number(row.lag_bound_over_requested, 3)],
        /// waits of the host for a device that lagged behind (--lag)
        stalls: u64 => ["stalls"],
        #[serde(flatten)]
        details: Details,
        #[serde(flatten)]
        pool: Pool,
        /// the most memory that the program had requested and not yet freed
        peak_requested_bytes: u64
            => ["holds, first pass", |row| row.ratio(<[u64]>::first)]
            => ["holds, last pass", |row| row.ratio(<[u64]>::last)]
            => ["requested", bytes],
    }
}

row! {
    /// A program under some options, as `replay` and `compare` show it
    #[derive(Default)]
    pub(crate) struct Run {
        /// the most memory that was held from the device, in any pass
        pub(super) peak_reserved_bytes: u64 => ["holds", |run| bytes(run.served(Some(run.peak_reserved_bytes)))],
        /// ratio of peak_reserved_bytes to peak_requested_bytes
        pub(super) reserved_over_requested: Option<f64>
            => ["holds, ratio", |run| factor(run.served(run.reserved_over_requested))],
        /// the most memory that was held in each pass, including the first
        pub(super) peak_reserved_bytes_by_pass: Vec<u64>,
        /// requests refused; the other figures are then those of the served requests
        pub(super) ooms: u64 => ["OOMs"],
        /// requests refused in the later passes, all together
        pub(super) warm_ooms: u64 => ["later OOMs"],
        /// pieces of work that the simulated device found unordered, and memory released before the
        /// device was done with it, in all passes and at the end; 0 unless there is a bug
        pub(super) violations: u64 => ["violations"],
        #[serde(skip)]
        pub(super) calls: Option<u64> => ["driver calls", |run| optional(run.served(run.calls))],
        /// time per event: the median of the passes after the first, or the first if it is the only
        /// one; null, like the next key, if the program has no events
        pub(super) ns_per_op: Option<f64> => ["ns/op", tenths],
        /// time per event of offset-allocator; null without --yardstick
        pub(super) yardstick_ns_per_op: Option<f64> => ["times yardstick", |run| number(run.times_yardstick(), 2)],
        /// time that all driver calls would take on a real device, by the simulator's cost model
        pub(super) driver_time_modelled_us: Option<f64>
            => ["driver ms, modelled", |run| ms(run.served(run.driver_time_modelled_us))],
        /// driver calls of a later pass, in the mean; null if there is only one pass
        pub(super) warm_driver_calls: Option<f64>
            => ["later driver calls", |run| tenths(run.served(run.warm_driver_calls))],
        /// their modelled time
        pub(super) warm_driver_time_modelled_us: Option<f64>
            => ["later driver ms, modelled", |run| ms(run.served(run.warm_driver_time_modelled_us))],
        /// the most modelled time within one allocation
        pub(super) worst_alloc_us: Option<f64>
            => ["worst µs, modelled", |run| number(run.served(run.worst_alloc_us), 0)],
        /// allocations in one pass
        pub(super) allocs: u64,
    }
}

row! {
    /// Figures that only `replay` has
    #[derive(Default)]
    struct Details {
        /// allocations, frees and uses on other streams in one pass
        events: u64,
        /// the most memory that was allocated, in any pass: what was requested, after rounding
        peak_allocated_bytes: u64,
        /// time per event of the first pass, which takes the memory from the device
        first_pass_ns_per_op: Option<f64>,
        /// time of all these passes together
        seconds: f64,
        /// driver calls by name, without those of the setup
        driver_calls: BTreeMap<&'static str, u64>,
        /// number of driver calls in each pass, including the first
        driver_calls_by_pass: Vec<u64>,
        /// modelled time of the driver calls of each pass
        driver_time_modelled_us_by_pass: Vec<f64>,
        /// allocations during which the driver was asked to allocate, create, map or make accessible
        driver_allocs: u64,
        /// on a real device: host time of these allocations, with everything that they do
        driver_allocs_measured_us: Option<f64>,
        /// on a real device: the most of that time within one allocation
        worst_alloc_measured_us: Option<f64>,
        /// the same as driver_allocs for a later pass, in the mean; null if there is only one pass
        warm_driver_allocs: Option<f64>,
        /// the greatest worst_alloc_us of the later passes
        warm_worst_alloc_us: Option<f64>,
        /// stalls of a later pass, in the mean
        warm_stalls: Option<f64>,
        /// how often memory was moved to where contiguous addresses were needed, in all passes
        remaps: u64,
        /// granules that moved
        granules_moved: u64,
        /// frames that were partly in use and were split, as memory would have been refused otherwise
        frames_split: u64,
        /// times that all cached memory was released to try again, in all passes
        retries: u64,
        /// events that ordering streams after each other took
        events_recorded: u64,
        /// waits that this took
        stream_waits: u64,
    }
}

/// The message about a program that does not finish on the default device. It names a simulated
/// device on which it does.
fn larger(session: &Session, job: Job<'_>) -> Result<String, Failure> {
    let (name, default) = (job.name, session.device_text());
    let simulated = if session.sim().is_none() { Some(session.simulated("fit")?.for_measuring()) } else { None };
    let config = job.config.clone().trial();
    let fit = fit_all(simulated.as_ref().unwrap_or(session), &[Job { config: &config, ..job }]).pop().transpose();
    Ok(match fit {
        Ok(Some(fit)) => {
            let gib = fit.smallest_device_bytes.div_ceil(1 << 30);
            format!("note: {name} does not finish on {default}, the default; it does with --device sim:{gib}GiB")
        }
        Err(Failure::OutOfMemory(why)) => format!("note: {name}: {why}"),
        Ok(None) => format!("note: {name} does not finish with these options on any simulated device"),
        Err(failure) => return Err(failure),
    })
}

/// Replays a program twice, each time in several passes: timed, and observed.
pub(super) fn replay(
    session: &Session,
    job: &Job<'_>,
    passes: &PassArgs,
    beside: Beside,
) -> Result<(Replayed, Option<FirstRefusal>), Failure> {
    let bar = session.progress(2 * u64::from(passes.repeat), job.name);
    let replay = Replay { session, job, passes, beside, bar: &bar };
    let (times, observed) = match &job.config.pytorch {
        None => (replay.time::<Aquifer>()?, observe::<Aquifer>(&replay)?),
        Some(_) => (replay.time::<PyTorch>()?, observe::<PyTorch>(&replay)?),
    };
    bar.finish_and_clear();
    let (program, config) = (job.program, job.config);
    let Observations { costs, stats, ooms, warm_ooms, violations, first_refusal } = observed;
    let peak = |of: fn(&Costs) -> u64| costs.iter().map(of).max().unwrap_or(0);
    let (reserved, requested) = (peak(|costs| costs.peaks.0), program.peak_requested_bytes);
    let (first, warm) = costs.split_first().map_or((None, &[][..]), |(first, warm)| (Some(first), warm));
    let modelled = first.and_then(|costs| costs.modelled);
    let measured = first.and_then(|costs| costs.measured);
    let warm_modelled: Vec<Spent> = warm.iter().filter_map(|costs| costs.modelled).collect();
    let calls = first.iter().flat_map(|costs| costs.calls.iter());
    let run = Run {
        peak_reserved_bytes: reserved,
        reserved_over_requested: ratio(reserved, requested),
        peak_reserved_bytes_by_pass: costs.iter().map(|costs| costs.peaks.0).collect(),
        ooms,
        warm_ooms,
        violations,
        calls: first.map(|costs| costs.calls.total()),
        ns_per_op: times.ours.later().map(hundredths),
        yardstick_ns_per_op: times.yardstick.and_then(|times| times.later()).map(hundredths),
        driver_time_modelled_us: modelled.map(|modelled| us(modelled.total_ns)),
        warm_driver_calls: mean(warm.iter().map(|costs| costs.calls.total())),
        warm_driver_time_modelled_us: mean(warm_modelled.iter().map(|modelled| modelled.total_ns))
            .map(|ns| hundredths(ns / 1e3)),
        worst_alloc_us: modelled.map(|modelled| us(modelled.worst_alloc_ns)),
        allocs: first.map_or(0, |costs| costs.allocs),
    };
    let details = Details {
        events: program.operations(),
        peak_allocated_bytes: peak(|costs| costs.peaks.1),
        first_pass_ns_per_op: times.ours.first().map(hundredths),
        seconds: times.ours.all().as_secs_f64(),
        driver_calls: calls.map(|(operation, count)| (operation.name(), count)).collect(),
        driver_calls_by_pass: costs.iter().map(|costs| costs.calls.total()).collect(),
        driver_time_modelled_us_by_pass: costs.iter().filter_map(|costs| Some(us(costs.modelled?.total_ns))).collect(),
        driver_allocs: first.map_or(0, |costs| costs.driver_allocs),
        driver_allocs_measured_us: measured.map(|measured| us(measured.total_ns)),
        worst_alloc_measured_us: measured.map(|measured| us(measured.worst_alloc_ns)),
        warm_driver_allocs: mean(warm.iter().map(|costs| costs.driver_allocs)),
        warm_worst_alloc_us: warm_modelled.iter().map(|modelled| modelled.worst_alloc_ns).max().map(us),
        warm_stalls: mean(warm.iter().map(|costs| costs.stalls)),
        remaps: stats.remaps,
        granules_moved: stats.granules_moved,
        frames_split: stats.frames_split,
        retries: stats.num_alloc_retries,
        events_recorded: first.map_or(0, |costs| costs.timeline.events_recorded),
        stream_waits: first.map_or(0, |costs| costs.timeline.waits_inserted),
    };
    let row = Replayed {
        trace: job.name.to_owned(),
        config: config.text.clone(),
        device: session.device_text().to_owned(),
        lag: passes.lag,
        lag_bound_over_requested: Some(passes.lag)
            .filter(|&lag| lag > 0)
            .and_then(|lag| ratio(lag_bound(program, lag), requested)),
        stalls: first.map_or(0, |costs| costs.stalls),
        run,
        details,
        pool: times.driver_pool.unwrap_or_default(),
        peak_requested_bytes: requested,
    };
    Ok((row, first_refusal))
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

fn observe<S: Opened>(replay: &Replay<'_>) -> Result<Observations, Failure> {
    let Replay { session, job, passes, bar, .. } = replay;
    let mut subject = S::observed(session, job.config, job.program.streams.len(), passes.lag)?;
    let mut player = Player::new(job.program);
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
    Ok(Observations {
        costs,
        stats,
        ooms,
        warm_ooms,
        violations: violations(session, job.name, &device),
        first_refusal,
    })
}

/// The mean, if there are counts.
#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52, and a rounded one would do")]
fn mean(counts: impl ExactSizeIterator<Item = u64>) -> Option<f64> {
    let number = counts.len();
    (number > 0).then(|| hundredths(counts.sum::<u64>() as f64 / number as f64))
}

impl Run {
    pub(super) fn outcome(&self) -> Outcome {
        match self {
            Run { violations: 1.., .. } => Outcome::Violations,
            _ if self.refused() > 0 => Outcome::OutOfMemory,
            _ => Outcome::Done,
        }
    }

    /// Requests refused in the first pass, or else in the later ones.
    pub(super) fn refused_in_pass(&self) -> u64 {
        if self.ooms > 0 { self.ooms } else { self.warm_ooms }
    }

    /// Requests refused in all passes.
    pub(super) fn refused(&self) -> u64 {
        self.ooms.saturating_add(self.warm_ooms)
    }

    /// A figure that would be too low if a request had been refused.
    pub(super) fn served<T>(&self, figure: Option<T>) -> Option<T> {
        figure.filter(|_| self.refused() == 0)
    }

    pub(super) fn times_yardstick(&self) -> Option<f64> {
        Some(self.ns_per_op? / self.yardstick_ns_per_op?)
    }
}

impl Replayed {
    /// The ratio of what a pass held to what is requested, unless all passes held the same.
    fn ratio(&self, pass: fn(&[u64]) -> Option<&u64>) -> String {
        let passes = &self.run.peak_reserved_bytes_by_pass;
        let held = pass(passes).filter(|_| passes.iter().any(|&held| held != self.run.peak_reserved_bytes));
        factor(self.run.served(held.and_then(|&held| ratio(held, self.peak_requested_bytes))))
    }
}

fn tabulate(rows: &[Replayed]) -> Table {
    let has_options = rows.iter().any(|row| !row.config.is_empty());
    let cells = rows.iter().map(Row::cells);
    Table::new(
        cells.map(|row| row.into_iter().filter(|(name, _)| has_options || *name != "options").collect()).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_that_decide_fit_into_80_columns() {
        let run = Run {
            peak_reserved_bytes: 101 << 30,
            reserved_over_requested: Some(1.01),
            peak_reserved_bytes_by_pass: vec![101 << 30; 5],
            calls: Some(123_456),
            ns_per_op: Some(1234.5),
            driver_time_modelled_us: Some(1_234_567.0),
            warm_driver_calls: Some(112.5),
            ..Run::default()
        };
        let (trace, peak_requested_bytes) = ("gnn_random_graphs".to_owned(), 100 << 30);
        let row = Replayed { trace, peak_requested_bytes, run, ..Replayed::default() };
        let shown = |row: &Replayed| tabulate(std::slice::from_ref(row)).render(Some(80));
        let text = shown(&row);
        for figure in ["gnn_random_graphs", "101.00 GiB", "1.010", "123456", "1234.6", "1234.5", "112.5"] {
            assert!(text.contains(figure), "{figure}:\n{text}");
        }
        assert!(!text.contains("options") && !text.contains("OOMs") && !text.contains("pass"), "{text}");
        let refused =
            shown(&Replayed { config: "backing:segments".into(), run: Run { warm_ooms: 7, ..row.run.clone() }, ..row });
        let lines: Vec<&str> = refused.lines().collect();
        assert!(lines[0].contains("options") && lines[0].contains("OOMs"), "{refused}");
        assert!(refused.contains("backing:segments") && refused.contains("  7  "), "{refused}");
    }
}
