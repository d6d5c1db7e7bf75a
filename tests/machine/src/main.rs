//! The random programs from the command line.

use std::io::Write;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aquifer_machine::{Counts, Failed, Plan, Subject, run, run_free, shrink};
use clap::{Args, Parser, Subcommand, value_parser};
use serde::Serialize;

/// Runs random programs on a device and checks what they see.
///
/// Results go to standard output, as text or, with --json, as one JSON object. Failures go to
/// standard error. The exit code is 1 if there are any.
#[derive(Debug, Parser)]
#[command(name = "aquifer-machine", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print a JSON object instead of text.
    #[arg(long, global = true)]
    json: bool,

    /// Stop after N minutes (a fraction is allowed).
    #[arg(long, global = true, value_name = "N", value_parser = minutes)]
    minutes: Option<Duration>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put memory under load from many threads, on any device: allocate, write patterns that the
    /// device verifies, hand on, copy, upload, and free.
    Soak(SoakArgs),
    /// Run random programs of several threads under a schedule that a seed fixes, on simulated
    /// devices, and check contents, races, statistics and clean-up.
    Simulate(SimulateArgs),
}

/// Arguments of `simulate`.
#[derive(Debug, Args)]
#[command(after_long_help = KEYS)]
struct SimulateArgs {
    /// The seeds, from A up to B - 1.
    #[arg(long, value_name = "A..B", default_value = "0..1000", value_parser = seeds)]
    seeds: Range<u64>,

    /// Run one seed alone.
    #[arg(long, value_name = "SEED", conflicts_with = "seeds")]
    replay: Option<u64>,
}

/// Arguments of `soak`.
#[derive(Debug, Args)]
#[command(after_long_help = KEYS)]
struct SoakArgs {
    /// Device to run on.
    #[arg(long, value_name = "NAME", default_value = "sim", value_parser = ["sim", "standin", "cuda", "rationed"])]
    device: String,

    /// Options of the allocator.
    #[arg(long, value_name = "OPTIONS", default_value = "", allow_hyphen_values = true)]
    config: String,

    /// The first seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Number of seeds, each with a new allocator. By default one, or as many as --minutes allows.
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(1..))]
    seeds: Option<u64>,

    /// Operations for each seed, of all threads together.
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = value_parser!(u64).range(1..))]
    ops: u64,

    /// Number of threads.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = value_parser!(u16).range(1..=256))]
    threads: u16,

    /// Memory of the device that is used, in MiB.
    #[arg(long = "limit-mb", value_name = "N", default_value_t = 128, value_parser = value_parser!(u64).range(16..=1 << 26))]
    limit: u64,
}

const KEYS: &str = "\
A program that fails is printed; `simulate` makes it as small as it can be with the failure. An
interrupt (Ctrl-C) ends the run early with its figures; a second one ends it at once.

JSON keys:
  first_seed, seeds         the first seed, and the number of seeds that were run
  failures, failed_seeds    the number of programs that failed, and their seeds; 10 end the run
  steps                     steps of all threads
  safety_checks             contents compared, looks for races and misuse, statistics read
  liveness_checks           refusals that were found right, and requests that had to be served
  compared_bytes            bytes of contents that were compared
  ooms                      requests that were refused
  needless_waits            requests that waited although far more memory than they need was free
  lent_bytes                bytes of memory of idle graphs that served other requests
  turns                     how often the schedule passed from thread to thread
  driver_calls              calls of the driver
  device_seconds            time of the devices
  seconds, seeds_per_s      time of the run, and its rate";

/// A number of minutes.
fn minutes(text: &str) -> Result<Duration, String> {
    let minutes = text.parse().ok().filter(|minutes: &f64| *minutes > 0.0 && *minutes <= 1e6);
    let error = || "expected a number of minutes above 0 and up to 1000000, such as 5 or 0.5".to_owned();
    minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0)).ok_or_else(error)
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let parsed = text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    parsed
        .filter(|seeds| !seeds.is_empty())
        .ok_or_else(|| "expected two whole numbers A..B, the smaller one first, such as 0..1000".into())
}

/// The result. The help text explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    first_seed: u64,
    seeds: u64,
    failures: usize,
    failed_seeds: Vec<u64>,
    steps: u64,
    safety_checks: u64,
    liveness_checks: u64,
    compared_bytes: u64,
    ooms: u64,
    needless_waits: u64,
    lent_bytes: u64,
    turns: u64,
    driver_calls: u64,
    device_seconds: f64,
    seconds: f64,
    seeds_per_s: f64,
}

impl Row {
    fn add(&mut self, counts: &Counts) {
        self.steps += counts.steps;
        self.safety_checks += counts.safety;
        self.liveness_checks += counts.liveness;
        self.compared_bytes += counts.compared;
        self.ooms += counts.stats.num_ooms;
        self.needless_waits += counts.needless_waits;
        self.lent_bytes += counts.stats.graph_bytes_lent;
        self.turns += counts.turns;
        self.driver_calls += counts.calls;
        self.device_seconds += Duration::from_nanos(counts.time_ns).as_secs_f64();
    }

    fn text(&self) -> String {
        let Row { first_seed, seeds, failures, steps, safety_checks, liveness_checks, compared_bytes, .. } = self;
        let Row { ooms, needless_waits, lent_bytes, driver_calls, device_seconds, .. } = self;
        let Row { seconds, seeds_per_s, .. } = self;
        format!(
            "{seeds} seeds, from {first_seed} on: {failures} failures in {seconds:.1} s, {seeds_per_s:.0} seeds a \
             second\n{steps} steps, {driver_calls} driver calls, {device_seconds:.0} s of the \
             device; {safety_checks} checks of safety, {liveness_checks} of liveness\n{compared_bytes} bytes compared; \
             {ooms} requests refused, {needless_waits} waited with memory to spare; idle graphs lent {lent_bytes} bytes"
        )
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    // Panics are found and reported with their seed.
    std::panic::set_hook(Box::new(|_| {}));
    let (end, stop) = (cli.minutes.map(|time| Instant::now() + time), at_interrupt());
    let is_over = move || stop.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end);
    let row = match &cli.command {
        Command::Simulate(args) => {
            let seeds = args.replay.map_or(args.seeds.clone(), |seed| seed..seed.saturating_add(1));
            run_seeds(seeds, &is_over, |seed| run(&Plan::of_seed(seed)), simulated)
        }
        Command::Soak(args) => {
            Subject::choose(&args.device);
            let many = if cli.minutes.is_some() { u64::MAX - args.seed } else { 1 };
            let seeds = args.seed..args.seed + args.seeds.unwrap_or(many);
            let plan = |seed| Plan::of_soak(seed, args.limit << 20, &args.config, (args.threads, args.ops));
            run_seeds(seeds, &is_over, |seed| run_free(&plan(seed), is_over.clone()), |_, _| {})
        }
    };
    let text = if cli.json { serde_json::to_string(&row).unwrap_or_default() } else { row.text() };
    let is_written = writeln!(std::io::stdout(), "{text}").is_ok();
    if row.failures == 0 && is_written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A flag that the first interrupt sets. The second one ends the process.
fn at_interrupt() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    // Without them, an interrupt ends the process at once.
    let _ = signal_hook::flag::register_conditional_shutdown(signal_hook::consts::SIGINT, 130, stop.clone());
    let _ = signal_hook::flag::register(signal_hook::consts::SIGINT, stop.clone());
    stop
}

#[expect(clippy::cast_precision_loss, reason = "a rate to display")]
fn run_seeds(
    seeds: Range<u64>,
    is_over: impl Fn() -> bool,
    run: impl Fn(u64) -> Result<Counts, Failed>,
    explain: impl Fn(u64, Failed),
) -> Row {
    let start = Instant::now();
    let mut row = Row { first_seed: seeds.start, ..Row::default() };
    for seed in seeds {
        // Ten failures end the run.
        if is_over() || row.failures >= 10 {
            break;
        }
        row.seeds += 1;
        match run(seed) {
            Ok(counts) => row.add(&counts),
            Err(failure) => {
                row.failures += 1;
                row.failed_seeds.push(seed);
                eprintln!("seed {seed} fails: {}", failure.what);
                explain(seed, failure);
            }
        }
    }
    row.seconds = start.elapsed().as_secs_f64();
    row.seeds_per_s = row.seeds as f64 / row.seconds.max(f64::MIN_POSITIVE);
    row
}

/// Prints the command that repeats a failure, and the failing program made smaller.
fn simulated(seed: u64, failure: Failed) {
    eprintln!("  aquifer-machine simulate --replay {seed}");
    let (plan, failure) = shrink(Plan::of_seed(seed), failure, run);
    eprintln!("made smaller, to {} steps: {}\n{plan}", plan.step_count(), failure.what);
}
