//! Whole files: round trips, damage, and formats that must agree.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

const GPT2: &[u8] = include_bytes!("../../testdata/gpt2_fp32.trace.gz");
const GNN: &[u8] = include_bytes!("../../testdata/gnn_random_graphs.trace.gz");
const FSDP_TRACE: &[u8] = include_bytes!("../../testdata/fsdp_start.trace");
const FSDP_SNAPSHOT: &[u8] = include_bytes!("../../testdata/fsdp_start.pickle.gz");

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

/// A program as a trace; IDs are counted up as in recorded ones.
fn to_trace(program: &Program) -> String {
    let mut text: String = program.headers.iter().map(|(key, value)| format!("# {key}: {value}\n")).collect();
    let (mut slots, mut next) = (vec![(0, 0); program.slots as usize], 0);
    for &event in &program.events {
        text += &match event {
            Event::Alloc { slot, bytes, stream } => {
                let stream = program.streams[usize::from(stream)];
                slots[slot as usize] = (next, stream);
                next += 1;
                format!("a {} {bytes} {stream}\n", next - 1)
            }
            Event::Free { slot } => format!("f {} {}\n", slots[slot as usize].0, slots[slot as usize].1),
            Event::RecordStream { slot, stream } => {
                format!("r {} {}\n", slots[slot as usize].0, program.streams[usize::from(stream)])
            }
            Event::Iteration(number) => format!("i {number}\n"),
        };
    }
    text
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

/// Programs of every kind of event.
fn programs() -> impl Strategy<Value = Program> {
    let step = (0u8..8, any::<prop::sample::Index>(), 0u64..1 << 40, prop::sample::select(vec![0, 1, 7, u64::MAX]));
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
            builder.finish()
        })
        .prop_filter("a program in which something happens", |program| !program.events.is_empty())
}

proptest! {
    #[test]
    fn traces_round_trip(program in programs(), compressed: bool) {
        let text = to_trace(&program).into_bytes();
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
        let json = include_bytes!("../../testdata/fsdp_start.json.gz");
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

/// A trace without what its snapshot does not tell: iterations, and when before its free a block was used.
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
    assert_eq!(one("fsdp_start.json.gz", include_bytes!("../../testdata/fsdp_start.json.gz")), pickle);
}

#[test]
fn errors_name_the_file() {
    let fails = |name: &str, bytes: &[u8]| read(name.as_ref(), bytes).unwrap_err().to_string();
    assert_eq!(fails("a.trace", b""), "a.trace: the file is empty");
    let truncated = "the gzip data is truncated: the file ends at byte";
    assert!(fails("a.trace.gz", &GPT2[..30_000]).ends_with(&format!(": {truncated} 30000, before the data does")));
    assert_eq!(fails("a.gz", &GPT2[..5]), format!("a.gz: {truncated} 5, before the data does"));
    assert!(fails("a.pkl", b"(dp0\n").ends_with("an RMM log; a pickle must be of protocol 2 or newer"));
    assert!(fails("s", b"\x80\x02].").contains("the snapshot has no history"));
    assert!(fails("s", b"\x80\x02}.").contains("the snapshot has no history"));
    assert!(load("no such file".as_ref()).unwrap_err().to_string().starts_with("no such file: "));
}

#[test]
fn the_last_byte_matters() {
    let json = include_bytes!("../../testdata/fsdp_start.json.gz");
    let rmm = gzip(to_rmm(&one("t", FSDP_TRACE)).as_bytes());
    for file in [GPT2, FSDP_SNAPSHOT, json, &rmm] {
        let error = read("x".as_ref(), &file[..file.len() - 1]).unwrap_err();
        assert!(matches!(error.reason, Reason::TruncatedGzip { .. }), "{error}");
    }
}

#[test]
fn compressed_emptiness_costs_no_memory() {
    let zeros = gzip(&vec![0; 50 << 20]);
    assert!(read("z".as_ref(), &zeros[..]).is_err());
    let line = gzip(&[b"a ".as_slice(), &vec![b'1'; 50 << 20]].concat());
    assert!(read("z".as_ref(), &line[..]).unwrap_err().to_string().ends_with("longer than 64 KiB"));
}
