//! Finds memory snapshots among the values of a pickle or a JSON text.

use std::sync::Arc;

use super::allowance::{Allowance, VALUES};
use super::arena::{Arena, Value, Word};
use super::error::{Fault, Location, Reason};
use super::program::{Program, Site};
use super::snapshot::{self, Action, Entry, Segment, Snapshot, positive};
use crate::map::Use;

/// The programs of a snapshot. With `states`, its memory without a history is enough.
pub(super) fn programs(
    top: Value,
    arena: &mut Arena,
    name: &str,
    states: bool,
    allowance: &Allowance,
) -> Result<Vec<Program>, Fault> {
    snapshot::programs(snapshot(top, arena, allowance)?, name, states)
}

/// What values have of a snapshot.
pub(super) fn snapshot(top: Value, arena: &mut Arena, allowance: &Allowance) -> Result<Snapshot, Fault> {
    let Value::List(list) = top else {
        let snapshot = read(arena, top, allowance)?;
        return Ok(Snapshot { labels: Arc::new(arena.take_labels()), ..snapshot });
    };
    // Old snapshots, and those of `torch.cuda.memory_snapshot()`, are a list of segments.
    if let Some(Value::Dict(first)) = arena.first(list)
        && arena.get(first, Word::Blocks).is_some()
    {
        let mut segments = Vec::new();
        for (number, value) in arena.take(list).into_iter().enumerate() {
            segments.push(segment(arena, number, value)?);
        }
        let labels = Arc::new(arena.take_labels());
        return Ok(Snapshot { segments, labels, ..Snapshot::default() });
    }
    Err(Fault::file(not_it(arena, top)))
}

fn is_snapshot(arena: &Arena, dict: u32) -> bool {
    [Word::Segments, Word::DeviceTraces].into_iter().any(|key| arena.get(dict, key).is_some())
}

fn not_it(arena: &Arena, value: Value) -> Reason {
    let with_keys = |what: &str| match &arena.keys()[..] {
        [] => what.to_owned(),
        [key] => format!("{what} with the key {key}"),
        keys => format!("{what} with the keys {}", keys.join(", ")),
    };
    let found = match value {
        Value::Dict(_) if arena.is_empty(value) => "an empty dictionary".into(),
        Value::List(_) if arena.is_empty(value) => "an empty list".into(),
        Value::Dict(dict) if arena.get(dict, Word::TraceEvents).is_some() => {
            "a Chrome trace, as torch.profiler writes it; take a snapshot with torch.cuda.memory._dump_snapshot()"
                .into()
        }
        Value::Dict(_) => with_keys("a dictionary"),
        Value::List(_) if arena.keys().is_empty() => "a list of values".into(),
        Value::List(_) => with_keys("a list of dictionaries"),
        Value::Int(_) => "a number".into(),
        Value::Word(_) | Value::Other(_) => "neither a dictionary nor a list".into(),
    };
    Reason::NotASnapshot { found }
}

fn read(arena: &mut Arena, value: Value, allowance: &Allowance) -> Result<Snapshot, Fault> {
    let top = match value {
        Value::Dict(top) if is_snapshot(arena, top) => top,
        _ => return Err(Fault::file(not_it(arena, value))),
    };
    let options = options(arena, top);
    let overwritten = int(arena, top, Word::EntriesOverwritten).map_err(Fault::file)?;
    let mut traces = Vec::new();
    for (device, trace) in (0u32..).zip(list(arena, top, Word::DeviceTraces).map_err(Fault::file)?) {
        let Value::List(trace) = trace else {
            return Err(Fault::file(Reason::Structure("a device trace is not a list")));
        };
        let mut entries = Vec::new();
        for (index, value) in arena.take(trace).into_iter().enumerate() {
            let entry = entry(arena, value).and_then(|entry| {
                allowance.check(arena.bytes(), VALUES)?;
                Ok(entry)
            });
            entries.push(entry.map_err(|reason| Fault::new(Location::Entry { device, index }, reason))?);
        }
        traces.push(entries);
    }
    let mut segments = Vec::new();
    for (number, value) in list(arena, top, Word::Segments).map_err(Fault::file)?.into_iter().enumerate() {
        segments.push(segment(arena, number, value)?);
    }
    Ok(Snapshot { segments, traces, labels: Arc::default(), options, overwritten })
}

/// The option string that the recorded allocator was given.
fn options(arena: &Arena, top: u32) -> Option<String> {
    let Some(Value::Dict(settings)) = arena.get(top, Word::AllocatorSettings) else { return None };
    let text = [Word::AllocConf, Word::CudaAllocConf].into_iter().find_map(|key| arena.get(settings, key));
    text.and_then(|text| arena.text_of(text)).map(str::to_owned)
}

/// The call stack and the tag of an entry or a block.
fn site(arena: &mut Arena, dict: u32) -> Result<Site, Reason> {
    let stack = arena.get(dict, Word::Frames).map_or(Ok(0), |frames| arena.stack(frames))?;
    let tag = arena.get(dict, Word::UserMetadata).map_or(Ok(0), |tag| arena.tag(tag))?;
    Ok(Site { stack, tag })
}

fn entry(arena: &mut Arena, value: Value) -> Result<Entry, Reason> {
    let Value::Dict(dict) = value else { return Err(Reason::Structure("an entry is not a dictionary")) };
    let action = match arena.get(dict, Word::Action) {
        Some(Value::Word(word)) => Action::of(word),
        _ => Action::Unknown,
    };
    Ok(Entry {
        action,
        addr: int(arena, dict, Word::Addr)?,
        size: int(arena, dict, Word::Size)?,
        device_free: int(arena, dict, Word::DeviceFree)?,
        stream: int(arena, dict, Word::Stream)?.unwrap_or(0),
        time_us: int(arena, dict, Word::TimeUs)?.unwrap_or(0),
        frames: arena.get(dict, Word::Frames).map_or(0, |frames| arena.digest(frames)),
        site: site(arena, dict)?,
        private_pool: match arena.get(dict, Word::PoolId) {
            Some(Value::List(pool)) => !arena.is_zeros(pool),
            _ => false,
        },
    })
}

fn segment(arena: &mut Arena, number: usize, value: Value) -> Result<Segment, Fault> {
    let fault = |reason| Fault::new(Location::Segment { segment: number }, reason);
    let Value::Dict(dict) = value else { return Err(fault(Reason::Structure("a segment is not a dictionary"))) };
    let number_in = |arena: &Arena, key| int(arena, dict, key).map(|number| number.unwrap_or(0)).map_err(fault);
    let (device, stream) = (number_in(arena, Word::Device)?, number_in(arena, Word::Stream)?);
    let address = number_in(arena, Word::Address)?;
    let mut end = address;
    let (mut allocated, mut blocks) = (Vec::new(), Vec::new());
    for (index, value) in list(arena, dict, Word::Blocks).map_err(fault)?.into_iter().enumerate() {
        let at = Location::Block { segment: number, block: index };
        let block = block(arena, value, end).map_err(|reason| Fault::new(at, reason))?;
        allocated.extend(block.requested.map(|requested| (block.address, requested, block.site)));
        blocks.push((block.end.wrapping_sub(block.address), block.is));
        end = block.end;
    }
    let pool = match list(arena, dict, Word::SegmentPoolId).map_err(fault)?[..] {
        [Value::Int(first), Value::Int(second)] => (first, second),
        _ => (0, 0),
    };
    Ok(Segment { device, address, stream, pool, allocated, blocks })
}

/// A block of a segment.
struct Block {
    address: u64,
    end: u64,
    /// The requested bytes, if it is allocated.
    requested: Option<u64>,
    is: Use,
    site: Site,
}

/// Reads a block. Without an address it is at `follows`.
fn block(arena: &mut Arena, value: Value, follows: u64) -> Result<Block, Reason> {
    let Value::Dict(block) = value else { return Err(Reason::Structure("a block is not a dictionary")) };
    let address = int(arena, block, Word::Address)?.unwrap_or(follows);
    let size = positive("size", int(arena, block, Word::Size)?.unwrap_or(0))?;
    let requested = positive("requested_size", int(arena, block, Word::RequestedSize)?.unwrap_or(size))?;
    let is = match arena.get(block, Word::State) {
        Some(Value::Word(Word::ActiveAllocated)) => Use::Live,
        Some(Value::Word(Word::ActivePendingFree | Word::ActiveAwaitingFree)) => Use::Waiting,
        _ => Use::Free,
    };
    let site = site(arena, block)?;
    Ok(Block { address, end: address.wrapping_add(size), requested: (is == Use::Live).then_some(requested), is, site })
}

/// The integer value of `key`, if it is set.
fn int(arena: &Arena, dict: u32, key: Word) -> Result<Option<u64>, Reason> {
    match arena.get(dict, key) {
        None => Ok(None),
        Some(Value::Int(value)) => Ok(Some(value)),
        Some(_) => Err(Reason::WrongType { field: key.text(), expected: "an integer of 64 bits" }),
    }
}

/// The items of the list under `key`; none if it is not set.
fn list(arena: &mut Arena, dict: u32, key: Word) -> Result<Vec<Value>, Reason> {
    match arena.get(dict, key) {
        None => Ok(Vec::new()),
        Some(Value::List(list)) => Ok(arena.take(list)),
        Some(_) => Err(Reason::WrongType { field: key.text(), expected: "a list" }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{json, unpickle};
    use super::*;

    /// A string of a pickle.
    fn word(text: &str) -> Vec<u8> {
        [&[0x8c, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
    }

    /// A dictionary of a pickle.
    fn dict(entries: &[(&str, &[u8])]) -> Vec<u8> {
        let entries = entries.iter().flat_map(|(key, value)| [word(key), value.to_vec()].concat());
        [b"}(".to_vec(), entries.collect(), b"u".to_vec()].concat()
    }

    fn read_pickle(value: &[u8]) -> Result<Vec<Program>, String> {
        let pickle = [&b"\x80\x04"[..], value, b"."].concat();
        let allowance = Allowance::read(pickle.len(), pickle.len());
        let read = unpickle::run(&pickle[..], &allowance);
        read.and_then(|(top, mut arena)| programs(top, &mut arena, "p", false, &allowance))
            .map_err(|fault| fault.at("p".as_ref()).to_string())
    }

    fn read_json(text: &str) -> Result<Vec<Program>, String> {
        let allowance = Allowance::read(text.len(), text.len());
        let read = json::parse(text.as_bytes(), &allowance);
        read.and_then(|(top, mut arena)| programs(top, &mut arena, "j", false, &allowance))
            .map_err(|fault| fault.at("j".as_ref()).to_string())
    }

    fn error(top: &[(&str, &[u8])]) -> String {
        read_pickle(&dict(top)).unwrap_err()
    }

    fn list_of(item: &[u8]) -> Vec<u8> {
        [&b"]("[..], item, b"e"].concat()
    }

    /// A string, 1.5, true, None, 2^70, a list.
    const NO_INTEGERS: [&[u8]; 6] =
        [b"\x8c\x01x", b"G\x3f\xf8\0\0\0\0\0\0", b"\x88", b"N", b"\x8a\x09\0\0\0\0\0\0\0\0\x40", b"]"];

    #[test]
    fn a_number_of_another_type_is_not_missing() {
        for value in NO_INTEGERS {
            for field in ["addr", "size", "stream", "time_us"] {
                let alloc = dict(&[("action", &word("alloc")), ("addr", b"K\x01"), ("size", b"K\x02"), (field, value)]);
                let error = error(&[("device_traces", &list_of(&list_of(&alloc)))]);
                assert_eq!(error, format!("p:device_traces[0][0]: the field {field} is not an integer of 64 bits"));
            }
            let segment = |block: &[u8], field: &str| {
                let segment = dict(&[("blocks", &list_of(block)), (field, value)]);
                error(&[("segments", &list_of(&segment))])
            };
            let expected = "is not an integer of 64 bits";
            assert_eq!(segment(b"}", "device"), format!("p:segments[0]: the field device {expected}"));
            let block = dict(&[("requested_size", value)]);
            assert_eq!(segment(&block, "x"), format!("p:segments[0].blocks[0]: the field requested_size {expected}"));
        }
    }

    #[test]
    fn values_that_are_not_lists_or_dictionaries_are_refused() {
        for value in [&b"K\x05"[..], b"N", b"}", b"\x8c\x04size"] {
            for top in ["device_traces", "segments"] {
                assert_eq!(error(&[(top, value)]), format!("p: the field {top} is not a list"));
            }
            let segment = dict(&[("blocks", value)]);
            assert_eq!(error(&[("segments", &list_of(&segment))]), "p:segments[0]: the field blocks is not a list");
        }
        for value in [&b"K\x05"[..], b"N", b"]"] {
            let trace = [&b"}\x8c\x04sizeK\x05s"[..], value].concat();
            assert_eq!(
                error(&[("device_traces", &list_of(&list_of(&trace)))]),
                "p:device_traces[0][1]: not a memory snapshot: an entry is not a dictionary"
            );
            assert_eq!(
                error(&[("segments", &list_of(value))]),
                "p:segments[0]: not a memory snapshot: a segment is not a dictionary"
            );
        }
    }

    #[test]
    fn a_list_may_be_a_snapshot_without_history() {
        let block = dict(&[("size", b"K\x01")]);
        let segment = dict(&[("device", b"K\x01"), ("blocks", &list_of(&block))]);
        assert!(read_pickle(&list_of(&segment)).unwrap_err().contains("the snapshot has no history"));
        for text in
            ["[{\"device\": 0, \"blocks\": [{\"size\": 1}]}]", "{\"segments\": []}", "{\"device_traces\": [[]]}"]
        {
            assert!(read_json(text).unwrap_err().contains("the snapshot has no history"), "{text}");
        }
    }

    #[test]
    fn other_content_is_described() {
        for (value, expected) in [
            (&b"}"[..], "an empty dictionary"),
            (b"]", "an empty list"),
            (
                b"}(\x8c\x08greeting\x8c\x05hello\x8c\x06answerK\x2au",
                "a dictionary with the keys \"greeting\", \"answer\"",
            ),
            (b"}K\x05Ns", "a dictionary with the key 5"),
            (b"](K\x01K\x02e", "a list of values"),
            (b"]}\x8c\x01aNsa", "a list of dictionaries with the key \"a\""),
            (b"]}\x8c\x08segmentsNsa", "a list of dictionaries with the key \"segments\""),
            (b"K\x07", "a number"),
            (b"cbuiltins\nobject\n)\x81", "neither a dictionary nor a list"),
        ] {
            assert_eq!(read_pickle(value).unwrap_err(), format!("p: not a memory snapshot: found {expected}"));
        }
        for (text, expected) in [
            ("{}", "an empty dictionary"),
            ("[]", "an empty list"),
            ("[1, 2]", "a list of values"),
            ("[{\"ph\": \"i\", \"name\": \"x\"}]", "a list of dictionaries with the keys \"ph\", \"name\""),
            ("{\"loss\": [1]}", "a dictionary with the key \"loss\""),
            ("{\"a\\u001b[1m\": 1}", "a dictionary with the key \"a\\u{1b}[1m\""),
        ] {
            assert_eq!(read_json(text).unwrap_err(), format!("j: not a memory snapshot: found {expected}"));
        }
        let trace = read_json("{\"schemaVersion\": 1, \"traceEvents\": [{\"name\": \"[memory]\"}]}").unwrap_err();
        assert!(
            trace.starts_with("j: not a memory snapshot: found a Chrome trace, as torch.profiler writes it"),
            "{trace}"
        );
    }

    #[test]
    fn numbers_may_be_written_with_a_fraction() {
        let program = |entry: &str| {
            read_json(&format!("{{\"device_traces\": [[{{\"action\": \"alloc\", \"addr\": 512, {entry}}}]]}}"))
        };
        assert_eq!(program("\"size\": 4194304.0, \"stream\": 0e0").unwrap()[0].peak_requested_bytes, 4 << 20);
        for number in ["0.5", "null", "1e300"] {
            let error = program(&format!("\"size\": {number}")).unwrap_err();
            assert_eq!(error, "j:device_traces[0][0]: the field size is not an integer of 64 bits");
        }
        assert!(program("\"size\": 7, \"x\": NaN").unwrap_err().starts_with("j:1: "));
    }

    #[test]
    fn call_stacks_tags_and_options_are_kept_from_both_formats() {
        let frame = |name: &str, line: u8| {
            dict(&[("name", &word(name)), ("filename", &word("/home/me/train.py")), ("line", &[b'K', line])])
        };
        let stack = [&b"]("[..], &frame("forward", 31), &frame("main", 7), b"e"].concat();
        let alloc = dict(&[
            ("action", &word("alloc")),
            ("addr", b"M\0\x02"),
            ("size", b"K\x64"),
            ("frames", &stack),
            ("user_metadata", &word("step 3")),
        ]);
        let settings = dict(&[("PYTORCH_CUDA_ALLOC_CONF", &word("max_split_size_mb:128"))]);
        let pickled = dict(&[("device_traces", &list_of(&list_of(&alloc))), ("allocator_settings", &settings)]);
        let frame = |name: &str, line| {
            format!("{{\"name\": \"{name}\", \"filename\": \"/home/me/train.py\", \"line\": {line}}}")
        };
        let json = format!(
            "{{\"allocator_settings\": {{\"PYTORCH_CUDA_ALLOC_CONF\": \"max_split_size_mb:128\"}}, \"device_traces\": \
             [[{{\"frames\": [{}, {}], \"action\": \"alloc\", \"addr\": 512, \"size\": 100, \
             \"user_metadata\": \"step 3\"}}]]}}",
            frame("forward", 31),
            frame("main", 7)
        );
        for program in [read_pickle(&pickled).unwrap().remove(0), read_json(&json).unwrap().remove(0)] {
            let [site] = program.sites[..] else { panic!("{:?}", program.sites) };
            let frames: Vec<String> = program.labels.calls(site.stack).map(|call| call.to_string()).collect();
            assert_eq!(frames, ["forward (/home/me/train.py:31)", "main (/home/me/train.py:7)"]);
            assert_eq!(program.labels.text(site.tag), Some("step 3"));
            assert_eq!(program.options.as_deref(), Some("max_split_size_mb:128"));
            assert_eq!(crate::headline::headline(&program.labels, site.stack), "forward (me/train.py:31)");
        }
    }

    #[test]
    fn negative_sizes_of_blocks_are_refused_where_they_are() {
        let block = dict(&[("size", b"J\x00\xfe\xff\xff"), ("state", &word("active_allocated"))]);
        let segment = dict(&[("blocks", &list_of(&block))]);
        assert_eq!(error(&[("segments", &list_of(&segment))]), "p:segments[0].blocks[0]: \"-512\" is not a valid size");
    }
}
