//! `soak`: memory under load, verified by the device itself.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aquifer::device::sim::SimDriver;
use aquifer::device::{DeviceSpec, OpenError};
use aquifer::memory::Config;
use aquifer::{Allocator, Device};
use aquifer_machine::soak::{self, Counts, Failure, Plan};
use serde::Serialize;

use super::{Outcome, minutes};

/// Memory of a soak on a simulated device, where the host writes every byte.
const SIMULATED_LIMIT: u64 = 24 << 20;
/// The same in granules, if that is more: a soak needs several of them.
const SIMULATED_GRANULES: u64 = 12;
/// Operations by default.
const OPERATIONS: u64 = 20_000;

/// Arguments of `soak`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = KEYS)]
pub(crate) struct Args {
    /// Device to run on, such as sim:80GiB or cuda:0. By default a GPU if there is one, else
    /// sim:80GiB.
    #[arg(long, value_name = "SPEC")]
    device: Option<DeviceArg>,

    /// Options of the allocator.
    #[arg(long, value_name = "OPTIONS", default_value = "", allow_hyphen_values = true)]
    config: String,

    /// The first seed.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Number of seeds. They run one after the other, each with a new allocator.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,

    /// Stop after N minutes (a fraction is allowed), of which each seed has an equal share.
    #[arg(long, value_name = "N", value_parser = minutes)]
    minutes: Option<f64>,

    /// Operations for each seed, of all threads together. By default 20000, or unlimited if
    /// --minutes is given.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    ops: Option<u64>,

    /// Number of threads.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: u16,

    /// Number of streams, which all threads share; the default stream is one of them.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    streams: u16,

    /// Memory to use, in MiB, at most what the device has. By default half of what is free, but at
    /// most 24 MiB or 12 granules on a simulated device, because there everything is written to host
    /// memory.
    #[arg(long = "limit-mb", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 26))]
    limit: Option<u64>,
}

const KEYS: &str = "\
Each operation does one of these to a block, on any of the streams: allocate it and write a pattern;
verify it, and free or keep it; write another pattern; copy it elsewhere and back, wiping it in
between; pass it to another thread; read it back to the host. Other operations keep a stream busy,
or release cached memory. When memory runs out, some of the blocks are verified and freed. Each word
of a pattern depends on its address and on the operation that wrote it. An interrupt (Ctrl-C) ends the
soak early: it sums up what it did; a second one ends it at once.

JSON keys:
  device, config, seed, seeds, threads, streams, limit_bytes   what was run, on which device, with
                            how much memory
  operations, allocs        number of operations, and of blocks allocated
  ooms                      requests refused for lack of memory
  bytes_written, bytes_verified, blocks_verified   patterns that the device wrote, and verified
  copies, handed_over       copies between blocks; blocks that were passed to another thread
  uploads, downloads        blocks that the host wrote, and verified
  releases                  times that cached memory was released
  peak_reserved_bytes       the most memory that was held from the device
  mismatches                times that memory did not read as it was written; 0 unless there is a bug
  not_given_back_bytes      memory that could not be released in the end; 0 unless there is a bug
  violations                pieces of work that the simulated device found unordered; 0 unless there
                            is a bug
  seconds, operations_per_s, gb_per_s   duration, and rates; gb_per_s counts patterns
With one thread on a simulated device, the same seed always gives the same run. The exit code is 1
if anything is wrong.";

/// A device, with its text.
#[derive(Debug, Clone)]
struct DeviceArg(String, DeviceSpec);

impl FromStr for DeviceArg {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<DeviceArg, OpenError> {
        Ok(DeviceArg(text.trim().to_owned(), text.trim().parse()?))
    }
}

impl DeviceArg {
    /// A GPU, or a simulated device.
    fn best() -> Result<DeviceArg, OpenError> {
        let info = aquifer::open_best()?.info().clone();
        if info.is_virtual { "sim:80GiB".parse() } else { format!("cuda:{}", info.ordinal).parse() }
    }

    /// Opens the device, a simulated one with this seed.
    fn open(&self, seed: u64) -> Result<Device, OpenError> {
        match &self.1 {
            DeviceSpec::Sim(sim) => Ok(Device::new(SimDriver::new(sim.clone().seed(seed)))),
            spec => spec.open(),
        }
    }
}

/// The result. `soak --help` explains the fields.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    device: String,
    config: String,
    seed: u64,
    seeds: u64,
    threads: u16,
    streams: u16,
    limit_bytes: u64,
    #[serde(flatten)]
    counts: Counts,
    mismatches: usize,
    not_given_back_bytes: u64,
    violations: u64,
    seconds: f64,
    operations_per_s: f64,
    gb_per_s: f64,
}

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, or something fails for another reason than lack of memory.
#[expect(clippy::cast_precision_loss, reason = "shares and rates to display")]
pub(crate) fn run(args: &Args) -> Result<Outcome, Failure> {
    let device = args.device.clone().map_or_else(DeviceArg::best, Ok)?;
    let start = Instant::now();
    let operations = args.ops.or(args.minutes.is_none().then_some(OPERATIONS));
    let mut row = Row {
        device: device.0.clone(),
        config: args.config.clone(),
        seed: args.seed,
        threads: args.threads,
        streams: args.streams,
        ..Row::default()
    };
    let end = |share: f64| args.minutes.map(|minutes| start + Duration::from_secs_f64(minutes * 60.0 * share));
    let stop = at_interrupt()?;
    let is_over = || end(1.0).is_some_and(|end| Instant::now() >= end) || stop.load(Ordering::Relaxed);
    while row.seeds < args.seeds && !is_over() {
        let until = end((row.seeds + 1) as f64 / args.seeds as f64);
        let (seed, threads, streams) = (args.seed.wrapping_add(row.seeds), args.threads, args.streams);
        let opened = device.open(seed)?;
        let mut config: Config = args.config.parse()?;
        config.quarantine.get_or_insert(0);
        let allocator = Allocator::new(&opened, config)?;
        let limit = limit(args, &opened, &allocator)?;
        let plan = Plan { seed, threads, streams, limit, operations, until };
        let soaked = soak::run(&allocator, &plan, &AtomicU64::new(0), &stop);
        row.counts.add(soaked.map_err(|error| format!("seed {seed}: {error}"))?);
        allocator.empty_cache()?;
        row.not_given_back_bytes += allocator.memory_reserved();
        drop(allocator);
        while let Some(violation) = opened.driver().take_violation() {
            row.violations += 1;
            eprintln!("violation: seed {seed}: {violation}");
        }
        (row.limit_bytes, row.seeds) = (limit, row.seeds + 1);
    }
    if stop.load(Ordering::Relaxed) {
        eprintln!("interrupted; the result up to here:");
    }
    row.counts.mismatches.iter().for_each(|mismatch| eprintln!("mismatch: {mismatch}"));
    row.mismatches = row.counts.mismatches.len();
    row.seconds = start.elapsed().as_secs_f64();
    row.operations_per_s = row.counts.operations as f64 / row.seconds;
    row.gb_per_s = row.counts.bytes_written.saturating_add(row.counts.bytes_verified) as f64 / row.seconds / 1e9;
    let is_clean = (row.mismatches, row.not_given_back_bytes, row.violations) == (0, 0, 0);
    Ok((is_clean, serde_json::to_string(&row)?, row.text()))
}

/// A flag that the first interrupt sets. The second one ends the process.
fn at_interrupt() -> Result<Arc<AtomicBool>, Failure> {
    use signal_hook::consts::SIGINT;
    use signal_hook::flag::{register, register_conditional_shutdown};
    let stop = Arc::new(AtomicBool::new(false));
    register_conditional_shutdown(SIGINT, 128 + SIGINT, Arc::clone(&stop))?;
    register(SIGINT, Arc::clone(&stop))?;
    Ok(stop)
}

/// The memory to use: from the arguments or the options, else half of the free memory; little on a
/// simulated device.
fn limit(args: &Args, device: &Device, allocator: &Allocator) -> Result<u64, Failure> {
    let total = device.info().total_bytes;
    if let Some(limit) = args.limit.map(|mib| mib << 20) {
        return if limit > total { Err("--limit-mb is more than the device has".into()) } else { Ok(limit) };
    }
    if let Some(limit) = allocator.limit() {
        return Ok(limit);
    }
    let (half, granule) = (device.memory_info()?.free / 2, allocator.granule_bytes().unwrap_or(0));
    let simulated = SIMULATED_LIMIT.max(granule.saturating_mul(SIMULATED_GRANULES));
    Ok(if device.info().is_virtual { half.min(simulated) } else { half })
}

impl Row {
    fn text(&self) -> String {
        let Row { counts, .. } = self;
        format!(
            "{} operations in {:.1} s ({:.0}/s), {} seeds from {} on, {} threads, {} streams\n  \
             {} blocks allocated, {} compared, {} copies, {} to other threads, {} uploads, {} downloads\n  \
             {} bytes written, {} compared, {:.2} GB/s; at most {} bytes held of {}\n  \
             out of memory {} times; cached memory given back {} times\n  \
             {} mismatches; {} violations; {} bytes not given back",
            counts.operations,
            self.seconds,
            self.operations_per_s,
            self.seeds,
            self.seed,
            self.threads,
            self.streams,
            counts.allocs,
            counts.blocks_verified,
            counts.copies,
            counts.handed_over,
            counts.uploads,
            counts.downloads,
            counts.bytes_written,
            counts.bytes_verified,
            self.gb_per_s,
            counts.peak_reserved_bytes,
            self.limit_bytes,
            counts.ooms,
            counts.releases,
            self.mismatches,
            self.violations,
            self.not_given_back_bytes,
        )
    }
}
