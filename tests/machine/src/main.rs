//! The random programs from the command line.

mod commands;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs random programs on a device and checks what they see.
///
/// Results go to standard output, as text or, with --json, as one JSON object. Everything else goes to
/// standard error.
#[derive(Debug, Parser)]
#[command(name = "aquifer-machine", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    /// Print a JSON object instead of text.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put memory under load: allocate, write patterns, hand on, copy, verify and free, from many
    /// threads.
    Soak(commands::soak::Args),
    /// Run random programs of several threads under a schedule that a seed fixes, and check
    /// contents, races, statistics and clean-up.
    Simulate(commands::simulate::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let ended = match &cli.command {
        Command::Soak(args) => commands::soak::run(args),
        Command::Simulate(args) => Ok(commands::simulate::run(args)),
    };
    let written = ended.and_then(|(is_clean, row, text)| {
        let shown = if cli.json { row } else { text };
        writeln!(std::io::stdout(), "{shown}")?;
        Ok(is_clean)
    });
    match written {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
