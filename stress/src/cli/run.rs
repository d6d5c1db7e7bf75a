//! Arguments of `run`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::{fitted, named, snapshot_path};

/// Arguments of `run`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(RUN))]
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

    /// The interposer's library, if it is not where this program finds it: in its folder, or in
    /// `deps` there.
    #[arg(long = "library", value_name = "PATH")]
    pub interposer: Option<PathBuf>,

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

const RUN: &str = "\
The program runs unchanged, and so do those that it starts. A library placed before the CUDA driver
serves cuMemAlloc, cuMemAllocPitch, cuMemAllocAsync, cuMemAllocFromPoolAsync (of the default pool)
and the functions that free; all others are the driver's. docs/embedding.md has the list.

The allocator is configured by --config or, without it, by AQUIFER_ALLOC_CONF, else by PyTorch's
variables. --device and --json have no effect: the program chooses its GPUs, and standard output is
the program's. The report goes to standard error: for each process that allocated, peaks, memory
left at the end, refusals, and allocations that the driver made and why.

With --live in a terminal, the program writes to pipes, not to the terminal, and its colours are
left out; so is what other processes write more than a second after its end.

The exit code is the program's, or 128 and the number of the signal that ended it. There is no
report of a process that ends by a signal or by _exit, nor of a program that loads the driver by its
path, has it on an RPATH, or runs with other privileges than its user's.";
