//! The choice of the driver's library, in a process of its own, because it comes before anything
//! else.

use std::env;
use std::os::unix::fs::symlink;
use std::process::Command;

use aquifer_cuda::{self as cuda, gpus};
use aquifer_device::ErrorKind;

use crate::bench::standin;

const PATH: &str = "AQUIFER_TEST_CHOSEN_LIBRARY";

#[test]
fn a_library_can_be_chosen_only_before_the_first_use() {
    if let Some(path) = env::var_os(PATH) {
        // SAFETY: the stand-in is a CUDA driver, and nothing here is passed to others.
        unsafe { cuda::set_library("/nowhere/driver.so") }.unwrap();
        assert!(gpus().unwrap_err().to_string().contains("/nowhere/driver.so"), "no other one is tried");
        // SAFETY: as above.
        unsafe { cuda::set_library(path) }.unwrap();
        assert_eq!(gpus().unwrap().len(), 1);
        // SAFETY: as above.
        let late = unsafe { cuda::set_library("libcuda.so.1") }.unwrap_err();
        assert!(late.kind == ErrorKind::InvalidUse && late.to_string().contains("loaded already"), "{late}");
        return;
    }
    let path = env::temp_dir().join(format!("aquifer-chosen-driver-{}.so", std::process::id()));
    symlink(standin().path(), &path).unwrap();
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "library::a_library_can_be_chosen_only_before_the_first_use", "--nocapture"]);
    let output = child.env(PATH, &path).output().unwrap();
    std::fs::remove_file(path).unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
