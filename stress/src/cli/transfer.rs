//! Arguments of `transfer`.

use clap::{Args, ValueEnum};

/// Arguments of `transfer`.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = TRANSFER_KEYS)]
pub struct TransferArgs {
    /// Largest copy, in MiB. Sizes go from 4 KiB to this, each 16 times the one before.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=65_536))]
    pub max_mb: u64,

    /// How often each measurement is taken, after a first time that does not count; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub rounds: u32,

    /// What to measure; may be given several times. By default all of it.
    #[arg(long, value_name = "PART", value_enum)]
    pub only: Vec<Part>,
}

/// What `transfer` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[expect(clippy::exhaustive_enums, reason = "the command line lists them")]
pub enum Part {
    /// Bandwidth and latency per direction, method and size.
    Copies,
    /// Many small copies: one call each, and together.
    Small,
    /// Copies beside kernels, and beside copies in the other direction.
    Overlap,
    /// The staging ring in virtual time: how long the copy engine stands idle.
    Schedule,
}

const TRANSFER_KEYS: &str = "\
Methods:
  driver pageable   the driver's own copy of ordinary memory, which waits
  driver pinned     the driver's own copy of page-locked memory, waited for: what the others are compared with
  pinned            Transfer::upload, Transfer::download, and on the device Transfer::copy, waited for
  staged            ordinary memory through the staging ring, waited for
  rows              every other 4 KiB of page-locked memory, by Transfer::upload_region and download_region
  file              Transfer::read_file_to_device of a temporary file
On a real device times are the host's, from before the calls until it has waited for what they enqueued, so calling and waiting count. On
a simulated one they are its virtual time. It charges for driver calls and its own work, and not for what the host does, so that
staged copies and files are not measured there: the schedule is.

JSON keys of every row:
  part, device, modelled    what was measured, where, and whether times are the simulator's model
  clock                     \"host\": around calls and waiting, on a real device; or \"virtual\": the simulated device's
copies:
  direction, method, bytes  what was copied, and how
  us, gb_per_s              time of a copy, and bandwidth
  of_driver_pinned          its bandwidth as a share of the driver's own copy of page-locked memory; null for that copy itself,
                            and on the device
small:
  direction, bytes, copies  how many copies of which size
  single_us, batched_us     time of a copy, one call each or as a batch, packing and waiting included
  speedup                   the ratio
  batch_calls_pay_below     up to which size the driver's call for many copies is used; null where there is none, the largest number
                            where it pays at all sizes
overlap:
  what, bytes               which two things ran beside each other
  first_ms, second_ms       what each takes alone
  together_ms               what both take
  overlap                   the share of the shorter one that took no time of its own
schedule:
  direction, link_gb_s, copy_gb_s, call_us   the modelled link, host and driver
  chunk_bytes, chunks, workers               the ring, as it tunes itself
  gb_per_s, idle_share, stalls               of the steady state: bandwidth, share in which the link was idle, late copies
  intact                                     whether every byte arrived";
