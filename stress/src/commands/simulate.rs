//! `simulate`: random programs of several threads, each fixed by a seed, under a deterministic
//! schedule.

use std::ops::Range;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::cli::SimulateArgs;
use crate::commands::hundredths;
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::simulate::{self, Counts, Failed, Plan};
use crate::table::in_terminal;
use crate::text::{Bytes, plural};

/// Failures after which a run stops.
const FAILURES_MAX: u64 = 10;

/// The result. `simulate --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub first_seed: u64,
    pub seeds: u64,
    pub failures: u64,
    pub failed_seeds: Vec<u64>,
    pub steps: u64,
    pub safety_checks: u64,
    pub liveness_checks: u64,
    pub needless_waits: u64,
    pub lent_bytes: u64,
    pub turns: u64,
    pub driver_calls: u64,
    pub virtual_seconds: f64,
    pub seconds: f64,
    pub seeds_per_s: f64,
}

/// Runs the command.
///
/// # Errors
/// When standard output cannot be written.
pub fn run(session: &Session, args: &SimulateArgs) -> Result<Outcome, Failure> {
    // Panics are found and reported with their seed.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let seeds = match args.replay {
        Some(seed) => seed..seed.saturating_add(1),
        None => args.seeds.clone(),
    };
    let row = run_seeds(session, args, seeds);
    std::panic::set_hook(hook);
    session.row(&row)?;
    session.show(in_terminal(&format!(
        "{}, from {} on: {} in {}, {} steps, {} driver calls, {:.0} s of virtual time, {:.0} seeds a second\n\
         {} checks of safety, {} of liveness; {} waited with memory to spare; idle graphs lent {}",
        plural(row.seeds, "seed"),
        row.first_seed,
        plural(row.failures, "failure"),
        format_args!("{:.1} s", row.seconds),
        row.steps,
        row.driver_calls,
        row.virtual_seconds,
        row.seeds_per_s,
        row.safety_checks,
        row.liveness_checks,
        plural(row.needless_waits, "request"),
        Bytes(row.lent_bytes),
    )))?;
    Ok(if row.failures > 0 { Outcome::Failed } else { Outcome::Done })
}

fn run_seeds(session: &Session, args: &SimulateArgs, seeds: Range<u64>) -> Row {
    let start = Instant::now();
    let end = args.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    let mut row = Row { first_seed: seeds.start, ..Row::default() };
    let mut time_ns = 0;
    let progress = session.progress(seeds.end.saturating_sub(seeds.start), "simulate");
    for seed in seeds {
        if end.is_some_and(|end| start.elapsed() >= end) || row.failures >= FAILURES_MAX {
            break;
        }
        row.seeds += 1;
        progress.inc(1);
        match simulate::run(&Plan::of_seed(seed)) {
            Ok(Counts { steps, safety, liveness, needless_waits, lent_bytes, turns, calls, time_ns: time, .. }) => {
                row.steps += steps;
                row.safety_checks += safety;
                row.liveness_checks += liveness;
                row.needless_waits += needless_waits;
                row.lent_bytes += lent_bytes;
                row.turns += turns;
                row.driver_calls += calls;
                time_ns += time;
            }
            Err(failure) => {
                row.failures += 1;
                row.failed_seeds.push(seed);
                progress.suspend(|| report(session, seed, failure));
            }
        }
    }
    progress.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    row.virtual_seconds = Duration::from_nanos(time_ns).as_secs_f64();
    row.seconds = hundredths(seconds);
    row.seeds_per_s = hundredths(row.seeds as f64 / seconds.max(f64::MIN_POSITIVE));
    row
}

fn report(session: &Session, seed: u64, failure: Failed) {
    session.message(format_args!("seed {seed} fails: {}\n  aquifer-stress simulate --replay {seed}", failure.what));
    let (plan, failure) = simulate::shrink(Plan::of_seed(seed), failure);
    session.message(format_args!(
        "made smaller, to {}: {}\n{plan}",
        plural(plan.step_count() as u64, "step"),
        failure.what
    ));
}
