//! Converts the history in a PyTorch memory snapshot to programs.
//!
//! A history has the program's allocations and frees, but not the uses of a block on other streams
//! (`record_stream`). They show in how a free ends: the free of a block that other streams used is
//! completed only when a later allocation finds that those streams are done. See [`waited`].

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::arena::Word;
use super::error::{Fault, Location, Reason};
use super::labels::Labels;
use super::program::{Builder, PoolUse, Program, RecordedOom, Recorder, Site};
use super::recording::Recording;
use crate::map::{Piece, Use, whole_granules};

/// The parts of a snapshot that are replayed.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) segments: Vec<Segment>,
    /// By device, oldest entry first.
    pub(super) traces: Vec<Vec<Entry>>,
    pub(super) labels: Arc<Labels>,
    /// The options of the allocator, as in `PYTORCH_ALLOC_CONF`.
    pub(super) options: Option<String>,
    /// The number of entries that the history has lost. Only Aquifer tells it.
    pub(super) overwritten: Option<u64>,
}

/// A segment, with its allocated blocks at the end of the history.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) device: u64,
    /// The first address; 0 if it has none.
    pub(super) address: u64,
    pub(super) stream: u64,
    /// The pool's id; (0, 0) is the default pool.
    pub(super) pool: (u64, u64),
    /// Address, requested bytes and site.
    pub(super) allocated: Vec<(u64, u64, Site)>,
    /// Sizes and uses of all blocks, by address.
    pub(super) blocks: Vec<(u64, Use)>,
}

/// An entry of the history.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) action: Action,
    pub(super) addr: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) device_free: Option<u64>,
    pub(super) stream: u64,
    pub(super) time_us: u64,
    /// Digest of the call stack; 0 if none was recorded.
    pub(super) frames: u64,
    pub(super) site: Site,
    pub(super) private_pool: bool,
}

/// The kind of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    /// A segment is allocated or mapped.
    SegmentAlloc,
    /// A segment is freed or unmapped.
    SegmentFree,
    /// A request was refused for lack of memory.
    Oom,
    /// A kind that does not concern allocations.
    Remark,
    Unknown,
}

impl Action {
    pub(super) fn of(word: Word) -> Self {
        match word {
            Word::Alloc => Self::Alloc,
            Word::FreeRequested => Self::FreeRequested,
            Word::FreeCompleted => Self::FreeCompleted,
            Word::SegmentAlloc | Word::SegmentMap => Self::SegmentAlloc,
            Word::SegmentFree | Word::SegmentUnmap => Self::SegmentFree,
            Word::Oom => Self::Oom,
            Word::Snapshot | Word::Annotate => Self::Remark,
            _ => Self::Unknown,
        }
    }
}

/// The least time from a free's request to its completion, in microseconds, that shows a wait.
/// Without a wait, the two are recorded right after one another.
const WAIT_US: u64 = 10;

/// The programs of all devices with a history.
/// With `states`, also those of devices without, which only allocate what was live, and end with a
/// request that was refused.
pub(super) fn programs(snapshot: Snapshot, name: &str, states: bool) -> Result<Vec<Program>, Fault> {
    let trace = |device: u32| snapshot.traces.get(device as usize).map_or(&[][..], |trace| trace);
    let with_state = snapshot.segments.iter().filter(|segment| states && !segment.allocated.is_empty());
    let with_state = with_state.filter_map(|segment| u32::try_from(segment.device).ok());
    let told = |trace: &[Entry]| if states { !trace.is_empty() } else { has_history(trace) };
    let with_history = (0..).zip(&snapshot.traces).filter(|(_, trace)| told(trace)).map(|(device, _)| device);
    let devices: BTreeSet<u32> = with_history.chain(with_state).collect();
    let mut programs = Vec::new();
    for &device in &devices {
        let name = if devices.len() > 1 { format!("{name}/device{device}") } else { name.to_owned() };
        programs.push(program(name, device, trace(device), &snapshot)?);
    }
    if programs.is_empty() { Err(Fault::file(Reason::NoHistory)) } else { Ok(programs) }
}

/// Whether entries are a history. Aquifer's snapshots have a refused request without a history, too.
fn has_history(trace: &[Entry]) -> bool {
    trace.iter().any(|entry| entry.action != Action::Oom)
}

/// A granule of Aquifer's mapped memory, which snapshots do not tell. Segments begin with one.
const GRANULE: u64 = 2 << 20;

/// The largest refused request that is replayed: no device has more memory.
const LARGEST: u64 = aquifer_sim::CAPACITY_BYTES_MAX;
fn program(name: String, device: u32, trace: &[Entry], snapshot: &Snapshot) -> Result<Program, Fault> {
    let mut recording = Recording::new(Builder::new(name, device));
    recording.builder.describe(snapshot.labels.clone(), snapshot.options.clone());
    let mut streams = Streams::of(trace);
    let kinds = Kinds::of(trace);
    let mut counts = Counts::default();
    let segments = || snapshot.segments.iter().filter(|segment| segment.device == u64::from(device));
    let allocated = segments().flat_map(|segment| &segment.allocated).map(|&(_, size, _)| size);
    let end = end(trace, kinds.requested, allocated.fold(0, u64::saturating_add));
    let mut held = Held::before(trace, segments().flat_map(|segment| &segment.blocks).map(|&(bytes, _)| bytes));
    // A limit leaves less than what is free on the device.
    let limit_mb = snapshot
        .options
        .iter()
        .flat_map(|options| options.split(','))
        .find_map(|option| option.strip_prefix("limit_mb:")?.parse::<u64>().ok());
    let limit = limit_mb.map_or(u64::MAX, |mb| mb.saturating_mul(1 << 20));
    let has_segments = trace.iter().any(|entry| matches!(entry.action, Action::SegmentAlloc | Action::SegmentFree));
    let begins_late = (has_segments && held.now > 0) || snapshot.overwritten.is_some_and(|lost| lost > 0);
    for (index, entry) in trace.iter().enumerate() {
        held.pass(entry);
        let fault = |reason| Fault::new(Location::Entry { device, index }, reason);
        match entry.action {
            Action::Alloc => {
                let (addr, size) = place(entry).map_err(fault)?;
                recording.free_within(addr, size).map_err(fault)?;
                recording.builder.set_site(entry.site);
                recording.alloc(addr, size, entry.stream).map_err(fault)?;
                streams.allocated(entry.stream);
                counts.private += u64::from(entry.private_pool);
            }
            Action::FreeRequested => {
                let (addr, size) = place(entry).map_err(fault)?;
                let Some(block) = recording.freed(addr, size, entry.stream).map_err(fault)? else { continue };
                if kinds.completed && waited(&trace[index..], streams.several()) {
                    recording.builder.record_stream(addr, streams.other(block.stream)).map_err(fault)?;
                    counts.waits += 1;
                }
                recording.free(addr).map_err(fault)?;
            }
            // The end of a free whose request is in the history or precedes it.
            Action::FreeCompleted if kinds.requested && !recording.is_live(entry.addr) => recording.saw(entry.addr),
            Action::FreeCompleted => {
                let (addr, size) = place(entry).map_err(fault)?;
                if recording.freed(addr, size, entry.stream).map_err(fault)?.is_some() {
                    counts.completed_only += u64::from(kinds.requested);
                    recording.free(addr).map_err(fault)?;
                }
            }
            Action::SegmentFree => {
                if let (Some(addr), Some(size)) = (entry.addr, entry.size) {
                    recording.free_within(addr, size).map_err(fault)?;
                }
            }
            Action::Oom => {
                let size = entry.size.filter(|size| size.cast_signed() >= 0);
                let is_last = index >= end && size.is_some_and(|size| size <= LARGEST);
                if let Some(bytes) = size {
                    let held_bytes = held.now;
                    let device_free_bytes = entry.device_free.map(|free| free.min(limit.saturating_sub(held_bytes)));
                    let Entry { stream, site, .. } = *entry;
                    let oom = RecordedOom { event: 0, bytes, held_bytes, device_free_bytes, stream, site, is_last };
                    recording.builder.refuse(oom).map_err(fault)?;
                }
                if is_last {
                    counts.ended += 1;
                    counts.largest_ended = counts.largest_ended.max(size);
                } else {
                    counts.refused += 1;
                    counts.largest_refused = counts.largest_refused.max(size);
                }
            }
            Action::SegmentAlloc | Action::Remark => {}
            Action::Unknown => counts.unknown += 1,
        }
    }
    // A block that is allocated at the end and has no entry was allocated before the history
    // starts.
    for segment in segments() {
        for &(addr, size, site) in &segment.allocated {
            recording.builder.set_site(site);
            recording.found(addr, size, segment.stream).map_err(Fault::file)?;
        }
    }
    if !has_history(trace) {
        recording.builder.remark("the snapshot has no history: only what was live in the end is known".into());
    } else {
        kinds.note(trace.len(), &mut recording.builder);
        recording.note("history");
    }
    counts.note(&mut recording.builder);
    let found = recording.found;
    let mut program = recording.builder.finish().map_err(Fault::file)?;
    let mut pools: BTreeMap<(u64, u64), PoolUse> = BTreeMap::new();
    let is_mapped = snapshot.overwritten.is_some()
        && !snapshot.options.as_ref().is_some_and(|options| options.contains("backing:segments"));
    for segment in segments() {
        let pool = pools.entry(segment.pool).or_insert(PoolUse { id: segment.pool, ..PoolUse::default() });
        for &(bytes, is) in &segment.blocks {
            pool.held_bytes = pool.held_bytes.saturating_add(bytes);
            pool.live_blocks += u64::from(is != Use::Free);
            match is {
                Use::Free => pool.free_bytes = pool.free_bytes.saturating_add(bytes),
                Use::Waiting => pool.waiting_bytes = pool.waiting_bytes.saturating_add(bytes),
                _ => {}
            }
        }
        let stream = program.streams.iter().position(|&stream| stream == segment.stream).unwrap_or(0);
        let stream = u16::try_from(stream).unwrap_or(u16::MAX);
        let mut at = 0_u64;
        program.memory.extend(segment.blocks.iter().enumerate().map(|(index, &(bytes, is))| {
            let movable = if is_mapped && is == Use::Free { whole_granules(at, bytes, GRANULE) } else { 0 };
            at = at.saturating_add(bytes);
            Piece { bytes, is, stream, starts: index == 0, movable }
        }));
    }
    program.pools = pools.into_values().collect();
    program.recorder = if snapshot.overwritten.is_some() { Recorder::Aquifer } else { Recorder::PyTorch };
    (program.recorded.peak_held_bytes, program.recorded.begins_late) = (held.peak, begins_late || found > 0);
    // What Aquifer unmaps has often moved.
    if program.recorder == Recorder::PyTorch {
        (program.recorded.retries, program.recorded.releases) =
            (held.retries, held.releases + u64::from(held.released.is_some()));
    }
    // A history of one entry, as with enabled='state', tells no order.
    program.has_history = kinds.allocs + kinds.frees > 1;
    Ok(program)
}

/// Memory held from the device over the history, and releases of the cache.
#[derive(Debug, Default)]
struct Held {
    now: u64,
    peak: u64,
    /// The digest of the call stack of a release under way.
    released: Option<u64>,
    retries: u64,
    releases: u64,
}

impl Held {
    /// What was held before a history, at whose end these blocks are.
    fn before(trace: &[Entry], blocks: impl Iterator<Item = u64>) -> Held {
        let end = blocks.fold(0, u64::saturating_add);
        let now = trace.iter().rev().fold(end, |held, entry| match (entry.action, entry.size.unwrap_or(0)) {
            (Action::SegmentAlloc, bytes) => held.saturating_sub(bytes),
            (Action::SegmentFree, bytes) => held.saturating_add(bytes),
            _ => held,
        });
        Held { now, peak: now, ..Held::default() }
    }

    /// Segments that are freed one after the other are a release of the cache. One for a request has
    /// the request's call stack, and a segment follows. Without call stacks, what a segment follows
    /// counts as that.
    fn pass(&mut self, entry: &Entry) {
        match entry.action {
            Action::SegmentAlloc => {
                self.now = self.now.saturating_add(entry.size.unwrap_or(0));
                self.peak = self.peak.max(self.now);
                if let Some(frames) = self.released.take() {
                    let is_retry = frames == 0 || entry.frames == 0 || frames == entry.frames;
                    *(if is_retry { &mut self.retries } else { &mut self.releases }) += 1;
                }
            }
            Action::SegmentFree => {
                self.now = self.now.saturating_sub(entry.size.unwrap_or(0));
                self.released = Some(entry.frames);
            }
            Action::FreeCompleted | Action::Remark => {}
            // The release before a refusal.
            Action::Oom => self.released = None,
            _ => self.releases += u64::from(self.released.take().is_some()),
        }
    }
}

/// The kinds of entries in the history: PyTorch and Aquifer can skip some.
struct Kinds {
    allocs: usize,
    frees: usize,
    requested: bool,
    completed: bool,
}

impl Kinds {
    fn of(trace: &[Entry]) -> Self {
        let count = |action| trace.iter().filter(|entry| entry.action == action).count();
        let [requested, completed] = [Action::FreeRequested, Action::FreeCompleted].map(count);
        let frees = requested.max(completed);
        Self { allocs: count(Action::Alloc), frees, requested: requested > 0, completed: completed > 0 }
    }

    /// Notes missing kinds of entries and their consequences.
    fn note(&self, entries: usize, builder: &mut Builder) {
        if entries == 1 {
            builder.remark("the history has only one entry, as with enabled='state' or max_entries=1".into());
        } else if entries >= 1000 && (entries.is_multiple_of(1000) || entries.is_power_of_two()) {
            builder.remark(format!(
                "the history has exactly {entries} entries, so max_entries has probably cut off what came before"
            ));
        }
        match (self.allocs > 1, self.requested, self.completed) {
            (_, false, true) => {
                builder.remark("the history has no free_requested entries; blocks are freed at free_completed".into());
            }
            (_, true, false) => builder
                .remark("the history has no free_completed entries, so no free is replayed as one that waited".into()),
            (true, false, false) => builder.remark(
                "the history has no frees; a block is freed when its memory is allocated again or released".into(),
            ),
            _ => {}
        }
        if self.allocs == 0 && (self.requested || self.completed) {
            builder.remark("the history has no alloc entries, so only blocks from before it are replayed".into());
        }
    }
}

/// Counts of what was inferred or left out.
#[derive(Debug, Default)]
struct Counts {
    waits: u64,
    completed_only: u64,
    private: u64,
    refused: u64,
    /// The largest refused request, if sizes are known.
    largest_refused: Option<u64>,
    /// Refused requests after which nothing was allocated: the program ended with them.
    ended: u64,
    largest_ended: Option<u64>,
    unknown: u64,
}

impl Counts {
    fn note(&self, builder: &mut Builder) {
        builder.note(self.waits, "frees that waited for another stream (which one is inferred)");
        builder.note(self.completed_only, "frees that were completed without a request in the history");
        builder.note(self.private, "allocations of private pools, replayed in the default pool");
        builder.note_sizes(self.refused, self.largest_refused, "requests refused for lack of memory, skipped");
        let ended = "requests refused for lack of memory at the end, replayed as blocks that are freed at once";
        builder.note_sizes(self.ended, self.largest_ended, ended);
        builder.note(self.unknown, "entries of unknown kinds, skipped");
    }
}

/// The index from which on a refused request ended the program, of which `allocated` bytes are live
/// in the snapshot: nothing is allocated later, and no more is freed than stays live. A program
/// that frees more went on without the memory.
fn end(trace: &[Entry], requested: bool, allocated: u64) -> usize {
    let is_free = |entry: &&Entry| match entry.action {
        Action::FreeRequested => requested,
        Action::FreeCompleted => !requested,
        _ => false,
    };
    let sum = |entries: &mut dyn Iterator<Item = &Entry>| {
        entries.fold(0, |sum: u64, entry| sum.saturating_add(entry.size.unwrap_or(0)))
    };
    let allocs = sum(&mut trace.iter().filter(|entry| entry.action == Action::Alloc));
    let live = allocated.max(allocs.saturating_sub(sum(&mut trace.iter().filter(is_free))));
    let mut freed = 0_u64;
    let went_on = trace.iter().rposition(|entry| {
        freed = freed.saturating_add(Some(entry).filter(is_free).and_then(|entry| entry.size).unwrap_or(0));
        entry.action == Action::Alloc || freed > live
    });
    went_on.map_or(0, |index| index + 1)
}

/// The address and size that every allocation and free has.
fn place(entry: &Entry) -> Result<(u64, u64), Reason> {
    let addr = entry.addr.ok_or(Reason::MissingField("addr"))?;
    Ok((addr, positive("size", entry.size.ok_or(Reason::MissingField("size"))?)?))
}

/// A size, unless it is negative.
pub(super) fn positive(field: &'static str, size: u64) -> Result<u64, Reason> {
    let signed = size.cast_signed();
    if signed < 0 { Err(Reason::BadNumber { field, text: signed.to_string() }) } else { Ok(size) }
}

/// Whether the free requested by the first entry waited for another stream.
///
/// A free that does not wait is completed by the very next entry. One that waits is completed by a
/// later allocation, whose entry follows the completion. If there are no entries in between, only
/// the call stacks differ: the completion has the free's in one case and the allocation's in the
/// other. If none were recorded, only the time between the entries differs.
fn waited(trace: &[Entry], several_streams: bool) -> bool {
    let [request, completion, rest @ ..] = trace else { return true };
    if completion.action != Action::FreeCompleted || completion.addr != request.addr {
        return true;
    }
    if request.frames != 0 && completion.frames != 0 {
        return request.frames != completion.frames;
    }
    let next = rest.iter().find(|entry| entry.action != Action::FreeCompleted);
    several_streams
        && completion.time_us.saturating_sub(request.time_us) >= WAIT_US
        && next.is_some_and(|entry| matches!(entry.action, Action::Alloc | Action::SegmentAlloc | Action::SegmentFree))
}

/// Infers the other stream of a free that waited.
struct Streams {
    /// The side stream with the latest allocation; at first the one with the first allocation.
    side: Option<u64>,
}

impl Streams {
    fn of(trace: &[Entry]) -> Self {
        let mut allocations = trace.iter().filter(|entry| entry.action == Action::Alloc);
        Self { side: allocations.find(|entry| entry.stream != 0).map(|entry| entry.stream) }
    }

    fn several(&self) -> bool {
        self.side.is_some()
    }

    fn allocated(&mut self, stream: u64) {
        if stream != 0 {
            self.side = Some(stream);
        }
    }

    /// Side streams pass their blocks to the default stream, which passes its blocks to the active
    /// side stream. A stream that never allocates has no number in the history, and gets 1.
    fn other(&self, stream: u64) -> u64 {
        if stream != 0 { 0 } else { self.side.unwrap_or(1) }
    }
}

#[cfg(test)]
mod tests;
