//! Snapshots as JSON: the same structure, with arrays for tuples.

use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufReader, Read};
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::error::{Fault, Location, Reason};
use super::gzip::Stored;
use super::object::{FromObject, Object};
use super::snapshot::{Action, Entry, Segment, SegmentBlock, Snapshot};
use super::watched::{Limits, Watched};

/// Reads a snapshot; `stored` tells how much was read of the file.
pub(super) fn parse(content: impl Read, stored: &Stored) -> Result<Snapshot, Fault> {
    let limits = Limits::new(stored);
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(Watched::new(content, &limits)));
    let top = VisitTop(&limits).deserialize(&mut deserializer).and_then(|top| deserializer.end().map(|()| top));
    let top = top.map_err(|error| limits.found().unwrap_or_else(|| fault(error)))?;
    let segments = top.segments.into_iter().enumerate().map(|(number, segment)| segment.into_segment(number));
    let segments = segments.collect::<Result<_, _>>()?;
    let traces =
        top.device_traces.into_iter().map(|trace| trace.into_iter().map(|entry| entry.0.into_entry()).collect());
    Ok(Snapshot { segments, traces: traces.collect() })
}

fn fault(error: serde_json::Error) -> Fault {
    if error.is_io() {
        return Fault::file(Reason::from_read(error.into()));
    }
    Fault::new(Location::Line(error.line() as u64), Reason::Json(error))
}

/// Stands for what the limits keep, which is told in its place.
fn broken<E: Error>() -> E {
    E::custom("a limit was exceeded")
}

/// A list within limits, each of whose items is read by a copy of a seed.
#[derive(Clone, Copy)]
struct List<'l, S> {
    limits: &'l Limits<'l>,
    item: S,
}

impl<'l, T> List<'l, PhantomData<T>> {
    fn of(limits: &'l Limits<'l>) -> Self {
        Self { limits, item: PhantomData }
    }
}

impl<'de, S: DeserializeSeed<'de> + Copy> DeserializeSeed<'de> for List<'_, S> {
    type Value = Vec<S::Value>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de, S: DeserializeSeed<'de> + Copy> Visitor<'de> for List<'_, S> {
    type Value = Vec<S::Value>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(self.item)? {
            if !self.limits.make_room(&mut list) {
                return Err(broken());
            }
            list.push(item);
        }
        Ok(list)
    }
}

#[derive(Default)]
struct Top {
    segments: Vec<JsonSegment>,
    device_traces: Vec<Vec<Object<JsonEntry>>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum TopKey {
    Segments,
    DeviceTraces,
    #[serde(other)]
    Other,
}

struct VisitTop<'l>(&'l Limits<'l>);

impl<'de> DeserializeSeed<'de> for VisitTop<'_> {
    type Value = Top;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Top, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for VisitTop<'_> {
    type Value = Top;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a memory snapshot")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Top, A::Error> {
        let mut top = Top::default();
        while let Some(key) = entries.next_key()? {
            match key {
                TopKey::Segments => {
                    top.segments = entries.next_value_seed(List { limits: self.0, item: VisitSegment(self.0) })?;
                }
                TopKey::DeviceTraces => {
                    let trace = List::<PhantomData<Object<JsonEntry>>>::of(self.0);
                    top.device_traces = entries.next_value_seed(List { limits: self.0, item: trace })?;
                }
                TopKey::Other => drop(entries.next_value::<IgnoredAny>()?),
            }
        }
        Ok(top)
    }

    /// Only the segments, if it is a snapshot at all: so old ones were.
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Top, A::Error> {
        items.next_element_seed(VisitSegment(self.0))?;
        self.0.refuse(Reason::NoHistory);
        Err(broken())
    }
}

#[derive(Default)]
struct JsonSegment {
    device: Number,
    address: Number,
    stream: Number,
    blocks: Vec<Object<JsonBlock>>,
}

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "snake_case")]
enum SegmentKey {
    Device,
    Address,
    Stream,
    Blocks,
    #[serde(other)]
    Other,
}

#[derive(Clone, Copy)]
struct VisitSegment<'l>(&'l Limits<'l>);

impl<'de> DeserializeSeed<'de> for VisitSegment<'_> {
    type Value = JsonSegment;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<JsonSegment, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for VisitSegment<'_> {
    type Value = JsonSegment;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a segment of a memory snapshot")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<JsonSegment, A::Error> {
        let mut segment = JsonSegment::default();
        while let Some(key) = entries.next_key()? {
            match key {
                SegmentKey::Device => segment.device = entries.next_value()?,
                SegmentKey::Address => segment.address = entries.next_value()?,
                SegmentKey::Stream => segment.stream = entries.next_value()?,
                SegmentKey::Blocks => segment.blocks = entries.next_value_seed(List::of(self.0))?,
                SegmentKey::Other => drop(entries.next_value::<IgnoredAny>()?),
            }
        }
        Ok(segment)
    }
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
    pool_id: Option<PoolId>,
}

impl FromObject for JsonBlock {
    const NAME: &'static str = "a block of a segment";
}

impl FromObject for JsonEntry {
    const NAME: &'static str = "an event of a memory snapshot's history";
}

impl JsonSegment {
    fn into_segment(self, number: usize) -> Result<Segment, Fault> {
        let blocks = self.blocks.into_iter().map(|Object(block)| SegmentBlock {
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
            private_pool: self.pool_id.is_some_and(|pool| pool.is_private),
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

/// Two numbers, both 0 unless the pool is a private one.
struct PoolId {
    is_private: bool,
}

impl<'de> Deserialize<'de> for PoolId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(VisitPoolId)
    }
}

struct VisitPoolId;

impl<'de> Visitor<'de> for VisitPoolId {
    type Value = PoolId;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pool's id, which is a list of two integers")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PoolId, A::Error> {
        let mut is_private = false;
        for item in 0..2 {
            let Number(number) = items.next_element()?.ok_or_else(|| A::Error::invalid_length(item, &self))?;
            is_private |= number != 0;
        }
        if items.next_element::<IgnoredAny>()?.is_some() {
            return Err(A::Error::invalid_length(3, &self));
        }
        Ok(PoolId { is_private })
    }
}

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
        let stored = Stored::default();
        stored.add(text.len());
        read_stored(text.as_bytes(), &stored)
    }

    fn read_stored(text: impl Read, stored: &Stored) -> Result<Snapshot, String> {
        parse(text, stored).map_err(|fault| fault.at("s.json".as_ref()).to_string())
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
        assert_eq!((oom.action, empty.action), (Action::Oom, Action::Unknown));
    }

    #[test]
    fn errors() {
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

    #[test]
    fn what_is_expected_is_told_in_words() {
        const ENTRY: &str = "an event of a memory snapshot's history, which is an object";
        const POOL: &str = "a pool's id, which is a list of two integers";
        for (text, expected) in [
            // The values of the fields in their order.
            ("{\"device_traces\": [[[\"alloc\", 4096, 1000, 0, 1, [], [0, 0]]]]}", ENTRY),
            ("{\"device_traces\": [[[]]]}", ENTRY),
            ("{\"device_traces\": [[null]]}", ENTRY),
            ("{\"segments\": [{\"blocks\": [[0, 1, 1, \"inactive\"]]}]}", "a block of a segment, which is an object"),
            ("{\"device_traces\": [[{\"pool_id\": 1}]]}", POOL),
            ("{\"device_traces\": [[{\"pool_id\": [0]}]]}", POOL),
            ("{\"device_traces\": [[{\"pool_id\": [0, 1, 2]}]]}", POOL),
            ("{\"device_traces\": [[{\"size\": \"x\"}]]}", "an integer"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(&format!("expected {expected} at line 1")), "{text}: {error}");
        }
    }

    #[test]
    fn a_list_may_be_a_snapshot_without_history() {
        for text in ["[]", "[{\"device\": 0, \"blocks\": [{\"size\": 1}]}]", " [ {} , {}]"] {
            assert!(read(text).unwrap_err().contains("the snapshot has no history"), "{text}");
        }
        for text in ["[1, 2]", "[null]", "[[]]", "[\"device\"]"] {
            let error = read(text).unwrap_err();
            assert!(error.contains("expected a segment of a memory snapshot"), "{text}: {error}");
        }
        assert!(read("[{} 1").unwrap_err().contains("no history"), "what follows does not matter");
    }

    #[test]
    fn what_is_never_in_a_snapshot_takes_no_memory() {
        let endless =
            |start: &'static str, what| read_stored(start.as_bytes().chain(std::io::repeat(what)), &Stored::default());
        for (start, what) in
            [("{\"device_traces\": [[\"", b'x'), ("{\"other\": \"", b'x'), ("{\"", b'x'), ("{\"x\": 1", b'1')]
        {
            let error = endless(start, what).unwrap_err();
            assert!(
                error.ends_with(": not a memory snapshot: a text or number in it is longer than 16 MiB"),
                "{error}"
            );
        }
        let error = endless("{\"a\": ", b'[').unwrap_err();
        assert_eq!(error, "s.json:byte 1005: not a memory snapshot: it is nested more than 1000 levels deep");
    }

    #[test]
    fn texts_end_at_quotes_that_are_not_escaped() {
        let text = format!(r#"{{"x": "\\\"{}\"", "device_traces": []}}"#, "[{".repeat(2000));
        assert!(read(&text).unwrap().traces.is_empty());
        let levels = |count| format!("{{\"x\": {}{}}}", "[".repeat(count), "]".repeat(count));
        assert!(read(&levels(999)).is_ok() && read(&levels(1000)).is_err());
    }

    #[test]
    fn what_few_stored_bytes_hold_takes_little_memory() {
        const DENSE: &str = "hold more values up to here than any memory snapshot has in as many";
        let text = format!("{{\"device_traces\": [[]{}]}}", ",[]".repeat(3 << 20));
        assert!(read(&text).is_ok(), "as many bytes as lists");
        let stored = Stored::default();
        stored.add(text.len() / 1000);
        assert!(read_stored(text.as_bytes(), &stored).unwrap_err().contains(DENSE));
        for (list, stored) in [
            ("{\"device_traces\": [[{}", usize::MAX),
            ("{\"segments\": [{}", 1000),
            ("{\"segments\": [{\"blocks\": [{}", 1000),
        ] {
            let text = list.to_owned() + &",{}".repeat(2 << 20);
            let bytes = Stored::default();
            bytes.add(stored.min(text.len()));
            let error = read_stored(text.as_bytes(), &bytes).unwrap_err();
            assert!(error.contains(DENSE), "{list}: {error}");
        }
    }
}
