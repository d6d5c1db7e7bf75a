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
    let config: Config = format!("quarantine_mb:0,{options}").parse().unwrap();
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
    assert!(fails("a.trace.bz2", b"BZh91AY").ends_with("found data that bzip2 compressed"));
    assert!(fails("s", b"\x80\x02}(X\x08\0\0\0segments]u.").contains("the snapshot has no history"));
    assert!(fails("s", b"\x80\x02}.").contains("not a memory snapshot: found an empty dictionary"));
    assert!(load("no such file".as_ref()).unwrap_err().to_string().starts_with("no such file: "));
}

#[test]
fn what_is_no_recording_says_what_to_do() {
    let timeline = "<html>\n<head><title>GPU Memory Timeline HTML</title></head>\n<img src='data:image/png;base64,A'>";
    let pprof = b"\x0a\x04\x08\x01\x10\x02\x0a\x04\x08\x03\x10\x04\x12\x06\x0a\x02\x01\x02";
    let log = b"[ 24960][08:23:56:059423][info  ] ----- RMM LOG BEGIN [PTDS DISABLED] -----\n\
        [ 24960][08:23:56:059480][error ] [A][Stream 0x1][Upstream 10737418240B][FAILURE maximum pool size exceeded]\n";
    for (name, content, what, todo) in [
        ("log.txt", &log[..], "RMM's debug log", "RMM_LOG_FILE"),
        ("s.pickle", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "Git LFS", "git lfs pull"),
        ("t.html", timeline.as_bytes(), "memory timeline of PyTorch's profiler", "_dump_snapshot()"),
        ("t.json", b"[[1, 2], [[0, 0], [1, 2]]]", "memory timeline of PyTorch's profiler", "_dump_snapshot()"),
        ("t.raw.json.gz", &gzip(b"[[17, 0, 512, 3]]"), "memory timeline of PyTorch's profiler", "_dump_snapshot()"),
        ("memory.prof", &gzip(pprof), "pprof", "XLA_PYTHON_CLIENT_ALLOCATOR=platform"),
        ("tf.log", b"a.py\nW bfc_allocator.cc:491] Allocator (GPU_0_bfc)", "BFC", "TF_GPU_ALLOCATOR=cuda_malloc_async"),
        ("map.json", b"{\"allocatorName\": \"GPU_0_bfc\", \"chunk\": []}", "BFC", "aquifer-stress run"),
    ] {
        let error = read(name.as_ref(), content).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("{name}: this is ")) && error.contains(what) && error.contains(todo),
            "{error}"
        );
        assert!(!error.contains('…'), "{error}");
    }
    // Below other lines, and beside a log that is read.
    let padded = [&b"Starting the cluster\n".repeat(500)[..], log].concat();
    assert!(read("log.txt".as_ref(), &padded[..]).unwrap_err().to_string().contains("RMM's debug log"));
    let rows = [&b"1,t,allocate,0x1,8,0\n"[..], log].concat();
    assert_eq!(one("log.txt", &rows).operations(), 1);
}

/// RMM 0.7 wrote other columns, and a path at the end of each row.
#[test]
fn logs_of_old_versions_of_rmm_are_read() {
    let program = one("l.csv", include_bytes!("../../../testdata/rmm_log_0_7.csv"));
    assert_eq!((program.operations(), program.peak_requested_bytes), (4, 3 << 20));
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
        zip_of(&[(&long, b"nothing")]),
        zip_of(&[("a\nb", b"nothing"), ("c", b"\x80\x04}\x8c\x01\nNs.")]),
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

fn zip_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut archive = rawzip::ZipArchiveWriter::new(&mut bytes);
    for (name, content) in files {
        let (mut entry, config) =
            archive.new_file(name).compression_method(rawzip::CompressionMethod::DEFLATE).start().unwrap();
        let mut writer = config.wrap(flate2::write::DeflateEncoder::new(&mut entry, Compression::fast()));
        writer.write_all(content).unwrap();
        let (encoder, descriptor) = writer.finish().unwrap();
        encoder.finish().unwrap();
        entry.finish(descriptor).unwrap();
    }
    archive.finish().unwrap();
    bytes
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

/// A page as `_memory_viz` writes it, which pads a pickle with zeros.
fn page_of(pickle: &[u8]) -> Vec<u8> {
    let text = base64(&[pickle, &[0; 3][..3 - pickle.len() % 3]].concat());
    let files = format!("[{{\"name\": \"snapshot.pickle\", \"base64\": \"{text}\"}}]");
    format!("\n<!DOCTYPE html>\n<html><script type=\"module\">\nconst local_files = {files}\n</script></html>")
        .into_bytes()
}

/// The same text, compressed with `xz` and `zstd`, and cut off in two frames each.
const PACKED: [(&str, &[u8]); 2] = [
    ("t.trace.xz", include_bytes!("../../../testdata/two.trace.xz")),
    ("t.trace.zst", include_bytes!("../../../testdata/two.trace.zst")),
];

#[test]
fn packed_recordings_are_read() {
    let pickle = gunzip(FSDP_SNAPSHOT);
    let plain = one("fsdp_start.pickle", &pickle);
    for (name, bytes) in [
        ("fsdp_start.zip", zip_of(&[("fsdp_start.pickle", &pickle)])),
        ("fsdp_start.zip", zip_of(&[("__MACOSX/._fsdp", b"x"), ("run/f.pickle.gz", FSDP_SNAPSHOT)])),
        ("fsdp_start.html", page_of(&pickle)),
        ("fsdp_start.html.gz", gzip(&page_of(&pickle))),
        ("fsdp_start.gz", gzip(&gzip(&pickle))),
    ] {
        let program = one(name, &bytes);
        assert_eq!((&program.name, &program.notes), (&plain.name, &plain.notes), "{name}");
        assert!(program == plain, "{name}");
    }
    for (name, bytes) in PACKED {
        let program = one(name, bytes);
        assert_eq!((&*program.name, program.operations(), program.peak_requested_bytes), ("t", 2000, 1000), "{name}");
        for cut in [7, bytes.len() / 2, bytes.len() - 1] {
            let error = read(name.as_ref(), &bytes[..cut]).unwrap_err().to_string();
            assert!(
                error.contains(" data is damaged or not supported: ") || error.contains(" data is incomplete"),
                "{error}"
            );
        }
    }
    let ranks = zip_of(&[("rank0/s.pickle", &pickle), ("rank1/s.pickle", &pickle), ("readme.txt", b"hello")]);
    let ranks = read("run.zip".as_ref(), &ranks[..]).unwrap();
    assert_eq!(ranks.iter().map(|program| &*program.name).collect::<Vec<_>>(), ["run/rank0/s", "run/rank1/s"]);
    assert_eq!(ranks[0].notes.last().unwrap(), "files of the archive without a recording, left out: 1");
    assert_eq!((&ranks[1].events, ranks[1].notes.len()), (&plain.events, plain.notes.len()));
}

#[test]
fn damaged_packages_are_errors() {
    let fails = |bytes: &[u8]| read("p".as_ref(), bytes).unwrap_err().to_string();
    assert!(fails(&gzip(&gzip(&gzip(&gzip(&gzip(b"a 0 1 0")))))).ends_with("it is packed in more than 4 layers"));
    let matryoshka = (0..5).fold(b"a 0 1 0".to_vec(), |inner, _| zip_of(&[("x", &inner)]));
    assert!(fails(&matryoshka).ends_with("it is packed in more than 4 layers"));
    assert_eq!(fails(&zip_of(&[])), "p: the archive has no recording in it");
    assert!(
        fails(&zip_of(&[("version", b"3\n"), ("data.pkl", b"\x80\x02}.")]))
            .starts_with("p/data.pkl: not a memory snapshot")
    );
    assert!(fails(&zip_of(&[("a.trace", b"a 0 x 0")])).starts_with("p/a.trace:1: \"x\" is not a valid size"));
    assert!(fails(b"PK\x03\x04 and no archive").contains("the zip data is damaged or not supported: "));
    let mut zip = zip_of(&[("a.trace", b"a 0 1 0\nf 0 0\n")]);
    zip[40] ^= 0x10;
    assert!(fails(&zip).contains("the zip data is damaged or not supported: "));
    assert_eq!(fails(b"<html></html>"), "p: the page has no recording in it");
    assert!(fails(b"<html>\"base64\": \"!!!!\"").contains("the base64 data is damaged"));
    assert!(fails(b"<html>\"base64\": \"gAR9").ends_with("damaged pickle: it ends early"));
    let twice = [page_of(&gunzip(FSDP_SNAPSHOT)), page_of(&gunzip(FSDP_SNAPSHOT))].concat();
    assert_eq!(read("p".as_ref(), &twice[..]).unwrap().len(), 2);
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
