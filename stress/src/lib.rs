//! The stress program as a library: it replays recorded programs, and makes memory run out on
//! purpose.
//!
//! [`cli`] reads the command line; a [`session::Session`] has the device, the options and the
//! output; one of the [`commands`] runs; [`exit`] defines the exit codes.
//!
//! The crate `aquifer_trace` reads recorded programs and plays them; [`scenarios`] generates
//! synthetic ones. [`room`] and [`map`] show the memory that they leave free.
#![forbid(unsafe_code)]

pub mod cards;
pub mod cli;
pub mod commands;
pub mod content;
pub mod exit;
pub mod lag_bound;
mod live;
pub mod map;
pub mod opened;
pub mod output;
pub mod plot;
pub mod room;
mod row;
pub mod scenarios;
pub mod session;
pub mod stage;
pub mod table;
pub mod text;
pub mod warnings;
pub mod ways;

use std::io::Write;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches};
use cli::{Cli, Command, DemoArgs, RECORDING, fitted};
use exit::{Failure, Outcome};
use row::Row;
use session::Session;

/// Runs the program. Failures are written to standard error.
pub fn run(cli: &Cli) -> Outcome {
    warnings::on_stderr();
    // Then what is written beyond the limit of a file's size is an error, and the process goes on.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
    reported(dispatch(cli))
}

/// The command line. The help of a command ends with the keys of its rows.
pub fn command() -> clap::Command {
    type Help = fn() -> String;
    let keys: [(&str, Help); 9] = [
        ("explain", commands::explain::help),
        ("advise", commands::advise::Advised::help),
        ("replay", commands::replay::Replayed::help),
        ("fit", commands::fit::Fitted::help),
        ("compare", commands::compare::help),
        ("fragmentation", commands::fragmentation::Fragmented::help),
        ("oom", commands::oom::Recovered::help),
        ("run", commands::run::Found::help),
        ("demo", commands::demo::help),
    ];
    keys.into_iter().fold(Cli::command(), |all, (name, keys)| {
        all.mut_subcommand(name, |command| {
            let before = command.get_after_long_help().map_or_else(String::new, |text| format!("{text}\n\n"));
            command.after_long_help(before + &fitted(&keys()))
        })
    })
}

/// Reads the command line.
///
/// # Errors
/// The answer to one that does not run.
pub fn parse() -> Result<Cli, clap::Error> {
    let mut command = command();
    let read = command.try_get_matches_from_mut(std::env::args_os());
    read.and_then(|read| Cli::from_arg_matches(&read)).map_err(|error| error.format(&mut command))
}

/// Writes the answer to a command line that does not run: help, the version, or its error.
pub fn answer(answer: &clap::Error) -> Outcome {
    if answer.use_stderr() {
        // The outcome does not depend on the output.
        let _ = answer.print();
        let lacks_recording = answer.kind() == ErrorKind::MissingRequiredArgument
            && matches!(answer.get(ContextKind::InvalidArg), Some(ContextValue::Strings(lacking))
                if lacking.iter().any(|name| name.starts_with("<FILE>")));
        if lacks_recording {
            let _ = writeln!(std::io::stderr(), "\n{}", fitted(RECORDING));
        }
        return Outcome::Usage;
    }
    let written = answer.print().and_then(|()| std::io::stdout().flush());
    reported(written.map(|()| Outcome::Done).map_err(Failure::from))
}

/// Reports a failure on standard error. The outcome does not depend on that output.
pub fn reported(ended: Result<Outcome, Failure>) -> Outcome {
    match ended {
        Ok(outcome) => outcome,
        Err(Failure::OutputClosed) => Outcome::Done,
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            failure.outcome()
        }
    }
}

fn dispatch(cli: &Cli) -> Result<Outcome, Failure> {
    let global = &cli.global;
    cli.command.iter().try_for_each(output::check)?;
    let measuring = || Session::new(global).map(Session::for_measuring);
    let resizable = |command| Session::resizable(global, command);
    let listing = |list| if list { Session::without_device(global) } else { Session::new(global) };
    match &cli.command {
        None => commands::demo::run(&resizable("demo")?, &DemoArgs::default()),
        Some(Command::Demo(args)) => commands::demo::run(&resizable("demo")?, args),
        Some(Command::Explain(args)) => commands::explain::run(&resizable("explain")?.for_measuring(), args),
        Some(Command::Advise(args)) => commands::advise::run(&resizable("advise")?.for_measuring(), args),
        Some(Command::Report(args)) => commands::report::run(&resizable("report")?.for_measuring(), args),
        Some(Command::Fit(args)) => commands::fit::run(&resizable("fit")?.for_measuring(), args),
        Some(Command::Compare(args)) => commands::compare::run(&resizable("compare")?.for_measuring(), args),
        Some(Command::Replay(args)) => commands::replay::run(&measuring()?, args),
        Some(Command::Fragmentation(args)) => commands::fragmentation::run(&listing(args.list)?, args),
        Some(Command::Oom(args)) => commands::oom::run(&listing(args.list)?, args),
        // Its page replays what was recorded.
        Some(Command::Run(args)) => commands::run::run(&Session::without_device(global)?.for_measuring(), args),
        Some(Command::Options) => commands::options::run(&Session::without_device(global)?),
    }
}
