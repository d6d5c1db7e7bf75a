//! The lists and dictionaries of a pickle or a JSON text, as far as snapshots need them.

use std::collections::HashMap;

use super::error::Reason;
use super::labels::{Frame, Labels};

/// Declares the strings with a meaning in snapshots.
macro_rules! words {
    ($($word:ident = $text:literal,)*) => {
        /// A string with a meaning in snapshots.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Word { $($word,)* }

        impl Word {
            fn from_bytes(bytes: &[u8]) -> Option<Self> {
                $(if bytes == $text.as_bytes() { return Some(Self::$word); })*
                None
            }

            pub(super) fn text(self) -> &'static str {
                match self { $(Self::$word => $text,)* }
            }
        }
    };
}

words! {
    Segments = "segments", DeviceTraces = "device_traces",
    Device = "device", Address = "address", Blocks = "blocks",
    RequestedSize = "requested_size", State = "state", ActiveAllocated = "active_allocated",
    ActivePendingFree = "active_pending_free", ActiveAwaitingFree = "active_awaiting_free",
    Action = "action", Addr = "addr", Size = "size", Stream = "stream", TimeUs = "time_us",
    PoolId = "pool_id", SegmentPoolId = "segment_pool_id", Frames = "frames",
    Alloc = "alloc", FreeRequested = "free_requested", FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc", SegmentFree = "segment_free",
    SegmentMap = "segment_map", SegmentUnmap = "segment_unmap",
    Snapshot = "snapshot", Oom = "oom", Annotate = "annotate",
    TraceEvents = "traceEvents",
    Name = "name", Filename = "filename", Line = "line", UserMetadata = "user_metadata",
    AllocatorSettings = "allocator_settings", EntriesOverwritten = "entries_overwritten", DeviceFree = "device_free",
    AllocConf = "PYTORCH_ALLOC_CONF", CudaAllocConf = "PYTORCH_CUDA_ALLOC_CONF",
}

/// The operand of an opcode has another type.
pub(super) const MALFORMED: Reason = Reason::Pickle("an opcode does not fit what it is applied to");

/// How much of a text is kept.
pub(super) const TEXT: usize = 256;

/// A value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value {
    /// An integer modulo 2^64.
    Int(u64),
    Word(Word),
    /// Also a tuple.
    List(u32),
    Dict(u32),
    /// Any other value: a digest of its content, for comparisons.
    Other(u64),
}

impl Value {
    /// A floating-point number; an integer if it equals one.
    pub(super) fn float(number: f64) -> Self {
        whole(number).map_or(Self::Other(mix(1, number.to_bits())), |number| Self::Int(number.cast_unsigned()))
    }
}

/// The integer that a floating-point number equals, if there is exactly one.
#[expect(clippy::cast_possible_truncation, reason = "it is whole, and in range")]
pub(super) fn whole(number: f64) -> Option<i64> {
    const EXACT: f64 = (1_u64 << 53) as f64;
    (number.fract() == 0.0 && number.abs() <= EXACT).then_some(number as i64)
}

/// The digest of a sequence, with the next digest added.
pub(super) fn mix(digest: u64, next: u64) -> u64 {
    (digest.rotate_left(23) ^ next).wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1)
}

/// The digest of a text, with the next part added.
pub(super) fn digest(before: u64, text: &[u8]) -> u64 {
    text.iter().fold(before, |digest, &byte| (digest ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The digest of an empty text.
pub(super) const START: u64 = 0xcbf2_9ce4_8422_2325;

/// How many numbers and words of a list are kept: a pool has two numbers, and a third one shows
/// that a list is not such a pair.
const FEW: usize = 3;

/// A kind of label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Frame,
    Stack,
    Tag,
    Text,
}

#[derive(Debug, Default)]
struct List {
    items: Vec<Value>,
    /// The index of the first item that was left out and is not a dictionary.
    left_out: Option<usize>,
    /// Of the items, in order; 0 only if there are none.
    digest: u64,
}

#[derive(Debug)]
struct Dict {
    /// The entry set last.
    head: u32,
    /// Of the entries, in any order.
    digest: u64,
}

/// An entry of a dictionary, linked to the one set before it.
#[derive(Debug)]
struct Node {
    value: Value,
    before: u32,
    key: Word,
}

/// Ends a dictionary's links.
const NONE: u32 = u32::MAX;

/// How many keys of the outermost dictionary are kept for error messages.
const SHOWN: usize = 3;

/// The lists and dictionaries.
///
/// It keeps the entries of dictionaries whose key is a word; the dictionaries with such entries,
/// the lists and the first numbers of lists; each text once; and of everything else only a digest.
/// References are indices, so shared and cyclic ones need no care.
#[derive(Debug, Default)]
pub(super) struct Arena {
    lists: Vec<List>,
    dicts: Vec<Dict>,
    nodes: Vec<Node>,
    /// Items that all lists have room for.
    room: usize,
    /// The texts that are not words, by digest.
    texts: HashMap<u64, Box<str>>,
    text_bytes: usize,
    labels: Labels,
    /// The numbers of the frames, call stacks and tags in `labels`, by kind and digest.
    known: HashMap<(Kind, u64), u32>,
    /// The first keys of the outermost dictionary.
    keys: Vec<Value>,
}

impl Arena {
    /// Memory in use.
    pub(super) fn bytes(&self) -> usize {
        self.lists.len() * size_of::<List>()
            + self.room * size_of::<Value>()
            + self.dicts.len() * size_of::<Dict>()
            + self.nodes.len() * size_of::<Node>()
            + self.texts.capacity() * size_of::<(u64, Box<str>)>()
            + self.text_bytes
            + self.known.capacity() * size_of::<((Kind, u64), u32)>()
            + self.labels.bytes()
    }

    /// The present end of the values.
    pub(super) fn mark(&self) -> [usize; 3] {
        [self.lists.len(), self.dicts.len(), self.nodes.len()]
    }

    /// The digest of a value, of which everything since `mark` is dropped.
    pub(super) fn digest_since(&mut self, [lists, dicts, nodes]: [usize; 3], value: Value) -> Value {
        let digest = self.digest(value);
        self.room -= self.lists[lists..].iter().map(|list| list.items.capacity()).sum::<usize>();
        self.lists.truncate(lists);
        self.dicts.truncate(dicts);
        self.nodes.truncate(nodes);
        Value::Other(digest)
    }

    /// A text that was read completely.
    pub(super) fn text(&mut self, text: &[u8]) -> Value {
        match Word::from_bytes(text) {
            Some(word) => Value::Word(word),
            None => self.long_text(&text[..text.len().min(TEXT)], digest(START, text)),
        }
    }

    /// A text of which only the start and the digest are known.
    pub(super) fn long_text(&mut self, start: &[u8], digest: u64) -> Value {
        self.texts.entry(digest).or_insert_with(|| {
            let text: Box<str> = String::from_utf8_lossy(start).into();
            self.text_bytes += text.len();
            text
        });
        Value::Other(digest)
    }

    /// The text of a value, if it is one.
    pub(super) fn text_of(&self, value: Value) -> Option<&str> {
        match value {
            Value::Word(word) => Some(word.text()),
            Value::Other(digest) => self.texts.get(&digest).map(|text| &**text),
            _ => None,
        }
    }

    /// Keeps a call stack, given as the list of its frames. Returns its number in the labels; 0 if
    /// it has no frames.
    pub(super) fn stack(&mut self, frames: Value) -> Result<u32, Reason> {
        let digest = self.digest(frames);
        if let Some(&known) = self.known.get(&(Kind::Stack, digest)) {
            return Ok(known);
        }
        let Value::List(list) = frames else { return Ok(0) };
        let mut stack = Vec::new();
        for index in 0..self.lists[list as usize].items.len() {
            if let Value::Dict(frame) = self.lists[list as usize].items[index] {
                stack.push(self.frame(frame)?);
            }
        }
        let number = self.labels.add_stack(&stack)?;
        self.known.insert((Kind::Stack, digest), number);
        Ok(number)
    }

    fn frame(&mut self, frame: u32) -> Result<u32, Reason> {
        let digest = self.digest(Value::Dict(frame));
        if let Some(&known) = self.known.get(&(Kind::Frame, digest)) {
            return Ok(known);
        }
        let line = match self.get(frame, Word::Line) {
            Some(Value::Int(line)) => u32::try_from(line).unwrap_or(0),
            _ => 0,
        };
        let (name, file) = (self.label(frame, Word::Name)?, self.label(frame, Word::Filename)?);
        let number = self.labels.add_frame(Frame { name, file, line })?;
        self.known.insert((Kind::Frame, digest), number);
        Ok(number)
    }

    /// The number of a text that is the value of `key`; 0 if it is none.
    fn label(&mut self, dict: u32, key: Word) -> Result<u32, Reason> {
        let value = self.get(dict, key).unwrap_or(Value::Int(0));
        self.keep(Kind::Text, value, Labels::add_text)
    }

    /// Keeps a tag. Returns its number in the labels; 0 if it is not a text, or an empty one.
    pub(super) fn tag(&mut self, tag: Value) -> Result<u32, Reason> {
        self.keep(Kind::Tag, tag, Labels::add_tag)
    }

    fn keep(
        &mut self,
        kind: Kind,
        value: Value,
        add: fn(&mut Labels, &str) -> Result<u32, Reason>,
    ) -> Result<u32, Reason> {
        let digest = self.digest(value);
        if let Some(&known) = self.known.get(&(kind, digest)) {
            return Ok(known);
        }
        let text = self.text_of(value).unwrap_or("").to_owned();
        let number = add(&mut self.labels, &text)?;
        self.known.insert((kind, digest), number);
        Ok(number)
    }

    /// The labels that were kept. A second call returns none.
    pub(super) fn take_labels(&mut self) -> Labels {
        std::mem::take(&mut self.labels)
    }

    /// The value of `key`.
    pub(super) fn get(&self, dict: u32, key: Word) -> Option<Value> {
        let mut at = self.dicts[dict as usize].head;
        // A dictionary has few words as keys, unless it sets the same ones again and again.
        for _ in 0..64 {
            let node = self.nodes.get(at as usize)?;
            if node.key == key {
                return Some(node.value);
            }
            at = node.before;
        }
        None
    }

    /// The kept items of a list, and [`Value::Other`] in place of the first that was left out. A
    /// second call returns nothing: snapshots do not share lists.
    pub(super) fn take(&mut self, list: u32) -> Vec<Value> {
        let list = &mut self.lists[list as usize];
        let mut items = std::mem::take(&mut list.items);
        if let Some(at) = list.left_out.take() {
            items.insert(at.min(items.len()), Value::Other(0));
        }
        items
    }

    /// The first kept item of a list.
    pub(super) fn first(&self, list: u32) -> Option<Value> {
        self.lists[list as usize].items.first().copied()
    }

    /// Whether a list has no items, and a dictionary no entries.
    pub(super) fn is_empty(&self, value: Value) -> bool {
        match value {
            Value::List(list) => self.lists[list as usize].digest == 0,
            Value::Dict(dict) => self.dicts[dict as usize].digest == 0,
            _ => false,
        }
    }

    /// Equal values have equal digests; only an empty list and an empty dictionary have 0.
    pub(super) fn digest(&self, value: Value) -> u64 {
        match value {
            Value::Int(number) => mix(2, number),
            Value::Word(word) => digest(START, word.text().as_bytes()),
            Value::List(list) => self.lists[list as usize].digest,
            Value::Dict(dict) => self.dicts[dict as usize].digest,
            Value::Other(digest) => digest,
        }
    }

    /// Whether a list is the pair (0, 0).
    pub(super) fn is_zeros(&self, list: u32) -> bool {
        self.lists[list as usize].items == [Value::Int(0); 2]
    }

    /// The first keys of the outermost dictionary, as they are written.
    pub(super) fn keys(&self) -> Vec<String> {
        let text = |&key: &Value| match key {
            Value::Word(word) => Some(format!("{:?}", word.text())),
            Value::Int(number) => Some(number.cast_signed().to_string()),
            _ => self.text_of(key).map(|text| format!("{text:?}")),
        };
        self.keys.iter().filter_map(text).collect()
    }

    /// A key of the outermost dictionary.
    pub(super) fn outermost_key(&mut self, key: Value) {
        if self.keys.len() < SHOWN {
            self.keys.push(key);
        }
    }

    pub(super) fn list(&mut self, items: &[Value]) -> Result<Value, Reason> {
        let list = Value::List(u32::try_from(self.lists.len()).map_err(|_| Reason::TooMany("2^32 lists"))?);
        self.lists.try_reserve(1)?;
        self.lists.push(List::default());
        self.append(list, items)?;
        Ok(list)
    }

    pub(super) fn append(&mut self, list: Value, items: &[Value]) -> Result<(), Reason> {
        let Value::List(number) = list else { return Err(MALFORMED) };
        for &item in items {
            let digest = self.digest(item);
            let list = &mut self.lists[number as usize];
            list.digest = mix(list.digest, digest);
            let kept = match item {
                Value::Dict(dict) => self.dicts[dict as usize].head != NONE,
                Value::List(_) => true,
                Value::Int(_) | Value::Word(_) => list.items.len() < FEW,
                Value::Other(_) => false,
            };
            if kept {
                let before = list.items.capacity();
                list.items.try_reserve(1)?;
                list.items.push(item);
                self.room += list.items.capacity() - before;
            } else if !matches!(item, Value::Dict(_)) {
                list.left_out.get_or_insert(list.items.len());
            }
        }
        Ok(())
    }

    pub(super) fn dict(&mut self, items: &[Value]) -> Result<Value, Reason> {
        let dict = Value::Dict(u32::try_from(self.dicts.len()).map_err(|_| Reason::TooMany("2^32 dictionaries"))?);
        self.dicts.try_reserve(1)?;
        self.dicts.push(Dict { head: NONE, digest: 0 });
        self.set(dict, items)?;
        Ok(dict)
    }

    pub(super) fn set(&mut self, dict: Value, items: &[Value]) -> Result<(), Reason> {
        let (Value::Dict(number), (pairs, [])) = (dict, items.as_chunks()) else { return Err(MALFORMED) };
        for &[key, value] in pairs {
            let digest = mix(self.digest(key), self.digest(value));
            let dict = &mut self.dicts[number as usize];
            dict.digest = dict.digest.wrapping_add(digest).max(1);
            if let Value::Word(key) = key {
                let node = u32::try_from(self.nodes.len()).ok().filter(|&node| node != NONE);
                let node = node.ok_or(Reason::TooMany("2^32 entries"))?;
                self.nodes.try_reserve(1)?;
                self.nodes.push(Node { value, before: dict.head, key });
                dict.head = node;
            }
        }
        Ok(())
    }
}
