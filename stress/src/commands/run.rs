//! `run`: runs a program with its GPU memory from this allocator. A library that is loaded before
//! the CUDA driver serves it. On a simulated device, it runs the program without a GPU.

mod check;
mod dry;
mod process;

use std::fs;

use aquifer::memory::Config;

use crate::cli::RunArgs;
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use process::{before_driver, failed, finished, name_of, write_page};

pub(crate) use check::Found;

const LIBRARY: &str = "libaquifer_interposer.so";
const BUILD: &str = "`cargo build --release -p aquifer-interposer` builds it";

/// Runs the program; the outcome is its exit code.
///
/// # Errors
/// When options are wrong, a file cannot be written, a library is missing, or the program cannot be
/// started.
pub fn run(session: &Session, args: &RunArgs) -> Result<Outcome, Failure> {
    if !cfg!(all(target_os = "linux", feature = "cuda")) {
        return Err(Failure::Usage("run works on Linux, in builds with the feature `cuda`".to_owned()));
    }
    session.config()?;
    match session.sim() {
        _ if session.is_default_device() => {}
        Some(_) if args.check => {
            let usage =
                "run --check takes no --device: the program chooses its GPUs. Without a GPU, ci/standin starts both";
            return Err(Failure::Usage(usage.to_owned()));
        }
        Some(sim) => return dry::run(session, args, sim),
        None => {
            let usage = "run takes no --device but a simulated one, such as sim:24GiB: the program chooses its GPUs";
            return Err(Failure::Usage(usage.to_owned()));
        }
    }
    if args.fill.is_some() {
        return Err(Failure::Usage("--fill is about dry runs: name a simulated --device".to_owned()));
    }
    if args.check {
        return check::run(session, args);
    }
    let given = session.configs_or(&[]);
    match &given[..] {
        [config] => config.refuse_pytorch()?,
        _ => check_environment()?,
    }
    let (folder, mut command) = before_driver(args, LIBRARY, BUILD)?;
    let report = folder.0.join("report");
    command.env("AQUIFER_REPORT", &report);
    if let [config] = &given[..] {
        command.env("AQUIFER_ALLOC_CONF", &config.text);
    }
    if !args.pass.is_empty() {
        command.env("AQUIFER_PASS", args.pass.join(","));
    }
    let name = name_of(&command);
    let [snapshots, readings_of] = ["snapshots", "live"].map(|name| folder.0.join(name));
    for path in [&snapshots, &readings_of] {
        fs::create_dir(path).map_err(|cause| failed(path, cause))?;
    }
    if let Some(path) = &args.snapshot {
        command.env("AQUIFER_SNAPSHOT", std::path::absolute(path).map_err(|cause| failed(path, cause))?);
    }
    if args.report.is_some() {
        command.env("AQUIFER_SNAPSHOT", snapshots.join("program.pickle"));
    }
    let outcome = finished(session, args, command, &name, &readings_of)?;
    match fs::read_to_string(&report) {
        Ok(text) => session.message(text.trim_end()),
        Err(_) => {
            session.message("no report: the interposer served no allocation, or the program ended without `exit`")
        }
    }
    if let Some(page) = &args.report {
        // The exit code is the program's.
        if let Err(failure) = write_page(session, &name, &snapshots, page) {
            session.message(format_args!("error: no report page: {failure}"));
        }
    }
    Ok(outcome)
}

/// Checks the options that the program's allocators will read.
fn check_environment() -> Result<(), Failure> {
    let advice = "--config replaces the variable for the allocator, and leaves it to the program";
    Config::from_env().map(drop).map_err(|error| Failure::Usage(format!("{error}\n{advice}")))
}
