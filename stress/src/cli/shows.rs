//! Arguments of `fragmentation`, `oom` and `demo`.

use std::path::PathBuf;

use clap::Args;

use super::{fitted, named, snapshot_path};
use crate::scenarios::Scenario;
use crate::ways::Way;

/// Arguments of `fragmentation`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(FRAGMENTATION_KEYS))]
pub struct FragmentationArgs {
    /// Run only this scenario; may be given several times.
    #[arg(long = "scenario", value_name = "NAME")]
    pub scenarios: Vec<Scenario>,

    /// Only list the scenarios.
    #[arg(long)]
    pub list: bool,

    /// Draw a map of the memory for all options, not only for the defaults.
    #[arg(long)]
    pub maps: bool,

    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,
}

const FRAGMENTATION_KEYS: &str = "\
Each scenario is a synthetic program, sized by the device, followed by one more request: the probe.
The probe is no larger than the free memory, so if it is refused, the cause is fragmentation, or a
limit or headroom among the options. Each --config adds a row.

JSON keys, per scenario and config:
  scenario, config, device  the scenario, the options, and the device
  peak_requested_bytes      the most memory that the program had requested and not yet freed
  peak_allocated_bytes      the most memory that was allocated, after rounding
  peak_reserved_bytes       the most memory that was held from the device
  allocated_bytes, reserved_bytes   memory allocated, and held from the device, at the end of the
                                    program
  free_bytes                free memory then: in the cache, and on the device within limit and
                            headroom
  largest_free_bytes        the largest request that is served then, found by trying, each time
                            after flushing the cache
  unusable_index            the share of free_bytes that the probe cannot use, 0 to 1; 1 if the
                            probe is refused
  request_bytes             size of the probe
  probe_fits                whether the probe was served
  ooms                      requests of the program that were refused
  retries                   times that all cached memory was released to try again
  driver_calls              driver calls that the program caused
  cross_stream_reuses       times that a stream reused memory that another one had freed
  inputs, inputs_damaged    blocks whose head the host filled by transfers; those of them that did
                            not come back intact
  violations                pieces of work that the simulated device found unordered; 0 unless there
                            is a bug
  verdict                   the outcome in words
With --list, per scenario:
  scenario, summary         the scenario, and its description";

/// Arguments of `oom`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(OOM_KEYS))]
pub struct OomArgs {
    /// Run out of memory only in this way; may be given several times.
    #[arg(long = "way", value_name = "NAME")]
    pub ways: Vec<Way>,

    /// Only list the ways.
    #[arg(long)]
    pub list: bool,

    /// Save a memory snapshot as OUT, a .pickle, .pkl or .json file: the memory when the request
    /// has just been refused, with the history up to there.
    ///
    /// `replay` and PyTorch's memory viewer read it. For one --way.
    #[arg(long, value_name = "OUT", value_parser = snapshot_path())]
    pub snapshot: Option<PathBuf>,
}

const OOM_KEYS: &str = "\
Each way sets memory up, writes patterns to it, asks for more than it can get, and then follows the
report's advice. After that the patterns are read back, and the allocator must be as usable as
before.

JSON keys, per way:
  way, device               the way, and the device
  skipped                   why the way was skipped, if it was; the other keys are absent then
  failed                    a failure other than the expected refusal, or the reason that nothing
                            was refused; the other keys are absent then
  requested_bytes           size of the request
  refused                   whether the request was refused
  error                     the first line of the error
  advice                    the advice in the error
  recovered_by              the measure that was taken
  recovered                 whether the request, or another of its size, was served after that
  intact                    whether everything written before reads back as it was written
  usable                    whether the allocator gives everything back in the end, and serves the
                            same requests again
  allocated_bytes_before, allocated_bytes_after, reserved_bytes_before, reserved_bytes_after
                            before the request and after the refusal, before any measure
  violations                pieces of work that the simulated device found unordered
With --list, per way:
  way, summary              the way, and its description
The exit code is 1 if a way failed or did not recover; the remaining ways still run. On a real
device 1/64 of the free memory, at least 256 MiB, is left untouched, because not all of it can be
allocated.";

/// Arguments of `demo`.
#[derive(Debug, Default, Args)]
#[command(after_long_help = fitted(DEMO_KEYS))]
pub struct DemoArgs {
    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,

    /// At the end, write a page about the recorded programs, as `report` does.
    #[arg(
        long,
        value_name = "OUT",
        num_args = 0..=1,
        default_missing_value = "aquifer-report.html",
        value_parser = named("html", "pages")
    )]
    pub report: Option<PathBuf>,
}

const DEMO_KEYS: &str = "\
The recorded programs are built in; each --config adds a row to the comparison, and so does
split_frames:on, which is off by default, where it makes a difference. Devices are simulated. Where
there should be plenty of memory, they have the size of --device or more; where memory should run
out, they have a little more than the program uses. No other programs hold memory of them,
regardless of --device.

JSON keys, by step; sizes are bytes:
  replay    a program on a device with plenty of memory, in a model of PyTorch's allocator, when
            that held the most:
            trace, device_bytes, peak_requested_bytes, peak_reserved_bytes, allocated_bytes,
            unused_segment_bytes (segments with nothing live), pieces, piece_bytes (free blocks
            elsewhere), ooms (requests refused; the other figures are those of served requests)
  oom       the same program on a small device, until a request is refused:
            trace, device_bytes, refused, requested_bytes, free_bytes, largest_free_bytes, error,
            advice, blocks (live then, with known content), damaged (how many of them read
            differently), served_again (whether the same request was served after everything was
            freed), violations
  remap     the same program on that device with the default options:
            trace, device_bytes, refused (the other figures are then those up to there),
            peak_reserved_bytes, reserved_over_requested, remaps (how often memory moved),
            granules_moved (granules that moved), damaged (live blocks that read differently
            half-way), violations
  compare   each program under each set of options:
            trace, config, peak_requested_bytes, peak_reserved_bytes, reserved_over_requested,
            driver_calls, smallest_device_bytes, smallest_over_requested, retries_at_fit (as `fit`
            gives them; null if no device is large enough), ooms (requests refused on a device with
            plenty; the other figures are then those of served requests), violations (0 for
            PyTorch's allocator, whose model accesses no memory)
The exit code is 3 if a request was refused other than in the step oom, or if no device is large
enough under some of the options.";
