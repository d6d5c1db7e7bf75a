//! The stress program: reads the command line, runs the command, ends with its exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    match aquifer_stress::parse() {
        Ok(cli) => aquifer_stress::run(&cli).into(),
        Err(answer) => aquifer_stress::answer(&answer).into(),
    }
}
