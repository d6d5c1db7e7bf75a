//! The stress program as a library: it replays recorded programs, measures the allocator, and makes it fail on purpose.
//!
//! In the order in which things happen: [`cli`] reads the command line; a [`session::Session`] knows the device, the options
//! and where output goes; one of the [`commands`] runs; [`exit`] says how it ended. [`input`] reads recorded programs, [`scenarios`]
//! makes some up, and [`harness`] plays them to an allocator, to one that is [`observe`]d, or to the [`yardstick`]. [`room`] and [`map`] show the memory
//! that they leave.
#![forbid(unsafe_code)]

pub mod cli;
pub mod commands;
pub mod content;
pub mod driver_pool;
pub mod exit;
pub mod harness;
pub mod input;
pub mod inputs;
pub mod map;
pub mod observe;
pub mod random;
pub mod room;
pub mod scenarios;
pub mod session;
pub mod soak;
pub mod stage;
pub mod subject;
pub mod table;
pub mod text;
pub mod ways;
pub mod workload;
pub mod yardstick;

use cli::{Cli, Command, DemoArgs};
use exit::{Failure, Outcome};
use session::Session;

/// Runs the program and tells how it ended. Failures are written to standard error.
pub fn run(cli: &Cli) -> Outcome {
    warn_on_stderr();
    match dispatch(cli) {
        Ok(outcome) => outcome,
        Err(Failure::OutputClosed) => Outcome::Done,
        Err(failure) => {
            eprintln!("error: {failure}");
            failure.outcome()
        }
    }
}

fn dispatch(cli: &Cli) -> Result<Outcome, Failure> {
    let session = Session::new(&cli.global)?;
    match &cli.command {
        None => commands::demo::run(&session, &DemoArgs::default()),
        Some(Command::Replay(args)) => commands::replay::run(&session, args),
        Some(Command::Fit(args)) => commands::fit::run(&session, args),
        Some(Command::Compare(args)) => commands::compare::run(&session, args),
        Some(Command::Bench(args)) => commands::bench::run(&session, args),
        Some(Command::Calls(args)) => commands::calls::run(&session, args),
        Some(Command::Fragmentation(args)) => commands::fragmentation::run(&session, args),
        Some(Command::Oom(args)) => commands::oom::run(&session, args),
        Some(Command::Soak(args)) => commands::soak::run(&session, args),
        Some(Command::Transfer(args)) => commands::transfer::run(&session, args),
        Some(Command::Demo(args)) => commands::demo::run(&session, args),
    }
}

/// Sends the libraries' warnings to standard error.
fn warn_on_stderr() {
    let subscriber = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::WARN)
        .with_target(false)
        .without_time()
        .finish();
    // Set already only where the library is used by another program, which then has its own.
    let _ = tracing::subscriber::set_global_default(subscriber);
}
