//! JSON: the same values as in a pickle, with arrays for tuples.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io::{BufRead, BufReader};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::allowance::{Allowance, VALUES};
use super::arena::{Arena, Value, Word};
use super::error::{Fault, Location, Reason};
use super::watched::Watched;

/// Reads one value.
pub(super) fn parse(content: impl BufRead, allowance: &Allowance) -> Result<(Value, Arena), Fault> {
    let (arena, entered, in_frames, refused) = Default::default();
    let reader = Reader { arena, entered, in_frames, allowance, refused };
    let mut deserializer = serde_json::Deserializer::from_reader(BufReader::new(Watched::new(content)));
    let top = Node(&reader).deserialize(&mut deserializer).and_then(|top| deserializer.end().map(|()| top));
    let top = top.map_err(|error| {
        let line = Location::Line(error.line() as u64);
        match reader.refused.take() {
            Some(reason) => Fault::new(line, reason),
            None if error.is_io() => Fault::file(Reason::from_read(error.into())),
            None => Fault::new(line, Reason::Json(error)),
        }
    })?;
    Ok((top, reader.arena.into_inner()))
}

/// Collects all values.
struct Reader<'a> {
    arena: RefCell<Arena>,
    /// The outermost dictionary has begun.
    entered: Cell<bool>,
    /// In call stacks, where all values count.
    in_frames: Cell<bool>,
    allowance: &'a Allowance,
    /// Why values were refused, for which the parser has no error.
    refused: Cell<Option<Reason>>,
}

impl Reader<'_> {
    /// Changes the values within the allowance.
    fn with<T, E: Error>(&self, change: impl FnOnce(&mut Arena) -> Result<T, Reason>) -> Result<T, E> {
        let mut arena = self.arena.borrow_mut();
        let changed = change(&mut arena).and_then(|value| self.allowance.check(arena.bytes(), VALUES).map(|()| value));
        changed.map_err(|reason| {
            self.refused.set(Some(reason));
            E::custom("refused")
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
                Value::Word(Word::Frames) => {
                    let mark = self.0.arena.borrow().mark();
                    let outer = self.0.in_frames.replace(true);
                    let frames = entries.next_value_seed(self)?;
                    self.0.in_frames.set(outer);
                    self.0.with(|arena| arena.stack(frames).map(|_| arena.digest_since(mark, frames)))?
                }
                _ if self.0.in_frames.get() => entries.next_value_seed(self)?,
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
    fn call_stacks_differ_by_their_content() {
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
        assert_eq!(frames("[]"), 0);
    }

    #[test]
    fn errors() {
        assert!(read("{").unwrap_err().starts_with("s.json:1: EOF"));
        assert!(read("{\n{").unwrap_err().starts_with("s.json:2: "));
        assert!(read("{} {}").unwrap_err().contains("trailing"));
        let deep = format!("{{\"device_traces\": [[{{\"frames\": {}", "[".repeat(1 << 20));
        assert!(read(&deep).unwrap_err().contains("nested more than 1000 levels deep"));
        assert!(read(&format!("{{\"segments\": {}", "[".repeat(900))).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn endless_texts_numbers_and_nesting_take_no_memory() {
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
        assert_eq!(error, "s.json: not a memory snapshot: it is nested more than 1000 levels deep");
    }

    #[test]
    fn texts_end_at_quotes_that_are_not_escaped() {
        let text = format!(r#"{{"x": "\\\"{}\"", "device_traces": []}}"#, "[{".repeat(2000));
        assert!(read(&text).is_ok());
        let levels = |count| format!("{{\"x\": {}{}}}", "[".repeat(count), "]".repeat(count));
        assert!(read(&levels(999)).is_ok() && read(&levels(1000)).is_err());
    }

    #[test]
    fn values_take_little_memory_for_few_stored_bytes() {
        const DENSE: &str = " bytes of the file hold more than a recording of that size can";
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
