//! Tests that run in a process of their own, because they concern the whole process.

use std::env;
use std::process::Command;

/// Set in the processes that [`in_process`] starts.
const CHILD: &str = "AQUIFER_TEST_CHILD";

/// Runs `body`, a closure of a test function, in a process of its own where `variables` are set.
///
/// # Panics
/// When that process fails.
pub fn in_process<F: FnOnce()>(variables: &[(&str, &str)], body: F) {
    if in_child() {
        if variables.iter().all(|(name, value)| env::var(name).as_deref() == Ok(*value)) {
            body();
        }
        return;
    }
    // A closure's type is named after its function, whose path begins with the crate.
    let name = std::any::type_name::<F>().replace("::{{closure}}", "");
    let test = name.split_once("::").map_or(&*name, |(_, test)| test);
    let mut command = Command::new(env::current_exe().unwrap_or_else(|error| panic!("{error}")));
    command.args(["--exact", test, "--nocapture"]).env(CHILD, "yes").envs(variables.iter().copied());
    let output = command.output().unwrap_or_else(|error| panic!("{error}"));
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{test}: {text}");
}

/// Whether this is a process that [`in_process`] started.
pub fn in_child() -> bool {
    env::var_os(CHILD).is_some()
}
