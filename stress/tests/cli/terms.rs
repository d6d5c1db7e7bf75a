//! Common behaviour of all commands: help, wrong use, messages, output.

use aquifer_stress::text::rewrap;

use super::compare::{COMPARE_KEYS, MEAN_KEYS};
use super::replay::REPLAY_KEYS;
use super::*;

#[test]
fn wrong_use_is_explained() {
    let file = data("fsdp_start.trace");
    let cases: [(&[&str], i32, &str); 12] = [
        (&["replay", "--device", "sim:x", &file], 2, "presets"),
        (&["replay", "--device", "sim:h100,foo=1", &file], 2, "`foo` at byte 9"),
        (&["replay", "--config", "foo:1", &file], 2, "unknown option `foo`"),
        (&["replay", "--config", "max_split_mb:128", &file], 2, "max_split_size_mb"),
        (&["replay"], 2, "required"),
        (&["replay", "--repeat", "0", &file], 2, "--repeat"),
        (&["replay", "--device", "cuda:99", &file], 1, "GPU"),
        (&["oom", "--config", "", "--config", ""], 2, "takes one --config"),
        (&["frobnicate"], 2, "frobnicate"),
        (&["report", &file, "--output", "-"], 2, ".html"),
        (&["report", &file, "--output", "snapshot.pickle"], 2, ".html"),
        (&["report", &file, "--output", "/nonexistent/page.html"], 1, "/nonexistent/page.html: No such file"),
    ];
    for (args, code, reason) in cases {
        let output = stress(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(reason), "{args:?}: {}", errors(&output));
        assert!(output.stdout.is_empty());
    }
}

/// Who has no recording learns how to make one.
#[test]
fn without_a_recording_commands_say_how_to_make_one() {
    let (text, empty) = (Scratch::new("some.txt", b"hello world"), Scratch::new("empty.pickle", b""));
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-recordings");
    std::fs::create_dir_all(&folder).unwrap();
    let cases: [(&[&str], i32, &str); 5] = [
        (&["explain"], 2, "error: the following required arguments were not provided"),
        (&["advise"], 2, "error: the following required arguments were not provided"),
        (&["explain", text.path()], 4, "found text that begins with \"hello world\""),
        (&["report", empty.path()], 4, "the file is empty"),
        (&["replay", folder.to_str().unwrap()], 4, "the folder has no files"),
    ];
    for (args, code, error) in cases {
        let output = stress(args);
        let said = errors(&output);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
        let ways = ["torch.cuda.memory._record_memory_history(", "_dump_snapshot(", "oom_snapshot:", "run --snapshot"];
        assert!(said.contains(error) && ways.iter().all(|way| said.contains(way)), "{args:?}: {said}");
    }
    let damaged = Scratch::new("damaged.trace", b"a 0 x 0\n");
    let said = errors(&stress(&["replay", damaged.path()]));
    assert!(said.ends_with(":1: \"x\" is not a valid size\n"), "a damaged recording is one: {said}");
    let said = errors(&stress(&["explain", "missing.pickle"]));
    assert!(said.ends_with("error: missing.pickle: No such file or directory (os error 2)\n"), "{said}");
}

/// The lines of each table, beginning with its headings.
fn tables(text: &str) -> Vec<Vec<&str>> {
    let lines: Vec<&str> = text.lines().collect();
    let is_rule = |line: &&&str| line.starts_with('─');
    let headings = (1..lines.len()).filter(|&at| is_rule(&&lines[at]) && lines[at - 1].contains("  "));
    headings
        .map(|at| {
            lines[at - 1..at + 1]
                .iter()
                .chain(lines[at + 1..].iter().take_while(|line| !is_rule(line)))
                .copied()
                .collect()
        })
        .collect()
}

/// One word for one figure, in the tables of all commands.
#[test]
fn tables_call_a_figure_by_one_name() {
    let file = Scratch::new("program.trace", b"a 0 5242880 0\na 1 18874368 0\nf 0 0\nf 1 0\n");
    let of_program = ["holds", "holds, ratio", "driver calls"];
    let of_device = ["smallest device", "smallest device, ratio"];
    let cases: [(&[&str], &[&str]); 5] = [
        (&["explain", file.path()], &["holds", "holds, ratio", "smallest device", "driver calls"]),
        (&["replay", file.path()], &of_program),
        (&["fit", file.path()], &of_device),
        (&["compare", file.path()], &[of_program, ["smallest device", "smallest device, ratio", "options"]].concat()),
        (&["fragmentation", "--device", "sim:1GiB", "--scenario", "streams"], &["holds", "driver calls", "options"]),
    ];
    for (args, wanted) in cases {
        let text = String::from_utf8(program(args).env("COLUMNS", "400").output().unwrap().stdout).unwrap();
        let headings: Vec<&str> = tables(&text).iter().flat_map(|table| table[0].split("  ")).map(str::trim).collect();
        for wanted in wanted {
            assert!(headings.contains(wanted), "{args:?}: {wanted}: {headings:?}");
        }
        for other in ["ratio", "its ratio", "config", "policy", "trace", "index", "warm calls", "takes", "reserved"] {
            assert!(!headings.contains(&other), "{args:?}: {other}: {headings:?}");
        }
    }
}

#[test]
fn the_choice_of_a_device_is_reported() {
    let file = data("fsdp_start.trace");
    let output = stress(&["replay", "--json", &file]);
    assert!(errors(&output).contains("device sim:80GiB: Simulated"), "{}", errors(&output));
    let output = stress(&["replay", "--json", "--device", "sim:24GiB", &file]);
    assert!(errors(&output).contains("as asked for"), "{}", errors(&output));
}

#[test]
fn options_without_effect_are_reported_once() {
    let file = data("fsdp_start.trace");
    let output = stress(&["fit", "--config", "expandable_segments:True", &file]);
    assert_eq!(errors(&output).matches("expandable_segments").count(), 2, "{}", errors(&output));
}

/// A warning names all options of a configuration that have no effect on this memory.
#[test]
fn options_without_effect_are_named_in_one_warning() {
    let file = data("fsdp_start.trace");
    let warnings = |device: &str, config: &str| {
        let said = errors(&stress(&["fit", "--device", device, "--config", config, &file]));
        let warnings = said.lines().filter(|line| line.starts_with("warning: --config"));
        warnings.map(str::to_owned).collect::<Vec<_>>()
    };
    let of_pytorch = "large_segment_size_mb:32,max_split_size_mb:64,max_non_split_rounding_mb:64";
    let named = of_pytorch.replace(',', ", ");
    assert_eq!(
        warnings("sim:80GiB", &format!("{of_pytorch},pinned_free_catch_all:True")),
        [format!(
            "warning: --config '{of_pytorch},pinned_free_catch_all:True': options without effect: {named} (the sizes \
             of blocks and segments follow fixed rules); pinned_free_catch_all:True (pinned host memory has \
             a pool of its own, which has options of its own)"
        )]
    );
    assert_eq!(warnings("sim:80GiB,vmm=off", of_pytorch).len(), 1);
    assert!(warnings("sim:80GiB", "backing:segments,limit_mb:70000").is_empty());
    let [warning] = &warnings("sim:80GiB", "backing:segments,granule_mb:4")[..] else { panic!("one warning") };
    assert!(warning.contains("granule_mb:4 (for mapped memory only"), "{warning}");
}

#[test]
fn standard_input_is_a_file_like_others() {
    let read = |name: &str| {
        let file = std::fs::File::open(data(name)).unwrap();
        let output = program(&["replay", "--json", "--repeat", "1", "-"]).stdin(file).output().unwrap();
        rows_of(0, &output).remove(0)
    };
    assert_eq!(read("fsdp_start.trace")["trace"], "fsdp_start");
    assert_eq!(read("fsdp_start.pickle.gz")["trace"], "standard input");
    let output = stress(&["replay", "-"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(errors(&output).contains("error: standard input: the file is empty"), "{}", errors(&output));
}

#[test]
fn a_closed_standard_output_is_not_an_error() {
    let file = data("fsdp_start.trace");
    let mut child = program(&["replay", "--json", "--config", "", "--config", "cross_stream:off", &file])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    assert!(!errors(&output).contains("error"), "{}", errors(&output));
}

#[test]
fn modelled_times_are_marked_in_every_table() {
    let (file, device) = (data("fsdp_start.trace"), ["--device", "sim:24GiB"]);
    let commands: [&[&str]; 3] =
        [&["replay", &file], &["compare", "--repeat", "1", "--config", "backing:segments", &file], &["explain", &file]];
    for command in commands {
        let text = String::from_utf8(stress(&[command, &device[..]].concat()).stdout).unwrap();
        for table in tables(&text).iter().filter(|table| table[0].contains("µs") || table[0].contains(" ms")) {
            assert!(table.iter().any(|line| line.contains("modelled")), "{command:?}: {table:?}");
        }
        assert!(text.contains("modelled"), "{command:?}: {text}");
    }
}

#[test]
fn help_has_exit_codes_and_keys() {
    let help = |args: &[&str]| String::from_utf8(stress(args).stdout).unwrap();
    let common = help(&["--help"]);
    assert!(common.contains("Exit codes"));
    let replay = help(&["replay", "--help"]);
    assert!(REPLAY_KEYS.iter().all(|key| replay.contains(key)) && replay.contains("--lag"));
    let compare = help(&["compare", "--help"]);
    let unknown_setting = errors(&stress(&["--device", "sim:1GiB,unknown=1"]));
    let keys = unknown_setting.split("one of the keys ").nth(1).unwrap().lines().next().unwrap();
    for key in keys.split(", ").map(|key| key.trim_matches(|end: char| !end.is_alphabetic())) {
        assert!(common.contains(&format!("  {key}=")), "{key} is a setting of simulated devices");
    }
    assert!(replay.contains("PYTORCH_ALLOC_CONF=$PYTORCH_ALLOC_CONF"));
    assert!(COMPARE_KEYS.iter().chain(&MEAN_KEYS).all(|key| compare.contains(key)));
}

/// Wider lines would be wrapped, which breaks lists.
#[test]
fn lists_in_help_are_no_wider_than_help() {
    let program = aquifer_stress::command();
    for command in std::iter::once(&program).chain(program.get_subcommands()) {
        let text = command.get_after_long_help().map(ToString::to_string).unwrap_or_default();
        for width in [100, 80, 60] {
            let text = rewrap(&text, 100, width);
            let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > width.max(78)).collect();
            assert!(wide.is_empty(), "{}: {wide:?}", command.get_name());
        }
        assert_eq!(rewrap(&text, 100, 100), text, "{}: lines are as long as they can be", command.get_name());
    }
}

#[test]
fn options_are_listed_without_a_device() {
    let output = stress(&["options", "--device", "cuda:99"]);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    assert!(text.contains("no limit; default none\n      limit in bytes\n"), "{text}");
    // Some have no default.
    assert!(text.contains("\n  pinned_max_round_threshold_mb: any\n      inert: "), "{text}");
    assert!(!text.contains("---") && !text.contains(['`', '|']), "{text}");
    let rows = rows(0, &["options"]);
    assert!(rows.iter().all(|row| text.contains(row["effect"].as_str().unwrap())), "{rows:?}");
    assert!(rows.iter().any(|row| row["option"] == "granule_mb" && row["values"].is_string()), "{rows:?}");
}

#[test]
fn lists_need_no_device() {
    for args in [&["oom", "--list"][..], &["fragmentation", "--list"]] {
        let output = stress(&[args, &["--device", "cuda:99"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{}", errors(&output));
    }
}

/// Each command reports once why memory comes in segments, without colours.
#[test]
fn a_device_that_cannot_map_is_reported_once() {
    let file = data("fsdp_start.trace");
    for (device, reason) in
        [("sim:4GiB,vmm=off", "cannot map memory"), ("sim:4GiB,fault_rate=cuMemMap:1:205", "mapping memory failed")]
    {
        let commands: [&[&str]; 3] = [&["replay", "--repeat", "2", &file], &["fit", &file], &["oom", "--way", "limit"]];
        for args in commands {
            let said = errors(&stress(&[args, &["--device", device]].concat()));
            assert_eq!(said.matches("memory comes in segments").count(), 1, "{args:?}: {said}");
            assert!(said.contains(reason) && !said.contains('\x1b'), "{args:?}: {said}");
        }
    }
    let said = errors(&stress(&["replay", "--device", "sim:4GiB", &file]));
    assert!(!said.contains("segments"), "{said}");
}

#[test]
fn a_device_too_small_to_run_out_of_memory_is_refused() {
    let output = stress(&["oom", "--device", "sim:16MiB"]);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
    assert!(errors(&output).contains("sim:16MiB is too small for this: 32.00 MiB must be free"), "{}", errors(&output));
    let output = stress(&["oom", "--device", "sim:37MiB,vmm=off"]);
    assert_eq!(output.status.code(), Some(3), "{}", errors(&output));
    assert!(errors(&output).contains("too small for this: 400.00 MiB must be free"), "{}", errors(&output));
    let output = stress(&["oom", "--device", "sim:1GiB", "--config", "limit_mb:10"]);
    assert!(errors(&output).contains("the options allow too little memory for this: 32.00 MiB"), "{}", errors(&output));
}

/// The message must not blame the device.
#[test]
fn a_limit_that_is_too_small_is_named() {
    let refused = |args: &[&str], code, reason: &str| {
        let output = stress(args);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}", errors(&output));
        assert!(errors(&output).contains(reason), "{args:?}: {}", errors(&output));
    };
    let file = Scratch::new("large.trace", b"a 0 30000000 0\nf 0 0\n");
    refused(&["fit", "--config", "limit_mb:20", file.path()], 3, "for the limit of 20.00 MiB that the options set");
}

/// Such as a call that frees memory.
#[test]
fn a_lack_of_memory_where_none_is_requested_is_a_failure() {
    let lines: String = (1..50).map(|id| format!("a {id} {} 0\nf {id} 0\n", id * 1_000_000)).collect();
    let file = Scratch::new("growing.trace", lines.as_bytes());
    let device = "sim:64MiB,fault=cuMemFree#1:out_of_memory";
    let args = ["replay", "--repeat", "1", "--device", device, "--config", "no_cache:True", file.path()];
    let output = stress(&args);
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert!(errors(&output).contains("cuMemFree"), "{}", errors(&output));
}

/// Not for each piece of memory that cannot be released.
#[test]
fn a_lost_device_is_reported_once() {
    let lines: String = (0..400).map(|id| format!("a {id} 20000000 0\n")).collect();
    let file = Scratch::new("lost.trace", lines.as_bytes());
    for (config, calls) in [("frame_mb:2", [40, 1000, 3000]), ("", [40, 300, 600]), ("backing:segments", [5, 40, 200])]
    {
        for nth in calls {
            let device = format!("sim:80GiB,lost_at={nth}");
            let output = stress(&["replay", "--repeat", "1", "--device", &device, "--config", config, file.path()]);
            assert_eq!(output.status.code(), Some(1), "{config} {nth}");
            let said = errors(&output);
            let [_, error] = said.lines().collect::<Vec<_>>()[..] else { panic!("{config} {nth}: {said}") };
            let is_error = error.starts_with("error: ") && error.contains("CUDA_ERROR_ECC_UNCORRECTABLE");
            assert!(is_error && error.len() < 300, "{config} {nth}: {said}");
        }
    }
}

/// Writes to `/dev/full` fail.
#[cfg(target_os = "linux")]
#[test]
fn help_that_cannot_be_written_is_an_error() {
    for args in [&["--help"][..], &["--version"], &["replay", "--help"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = program(args).stdout(full).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(errors(&output).contains("standard output"), "{}", errors(&output));
        assert_eq!(stress(args).status.code(), Some(0));
    }
}

/// The exit code does not depend on standard error.
#[cfg(target_os = "linux")]
#[test]
fn messages_that_cannot_be_written_do_not_change_the_exit_code() {
    let file = data("fsdp_start.trace");
    // The libraries warn of memory that cannot be released.
    let stuck = "sim:1GiB,fault_rate=cuMemUnmap:0.5:999";
    let cases: [(&[&str], i32); 6] = [
        (&["--nope"], 2),
        (&["replay"], 2),
        (&["oom", "--way", "x"], 2),
        (&["replay", "--device", "cuda:0", &file], 1),
        (&["replay", "/no/such/file"], 4),
        (&["oom", "--way", "limit", "--device", stuck], 0),
    ];
    for (args, code) in cases {
        assert_eq!(stress(args).status.code(), Some(code), "{args:?}");
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(program(args).stderr(full).output().unwrap().status.code(), Some(code), "{args:?} on a full disk");
        let (reader, unread) = std::io::pipe().unwrap();
        drop(reader);
        assert_eq!(program(args).stderr(unread).output().unwrap().status.code(), Some(code), "{args:?} with no reader");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_file_beyond_the_limit_of_sizes_is_an_error_and_leaves_nothing() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("limit");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let script = "ulimit -f 8; exec \"$0\" report --output page.html \"$1\"";
    let mut shell = Command::new("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_aquifer-stress"), &data("fsdp_start.trace")]);
    let output = shell.current_dir(&folder).stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert!(errors(&output).contains("error: page.html: File too large"), "{}", errors(&output));
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}
