//! `run`: runs a program with its GPU memory from this allocator. A library that is loaded before
//! the CUDA driver serves it.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::cli::RunArgs;
use crate::exit::{Failure, Outcome};
use crate::session::Session;

const LIBRARY: &str = "libaquifer_interposer.so";
/// The names by which programs load the driver, the most common one first.
const DRIVER: [&str; 2] = ["libcuda.so.1", "libcuda.so"];
/// Folders of drivers, in addition to those that the loader lists.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
];

/// Runs the program; the outcome is its exit code.
///
/// # Errors
/// When a library is missing, or the program cannot be started.
pub fn run(session: &Session, args: &RunArgs) -> Result<Outcome, Failure> {
    if !cfg!(all(target_os = "linux", feature = "cuda")) {
        return Err(Failure::Usage("run works on Linux, in builds with the feature `cuda`".to_owned()));
    }
    let library = library(args.interposer.as_deref())?;
    let driver = driver(args.driver.as_deref(), &library)?;
    let folder = Folder::new()?;
    for name in DRIVER {
        folder.link(name, &library)?;
    }
    folder.link("libaquifer_driver.so", &driver)?;
    let report = folder.0.join("report");
    let [program, arguments @ ..] = &args.program[..] else { return Err(Failure::Usage("name a program".to_owned())) };
    let mut command = Command::new(program);
    command.args(arguments).env("LD_LIBRARY_PATH", library_path(&folder.0)).env("AQUIFER_REPORT", &report);
    session.config()?;
    if let [config] = &session.configs_or(&[])[..] {
        command.env("AQUIFER_ALLOC_CONF", &config.text);
    }
    if !args.pass.is_empty() {
        command.env("AQUIFER_PASS", args.pass.join(","));
    }
    if let Some(path) = &args.snapshot {
        command.env("AQUIFER_SNAPSHOT", std::path::absolute(path).map_err(|cause| failed(path, cause))?);
    }
    let mut child = command.spawn().map_err(|cause| failed(Path::new(program), cause))?;
    #[cfg(unix)]
    outlive(&child).map_err(|cause| failed(Path::new(program), cause))?;
    let status = child.wait().map_err(|cause| failed(Path::new(program), cause))?;
    match fs::read_to_string(&report) {
        Ok(text) => session.message(text.trim_end()),
        Err(_) => {
            session.message("no report: the interposer served no allocation, or the program ended without `exit`")
        }
    }
    Ok(Outcome::Program(code(status)))
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
fn code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return u8::try_from(128 + signal).unwrap_or(u8::MAX);
    }
    status.code().map_or(1, |code| u8::try_from(code & 0xFF).unwrap_or(1))
}

fn failed(path: &Path, cause: io::Error) -> Failure {
    Failure::File { path: path.to_owned(), cause }
}

fn library(given: Option<&Path>) -> Result<PathBuf, Failure> {
    let program = env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new(""));
    let searched = match given {
        Some(path) => vec![path.to_owned()],
        // Cargo updates the one in `deps` with every build of this program.
        None => vec![folder.join("deps").join(LIBRARY), folder.join(LIBRARY)],
    };
    found(&searched).ok_or_else(|| {
        let searched: Vec<_> = searched.iter().map(|path| path.display().to_string()).collect();
        let build = "`cargo build --release -p aquifer-interposer` builds it, and --library names it";
        Failure::Library(format!("the interposer's library does not exist: {}; {build}", searched.join(", ")))
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
        Failure::Library(format!("the CUDA driver's library, {}, was not found{named}; --driver names it", DRIVER[0]))
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

fn library_path(folder: &Path) -> std::ffi::OsString {
    let mut path = folder.as_os_str().to_owned();
    if let Some(more) = env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
        path.push(OsStr::new(":"));
        path.push(more);
    }
    path
}

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Folder, Failure> {
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

    fn link(&self, name: &str, target: &Path) -> Result<(), Failure> {
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
