//! The command line.

mod replays;
mod run;
mod shows;
mod studies;

use std::error::Error;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use aquifer::device::{DeviceSpec, OpenError};
use aquifer::memory::Config;
use aquifer_allocator::config::{Backing, SplitFrames};
use aquifer_allocator::snapshot::FileFormat;
use aquifer_trace::Options;
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};

pub use replays::{CompareArgs, FitArgs, PassArgs, ReplayArgs};
pub use run::RunArgs;
pub use shows::{DemoArgs, FragmentationArgs, OomArgs};
pub use studies::{AdviseArgs, ExplainArgs, ReportArgs};

use crate::exit::{CODES, Failure};
use crate::table::terminal_columns;
use crate::text::rewrap;

const EXAMPLES: &str = "\
Examples:
  aquifer-stress
  aquifer-stress fragmentation --scenario kv_cache
  aquifer-stress oom --device sim:24GiB
  aquifer-stress explain snapshot.pickle
  aquifer-stress report snapshot.pickle --output report.html
  aquifer-stress replay training.trace.gz
  aquifer-stress replay --device sim:24GiB snapshot.pickle
  aquifer-stress replay --config '' --config max_split_size_mb:128 *.trace.gz
  aquifer-stress fit --json training.trace.gz
  aquifer-stress compare --plot frontier.svg *.trace.gz
  aquifer-stress run --snapshot train.pickle -- python train.py
  aquifer-stress run --device sim:h100 -- python train.py";

const SIMULATED: &str = "\
Settings of simulated devices, such as --device sim:24GiB,seed=7,vmm=off:
  size=SIZE             memory that it has, from 1 MiB to 64 TiB
  ordinal=N             its number among devices
  other=SIZE            memory that other programs hold
  seed=N                of the order in which its work runs, and of how long that takes
  jitter=off            how long work takes does not vary
  link=GB/S             bandwidth to the host
  vmm=off               memory cannot be mapped
  addresses=SIZE        so many addresses can be reserved for mapped memory
  export=off            memory cannot be exported
  checks=off            work beyond a block or after its end, or that reads memory never written, is
                        not detected; the default of replay, fit, compare, explain, advise and
                        report
  reuse=off             a plain allocation gets the lowest address above all earlier ones, while
                        there are any; the default of the same commands
  violations=panic      a race or misuse of memory ends the program
  fault=CALL#N:CODE     the Nth of these calls fails: cuMemAlloc#3:out_of_memory; CALL may be any
  fault_rate=[CALL:]RATE[:CODE]
                        this share of calls fails: cuMemMap:0.01
  oom_at=SIZE           no more memory than this is available
  lost_at=N             the device is lost at the Nth call
  spike=RATE:DURATION   this share of calls takes this much longer: 0.001:5ms; not in modelled
                        times of driver calls";

/// Shows why GPU memory runs out while much of it is free: replays allocation traces, fragments
/// memory, and runs out of it.
///
/// Without a command it runs the demonstration. Results go to standard output, as tables or, with
/// --json, as one JSON object per line. Everything else goes to standard error.
#[derive(Debug, Parser)]
#[command(name = "aquifer-stress", version, max_term_width = 100)]
#[command(after_long_help = format!("{EXAMPLES}\n\n{}", fitted(&format!("{SIMULATED}\n\n{CODES}"))))]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
    /// The command.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Common options")]
pub struct Global {
    /// Device to run on: sim, sim:SIZE, sim:PRESET (both take ,key=value settings), cuda or cuda:N.
    ///
    /// Presets: h100, h200, a100, rtx4090, gb10, orin. Examples: sim:80GiB, sim:h100,
    /// sim:24GiB,seed=7,jitter=off, cuda:0. The default is a real GPU if there is one, else
    /// sim:80GiB. The commands explain, advise, report, fit, compare and demo need devices of
    /// several sizes, so their default is always sim:80GiB; on a GPU, fit and compare use limits of
    /// several sizes. The choice is reported.
    ///
    /// `aquifer-stress --help` lists the settings of simulated devices.
    #[arg(long, global = true, value_name = "SPEC")]
    pub device: Option<DeviceArg>,

    /// Options of the allocator, as in PYTORCH_ALLOC_CONF; may be given several times to compare.
    ///
    /// For example 'backing:segments,limit_mb:4096'; '' means the defaults. The commands explain,
    /// report, replay, fit, compare, fragmentation and demo use each in turn; other commands take
    /// only one. With 'backing:pytorch', explain, report, replay, fit and compare use a model of
    /// PyTorch's allocator instead, which takes PyTorch's options; 'backing:expandable' stands for
    /// 'backing:pytorch,expandable_segments:True'. The environment is not read: to use its options,
    /// pass them with --config "PYTORCH_ALLOC_CONF=$PYTORCH_ALLOC_CONF", for the model, or
    /// --config "AQUIFER_ALLOC_CONF=$AQUIFER_ALLOC_CONF". Options without effect are named in a warning.
    #[arg(long = "config", global = true, value_name = "OPTIONS", allow_hyphen_values = true)]
    pub configs: Vec<ConfigArg>,

    /// Seed of everything random: the simulated device (unless its SPEC sets seed=) and generated
    /// workloads.
    #[arg(long, global = true, value_name = "N", default_value_t = 0, allow_negative_numbers = true,
        value_parser = whole::<u64>("number", 0..=u64::MAX))]
    pub seed: u64,

    /// Print one JSON object per line instead of tables.
    ///
    /// Its keys have PyTorch's names: what tables call holds is `peak_reserved_bytes`, and its
    /// ratio to what is requested is `reserved_over_requested`. Tables leave out columns of zeros,
    /// and the last columns in a narrow terminal; JSON has all keys.
    #[arg(long, global = true)]
    pub json: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
#[non_exhaustive]
pub enum Command {
    /// Explain a recorded program: what uses memory at its peak, what allocators hold for it, how
    /// it runs out of memory, and what helps.
    Explain(ExplainArgs),
    /// Find what wastes memory in recorded programs, and the options and changes that help.
    Advise(AdviseArgs),
    /// Write a page that shows recorded programs: memory over time, what is alive, and what lies
    /// where, under several allocators.
    Report(ReportArgs),
    /// Replay recorded programs: memory, fragmentation, driver calls and speed.
    Replay(ReplayArgs),
    /// Find the smallest device on which recorded programs finish.
    Fit(FitArgs),
    /// Replay and fit recorded programs under several options, side by side.
    Compare(CompareArgs),
    /// Fragment memory in several ways, under several policies side by side, and draw maps of it.
    Fragmentation(FragmentationArgs),
    /// Run out of memory in several ways, read the reports, and recover.
    Oom(OomArgs),
    /// List the options of allocators, which --config and AQUIFER_ALLOC_CONF take.
    Options,
    /// Run a program that is already built, with its GPU memory from this allocator, and report on
    /// it.
    ///
    /// The program runs unchanged, and so do those that it starts. A library placed before the CUDA
    /// driver serves cuMemAlloc, cuMemAllocPitch, cuMemAllocAsync, cuMemAllocFromPoolAsync (of the
    /// default pool) and the functions that free; all others are the driver's. docs/embedding.md
    /// has the list.
    ///
    /// The allocator is configured by --config or, without it, by AQUIFER_ALLOC_CONF, else by
    /// PyTorch's variables. --json has no effect but with --check: standard output is the program's.
    /// The report goes to standard error: for each process that allocated, peaks, memory left at the
    /// end, refusals, and allocations that the driver made and why.
    ///
    /// With --live in a terminal, the program writes to pipes, not to the terminal, and its colours
    /// are left out; so is what other processes write more than a second after its end.
    ///
    /// The exit code is the program's, or 128 and the number of the signal that ended it. There is
    /// no report of a process that ends by a signal or by _exit, nor of a program that loads the
    /// driver by its path, has it on an RPATH, or runs with other privileges than its user's.
    ///
    /// With a simulated --device, this is a dry run: a PyTorch program runs without a GPU, with
    /// PyTorch's own allocator unless --config says otherwise, and no kernel computes. The report
    /// says what the program needs, and which card suffices. docs/dry-run.md says how to build its
    /// library, and what it cannot do.
    Run(RunArgs),
    /// Demonstrate on recorded programs why memory runs out while much of it is free, and what
    /// helps (the default).
    Demo(DemoArgs),
}

pub(crate) const RECORDING: &str = "\
How to record a program:
  PyTorch: before the program allocates, and at its end or where it catches the OutOfMemoryError:
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")
  A program with Aquifer in it, with the option history:1000000, for example in AQUIFER_ALLOC_CONF:
    memory.snapshot().save(\"snapshot.pickle\")?
  The same without a change of the program, when it first runs out of memory:
    AQUIFER_ALLOC_CONF=history:1000000,oom_snapshot:/tmp/oom.pickle
  Any other program on CUDA:
    aquifer-stress run --snapshot snapshot.pickle -- PROGRAM ARGS";

/// Recorded programs.
#[derive(Debug, Args)]
pub struct Recordings {
    /// Recorded programs: files, recognized by their content, not their names; - is standard input.
    ///
    /// They are
    ///   allocation traces (.trace)
    ///   PyTorch memory snapshots with history (.pickle, .json)
    ///   RMM's CSV logs (.csv)
    /// Each may be compressed with gzip, and several may be in a folder, as one snapshot per
    /// rank. Content beyond that of any recording of its size is refused. A file with several
    /// devices, or a folder, has several programs. If files have the same name, their paths
    /// follow the names of the programs.
    ///
    /// Missing information is inferred and noted, or only noted:
    ///   - A block whose free comes first was allocated before the recording began; it is
    ///     allocated first.
    ///   - Memory that is allocated again, or released to the device, was freed just before.
    ///   - Without free_requested entries, blocks are freed when free_completed.
    ///   - A free that other streams delayed is replayed as a use on the stream that most
    ///     likely did.
    ///   - Refused requests are not replayed, except those that ended the program: after them
    ///     nothing was allocated, and at most half of what was live was freed. They are
    ///     replayed as blocks that are freed at once. Notes have their number and the largest
    ///     size.
    ///   - A history of one entry, or one that max_entries has probably cut off, is noted.
    ///
    /// A trace is text with one event per line. IDs and STREAMs are any numbers from 0 on; an
    /// ID may be reused after it was freed:
    ///   # TEXT               a comment; `# name: NAME` names the trace
    ///   a ID BYTES STREAM    allocates a block of BYTES bytes on a stream
    ///   f ID STREAM          frees the block; STREAM is the stream that it was allocated on
    ///   r ID STREAM          the block is also used on another stream
    ///   i N                  iteration N begins
    #[arg(required = true, value_name = "FILE", verbatim_doc_comment)]
    pub files: Vec<PathBuf>,
}

/// The widest help.
pub(crate) const HELP_WIDTH: usize = 100;

/// A help text in lines that fit into the terminal.
pub(crate) fn fitted(text: &str) -> String {
    rewrap(text, HELP_WIDTH, terminal_columns().unwrap_or(HELP_WIDTH).min(HELP_WIDTH))
}

/// Paths with the extension of a snapshot format, so that others are refused before anything runs.
fn snapshot_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| FileFormat::of(&path).map(|_| path))
}

/// Paths whose names end so, of what `whats` are.
fn named(ending: &'static str, whats: &'static str) -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(move |path| {
        let is_named = path.extension().is_some_and(|end| end.eq_ignore_ascii_case(ending));
        if is_named { Ok(path) } else { Err(format!("{whats} are written as .{ending} files")) }
    })
}

/// A device, with its text.
#[derive(Debug, Clone)]
pub struct DeviceArg {
    /// As the user wrote it.
    pub text: String,
    /// The parsed device.
    pub spec: DeviceSpec,
}

impl FromStr for DeviceArg {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<DeviceArg, OpenError> {
        let text = text.trim();
        Ok(DeviceArg { text: text.to_owned(), spec: text.parse()? })
    }
}

/// Options of the allocator, with their text.
#[derive(Debug, Clone, Default)]
pub struct ConfigArg {
    /// As the user wrote it.
    pub text: String,
    /// The options of this project's allocator; if another is asked for, only its limits count.
    pub config: Config,
    /// Asks for a model of PyTorch's allocator, with these options.
    pub pytorch: Option<Options>,
    /// Whether a command tries them without being asked: the allocator's warnings of them are not
    /// shown.
    pub is_trial: bool,
}

impl ConfigArg {
    /// Refuses options that ask for PyTorch's allocator, for commands that need this project's.
    ///
    /// # Errors
    /// For such options.
    pub fn refuse_pytorch(&self) -> Result<(), Failure> {
        if self.pytorch.is_none() {
            return Ok(());
        }
        Err(Failure::Usage(format!(
            "--config '{}' asks for a model of PyTorch's allocator, which explain, report, replay, fit and compare have",
            self.text
        )))
    }

    /// Whether both ask for the same, whatever their texts.
    pub fn is_same(&self, other: &ConfigArg) -> bool {
        (&self.config, &self.pytorch) == (&other.config, &other.pytorch)
    }

    /// The same options with `split_frames:on`, as a trial; `None` if they say whether frames are
    /// split, or are not for mapped memory.
    ///
    /// A recorded program may use them, because one thread does all its work. Nothing is split
    /// unless a request would be refused otherwise.
    pub fn splitting(&self) -> Option<ConfigArg> {
        if self.pytorch.is_some() || self.config.backing != Backing::Paged || self.text.contains("split_frames") {
            return None;
        }
        let mut config = self.config.clone();
        config.split_frames = SplitFrames::On;
        let text = [&*self.text, "split_frames:on"].join(if self.text.is_empty() { "" } else { "," });
        Some(ConfigArg { text, config, pytorch: None, is_trial: true })
    }

    /// The same options as a trial.
    #[must_use]
    pub fn trial(self) -> ConfigArg {
        ConfigArg { is_trial: true, ..self }
    }
}

impl FromStr for ConfigArg {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(text: &str) -> Result<ConfigArg, Self::Err> {
        let text = text.trim();
        let of_pytorch = |name| Some(format!("backing:pytorch,{}", text.strip_prefix(name)?.strip_prefix('=')?));
        let assigned = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"].into_iter().find_map(of_pytorch);
        let text = assigned.as_deref().unwrap_or(text);
        let text = text.strip_prefix("AQUIFER_ALLOC_CONF=").unwrap_or(text).trim_end_matches(',');
        let (pytorch, config) = match Options::parse_model(text)? {
            Some((options, config)) => (Some(options), config),
            None => (None, text.parse()?),
        };
        Ok(ConfigArg { text: text.to_owned(), config, pytorch, is_trial: false })
    }
}

/// A parser of whole numbers, whose error says what is expected, such as a number of passes.
fn whole<T: TryFrom<u64>>(
    what: &'static str,
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| range.contains(number));
        number.and_then(|number| T::try_from(number).ok()).ok_or_else(|| {
            let (least, most) = (range.start(), *range.end());
            let most = if most == u64::MAX { "2^64 - 1".to_owned() } else { most.to_string() };
            format!("expected a whole {what} from {least} to {most}, such as 3")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn numbers_that_are_none_are_answered_with_what_is_expected() {
        let mut command = Cli::command();
        command.build();
        let takes_number = |arg: &&clap::Arg| {
            let name = arg.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
            name.is_some_and(|name| name == "N")
        };
        let mut tried = 0;
        for of in std::iter::once(&command).chain(command.get_subcommands()) {
            for option in of.get_arguments().filter(takes_number).filter_map(|arg| arg.get_long()) {
                for value in ["x", "-1", "1.5x", "", "99999999999999999999"] {
                    let name = if of.get_name() == command.get_name() { "options" } else { of.get_name() };
                    let line = ["aquifer-stress", name, &format!("--{option}"), value];
                    let said = Cli::try_parse_from(line).unwrap_err().to_string();
                    assert!(said.contains(": expected ") && said.contains("such as "), "{line:?}: {said}");
                    tried += 1;
                }
            }
        }
        assert!(tried > 5 * 14, "every command has --seed");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn frames_are_split_in_trials_of_options_that_do_not_say() {
        let splitting = |text: &str| text.parse::<ConfigArg>().unwrap().splitting().map(|arg| arg.text);
        assert_eq!(splitting("").as_deref(), Some("split_frames:on"));
        assert_eq!(splitting("frame_mb:16").as_deref(), Some("frame_mb:16,split_frames:on"));
        for text in ["split_frames:off", "split_frames:on", "backing:segments", "backing:pytorch"] {
            assert_eq!(splitting(text), None, "{text}");
        }
        let trial = ConfigArg::default().splitting().unwrap();
        assert!(trial.is_trial && trial.text.parse::<ConfigArg>().unwrap().config == trial.config);
    }

    #[test]
    fn options_may_be_given_as_the_variables_that_advice_names() {
        let config = |text: &str| text.parse::<ConfigArg>().unwrap();
        for (assigned, same) in [
            ("PYTORCH_ALLOC_CONF=expandable_segments:True", "backing:expandable"),
            ("PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64", "backing:pytorch,max_split_size_mb:64"),
            ("PYTORCH_ALLOC_CONF=", "backing:pytorch"),
            ("AQUIFER_ALLOC_CONF=frame_mb:64", "frame_mb:64"),
        ] {
            assert!(config(assigned).is_same(&config(same)), "{assigned}");
        }
    }

    #[test]
    fn global_options_may_precede_or_follow_the_command() {
        for line in [
            ["aquifer-stress", "--json", "--config", "cross_stream:off", "replay", "x"],
            ["aquifer-stress", "replay", "--json", "--config", " cross_stream:off", "x"],
        ] {
            let cli = Cli::try_parse_from(line).unwrap();
            assert!(cli.global.json);
            assert_eq!(cli.global.configs[0].text, "cross_stream:off");
        }
    }
}
