//! Arguments of `compare`.

use std::path::PathBuf;

use clap::Args;

use super::{FILES, PassArgs, fitted, svg_path};

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
    #[arg(long, value_name = "OUT", value_parser = svg_path())]
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
