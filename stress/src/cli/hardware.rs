//! Arguments of `calls`.

use clap::Args;

use super::{fitted, whole};

/// Arguments of `calls`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(CALLS_KEYS))]
pub struct CallsArgs {
    /// How often each call is measured, after a first call that does not count.
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true,
        value_parser = whole::<u32>("number of rounds", 1..=100_000))]
    pub rounds: u32,
}

const CALLS_KEYS: &str = "\
Memory is taken in sizes from 2 MiB to 2 GiB, as far as the device has them. Setting access and
unmapping are measured once for a piece of each size, and once for 1, 8 and 64 pieces of one granule
at a time. Each size is allocated from the driver's pool twice before the host waits, as the pool
then releases unused memory by default. Before that, as kvcached's bench_vmm does, up to 4096 pages
of one granule are each created, then each mapped, made accessible and unmapped.

JSON keys of bench_vmm, per call:
  benchmark, device, device_name, call, bytes, modelled   \"bench_vmm\"; bytes are those of a page
  pages                     how many
  avg_us, p50_us, p90_us, p99_us, max_us   time of a call: mean, percentiles, and the longest

JSON keys of others, per call and size:
  device, device_name       the device, and its name
  call                      the driver call
  bytes                     memory of one call; 0 if none
  mappings                  number of mappings of one call; 0 if none
  pool                      for calls of the driver's pool, \"cold\" if it had released all memory, or
                            \"warm\" if the same stream had just freed a block of this size; null for
                            other calls
  rounds                    how often the call was measured
  median_us, p95_us         time of a call: the median, and the 95th percentile
  modelled                  whether the times come from the simulator's cost model; otherwise they
                            were measured";
