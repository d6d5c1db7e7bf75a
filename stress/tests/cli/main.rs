//! The program from the command line: its output and exit codes.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod compare;
mod gpu;
mod no_fake_driver;
mod replay;
mod run;
mod shows;
mod snapshots;
mod studies;
mod terms;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

fn data(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name).display().to_string()
}

/// The program without a visible GPU, so that tests give the same results on all machines.
fn program(args: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_aquifer-stress"));
    program.args(args).env("CUDA_VISIBLE_DEVICES", "").stdin(Stdio::null());
    program
}

fn stress(args: &[&str]) -> Output {
    program(args).output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The rows of a run that ends with `code`; standard output must have nothing else.
fn rows(code: i32, args: &[&str]) -> Vec<Value> {
    rows_of(code, &stress(&[args, &["--json"]].concat()))
}

fn rows_of(code: i32, output: &Output) -> Vec<Value> {
    assert_eq!(output.status.code(), Some(code), "{}", errors(output));
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

/// The keys in the order of the output.
fn keys(line: &str) -> Vec<String> {
    let row: Value = serde_json::from_str(line).unwrap();
    let mut keys: Vec<String> = row.as_object().unwrap().keys().cloned().collect();
    keys.sort_by_key(|key| line.find(&format!("\"{key}\":")));
    keys
}

fn bytes(row: &Value, key: &str) -> u64 {
    row[key].as_u64().unwrap_or_else(|| panic!("{key} in {row}"))
}

/// A file of the test, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, content: &[u8]) -> Scratch {
        // Tests that run at the same time may use the same names.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("aquifer-stress-{}-{number}-{name}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        Scratch(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
