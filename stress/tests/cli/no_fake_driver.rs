//! The program never takes the tests' stand-in driver for a GPU, although its library is in the
//! same target folder and cargo puts that folder on the library path.

use std::path::Path;
use std::process::{Command, Stdio};

/// The files of a folder and of its folder `deps`.
fn files(folder: &Path) -> Vec<String> {
    let folders = [folder.to_path_buf(), folder.join("deps")];
    let entries = folders.iter().filter_map(|folder| folder.read_dir().ok()).flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn the_program_does_not_find_the_stand_in_driver() {
    let program = Path::new(env!("CARGO_BIN_EXE_aquifer-stress"));
    let folder = program.parent().expect("it lies in a folder");
    let files = files(folder);
    // On other systems the library has another name.
    if cfg!(target_os = "linux") {
        assert!(files.iter().any(|name| name == "libaquifer_standin.so"), "the stand-in was built");
    }
    // Files that a loader could take for a driver; an rlib such as cudarc's is not one.
    let loadable = |name: &str| [".so", ".dll", ".dylib"].iter().any(|suffix| name.contains(suffix));
    let fake = |name: &&String| (name.starts_with("libcuda") || name.starts_with("nvcuda")) && loadable(name);
    assert_eq!(files.iter().filter(fake).collect::<Vec<_>>(), Vec::<&String>::new());
    let path = std::env::join_paths([folder, &folder.join("deps")]).expect("paths without colons");
    let output = Command::new(program)
        .args(["demo", "--device", "cuda:0"])
        .env("LD_LIBRARY_PATH", path)
        .stdin(Stdio::null())
        .output()
        .expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    // Names of its devices contain "stand-in". On a machine with a GPU the program finds the GPU,
    // and reports that the demonstration uses a simulated device.
    assert!(!said.contains("stand-in"), "{said}");
    let found = said.contains("device cuda:0: ") && said.contains("demo simulates devices");
    assert_eq!(output.status.success(), found, "{said}");
    assert!(found || said.contains("no real GPU can be used: "), "{said}");
}
