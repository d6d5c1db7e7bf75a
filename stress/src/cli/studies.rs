//! Arguments of `explain`, `advise` and `report`.

use std::path::PathBuf;

use clap::Args;

use super::{FILES, RECORDING, fitted, named};

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{RECORDING}\n\n{FILES}\n\n{EXPLAIN_KEYS}")))]
pub struct ExplainArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,
}

const EXPLAIN_KEYS: &str = "\
A program is replayed under PyTorch's allocator with its default options, with those that a snapshot
names, and with expandable segments, and under this project's with each --config. With --device they
all run on that device, else on one with plenty of memory. Frames are not split by default; where
split_frames:on makes a difference, it is shown, too. The smallest card has room for a CUDA context
of 0.5 GiB. Several programs of a file or folder are the ranks of a job: the one that needs most is
explained, and the others stand in a table.

JSON keys, per program:
  trace                     the program
  events, streams           allocations, frees and uses on other streams; number of streams
  peak_requested_bytes, peak_event, peak_blocks
                            the most memory that the program had requested and not yet freed, the
                            event after which that was, from 1, and the blocks live then
  alive                     groups of these blocks: what they are grouped by (tag, stack, size or
                            stream), the group's name, all frames of its call stack (detail), bytes
                            and blocks
  allocators                for each: name, config, peak_reserved_bytes, reserved_over_requested,
                            smallest_device_bytes, smallest_card, ooms (requests refused),
                            driver_calls, driver_time_modelled_us; with ooms, the ratio is null, and
                            the others are those of the served requests
  oom                       how the program runs out of memory with the options that the snapshot
                            names, or else with PyTorch's default options: on the device of
                            --device, or, where that suffices, on one that is made up, of 2 % more
                            than it uses in multiples of 2 MiB: device_bytes, is_made_up, event,
                            requested_bytes, free_bytes, largest_free_bytes (the largest piece of
                            that), finishes_with (allocators that finish there, found by trying);
                            null if it finishes
  advice                    as of `advise`, without the name of the program; null without a history,
                            and for all programs of a file or folder but the one that needs most";

/// Arguments of `advise`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{RECORDING}\n\n{FILES}\n\n{ADVISE_KEYS}")))]
pub struct AdviseArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
}

const ADVISE_KEYS: &str = "\
Options are tried by replaying the program with each, on the device of --device, or else on one with
plenty of memory. An option is advised only if the program finishes there with it. It must save at
least 2 % of what the options of the snapshot hold, or else PyTorch's default options, unless the
program does not finish with these. Changes of the program
are found in its events: arrays that are replaced by larger ones again and again, blocks that
outlive their iteration (in recordings with iterations), streams that use most at different times,
and sizes that hardly repeat.

JSON keys, per piece of advice:
  trace, title, text        the program, what to do, and the evidence
  saves                     bytes that are held less; null if more are held, or that is not known
  config, options           for options: as for --config, and as for the environment variable that
                            the title names
  peak_reserved_bytes, smallest_device_bytes, driver_time_modelled_us
                            what the allocator holds with them, the smallest device, and the driver
                            time, by the simulator's cost model
  peak_reserved_bytes_before, smallest_device_bytes_before, driver_time_modelled_us_before
                            the same with the snapshot's options, or else PyTorch's defaults; for
                            fewer driver calls, with Aquifer's defaults; the first and the last are
                            null if a request was refused then";

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(&format!("{RECORDING}\n\n{FILES}")))]
pub struct ReportArgs {
    /// Recorded programs.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,

    /// The page to write: one .html file, which needs no network.
    #[arg(long, short, value_name = "OUT", default_value = "aquifer-report.html",
        value_parser = named("html", "pages"))]
    pub output: PathBuf,
}
