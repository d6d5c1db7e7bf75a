//! Arguments of `fragmentation`, `graphs`, `oom` and `demo`.

use std::path::PathBuf;

use clap::Args;

use super::{fitted, named, snapshot_path};
use crate::scenarios::Scenario;
use crate::ways::Way;

/// Arguments of `fragmentation`.
#[derive(Debug, Args)]
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

/// Arguments of `graphs`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(GRAPHS_KEYS))]
pub struct GraphsArgs {
    /// Fewer graphs, and fewer operations in each.
    #[arg(long)]
    pub quick: bool,
}

const GRAPHS_KEYS: &str = "\
The programs: one graph; a graph of each of 50 batches in one pool, captured in different orders,
each on a stream of its own; graphs of several streams, which fork and join at each operation, as in
PyTorch's sweep of graph_capture_record_stream_reuse; and a graph that is launched 100 times, each
time with parameters of its own.

JSON keys, per program:
  program, device           the program, and the device
  graphs                    number of graphs
  pass_bytes                memory that the warm-up of the largest pass takes, with its output
  output_bytes              memory of the outputs of all graphs, which live on
  pool_bytes                memory that the graphs' pool holds from the device, without the outputs
  pool_over_pass            ratio of pool_bytes to the most that a pass takes without its output
  pool_over_largest         of graphs that share a pool: ratio of pool_bytes to that of the largest
                            graph alone
  held_bytes                memory that is held from the device once all graphs are captured
  allocated_bytes           the most of it that was allocated at any time
  held_over_allocated       ratio of the two
  driver_bytes              memory that the driver took for the graphs themselves (estimated)
  capture_us                time on the host to warm up and capture a graph, in microseconds
  capture_driver_calls      driver calls of that
  launch_us                 time on the host of a launch
  launch_driver_calls       driver calls of that
  wrong_results             launches that did not compute with their own parameters
  lent_bytes                memory that all graphs, being idle, lend to a request for all memory
  return_us                 time on the host of a launch that brings that back
  violations                pieces of work that the simulated device found unordered; 0 unless there
                            is a bug";

/// Arguments of `oom`.
#[derive(Debug, Args)]
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

/// Arguments of `demo`.
#[derive(Debug, Default, Args)]
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
