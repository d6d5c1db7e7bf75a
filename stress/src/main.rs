//! The stress program: reads the command line, runs the command, ends with its exit code.

use std::process::ExitCode;

use clap::Parser;

use aquifer_stress::cli::Cli;

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => aquifer_stress::run(&cli).into(),
        Err(answer) => aquifer_stress::answer(&answer).into(),
    }
}
