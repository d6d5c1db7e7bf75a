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

    /// Only list the blocks that had this address, such as 0x7f0000000200, one after the other: for
    /// pointers that outlived their memory, as in graphs. Takes snapshots with a history.
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub address: Option<u64>,
}

fn address(text: &str) -> Result<u64, String> {
    let parsed = text.strip_prefix("0x").map_or_else(|| text.parse(), |digits| u64::from_str_radix(digits, 16));
    parsed.map_err(|_| "not an address, such as 0x7f0000000200".to_owned())
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
