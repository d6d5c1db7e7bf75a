//! Arguments of the commands that show things: `fragmentation`, `oom` and `demo`.

use clap::Args;

/// Arguments of `fragmentation`.
#[derive(Debug, Args)]
#[command(after_long_help = FRAGMENTATION_KEYS)]
pub struct FragmentationArgs {
    /// Run only this scenario; may be given several times.
    #[arg(long = "scenario", value_name = "NAME")]
    pub scenarios: Vec<String>,

    /// Only tell which scenarios there are.
    #[arg(long)]
    pub list: bool,

    /// Draw a map of the memory for every policy, not only for the defaults.
    #[arg(long)]
    pub maps: bool,

    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,
}

const FRAGMENTATION_KEYS: &str = "\
Each scenario is a made-up program, sized by the device, followed by one more request: the probe. It is no larger than what
is free by then, so it is refused for the way in which the free memory is scattered, or for a limit or headroom among the options.
Each --config is one more policy.

JSON keys, per scenario and policy:
  scenario, policy, device  what was run, with which options, where
  peak_requested_bytes      the most the program had asked for and not yet freed
  peak_allocated_bytes      the most that was allocated, after rounding
  peak_reserved_bytes       the most that was held from the device
  allocated_bytes, reserved_bytes   the same at the end of the program
  free_bytes                what is free then: in the cache, and on the device as far as limit and headroom let it be taken
  largest_free_bytes        the largest request that is served then, found by trying, each after flushing the cache
  unusable_index            the share of free_bytes that is of no use to the probe, 0 to 1; 1 if the probe is refused
  request_bytes             what the probe asks for
  probe_fits                whether it got it
  ooms                      requests of the program that were refused
  retries                   times that all cached memory was released to try again
  driver_allocs             times that memory was taken from the device
  cross_stream_reuses       times that a stream reused memory that another one had freed
  inputs, inputs_damaged    blocks whose head the host filled by transfers; those of them that did not come back as they went
  hazards                   pieces of work that the simulated device found unordered; 0 unless there is a bug
  verdict                   the same in words";

/// Arguments of `oom`.
#[derive(Debug, Args)]
#[command(after_long_help = OOM_KEYS)]
pub struct OomArgs {
    /// Run out of memory only in this way; may be given several times.
    #[arg(long = "way", value_name = "NAME")]
    pub ways: Vec<String>,

    /// Only tell which ways there are.
    #[arg(long)]
    pub list: bool,
}

const OOM_KEYS: &str = "\
Each way sets memory up, writes patterns to it, asks for more than it can get, and then does what the report advises. After
that the patterns are read back, and the allocator must be as usable as before.

JSON keys, per way:
  way, device               what was done, where
  skipped                   why it was not done, if it was not; the other keys are absent then
  failed                    what failed, other than the request that is to be refused, or why nothing was refused; the other
                            keys are absent then
  requested_bytes           what was asked for
  refused                   whether the request was refused
  error                     the first line of the error
  advice                    what would have made the request fit, according to the error
  recovered_by              what was done about it
  recovered                 whether the request, or another of its size, was served then
  intact                    whether everything written before reads as it was written
  usable                    whether the allocator gives everything back in the end, and serves the same again
  allocated_bytes_before, allocated_bytes_after, reserved_bytes_before, reserved_bytes_after
                            before the request and after the refusal, before anything was done about it
  hazards                   pieces of work that the simulated device found unordered
The exit code is 1 if a way failed, after which the others are still gone, or did not go as it should. On a real device one part in 64
of what is free, at least 256 MiB, is left alone, as not all of it can be had.";

/// Arguments of `demo`.
#[derive(Debug, Default, Args)]
#[command(after_long_help = DEMO_KEYS)]
pub struct DemoArgs {
    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,
}

const DEMO_KEYS: &str = "\
The programs come with this one; each --config is one more row of the comparison. Devices are simulated: of the size of
--device or larger where there should be plenty, and a little more than the program uses where memory should run out.

JSON keys, by step; sizes are bytes:
  replay    a program on a device with plenty, when it held most of it:
            trace, device_bytes, peak_requested_bytes, peak_reserved_bytes, allocated_bytes,
            unused_segment_bytes (segments with nothing live), pieces, piece_bytes (free blocks elsewhere), hazards
  oom       the same program on a small device, until a request is refused:
            trace, device_bytes, refused, requested_bytes, free_bytes, largest_free_bytes, error, advice,
            blocks (live then, with known content), damaged (how many of them read differently),
            served_again (whether the same request was served after everything was freed), hazards
  remap     the same program on that device with the default options:
            trace, device_bytes, refused, peak_reserved_bytes, reserved_over_requested, remaps (how often memory moved),
            granules_moved (pieces that did), damaged (live blocks that read differently half-way), hazards
  compare   each program under each options:
            trace, config, peak_requested_bytes, peak_reserved_bytes, reserved_over_requested, driver_allocs,
            smallest_device_bytes, ratio, retries_at_fit (as `fit` gives them), hazards";
