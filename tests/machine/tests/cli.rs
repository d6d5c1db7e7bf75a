//! The program from the command line: its output and exit codes.

#![expect(clippy::unwrap_used, reason = "a test may fail")]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// The program without a visible GPU, so that tests give the same results on all machines.
fn program(args: &[&str]) -> Command {
    let mut program = Command::new(env!("CARGO_BIN_EXE_aquifer-machine"));
    program.args(args).arg("--json").env("CUDA_VISIBLE_DEVICES", "");
    program
}

fn errors(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The row of a run that ends well.
fn row(args: &[&str]) -> Value {
    row_of(&program(args).output().unwrap())
}

fn row_of(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", errors(output));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn simulated_programs_are_clean() {
    let first = row(&["simulate", "--seeds", "100..140"]);
    assert_eq!((&first["first_seed"], &first["seeds"], &first["failures"]), (&100.into(), &40.into(), &0.into()));
    assert_eq!(row(&["simulate", "--replay", "100"])["seeds"], 1);
    // In processes of their own: threads that are not simulated may hold locks of all allocators.
    let again = row(&["simulate", "--seeds", "100..140"]);
    for fixed in ["steps", "safety_checks", "liveness_checks", "needless_waits", "turns", "driver_calls"] {
        assert_eq!(first[fixed], again[fixed], "a seed fixes everything: {fixed}");
    }
    assert_eq!(first["virtual_seconds"], again["virtual_seconds"]);
}

#[test]
fn wrong_use_is_explained() {
    for (args, reason) in [
        (&["simulate", "--seeds", "7"][..], "expected two whole numbers A..B"),
        (&["simulate", "--seeds", "7..7"], "expected two whole numbers A..B"),
        (&["simulate", "--seeds", "b..9"], "expected two whole numbers A..B"),
        (&["soak", "--minutes", "0"], "such as 5 or 0.5"),
        (&["soak", "--ops", "0"], "0 is not in"),
        (&["soak", "--threads", "0"], "0 is not in"),
        (&["soak", "--limit-mb", "18446744073709551615"], "--limit-mb"),
        (&["soak", "--device", "x"], "possible values: sim, standin, cuda, rationed"),
    ] {
        let output = program(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(errors(&output).contains(reason), "{}", errors(&output));
    }
}

#[test]
fn a_soak_prints_its_figures() {
    let soak = row(&["soak", "--ops", "500", "--seeds", "2"]);
    assert_eq!((&soak["steps"], &soak["seeds"], &soak["failures"]), (&1000.into(), &2.into(), &0.into()));
    assert!(soak["compared_bytes"].as_u64().unwrap() > 1 << 20, "{soak}");
    let timed = row(&["soak", "--minutes", "0.02", "--ops", "50", "--threads", "1", "--config", "backing:segments"]);
    assert!(timed["seeds"].as_u64().unwrap() > 1, "as many as the time allows: {timed}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_soak_sums_up() {
    let mut soak = program(&["soak", "--minutes", "10"]);
    let soak = soak.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Time for it to begin; before that the signal would end it.
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert!(Command::new("kill").args(["-INT", &soak.id().to_string()]).status().unwrap().success());
    let row = row_of(&soak.wait_with_output().unwrap());
    assert!(row["steps"].as_u64().unwrap() > 0 && row["seconds"].as_f64().unwrap() < 300.0, "{row}");
}
