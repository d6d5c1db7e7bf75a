//! The program that `run` starts: its libraries, its output, its readings and its end.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use aquifer_trace::input;
use crossbeam::channel::Sender;

use crate::cli::RunArgs;
use crate::commands::{files_in, report};
use crate::exit::{Failure, Outcome};
use crate::live::{self, Progress, Reading};
use crate::session::{Output, Session};

/// The names by which programs load the driver, the most common one first.
pub(super) const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// Folders of drivers, in addition to those that the loader lists.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

/// The program's command, with a library of ours in the driver's place. The folder, in which it has
/// the driver's names, is first on the library path, and the driver has another name there.
pub(super) fn before_driver(args: &RunArgs, name: &str, build: &str) -> Result<(Folder, Command), Failure> {
    let library = library(args.preload.as_deref(), name, build)?;
    let driver = driver(args.driver.as_deref(), &library)?;
    let folder = Folder::new()?;
    for name in DRIVER {
        folder.link(name, &library)?;
    }
    folder.link("libaquifer_driver.so", &driver)?;
    let mut command = command(args)?;
    command.env("LD_LIBRARY_PATH", preceding(&folder.0, "LD_LIBRARY_PATH"));
    Ok((folder, command))
}

pub(super) fn command(args: &RunArgs) -> Result<Command, Failure> {
    let [program, arguments @ ..] = &args.program[..] else { return Err(Failure::Usage("name a program".to_owned())) };
    let mut command = Command::new(program);
    command.args(arguments);
    Ok(command)
}

/// The name of the program that a command runs.
pub(super) fn name_of(command: &Command) -> String {
    let program = command.get_program();
    Path::new(program).file_name().unwrap_or(program).to_string_lossy().into_owned()
}

/// Runs the program, with --live in view of what it writes to a folder of readings.
pub(super) fn finished(
    session: &Session,
    args: &RunArgs,
    mut command: Command,
    name: &str,
    readings_of: &Path,
) -> Result<Outcome, Failure> {
    let program = PathBuf::from(command.get_program());
    let status = if args.live {
        command.env("AQUIFER_LIVE", readings_of);
        let progress = || Progress { readings: readings(readings_of) };
        live::watch(session, name, progress, |output| watched(command, output))
    } else {
        ended(command)
    };
    Ok(Outcome::Program(code(status.map_err(|cause| failed(&program, cause))?)))
}

/// Runs a program.
pub(super) fn ended(mut command: Command) -> io::Result<ExitStatus> {
    let mut child = command.spawn()?;
    #[cfg(unix)]
    outlive(&child)?;
    child.wait()
}

/// Runs a program. Where there is a view, passes its output on to it.
fn watched(mut command: Command, output: Option<&Sender<Output>>) -> io::Result<ExitStatus> {
    let Some(view) = output else { return ended(command) };
    // One pipe for both keeps their order.
    let (pipe, writer) = io::pipe()?;
    let mut child = command.stdout(writer.try_clone()?).stderr(writer).spawn()?;
    // It holds the ends of the pipe that are written to.
    drop(command);
    let read = Arc::new(AtomicU64::new(0));
    let reader = std::thread::spawn({
        let (view, read) = (view.clone(), read.clone());
        move || pass_on(pipe, &view, &read)
    });
    #[cfg(unix)]
    outlive(&child)?;
    let status = child.wait()?;
    // Other processes may keep the pipe open.
    let mut before = None;
    while !reader.is_finished() && before != Some(read.load(Ordering::Relaxed)) {
        before = Some(read.load(Ordering::Relaxed));
        let start = Instant::now();
        while !reader.is_finished() && start.elapsed() < SILENCE {
            std::thread::sleep(SILENCE / 100);
        }
    }
    Ok(status)
}

/// After a program's end, its output has ended when nothing was written for so long.
const SILENCE: Duration = Duration::from_secs(1);
/// The longest line that is passed on as one.
const LONGEST_LINE: usize = 64 << 10;

/// Passes on a program's output, line by line, and the starts of lines, such as questions. A
/// carriage return begins the line anew. `read` counts the reads.
fn pass_on(mut pipe: impl io::Read, view: &Sender<Output>, read: &AtomicU64) {
    let text = |line: &[u8]| String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned();
    let whole = |line: &mut Vec<u8>| {
        let text = text(&std::mem::take(line));
        if let Err(unheard) = view.send(Output::Line(text))
            && let Output::Line(text) = unheard.0
        {
            let _ = writeln!(io::stderr(), "{text}");
        }
    };
    let (mut line, mut shown, mut buffer) = (Vec::new(), String::new(), [0; 4096]);
    loop {
        let length = match pipe.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // Output that cannot be read has ended.
            Err(_) | Ok(0) => break,
            Ok(length) => length,
        };
        read.fetch_add(1, Ordering::Relaxed);
        for &byte in &buffer[..length] {
            match byte {
                b'\n' => whole(&mut line),
                b'\r' if line.last() == Some(&b'\r') => {}
                _ if line.last() == Some(&b'\r') => line = vec![byte],
                _ => line.push(byte),
            }
            if line.len() >= LONGEST_LINE {
                whole(&mut line);
            }
        }
        let partial = text(&line);
        if partial != shown {
            let _ = view.send(Output::Partial(partial.clone()));
            shown = partial;
        }
    }
    if !line.is_empty() {
        whole(&mut line);
        let _ = view.send(Output::Partial(String::new()));
    }
}

/// The readings of all processes that write some.
fn readings(folder: &Path) -> Vec<Reading> {
    let is_fresh = |file: &fs::DirEntry| {
        let written = file.metadata().and_then(|data| data.modified());
        written.is_ok_and(|at| at.elapsed().is_ok_and(|age| age < FRESH))
    };
    let files = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).filter(is_fresh);
    let mut processes: Vec<u32> = files.filter_map(|file| file.file_name().to_str()?.parse().ok()).collect();
    processes.sort_unstable();
    let of = |process: u32| {
        let text = fs::read_to_string(folder.join(process.to_string())).unwrap_or_default();
        text.lines().filter_map(|line| reading(process, line)).collect::<Vec<_>>()
    };
    processes.into_iter().flat_map(of).collect()
}

/// The age of readings from which on their process has probably ended. A process writes two a
/// second.
const FRESH: Duration = Duration::from_secs(3);

/// The reading of a line that the interposer wrote.
fn reading(process: u32, line: &str) -> Option<Reading> {
    let figures: Vec<&str> = line.split(' ').collect();
    let [ordinal, limit, reserved, allocated, stranded, allocations, ooms] = figures[..] else { return None };
    Some(Reading {
        name: format!("{process} cuda:{ordinal}"),
        limit: limit.parse().ok()?,
        reserved: reserved.parse().ok()?,
        allocated: allocated.parse().ok()?,
        stranded: stranded.parse().ok()?,
        allocations: allocations.parse().ok()?,
        ooms: ooms.parse().ok()?,
    })
}

/// Writes a page about the snapshots that the program left in a folder: one for each device.
pub(super) fn write_page(session: &Session, name: &str, folder: &Path, page: &Path) -> Result<(), Failure> {
    let mut programs = Vec::new();
    for file in files_in(folder).iter().filter(|file| file.is_file()) {
        programs.extend(input::load_with_states(file)?);
    }
    if programs.is_empty() {
        session.message(
            "no report page: the program left no snapshot. One that calls Aquifer itself saves its own, by \
             aquifer_save_snapshot or where a request is refused, with \
             AQUIFER_ALLOC_CONF=history:1000000,oom_snapshot:FILE.pickle; `report FILE.pickle` makes a page of that",
        );
        return Ok(());
    }
    programs.sort_by_key(|program| program.device);
    let several = programs.len() > 1;
    for program in &mut programs {
        program.name = if several { format!("{name}, device {}", program.device) } else { name.to_owned() };
    }
    report::write(session, &programs, page)?;
    Ok(())
}

/// Lets signals end the program and not this process, which then reports and removes its folder. A
/// terminal interrupts both. Other signals reach only this process, and are passed on.
///
/// Called after the program has started, so that its ignored signals stay ignored.
#[cfg(unix)]
fn outlive(program: &std::process::Child) -> io::Result<()> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
    let mut signals = signal_hook::iterator::Signals::new([SIGHUP, SIGINT, SIGQUIT, SIGTERM])?;
    let id = program.id().to_string();
    std::thread::spawn(move || {
        for signal in signals.forever().filter(|signal| [SIGHUP, SIGTERM].contains(signal)) {
            // Fails if the program has just ended.
            let _ = Command::new("kill").args([format!("-{signal}"), id.clone()]).status();
        }
    });
    Ok(())
}

/// The exit code of a program: 128 plus the signal's number if a signal ended it, as in shells.
pub(super) fn code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    status.code().map_or(1, |code| u8::try_from(code & 0xFF).unwrap_or(1))
}

pub(super) fn failed(path: &Path, cause: io::Error) -> Failure {
    Failure::File { path: path.to_owned(), cause }
}

/// The library that is loaded into the program: the one given, or the one of this name that was
/// built with this program.
pub(super) fn library(given: Option<&Path>, name: &str, build: &str) -> Result<PathBuf, Failure> {
    let program = env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new(""));
    let searched = match given {
        Some(path) => vec![path.to_owned()],
        // Cargo updates the one in `deps` with every build of this program.
        None => vec![folder.join("deps").join(name), folder.join(name)],
    };
    found(&searched).ok_or_else(|| {
        let searched: Vec<_> = searched.iter().map(|path| path.display().to_string()).collect();
        let searched = searched.join(", ");
        Failure::Library(format!("the library {name} does not exist: {searched}; {build}, and --library names it"))
    })
}

fn driver(given: Option<&Path>, library: &Path) -> Result<PathBuf, Failure> {
    let named = env::var_os("AQUIFER_CUDA_LIBRARY").map(PathBuf::from).filter(|path| path.is_absolute());
    let searched = match given.map(Path::to_owned).or(named) {
        Some(path) => vec![path],
        None => {
            let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
            let before = env::split_paths(&listed).filter(|folder| !folder.as_os_str().is_empty());
            let in_folder = |folder: PathBuf| DRIVER.map(|name| folder.join(name));
            let after = FOLDERS.map(PathBuf::from);
            before.flat_map(in_folder).chain(cached()).chain(after.into_iter().flat_map(in_folder)).collect()
        }
    };
    let others: Vec<_> =
        searched.into_iter().filter(|path| path.canonicalize().ok().as_deref() != Some(library)).collect();
    found(&others).ok_or_else(|| {
        let named = given.map_or_else(String::new, |path| format!(" as {}", path.display()));
        Failure::Library(format!(
            "the CUDA driver's library, {}, was not found{named}; --driver names it, or ci/standin stands in",
            DRIVER[0]
        ))
    })
}

/// The first file that exists, by its canonical path.
fn found(paths: &[PathBuf]) -> Option<PathBuf> {
    paths.iter().filter(|path| path.is_file()).find_map(|path| path.canonicalize().ok())
}

/// The drivers of this architecture's word size in the loader's cache.
fn cached() -> Vec<PathBuf> {
    let listed = ["ldconfig", "/sbin/ldconfig"].iter().find_map(|name| Command::new(name).arg("-p").output().ok());
    let text = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let of_driver = |line: &&str| line.trim_start().starts_with("libcuda.so.1 ") && line.contains("64");
    text.lines().filter(of_driver).filter_map(|line| line.split(" => ").nth(1)).map(PathBuf::from).collect()
}

/// A path before those that a variable has.
pub(super) fn preceding(path: &Path, variable: &str) -> std::ffi::OsString {
    let mut paths = path.as_os_str().to_owned();
    if let Some(more) = env::var_os(variable).filter(|more| !more.is_empty()) {
        paths.push(OsStr::new(":"));
        paths.push(more);
    }
    paths
}

/// A folder that is removed at the end.
pub(super) struct Folder(pub(super) PathBuf);

impl Folder {
    pub(super) fn new() -> Result<Folder, Failure> {
        // A folder that was left behind may have the same process number: in containers the numbers
        // repeat.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = env::temp_dir().join(format!("aquifer-run-{}-{now}", std::process::id()));
        let mut builder = fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&path).map_err(|cause| failed(&path, cause))?;
        Ok(Folder(path))
    }

    pub(super) fn link(&self, name: &str, target: &Path) -> Result<(), Failure> {
        let path = self.0.join(name);
        #[cfg(unix)]
        let linked = std::os::unix::fs::symlink(target, &path);
        #[cfg(not(unix))]
        let linked = Err(io::Error::from(io::ErrorKind::Unsupported));
        linked.map_err(|cause| failed(&path, cause))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a view gets of this output, which is read in two parts.
    fn passed_on(text: &[u8], first: usize) -> Vec<String> {
        let (view, output) = crossbeam::channel::unbounded();
        pass_on(io::Read::chain(&text[..first], &text[first..]), &view, &AtomicU64::new(0));
        output.try_iter().map(|output| format!("{output:?}")).collect()
    }

    #[test]
    fn output_is_passed_on_by_lines_and_their_starts() {
        let passed = passed_on(b"one\r\ntwo\r\r\n 1%\r 2%\r50%\r", 14);
        let partial = "Partial(\" 1%\")";
        assert_eq!(
            passed,
            ["Line(\"one\")", "Line(\"two\")", partial, "Partial(\"50%\")", "Line(\"50%\")", "Partial(\"\")"]
        );
        assert_eq!(passed_on(b"a\nb\n", 3), ["Line(\"a\")", "Partial(\"b\")", "Line(\"b\")", "Partial(\"\")"]);
    }

    #[test]
    fn output_without_line_ends_is_passed_on_in_parts() {
        let passed = passed_on(&vec![b'x'; 3 * LONGEST_LINE + 5], 0);
        let lines: Vec<usize> =
            passed.iter().filter(|one| one.starts_with("Line")).map(|line| line.len() - 8).collect();
        assert_eq!(lines, [LONGEST_LINE, LONGEST_LINE, LONGEST_LINE, 5]);
    }

    #[test]
    fn readings_are_of_processes_that_write_them() {
        let folder = Folder::new().unwrap();
        let own = std::process::id();
        fs::write(folder.0.join(own.to_string()), "0 100 60 50 0.2500 7 1\n3 100 damaged\n1 9 8 7 0.0000 6 5\n")
            .unwrap();
        let ended = fs::File::create(folder.0.join("4194305")).unwrap();
        io::Write::write_all(&mut &ended, b"0 100 60 50 0.2500 7 1\n").unwrap();
        ended.set_modified(SystemTime::now() - 2 * FRESH).unwrap();
        fs::write(folder.0.join(format!("{own}.new")), "0 100 60").unwrap();
        let all = readings(&folder.0);
        let [first, _] = &all[..] else { panic!("two devices: {all:?}") };
        assert_eq!((first.reserved, first.allocated, first.allocations, first.ooms), (60, 50, 7, 1));
        assert_eq!((first.name.clone(), first.stranded), (format!("{own} cuda:0"), 0.25));
        assert!(readings(Path::new("/no/such/folder")).is_empty());
    }
}
