//! Measures this project's allocator, graphs and copies beside the driver and other allocators.
//!
//! `aquifer-bench SET [NAME]...` runs the benchmarks of a set, or those whose names are given or
//! contain one of the given texts. It prints a table of [`row::Row`]s, or with `--json` one object
//! per row. The sets, each described in its file:
//!
//! | set | measures |
//! |---|---|
//! | `pairs` | the time of an allocation and a free, beside a bare index of blocks |
//! | `scale` | how the time of operations grows with the number of streams, pools, blocks, graphs |
//! | `peers` | programs that other projects published, with several allocators |
//! | `calls` | the driver's calls |
//! | `door` | the calls that programs make most |
//! | `graphs` | memory, capture and launch of CUDA graphs |
//! | `transfer` | copies between host and device |
//!
//! Sizes are in bytes, and the ending of a key says the unit. On a simulated device, times that the
//! row calls modelled or virtual come from its cost model, all others from the host's clock.
#![forbid(unsafe_code)]

mod bare;
mod calls;
mod door;
mod graphs;
mod handover;
mod pairs;
mod patterns;
mod peers;
mod row;
mod scale;
mod team;
mod transfer;
mod workload;

use std::path::PathBuf;
use std::process::ExitCode;

use aquifer::Error;
use aquifer::memory::AllocError;
use aquifer_stress::cli::{ConfigArg, Global};
use aquifer_stress::exit::{Failure, Outcome};
use aquifer_stress::session::Session;
use clap::{Parser, ValueEnum};

use row::Row;

/// Measures Aquifer beside other allocators and the driver.
#[derive(Debug, Parser)]
#[command(name = "aquifer-bench", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,

    #[command(flatten)]
    args: Args,
}

#[derive(Debug, clap::Args)]
struct Args {
    /// What to measure.
    #[arg(value_enum)]
    set: Set,

    /// Only the benchmarks of these names, and if there are none, those whose names contain them.
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Fewer rounds and smaller numbers, for a first impression.
    #[arg(long)]
    quick: bool,

    /// How often a call or a copy is measured, after a first time that does not count.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: Option<u32>,

    /// The largest copy, in MiB.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_mb: Option<u32>,

    /// Instead of running `peers`, write its programs into FOLDER as traces for other allocators.
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Set {
    Pairs,
    Scale,
    Peers,
    Calls,
    Door,
    Graphs,
    Transfer,
}

/// What every benchmark gets.
struct Bench {
    session: Session,
    config: ConfigArg,
    args: Args,
}

/// A benchmark of a set.
struct Benchmark {
    name: String,
    /// What runs it, where several do.
    allocator: &'static str,
    run: Run,
}

type Run = Box<dyn Fn(&Bench) -> Result<Vec<Row>, Failure>>;

impl Benchmark {
    fn new(name: impl Into<String>, run: impl Fn(&Bench) -> Result<Vec<Row>, Failure> + 'static) -> Benchmark {
        Benchmark { name: name.into(), allocator: "", run: Box::new(run) }
    }

    fn with(self, allocator: &'static str) -> Benchmark {
        Benchmark { allocator, ..self }
    }
}

fn main() -> ExitCode {
    let Cli { global, args } = Cli::parse();
    aquifer_stress::warnings::on_stderr();
    aquifer_stress::reported(run(&global, args)).into()
}

fn run(global: &Global, args: Args) -> Result<Outcome, Failure> {
    let session = Session::new(global)?.for_measuring();
    if args.set == Set::Calls && !global.configs.is_empty() {
        session.message("warning: --config has no effect here: no allocator makes these calls");
    }
    let config = session.config()?.clone();
    config.refuse_pytorch()?;
    let all = match args.set {
        Set::Pairs => pairs::all(),
        Set::Scale => scale::all(),
        Set::Peers => peers::all(args.quick && args.names.is_empty()),
        Set::Calls => calls::all(),
        Set::Door => door::all(),
        Set::Graphs => graphs::all(),
        Set::Transfer => transfer::all(),
    };
    let chosen = chosen(all, &args.names)?;
    let bench = Bench { session, config, args };
    if let Some(folder) = &bench.args.traces {
        return peers::write_traces(&bench.session, &chosen, folder);
    }
    run_all(&bench, &chosen)
}

/// The benchmarks of these names, or whose names contain them; all if there are no names.
fn chosen(all: Vec<Benchmark>, names: &[String]) -> Result<Vec<Benchmark>, Failure> {
    let known = |name: &String| all.iter().any(|one| one.name == *name);
    let is_wanted = |one: &Benchmark| {
        names.is_empty()
            || names.iter().any(|name| if known(name) { one.name == *name } else { one.name.contains(&**name) })
    };
    if all.iter().any(is_wanted) {
        let wanted: Vec<bool> = all.iter().map(is_wanted).collect();
        return Ok(all.into_iter().zip(wanted).filter_map(|(one, wanted)| wanted.then_some(one)).collect());
    }
    let mut known: Vec<String> = all.into_iter().map(|one| one.name).collect();
    known.dedup();
    Err(Failure::Usage(format!("no benchmark has this name; there are {}", known.join(", "))))
}

/// Runs one after the other. After a failure the others still run.
fn run_all(bench: &Bench, chosen: &[Benchmark]) -> Result<Outcome, Failure> {
    let (session, mut outcome, mut rows) = (&bench.session, Outcome::Done, Vec::new());
    for (number, one) in (1..).zip(chosen) {
        let with = if one.allocator.is_empty() { String::new() } else { format!(", {}", one.allocator) };
        let name = format!("{}{with}", one.name);
        session.message(format_args!("{number} of {}: {name}", chosen.len()));
        match (one.run)(bench) {
            Ok(measured) => {
                for row in measured {
                    outcome = outcome.max(row.outcome());
                    let row = row.of(&one.name, one.allocator, session.device_text());
                    session.row(&row)?;
                    rows.push(row);
                }
            }
            Err(Failure::Transfer(error @ Error::Alloc(AllocError::NotMapped { .. }))) => {
                session.message(format_args!("note: {name}: not measured: {error}"));
            }
            Err(failure) => {
                outcome = outcome.max(failure.outcome());
                session.message(format_args!("error: {name}: {failure}"));
            }
        }
    }
    let tables = if matches!(bench.args.set, Set::Calls) { calls::tables } else { row::tables };
    session.show(tables(&rows.iter().collect::<Vec<_>>()))?;
    Ok(outcome)
}
