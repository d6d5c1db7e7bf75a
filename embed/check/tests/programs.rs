//! Programs on the stand-in driver with the checker before it.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// The folder of the test programs' libraries.
fn libraries() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().to_owned()
}

fn example(name: &str) -> Command {
    Command::new(libraries().with_file_name("examples").join(name))
}

/// A folder with the names of the driver, as `aquifer-stress run --check` makes it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let folder = Folder(std::env::temp_dir().join(format!("aquifer-check-{}-{name}", std::process::id())));
        fs::create_dir(&folder.0).unwrap();
        for (name, library) in [
            ("libcuda.so", "libaquifer_check.so"),
            ("libcuda.so.1", "libaquifer_check.so"),
            ("libaquifer_driver.so", "libaquifer_standin.so"),
        ] {
            let library = libraries().join(library);
            assert!(library.is_file(), "{} is built with the tests", library.display());
            symlink(library, folder.0.join(name)).unwrap();
        }
        folder
    }

    /// Runs a program, which must end with 0; what it wrote, its findings, and the lines after them.
    fn run(&self, command: &mut Command) -> (Output, Vec<Value>, Vec<Value>) {
        let (output, found, rest) = self.run_to_any_end(command);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("aquifer:"), "{:?}: {said}", output.status);
        (output, found, rest)
    }

    fn run_to_any_end(&self, command: &mut Command) -> (Output, Vec<Value>, Vec<Value>) {
        let file = self.0.join("findings");
        let output = command
            .env("LD_LIBRARY_PATH", &self.0)
            .env("AQUIFER_CHECK", &file)
            .env("AQUIFER_STANDIN_DEVICES", "1GiB,seed=5;1GiB")
            .output()
            .unwrap();
        let text = fs::read_to_string(&file).unwrap();
        fs::remove_file(file).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let (found, rest) = lines.partition(|line: &Value| line["count"] == 1);
        (output, found, rest)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn each_bug_is_found_and_its_mended_form_has_none() {
    let folder = Folder::new("bugs");
    for (name, kind, first, second) in [
        ("merged_free_list", "unordered-work", "cuMemsetD8Async", "cuMemsetD8Async"),
        ("leftovers_of_a_region", "unordered-work", "cuMemsetD8Async", "cuMemsetD8Async"),
        ("stale_graph", "stale-graph", "cuMemFree_v2", "cuMemsetD8Async"),
        ("zeroed_elsewhere", "unordered-work", "cuMemsetD8_v2", "cuMemcpyDtoDAsync_v2"),
        ("destroyed_stream", "freed-in-use", "cuMemsetD8Async", "cuMemFreeAsync"),
        ("batch_reads_late", "freed-in-use", "cuMemcpyBatchAsync", "cuMemFreeHost"),
        ("pinned_returned_early", "unordered-work", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
        ("panic_in_capture", "stale-graph", "cuMemFreeAsync", "cuMemsetD8Async"),
        ("freed_during_download", "freed-in-use", "cuMemcpyDtoHAsync_v2", "cuMemFreeAsync"),
        ("pageable_upload", "unordered-work", "cuMemcpyHtoD_v2", "cuMemcpyDtoDAsync_v2"),
        ("used_after_free", "use-after-free", "cuMemFreeAsync", "cuMemsetD8Async"),
        ("freed_twice", "freed-twice", "cuMemFree_v2", "cuMemFree_v2"),
        ("freed_by_another_family", "wrong-free", "cuMemAllocHost_v2", "cuMemFree_v2"),
        ("freed_under_a_kernel", "freed-in-use", "cuLaunchKernel", "cuMemFreeAsync"),
        ("unmapped_early", "freed-in-use", "cuMemsetD8Async", "cuMemUnmap"),
    ] {
        let (_, found, _) = folder.run(example("bugs").arg(name));
        let [found] = &found[..] else { panic!("{name}: one finding, not {found:#?}") };
        let is = [&found["kind"], &found["first"]["call"], &found["second"]["call"]];
        assert_eq!(is, [kind, first, second], "{name}");
        assert_eq!(found["certain"], name != "freed_under_a_kernel", "{name}");
        for place in ["first", "second"] {
            assert!(found[place]["stack"].to_string().contains("bugs::"), "{name}: {found:#}");
        }
        assert_eq!(found["second"]["launched"].is_array(), kind == "stale-graph", "{name}");
        assert!(!found["advice"].as_str().unwrap().is_empty());
        let (_, found, _) = folder.run(example("bugs").args([name, "fixed"]));
        assert!(found.is_empty(), "{name} fixed: {found:#?}");
    }
}

#[test]
fn right_programs_have_no_certain_finding() {
    let folder = Folder::new("right");
    let (_, found, _) = folder.run(example("bugs").arg("right"));
    assert!(found.is_empty(), "{found:#?}");
    let (output, found, rest) = folder.run(&mut example("plain_cudarc_checked"));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("; 0 violations"), "{said}");
    assert!(found.is_empty(), "{found:#?}");
    assert_eq!((&rest[0]["kernels"], &rest[0]["kernels_unread"]), (&100.into(), &0.into()));
    // A driver that does not tell the sizes of parameters.
    let mut old = example("plain_cudarc_checked");
    let (.., rest) = folder.run(old.env("AQUIFER_STANDIN_FAIL", "cuFuncGetParamInfo#1:500"));
    assert_eq!((&rest[0]["kernels"], &rest[0]["kernels_unread"]), (&100.into(), &100.into()));
}

#[test]
fn a_program_that_aborts_leaves_its_findings() {
    let folder = Folder::new("aborts");
    let (output, found, rest) = folder.run_to_any_end(example("bugs").args(["stale_graph", "abort"]));
    assert!(!output.status.success());
    assert_eq!((found.len(), &found[0]["kind"], rest.len()), (1, &"stale-graph".into(), 0));
}

#[test]
fn equal_findings_are_one() {
    let folder = Folder::new("counted");
    let (_, found, rest) = folder.run(example("bugs").args(["merged_free_list", "fixed", "100"]));
    assert!(found.is_empty() && rest.len() == 1, "{found:#?} {rest:#?}");
    let (_, found, rest) = folder.run(example("bugs").args(["merged_free_list", "", "100"]));
    assert_eq!((found.len(), &rest[0]["number"], &rest[0]["count"]), (1, &found[0]["number"], &100.into()));
}
