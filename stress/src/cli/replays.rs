//! Arguments of `replay`, `fit` and `compare`.

use std::path::PathBuf;

use clap::Args;

use super::{FILES, fitted, named, snapshot_path, whole};

const REPLAY_KEYS: &str = "\
JSON keys, per program and config:
  trace, config, device, lag   the program, the options, the device, and how far the device lagged
                               behind
  events, allocs            number of allocations and frees in one pass; number of allocations among
                            them
  peak_requested_bytes      the most memory that the program had requested and not yet freed
  peak_allocated_bytes      the same after rounding
  peak_reserved_bytes       the most memory that was held from the device, in any pass
  reserved_over_requested   ratio of peak_reserved_bytes to peak_requested_bytes
  peak_reserved_bytes_by_pass   the most memory that was held in each pass, including the first
  lag_bound_over_requested  the least that this ratio can be in one pass on a device that lags if
                            nothing waits for the device: the most, over all times, of the sum over
                            streams of the most that was live on the stream within the last LAG
                            events; with --lag only
  ns_per_op                 time per event: the median of the passes after the first, or the first
                            if it is the only one; null, like the next key, if the program has no
                            events
  first_pass_ns_per_op      time per event of the first pass, which takes the memory from the device
  seconds                   time of all these passes together
  driver_calls              driver calls by name, without those of the setup
  driver_allocs             allocations during which the driver was asked to allocate, create, map
                            or make accessible
  driver_time_modelled_us   time that all driver calls would take on a real device, by the
                            simulator's cost model
  worst_alloc_us            the most of that time within one allocation
  driver_allocs_measured_us, worst_alloc_measured_us
                            on a real device: host time of the allocations in driver_allocs, with
                            everything that they do; the most of that time within one of them; null
                            on a simulated device
  stalls                    waits of the host for a device that lagged behind (--lag)
  remaps, granules_moved    how often memory was moved to where contiguous addresses were needed;
                            granules that moved
  frames_split              frames that were partly in use and were split, as memory would have been
                            refused otherwise
  warm_driver_calls, warm_driver_allocs, warm_driver_time_modelled_us, warm_stalls
                            the same for later passes, as their mean; null if there is only one pass
  warm_worst_alloc_us       the greatest worst_alloc_us of the later passes
  driver_calls_by_pass      number of driver calls in each pass, including the first
  ooms, retries             requests refused; times that all cached memory was released to try again
  warm_ooms                 requests refused in the later passes, all together
  events_recorded, stream_waits   events and waits that ordering streams after each other took
  violations                pieces of work that the simulated device found unordered, and memory
                            released before the device was done with it; 0 unless there is a bug
  yardstick_ns_per_op       time per event of offset-allocator; with --yardstick only, and if there
                            are events
  pool_ns_per_op, pool_first_pass_ns_per_op, pool_seconds, pool_peak_reserved_bytes, pool_ooms
                            with --driver-pool only: the same times of the pool, the most memory
                            that it held from the device, and requests that it refused in all
                            passes. A real driver keeps one high-water mark for the whole process;
                            where this program did not raise it, the value is the most held at the
                            end of a pass
Counts are of the first pass unless stated otherwise; peaks, remaps, granules_moved, frames_split,
retries and violations are of all passes, and violations also of the end. The table has the ratios
of the first and the last pass if they differ from the greatest, and no ratio for a program that was
refused a request. Such a program with split_frames:off, the default, has another row with
split_frames:on if frames were split then.
Times are taken in separate passes on another device, where nothing is counted; they include neither
reading the file nor freeing leftover blocks of a pass. Modelled times are those of the simulator's
cost model, and null on a real device. Measured times are of the first counted pass, without the
counting itself.";

/// Arguments of `replay`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{FILES}\n\n{REPLAY_KEYS}")))]
pub struct ReplayArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// The passes.
    #[command(flatten)]
    pub passes: PassArgs,

    /// Also time the crate offset-allocator (the yardstick) on the same events: a bare index
    /// without accounting, locks or streams.
    #[arg(long)]
    pub yardstick: bool,

    /// Also replay the events to the driver's own stream-ordered pool (cuMemAllocAsync), on the
    /// same device, after the allocator.
    #[arg(long)]
    pub driver_pool: bool,

    /// Save a memory snapshot as OUT, a .pickle, .pkl or .json file: the memory at the end of a
    /// separate pass, before the blocks that the program leaves allocated are freed, with the
    /// history of this pass.
    ///
    /// This command, `fit`, `compare` and PyTorch's memory viewer read it. For one program and one
    /// --config, in which history:N keeps only the latest N entries.
    #[arg(long, value_name = "OUT", value_parser = snapshot_path())]
    pub snapshot: Option<PathBuf>,
}

/// Options of the passes.
#[derive(Debug, Clone, Args)]
pub struct PassArgs {
    /// How many times each program is run, one after the other in the same allocator.
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
        value_parser = whole::<u32>("number of passes", 1..=1_000_000))]
    pub repeat: u32,

    /// Let the simulated device lag N events of the program behind the host: allocations, frees and
    /// uses on other streams.
    ///
    /// The device has reached event max(the latest that the host waited for, now - N), and work
    /// enqueued later is not done.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
        value_parser = whole::<u64>("number of events", 0..=u64::MAX))]
    pub lag: u64,
}

/// Arguments of `fit`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{FILES}\n\n{FIT_KEYS}")))]
pub struct FitArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

const FIT_KEYS: &str = "\
JSON keys, per program and config:
  trace, config             the program, and the options
  smallest_device_bytes     the size of the smallest device: the program finishes there, and fails
                            with 2 MiB less
  smallest_over_requested   that size over the most memory that the program had requested and not
                            yet freed
  retries_at_fit            times that all cached memory was released to try again, on that device
The device is simulated, even where there is a GPU, and its size is replaced. --device may name
another simulated device, or a GPU: there the size is that of a limit on what the allocator holds,
and the most that is tried is what is free. Where frames that are split let a program finish on a
smaller device, another row has split_frames:on, which is off by default. Whether a program finishes
need not be monotonic in the size, so smaller sizes were tried: 23 evenly spread down to the peak,
and the 64 just below the boundary.";

/// Arguments of `compare`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{FILES}\n\n{COMPARE_KEYS}")))]
pub struct CompareArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// The passes.
    #[command(flatten)]
    pub passes: PassArgs,

    /// Also show the figures of PyTorch's allocator for these programs, from a JSON file.
    ///
    /// The file maps each program's name to {"configs": {"default": {...}, "expandable": {...}}},
    /// with the keys options, peak_reserved_bytes, ooms and, if known,
    /// smallest_device_bytes and ns_per_op_torch_2_15.
    #[arg(long, value_name = "FILE")]
    pub pytorch: Option<PathBuf>,

    /// Also draw the memory that is held against the time in driver calls as OUT, an .svg file: a
    /// point for each of the options, and the frontier of those that no other one beats in both.
    #[arg(long, value_name = "OUT", value_parser = named("svg", "plots"))]
    pub plot: Option<PathBuf>,
}

const COMPARE_KEYS: &str = "\
Options without --config: backing:pytorch and backing:expandable (models of PyTorch's default
allocator, and of that with expandable segments), backing:segments, and backing:paged.
split_frames is off by default; where split_frames:on makes a difference for one of the programs, it
has rows of its own.

JSON keys, per program and config (\"row\": \"trace\"):
  trace, config             the program, and the options; \"pytorch ...\" with --pytorch
  peak_requested_bytes      the most memory that the program had requested and not yet freed
  peak_reserved_bytes, reserved_over_requested   the most memory that was held from the device in
                            any pass, and its ratio to requested
  peak_reserved_bytes_by_pass, first_pass_reserved_over_requested   the most memory that was held in
                            each pass, and the ratio of the first
  smallest_device_bytes, smallest_over_requested   as found by `fit`, and its ratio to requested;
                            null if there is none
  allocs, driver_calls      allocations and driver calls of the first pass
  warm_driver_calls         mean of driver_calls over the later passes
  driver_time_modelled_us, warm_driver_time_modelled_us, worst_alloc_us
                            modelled time of driver calls: in the first pass, in a later pass, and
                            the most within one allocation of the first pass
  ns_per_op, yardstick_ns_per_op   time per event, and that of the bare index offset-allocator, as
                                   in `replay`
  ooms, warm_ooms, violations  as in `replay`; with ooms, the other figures are those of the served
                            requests
and per config, at the end (\"row\": \"mean\"):
  config, traces, finished  the options, the number of programs, and how many of them finished,
                            without ooms in any pass; the others count only for
                            smallest_over_requested, ooms, warm_ooms and violations
  reserved_over_requested, first_pass_reserved_over_requested, smallest_over_requested, ns_per_op,
  times_yardstick           geometric means
  worst_reserved_over_requested, worst_smallest_over_requested, worst_alloc_us
                            maxima
  allocs, driver_calls, warm_driver_calls, driver_time_modelled_us,
  warm_driver_time_modelled_us, ooms, warm_ooms, violations   totals
Unknown figures are null; means, maxima and totals are null unless the figure is known for each
program that finished, and if there are none.
Figures from --pytorch are taken from the file, so its times are those of the machine that made it.
What it held counts for the first pass, too.
The device is simulated, even where there is a GPU, unless --device names the GPU: then limits of
several sizes are used.";
