//! Programs that are already built, on the stand-in driver with the interposer before it, watched
//! by its race detector.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The folder of the test programs' libraries, and that of the examples.
fn folders() -> (PathBuf, PathBuf) {
    let program = std::env::current_exe().unwrap();
    let libraries = program.parent().unwrap().to_owned();
    let examples = libraries.with_file_name("examples");
    (libraries, examples)
}

/// A folder with the names of the driver, as `aquifer-stress run` makes it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Folder(std::env::temp_dir().join(format!("aquifer-interposer-{}-{name}", std::process::id())));
        fs::create_dir(&folder.0).unwrap();
        let (libraries, _) = folders();
        for (name, library) in [
            ("libcuda.so", "libaquifer_interposer.so"),
            ("libcuda.so.1", "libaquifer_interposer.so"),
            ("libaquifer_driver.so", "libaquifer_standin.so"),
        ] {
            let library = libraries.join(library);
            assert!(library.is_file(), "{} is built with the tests", library.display());
            symlink(library, folder.0.join(name)).unwrap();
        }
        folder
    }

    /// Runs a program, which must end with 0; what it wrote, and the report.
    fn run(&self, command: &mut Command, pass: &str) -> (Output, String) {
        let (report, live) = (self.0.join("report"), self.0.join("live"));
        fs::create_dir_all(&live).unwrap();
        let output = command
            .env("LD_LIBRARY_PATH", &self.0)
            .env("AQUIFER_REPORT", &report)
            .env("AQUIFER_SNAPSHOT", self.0.join("snapshot.json"))
            .env("AQUIFER_LIVE", live)
            .env("AQUIFER_PASS", pass)
            .env("AQUIFER_STANDIN_DEVICES", "1GiB,seed=5;1GiB")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{:?}: {said}", output.status);
        let text = fs::read_to_string(&report).unwrap_or_else(|error| panic!("no report: {error}: {said}"));
        fs::remove_file(report).unwrap();
        (output, text)
    }

    /// Compiles a C program. `None` where there is no compiler.
    fn compile(&self, name: &str, arguments: &[&OsStr]) -> Option<PathBuf> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).with_extension("c");
        let program = self.0.join(name);
        let command = &mut Command::new("cc");
        let command = command.args(["-Wall", "-Werror", "-o"]).args([&program, &source]).args(arguments);
        let Ok(output) = command.args(["-ldl", "-lpthread"]).output() else {
            eprintln!("skipped: there is no C compiler `cc`");
            return None;
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(program)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The number behind some words of a report.
fn count(report: &str, words: &str) -> u64 {
    let behind = report.split(words).nth(1).unwrap_or("0");
    let digits = behind.find(|c: char| !c.is_ascii_digit()).map_or(behind, |end| &behind[..end]);
    digits.parse().unwrap()
}

const SERVED: &str = "allocations served ";

#[test]
fn a_program_of_cudarc_is_served() {
    let folder = Folder::new("cudarc");
    let (_, examples) = folders();
    let (output, report) = folder.run(&mut Command::new(examples.join("plain_cudarc")), "");
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("of 1073741824 bytes are free; 0 violations"), "{said}");
    assert_eq!(count(&report, SERVED), 200, "{report}");
    assert!(
        report.contains("refused for lack of memory 0") && report.contains("at the end: allocated 0 bytes"),
        "{report}"
    );
    assert!(!report.contains("left to the driver"), "{report}");
    let snapshot = fs::read_to_string(folder.0.join("snapshot.json")).unwrap();
    assert!(snapshot.matches("\"alloc\"").count() >= 200);
    let files: Vec<PathBuf> = fs::read_dir(folder.0.join("live"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|file| file.extension().is_none())
        .collect();
    let [file] = &files[..] else { panic!("one process, not {files:?}") };
    let readings = fs::read_to_string(file).unwrap();
    let [ordinal, total, reserved, allocated, external, allocations, ooms] =
        readings.split_whitespace().map(|figure| figure.parse::<f64>().unwrap()).collect::<Vec<_>>()[..]
    else {
        panic!("seven figures of one device, not {readings}")
    };
    assert_eq!((ordinal, total, ooms), (0.0, f64::from(1 << 30), 0.0), "{readings}");
    assert!(allocated <= reserved && (0.0..=1.0).contains(&external) && allocations <= 200.0, "{readings}");
}

#[test]
fn a_c_program_is_served_in_the_order_of_its_streams() {
    let folder = Folder::new("c");
    // Linked to the driver by its name.
    let driver = folders().0.join("libaquifer_standin.so");
    let Some(program) = folder.compile("memory", &[driver.as_os_str()]) else { return };
    for options in ["", "backing:segments", "cross_stream:wait", "no_cache:True"] {
        let (output, report) = folder.run(Command::new(&program).env("AQUIFER_ALLOC_CONF", options), "");
        assert_eq!(count(&report, SERVED), 949, "{options}: {report}");
        assert_eq!(count(&report, "the stream was being captured: "), 3, "{options}: {report}");
        assert_eq!(count(&report, "the pool was the program's own: "), 1, "{options}: {report}");
        assert_eq!(count(&report, "not the device's primary one, or was reset: "), 1, "{options}: {report}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("AQUIFER_PASS=cuMemAlloc"), "{said}");
        assert_eq!(said.matches("was forked from one that had opened a device").count(), 1, "{said}");
    }
    // The detector sees what is not ordered, so the runs above show that all was.
    folder.run(Command::new(&program).arg("race"), "");
}

#[test]
fn a_program_that_opens_the_driver_by_both_names_is_served_each_time() {
    let folder = Folder::new("names");
    let Some(program) = folder.compile("names", &[]) else { return };
    let names = ["libcuda.so.1", "libcuda.so"];
    for first in 0..2 {
        let opened: Vec<&str> = (0..4).map(|place| names[(first + place) % 2]).collect();
        let (output, report) = folder.run(Command::new(&program).args(&opened), "");
        assert_eq!(count(&report, SERVED), 4, "{opened:?}: {}", String::from_utf8_lossy(&output.stdout));
    }
}

#[test]
fn a_stub_of_the_driver_on_the_programs_rpath_is_not_opened() {
    let folder = Folder::new("stub");
    // Libraries without functions: a program that gets one of them finds nothing there.
    let stubs = folder.0.join("stubs");
    fs::create_dir(&stubs).unwrap();
    let path = OsString::from_iter([OsStr::new("-Wl,--disable-new-dtags,-rpath,"), stubs.as_os_str()]);
    let Some(program) = folder.compile("names", &[&path]) else { return };
    let stub = stubs.join("libcuda.so");
    let stubbed = Command::new("cc").args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(stub).output();
    assert!(stubbed.unwrap().status.success());
    let (_, report) = folder.run(Command::new(&program).arg("libcuda.so.1"), "");
    assert_eq!(count(&report, SERVED), 1, "{report}");
}

#[test]
fn functions_can_be_left_to_the_driver() {
    let folder = Folder::new("pass");
    let (_, examples) = folders();
    let (_, report) = folder.run(&mut Command::new(examples.join("plain_cudarc")), "cuMemAllocAsync");
    assert_eq!(count(&report, SERVED), 0, "{report}");
    assert_eq!(count(&report, "AQUIFER_PASS names the function: "), 200, "{report}");
}
