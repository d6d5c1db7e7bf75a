//! Arguments of `transfer`.

use clap::{Args, ValueEnum};

use super::{fitted, mebibytes, whole};

/// Arguments of `transfer`.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = fitted(TRANSFER_KEYS))]
pub struct TransferArgs {
    /// Largest copy, in MiB, such as 16 or 0.5. Sizes go from 4 KiB up to this, each 16 times the
    /// previous one. By default 64; for nvbandwidth on a GPU 512.
    #[arg(long = "max-mb", value_name = "N", allow_negative_numbers = true, value_parser = mebibytes)]
    pub largest: Option<u64>,

    /// How often each measurement is taken, after a first one that does not count; the median is
    /// reported.
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
        value_parser = whole::<u32>("number of rounds", 1..=10_000))]
    pub rounds: u32,

    /// What to measure; may be given several times. By default everything.
    #[arg(long, value_name = "PART", value_enum)]
    pub only: Vec<Part>,
}

impl TransferArgs {
    /// Whether a part is to be measured.
    pub fn measures(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
}

/// A part of `transfer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[expect(clippy::exhaustive_enums, reason = "the command line lists them")]
pub enum Part {
    /// Bandwidth and latency by direction, method and size.
    Copies,
    /// Many small copies: with one call each, and batched.
    Small,
    /// Copies at the same time as kernels, and as copies in the other direction.
    Overlap,
    /// nvbandwidth's copies, with their names: 512 MiB of pinned memory, each way and both ways.
    Nvbandwidth,
    /// vLLM's swap_blocks: 256 blocks of 4 KiB to 4 MiB in another order, each way.
    SwapBlocks,
    /// A model of 7 billion parameters, or as much of it as --max-mb allows, from a safetensors
    /// file, with cold and warm page cache.
    Model,
}

const TRANSFER_KEYS: &str = "\
Methods:
  driver pageable   the driver's own copy of ordinary memory, which waits
  driver pinned     the driver's own copy of pinned memory, waited for: the reference for the others
  pinned            uploads and downloads of pinned memory, and copies on the device, waited for
  staged            ordinary memory through the staging ring, waited for
  rows              every other 4 KiB of pinned memory, or of device memory, as one region
  staged rows       every other 4 KiB of ordinary memory through the staging ring, waited for
  file              a temporary file, uploaded
  copy, rows        from a peer, that is the memory of another device, where there is a second GPU,
                    or from a second simulated device
On a real device, times are measured on the host, from before the calls until it has waited for what
they enqueued, so calling and waiting count. On a simulated device they are its virtual time, which
covers driver calls and the device's own work but not the host's. So staged copies and files are not
measured there. Copies from a simulated peer are timed by the destination, without the peer's own
work before, such as collecting rows.

JSON keys of every row:
  part, device, modelled    what was measured, on which device, and whether times come from the
                            simulator's cost model
  clock                     \"host\": around calls and waiting, on a real device; or \"virtual\":
                            that of the simulated device
copies:
  direction, method, bytes  \"upload\", \"download\", \"on device\" or \"from peer\"; method and size
                            of the copy
  peer, route               the other device, and the route of copies from there; null for others
  us, gb_per_s              time of a copy, and bandwidth
  of_driver_pinned          its bandwidth as a share of the driver's own copy of pinned memory; null
                            for that copy itself, and if both ends are on devices
small:
  direction, bytes, copies  direction, size and number of the copies
  single_us, batched_us     time of a copy, with one call each or as a batch, including packing and
                            waiting
  speedup                   ratio of single_us to batched_us
overlap:
  what, bytes               the two things that ran at the same time, and their size
  first_ms, second_ms       time of each alone
  together_ms               time of both together
  overlap                   the share of the shorter one that took no extra time
nvbandwidth, swap_blocks:
  test                      nvbandwidth's name; \"swap_blocks, in\" is to the device, \"out\" from it
  method                    \"driver\": one of its calls for each copy; \"transfer\", \"batch\": ours. On
                            a simulated device the packing of a batch, on the host, does not count
  bytes, copies             size and number of the copies; of both ways, those that are measured
  us, gb_per_s              time of all, and bandwidth
  of_link                   bandwidth as a share of what the link carries: as simulated, or of PCIe
                            as Linux tells it, where all GPUs have the same; else null
model:
  method                    \"load_safetensors\", or \"read, then copied\" by the driver, in pieces
  page_cache                \"cold\" if the file was taken out of the page cache before, or \"warm\"
  bytes, tensors            size of the model, a file in the folder of temporary files (TMPDIR)
  seconds, gb_per_s         time by the host's clock on every device, and bandwidth";
