//! Snapshots as pickles.

use std::io::BufRead;

use super::arena::{Arena, Value, Word};
use super::error::{Fault, Location, Reason};
use super::snapshot::{Action, Entry, Segment, Snapshot};
use super::unpickle;

pub(super) fn parse(content: impl BufRead) -> Result<Snapshot, Fault> {
    let (top, mut arena) = unpickle::run(content)?;
    let top = match top {
        Value::Dict(top) => top,
        // Only the segments.
        Value::List(_) => return Err(Fault::file(Reason::NoHistory)),
        _ => return Err(structure("it is no dictionary")),
    };
    let mut traces = Vec::new();
    for (device, trace) in (0u32..).zip(list(&mut arena, top, Word::DeviceTraces)) {
        let Value::List(trace) = trace else { return Err(structure("a device trace is no list")) };
        let mut entries = Vec::new();
        for (index, value) in arena.take(trace).into_iter().enumerate() {
            let Value::Dict(dict) = value else {
                return Err(Fault::new(
                    Location::Entry { device, index },
                    Reason::Structure("an entry is no dictionary"),
                ));
            };
            entries.push(entry(&arena, dict));
        }
        traces.push(entries);
    }
    let mut segments = Vec::new();
    for value in list(&mut arena, top, Word::Segments) {
        let Value::Dict(dict) = value else { return Err(structure("a segment is no dictionary")) };
        segments.push(segment(&mut arena, dict)?);
    }
    Ok(Snapshot { segments, traces })
}

fn entry(arena: &Arena, dict: u32) -> Entry {
    let action = match arena.get(dict, Word::Action) {
        Some(Value::Word(word)) => Action::from_name(word.text().as_bytes()),
        _ => Action::Unknown,
    };
    Entry {
        action,
        addr: int(arena, dict, Word::Addr),
        size: int(arena, dict, Word::Size),
        stream: int(arena, dict, Word::Stream).unwrap_or(0),
        time_us: int(arena, dict, Word::TimeUs).unwrap_or(0),
        frames: match arena.get(dict, Word::Frames) {
            Some(Value::List(frames)) => arena.digest(frames),
            _ => 0,
        },
        private_pool: match arena.get(dict, Word::PoolId) {
            Some(Value::List(pool)) => !arena.is_zeros(pool),
            _ => false,
        },
    }
}

fn segment(arena: &mut Arena, dict: u32) -> Result<Segment, Fault> {
    let device = int(arena, dict, Word::Device).unwrap_or(0);
    let stream = int(arena, dict, Word::Stream).unwrap_or(0);
    let mut address = int(arena, dict, Word::Address).unwrap_or(0);
    let mut allocated = Vec::new();
    for value in list(arena, dict, Word::Blocks) {
        let Value::Dict(block) = value else { return Err(structure("a block is no dictionary")) };
        let size = int(arena, block, Word::Size).unwrap_or(0);
        let at = int(arena, block, Word::Address).unwrap_or(address);
        if arena.get(block, Word::State) == Some(Value::Word(Word::ActiveAllocated)) {
            allocated.push((at, int(arena, block, Word::RequestedSize).unwrap_or(size)));
        }
        address = at.wrapping_add(size);
    }
    Ok(Segment { device, stream, allocated })
}

fn int(arena: &Arena, dict: u32, key: Word) -> Option<u64> {
    match arena.get(dict, key) {
        Some(Value::Int(value)) => Some(value),
        _ => None,
    }
}

fn list(arena: &mut Arena, dict: u32, key: Word) -> Vec<Value> {
    match arena.get(dict, key) {
        Some(Value::List(list)) => arena.take(list),
        _ => Vec::new(),
    }
}

fn structure(what: &'static str) -> Fault {
    Fault::file(Reason::Structure(what))
}
