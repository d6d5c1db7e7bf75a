//! Arguments of `fragmentation`, `oom` and `demo`.

use std::path::PathBuf;

use clap::Args;

use super::{named, snapshot_path};
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
