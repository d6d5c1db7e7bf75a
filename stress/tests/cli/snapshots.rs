//! `--snapshot`: the content of the files, and errors.

use super::*;

/// A directory that is removed at the end.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("aquifer-stress-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Directory(path)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn value(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn actions<'a>(snapshot: &'a Value, action: &str) -> Vec<&'a Value> {
    let traces = snapshot["device_traces"].as_array().unwrap();
    traces.iter().flat_map(|trace| trace.as_array().unwrap()).filter(|entry| entry["action"] == action).collect()
}

#[test]
fn a_snapshot_of_a_replay_replays_like_the_program() {
    let directory = Directory::new("replays");
    let trace = data("fsdp_start.trace");
    let replayed = |file: &str, more: &[&str]| {
        let rows = rows(0, &[&["--device", "sim:80GiB", "replay", "--repeat", "1", file], more].concat());
        ["events", "allocs", "peak_requested_bytes", "peak_allocated_bytes"].map(|key| bytes(&rows[0], key))
    };
    for name in ["s.pickle", "s.pkl", "s.json"] {
        let out = directory.path(name);
        assert_eq!(replayed(&trace, &["--snapshot", &out]), replayed(&out, &[]), "{name}");
    }
    let snapshot = directory.path("s.json");
    let address = bytes(actions(&value(&snapshot), "alloc")[0], "addr") + 100;
    let owners = rows(0, &["explain", &snapshot, "--address", &format!("{address:#x}")]);
    assert_eq!((bytes(&owners[0], "offset"), bytes(&owners[0], "from") > 0), (100, true));
    let names = std::fs::read_dir(&directory.0).unwrap().count();
    assert_eq!(names, 3, "no other files are left");
}

#[test]
fn a_snapshot_of_oom_shows_the_memory_at_the_refusal() {
    let directory = Directory::new("refusal");
    let out = directory.path("oom.json");
    let row = &rows(0, &["--device", "sim:8GiB", "oom", "--way", "too_big", "--snapshot", &out])[0];
    let snapshot = value(&out);
    let refused = actions(&snapshot, "oom");
    assert_eq!((refused.len(), refused[0]["size"].as_u64() >= row["requested_bytes"].as_u64()), (1, true));
    let allocated = snapshot["segments"].as_array().unwrap().iter().map(|segment| bytes(segment, "allocated_size"));
    assert_eq!(allocated.sum::<u64>(), bytes(row, "allocated_bytes_after"));
}

#[test]
fn a_snapshot_of_several_runs_is_refused() {
    let trace = data("fsdp_start.trace");
    let out = std::env::temp_dir().join("never-written.json");
    let both = ["--config", "", "--config", "backing:segments"];
    for (args, expected) in [
        (&["replay", &trace, &trace][..], "--snapshot takes one program and one --config, not 2 files"),
        (
            &[&["replay", &trace][..], &both].concat(),
            "--snapshot takes one program and one --config, not 2 of --config",
        ),
        (
            &["replay", &trace, "--config", "backing:pytorch"],
            "--snapshot saves what Aquifer has, and --config 'backing:pytorch' asks for a model of PyTorch's allocator: ",
        ),
        (&["oom"], "--snapshot takes one --way, not 9"),
    ] {
        let output = stress(&[args, &["--device", "sim:8GiB", "--snapshot", out.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(errors(&output).contains(&format!("error: {expected}")), "{}", errors(&output));
        assert!(output.stdout.is_empty() && !out.exists());
    }
}

#[test]
fn paths_that_cannot_be_written_are_errors() {
    let trace = data("fsdp_start.trace");
    let output = stress(&["replay", &trace, "--snapshot", "s.txt"]);
    assert_eq!(output.status.code(), Some(2), "before anything runs");
    assert!(errors(&output).contains("the name must end in .pickle, .pkl or .json"), "{}", errors(&output));
    for command in [
        &["replay", &trace, "--snapshot"][..],
        &["oom", "--way", "too_big", "--snapshot"],
        &["run", "--snapshot"],
        &["run", "--report"],
        &["report", &trace, "--output"],
        &["demo", "--report"],
        &["compare", &trace, "--plot"],
    ] {
        for path in ["/nonexistent/s.pickle", "/dev/null/s.pickle", "/"] {
            let ending = match command.last() {
                Some(&"--plot") => "svg",
                Some(&"--report" | &"--output") => "html",
                _ => "pickle",
            };
            let path = path.replace("pickle", ending);
            let output = stress(&[command, &[&path, "--", "true"][..if command[0] == "run" { 3 } else { 1 }]].concat());
            // Others are refused by their ending.
            let expected = if path == "/" { 2 } else { 1 };
            assert_eq!(output.status.code(), Some(expected), "{command:?} {path}: {}", errors(&output));
            assert!(expected == 2 || errors(&output).starts_with(&format!("error: {path}: ")), "{}", errors(&output));
            assert!(output.stdout.is_empty(), "before anything runs");
        }
    }
}

/// As when the disk is full: no file may become long.
#[test]
#[cfg(unix)]
fn files_that_cannot_be_written_in_full_stay_as_they_were() {
    let folder = std::env::temp_dir().join(format!("aquifer-stress-full-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let trace = data("fsdp_start.trace");
    for (command, name) in [
        (&["report", &trace, "--output"][..], "page.html"),
        (&["compare", &trace, "--repeat", "1", "--plot"], "plot.svg"),
        (&["replay", &trace, "--repeat", "1", "--snapshot"], "s.pickle"),
    ] {
        let out = folder.join(name);
        for before in [None, Some("before")] {
            if let Some(before) = before {
                std::fs::write(&out, before).unwrap();
            }
            let mut limited = Command::new("sh");
            let script = "trap '' XFSZ; ulimit -f 4; exec \"$@\"";
            limited.args(["-c", script, "sh", env!("CARGO_BIN_EXE_aquifer-stress")]).args(command).arg(&out);
            let output = limited.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
            assert_eq!(output.status.code(), Some(1), "{command:?}: {}", errors(&output));
            assert!(errors(&output).contains(out.to_str().unwrap()), "{}", errors(&output));
            assert_eq!(std::fs::read_to_string(&out).ok().as_deref(), before, "{command:?}");
        }
    }
    let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["page.html", "plot.svg", "s.pickle"]);
    std::fs::remove_dir_all(&folder).unwrap();
}
