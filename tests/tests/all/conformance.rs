//! These tests again, on other drivers: the whole program is run as a child with
//! `AQUIFER_TEST_DRIVER` set.
//!
//! On a GPU, and in the dry run of that, one test goes after the other: they share a context, in
//! which a capture keeps others from waiting for the device.

use std::io::Write;
use std::process::Command;

use aquifer_tests::runner;
use aquifer_tests::subject::DRIVER;

use crate::transfers::STAGING_THREADS;

/// What tests on a GPU need: queues for as many streams as they have, so that none waits in the
/// queue of another, and all of the driver's own code at once, because loading it later may wait
/// for work.
const ON_A_GPU: [(&str, &str); 2] = [("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")];

/// Runs every test but these on a driver.
fn run_on(driver: &str, arguments: &[&str]) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--skip", "conformance::"]).args(arguments).env(DRIVER, driver).envs(ON_A_GPU);
    run(driver, &mut command);
}

fn run(driver: &str, command: &mut Command) {
    let child = command.output().unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{text}\n{}", String::from_utf8_lossy(&child.stderr));
    let summary = text.lines().find(|line| line.starts_with("test result")).unwrap_or_default();
    say(&format!("on {driver}: {summary}"));
}

/// Says something that is seen even if the test passes.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Whether this is the program that runs the others.
fn is_first() -> bool {
    std::env::var_os(DRIVER).is_none()
}

#[test]
fn the_same_tests_pass_on_the_cuda_driver_over_the_standin() {
    match aquifer_standin::load() {
        _ if !is_first() => {}
        Ok(_) => run_on("standin", &[]),
        Err(error) => say(&format!("skipped: {error}")),
    }
}

#[test]
fn the_same_transfers_pass_with_one_staging_thread() {
    if is_first() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--skip", "conformance::", "transfers::"]).env(DRIVER, "sim").env(STAGING_THREADS, "1");
        if runner::asked().is_none() {
            command.env(runner::PROGRAMS, "100");
        }
        run("sim with one staging thread", &mut command);
    }
}

/// What tests do to a GPU, done to a device of the stand-in.
#[test]
fn the_same_tests_pass_where_they_share_a_device() {
    match aquifer_standin::load() {
        _ if !is_first() => {}
        Ok(_) => run_on("rationed", &["--test-threads=1"]),
        Err(error) => say(&format!("skipped: {error}")),
    }
}

#[test]
fn the_same_tests_pass_on_the_cuda_driver_over_a_gpu() {
    // Asked in a process of its own: in this one the stand-in may have taken the driver's place.
    if !is_first() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let name = ["--exact", "conformance::a_gpu_can_be_used", "--ignored", "--nocapture"];
    let asked = Command::new(program).args(name).output().unwrap();
    let said = String::from_utf8_lossy(&asked.stderr);
    assert!(asked.status.success(), "there is a GPU that cannot be opened: {said}");
    match said.lines().find(|line| line.starts_with(NO_GPU)) {
        Some(why) => say(&format!("skipped, so these tests did not run on a GPU: {why}")),
        None => run_on("cuda", &["--test-threads=1"]),
    }
}

/// How the answer begins where there is none.
const NO_GPU: &str = "no GPU: ";

#[test]
#[ignore = "asked by the test of the same tests on a GPU"]
fn a_gpu_can_be_used() {
    match aquifer::device::gpus() {
        Ok(_) => drop(aquifer::open("cuda:0").unwrap()),
        Err(why) => say(&format!("{NO_GPU}{why}")),
    }
}
