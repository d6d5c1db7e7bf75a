//! Arguments of `bench`.

use std::path::PathBuf;

use clap::Args;

use super::{fitted, named};

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
    #[arg(long, value_name = "OUT", value_parser = named("svg", "plots"))]
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
