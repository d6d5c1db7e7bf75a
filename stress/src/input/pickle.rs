//! Snapshots as pickles.

use std::io::BufRead;

use super::arena::{Arena, Value, Word};
use super::error::{Fault, Location, Reason};
use super::gzip::Stored;
use super::snapshot::{Action, Entry, Segment, SegmentBlock, Snapshot};
use super::unpickle;

pub(super) fn parse(content: impl BufRead, stored: &Stored) -> Result<Snapshot, Fault> {
    let (top, mut arena) = unpickle::run(content, stored)?;
    let top = match top {
        Value::Dict(top) => top,
        // Only the segments, if it is a snapshot at all: so old ones were.
        Value::List(list) => {
            let segments = matches!(arena.take(list).first(), None | Some(Value::Dict(_)));
            let not_it = Reason::Structure("it is a list, but not of segments");
            return Err(Fault::file(if segments { Reason::NoHistory } else { not_it }));
        }
        _ => return Err(Fault::file(Reason::Structure("it is no dictionary"))),
    };
    let mut traces = Vec::new();
    for (device, trace) in (0u32..).zip(list(&mut arena, top, Word::DeviceTraces).map_err(Fault::file)?) {
        let Value::List(trace) = trace else {
            return Err(Fault::file(Reason::Structure("a device trace is no list")));
        };
        let mut entries = Vec::new();
        for (index, value) in arena.take(trace).into_iter().enumerate() {
            let entry = entry(&arena, value);
            entries.push(entry.map_err(|reason| Fault::new(Location::Entry { device, index }, reason))?);
        }
        traces.push(entries);
    }
    let mut segments = Vec::new();
    for (number, value) in list(&mut arena, top, Word::Segments).map_err(Fault::file)?.into_iter().enumerate() {
        segments.push(segment(&mut arena, number, value)?);
    }
    Ok(Snapshot { segments, traces })
}

fn entry(arena: &Arena, value: Value) -> Result<Entry, Reason> {
    let Value::Dict(dict) = value else { return Err(Reason::Structure("an entry is no dictionary")) };
    let action = match arena.get(dict, Word::Action) {
        Some(Value::Word(word)) => Action::from_name(word.text().as_bytes()),
        _ => Action::Unknown,
    };
    Ok(Entry {
        action,
        addr: int(arena, dict, Word::Addr)?,
        size: int(arena, dict, Word::Size)?,
        stream: int(arena, dict, Word::Stream)?.unwrap_or(0),
        time_us: int(arena, dict, Word::TimeUs)?.unwrap_or(0),
        frames: match arena.get(dict, Word::Frames) {
            Some(Value::List(frames)) => arena.digest(frames),
            _ => 0,
        },
        private_pool: match arena.get(dict, Word::PoolId) {
            Some(Value::List(pool)) => !arena.is_zeros(pool),
            _ => false,
        },
    })
}

fn segment(arena: &mut Arena, number: usize, value: Value) -> Result<Segment, Fault> {
    let fault = |reason| Fault::new(Location::Segment { segment: number }, reason);
    let Value::Dict(dict) = value else { return Err(fault(Reason::Structure("a segment is no dictionary"))) };
    let number_in = |arena: &Arena, key| int(arena, dict, key).map(|number| number.unwrap_or(0)).map_err(fault);
    let (device, stream) = (number_in(arena, Word::Device)?, number_in(arena, Word::Stream)?);
    let address = number_in(arena, Word::Address)?;
    let mut blocks = Vec::new();
    for (index, value) in list(arena, dict, Word::Blocks).map_err(fault)?.into_iter().enumerate() {
        let block = block(arena, value);
        blocks.push(block.map_err(|reason| Fault::new(Location::Block { segment: number, block: index }, reason))?);
    }
    Segment::new(number, (device, stream), address, blocks)
}

fn block(arena: &Arena, value: Value) -> Result<SegmentBlock, Reason> {
    let Value::Dict(block) = value else { return Err(Reason::Structure("a block is no dictionary")) };
    Ok(SegmentBlock {
        address: int(arena, block, Word::Address)?,
        size: int(arena, block, Word::Size)?.unwrap_or(0),
        requested: int(arena, block, Word::RequestedSize)?,
        allocated: arena.get(block, Word::State) == Some(Value::Word(Word::ActiveAllocated)),
    })
}

/// The integer that `key` is set to, if it is set.
fn int(arena: &Arena, dict: u32, key: Word) -> Result<Option<u64>, Reason> {
    match arena.get(dict, key) {
        None => Ok(None),
        Some(Value::Int(value)) => Ok(Some(value)),
        Some(_) => Err(Reason::WrongType { field: key.text(), expected: "an integer of 64 bits" }),
    }
}

/// The items of the list that `key` is set to; none if it is not set.
fn list(arena: &mut Arena, dict: u32, key: Word) -> Result<Vec<Value>, Reason> {
    match arena.get(dict, key) {
        None => Ok(Vec::new()),
        Some(Value::List(list)) => Ok(arena.take(list)),
        Some(_) => Err(Reason::WrongType { field: key.text(), expected: "a list" }),
    }
}

#[cfg(test)]
mod tests {
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

    fn list_of(item: &[u8]) -> Vec<u8> {
        [&b"]("[..], item, b"e"].concat()
    }

    fn read(top: &[(&str, &[u8])]) -> Result<Snapshot, String> {
        let pickle = [&b"\x80\x04"[..], &dict(top), b"."].concat();
        parse(&pickle[..], &Stored::default()).map_err(|fault| fault.at("p".as_ref()).to_string())
    }

    /// A string, a float, a truth, nothing, 2^70, a list.
    const NO_INTEGERS: [&[u8]; 6] =
        [b"\x8c\x01x", b"G\x40\0\0\0\0\0\0\0", b"\x88", b"N", b"\x8a\x09\0\0\0\0\0\0\0\0\x40", b"]"];

    #[test]
    fn a_number_of_another_type_is_not_missing() {
        for value in NO_INTEGERS {
            for field in ["addr", "size", "stream", "time_us"] {
                let alloc = dict(&[("action", &word("alloc")), ("addr", b"K\x01"), ("size", b"K\x02"), (field, value)]);
                let error = read(&[("device_traces", &list_of(&list_of(&alloc)))]).unwrap_err();
                assert_eq!(error, format!("p:device_traces[0][0]: the field {field} is not an integer of 64 bits"));
            }
            let segment = |block: &[u8], field: &str| {
                let segment = dict(&[("blocks", &list_of(block)), (field, value)]);
                read(&[("segments", &list_of(&segment))]).unwrap_err()
            };
            let expected = "is not an integer of 64 bits";
            assert_eq!(segment(b"}", "device"), format!("p:segments[0]: the field device {expected}"));
            let block = dict(&[("requested_size", value)]);
            let error = segment(&block, "x");
            assert_eq!(error, format!("p:segments[0].blocks[0]: the field requested_size {expected}"));
        }
    }

    #[test]
    fn what_is_no_list_or_dictionary_is_refused() {
        for value in [&b"K\x05"[..], b"N", b"}", b"\x8c\x04size"] {
            for top in ["device_traces", "segments"] {
                assert_eq!(read(&[(top, value)]).unwrap_err(), format!("p: the field {top} is not a list"));
            }
            let segment = dict(&[("blocks", value)]);
            let error = read(&[("segments", &list_of(&segment))]).unwrap_err();
            assert_eq!(error, "p:segments[0]: the field blocks is not a list");
        }
        for value in [&b"K\x05"[..], b"N", b"]"] {
            let trace = [&b"}\x8c\x04sizeK\x05s"[..], value].concat();
            let error = read(&[("device_traces", &list_of(&list_of(&trace)))]).unwrap_err();
            assert_eq!(error, "p:device_traces[0][1]: not a memory snapshot: an entry is no dictionary");
            let error = read(&[("segments", &list_of(value))]).unwrap_err();
            assert_eq!(error, "p:segments[0]: not a memory snapshot: a segment is no dictionary");
        }
    }

    #[test]
    fn a_list_may_be_a_snapshot_without_history() {
        let read = |pickle: &[u8]| {
            parse(pickle, &Stored::default()).map_err(|fault| fault.at("p".as_ref()).to_string()).unwrap_err()
        };
        for list in
            [b"].".to_vec(), b"]}a.".to_vec(), [list_of(&dict(&[("device", b"K\x01")])), b".".to_vec()].concat()]
        {
            assert!(read(&list).contains("the snapshot has no history"));
        }
        for list in [&b"](K\x01K\x02e."[..], b"]Na.", b"]]a."] {
            assert_eq!(read(list), "p: not a memory snapshot: it is a list, but not of segments");
        }
    }

    #[test]
    fn negative_sizes_of_blocks_are_refused_where_they_are() {
        let block = dict(&[("size", b"J\x00\xfe\xff\xff"), ("state", &word("active_allocated"))]);
        let segment = dict(&[("blocks", &list_of(&block))]);
        let error = read(&[("segments", &list_of(&segment))]).unwrap_err();
        assert_eq!(error, "p:segments[0].blocks[0]: \"-512\" is not a valid size");
    }
}
