//! Snapshots as JSON: the same structure, with arrays for tuples.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::BufRead;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::error::{Fault, Location, Reason};
use super::snapshot::{Action, Entry, Segment, SegmentBlock, Snapshot};

pub(super) fn parse(mut content: impl BufRead) -> Result<Snapshot, Fault> {
    let start = content.fill_buf().map_err(|error| Fault::file(Reason::from_read(error)))?;
    if start.trim_ascii_start().first() == Some(&b'[') {
        // Only the segments.
        return Err(Fault::file(Reason::NoHistory));
    }
    let mut deserializer = serde_json::Deserializer::from_reader(content);
    let top = Top::deserialize(&mut deserializer).and_then(|top| deserializer.end().map(|()| top)).map_err(fault)?;
    let segments = top.segments.into_iter().enumerate().map(|(number, segment)| segment.into_segment(number));
    let segments = segments.collect::<Result<_, _>>()?;
    let traces = top.device_traces.into_iter().map(|trace| trace.into_iter().map(JsonEntry::into_entry).collect());
    Ok(Snapshot { segments, traces: traces.collect() })
}

fn fault(error: serde_json::Error) -> Fault {
    if error.is_io() {
        return Fault::file(Reason::from_read(error.into()));
    }
    Fault::new(Location::Line(error.line() as u64), Reason::Json(error))
}

#[derive(Deserialize)]
struct Top {
    #[serde(default)]
    segments: Vec<JsonSegment>,
    #[serde(default)]
    device_traces: Vec<Vec<JsonEntry>>,
}

#[derive(Deserialize)]
struct JsonSegment {
    #[serde(default)]
    device: Number,
    #[serde(default)]
    address: Number,
    #[serde(default)]
    stream: Number,
    #[serde(default)]
    blocks: Vec<JsonBlock>,
}

#[derive(Deserialize)]
struct JsonBlock {
    address: Option<Number>,
    #[serde(default)]
    size: Number,
    requested_size: Option<Number>,
    #[serde(default)]
    state: Allocated,
}

#[derive(Deserialize)]
struct JsonEntry {
    #[serde(default)]
    action: JsonAction,
    addr: Option<Number>,
    size: Option<Number>,
    #[serde(default)]
    stream: Number,
    #[serde(default)]
    time_us: Number,
    #[serde(default)]
    frames: Frames,
    pool_id: Option<(Number, Number)>,
}

impl JsonSegment {
    fn into_segment(self, number: usize) -> Result<Segment, Fault> {
        let blocks = self.blocks.into_iter().map(|block| SegmentBlock {
            address: block.address.map(|address| address.0),
            size: block.size.0,
            requested: block.requested_size.map(|size| size.0),
            allocated: block.state.0,
        });
        Segment::new(number, (self.device.0, self.stream.0), self.address.0, blocks)
    }
}

impl JsonEntry {
    fn into_entry(self) -> Entry {
        Entry {
            action: self.action.0,
            addr: self.addr.map(|addr| addr.0),
            size: self.size.map(|size| size.0),
            stream: self.stream.0,
            time_us: self.time_us.0,
            frames: self.frames.0,
            private_pool: self.pool_id.is_some_and(|pool| (pool.0.0, pool.1.0) != (0, 0)),
        }
    }
}

/// An integer modulo 2^64: streams and addresses may come out signed.
#[derive(Clone, Copy, Default)]
struct Number(u64);

/// Implements `Deserialize` by a visitor of one kind of value.
macro_rules! visit {
    ($type:ident, $ask:ident, $expecting:literal, { $($method:item)* }) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visit;
                impl Visitor<'_> for Visit {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }
                    $($method)*
                }
                deserializer.$ask(Visit)
            }
        }
    };
}

visit!(Number, deserialize_u64, "an integer", {
    fn visit_u64<E: Error>(self, value: u64) -> Result<Number, E> {
        Ok(Number(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Number, E> {
        Ok(Number(value.cast_unsigned()))
    }
});

/// Whether a block's state is allocated.
#[derive(Default)]
struct Allocated(bool);

visit!(Allocated, deserialize_str, "a block's state", {
    fn visit_str<E: Error>(self, value: &str) -> Result<Allocated, E> {
        Ok(Allocated(value == "active_allocated"))
    }
});

struct JsonAction(Action);

impl Default for JsonAction {
    fn default() -> Self {
        Self(Action::Unknown)
    }
}

visit!(JsonAction, deserialize_str, "an action", {
    fn visit_str<E: Error>(self, value: &str) -> Result<JsonAction, E> {
        Ok(JsonAction(Action::from_name(value.as_bytes())))
    }
});

/// A digest of call stacks, which are not kept; 0 for an empty one.
#[derive(Default)]
struct Frames(u64);

impl Frames {
    fn of(value: impl Hash) -> Self {
        let mut hasher = DefaultHasher::new();
        value.hash(&mut hasher);
        Self(hasher.finish().max(1))
    }
}

impl<'de> Deserialize<'de> for Frames {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(VisitFrames)
    }
}

struct VisitFrames;

impl<'de> Visitor<'de> for VisitFrames {
    type Value = Frames;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("call stack frames")
    }

    fn visit_unit<E: Error>(self) -> Result<Frames, E> {
        Ok(Frames(0))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Frames, E> {
        Ok(Frames::of(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Frames, E> {
        Ok(Frames::of(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Frames, E> {
        Ok(Frames::of(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Frames, E> {
        Ok(Frames::of(value.to_bits()))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Frames, E> {
        Ok(Frames::of(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Frames, A::Error> {
        let mut digest = 0;
        while let Some(Frames(item)) = items.next_element()? {
            digest = Frames::of((digest, item)).0;
        }
        Ok(Frames(digest))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Frames, A::Error> {
        let mut digest = 0;
        while let Some((Frames(key), Frames(value))) = entries.next_entry()? {
            digest = Frames::of((digest, key, value)).0;
        }
        Ok(Frames(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Snapshot, String> {
        parse(text.as_bytes()).map_err(|fault| fault.at("s.json".as_ref()).to_string())
    }

    #[test]
    fn reads_the_structure() {
        let snapshot = read(
            r#"{"segments": [{"device": 1, "address": 4096, "stream": 9, "frames": [], "blocks": [
                {"size": 512, "requested_size": 500, "state": "inactive"},
                {"size": 512, "requested_size": 400, "state": "active_allocated", "x": {"y": null}}]}],
              "device_traces": [[], [
                {"action": "alloc", "addr": -1, "size": 7, "stream": 9, "time_us": 5, "pool_id": [0, 1],
                 "frames": [{"name": "f", "line": 1}]},
                {"action": "alloc", "addr": 1, "size": 7, "frames": [{"name": "f", "line": 2}]},
                {"action": "oom", "device_free": 4}, {}]], "allocator_settings": {"a": 1.5}}"#,
        )
        .unwrap();
        let segment = &snapshot.segments[0];
        assert_eq!((segment.device, segment.stream, segment.allocated.as_slice()), (1, 9, &[(4608, 400)][..]));
        let [first, second, oom, empty] = snapshot.traces[1][..] else { panic!("{snapshot:?}") };
        assert_eq!((first.action, first.addr, first.private_pool), (Action::Alloc, Some(u64::MAX), true));
        assert!(first.frames != 0 && first.frames != second.frames && oom.frames == 0);
        assert_eq!((oom.action, empty.action), (Action::Remark, Action::Unknown));
    }

    #[test]
    fn errors() {
        assert!(read("[]").unwrap_err().contains("no history"));
        assert!(read("{\n\"device_traces\": [[{\"addr\": 1.5}]]}").unwrap_err().starts_with("s.json:2: invalid type"));
        assert!(read("{").unwrap_err().starts_with("s.json:1: EOF"));
        assert!(read("{} {}").unwrap_err().contains("trailing"));
        for (block, expected) in [
            ("\"size\": -512, \"state\": \"active_allocated\"", "\"-512\" is not a valid size"),
            ("\"size\": 512, \"requested_size\": -3", "\"-3\" is not a valid requested_size"),
        ] {
            let text = format!("{{\"segments\": [{{}}, {{\"blocks\": [{{}}, {{{block}}}]}}]}}");
            assert_eq!(read(&text).unwrap_err(), format!("s.json:segments[1].blocks[1]: {expected}"));
        }
        let deep = format!("{{\"device_traces\": [[{{\"frames\": {}", "[".repeat(1 << 20));
        assert!(read(&deep).unwrap_err().contains("recursion limit"));
    }
}
