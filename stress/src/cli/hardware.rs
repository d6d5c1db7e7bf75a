//! Arguments of `soak` and `simulate`.

use std::ops::Range;
use std::path::PathBuf;

use clap::Args;

use super::{fitted, mebibytes, snapshot_path, whole};

/// Arguments of `simulate`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(SIMULATE_KEYS))]
pub struct SimulateArgs {
    /// The seeds, from A up to B - 1.
    #[arg(long, value_name = "A..B", default_value = "0..1000", allow_negative_numbers = true, value_parser = seeds)]
    pub seeds: Range<u64>,

    /// Stop after N minutes (a fraction is allowed).
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = minutes)]
    pub minutes: Option<f64>,

    /// Run one seed alone.
    #[arg(long, value_name = "SEED", conflicts_with = "seeds", allow_negative_numbers = true,
        value_parser = whole::<u64>("number", 0..=u64::MAX))]
    pub replay: Option<u64>,
}

const SIMULATE_KEYS: &str = "\
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

/// Arguments of `soak`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(SOAK_KEYS))]
pub struct SoakArgs {
    /// Stop after N minutes (a fraction is allowed), of which each seed has an equal share.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = minutes)]
    pub minutes: Option<f64>,

    /// Operations for each seed, of all threads together. By default 20000, or unlimited if
    /// --minutes is given.
    #[arg(long, value_name = "N", allow_negative_numbers = true,
        value_parser = whole::<u64>("number of operations", 1..=u64::MAX))]
    pub ops: Option<u64>,

    /// Number of threads.
    #[arg(long, value_name = "N", default_value_t = 2, allow_negative_numbers = true,
        value_parser = whole::<u16>("number of threads", 1..=256))]
    pub threads: u16,

    /// Number of streams, which all threads share; the default stream is one of them.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true,
        value_parser = whole::<u16>("number of streams", 1..=256))]
    pub streams: u16,

    /// Number of seeds, counted from --seed. They run one after the other, each with a new
    /// allocator.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true,
        value_parser = whole::<u64>("number of seeds", 1..=u64::MAX))]
    pub seeds: u64,

    /// Memory to use, in MiB, such as 512 or 1.5, at most what the device has. By default half of
    /// what is free, but at most 24 MiB or 12 granules on a simulated device, because there
    /// everything is written to host memory.
    #[arg(long = "limit-mb", value_name = "N", allow_negative_numbers = true, value_parser = mebibytes)]
    pub limit: Option<u64>,

    /// Save a memory snapshot as OUT, a .pickle, .pkl or .json file: the memory at the end, or
    /// where the run failed, with the latest 1000000 entries of history. At the end all blocks are
    /// free, so only the history is of interest.
    ///
    /// `replay` and PyTorch's memory viewer read it. For one seed. history:N in --config keeps the
    /// latest N entries.
    #[arg(long, value_name = "OUT", value_parser = snapshot_path())]
    pub snapshot: Option<PathBuf>,
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if (0.0..=1e6).contains(&minutes) && minutes > 0.0 => Ok(minutes),
        _ => Err("expected a number of minutes above 0 and up to 1000000, such as 5 or 0.5".to_owned()),
    }
}

const SOAK_KEYS: &str = "\
Each operation does one of these to a block, on any of the streams: allocate it and write a pattern;
verify it, and free or keep it; write another pattern; copy it elsewhere and back, wiping it in
between; pass it to another thread; read it back to the host. Other operations keep a stream busy,
or release cached memory. Meanwhile, memory is shown in a terminal as a chart, otherwise as lines on
standard error at growing intervals. When memory runs out, some of the blocks are verified and
freed. Each word of a pattern depends on its address and on the operation that wrote it. An
interrupt (Ctrl-C) ends the soak early: it sums up what it did; a second one ends it at once.

JSON keys:
  device, config, seed, seeds, threads, streams, limit_bytes   what was run, on which device, with
                            how much memory
  operations, allocs        number of operations, and of blocks allocated
  ooms                      requests refused for lack of memory
  bytes_written, bytes_verified, blocks_verified   patterns that the device wrote, and verified
  copies, handed_over       copies between blocks; blocks that were passed to another thread
  uploads, downloads        blocks that the host wrote, and verified, by transfers that were not
                            waited for at once
  releases                  times that cached memory was released
  peak_reserved_bytes       the most memory that was held from the device
  mismatches                times that memory did not read as it was written. The device verifies up
                            to 64 blocks before the host looks, so one mismatch may stand for
                            several. Each is reported on standard error, with the seed, and the
                            operation and block of the first byte that differs; 0 unless there is a
                            bug
  not_given_back_bytes      memory that could not be released in the end; 0 unless there is a bug
  violations                pieces of work that the simulated device found unordered; 0 unless there
                            is a bug
  seconds, operations_per_s, gb_per_s   duration, and rates; gb_per_s counts patterns written and
                                        verified
With one thread on a simulated device, the same seed always gives the same run. The exit code is 1
if there are mismatches, or memory that could not be released.";
