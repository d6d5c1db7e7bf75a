//! Whole files: round trips, damage, and formats that must agree.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use aquifer::Allocator;
use aquifer::device::sim::SimConfig;
use aquifer::memory::{Config, HistoryOptions, Snapshot};
use aquifer_allocator::snapshot::FileFormat;

use super::*;
use crate::{Aquifer, Lagged, OnOom, Player};

const GPT2: &[u8] = include_bytes!("../../../testdata/gpt2_fp32.trace.gz");
const GNN: &[u8] = include_bytes!("../../../testdata/gnn_random_graphs.trace.gz");
const FSDP_TRACE: &[u8] = include_bytes!("../../../testdata/fsdp_start.trace");
const FSDP_SNAPSHOT: &[u8] = include_bytes!("../../../testdata/fsdp_start.pickle.gz");

fn one(name: &str, bytes: &[u8]) -> Program {
    let mut programs = read(name.as_ref(), bytes).unwrap();
    assert_eq!(programs.len(), 1);
    programs.remove(0)
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes).read_to_end(&mut content).unwrap();
    content
}

/// A program as an RMM log; addresses are used again at once.
fn to_rmm(program: &Program) -> String {
    let mut text = rmm::HEADER.join(",") + "\n";
    let mut slots = vec![(0, 0); program.slots as usize];
    for &event in &program.events {
        let (action, slot) = match event {
            Event::Alloc { slot, bytes, stream } => {
                slots[slot as usize] = (bytes, program.streams[usize::from(stream)]);
                ("allocate", slot)
            }
            Event::Free { slot } => ("free", slot),
            _ => continue,
        };
        let (bytes, stream) = slots[slot as usize];
        text += &format!("1,00:00:00.000000,{action},{:#x},{bytes},{stream:#x}\n", (slot + 1) * 256);
    }
    text
}

/// A snapshot of an allocator that a program was played to, with all of its history.
fn played(program: &Program, options: &str, lag: u64) -> Snapshot {
    let lagged = Lagged::new(SimConfig::parse("80GiB,checks=off,reuse=off").unwrap(), lag);
    let mut config: Config = options.parse().unwrap();
    config.quarantine = Some(0);
    let allocator = Allocator::new(&lagged.device, config).unwrap();
    allocator.record_history(HistoryOptions { entries: usize::MAX, ..HistoryOptions::default() });
    let mut subject = Aquifer::new(allocator.clone(), program.streams.len(), Some(lagged.lag)).unwrap();
    let mut player = Player::new(program);
    player.play(&mut subject, OnOom::Skip).unwrap();
    allocator.snapshot()
}

/// Programs of every kind of event.
fn programs() -> impl Strategy<Value = Program> {
    programs_with_blocks_below(1 << 40)
}

fn programs_with_blocks_below(bytes: u64) -> impl Strategy<Value = Program> {
    let step = (0u8..8, any::<prop::sample::Index>(), 0..bytes, prop::sample::select(vec![0, 1, 7, u64::MAX]));
    prop::collection::vec(step, 0..200)
        .prop_map(|steps| {
            let mut builder = program::Builder::new("random".into(), 0);
            builder.header("name", "random");
            let (mut live, mut next) = (Vec::new(), 0);
            for (kind, index, bytes, stream) in steps {
                match kind {
                    0..4 => {
                        builder.alloc(next, bytes, stream).unwrap();
                        live.push(next);
                        next += 1;
                    }
                    4 => builder.iteration(u32::try_from(bytes & 0xffff).unwrap()).unwrap(),
                    _ if live.is_empty() => {}
                    5 => assert!(builder.record_stream(*index.get(&live), stream).unwrap()),
                    _ => assert!(builder.free(live.swap_remove(index.index(live.len()))).unwrap().is_some()),
                }
            }
            builder.finish().unwrap()
        })
        .prop_filter("a program in which something happens", |program| !program.events.is_empty())
}

proptest! {
    #[test]
    fn traces_round_trip(program in programs(), compressed: bool) {
        let text = program.to_trace().into_bytes();
        let bytes = if compressed { gzip(&text) } else { text };
        prop_assert_eq!(one("other.trace", &bytes), program);
    }

    #[test]
    fn rmm_logs_round_trip(program in programs()) {
        prop_assume!(program.operations() > 0);
        let log = one("random.csv", to_rmm(&program).as_bytes());
        let mut expected = program.clone();
        expected.events.retain(|event| matches!(event, Event::Alloc { .. } | Event::Free { .. }));
        // Streams that were only used are not in the log.
        let streams = |program: &Program| -> Vec<_> {
            program.events.iter().map(|&event| match event {
                Event::Alloc { slot, bytes, stream } => (slot, bytes, program.streams[usize::from(stream)]),
                Event::Free { slot } => (slot, 0, 0),
                _ => (0, 0, 0),
            }).collect()
        };
        prop_assert_eq!(streams(&log), streams(&expected));
        prop_assert_eq!(log.peak_requested_bytes, program.peak_requested_bytes);
    }

    #[test]
    fn saved_snapshots_of_a_program_have_its_requests(
        program in programs_with_blocks_below(64 << 20),
        options in prop::sample::select(vec!["", "backing:segments", "cross_stream:off"]),
        lag in prop::sample::select(vec![0, 5]),
    ) {
        let saved = played(&program, options, lag);
        let file = |format| {
            let mut bytes = Vec::new();
            saved.write(format, &mut bytes).unwrap();
            read("random".as_ref(), &bytes[..])
        };
        let (pickle, json) = (file(FileFormat::Pickle), file(FileFormat::Json));
        if program.allocs() == 0 {
            prop_assert!(matches!(pickle.unwrap_err().reason, Reason::NoHistory));
            prop_assert!(matches!(json.unwrap_err().reason, Reason::NoHistory));
            return Ok(());
        }
        let (pickle, json) = (pickle.unwrap(), json.unwrap());
        prop_assert_eq!(&pickle, &json);
        prop_assert_eq!(pickle.len(), 1);
        prop_assert_eq!(pickle[0].peak_requested_bytes, program.peak_requested_bytes);
        let requests = |program: &Program| -> Vec<u64> {
            let sizes = program.events.iter().map(|event| if let Event::Alloc { bytes, .. } = event { *bytes } else { 0 });
            sizes.filter(|&bytes| bytes > 0).collect()
        };
        prop_assert_eq!(requests(&pickle[0]), requests(&program));
    }

    #[test]
    fn arbitrary_bytes_are_handled(start in prop::sample::select(vec![
        &b""[..], b"\x80\x04", b"{\"device_traces\": [[", b"Thread,Time,Action,Pointer,Size,Stream\n", b"a 0 1 0\n",
        b"\x1f\x8b", b"\x1f\x8b\x08\0\0\0\0\0\0\0",
    ]), rest in prop::collection::vec(any::<u8>(), 0..300)) {
        let bytes = [start, &rest].concat();
        let _ = read("x".as_ref(), &bytes[..]);
        let _ = read("x.gz".as_ref(), &gzip(&bytes)[..]);
    }

    #[test]
    fn arbitrary_opcodes_are_handled(codes in prop::collection::vec(
        prop::sample::select(&b"((NKKMJ\x8aX\x8c]])}}aesuldt\x85\x86\x87qrh\x94\x00\x01\x02."[..]), 0..200,
    )) {
        let _ = read("x".as_ref(), &[&b"\x80\x04"[..], &codes].concat()[..]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn damaged_files_are_handled(
        cut in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 1u8..), 0..4),
        outer: bool,
    ) {
        let json = include_bytes!("../../../testdata/fsdp_start.json.gz");
        let rmm = gzip(to_rmm(&one("t", FSDP_TRACE)).as_bytes());
        for file in [GPT2, &gzip(FSDP_TRACE), FSDP_SNAPSHOT, json, &rmm] {
            let mut bytes = if outer { file.to_vec() } else { gunzip(file) };
            for (at, flip) in &flips {
                let at = at.index(bytes.len());
                bytes[at] ^= flip;
            }
            let cut = cut.index(bytes.len() + 1);
            let result = read("x".as_ref(), &bytes[..cut]);
            if outer && cut < bytes.len() {
                prop_assert!(result.is_err());
            }
        }
    }
}

#[test]
fn recorded_traces() {
    let gpt2 = one("testdata/gpt2_fp32.trace.gz", GPT2);
    assert_eq!((gpt2.name.as_str(), gpt2.operations()), ("gpt2_fp32", 15_494));
    assert_eq!((gpt2.streams.len(), gpt2.peak_requested_bytes), (1, 29_921_688_588));
    let gnn = one("testdata/gnn_random_graphs.trace.gz", GNN);
    assert_eq!((gnn.operations(), gnn.peak_requested_bytes), (21_072, 21_218_858_568));
}

/// The events of a trace that its snapshot has: no iterations, and uses of a block just before its
/// free.
fn as_history(program: &Program) -> Vec<Event> {
    let mut used = vec![None; program.slots as usize];
    let mut events = Vec::new();
    for &event in &program.events {
        match event {
            Event::RecordStream { slot, .. } => used[slot as usize] = Some(event),
            Event::Free { slot } => events.extend(used[slot as usize].take().into_iter().chain([event])),
            Event::Alloc { .. } => events.push(event),
            Event::Iteration(_) => {}
        }
    }
    events
}

#[test]
fn a_snapshot_gives_the_program_of_its_trace() {
    let trace = one("fsdp_start.trace", FSDP_TRACE);
    let pickle = one("fsdp_start.pickle.gz", FSDP_SNAPSHOT);
    assert_eq!(pickle.events, as_history(&trace));
    assert!(pickle.events.iter().any(|event| matches!(event, Event::RecordStream { .. })));
    assert_eq!(pickle.streams.len(), trace.streams.len());
    assert_eq!((pickle.slots, pickle.peak_requested_bytes), (trace.slots, trace.peak_requested_bytes));
    assert_eq!(one("fsdp_start.json.gz", include_bytes!("../../../testdata/fsdp_start.json.gz")), pickle);
}

#[test]
fn errors_name_the_file() {
    let fails = |name: &str, bytes: &[u8]| read(name.as_ref(), bytes).unwrap_err().to_string();
    assert_eq!(fails("a.trace", b""), "a.trace: the file is empty");
    let truncated = "the gzip data is incomplete: it is cut off, or other bytes follow it";
    assert!(fails("a.trace.gz", &GPT2[..30_000]).ends_with(&format!(": {truncated}")));
    assert_eq!(fails("a.gz", &GPT2[..5]), format!("a.gz: {truncated}"));
    assert!(
        fails("a.pkl", b"(dp0\n")
            .ends_with("found a pickle of protocol 0 or 1; a pickle must be of protocol 2 or newer")
    );
    assert!(fails("a.txt", b"hello\nworld\n").ends_with("an RMM log: found text that begins with \"hello\""));
    assert!(fails("a", b"\x01\x02\x03").ends_with("found data of another kind"));
    assert!(fails("a.trace.bz2", b"BZh91AY").ends_with("found data that bzip2 compressed; unpack it first"));
    assert!(fails("s", b"\x80\x02}(X\x08\0\0\0segments]u.").contains("the snapshot has no history"));
    assert!(fails("s", b"\x80\x02}.").contains("not a memory snapshot: found an empty dictionary"));
    assert!(load("no such file".as_ref()).unwrap_err().to_string().starts_with("no such file: "));
}

#[test]
fn what_is_packed_otherwise_says_what_to_do() {
    for (name, content, what) in [
        ("t.html", &b"<html>\n<head><title>GPU Memory Timeline HTML</title></head>"[..], "a page; give the snapshot"),
        ("run.zip", b"PK\x03\x04 and no archive", "a zip archive; unpack it first, a folder is read as the ranks"),
        ("t.xz", b"\xfd7zXZ\0", "data that xz compressed; unpack it first"),
        ("t.zst", b"\x28\xb5\x2f\xfd\0", "data that zstd compressed; unpack it first"),
        ("t.gz", &gzip(&gzip(b"a 0 1 0\n")), "data that gzip compressed twice; unpack it first"),
        ("s.pickle", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "\"version https://git-"),
    ] {
        let error = read(name.as_ref(), content).unwrap_err();
        assert!(error.to_string().starts_with(&format!("{name}: not an allocation trace")), "{error}");
        assert!(error.to_string().contains(what) && error.reason.is_other_content(), "{error}");
    }
}

#[test]
fn the_last_byte_matters() {
    let json = include_bytes!("../../../testdata/fsdp_start.json.gz");
    let rmm = gzip(to_rmm(&one("t", FSDP_TRACE)).as_bytes());
    for file in [GPT2, FSDP_SNAPSHOT, json, &rmm] {
        let error = read("x".as_ref(), &file[..file.len() - 1]).unwrap_err();
        assert!(matches!(error.reason, Reason::Truncated(_)), "{error}");
    }
}

#[test]
fn compressed_emptiness_costs_no_memory() {
    let zeros = gzip(&vec![0; 50 << 20]);
    assert!(read("z".as_ref(), &zeros[..]).is_err());
    let line = gzip(&[b"a ".as_slice(), &vec![b'1'; 50 << 20]].concat());
    assert!(read("z".as_ref(), &line[..]).unwrap_err().to_string().ends_with("longer than 64 KiB"));
}

#[test]
fn errors_are_one_short_line() {
    let long = "x".repeat(10_000);
    let name = format!("{long}\n.trace");
    let text = |content: String| content.into_bytes();
    for content in [
        text(format!("# a: {long}\n{long} 1 2 3")),
        text(format!("a {long} 1 0")),
        text(format!("a 0 1 {}", "\u{1}".repeat(10_000))),
        text(format!("a 0 1 0 {long}")),
        text(format!("Thread,Time,Action,Pointer,Size,Stream\n1,t,{long},0x1,1,0")),
        text(format!("{{\"segments\": [{{\"{long}\\n\": \"{long}\"}}], \"device_traces\": \"{long}\" x")),
        text(format!("{{\"{}\": 1}}", "\u{1f600}".repeat(1000))),
        text("\u{1b}[31m\u{7f}".repeat(1000)),
        text("hello \u{202e}".repeat(1000)),
    ] {
        let error = read(name.as_ref(), &content[..]).unwrap_err().to_string();
        assert!(error.chars().count() <= 280 && !error.chars().any(char::is_control), "{error}");
        assert!(error.starts_with("xxxxx") && error.contains(".trace"), "{error}");
    }
}

/// A snapshot of PyTorch's allocator with one stream: rounds of an allocation and its free, with
/// call stacks.
fn snapshot(frames: &str) -> String {
    let mut entries = Vec::new();
    for round in 0..4_u64 {
        for action in ["alloc", "free_requested", "free_completed"] {
            let addr = 139_637_976_727_552 + (round << 22);
            entries.push(format!(
                "{{\"action\": \"{action}\", \"addr\": {addr}, \"size\": 4194304, \"stream\": 0, \"time_us\": {round}, \
                 \"frames\": {frames}}}"
            ));
        }
    }
    format!("{{\"segments\": [], \"device_traces\": [[{}]]}}", entries.join(","))
}

const FRAMES: &str = "[{\"filename\": \"train.py\", \"line\": 10, \"name\": \"step\"}]";

#[test]
fn equal_frames_are_equal_whether_shared_or_not() {
    let word = |text: &str| [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let frame = [b"](}(".to_vec(), word("filename"), word("train.py"), word("line"), b"K\x0aue".to_vec()].concat();
    let pickle = |frames: &dyn Fn(usize) -> Vec<u8>| {
        let mut bytes = [b"\x80\x04}".to_vec(), word("device_traces"), b"](](".to_vec()].concat();
        let actions = ["alloc", "free_requested", "free_completed"].into_iter().cycle().take(12);
        for (index, action) in actions.enumerate() {
            let address = [b'K', u8::try_from(index / 3 * 32).unwrap()];
            bytes.extend([&b"}("[..], &word("action"), &word(action), &word("addr"), &address].concat());
            bytes.extend([&word("size"), &b"K\x08"[..], &word("frames"), &frames(index), b"u"].concat());
        }
        [&bytes[..], b"ees."].concat()
    };
    let unshared = one("p", &pickle(&|_| frame.clone()));
    let shared =
        one("p", &pickle(&|index| if index == 0 { [&frame[..], b"q\x00"].concat() } else { b"h\x00".to_vec() }));
    assert_eq!(unshared, shared);
    let json = one("p", snapshot(FRAMES).as_bytes());
    for program in [&unshared, &json] {
        assert_eq!((program.operations(), program.notes.len()), (8, 0), "no free waited: {program:?}");
    }
    assert_eq!(json.peak_requested_bytes, 4 << 20);
}

#[test]
fn a_snapshot_without_requests_of_frees_has_the_same_peak() {
    let text = snapshot(FRAMES);
    let cut: Vec<&str> = text.split("},{").filter(|entry| !entry.contains("free_requested")).collect();
    let program = one("p.json", cut.join("},{").as_bytes());
    assert_eq!((program.peak_requested_bytes, program.operations()), (4 << 20, 8));
    assert!(program.notes[0].contains("no free_requested entries"));
}

#[test]
fn dense_compressed_events_are_refused() {
    let densely = |bytes: &[u8]| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let events = densely(&b"a 0 1 0\nf 0 0\n".repeat(5 << 18));
    let rows = densely(
        &[
            &b"Thread,Time,Action,Pointer,Size,Stream\n"[..],
            &b"1,t,allocate,0x1,1,0\n1,t,free,0x1,1,0\n".repeat(5 << 18),
        ]
        .concat(),
    );
    for bytes in [events, rows] {
        let error = read("b".as_ref(), &bytes[..]).unwrap_err();
        assert!(matches!(error.reason, Reason::TooDense { .. }), "{error}");
    }
}
