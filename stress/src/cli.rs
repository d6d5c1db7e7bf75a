//! The command line.

mod compare;
mod hardware;
mod run;
mod shows;
mod studies;
mod transfer;

use std::error::Error;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use aquifer::device::{DeviceSpec, OpenError};
use aquifer::memory::Config;
use aquifer_allocator::config::{Backing, SplitFrames};
use aquifer_allocator::snapshot::FileFormat;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};

pub use compare::CompareArgs;
pub use hardware::{CallsArgs, SimulateArgs, SoakArgs};
pub use run::RunArgs;
pub use shows::{DemoArgs, FragmentationArgs, GraphsArgs, OomArgs};
pub use studies::{AdviseArgs, ExplainArgs, ReportArgs};
pub use transfer::{Part, TransferArgs};

use crate::exit::{CODES, Failure};
use crate::pytorch::Options;
use crate::table::terminal_columns;
use crate::text::rewrap;

const EXAMPLES: &str = "\
Examples:
  aquifer-stress
  aquifer-stress fragmentation --scenario kv_cache
  aquifer-stress oom --device sim:24GiB
  aquifer-stress explain snapshot.pickle
  aquifer-stress report snapshot.pickle --output report.html
  aquifer-stress replay training.trace.gz
  aquifer-stress replay --device sim:24GiB snapshot.pickle
  aquifer-stress replay --config '' --config max_split_size_mb:128 *.trace.gz
  aquifer-stress fit --json training.trace.gz
  aquifer-stress compare --pytorch pytorch.json *.trace.gz
  aquifer-stress bench --filter churn
  aquifer-stress bench --peers --quick
  aquifer-stress calls --device sim:a100
  aquifer-stress transfer --device sim:h100 --max-mb 16
  aquifer-stress graphs --device sim:24GiB
  aquifer-stress soak --minutes 5 --threads 4
  aquifer-stress run --snapshot train.pickle -- python train.py";

const SIMULATED: &str = "\
Settings of simulated devices, such as --device sim:24GiB,seed=7,vmm=off:
  size=SIZE             memory that it has, from 1 MiB to 64 TiB
  ordinal=N             its number among devices
  other=SIZE            memory that other programs hold
  seed=N                of the order in which its work runs, and of how long that takes
  jitter=off            how long work takes does not vary
  link=GB/S             bandwidth to the host
  vmm=off               memory cannot be mapped
  export=off            memory cannot be exported
  checks=off            work beyond a block or after its end, or that reads memory never written, is
                        not detected; the default of bench, replay, fit, compare, transfer, explain,
                        advise and report
  reuse=off             a plain allocation gets the lowest address above all earlier ones, while
                        there are any; the default of the same commands
  violations=panic      a race or misuse of memory ends the program
  fault=CALL#N:CODE     the Nth of these calls fails: cuMemAlloc#3:out_of_memory; CALL may be any
  fault_rate=[CALL:]RATE[:CODE]
                        this share of calls fails: cuMemMap:0.01
  oom_at=SIZE           no more memory than this is available
  lost_at=N             the device is lost at the Nth call
  spike=RATE:DURATION   this share of calls takes this much longer: 0.001:5ms; not in the times of
                        `calls`, nor in modelled times of driver calls
  faults=FILE           a file with one fault per line, as above";

/// Shows why GPU memory runs out while much of it is free: replays allocation traces, fragments
/// memory, runs out of it, and measures the allocator.
///
/// Without a command it runs the demonstration. Results go to standard output, as tables or, with
/// --json, as one JSON object per line. Everything else goes to standard error.
#[derive(Debug, Parser)]
#[command(name = "aquifer-stress", version, max_term_width = 100)]
#[command(after_long_help = format!("{EXAMPLES}\n\n{}", fitted(&format!("{SIMULATED}\n\n{CODES}"))))]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Common options")]
pub struct Global {
    /// Device to run on: sim, sim:SIZE, sim:PRESET (both take ,key=value settings), cuda or cuda:N.
    ///
    /// Presets: h100, h200, a100, rtx4090. Examples: sim:80GiB, sim:h100,
    /// sim:24GiB,seed=7,jitter=off, cuda:0. The default is a real GPU if there is one, else
    /// sim:80GiB. The commands explain, advise, report, fit, compare and demo need devices of
    /// several sizes, so their default is always sim:80GiB; on a GPU, fit and compare use limits of
    /// several sizes. The choice is reported.
    ///
    /// `aquifer-stress --help` lists the settings of simulated devices.
    #[arg(long, global = true, value_name = "SPEC")]
    pub device: Option<DeviceArg>,

    /// Options of the allocator, as in PYTORCH_ALLOC_CONF; may be given several times to compare.
    ///
    /// For example 'backing:segments,limit_mb:4096'; '' means the defaults. The commands explain,
    /// report, replay, fit, compare, fragmentation and demo use each in turn; other commands take
    /// only one. With 'backing:pytorch', explain, report, replay, fit and compare use a model of
    /// PyTorch's allocator instead, which takes PyTorch's options; 'backing:expandable' stands for
    /// 'backing:pytorch,expandable_segments:True'. The environment is not read: to use its options,
    /// pass them with --config "$PYTORCH_ALLOC_CONF". Options without effect are named in a
    /// warning.
    #[arg(long = "config", global = true, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub configs: Vec<ConfigArg>,

    /// Seed of everything random: the simulated device (unless its SPEC sets seed=) and generated
    /// workloads.
    #[arg(long, global = true, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
        value_parser = whole::<u64>("number", 0..=u64::MAX))]
    pub seed: u64,

    /// Print one JSON object per line instead of tables.
    ///
    /// Its keys have PyTorch's names: what tables call holds is `peak_reserved_bytes`, and its
    /// ratio to what is requested is `reserved_over_requested`. Tables leave out columns of zeros,
    /// and the last columns in a narrow terminal; JSON has all keys.
    #[arg(long, global = true)]
    pub json: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
#[non_exhaustive]
pub enum Command {
    /// Explain a recorded program: what uses memory at its peak, what allocators hold for it, how
    /// it runs out of memory, and what helps.
    Explain(ExplainArgs),
    /// Find what wastes memory in recorded programs, and the options and changes that help.
    Advise(AdviseArgs),
    /// Write a page that shows recorded programs: memory over time, what is alive, and what lies
    /// where, under several allocators.
    Report(ReportArgs),
    /// Replay recorded programs: memory, fragmentation, driver calls and speed.
    Replay(ReplayArgs),
    /// Find the smallest device on which recorded programs finish.
    Fit(FitArgs),
    /// Replay and fit recorded programs under several options, side by side.
    Compare(CompareArgs),
    /// Measure the speed of allocation and free.
    Bench(BenchArgs),
    /// Measure the cost of driver calls on the device.
    Calls(CallsArgs),
    /// Measure copies between host and device, by every available method.
    Transfer(TransferArgs),
    /// Put memory under load: allocate, write patterns, hand on, copy, verify and free, from many
    /// threads.
    Soak(SoakArgs),
    /// Run random programs of several threads under a schedule that a seed fixes, and check
    /// contents, races, statistics and clean-up.
    Simulate(SimulateArgs),
    /// Fragment memory in several ways, under several policies side by side, and draw maps of it.
    Fragmentation(FragmentationArgs),
    /// Capture CUDA graphs and launch them: memory, driver calls and speed.
    Graphs(GraphsArgs),
    /// Run out of memory in several ways, read the reports, and recover.
    Oom(OomArgs),
    /// List the options of allocators, which --config and AQUIFER_ALLOC_CONF take.
    Options,
    /// Run a program that is already built, with its GPU memory from this allocator, and report on
    /// it.
    Run(RunArgs),
    /// Demonstrate on recorded programs why memory runs out while much of it is free, and what
    /// helps (the default).
    Demo(DemoArgs),
}

pub(crate) const RECORDING: &str = "\
How to record a program:
  PyTorch: before the program allocates, and at its end or where it catches the OutOfMemoryError:
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")
  A program with Aquifer in it, with the option history:1000000, for example in AQUIFER_ALLOC_CONF:
    memory.snapshot().save(\"snapshot.pickle\")?
  The same without a change of the program, when it first runs out of memory:
    AQUIFER_ALLOC_CONF=history:1000000,oom_snapshot:/tmp/oom.pickle
  Any other program on CUDA:
    aquifer-stress run --snapshot snapshot.pickle -- PROGRAM ARGS";

const FILES: &str = "\
Files, recognized by their content, not their names; - is standard input:
  allocation traces (.trace)
  PyTorch memory snapshots with history (.pickle, .json), also those of several ranks in a list, and
    the pages that torch.cuda._memory_viz makes of them (.html)
  RMM's CSV logs (.csv), of all versions, with a header or without
Each may be compressed with gzip, xz or zstd, and several may be in a zip archive or in a folder, as
one snapshot per rank. Content beyond that of any recording of its size is refused. A file with
several devices or ranks, an archive or a folder has several programs. If files have the same name,
their paths follow the names of the programs.

Missing information is inferred and noted, or only noted:
  - A block whose free comes first was allocated before the recording began; it is allocated first.
  - Memory that is allocated again, or released to the device, was freed just before.
  - Without free_requested entries, blocks are freed when free_completed.
  - A free that other streams delayed is replayed as a use on the stream that most likely did.
  - Refused requests are not replayed, except those that ended the program: after them nothing was
    allocated, and at most half of what was live was freed. They are replayed as blocks that are
    freed at once. Notes have their number and the largest size.
  - A history of one entry, or one that max_entries has probably cut off, is noted.

A trace is text with one event per line. IDs and STREAMs are any numbers from 0 on; an ID may be
reused after it was freed:
  # TEXT               a comment; `# name: NAME` names the trace
  a ID BYTES STREAM    allocates a block of BYTES bytes on a stream
  f ID STREAM          frees the block; STREAM is the stream that it was allocated on
  r ID STREAM          the block is also used on another stream
  i N                  iteration N begins";

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

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(BENCH_KEYS))]
pub struct BenchArgs {
    /// Run only the benchmark of this name, or those whose names contain it; with --scale, the
    /// series.
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,

    /// Run fewer rounds, for a first impression; with --scale, measure smaller numbers.
    #[arg(long)]
    pub quick: bool,

    /// Measure how the time of operations grows with the number of streams, private pools,
    /// growables, graphs, waiting blocks and live blocks, and how long a cached allocation of
    /// another thread takes meanwhile.
    #[arg(long)]
    pub scale: bool,

    /// Run benchmarks that other projects published, with this allocator, models of PyTorch's, the
    /// driver's pool and the bare driver side by side.
    #[arg(long, conflicts_with_all = ["scale", "plot"])]
    pub peers: bool,

    /// Instead of running them, write those of --peers that replay a program into FOLDER, as traces
    /// that other programs can replay.
    #[arg(long, value_name = "FOLDER", requires = "peers")]
    pub traces: Option<PathBuf>,

    /// Also draw the times as OUT, an .svg file.
    #[arg(long, value_name = "OUT", value_parser = svg_path())]
    pub plot: Option<PathBuf>,
}

const BENCH_KEYS: &str = "\
Benchmarks; a pair is one allocation and one free:
  hot_512b, hot_1mib, hot_64mib        a block is freed as soon as it is allocated
  churn_100, churn_1000, churn_10000   that many live blocks of 512 B to 64 MiB (log-uniform); a
                                       random one is replaced
  churn_100000                         the same, 512 B to 1 MiB
  churn_1000000                        the same, 512 B to 64 KiB
  threads1_streams1, threads2_streams2, threads4_streams4
                                       threads on one allocator, each with a stream of its own, on
                                       which a block of 1 MiB is freed as soon as it is allocated;
                                       offset-allocator, which has no locks, has an instance per
                                       thread
  threads1_churn, threads2_churn, threads4_churn
                                       the same, where each thread has 100 live blocks of 512 B to 1
                                       MiB and replaces a random one
  handover                             one thread allocates blocks of 512 B to 1 MiB, another frees
                                       them, through a ring of 256 places; offset-allocator is
                                       behind a lock
  raw_hot, raw_churn_10000, raw_parallel
                                       as hot_1mib, churn_10000 and threads2_streams2, with raw
                                       pointers; the yardstick is the same with handles
JSON keys, per benchmark and allocator (aquifer and, alternating with it, the yardstick: the bare
index offset-allocator, or aquifer-handles):
  benchmark, allocator      the benchmark, and what was measured
  device                    the device; a simulated one has at least 512 GiB here
  largest_bytes             the largest block: as above, or smaller where the device has no room for
                            so many
  ns_per_pair               time of a pair in one thread, the median of several rounds
  threads, live             number of threads, and of live blocks of each
  rate_vs_one_thread        pairs per time of each thread over those of one thread alone, measured
                            alternately; for handover, of one thread that passes blocks through the
                            ring to itself

Series of --scale, each with n, 4 n and 16 n (--quick: a 16th), while another thread allocates and
frees a cached block of 4 KiB on a stream of its own:
  nothing     no objects; the operation `spin` makes no call, so its hot_max_ns is the effect of the
              machine's scheduler alone on the other thread
  streams     64 streams with a block each: first block, pair in turn on all, drop
  pools       128 private pools with a block each: make, pair in turn in all, drop; a snapshot once
              all are gone
  growables   128 growables: make (of 6 MiB), shrink, drop and the request that misses next
  graphs      128 graphs of one pool: capture, launch, pair in the pool, drop; a pair after that
  waiting     1000 blocks that another stream uses when they are freed: free, and end of the wait
  live        6250 blocks of 512 B to 64 KiB: allocate, replace a random one, free
Each series also measures, with all of these there, a pair of 4 KiB, a snapshot, fragmentation()
and, except where blocks wait, a miss (a held block of 8 to 15 MiB) and a refusal (of 32 TiB).
JSON keys, per series, operation and n:
  series, operation, device, n
  ns_per_operation          time of one of them; of operations on all n, time divided by n
  exponent                  power of n that this time grew with since the first n: 0 is constant,
                            1 is as fast as n; null for the first n
  hot_p99_ns, hot_max_ns    time of the other thread's pairs meanwhile: 99th percentile of the first
                            million, and maximum; null if there were none. The table shows the
                            greatest of all n

Benchmarks of --peers, with the names and parameters of their sources (--quick: of the first, only
those with 1000 allocations):
  random_allocations/N/MAX  RMM: N allocations of 1 B to MAX MiB among random frees, with at most
                            16000 MiB live; the same random numbers
  ascending, comb, loophole_1mib
                            PyTorch's devlog of 2026-06-01: 8 x 16 MiB, then 4 x 32 MiB; 32 MiB
                            where every other block of 16 MiB is free; half a MiB after 2 MiB
  stays_behind              PyTorch 193400: 91 and 45.5 MiB, of which 2 MiB stay behind, 100 times
  comb_1gib                 TorchRec 4584: 9 GiB where every other block of 1 GiB is free
  stride_1.75mib, stride_64kib
                            kvcached: KV blocks of Qwen3-0.6B with their layers beside each other,
                            or each by itself
  grow_by_little            llama.cpp 22107: two buffers that grow by 4 KiB 20 000 times
  larson, xmalloc-test, mstress
                            mimalloc-bench: threads as streams; sizes are 1024 times as large, of
                            mstress 128 times
  multi_stream_allocations/STREAMS/KERNELS/PREWARMED
                            RMM: kernels on streams in turn, each with a block of 8 B
  async_priming/primed, async_priming/unprimed
                            RMM: two rounds of ten blocks of 9 % of the device; primed: after half
                            of the device was allocated and freed
  captures/STREAMS/OPERATIONS/ALLOCATIONS
                            PyTorch 158352: four graphs captured in one pool. Each operation uses a
                            random block of 4 MiB on a random stream; before it one is allocated in
                            so many of 100 cases, one freed and a stream joined in 10. PyTorch by
                            default frees what several streams used when the capture ends
JSON keys, per benchmark and allocator; a simulated device has at least 512 GiB but for the last
three benchmarks:
  benchmark, source, allocator, device
                            what was measured, who published it, with what, where
  peak_requested_bytes      the most memory that was requested and not yet freed
  peak_reserved_bytes, reserved_over_requested
                            the most memory that the device lacked after any request of two passes,
                            and its ratio to requested; null with ooms; of captures, what the pool
                            holds in the end
  driver_calls, driver_time_modelled_us, warm_driver_calls, warm_driver_time_modelled_us
                            driver calls of the first and of the second pass, and their modelled
                            time; null on a real device
  ns_per_op                 time of an allocation or a free of a later pass; null for the driver's
                            pool and cuMemAlloc on a simulated device, where it is the simulator's
  ooms                      requests refused in both passes
  clock                     of multi_stream_allocations and async_priming: virtual on a simulated
                            device, or host
  us_per_iteration          multi_stream_allocations: four kernels of 0.5 ms, and the wait for them
  latency_to_first_us, first_round_throughput_gb_s, second_round_throughput_gb_s
                            async_priming: time of the first block; bytes of a round over its time,
                            of the second one with the frees of the first";

/// The widest help.
pub(crate) const HELP_WIDTH: usize = 100;

/// A help text in lines that fit into the terminal.
pub(crate) fn fitted(text: &str) -> String {
    rewrap(text, HELP_WIDTH, terminal_columns().unwrap_or(HELP_WIDTH).min(HELP_WIDTH))
}

/// Paths with the extension of a snapshot format, so that others are refused before anything runs.
fn snapshot_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| FileFormat::of(&path).map(|_| path))
}

/// Paths of plots.
fn svg_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let is_svg = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("svg"));
        if is_svg { Ok(path) } else { Err("plots are written as .svg files") }
    })
}

fn page_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let is_page = path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("html"));
        if is_page { Ok(path) } else { Err("pages are written as .html files") }
    })
}

/// A device, with its text.
#[derive(Debug, Clone)]
pub struct DeviceArg {
    /// As the user wrote it.
    pub text: String,
    /// The parsed device.
    pub spec: DeviceSpec,
}

impl FromStr for DeviceArg {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<DeviceArg, OpenError> {
        let text = text.trim();
        Ok(DeviceArg { text: text.to_owned(), spec: text.parse()? })
    }
}

/// Options of the allocator, with their text.
#[derive(Debug, Clone, Default)]
pub struct ConfigArg {
    /// As the user wrote it.
    pub text: String,
    /// The options of this project's allocator; if another is asked for, only its limits count.
    pub config: Config,
    /// Asks for a model of PyTorch's allocator, with these options.
    pub pytorch: Option<Options>,
    /// Whether a command tries them without being asked: the allocator's warnings of them are not
    /// shown.
    pub is_trial: bool,
}

impl ConfigArg {
    /// Refuses options that ask for PyTorch's allocator, for commands that need this project's.
    ///
    /// # Errors
    /// For such options.
    pub fn refuse_pytorch(&self) -> Result<(), Failure> {
        if self.pytorch.is_none() {
            return Ok(());
        }
        Err(Failure::Usage(format!(
            "--config '{}' asks for a model of PyTorch's allocator, which explain, report, replay, fit and compare have",
            self.text
        )))
    }

    /// Whether both ask for the same, whatever their texts.
    pub fn is_same(&self, other: &ConfigArg) -> bool {
        (&self.config, &self.pytorch) == (&other.config, &other.pytorch)
    }

    /// The same options with `split_frames:on`, as a trial; `None` if they say whether frames are
    /// split, or are not for mapped memory.
    ///
    /// A recorded program may use them, because one thread does all its work. Nothing is split
    /// unless a request would be refused otherwise.
    pub fn splitting(&self) -> Option<ConfigArg> {
        if self.pytorch.is_some() || self.config.backing != Backing::Paged || self.text.contains("split_frames") {
            return None;
        }
        let mut config = self.config.clone();
        config.split_frames = SplitFrames::On;
        let text = [&*self.text, "split_frames:on"].join(if self.text.is_empty() { "" } else { "," });
        Some(ConfigArg { text, config, pytorch: None, is_trial: true })
    }

    /// The same options as a trial.
    #[must_use]
    pub fn trial(self) -> ConfigArg {
        ConfigArg { is_trial: true, ..self }
    }
}

impl FromStr for ConfigArg {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Result<ConfigArg, Self::Err> {
        let text = text.trim();
        let (pytorch, config) = match Options::parse_model(text)? {
            Some((options, config)) => (Some(options), config),
            None => (None, text.parse()?),
        };
        Ok(ConfigArg { text: text.to_owned(), config, pytorch, is_trial: false })
    }
}

/// A parser of whole numbers, whose error says what is expected, such as a number of passes.
fn whole<T: TryFrom<u64>>(
    what: &'static str,
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let (least, most) = (range.start(), *range.end());
            let most = if most == u64::MAX { "2^64 - 1".to_owned() } else { most.to_string() };
            format!("expected a whole {what} from {least} to {most}, such as 3")
        })
    }
}

/// A size in MiB, as bytes.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "within the bounds")]
fn mebibytes(text: &str) -> Result<u64, String> {
    const MOST: f64 = (1_u64 << 26) as f64;
    match text.parse::<f64>() {
        Ok(mib) if mib > 0.0 && mib <= MOST && (mib * 1_048_576.0).fract() == 0.0 => Ok((mib * 1_048_576.0) as u64),
        _ => Err("expected MiB above 0 and up to 64 TiB that are whole bytes, such as 512 or 0.5".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn sizes_in_mib_may_have_fractions() {
        assert_eq!([mebibytes("1.5"), mebibytes("512")], [Ok(3 << 19), Ok(512 << 20)]);
        for wrong in ["0", "-1", "x", "", "0.00000001", "1e30", "nan", "512MiB"] {
            assert!(mebibytes(wrong).is_err(), "{wrong}");
        }
    }

    /// All number options of all commands say what they expect, of a value that is none, too large
    /// or negative.
    #[test]
    fn numbers_that_are_none_are_answered_with_what_is_expected() {
        let mut command = Cli::command();
        command.build();
        let takes_number = |arg: &&clap::Arg| {
            let name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
            name.is_some_and(|name| ["N", "SEED", "A..B"].contains(&&*name))
        };
        let mut tried = 0;
        for of in std::iter::once(&command).chain(command.get_subcommands()) {
            for option in of.get_arguments().filter(takes_number).filter_map(|arg| arg.get_long()) {
                for value in ["x", "-1", "1.5x", "", "99999999999999999999"] {
                    let name = if of.get_name() == command.get_name() { "options" } else { of.get_name() };
                    let line = ["aquifer-stress", name, &format!("--{option}"), value];
                    let said = Cli::try_parse_from(line).unwrap_err().to_string();
                    assert!(said.contains(": expected ") && said.contains("such as "), "{line:?}: {said}");
                    tried += 1;
                }
            }
        }
        assert!(tried > 5 * 14, "every command has --seed");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn frames_are_split_in_trials_of_options_that_do_not_say() {
        let splitting = |text: &str| text.parse::<ConfigArg>().unwrap().splitting().map(|arg| arg.text);
        assert_eq!(splitting("").as_deref(), Some("split_frames:on"));
        assert_eq!(splitting("frame_mb:16").as_deref(), Some("frame_mb:16,split_frames:on"));
        for text in ["split_frames:off", "split_frames:on", "backing:segments", "backing:pytorch"] {
            assert_eq!(splitting(text), None, "{text}");
        }
        let trial = ConfigArg::default().splitting().unwrap();
        assert!(trial.is_trial && trial.text.parse::<ConfigArg>().unwrap().config == trial.config);
    }

    #[test]
    fn global_options_may_precede_or_follow_the_command() {
        for line in [
            ["aquifer-stress", "--json", "--config", "cross_stream:off", "replay", "x"],
            ["aquifer-stress", "replay", "--json", "--config", " cross_stream:off", "x"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert!(cli.global.json);
            assert_eq!(cli.global.configs[0].text, "cross_stream:off");
        }
    }
}
