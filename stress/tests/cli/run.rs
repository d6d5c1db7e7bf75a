//! `run`. The program that it runs is mostly this program itself, which measures the driver's pool:
//! the allocator serves it then.
#![cfg(target_os = "linux")]

use super::*;

fn run(options: &[&str], program: &[&str]) -> Output {
    command(options, program).output().unwrap()
}

fn command(options: &[&str], program: &[&str]) -> Command {
    let driver = Path::new(env!("CARGO_BIN_EXE_aquifer-stress")).with_file_name("deps").join("libaquifer_standin.so");
    let mut command = super::program(&["run"]);
    command.arg("--driver").arg(driver).args(options).arg("--").args(program);
    command.env_remove("CUDA_VISIBLE_DEVICES").env("AQUIFER_STANDIN_DEVICES", "16GiB");
    command
}

/// Whether this process ignores a signal, and so the programs that it starts.
fn ignores(signal: u32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let set = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    u64::from_str_radix(set, 16).unwrap() >> (signal - 1) & 1 != 0
}

const THIS: &str = env!("CARGO_BIN_EXE_aquifer-stress");

#[test]
fn a_program_is_served_and_a_report_follows() {
    let (file, snapshot) = (data("fsdp_start.trace"), Scratch::new("run.json", b""));
    let replay = [THIS, "replay", "--json", "--repeat", "1", "--device", "cuda:0", "--driver-pool", &file];
    let output = run(&["--config", "limit_mb:8192", "--snapshot", snapshot.path()], &replay);
    let row = rows_of(0, &output).remove(0);
    let served = format!("allocations served {}, refused for lack of memory 0", bytes(&row, "allocs"));
    let said = errors(&output);
    assert!(said.contains(&served) && said.contains("peak: allocated 6.89 GiB, reserved "), "{said}");
    let saved: Value = serde_json::from_slice(&std::fs::read(snapshot.path()).unwrap()).unwrap();
    assert_eq!(
        saved["device_traces"][0].as_array().unwrap().iter().filter(|entry| entry["action"] == "alloc").count(),
        861
    );
    let passed = run(&["--pass", "cuMemAllocAsync"], &replay);
    assert!(errors(&passed).contains("AQUIFER_PASS names the function: 861"), "{}", errors(&passed));
}

#[test]
fn the_exit_code_is_that_of_the_program() {
    let ended = |script: &str| run(&[], &["sh", "-c", script]);
    let output = ended("echo written; exit 7");
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(7), &b"written\n"[..]));
    assert!(errors(&output).contains("no report"), "{}", errors(&output));
    assert_eq!(ended("kill -9 $$").status.code(), Some(137));
    let folder = String::from_utf8(ended("echo ${LD_LIBRARY_PATH%%:*}").stdout).unwrap();
    assert!(folder.contains("aquifer-run-") && !Path::new(folder.trim()).exists(), "{folder}");
    assert_eq!(run(&[], &["/no/such/program"]).status.code(), Some(1));
    assert_eq!(run(&["--library", "/no/such/library"], &["true"]).status.code(), Some(1));
    assert_eq!(run(&["--pass", "cuMemFree"], &["true"]).status.code(), Some(2));
}

/// Signals to this process alone are passed on; those of a terminal reach both processes. Signals
/// that are ignored from the start, as under `nohup`, stay ignored.
#[test]
fn signals_are_passed_on_as_far_as_the_terminal_does_not() {
    let check = |ignored: &str, signal: &str, number, is_passed_on: bool| {
        let script = format!(
            "trap 'exit 6' TERM HUP; echo ${{LD_LIBRARY_PATH%%:*}}; sleep 0.3; kill -{signal} $PPID; sleep 1; exit 5"
        );
        let run = command(&[], &["sh", "-c", &script]);
        let arguments = [run.get_program()].into_iter().chain(run.get_args());
        let ignoring = format!("[ -z \"{ignored}\" ] || trap '' {ignored}; exec \"$@\"");
        let mut shell = Command::new("sh");
        for (name, value) in run.get_envs() {
            match value {
                Some(value) => shell.env(name, value),
                None => shell.env_remove(name),
            };
        }
        let output = shell.args(["-c", &ignoring, "sh"]).args(arguments).stdin(Stdio::null()).output().unwrap();
        let ends = if is_passed_on && !ignores(number) { 6 } else { 5 };
        assert_eq!(output.status.code(), Some(ends), "{signal}, ignored: {ignored:?}: {}", errors(&output));
        let folder = String::from_utf8(output.stdout).unwrap();
        assert!(folder.contains("aquifer-run-") && !Path::new(folder.trim()).exists(), "{signal}: {folder}");
    };
    // All at once: each mostly sleeps.
    std::thread::scope(|scope| {
        scope.spawn(|| check("", "INT", 2, false));
        scope.spawn(|| check("", "QUIT", 3, false));
        scope.spawn(|| check("", "TERM", 15, true));
        scope.spawn(|| check("", "HUP", 1, true));
        scope.spawn(|| check("HUP TERM", "HUP", 1, false));
    });
}

#[test]
fn wrong_options_and_files_are_known_before_the_program_starts() {
    let program = ["echo", "started"];
    let refused = |command: &mut Command, code: i32, text: &str| {
        let output = command.output().unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(code), &b""[..]), "{}", errors(&output));
        assert!(errors(&output).contains(text), "{text}: {}", errors(&output));
    };
    refused(&mut command(&["--config", "max_split_mb:40"], &program), 2, "unknown option `max_split_mb`");
    refused(&mut command(&["--config", "backing:expandable"], &program), 2, "asks for a model of PyTorch's allocator");
    refused(&mut command(&["--config", "", "--config", "limit_mb:1"], &program), 2, "takes one --config");
    for (name, value) in [("AQUIFER_ALLOC_CONF", "limit_mb:x"), ("PYTORCH_CUDA_ALLOC_CONF", "backends:native")] {
        refused(command(&[], &program).env(name, value), 2, name);
        let output = command(&["--config", ""], &program).env(name, value).output().unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(0), &b"started\n"[..]), "{}", errors(&output));
    }
    for (option, path) in [("--snapshot", "/no/such/folder/file.pickle"), ("--report", "/no/such/folder/page.html")] {
        refused(&mut command(&[option, path], &program), 1, path);
    }
}

#[test]
fn a_page_shows_the_memory_of_the_program() {
    let (file, page) = (data("fsdp_start.trace"), Scratch::new("page.html", b""));
    let replay = [THIS, "replay", "--json", "--repeat", "1", "--device", "cuda:0", "--driver-pool", &file];
    let output = run(&["--report", page.path()], &replay);
    assert!(output.status.success() && errors(&output).contains(page.path()), "{}", errors(&output));
    let html = std::fs::read_to_string(page.path()).unwrap();
    assert!(html.contains("\"title\":\"aquifer-stress\"") && html.contains("\"events\":"), "a page about the program");
    let output = run(&["--report", page.path()], &["true"]);
    assert!(
        output.status.success() && errors(&output).contains("no snapshot. One that calls Aquifer"),
        "{}",
        errors(&output)
    );
    let output = run(&["--report", page.path(), "--snapshot", "x.pickle"], &["true"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn readings_are_lines_where_there_is_no_terminal() {
    let output = run(&["--live"], &["sh", "-c", "sleep 4; echo done; exit 3"]);
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(3), &b"done\n"[..]));
    assert!(errors(&output).contains(" s, 0 allocations/s, 0 OOMs: no memory yet\n"), "{}", errors(&output));
}

/// The library itself is tested with its crate. Here a shell writes a finding in its place.
#[test]
fn certain_findings_of_a_check_are_an_exit_code() {
    let checked = |certain: bool, options: &[&str]| {
        let place = |frame: &str| serde_json::json!({"call": "cuMemFree_v2", "stream": null, "stack": [frame], "launched": null});
        let line = serde_json::json!({
            "number": 1, "process": 7, "program": "sh", "certain": certain, "kind": "freed-twice", "count": 1,
            "what": "it frees memory that was freed", "advice": "let one owner free it", "address": 4096, "bytes": 64,
            "first": place("pool::give (pool.rs:7)"), "second": place("pool::drop (pool.rs:9)"),
        });
        let options: Vec<&str> = ["--check"].iter().chain(options).copied().collect();
        run(&options, &["sh", "-c", &format!("echo '{line}' >> $AQUIFER_CHECK; exit 3")])
    };
    let output = checked(true, &[]);
    assert_eq!(output.status.code(), Some(5));
    let said = errors(&output);
    assert!(said.starts_with("Aquifer checked calls") && said.contains("certain: freed-twice, 1 time"), "{said}");
    assert!(said.contains("  second: cuMemFree_v2\n    at pool::drop (pool.rs:9)\n"), "{said}");
    assert_eq!(checked(false, &[]).status.code(), Some(3));
    let rows = rows_of(5, &checked(true, &["--json"]));
    assert_eq!(
        (&rows[0]["kind"], &rows[0]["second"]["stack"][0]),
        (&"freed-twice".into(), &"pool::drop (pool.rs:9)".into())
    );
    let file = Scratch::new("suppressed", b"# known\npool::drop\n");
    let output = checked(true, &["--suppress", file.path()]);
    assert_eq!(output.status.code(), Some(3));
    assert!(
        errors(&output).contains("suppressed: 1") && !errors(&output).contains("freed-twice"),
        "{}",
        errors(&output)
    );
    for options in [&["--check", "--live"][..], &["--check", "--config", ""], &["--suppress", "x"]] {
        assert_eq!(run(options, &["true"]).status.code(), Some(2), "{options:?}");
    }
    assert_eq!(run(&["--check", "--suppress", "/no/such/file"], &["true"]).status.code(), Some(4));
}

#[test]
fn a_replay_on_the_drivers_pool_has_no_findings() {
    let file = data("fsdp_start.trace");
    let replay = [THIS, "replay", "--json", "--repeat", "1", "--device", "cuda:0", "--driver-pool", &file];
    let output = run(&["--check"], &replay);
    rows_of(0, &output);
    assert!(errors(&output).contains("Certain findings: 0; possible ones: 0"), "{}", errors(&output));
}

/// A dry run with another library than its own, which the program does not call.
fn dry(options: &[&str], script: &str) -> Output {
    let library = Path::new(THIS).with_file_name("deps").join("libaquifer_standin.so");
    let options = [&["run", "--library", library.to_str().unwrap()], options, &["--", "sh", "-c", script]].concat();
    program(&options).env_remove("PYTHONPATH").env_remove("PYTORCH_ALLOC_CONF").output().unwrap()
}

#[test]
fn a_dry_run_prepares_the_program_and_reports_on_its_processes() {
    let show = "echo \"$AQUIFER_DRYRUN_DEVICE $AQUIFER_DRYRUN_FILL $CUDA_VISIBLE_DEVICES\"; \
                wc -l <$PYTHONPATH/sitecustomize.py; echo $PYTHONPATH; exit 3";
    let output = dry(&["--device", "sim:rtx4090,other=1GiB", "--fill", "7"], show);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
    assert!(errors(&output).contains("no process used the device"), "{}", errors(&output));
    assert!(errors(&output).contains("ended with exit code 3: what it would have needed later"), "{}", errors(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    let [device, lines, python] = said.lines().collect::<Vec<_>>()[..] else { panic!("{said}") };
    assert_eq!(device, format!("{};8.9;128;1;0;Simulated RTX 4090 24 GiB 7 0", 23_u64 << 30));
    assert!(lines.trim().parse::<u32>().unwrap() > 50 && !Path::new(python).exists(), "{said}");

    // What the library and the module leave of a process.
    let figures: Vec<u8> =
        [80 << 30, 0, 7 << 30, 0, 0, 2].iter().flat_map(|number: &u64| number.to_ne_bytes()).collect();
    let (figures, history) = (Scratch::new("figures", &figures), data("fsdp_start.pickle.gz"));
    let counted = format!("cp {} $AQUIFER_DRYRUN_FIGURES/17", figures.path());
    let recorded = format!("{counted}; cp {history} $AQUIFER_DRYRUN_SNAPSHOTS/17.pickle");
    let (saved, page) = (Scratch::new("saved.pickle", b""), Scratch::new("page.html", b""));
    let output = dry(&["--device", "sim:h100", "--snapshot", saved.path()], &recorded);
    let said = errors(&output).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "dry run: sh on Simulated H100 80 GiB peak: 6.89 GiB allocated, 7.00 GiB held from the device Who held it: ",
        "What fits: The smallest device on which it finishes: ",
        "Which card: ",
        "Not included: a CUDA context",
        "The program read from the device 2 times",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("What ran out"), "{said}");
    assert_eq!(std::fs::read(saved.path()).unwrap(), std::fs::read(&history).unwrap());
    // This card shares the host's memory, where a replay that runs out of it would end.
    let said = errors(&dry(&["--device", "sim:gb10", "--report", page.path()], &recorded));
    assert!(said.contains("Which card: ") && said.contains("report: "), "{said}");
    assert!(std::fs::metadata(page.path()).unwrap().len() > 100_000);

    // Without a history: a program that is not PyTorch's, or was killed.
    let said = errors(&dry(&["--device", "sim:h100", "--snapshot", saved.path()], &counted));
    for part in ["peak: 7.00 GiB held from the device", "Who held it: not known", "\nno snapshot: "] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // A report that fails leaves the exit code.
    let damaged = format!("{counted}; echo damaged >$AQUIFER_DRYRUN_SNAPSHOTS/17.pickle; exit 4");
    let output = dry(&["--device", "sim:h100"], &damaged);
    assert!(output.status.code() == Some(4) && errors(&output).contains("error: "), "{}", errors(&output));
}

#[test]
fn wrong_options_of_a_dry_run_are_known_before_the_program_starts() {
    let refused = |options: &[&str], code: i32, text: &str| {
        let output = dry(options, "echo started");
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(code), &b""[..]), "{}", errors(&output));
        assert!(errors(&output).contains(text), "{text}: {}", errors(&output));
    };
    refused(&["--device", "cuda:0"], 2, "no --device but a simulated one");
    refused(&["--device", "sim:24GiB,jitter=off"], 2, "not all of sim:24GiB,jitter=off");
    refused(&["--device", "sim:24GiB", "--pass", "cuMemAlloc"], 2, "which a dry run has not");
    refused(&["--device", "sim:24GiB", "--config", "limit_mb:x"], 2, "limit_mb");
    let missing = stress(&["run", "--device", "sim:24GiB", "--library", "/no/such/library", "--", "true"]);
    assert!(missing.status.code() == Some(1) && errors(&missing).contains("`embed/dryrun/build PYTHON` builds it"));
}

#[test]
fn a_dry_run_has_the_allocator_of_the_options() {
    let show = "echo \"$PYTORCH_ALLOC_CONF;$AQUIFER_ALLOC_CONF;$AQUIFER_DRYRUN_ALLOCATOR\"";
    let with = |options: &[&str]| {
        let output = dry(&[&["--device", "sim:24GiB"], options].concat(), show);
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    };
    assert_eq!(with(&[]), ";;");
    assert_eq!(with(&["--config", "backing:expandable"]), "expandable_segments:True;;");
    assert_eq!(with(&["--config", "backing:pytorch,max_split_size_mb:64"]), "max_split_size_mb:64;;");
    assert_eq!(with(&["--config", ""]), ";history:1000000;aquifer");
    assert_eq!(with(&["--config", "limit_mb:64,history:5"]), ";limit_mb:64,history:5;aquifer");
}
