//! A dry run: the program runs on a simulated device, where no kernel computes, and the memory of
//! its tensors is recorded.

use std::fs;
use std::path::{Path, PathBuf};

use aquifer::device::sim::{SimConfig, SimDriver};
use aquifer_device::{Attribute, Driver as _};
use aquifer_trace::Event;
use aquifer_trace::input::{self, Program};
use aquifer_trace::profile::Profile;

use super::process::{DRIVER, Folder, command, failed, finished, library, name_of, preceding, write_page};
use crate::cli::RunArgs;
use crate::commands::study::answers::{of_recording, of_replays};
use crate::commands::study::{Study, without};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::table::terminal_columns;
use crate::text::{Bytes, plural, wrap_lines};

const LIBRARY: &str = "libaquifer_dryrun.so";
const BUILD: &str = "`embed/dryrun/build PYTHON` builds it for the PyTorch of an interpreter";
/// NVIDIA's other library that programs open by its name.
const MANAGEMENT: &str = "libnvidia-ml.so.1";
/// The module that each Python process imports at its start.
const HOOK: &str = include_str!("../../../dryrun/sitecustomize.py");
/// The questions of a study that a dry run answers.
const ASKED: [&str; 4] = ["Who held it", "Where in the code", "What fits", "Which card"];
/// One that it answers if a request was refused.
const REFUSED: &str = "What ran out";
/// What --fill is if it is not given, as its help says.
const FILL: u64 = 1000;
/// The widest line of the report.
const WIDTH: usize = 100;

/// Runs the program on such a device; the outcome is its exit code.
pub(super) fn run(session: &Session, args: &RunArgs, sim: &SimConfig) -> Result<Outcome, Failure> {
    let card = Card::of(sim, session.device_text())?;
    if args.driver.is_some() || !args.pass.is_empty() {
        return Err(Failure::Usage("--driver and --pass are about a GPU's driver, which a dry run has not".to_owned()));
    }
    let library = library(args.preload.as_deref(), LIBRARY, BUILD)?;
    let folder = Folder::new()?;
    for name in DRIVER.into_iter().chain([MANAGEMENT]) {
        folder.link(name, &library)?;
    }
    let [figures, snapshots, live, python] = ["figures", "snapshots", "live", "python"].map(|name| folder.0.join(name));
    for path in [&figures, &snapshots, &live, &python] {
        fs::create_dir(path).map_err(|cause| failed(path, cause))?;
    }
    let hook = python.join("sitecustomize.py");
    fs::write(&hook, HOOK).map_err(|cause| failed(&hook, cause))?;

    let mut command = command(args)?;
    // Before the driver's and the runtime's libraries, by whatever path programs load these.
    command.env("LD_PRELOAD", preceding(&folder.0.join(DRIVER[0]), "LD_PRELOAD"));
    command.env("LD_LIBRARY_PATH", preceding(&folder.0, "LD_LIBRARY_PATH")).env("TRITON_LIBCUDA_PATH", &folder.0);
    command.env("PYTHONPATH", preceding(&python, "PYTHONPATH")).env("CUDA_VISIBLE_DEVICES", "0");
    command
        .env("AQUIFER_DRYRUN_DEVICE", card.to_string())
        .env("AQUIFER_DRYRUN_FILL", args.fill.unwrap_or(FILL).to_string());
    let format = args.snapshot.as_ref().and_then(|path| path.extension()).unwrap_or("pickle".as_ref());
    command.env("AQUIFER_DRYRUN_FIGURES", &figures);
    command.env("AQUIFER_DRYRUN_SNAPSHOTS", &snapshots).env("AQUIFER_DRYRUN_FORMAT", format);
    if let [config] = &session.configs_or(&[])[..] {
        match &config.pytorch {
            Some(options) => {
                let expandable = if options.expandable_segments { ",expandable_segments:True" } else { "" };
                let text = without(&config.text, &["backing", "expandable_segments"]) + expandable;
                command.env("PYTORCH_ALLOC_CONF", text.trim_start_matches(',')).env_remove("PYTORCH_CUDA_ALLOC_CONF");
            }
            None => {
                let history = if config.text.contains("history:") { "" } else { ",history:1000000" };
                let text = format!("{}{history}", config.text);
                command.env("AQUIFER_ALLOC_CONF", text.trim_start_matches(','));
                command.env("AQUIFER_DRYRUN_ALLOCATOR", "aquifer");
            }
        }
    }
    let name = name_of(&command);
    let outcome = finished(session, args, command, &name, &live)?;
    let reported = report(session, args, &name, &card, &figures, |process| {
        snapshots.join(format!("{process}.{}", format.to_string_lossy()))
    });
    if let Outcome::Program(code @ 1..) = outcome {
        session.message(format_args!(
            "the program ended with exit code {code}: what it would have needed later is not known, so it may need a larger \
             device than these figures say"
        ));
    }
    let paged = args.report.as_ref().map_or(Ok(()), |page| write_page(session, &name, &snapshots, page));
    // The exit code is the program's.
    for failure in [reported, paged].into_iter().filter_map(Result::err) {
        session.message(format_args!("error: {failure}"));
    }
    Ok(outcome)
}

/// The simulated card.
struct Card {
    name: String,
    bytes: u64,
    capability: (u32, u32),
    multiprocessors: u64,
    maps: bool,
    shares_host_memory: bool,
}

impl Card {
    /// The card of a device, which has no other settings than a card has.
    fn of(sim: &SimConfig, text: &str) -> Result<Card, Failure> {
        let mut plain = SimConfig::preset(sim.preset);
        (plain.capacity_bytes, plain.other_process_bytes) = (sim.capacity_bytes, sim.other_process_bytes);
        (plain.vmm, plain.seed, plain.checks, plain.reuse) = (sim.vmm, sim.seed, sim.checks, sim.reuse);
        if plain != *sim {
            return Err(Failure::Usage(format!(
                "of a device, a dry run takes its size or preset, other=SIZE and vmm=off, as in sim:h100,other=2GiB, \
                 not all of {text}"
            )));
        }
        let driver = SimDriver::new(plain);
        let info = driver.info();
        Ok(Card {
            name: info.name.clone(),
            bytes: sim.capacity_bytes.saturating_sub(sim.other_process_bytes),
            capability: info.compute_capability,
            multiprocessors: driver.attribute(Attribute::MultiprocessorCount)?,
            maps: info.granularity_bytes.is_some(),
            shares_host_memory: info.shares_host_memory,
        })
    }
}

/// As the library reads it.
impl std::fmt::Display for Card {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Card { name, bytes, capability: (major, minor), multiprocessors, maps, shares_host_memory } = self;
        let [maps, shares] = [maps, shares_host_memory].map(|&flag| u8::from(flag));
        write!(f, "{bytes};{major}.{minor};{multiprocessors};{maps};{shares};{name}")
    }
}

/// What the library counted in a process.
#[derive(Debug, PartialEq)]
struct Figures {
    peak: u64,
    refusals: u64,
    refused: u64,
    reads: u64,
}

impl Figures {
    /// Of a file that the library wrote.
    fn of(path: &Path) -> Option<Figures> {
        let bytes = fs::read(path).ok()?;
        let numbers: Vec<u64> =
            bytes.chunks_exact(8).filter_map(|eight| Some(u64::from_ne_bytes(eight.try_into().ok()?))).collect();
        let [_capacity, _held, peak, refusals, refused, reads] = numbers[..] else { return None };
        Some(Figures { peak, refusals, refused, reads })
    }
}

/// Reports on the processes that used the device, in the order of their ids, and saves the snapshot
/// of the one that held most.
fn report(
    session: &Session,
    args: &RunArgs,
    name: &str,
    card: &Card,
    folder: &Path,
    snapshot_of: impl Fn(u32) -> PathBuf,
) -> Result<(), Failure> {
    let of_file = |entry: fs::DirEntry| Some((entry.file_name().to_str()?.parse().ok()?, Figures::of(&entry.path())?));
    let mut processes: Vec<(u32, Figures)> =
        fs::read_dir(folder).into_iter().flatten().flatten().filter_map(of_file).collect();
    processes.sort_unstable_by_key(|&(process, _)| process);
    if processes.is_empty() {
        session.message("dry run: no process used the device");
    }
    for (process, figures) in &processes {
        let name = if processes.len() > 1 { format!("{name} (process {process})") } else { name.to_owned() };
        let snapshot = Some(snapshot_of(*process)).filter(|path| path.is_file());
        let program = snapshot.map(|path| recorded(&name, &path)).transpose()?.flatten();
        let text = about(session, card, &name, program.as_ref(), figures);
        session.message(wrap_lines(&text, terminal_columns().unwrap_or(WIDTH).min(WIDTH)));
    }
    let Some(to) = &args.snapshot else { return Ok(()) };
    processes.sort_by_key(|(_, figures)| figures.peak);
    match processes.iter().rev().map(|&(process, _)| snapshot_of(process)).find(|path| path.is_file()) {
        Some(from) => {
            fs::copy(from, to).map_err(|cause| failed(to, cause))?;
            session.message(format_args!("snapshot: {}", to.display()));
        }
        None => session.message("no snapshot: no process of Python used PyTorch's memory and ended by itself"),
    }
    Ok(())
}

/// The program of a snapshot, unless it never used memory.
fn recorded(name: &str, path: &Path) -> Result<Option<Program>, Failure> {
    let programs = input::load_with_states(path)?;
    let program = programs.into_iter().find(|program| program.peak_requested_bytes > 0);
    Ok(program.map(|program| Program { name: name.to_owned(), ..program }))
}

/// What a process needed, and what is not included.
fn about(session: &Session, card: &Card, name: &str, program: Option<&Program>, figures: &Figures) -> String {
    let mut lines = vec![format!("dry run: {name} on {}", card.name)];
    let held = format!("{} held from the device", Bytes(figures.peak));
    match program {
        Some(program) => lines.extend(answers(session, name, program, &held)),
        None => {
            lines.push(format!("peak: {held}"));
            if figures.refusals > 0 {
                let (refusals, last) = (plural(figures.refusals, "request"), Bytes(figures.refused));
                lines.push(format!("What ran out: the device refused {refusals}, the last of {last}."));
            }
            lines.push(
                "Who held it: not known. A process of Python tells if it uses PyTorch and ends by itself.".to_owned(),
            );
        }
    }
    lines.push(
        "Not included: a CUDA context with its kernels, some 0.3 to 0.8 GiB, and workspaces of cuDNN.".to_owned(),
    );
    lines.push(match figures.reads {
        0 => "Values: no kernel ran, and the program read nothing from the device.".to_owned(),
        reads => format!(
            "Values: no kernel ran. The program read from the device {} and got what --fill says. What it allocates \
             depending on that may differ from a GPU.",
            plural(reads, "time")
        ),
    });
    lines.join("\n  ")
}

/// What the recording of a process says, which held so much.
fn answers(session: &Session, name: &str, program: &Program, held: &str) -> Vec<String> {
    let profile = Profile::of(program);
    let mut allocated = profile.peak.bytes;
    let mut answers = of_recording(program, &profile, None);
    // The end of a program that a refusal ended is not known, nor what it needs.
    let is_cut_off = program.recorded.ooms.iter().any(|oom| {
        let after = usize::try_from(oom.event).ok().and_then(|event| program.events.get(event..)).unwrap_or_default();
        oom.is_last || !after.iter().any(|event| matches!(event, Event::Alloc { .. }))
    });
    let mut fits = "not this device. What comes after the refusal is not known: --device sim:1TiB shows it.".to_owned();
    if !is_cut_off {
        match Study::of(session, name, program, (profile, None), 0) {
            Ok(study) => {
                let most = study.usual().and_then(|case| case.sampled.allocated.max.iter().max());
                allocated = most.copied().unwrap_or(allocated);
                answers.extend(of_replays(program, &study, &[]));
                fits.clear();
            }
            Err(failure) => fits = format!("not known: {failure}"),
        }
    }
    let is_asked =
        |question: &str| ASKED.contains(&question) || (question == REFUSED && program.recorded.oom().is_some());
    let asked = answers.into_iter().filter(|answer| is_asked(answer.question));
    let mut lines = vec![format!("peak: {} allocated, {held}", Bytes(allocated))];
    // The recording is the run itself.
    lines.extend(asked.map(|answer| {
        let said = answer.answer.replacen("In the recording, the program", "The program", 1);
        format!("{}: {said}", answer.question)
    }));
    lines.extend((!fits.is_empty()).then(|| format!("What fits: {fits}")));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::DeviceArg;

    fn card(text: &str) -> Result<String, String> {
        let device: DeviceArg = text.parse().unwrap();
        let aquifer::device::DeviceSpec::Sim(sim) = device.spec else { panic!("{text}") };
        Card::of(&sim, text).map(|card| card.to_string()).map_err(|failure| failure.to_string())
    }

    #[test]
    fn a_card_is_a_preset_or_a_size() {
        assert_eq!(card("sim:24GiB").unwrap(), "25769803776;9.0;132;1;0;Simulated H100 24 GiB");
        assert_eq!(card("sim:rtx4090").unwrap(), "25769803776;8.9;128;1;0;Simulated RTX 4090 24 GiB");
        assert_eq!(card("sim:gb10,other=8GiB,vmm=off").unwrap(), "128849018880;12.1;48;0;1;Simulated GB10 128 GiB");
        for text in ["sim:24GiB,jitter=off", "sim:h100,lost_at=4", "sim:h100,addresses=1GiB"] {
            assert!(card(text).unwrap_err().contains(text), "{text}");
        }
    }

    #[test]
    fn figures_are_whole_or_none() {
        let folder = Folder::new().unwrap();
        let path = folder.0.join("1");
        let bytes: Vec<u8> = [9_u64, 2, 3, 4, 5, 6].iter().flat_map(|number| number.to_ne_bytes()).collect();
        fs::write(&path, &bytes).unwrap();
        assert_eq!(Figures::of(&path), Some(Figures { peak: 3, refusals: 4, refused: 5, reads: 6 }));
        fs::write(&path, &bytes[..40]).unwrap();
        assert_eq!(Figures::of(&path), None);
        assert_eq!(Figures::of(&folder.0.join("2")), None);
    }
}
