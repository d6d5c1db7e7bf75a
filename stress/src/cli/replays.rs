//! Arguments of `replay`, `fit` and `compare`.

use std::path::PathBuf;

use clap::Args;

use super::{Recordings, named, snapshot_path, whole};

/// Arguments of `replay`.
#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,

    /// The passes.
    #[command(flatten)]
    pub passes: PassArgs,

    /// Also time the crate offset-allocator (the yardstick) on the same events: a bare index
    /// without accounting, locks or streams.
    #[arg(long)]
    pub yardstick: bool,

    /// Also replay the events to the driver's own stream-ordered pool (cuMemAllocAsync), on the
    /// same device, after the allocator.
    #[arg(long)]
    pub driver_pool: bool,

    /// Save a memory snapshot as OUT, a .pickle, .pkl or .json file: the memory at the end of a
    /// separate pass, before the blocks that the program leaves allocated are freed, with the
    /// history of this pass.
    ///
    /// This command, `fit`, `compare` and PyTorch's memory viewer read it. For one program and one
    /// --config, in which history:N keeps only the latest N entries.
    #[arg(long, value_name = "OUT", value_parser = snapshot_path())]
    pub snapshot: Option<PathBuf>,
}

/// Options of the passes.
#[derive(Debug, Clone, Args)]
pub struct PassArgs {
    /// How many times each program is run, one after the other in the same allocator.
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true,
        value_parser = whole::<u32>("number of passes", 1..=1_000_000))]
    pub repeat: u32,

    /// Let the simulated device lag N events of the program behind the host: allocations, frees and
    /// uses on other streams.
    ///
    /// The device has reached event max(the latest that the host waited for, now - N), and work
    /// enqueued later is not done.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
        value_parser = whole::<u64>("number of events", 0..=u64::MAX))]
    pub lag: u64,
}

/// Arguments of `fit`.
#[derive(Debug, Args)]
pub struct FitArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,
}

/// Arguments of `compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,

    /// The passes.
    #[command(flatten)]
    pub passes: PassArgs,

    /// Also draw the memory that is held against the time in driver calls as OUT, an .svg file: a
    /// point for each of the options, and the frontier of those that no other one beats in both.
    #[arg(long, value_name = "OUT", value_parser = named("svg", "plots"))]
    pub plot: Option<PathBuf>,
}
