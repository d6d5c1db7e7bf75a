//! JSON: the same values as in a pickle, with arrays for tuples.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{BufRead, BufReader};

use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::allowance::{Allowance, Made};
use super::arena::{Arena, Value, Word, mix};
use super::error::{Fault, Location, Reason};
use super::watched::{Limits, Watched};

/// Reads one value.
pub(super) fn parse(content: impl BufRead, allowance: &Allowance) -> Result<(Value, Arena), Fault> {
    let limits = Limits::default();
    let reader = Reader { arena: RefCell::default(), entered: Cell::new(false), allowance, limits: &limits };
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(Watched::new(content, &limits)));
    let top = Node(&reader).deserialize(&mut deserializer).and_then(|top| deserializer.end().map(|()| top));
    let top = top.map_err(|error| limits.found().unwrap_or_else(|| fault(error)))?;
    Ok((top, reader.arena.into_inner()))
}

fn fault(error: serde_json::Error) -> Fault {
    if error.is_io() {
        return Fault::file(Reason::from_read(error.into()));
    }
    Fault::new(Location::Line(error.line() as u64), Reason::Json(error))
}

/// What all values are read into.
struct Reader<'a> {
    arena: RefCell<Arena>,
    /// The outermost dictionary was met.
    entered: Cell<bool>,
    allowance: &'a Allowance,
    limits: &'a Limits,
}

impl Reader<'_> {
    /// Does something with the values so far, within limits.
    fn with<T, E: Error>(&self, change: impl FnOnce(&mut Arena) -> Result<T, Reason>) -> Result<T, E> {
        let mut arena = self.arena.borrow_mut();
        let changed =
            change(&mut arena).and_then(|value| self.allowance.check(arena.bytes(), Made::Values).map(|()| value));
        changed.map_err(|reason| {
            self.limits.refuse(reason);
            // It stands for what the limits keep.
            E::custom("a limit was exceeded")
        })
    }
}

/// Reads one value.
#[derive(Clone, Copy)]
struct Node<'a>(&'a Reader<'a>);

impl<'de> DeserializeSeed<'de> for Node<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Other(1))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Other(2 + u64::from(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Int(value.cast_unsigned()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Int(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Ok(Value::float(value))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.0.with(|arena| Ok(arena.text(value.as_bytes())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let list = self.0.with(|arena| arena.list(&[]))?;
        while let Some(item) = items.next_element_seed(self)? {
            self.0.with(|arena| arena.append(list, &[item]))?;
        }
        Ok(list)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let outermost = !self.0.entered.replace(true);
        let dict = self.0.with(|arena| arena.dict(&[]))?;
        while let Some(key) = entries.next_key_seed(self)? {
            let value = match key {
                Value::Word(Word::Frames) => Value::Other(entries.next_value::<Frames>()?.0),
                Value::Word(word) if word != Word::TraceEvents => entries.next_value_seed(self)?,
                _ => {
                    entries.next_value::<IgnoredAny>()?;
                    Value::Other(0)
                }
            };
            self.0.with(|arena| {
                if outermost {
                    arena.outermost_key(key);
                }
                arena.set(dict, &[key, value])
            })?;
        }
        Ok(dict)
    }
}

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
        let mut digest = 0_u64;
        while let Some((Frames(key), Frames(value))) = entries.next_entry()? {
            // In any order.
            digest = digest.wrapping_add(mix(key, value));
        }
        Ok(Frames(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::super::arena::Word;
    use super::*;

    fn read(text: &str) -> Result<(Value, Arena), String> {
        read_stored(text.as_bytes(), &Allowance::read(text.len(), text.len()))
    }

    fn read_stored(text: impl BufRead, allowance: &Allowance) -> Result<(Value, Arena), String> {
        parse(text, allowance).map_err(|fault| fault.at("s.json".as_ref()).to_string())
    }

    #[test]
    fn values_are_those_of_a_pickle() {
        let text = r#"{"segments": [{"device": 1, "x": {"y": null}}, {}], "frames": [{"name": "f", "line": 1}],
                       "pool_id": [0, 0], "addr": -1, "size": 1e3, "state": "active_allocated", "stream": "x"}"#;
        let (top, mut arena) = read(text).unwrap();
        let Value::Dict(top) = top else { panic!("{top:?}") };
        let Some(Value::List(segments)) = arena.get(top, Word::Segments) else { panic!() };
        let [Value::Dict(segment)] = arena.take(segments)[..] else { panic!() };
        assert_eq!(arena.get(segment, Word::Device), Some(Value::Int(1)));
        assert!(matches!(arena.get(top, Word::PoolId), Some(Value::List(pool)) if arena.is_zeros(pool)));
        assert_eq!(arena.get(top, Word::Addr), Some(Value::Int(u64::MAX)));
        assert_eq!(arena.get(top, Word::Size), Some(Value::Int(1000)));
        assert_eq!(arena.get(top, Word::State), Some(Value::Word(Word::ActiveAllocated)));
        assert!(matches!(arena.get(top, Word::Stream), Some(Value::Other(_))));
        assert!(matches!(arena.get(top, Word::Frames), Some(Value::Other(1..))));
        assert_eq!(arena.keys(), ["\"segments\"", "\"frames\"", "\"pool_id\""]);
    }

    #[test]
    fn call_stacks_are_told_apart_by_their_content() {
        let frames = |text: &str| {
            let (top, arena) = read(&format!("{{\"frames\": {text}}}")).unwrap();
            let Value::Dict(top) = top else { panic!() };
            arena.digest(arena.get(top, Word::Frames).unwrap())
        };
        let one = frames("[{\"name\": \"f\", \"line\": 1}]");
        assert_eq!(one, frames("[{\"line\": 1, \"name\": \"f\"}]"));
        for other in ["[{\"name\": \"f\", \"line\": 2}]", "[{\"name\": \"f\", \"line\": 1}, 1]", "[null]"] {
            assert!(frames(other) != one && frames(other) != 0, "{other}");
        }
        assert_eq!((frames("[]"), frames("null")), (0, 0));
    }

    #[test]
    fn errors() {
        assert!(read("{").unwrap_err().starts_with("s.json:1: EOF"));
        assert!(read("{\n{").unwrap_err().starts_with("s.json:2: "));
        assert!(read("{} {}").unwrap_err().contains("trailing"));
        let deep = format!("{{\"device_traces\": [[{{\"frames\": {}", "[".repeat(1 << 20));
        assert!(read(&deep).unwrap_err().contains("recursion limit"));
        assert!(read(&format!("{{\"segments\": {}", "[".repeat(1 << 20))).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn what_is_never_in_a_snapshot_takes_no_memory() {
        let endless = |start: &'static str, what| {
            let text = BufReader::new(std::io::Read::chain(start.as_bytes(), std::io::repeat(what)));
            read_stored(text, &Allowance::default()).map(|_| ())
        };
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
        assert!(read(&text).is_ok());
        let levels = |count| format!("{{\"x\": {}{}}}", "[".repeat(count), "]".repeat(count));
        assert!(read(&levels(999)).is_ok() && read(&levels(1000)).is_err());
    }

    #[test]
    fn what_few_stored_bytes_hold_takes_little_memory() {
        const DENSE: &str = "hold more up to here than any recording has in as many";
        let text = format!("{{\"device_traces\": [[]{}]}}", ",[          ]".repeat(2 << 20));
        assert!(read(&text).is_ok(), "room for as many lists as the bytes allow");
        let few = Allowance::read(text.len() / 1000, text.len());
        assert!(read_stored(text.as_bytes(), &few).map(|_| ()).unwrap_err().contains(DENSE));
        for list in ["{\"device_traces\": [[{}", "{\"segments\": [{}", "{\"segments\": [{\"blocks\": [{}"] {
            let text = list.to_owned() + &",{\"size\":0}".repeat(1 << 20);
            let error = read_stored(text.as_bytes(), &Allowance::read(1000, text.len())).map(|_| ()).unwrap_err();
            assert!(error.contains(DENSE), "{list}: {error}");
        }
    }
}
