//! `explain`, `advise` and `report`.

use super::*;

/// An empty folder of a test.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn explain_tells_what_is_alive_what_allocators_take_and_how_memory_runs_out() {
    let file = data("gnn_random_graphs.trace.gz");
    let row = &rows(0, &["explain", &file])[0];
    assert_eq!(row["trace"], "gnn_random_graphs");
    let peak = bytes(row, "peak_requested_bytes");
    let by_size = row["alive"].as_array().unwrap().iter().filter(|group| group["by"] == "size");
    assert_eq!(by_size.map(|group| bytes(group, "bytes")).sum::<u64>(), peak);
    let allocators = row["allocators"].as_array().unwrap();
    let names: Vec<&str> = allocators.iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names[..3], ["PyTorch", "PyTorch, expandable segments", "Aquifer"]);
    let oom = &row["oom"];
    assert!(bytes(oom, "device_bytes") < bytes(&allocators[0], "smallest_device_bytes"));
    assert!(bytes(oom, "free_bytes") >= bytes(oom, "requested_bytes"), "the cause is fragmentation: {oom}");
    assert!(oom["finishes_with"].as_array().unwrap().contains(&"Aquifer".into()));
    // The figures are those of the other commands.
    for (config, one) in [("backing:pytorch", 0), ("backing:expandable", 1), ("", 2)] {
        let fit = &rows(0, &["fit", "--config", config, &file])[0];
        assert_eq!(fit["smallest_device_bytes"], allocators[one]["smallest_device_bytes"], "{config}");
        let device = ["--device", "sim:512GiB"];
        let replay = &rows(0, &[&["replay", "--repeat", "1", "--config", config, &file][..], &device].concat())[0];
        assert_eq!(replay["peak_reserved_bytes"], allocators[one]["peak_reserved_bytes"], "{config}");
    }
    let text = stress(&["explain", "--ascii", &file]);
    assert_eq!(text.status.code(), Some(0));
    let text = String::from_utf8(text.stdout).unwrap();
    for part in ["uses at most 19.76 GiB", "What allocators hold", "What fragmentation costs", "What helps"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

/// Trying allocators takes time; what the program uses is known at once.
#[test]
fn explain_says_what_it_knows_and_how_long_it_takes_before_it_tries_allocators() {
    let both = Scratch::new("both.txt", b"");
    let file = || std::fs::OpenOptions::new().append(true).open(both.path()).unwrap();
    let mut explain = program(&["explain", &data("fsdp_start.trace")]);
    assert!(explain.stdout(file()).stderr(file()).status().unwrap().success());
    let text = std::fs::read_to_string(both.path()).unwrap();
    let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("{part}: {text}"));
    let tried = at("fsdp_start: 1680 events; trying 4 allocators takes some seconds");
    assert!(at("uses at most 6.89 GiB") < tried && at("Live then:") < tried && tried < at("What allocators hold"));
}

#[test]
fn explain_shows_the_first_refusal_on_the_users_device() {
    let row = &rows(0, &["explain", "--device", "sim:40GiB", &data("gnn_random_graphs.trace.gz")])[0];
    let device = bytes(&row["oom"], "device_bytes") as f64 / bytes(row, "peak_requested_bytes") as f64;
    assert!((1.019..1.021).contains(&device), "it finishes on 40 GiB");
    let row = &rows(0, &["explain", "--device", "sim:20GiB", &data("gnn_random_graphs.trace.gz")])[0];
    assert_eq!(bytes(&row["oom"], "device_bytes"), 20 << 30);
    assert_ne!(bytes(&row["allocators"][0], "ooms"), 0);
}

#[test]
fn a_folder_is_read_as_one_job() {
    let folder = folder("job");
    for rank in [2, 10, 1] {
        let text = format!("a 1 {} 0\na 2 5000000 0\nf 1 0\nf 2 0\n", rank * 10_000_000);
        std::fs::write(folder.join(format!("rank{rank}.trace")), text).unwrap();
    }
    std::fs::write(folder.join(".hidden"), "not a trace").unwrap();
    let path = folder.to_str().unwrap();
    let rows = rows(0, &["explain", path]);
    let names: Vec<&str> = rows.iter().map(|row| row["trace"].as_str().unwrap()).collect();
    assert_eq!(names, ["rank1", "rank2", "rank10"]);
    let text = String::from_utf8(stress(&["explain", path]).stdout).unwrap();
    assert!(text.contains("3 programs, of which rank10 needs most"), "{text}");
}

#[test]
fn advice_has_figures_and_can_be_followed() {
    let file = data("gnn_random_graphs.trace.gz");
    let rows_of = |name: &str, rows: &[Value]| {
        rows.iter().find(|row| row["title"].as_str().unwrap().starts_with(name)).cloned().unwrap()
    };
    let advice = rows(0, &["advise", &file]);
    let pytorch = rows_of("In PyTorch, set PYTORCH_ALLOC_CONF=expandable_segments:True", &advice);
    assert_eq!(pytorch["config"], "backing:expandable");
    let replay = &rows(0, &["replay", "--repeat", "1", "--config", "backing:expandable", &file])[0];
    assert_eq!(replay["peak_reserved_bytes"], pytorch["peak_reserved_bytes"]);
    assert!(rows_of("Use Aquifer", &advice)["saves"].as_u64().unwrap() > 40 << 30);
}

/// The options of the advice of a row or page.
fn advised(advice: &[Value]) -> Vec<String> {
    advice.iter().filter_map(|row| row["config"].as_str()).map(str::to_owned).collect()
}

/// Running out of memory there ends the process, so smaller devices have memory of their own.
#[test]
fn a_device_that_shares_the_hosts_memory_is_studied() {
    let explained = &rows(0, &["explain", "--device", "sim:gb10", &data("fsdp_start.trace")])[0];
    let answers = explained["answers"].as_array().unwrap();
    let change = answers.iter().find(|answer| answer["question"] == "What to change").unwrap();
    assert!(change["answer"].as_str().unwrap().contains("it finishes on 128.00 GiB"), "{change}");
}

#[test]
fn advice_finishes_on_the_device_that_was_asked_for() {
    let file = data("gpt2_fp32.trace.gz");
    let device = ["--device", "sim:28800MiB"];
    let advice = rows(0, &[&["advise", &file], &device[..]].concat());
    let configs = advised(&advice);
    assert!(configs.contains(&"backing:expandable".to_owned()), "{configs:?}");
    for config in &configs {
        rows(0, &[&["replay", "--repeat", "1", "--config", config, &file], &device[..]].concat());
    }
    for row in advice.iter().filter(|row| row["title"].as_str().unwrap().starts_with("In PyTorch")) {
        assert!(row["peak_reserved_bytes_before"].is_null() && row["saves"].is_null(), "it was refused: {row}");
        assert!(row["driver_time_modelled_us_before"].is_null(), "{row}");
        assert!(row["smallest_device_bytes"].as_u64().unwrap() <= 28_800 << 20, "{row}");
        assert!(row["text"].as_str().unwrap().contains("finishes on this device"), "{row}");
    }
    let explained = &rows(0, &[&["explain", &file], &device[..]].concat())[0];
    assert_eq!(advised(explained["advice"].as_array().unwrap()), configs);
    let pytorch = &explained["allocators"][0];
    assert!(bytes(pytorch, "ooms") > 0 && pytorch["reserved_over_requested"].is_null(), "{pytorch}");
    let finishing = explained["oom"]["finishes_with"].as_array().unwrap();
    assert!(["PyTorch, expandable segments", "Aquifer"].iter().all(|name| finishing.contains(&(*name).into())));
    assert!(!finishing.contains(&"PyTorch".into()), "{finishing:?}");
}

#[test]
fn advice_for_a_device_that_nothing_fits_on_says_so() {
    let file = data("gpt2_fp32.trace.gz");
    let args = ["advise", "--device", "sim:20GiB", &file];
    assert!(advised(&rows(0, &args)).is_empty());
    let text = String::from_utf8(stress(&args).stdout).unwrap();
    assert!(text.contains("No option of an allocator helps: more is live at once"), "{text}");
    // A program that does not fit is no failure of the commands that say so.
    let page = Scratch::new("large.html", b"");
    for command in [&["report", "-o", page.path()][..], &["explain"]] {
        let output = stress(&[command, &args[1..]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
        let named = "(as asked for with --device; ";
        assert!(errors(&output).contains(&format!("{named}{} simulates", command[0])), "{}", errors(&output));
    }
}

#[test]
fn advice_names_the_driver_time_that_it_costs() {
    let advice = rows(0, &["advise", &data("gnn_random_graphs.trace.gz")]);
    let row = advice.iter().find(|row| row["title"] == "Use Aquifer").unwrap();
    let [new, old] = ["", "_before"].map(|when| row[format!("driver_time_modelled_us{when}")].as_f64().unwrap() / 1e3);
    let text = row["text"].as_str().unwrap();
    assert!(
        text.contains(&format!("Driver calls take {new:.0} instead of {old:.0} ms in the first pass, and ")),
        "{text}"
    );
}

#[test]
fn a_small_program_is_explained_without_warnings_and_with_its_own_figures() {
    let file = Scratch::new("toy.trace", b"a 0 1048576 0\na 1 2097152 0\nf 0 0\nf 1 0\n");
    let output = stress(&["explain", file.path()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(!errors(&output).contains("warning"), "{}", errors(&output));
    let text = String::from_utf8(output.stdout).unwrap();
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for part in [
        "The device is made up, to show how memory runs out: it has 1.00 MiB more (33 %) than the program ever uses.",
        "PyTorch takes a segment of 20.00 MiB for it, and the device has 2.00 MiB left.",
    ] {
        assert!(words.contains(part), "{part}: {text}");
    }
    assert!(!words.contains("without a tag") && !words.contains("2 % more"), "{text}");
    let row = &rows(0, &["explain", file.path()])[0];
    assert_eq!(row["oom"]["is_made_up"], true);
    let asked = &rows(0, &["explain", "--device", "sim:4MiB", file.path()])[0];
    assert_eq!((&asked["oom"]["is_made_up"], &asked["oom"]["device_bytes"]), (&false.into(), &(4 << 20).into()));
    let page = Scratch::new("toy.html", b"");
    assert_eq!(stress(&["report", "-o", page.path(), file.path()]).status.code(), Some(0));
    assert!(std::fs::read_to_string(page.path()).unwrap().contains("The device is made up"));
    // What the user asks for is still reported.
    let odd = stress(&["explain", "--config", "max_split_size_mb:64", file.path()]);
    assert_eq!(errors(&odd).matches("options without effect: max_split_size_mb:64").count(), 1, "{}", errors(&odd));
}

#[test]
fn warnings_are_not_of_the_devices_that_are_tried() {
    let file = Scratch::new("toy.trace", b"a 0 1048576 0\na 1 2097152 0\nf 0 0\nf 1 0\n");
    let output = stress(&["fit", "--config", "granule_mb:8", file.path()]);
    assert!(errors(&output).matches("warning").count() <= 1, "{}", errors(&output));
}

#[test]
fn a_report_is_one_page_that_loads_nothing() {
    let folder = folder("report");
    let out = folder.join("page.html");
    let out = out.to_str().unwrap();
    let output = stress(&["report", "-o", out, &data("gnn_random_graphs.trace.gz"), &data("gpt2_fp32.trace.gz")]);
    assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
    let page = std::fs::read_to_string(out).unwrap();
    assert!(page.starts_with("<!doctype html>") && page.len() < 5 << 20, "{}", page.len());
    assert!(page.contains("default-src 'none'"), "nothing may be loaded");
    let data = page.split_once("id=\"data\">").unwrap().1.split_once("</script>").unwrap().0;
    let data: Value = serde_json::from_str(data).unwrap();
    let titles: Vec<&str> = data.as_array().unwrap().iter().map(|one| one["title"].as_str().unwrap()).collect();
    assert_eq!(titles, ["gnn_random_graphs", "gpt2_fp32"]);
    let (at, peak) = (&data[0]["buckets"]["at"], &data[0]["peak"]);
    let bucket = usize::try_from(peak["bucket"].as_u64().unwrap()).unwrap();
    assert_eq!(at[bucket], peak["event"]);
}

#[test]
fn files_that_cannot_be_used_are_errors() {
    let folder = folder("broken");
    let broken = folder.join("broken.pickle");
    std::fs::write(&broken, b"\x80\x04}").unwrap();
    let broken = broken.to_str().unwrap();
    for command in ["explain", "advise", "report"] {
        let output = stress(&[command, broken]);
        assert_eq!(output.status.code(), Some(4), "{command}: {}", errors(&output));
        assert!(errors(&output).contains("broken.pickle"), "{}", errors(&output));
        assert_eq!(stress(&[command]).status.code(), Some(2), "{command}");
    }
    let nowhere = folder.join("missing/page.html");
    let output = stress(&["report", "-o", nowhere.to_str().unwrap(), &data("fsdp_start.trace")]);
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert!(errors(&output).contains("missing/page.html"), "{}", errors(&output));
}

/// As the option `oom_snapshot` saves it.
#[test]
fn a_snapshot_without_history_tells_what_was_refused() {
    let block = |mib: u64, state: &str| format!("{{\"size\": {}, \"state\": \"{state}\"}}", mib << 20);
    let blocks = [block(40, "active_allocated"), block(24, "inactive")].join(", ");
    let text = format!(
        "{{\"segments\": [{{\"device\": 0, \"address\": 512, \"blocks\": [{blocks}]}}], \"entries_overwritten\": 0, \
         \"device_traces\": [[{{\"action\": \"oom\", \"device_free\": 0, \"size\": {}, \"stream\": 0}}]]}}",
        30 << 20
    );
    let file = Scratch::new("first.json", text.as_bytes());
    let text = words(&stress(&["explain", "--ascii", file.path()]));
    for part in [
        "was refused 30.00 MiB on 64.00 MiB",
        "6.00 MiB were lacking, even with all that was free in one piece.",
        "When At the refusal, when the snapshot was taken: what came before is not known.",
        "Who held it 40.00 MiB in 1 block. By size: 40.00 MiB in blocks of 32 MiB to 64 MiB.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_snapshot_without_history_shows_its_segments() {
    let folder = folder("no_history");
    let file = folder.join("snapshot.json");
    let block =
        |size: u64, state: &str| format!("{{\"size\": {size}, \"requested_size\": {size}, \"state\": \"{state}\"}}");
    let segment = |address: u64, blocks: [String; 3]| {
        format!("{{\"device\": 0, \"address\": {address}, \"stream\": 0, \"blocks\": [{}]}}", blocks.join(", "))
    };
    let segments = [
        segment(
            1 << 30,
            [block(3 << 20, "active_allocated"), block(5 << 20, "inactive"), block(4 << 20, "active_allocated")],
        ),
        segment(
            2 << 30,
            [block(1 << 20, "active_pending_free"), block(7 << 20, "inactive"), block(512, "active_allocated")],
        ),
    ];
    let list = format!("[{}]", segments.join(", "));
    for text in [format!("{{\"segments\": {list}, \"device_traces\": [[]]}}"), list] {
        std::fs::write(&file, text).unwrap();
        let file = file.to_str().unwrap();
        let output = stress(&["explain", "--ascii", file]);
        assert_eq!(output.status.code(), Some(0), "{}", errors(&output));
        let text = String::from_utf8(output.stdout).unwrap();
        let held = "When the snapshot was taken, 20.00 MiB were held";
        let live =
            "In 2 segments, 7.00 MiB were live and 12.00 MiB free, the largest piece of them 7.00 MiB. 1.00 MiB had";
        let words: Vec<&str> = text.split_whitespace().collect();
        assert!(text.contains(held) && words.join(" ").contains(live), "{text}");
        assert!(text.contains("has no history"), "{text}");
        let output = stress(&["replay", file]);
        assert_eq!(output.status.code(), Some(4));
        assert!(errors(&output).contains("no history"), "{}", errors(&output));
        let page = folder.join("page.html");
        assert_eq!(stress(&["report", "-o", page.to_str().unwrap(), file]).status.code(), Some(0));
        assert!(std::fs::read_to_string(page).unwrap().contains("In the snapshot"));
    }
}

/// A snapshot that was saved when 500 MiB were refused on 512 MiB, of which 76 were live.
fn refused(name: &str, more: &str) -> Scratch {
    let mib = |mib: u64| mib << 20;
    let entry = |action: &str, rest: String| format!("{{\"action\": \"{action}\", \"stream\": 0, {rest}}}");
    let at =
        |at: u64, size: u64| format!("\"addr\": {}, \"size\": {}, \"user_metadata\": \"model11\"", mib(at), mib(size));
    let trace = [
        entry("segment_map", at(1024, 512)),
        entry("alloc", at(1024, 76)),
        entry("alloc", at(1200, 300)),
        entry("free_requested", at(1200, 300)),
        entry("free_completed", at(1200, 300)),
        entry("oom", format!("\"device_free\": 0, \"size\": {}, \"user_metadata\": \"scores\"", mib(500))),
    ];
    let block =
        |size, state| format!("{{\"size\": {}, \"state\": \"{state}\", \"user_metadata\": \"model11\"}}", mib(size));
    let text = format!(
        "{{\"segments\": [{{\"device\": 0, \"address\": {}, \"blocks\": [{}, {}]}}], \"device_traces\": [[{}]]{more}}}",
        mib(1024),
        block(76, "active_allocated"),
        block(436, "inactive"),
        trace.join(", ")
    );
    Scratch::new(name, text.as_bytes())
}

fn words(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", errors(output));
    String::from_utf8(output.stdout.clone()).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_recorded_refusal_comes_first_with_advice_for_the_allocator_that_recorded_it() {
    let own = refused("own.json", ", \"entries_overwritten\": 0");
    let pytorch = refused("pytorch.json", "");
    for (file, is_pytorch) in [(&own, false), (&pytorch, true)] {
        let explained = words(&stress(&["explain", "--ascii", file.path()]));
        let advised = words(&stress(&["advise", file.path()]));
        for text in [&explained, &advised] {
            for part in [
                "was refused 500.00 MiB on 512.00 MiB",
                "76.00 MiB were live, 436.00 MiB free in the cache, and 0 bytes free on the device. 64.00 MiB were lacking",
                "By tag: model11 76.00 MiB.",
                "At its last request, event ",
                "Free at least 64.00 MiB before it asks for 500.00 MiB",
            ] {
                assert!(text.contains(part), "{part}: {text}");
            }
            assert!(is_pytorch || !text.contains("PyTorch"), "{text}");
        }
        assert!(!explained.contains("made up") && !explained.contains("without a tag"), "{explained}");
        assert!(explained.contains("Not recorded Other programs on the device, and the time"), "{explained}");
        assert!(explained.contains("The refused request has the tag scores."), "{explained}");
        // On a larger device nothing need change.
        let larger = words(&stress(&["explain", "--ascii", "--device", "sim:2GiB", file.path()]));
        for part in [
            "was refused 500.00 MiB on 512.00 MiB, and finishes on 2.00 GiB",
            "nothing on a device of 2.00 GiB. In the recording, the program was refused 500.00 MiB on a device with",
            "What to change Nothing: it finishes on 2.00 GiB with ",
        ] {
            assert!(larger.contains(part), "{part}: {larger}");
        }
        assert!(!larger.contains("Free at least"), "{larger}");
        let row = &rows(0, &["explain", file.path()])[0];
        let questions = row["answers"].as_array().unwrap().iter().map(|answer| answer["question"].as_str().unwrap());
        let asked =
            ["What ran out", "When", "Who held it", "Where in the code", "Not recorded", "What fits", "What to change"];
        assert!(questions.eq(asked.into_iter().chain(["What a step costs", "Which card"])), "{row}");
        assert_eq!((bytes(&row["oom"], "device_bytes"), &row["oom"]["is_made_up"]), (512 << 20, &false.into()));
        assert_eq!(row["streams"], 1);
        let page = Scratch::new("refused.html", b"");
        assert_eq!(stress(&["report", "-o", page.path(), file.path()]).status.code(), Some(0));
        assert!(std::fs::read_to_string(page.path()).unwrap().contains("64.00 MiB were lacking"));
    }
}

/// Each of the nine questions has an answer of its own, and no answer contradicts another.
#[test]
fn a_newcomer_finds_each_answer_once() {
    let file = data("fsdp_start.pickle.gz");
    let row = &rows(0, &["explain", "--device", "sim:7300MiB", &file])[0];
    let answers = row["answers"].as_array().unwrap();
    let answer = |question: &str| {
        let mut found = answers.iter().filter(|answer| answer["question"] == question);
        let text = found.next().unwrap_or_else(|| panic!("{question}: {row}"))["answer"].as_str().unwrap();
        assert!(found.next().is_none() && text.ends_with('.') && !text.contains(".."), "{question}: {text}");
        text
    };
    assert_eq!(answers.len(), 9);
    // Blocks without a tag hold most: that is no name.
    assert!(answer("What ran out").starts_with("As replayed with PyTorch, the program was refused 172.00 MiB on a"));
    assert!(answer("What ran out").contains("Enough was free, but not for this request"));
    assert_eq!(answer("When"), "At event 1312 of 1679.");
    assert!(answer("Where in the code").ends_with("The tag with most memory is tag 24."));
    assert!(answer("Who held it").ends_with("The program itself names memory by numbers, as of its steps."));
    assert!(answer("Not recorded").starts_with("The size of the device; "));
    let change = answer("What to change");
    assert!(change.contains("The smallest device has ") && change.contains(" instead of "), "{change}");
    let fits = answer("What fits");
    assert!(fits.contains(" GiB with PyTorch; ") && fits.contains("On 7.13 GiB it finishes with "), "{fits}");
    let costs = answer("What a step costs");
    assert!(costs.starts_with("Driver calls take, as modelled on a simulated H100 7.13 GiB: "), "{costs}");
    assert!(costs.contains(" in each later one with PyTorch, expandable segments. A pass is one run"), "{costs}");
}

#[test]
fn a_program_that_is_too_large_is_told_by_how_much() {
    let file = data("fsdp_start.trace");
    let text = words(&stress(&["explain", "--ascii", "--device", "sim:1GiB", &file]));
    for part in [
        "6.89 GiB are live at once, 5.89 GiB more than the device of 1.00 GiB has",
        "When At event 11 of 1680, in iteration 0. Who held it 965.04 MiB in 10 blocks.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let replayed = stress(&["replay", "--device", "sim:1GiB", "--repeat", "1", "--config", "backing:pytorch", &file]);
    assert!(
        errors(&replayed).contains("5.89 GiB more than the device of 1.00 GiB has. By size: "),
        "{}",
        errors(&replayed)
    );
    // The pipe is closed before the command has a result.
    let mut closed =
        program(&["replay", "--device", "sim:1GiB", "--repeat", "1", "--config", "backing:pytorch", &file]);
    let mut closed = closed.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    drop(closed.stdout.take());
    assert_eq!(closed.wait().unwrap().code(), Some(3));
}

#[test]
fn without_a_history_nothing_is_replayed_and_pools_have_a_line_each() {
    let block = |mib: u64, state: &str| format!("{{\"size\": {}, \"state\": \"{state}\"}}", mib << 20);
    let segment = |pool: &str, blocks: [String; 3]| {
        format!(
            "{{\"device\": 0, \"address\": {}, \"segment_pool_id\": {pool}, \"blocks\": [{}]}}",
            pool.len() << 40,
            blocks.join(", ")
        )
    };
    let default =
        segment("[0, 0]", [block(7, "active_allocated"), block(570, "active_pending_free"), block(3, "inactive")]);
    let private =
        segment("[0,  1]", [block(400, "active_allocated"), block(76, "active_allocated"), block(82, "inactive")]);
    let file = Scratch::new("pools.json", format!("[{default}, {private}]").as_bytes());
    let output = stress(&["explain", "--ascii", file.path()]);
    assert!(!errors(&output).contains("trying"), "{}", errors(&output));
    let text = words(&output);
    for part in [
        "had 483.00 MiB live when the snapshot was taken",
        "The default pool held 580.00 MiB: 3.00 MiB of it free, the rest in 2 blocks. 570.00 MiB had been given back",
        "Private pool (0, 1) held 558.00 MiB: 82.00 MiB of it free, the rest in 2 blocks.",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("at most 483"), "that is no peak: {text}");
}
