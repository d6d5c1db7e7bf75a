//! A recorded program, and its builder.

use std::collections::HashMap;
use std::sync::Arc;

use super::error::Reason;
use super::labels::Labels;
use crate::map::Piece;
use crate::text::one_line;

/// A recorded program's use of memory on one device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Program {
    /// The name from the file's header, or else of the file.
    pub name: String,
    /// The device's ordinal in the file.
    pub device: u32,
    /// The file's header: keys and values in order.
    pub headers: Vec<(String, String)>,
    /// The events, in order.
    pub events: Vec<Event>,
    /// The number of slots; each slot holds at most one live block at a time.
    pub slots: u32,
    /// The file's own number of each stream. The default stream, 0, is always the first.
    pub streams: Vec<u64>,
    /// The most bytes that were requested and not yet freed at any time.
    pub peak_requested_bytes: u64,
    /// Where each allocation came from, in order; empty if no call stacks and no tags are known.
    pub sites: Vec<Site>,
    /// The call stacks and tags of the sites, shared by the programs of a file.
    pub labels: Arc<Labels>,
    /// The options of the allocator that served the program, if the file names any.
    pub options: Option<String>,
    /// What lay where in the end, if the file tells.
    pub memory: Vec<Piece>,
    /// Private pools in the end, if the file tells: those of CUDA graphs among them.
    pub pools: Vec<PoolUse>,
    /// What recorded it.
    pub recorder: Recorder,
    /// What the file tells of its allocator.
    pub recorded: Recorded,
    /// Whether the file tells in which order memory was allocated and freed.
    pub has_history: bool,
    /// Notes on what was skipped or inferred.
    pub notes: Vec<String>,
}

impl Program {
    /// The number of allocations and frees.
    pub fn operations(&self) -> u64 {
        let count = self.events.iter().filter(|event| matches!(event, Event::Alloc { .. } | Event::Free { .. }));
        count.count() as u64
    }

    /// The program as a trace, in which IDs count up.
    pub fn to_trace(&self) -> String {
        let mut text: String = self.headers.iter().map(|(key, value)| format!("# {key}: {value}\n")).collect();
        let (mut slots, mut next) = (vec![(0, 0); self.slots as usize], 0);
        for &event in &self.events {
            text += &match event {
                Event::Alloc { slot, bytes, stream } => {
                    let stream = self.streams[usize::from(stream)];
                    slots[slot as usize] = (next, stream);
                    next += 1;
                    format!("a {} {bytes} {stream}\n", next - 1)
                }
                Event::Free { slot } => format!("f {} {}\n", slots[slot as usize].0, slots[slot as usize].1),
                Event::RecordStream { slot, stream } => {
                    format!("r {} {}\n", slots[slot as usize].0, self.streams[usize::from(stream)])
                }
                Event::Iteration(number) => format!("i {number}\n"),
            };
        }
        text
    }

    /// The largest request that was refused at the end and is replayed as if it had been served.
    pub fn refused(&self) -> Option<u64> {
        self.recorded.ooms.iter().filter(|oom| oom.is_last).map(|oom| oom.bytes).max()
    }

    /// Adds a note with a count, unless it is 0.
    pub(super) fn note(&mut self, count: u64, text: &str) {
        if count > 0 {
            self.notes.push(format!("{text}: {count}"));
        }
    }

    /// The number of streams that it allocates for or uses memory on.
    pub fn streams_used(&self) -> usize {
        let mut used = vec![false; self.streams.len()];
        for event in &self.events {
            if let Event::Alloc { stream, .. } | Event::RecordStream { stream, .. } = *event {
                used[usize::from(stream)] = true;
            }
        }
        used.into_iter().filter(|&used| used).count()
    }

    /// Where the request of an event came from, which is numbered from 1 without beginnings of
    /// iterations.
    pub fn site_of(&self, event: u64) -> Site {
        let counted = self.events.iter().filter(|event| !matches!(event, Event::Iteration(_)));
        let index = usize::try_from(event.saturating_sub(1)).unwrap_or(usize::MAX);
        let allocs = counted.take(index).filter(|event| matches!(event, Event::Alloc { .. })).count();
        self.sites.get(allocs).copied().unwrap_or_default()
    }

    /// The number of allocations.
    pub fn allocs(&self) -> u64 {
        self.events.iter().filter(|event| matches!(event, Event::Alloc { .. })).count() as u64
    }
}

/// What recorded a program.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub enum Recorder {
    /// The file does not tell.
    #[default]
    Unknown,
    PyTorch,
    Aquifer,
    Rmm,
}

/// What a snapshot tells of the allocator that served a program.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// The most memory that was held since the history begins; 0 if that is not known.
    pub peak_held_bytes: u64,
    /// Whether the program had memory before the history begins, so that peaks are lower bounds.
    pub begins_late: bool,
    /// Requests that were refused.
    pub ooms: Vec<RecordedOom>,
    /// Requests that were served after the device had refused memory and the cache was released.
    pub retries: u64,
    /// Other releases of the cache, as by `empty_cache`.
    pub releases: u64,
}

impl Recorded {
    /// The refusal that ended the program, or else the first.
    pub fn oom(&self) -> Option<&RecordedOom> {
        self.ooms.iter().find(|oom| oom.is_last).or(self.ooms.first())
    }
}

/// A request that was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordedOom {
    /// The event that replays it, from 1; of a program that went on, the event before it.
    pub event: u64,
    /// The requested bytes.
    pub bytes: u64,
    /// What was held from the device, and what was free there, if that is known.
    pub held_bytes: u64,
    /// As above.
    pub device_free_bytes: Option<u64>,
    /// The stream, and where the request came from.
    pub stream: u64,
    /// As above.
    pub site: Site,
    /// Whether the program ended with it. It is replayed then.
    pub is_last: bool,
}

impl RecordedOom {
    /// The memory that the program had and could have.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.device_free_bytes.map(|free| self.held_bytes.saturating_add(free))
    }
}

/// What a pool held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct PoolUse {
    /// As PyTorch has it: `(n, 0)` of a graph that was captured without a pool, `(0, n)` of a pool
    /// that the program made.
    pub id: (u64, u64),
    pub held_bytes: u64,
    /// Free there: it serves the pool's graphs alone.
    pub free_bytes: u64,
    /// Given back, but still in use by a stream.
    pub waiting_bytes: u64,
    pub live_blocks: u64,
}

/// An event of a program. Streams are indices into [`Program::streams`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A block of `bytes` bytes is allocated for `stream`, and lives in `slot` until freed.
    Alloc {
        /// Its slot, which is empty.
        slot: u32,
        /// The requested bytes; may be 0.
        bytes: u64,
        /// Its stream.
        stream: u16,
    },
    /// The block in `slot` is freed, which empties the slot.
    Free {
        /// Where it lives.
        slot: u32,
    },
    /// The block in `slot` is also used on `stream`.
    RecordStream {
        /// Where it lives.
        slot: u32,
        /// The stream that uses it.
        stream: u16,
    },
    /// An iteration of the program starts.
    Iteration(u32),
}

const _: () = assert!(size_of::<Event>() == 16);

/// Where an allocation came from: numbers of a call stack and a tag in [`Labels`]. 0 means that
/// none is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Site {
    pub stack: u32,
    pub tag: u32,
}

/// The key of a refused request. No block is at this address.
const REFUSED: u64 = u64::MAX;

/// The longest name in characters.
const LONGEST_NAME: usize = 100;

/// A live block.
#[derive(Debug, Clone, Copy)]
pub(super) struct Live {
    slot: u32,
    pub(super) bytes: u64,
    pub(super) stream: u64,
}

/// Builds a program from blocks that the input names by `u64` keys: IDs or addresses.
#[derive(Debug)]
pub(super) struct Builder {
    program: Program,
    live: HashMap<u64, Live>,
    empty: Vec<u32>,
    dense: HashMap<u64, u16>,
    last_stream: (u64, u16),
    live_bytes: u64,
    /// By key: blocks that were allocated before all events.
    first: Vec<(u64, Event, Site)>,
    /// Of the next allocation.
    site: Site,
    /// Memory of the headers.
    header_bytes: usize,
}

impl Builder {
    pub(super) fn new(name: String, device: u32) -> Self {
        Self {
            program: Program {
                name: one_line(&name, LONGEST_NAME),
                device,
                streams: vec![0],
                has_history: true,
                ..Program::default()
            },
            live: HashMap::new(),
            empty: Vec::new(),
            dense: HashMap::from([(0, 0)]),
            last_stream: (0, 0),
            live_bytes: 0,
            first: Vec::new(),
            site: Site::default(),
            header_bytes: 0,
        }
    }

    /// Memory in use.
    pub(super) fn bytes(&self) -> usize {
        // A table has a byte for each entry besides the entry.
        self.program.events.capacity() * size_of::<Event>()
            + self.live.capacity() * (size_of::<(u64, Live)>() + 1)
            + self.program.sites.capacity() * size_of::<Site>()
            + self.first.capacity() * size_of::<(u64, Event, Site)>()
            + self.empty.capacity() * size_of::<u32>()
            + self.header_bytes
    }

    pub(super) fn header(&mut self, key: &str, value: &str) -> usize {
        if key == "name" && !value.is_empty() {
            self.program.name = one_line(value, LONGEST_NAME);
        }
        self.header_bytes += key.len() + value.len();
        self.program.headers.push((key.to_owned(), value.to_owned()));
        self.program.headers.len()
    }

    /// Sets the site of the next allocation.
    pub(super) fn set_site(&mut self, site: Site) {
        self.site = site;
    }

    /// Names the labels of the sites, and the options of the recorded allocator, before the first
    /// allocation.
    pub(super) fn describe(&mut self, labels: Arc<Labels>, options: Option<String>) {
        self.program.labels = labels;
        self.program.options = options;
    }

    pub(super) fn live(&self, key: u64) -> Option<Live> {
        self.live.get(&key).copied()
    }

    /// Adds an allocation; `false` if `key` is live.
    pub(super) fn alloc(&mut self, key: u64, bytes: u64, stream: u64) -> Result<bool, Reason> {
        self.live.try_reserve(1)?;
        let std::collections::hash_map::Entry::Vacant(entry) = self.live.entry(key) else { return Ok(false) };
        let slot = match self.empty.pop() {
            Some(slot) => slot,
            None => new_slot(&mut self.program.slots)?,
        };
        entry.insert(Live { slot, bytes, stream });
        self.live_bytes = self.live_bytes.checked_add(bytes).ok_or(Reason::TooManyBytes)?;
        self.program.peak_requested_bytes = self.program.peak_requested_bytes.max(self.live_bytes);
        let stream = self.dense(stream)?;
        self.push(Event::Alloc { slot, bytes, stream })?;
        if !self.program.labels.is_empty() {
            self.program.sites.try_reserve(1)?;
            self.program.sites.push(std::mem::take(&mut self.site));
        }
        Ok(true)
    }

    /// Adds a refused request. If it is the last, it is replayed as a block that is freed at once.
    pub(super) fn refuse(&mut self, mut oom: RecordedOom) -> Result<(), Reason> {
        if oom.is_last {
            self.set_site(oom.site);
            self.alloc(REFUSED, oom.bytes, oom.stream)?;
        }
        oom.event = self.program.events.len() as u64;
        self.program.recorded.ooms.try_reserve(1)?;
        self.program.recorded.ooms.push(oom);
        self.free(REFUSED).map(drop)
    }

    /// Adds an allocation before all others; `key` is not live.
    pub(super) fn alloc_first(&mut self, key: u64, bytes: u64, stream: u64) -> Result<(), Reason> {
        self.live.try_reserve(1)?;
        self.first.try_reserve(1)?;
        // Other blocks may have lived in a slot that is empty now.
        let slot = new_slot(&mut self.program.slots)?;
        self.live.insert(key, Live { slot, bytes, stream });
        self.live_bytes = self.live_bytes.checked_add(bytes).ok_or(Reason::TooManyBytes)?;
        let stream = self.dense(stream)?;
        self.first.push((key, Event::Alloc { slot, bytes, stream }, std::mem::take(&mut self.site)));
        Ok(())
    }

    /// Adds a free; `None` if `key` is not live.
    pub(super) fn free(&mut self, key: u64) -> Result<Option<Live>, Reason> {
        let Some(block) = self.live.remove(&key) else { return Ok(None) };
        self.live_bytes -= block.bytes;
        self.empty.try_reserve(1)?;
        self.empty.push(block.slot);
        self.push(Event::Free { slot: block.slot })?;
        Ok(Some(block))
    }

    /// Adds a use on another stream; `false` if `key` is not live.
    pub(super) fn record_stream(&mut self, key: u64, stream: u64) -> Result<bool, Reason> {
        let Some(block) = self.live(key) else { return Ok(false) };
        let stream = self.dense(stream)?;
        self.push(Event::RecordStream { slot: block.slot, stream })?;
        Ok(true)
    }

    pub(super) fn iteration(&mut self, number: u32) -> Result<(), Reason> {
        self.push(Event::Iteration(number))
    }

    /// Adds a note with a count, unless it is 0.
    pub(super) fn note(&mut self, count: u64, text: &str) {
        self.program.note(count, text);
    }

    /// The same, with the largest of the counted sizes.
    pub(super) fn note_sizes(&mut self, count: u64, largest: Option<u64>, text: &str) {
        let largest = largest.filter(|_| count > 0).map(|bytes| format!("; the largest: {bytes} bytes"));
        self.program.note(count, text);
        self.program.notes.last_mut().into_iter().for_each(|note| note.extend(largest.as_deref()));
    }

    /// Adds a note.
    pub(super) fn remark(&mut self, note: String) {
        self.program.notes.push(note);
    }

    /// Whether there are no events so far.
    pub(super) fn is_empty(&self) -> bool {
        self.program.events.is_empty() && self.first.is_empty()
    }

    pub(super) fn finish(mut self) -> Result<Program, Reason> {
        let program = &mut self.program;
        if !self.first.is_empty() {
            self.first.sort_unstable_by_key(|&(key, ..)| key);
            program.events.try_reserve_exact(self.first.len())?;
            program.events.splice(..0, self.first.iter().map(|&(_, event, _)| event));
            if !program.labels.is_empty() {
                program.sites.try_reserve_exact(self.first.len())?;
                program.sites.splice(..0, self.first.iter().map(|&(.., site)| site));
            }
            program.peak_requested_bytes = peak(program)?;
            program.recorded.ooms.iter_mut().for_each(|oom| oom.event += self.first.len() as u64);
        }
        program.events.shrink_to_fit();
        Ok(self.program)
    }

    fn push(&mut self, event: Event) -> Result<(), Reason> {
        if self.program.events.len() >= u32::MAX as usize {
            return Err(Reason::TooMany("2^32 events"));
        }
        self.program.events.try_reserve(1)?;
        self.program.events.push(event);
        Ok(())
    }

    /// The dense number of a stream; programs stay on a stream for long, so the last one is
    /// remembered.
    fn dense(&mut self, stream: u64) -> Result<u16, Reason> {
        if self.last_stream.0 != stream {
            let dense = match self.dense.get(&stream) {
                Some(&dense) => dense,
                None => {
                    let dense =
                        u16::try_from(self.program.streams.len()).map_err(|_| Reason::TooMany("65536 streams"))?;
                    self.program.streams.push(stream);
                    self.dense.insert(stream, dense);
                    dense
                }
            };
            self.last_stream = (stream, dense);
        }
        Ok(self.last_stream.1)
    }
}

fn new_slot(slots: &mut u32) -> Result<u32, Reason> {
    let slot = *slots;
    *slots = slot.checked_add(1).ok_or(Reason::TooMany("2^32 live blocks"))?;
    Ok(slot)
}

/// The most bytes that are live at any time.
fn peak(program: &Program) -> Result<u64, Reason> {
    let (mut sizes, mut live, mut peak) = (vec![0; program.slots as usize], 0_u64, 0);
    for event in &program.events {
        match *event {
            Event::Alloc { slot, bytes, .. } => {
                sizes[slot as usize] = bytes;
                live = live.checked_add(bytes).ok_or(Reason::TooManyBytes)?;
                peak = peak.max(live);
            }
            Event::Free { slot } => live -= sizes[slot as usize],
            Event::RecordStream { .. } | Event::Iteration(_) => {}
        }
    }
    Ok(peak)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again() {
        let mut builder = Builder::new("p".into(), 0);
        assert!(builder.alloc(7, 10, 0).unwrap());
        assert!(builder.alloc(8, 20, 5).unwrap());
        assert!(!builder.alloc(8, 20, 5).unwrap());
        assert!(builder.free(7).unwrap().is_some());
        assert!(builder.free(7).unwrap().is_none());
        assert!(builder.alloc(9, 5, 0).unwrap());
        assert!(builder.record_stream(9, 5).unwrap());
        let program = builder.finish().unwrap();
        assert_eq!((program.slots, program.peak_requested_bytes, program.operations()), (2, 30, 4));
        assert_eq!(program.streams, [0, 5]);
        assert_eq!(program.events[3], Event::Alloc { slot: 0, bytes: 5, stream: 0 });
        assert_eq!(program.events[4], Event::RecordStream { slot: 0, stream: 1 });
    }

    #[test]
    fn blocks_from_before_come_first_and_count_at_the_peak() {
        let mut builder = Builder::new("p".into(), 0);
        builder.alloc(5, 10, 0).unwrap();
        builder.free(5).unwrap();
        for (key, bytes) in [(9, 100), (7, 50)] {
            builder.alloc_first(key, bytes, 0).unwrap();
            builder.free(key).unwrap();
        }
        let program = builder.finish().unwrap();
        let slots = program.events.iter().map(|event| match *event {
            Event::Alloc { slot, .. } | Event::Free { slot } => slot,
            _ => unreachable!(),
        });
        assert_eq!(slots.collect::<Vec<_>>(), [2, 1, 0, 0, 1, 2]);
        assert_eq!((program.slots, program.peak_requested_bytes), (3, 160));
        let mut builder = Builder::new("p".into(), 0);
        builder.alloc(1, u64::MAX, 0).unwrap();
        builder.free(1).unwrap();
        builder.alloc_first(2, 1, 0).unwrap();
        assert!(matches!(builder.finish(), Err(Reason::TooManyBytes)));
    }

    #[test]
    fn notes_count() {
        let mut builder = Builder::new("p".into(), 0);
        builder.note(0, "none");
        builder.note(1, "lines");
        builder.note_sizes(2, Some(7), "blocks");
        builder.note_sizes(0, None, "none");
        assert_eq!(builder.finish().unwrap().notes, ["lines: 1", "blocks: 2; the largest: 7 bytes"]);
    }

    #[test]
    fn limits_are_errors() {
        let mut builder = Builder::new("p".into(), 0);
        builder.alloc(0, u64::MAX, 0).unwrap();
        assert!(matches!(builder.alloc(1, 1, 0), Err(Reason::TooManyBytes)));
        let mut builder = Builder::new("p".into(), 0);
        for stream in 0..65536 {
            builder.alloc(stream, 1, stream).unwrap();
        }
        assert!(matches!(builder.alloc(65536, 1, 65536), Err(Reason::TooMany("65536 streams"))));
    }
}
