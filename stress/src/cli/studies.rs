//! Arguments of `explain`, `advise` and `report`.

use std::path::PathBuf;

use clap::Args;

use super::{RECORDING, Recordings, fitted, named};

/// Arguments of `explain`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(RECORDING))]
pub struct ExplainArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,

    /// Draw maps with ASCII characters only.
    #[arg(long)]
    pub ascii: bool,
}

/// Arguments of `advise`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(RECORDING))]
pub struct AdviseArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,
}

/// Arguments of `report`.
#[derive(Debug, Args)]
#[command(after_long_help = fitted(RECORDING))]
pub struct ReportArgs {
    /// The programs.
    #[command(flatten)]
    pub recordings: Recordings,

    /// The page to write: one .html file, which needs no network.
    #[arg(long, short, value_name = "OUT", default_value = "aquifer-report.html",
        value_parser = named("html", "pages"))]
    pub output: PathBuf,
}
