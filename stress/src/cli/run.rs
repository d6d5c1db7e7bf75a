//! Arguments of `run`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::{named, snapshot_path, whole};

/// Arguments of `run`.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Save a memory snapshot as OUT, a .pickle, .pkl or .json file, when the program ends, with
    /// the latest 1000000 entries of history.
    ///
    /// `replay` and PyTorch's memory viewer read it. Of several devices, every one after the first
    /// has its ordinal in the file's name. history:N in --config keeps the latest N entries.
    #[arg(long, value_name = "OUT", value_parser = snapshot_path())]
    pub snapshot: Option<PathBuf>,

    /// Write a page about the program's memory as OUT when it ends, as `report` does with a
    /// snapshot; not with --snapshot. Of several processes, the one that ends last is shown.
    #[arg(long, value_name = "OUT", value_parser = named("html", "pages"), conflicts_with = "snapshot")]
    pub report: Option<PathBuf>,

    /// Show memory while the program runs: in a terminal as a chart below its output, otherwise as
    /// lines on standard error at growing intervals, at most a minute apart.
    #[arg(long)]
    pub live: bool,

    /// Leave a function to the driver; may be given several times.
    #[arg(long, value_name = "NAME", value_parser = FUNCTIONS)]
    pub pass: Vec<String>,

    /// Check the order of the program's work and the lifetimes of its memory, which stays the
    /// driver's. docs/checking.md says what is found, and what calls of the driver cannot show.
    ///
    /// Findings go to standard error or, with --json, as rows to standard output, when the program
    /// has ended. If any is certain, the exit code is 5.
    #[arg(long, conflicts_with_all = ["snapshot", "report", "live", "pass", "configs"])]
    pub check: bool,

    /// Leave out the findings that a line of a file matches: text that is part of the finding's
    /// kind, or of a frame of one of its stacks. Lines that begin with # are comments.
    #[arg(long, value_name = "FILE", requires = "check")]
    pub suppress: Option<PathBuf>,

    /// The library to load into the program, if it is not where this program finds it: in its
    /// folder, or in `deps` there.
    #[arg(long = "library", value_name = "PATH")]
    pub preload: Option<PathBuf>,

    /// In a dry run, every Nth condition that the program reads from the device is true, others are
    /// false; 0 makes all false, and 1000 is the default.
    ///
    /// No kernel runs there, so what a program reads is no result. A condition is a single byte; all
    /// else is zeros. Loops that wait for a condition end, after N rounds at the latest.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u64>("number", 0..=u64::MAX))]
    pub fill: Option<u64>,

    /// The CUDA driver's library. By default the one that the program would load:
    /// AQUIFER_CUDA_LIBRARY if it is a path, else libcuda.so.1 on LD_LIBRARY_PATH or where the
    /// system's loader finds it.
    #[arg(long, value_name = "PATH")]
    pub driver: Option<PathBuf>,

    /// The program and its arguments.
    #[arg(required = true, last = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// The functions that the interposer can serve.
const FUNCTIONS: [&str; 4] = ["cuMemAlloc", "cuMemAllocPitch", "cuMemAllocAsync", "cuMemAllocFromPoolAsync"];
