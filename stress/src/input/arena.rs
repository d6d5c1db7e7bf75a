//! The lists and dictionaries of a pickle, without what is of no use.

use super::error::Reason;

/// Declares the strings that matter.
macro_rules! words {
    ($($word:ident = $text:literal,)*) => {
        /// A string that matters.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Word { $($word,)* }

        impl Word {
            pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
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
    Action = "action", Addr = "addr", Size = "size", Stream = "stream", TimeUs = "time_us",
    PoolId = "pool_id", Frames = "frames",
    Alloc = "alloc", FreeRequested = "free_requested", FreeCompleted = "free_completed",
    SegmentAlloc = "segment_alloc", SegmentFree = "segment_free",
    SegmentMap = "segment_map", SegmentUnmap = "segment_unmap",
    Snapshot = "snapshot", Oom = "oom", Annotate = "annotate",
}

/// What an opcode is applied to is of another kind.
pub(super) const MALFORMED: Reason = Reason::Pickle("an opcode does not fit what it is applied to");

/// The longest word.
pub(super) const LONGEST: usize = 16;

/// What the machine computes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Value {
    /// An integer modulo 2^64.
    Int(u64),
    Word(Word),
    /// Also a tuple.
    List(u32),
    Dict(u32),
    /// Of no use.
    Other,
}

/// How many numbers and words of a list are kept: the numbers of a pool are two, and a third tells a list that is no such pair.
const FEW: usize = 3;

#[derive(Debug, Default)]
struct List {
    items: Vec<Value>,
    /// Before which item something was left out that is no list and no dictionary.
    left_out: Option<usize>,
    /// Of the identities of the items of no use, in order; 0 only without any.
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

/// The lists and dictionaries of a pickle.
///
/// Of a dictionary it keeps the entries whose key is a word, of a list the dictionaries of use, the lists and the first numbers, and
/// of everything else only a digest of its identity. Indices stand for references, so that shared and cyclic ones
/// cost nothing.
#[derive(Debug, Default)]
pub(super) struct Arena {
    lists: Vec<List>,
    dicts: Vec<u32>,
    nodes: Vec<Node>,
    /// Items that all lists have room for.
    room: usize,
}

impl Arena {
    /// Memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        self.lists.len() * size_of::<List>()
            + self.room * size_of::<Value>()
            + self.dicts.len() * size_of::<u32>()
            + self.nodes.len() * size_of::<Node>()
    }

    /// What `key` is set to.
    pub(super) fn get(&self, dict: u32, key: Word) -> Option<Value> {
        let mut at = self.dicts[dict as usize];
        // A dictionary has few keys of use unless it sets the same ones over and over.
        for _ in 0..64 {
            let node = self.nodes.get(at as usize)?;
            if node.key == key {
                return Some(node.value);
            }
            at = node.before;
        }
        None
    }

    /// The items of a list that are of use, and [`Value::Other`] where the first was that is not. A list gives them once only: no
    /// snapshot has the same one twice.
    pub(super) fn take(&mut self, list: u32) -> Vec<Value> {
        let list = &mut self.lists[list as usize];
        let mut items = std::mem::take(&mut list.items);
        if let Some(at) = list.left_out.take() {
            items.insert(at.min(items.len()), Value::Other);
        }
        items
    }

    /// Tells lists of things of no use apart.
    pub(super) fn digest(&self, list: u32) -> u64 {
        self.lists[list as usize].digest
    }

    /// Whether a list is the pair (0, 0).
    pub(super) fn is_zeros(&self, list: u32) -> bool {
        self.lists[list as usize].items == [Value::Int(0); 2]
    }

    pub(super) fn list(&mut self, items: &[Value]) -> Result<Value, Reason> {
        let list = Value::List(u32::try_from(self.lists.len()).map_err(|_| Reason::TooMany("lists"))?);
        self.lists.try_reserve(1)?;
        self.lists.push(List::default());
        self.append(list, items)?;
        Ok(list)
    }

    pub(super) fn append(&mut self, list: Value, items: &[Value]) -> Result<(), Reason> {
        let Value::List(list) = list else { return Err(MALFORMED) };
        let list = &mut self.lists[list as usize];
        for &item in items {
            let identity = match item {
                Value::Dict(dict) if self.dicts[dict as usize] == NONE => u64::from(dict) + 2,
                Value::List(_) | Value::Dict(_) => 0,
                Value::Int(_) | Value::Word(_) if list.items.len() < FEW => 0,
                _ => 1,
            };
            if identity == 0 {
                let before = list.items.capacity();
                list.items.try_reserve(1)?;
                list.items.push(item);
                self.room += list.items.capacity() - before;
                continue;
            }
            if identity == 1 {
                list.left_out.get_or_insert(list.items.len());
            }
            list.digest = (list.digest.rotate_left(23) ^ identity).wrapping_mul(0x9e37_79b9_7f4a_7c15).max(1);
        }
        Ok(())
    }

    pub(super) fn dict(&mut self, items: &[Value]) -> Result<Value, Reason> {
        let dict = Value::Dict(u32::try_from(self.dicts.len()).map_err(|_| Reason::TooMany("dictionaries"))?);
        self.dicts.try_reserve(1)?;
        self.dicts.push(NONE);
        self.set(dict, items)?;
        Ok(dict)
    }

    pub(super) fn set(&mut self, dict: Value, items: &[Value]) -> Result<(), Reason> {
        let (Value::Dict(dict), (pairs, [])) = (dict, items.as_chunks()) else { return Err(MALFORMED) };
        let head = &mut self.dicts[dict as usize];
        for &[key, value] in pairs {
            if let Value::Word(key) = key {
                let node = u32::try_from(self.nodes.len()).ok().filter(|&node| node != NONE);
                let node = node.ok_or(Reason::TooMany("entries"))?;
                self.nodes.try_reserve(1)?;
                self.nodes.push(Node { value, before: *head, key });
                *head = node;
            }
        }
        Ok(())
    }
}
