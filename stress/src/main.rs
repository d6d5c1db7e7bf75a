//! The stress program: reads the command line, runs the command, ends with its exit code.

use std::process::ExitCode;

use clap::Parser;

use aquifer_stress::cli::Cli;

fn main() -> ExitCode {
    aquifer_stress::run(&Cli::parse()).into()
}
