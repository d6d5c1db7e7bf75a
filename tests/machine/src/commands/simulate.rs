//! `simulate`: random programs of several threads, each fixed by a seed, under a deterministic
//! schedule.

use std::ops::Range;
use std::time::{Duration, Instant};

use aquifer_machine::{self as machine, Counts, Failed, Plan};
use serde::Serialize;

use super::{Outcome, minutes};

/// Failures after which a run stops.
const FAILURES_MAX: usize = 10;

/// Arguments of `simulate`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = KEYS)]
pub(crate) struct Args {
    /// The seeds, from A up to B - 1.
    #[arg(long, value_name = "A..B", default_value = "0..1000", value_parser = seeds)]
    seeds: Range<u64>,

    /// Stop after N minutes (a fraction is allowed).
    #[arg(long, value_name = "N", value_parser = minutes)]
    minutes: Option<f64>,

    /// Run one seed alone.
    #[arg(long, value_name = "SEED", conflicts_with = "seeds")]
    replay: Option<u64>,
}

const KEYS: &str = "\
A seed fixes a program: a device, the options of its allocator, the steps of one to four threads,
their schedule, the order of the device's work, and the faults. Each program is run on a device of
its own. One that fails is printed, made as small as it can be with the failure.

JSON keys:
  first_seed, seeds         the first seed, and the number of seeds that were run
  failures, failed_seeds    the number of programs that failed, and their seeds; 10 end the run
  steps                     steps of all threads
  safety_checks             contents compared, looks for races and misuse, statistics read
  liveness_checks           refusals that were found right, and requests that had to be served
  needless_waits            requests that waited although far more memory than they need was free
  lent_bytes                bytes of memory of idle graphs that served other requests
  turns                     how often the schedule passed from thread to thread
  driver_calls              calls of the simulated driver
  virtual_seconds           time of the simulated devices
  seconds, seeds_per_s      time of the run, and its rate";

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let parsed = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parsed
        .filter(|seeds| !seeds.is_empty())
        .ok_or_else(|| "expected two whole numbers A..B, the smaller one first, such as 0..1000".into())
}

/// The result. `simulate --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    first_seed: u64,
    seeds: u64,
    failures: usize,
    failed_seeds: Vec<u64>,
    steps: u64,
    safety_checks: u64,
    liveness_checks: u64,
    needless_waits: u64,
    lent_bytes: u64,
    turns: u64,
    driver_calls: u64,
    virtual_seconds: f64,
    seconds: f64,
    seeds_per_s: f64,
}

/// Runs the command.
pub(crate) fn run(args: &Args) -> Outcome {
    // Panics are found and reported with their seed.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let row = run_seeds(args);
    std::panic::set_hook(hook);
    let text = format!(
        "{} seeds, from {} on: {} failures in {:.1} s, {} steps, {} driver calls, {:.0} s of virtual time, {:.0} \
         seeds a second\n\
         {} checks of safety, {} of liveness; {} requests waited with memory to spare; idle graphs lent {} bytes",
        row.seeds,
        row.first_seed,
        row.failures,
        row.seconds,
        row.steps,
        row.driver_calls,
        row.virtual_seconds,
        row.seeds_per_s,
        row.safety_checks,
        row.liveness_checks,
        row.needless_waits,
        row.lent_bytes,
    );
    (row.failures == 0, serde_json::to_string(&row).unwrap_or_default(), text)
}

#[expect(clippy::cast_precision_loss, reason = "a rate to display")]
fn run_seeds(args: &Args) -> Row {
    let (start, mut time_ns) = (Instant::now(), 0);
    let end = args.minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    let seeds = args.replay.map_or(args.seeds.clone(), |seed| seed..seed.saturating_add(1));
    let mut row = Row { first_seed: seeds.start, ..Row::default() };
    for seed in seeds {
        if end.is_some_and(|end| start.elapsed() >= end) || row.failures >= FAILURES_MAX {
            break;
        }
        row.seeds += 1;
        match machine::run(&Plan::of_seed(seed)) {
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
                report(seed, failure);
            }
        }
    }
    row.virtual_seconds = Duration::from_nanos(time_ns).as_secs_f64();
    row.seconds = start.elapsed().as_secs_f64();
    row.seeds_per_s = row.seeds as f64 / row.seconds.max(f64::MIN_POSITIVE);
    row
}

fn report(seed: u64, failure: Failed) {
    eprintln!("seed {seed} fails: {}\n  aquifer-machine simulate --replay {seed}", failure.what);
    let (plan, failure) = machine::shrink(Plan::of_seed(seed), failure);
    eprintln!("made smaller, to {} steps: {}\n{plan}", plan.step_count(), failure.what);
}
