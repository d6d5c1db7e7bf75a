//! From the history in a PyTorch memory snapshot to programs.
//!
//! A history tells allocations and frees as the program made them, but not on which streams a block was used
//! (`record_stream`). It shows in how a free ends: a block that other streams used is not free at once, but when a
//! later allocation finds that those streams are done. See [`waited`].

use std::collections::HashSet;

use super::error::{Fault, Location, Reason};
use super::program::{Builder, Program};

/// What matters in a snapshot.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    pub(super) segments: Vec<Segment>,
    /// By device, oldest entry first.
    pub(super) traces: Vec<Vec<Entry>>,
}

/// A segment, with what is allocated in it at the end of the history.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) device: u64,
    pub(super) stream: u64,
    /// Address and requested bytes.
    pub(super) allocated: Vec<(u64, u64)>,
}

/// A block of a segment, as a snapshot tells it.
#[derive(Debug, Clone, Copy)]
pub(super) struct SegmentBlock {
    /// `None` if it follows the one before.
    pub(super) address: Option<u64>,
    pub(super) size: u64,
    /// `None` if that is all of it.
    pub(super) requested: Option<u64>,
    pub(super) allocated: bool,
}

impl Segment {
    /// Segment number `number`, which starts at an address.
    pub(super) fn new(
        number: usize,
        (device, stream): (u64, u64),
        mut address: u64,
        blocks: impl IntoIterator<Item = SegmentBlock>,
    ) -> Result<Self, Fault> {
        let mut allocated = Vec::new();
        for (index, block) in blocks.into_iter().enumerate() {
            let fault = |reason| Fault::new(Location::Block { segment: number, block: index }, reason);
            let size = positive("size", block.size).map_err(fault)?;
            let requested = positive("requested_size", block.requested.unwrap_or(size)).map_err(fault)?;
            let at = block.address.unwrap_or(address);
            if block.allocated {
                allocated.push((at, requested));
            }
            address = at.wrapping_add(size);
        }
        Ok(Self { device, stream, allocated })
    }
}

/// An entry of the history.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) action: Action,
    pub(super) addr: Option<u64>,
    pub(super) size: Option<u64>,
    pub(super) stream: u64,
    pub(super) time_us: u64,
    /// Tells call stacks apart; 0 if none was recorded.
    pub(super) frames: u64,
    pub(super) private_pool: bool,
}

/// What an entry tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    /// Segments come, go, are mapped or unmapped.
    Segment,
    /// A request was refused for lack of memory.
    Oom,
    /// Known to tell nothing about allocations.
    Remark,
    Unknown,
}

impl Action {
    pub(super) fn from_name(name: &[u8]) -> Self {
        match name {
            b"alloc" => Self::Alloc,
            b"free_requested" => Self::FreeRequested,
            b"free_completed" => Self::FreeCompleted,
            b"segment_alloc" | b"segment_free" | b"segment_map" | b"segment_unmap" => Self::Segment,
            b"oom" => Self::Oom,
            b"snapshot" | b"annotate" => Self::Remark,
            _ => Self::Unknown,
        }
    }
}

/// The least time from a free's request to its completion, in microseconds, that tells a wait. Without one,
/// the two are recorded right after one another.
const WAIT_US: u64 = 10;

/// The programs of all devices with a history.
pub(super) fn programs(snapshot: Snapshot, name: &str) -> Result<Vec<Program>, Fault> {
    let several = snapshot.traces.iter().filter(|trace| !trace.is_empty()).count() > 1;
    let mut programs = Vec::new();
    for (device, trace) in (0u32..).zip(snapshot.traces) {
        if !trace.is_empty() {
            let name = if several { format!("{name}:{device}") } else { name.to_owned() };
            programs.push(program(name, device, &trace, &snapshot.segments)?);
        }
    }
    if programs.is_empty() { Err(Fault::file(Reason::NoHistory)) } else { Ok(programs) }
}

fn program(name: String, device: u32, trace: &[Entry], segments: &[Segment]) -> Result<Program, Fault> {
    let mut builder = Builder::new(name, device);
    let mut streams = Streams::of(trace);
    let before = before(device, trace, segments)?;
    for &(addr, size, stream) in &before {
        builder.alloc(addr, size, stream).map_err(Fault::file)?;
    }
    builder.note(
        before.len() as u64,
        "block that the history's start found allocated; allocated first",
        "blocks that the history's start found allocated; allocated first, by address",
    );

    let mut tally = Tally::default();
    for (index, entry) in trace.iter().enumerate() {
        let fault = |reason| Fault::new(Location::Entry { device, index }, reason);
        match entry.action {
            Action::Alloc => {
                let (addr, size) = place(entry).map_err(fault)?;
                tally.lost_frees += u64::from(builder.free(addr).map_err(fault)?.is_some());
                builder.alloc(addr, size, entry.stream).map_err(fault)?;
                streams.allocated(entry.stream);
                tally.private += u64::from(entry.private_pool);
            }
            Action::FreeRequested => {
                let (addr, _) = place(entry).map_err(fault)?;
                let Some(block) = builder.live(addr) else {
                    tally.lost_allocs += 1;
                    continue;
                };
                if waited(&trace[index..], streams.several()) {
                    builder.record_stream(addr, streams.other(block.stream)).map_err(fault)?;
                    tally.waits += 1;
                }
                builder.free(addr).map_err(fault)?;
            }
            Action::Oom => {
                tally.refused += 1;
                tally.largest_refused = tally.largest_refused.max(entry.size.filter(|size| size.cast_signed() >= 0));
            }
            Action::FreeCompleted | Action::Segment | Action::Remark => {}
            Action::Unknown => tally.unknown += 1,
        }
    }
    tally.note(&mut builder);
    Ok(builder.finish())
}

/// What was inferred, assumed or left out.
#[derive(Debug, Default)]
struct Tally {
    waits: u64,
    lost_frees: u64,
    lost_allocs: u64,
    private: u64,
    refused: u64,
    /// The most bytes that a refused request asked for, if any tells.
    largest_refused: Option<u64>,
    unknown: u64,
}

impl Tally {
    fn note(&self, builder: &mut Builder) {
        builder.note(
            self.waits,
            "free that waited for another stream; the history does not tell which, so it is inferred",
            "frees that waited for another stream; the history does not tell which, so it is inferred",
        );
        builder.note(
            self.lost_frees,
            "block allocated again without a free in the history, freed just before",
            "blocks allocated again without a free in the history, freed just before",
        );
        builder.note(
            self.lost_allocs,
            "free of a block that is not allocated, skipped",
            "frees of blocks that are not allocated, skipped",
        );
        builder.note(
            self.private,
            "allocation of a private pool, replayed in the default pool",
            "allocations of private pools, replayed in the default pool",
        );
        let [one, largest] = ["", " the largest"]
            .map(|which| self.largest_refused.map(|bytes| format!(",{which} of {bytes} bytes")).unwrap_or_default());
        builder.note(
            self.refused,
            &format!("request that the program was refused for lack of memory{one}, not replayed"),
            &format!("requests that the program was refused for lack of memory{largest}, not replayed"),
        );
        builder.note(self.unknown, "entry of an unknown kind, skipped", "entries of unknown kinds, skipped");
    }
}

/// The address and size that every allocation and free has.
fn place(entry: &Entry) -> Result<(u64, u64), Reason> {
    let addr = entry.addr.ok_or(Reason::MissingField("addr"))?;
    Ok((addr, positive("size", entry.size.ok_or(Reason::MissingField("size"))?)?))
}

/// A size, unless it came out negative.
fn positive(field: &'static str, size: u64) -> Result<u64, Reason> {
    let signed = size.cast_signed();
    if signed < 0 { Err(Reason::BadNumber { field, text: signed.to_string() }) } else { Ok(size) }
}

/// Address, size and stream of the blocks allocated before the history begins, by address: a history keeps only
/// its newest entries. They show as a free without an allocation, or at the end as allocated without any entry.
fn before(device: u32, trace: &[Entry], segments: &[Segment]) -> Result<Vec<(u64, u64, u64)>, Fault> {
    let mut seen = HashSet::new();
    let mut before = Vec::new();
    for (index, entry) in trace.iter().enumerate() {
        if matches!(entry.action, Action::Alloc | Action::FreeRequested) {
            let (addr, size) = place(entry).map_err(|reason| Fault::new(Location::Entry { device, index }, reason))?;
            if seen.insert(addr) && entry.action == Action::FreeRequested {
                before.push((addr, size, entry.stream));
            }
        }
    }
    for segment in segments.iter().filter(|segment| segment.device == u64::from(device)) {
        let blocks = segment.allocated.iter().filter(|&&(address, _)| seen.insert(address));
        before.extend(blocks.map(|&(address, size)| (address, size, segment.stream)));
    }
    before.sort_unstable();
    Ok(before)
}

/// Whether the free requested by the first entry waited for another stream.
///
/// A free that does not wait is completed by the very next entry. One that waits is completed by a later allocation,
/// whose entry follows the completion. When nothing else happened in between, the two look alike but for the
/// call stacks, which are the free's in one case and the allocation's in the other, or, if none were recorded,
/// the time that passed.
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
        && next.is_some_and(|entry| matches!(entry.action, Action::Alloc | Action::Segment))
}

/// Which stream another one most likely is.
struct Streams {
    /// The side stream with the latest allocation; at first the one with the first.
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

    /// Side streams hand their blocks to the default stream, and that one to the side stream at work. One that
    /// never allocates has no number in the history, and gets 1.
    fn other(&self, stream: u64) -> u64 {
        if stream != 0 { 0 } else { self.side.unwrap_or(1) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::program::Event;
    use super::*;

    fn entry(action: Action, addr: u64, stream: u64, time_us: u64, frames: u64) -> Entry {
        Entry { action, addr: Some(addr), size: Some(addr * 10), stream, time_us, frames, private_pool: false }
    }

    fn events(trace: Vec<Entry>, segments: Vec<Segment>) -> Program {
        programs(Snapshot { segments, traces: vec![Vec::new(), trace] }, "p").unwrap().remove(0)
    }

    use Action::{Alloc, FreeCompleted, FreeRequested};

    #[test]
    fn blocks_from_before_the_history_come_first() {
        let trace = vec![
            entry(FreeCompleted, 9, 0, 0, 0),
            entry(FreeRequested, 5, 7, 0, 0),
            entry(FreeCompleted, 5, 7, 0, 0),
            entry(Alloc, 5, 0, 0, 0),
            entry(Alloc, 6, 0, 0, 0),
        ];
        let segment = |device, allocated| Segment { device, stream: 3, allocated };
        let program = events(trace, vec![segment(1, vec![(2, 22), (6, 60)]), segment(0, vec![(1, 11)])]);
        assert_eq!(program.device, 1);
        assert_eq!(program.streams, [0, 3, 7]);
        assert_eq!(
            program.events,
            [
                Event::Alloc { slot: 0, bytes: 22, stream: 1 },
                Event::Alloc { slot: 1, bytes: 50, stream: 2 },
                Event::Free { slot: 1 },
                Event::Alloc { slot: 1, bytes: 50, stream: 0 },
                Event::Alloc { slot: 2, bytes: 60, stream: 0 },
            ]
        );
        assert!(program.notes[0].starts_with("2 blocks that the history's start"));
    }

    #[test]
    fn late_completion_is_a_use_on_another_stream() {
        let freed = |second: Entry, third: Entry| {
            let start = vec![entry(Alloc, 1, 0, 0, 0), entry(Alloc, 2, 5, 0, 0), entry(FreeRequested, 1, 0, 100, 8)];
            let program = events([start, vec![second, third]].concat(), Vec::new());
            program.events[2] == Event::RecordStream { slot: 0, stream: 1 }
        };
        let alloc = entry(Alloc, 3, 0, 0, 0);
        let completed = |time, frames| entry(FreeCompleted, 1, 0, time, frames);
        assert!(freed(alloc, completed(0, 8)), "later");
        assert!(!freed(completed(100, 8), alloc), "at once");
        assert!(!freed(completed(200, 8), alloc), "at once by the call stack, though slowly");
        assert!(freed(completed(100, 9), alloc), "by the allocation, by its call stack");
        assert!(!freed(completed(101, 0), alloc), "at once by the time");
        assert!(freed(completed(120, 0), alloc), "by the allocation, by the time");
        assert!(!freed(completed(120, 0), entry(FreeRequested, 2, 5, 0, 0)), "no allocation");
    }

    #[test]
    fn a_stream_without_allocations_gets_a_number() {
        let trace = vec![entry(Alloc, 1, 0, 0, 0), entry(FreeRequested, 1, 0, 0, 0)];
        let program = events(trace, Vec::new());
        assert_eq!(program.streams, [0, 1]);
        assert_eq!(program.events[1], Event::RecordStream { slot: 0, stream: 1 });
    }

    #[test]
    fn refused_requests_are_noted() {
        let refused = |size| Entry { addr: None, size, ..entry(Action::Oom, 0, 0, 0, 0) };
        let notes = |entries: &[Entry]| {
            let program = events([entries, &[entry(Alloc, 1, 0, 0, 0)]].concat(), Vec::new());
            assert_eq!(program.operations(), 1);
            program.notes
        };
        let what = "that the program was refused for lack of memory";
        assert_eq!(notes(&[refused(Some(7))]), [format!("1 request {what}, of 7 bytes, not replayed")]);
        assert_eq!(
            notes(&[refused(Some(7)), refused(Some(1 << 30)), refused(None)]),
            [format!("3 requests {what}, the largest of 1073741824 bytes, not replayed")]
        );
        assert_eq!(notes(&[refused(None)]), [format!("1 request {what}, not replayed")]);
    }

    #[test]
    fn gaps_are_noted_and_bad_entries_refused() {
        let mut odd = entry(Action::Unknown, 1, 0, 0, 0);
        odd.addr = None;
        let mut pooled = entry(Alloc, 1, 0, 0, 0);
        pooled.private_pool = true;
        let program = events(
            vec![
                pooled,
                odd,
                entry(Alloc, 1, 0, 0, 0),
                entry(FreeRequested, 1, 0, 0, 0),
                entry(FreeCompleted, 1, 0, 0, 0),
                entry(FreeRequested, 1, 0, 0, 0),
            ],
            Vec::new(),
        );
        assert_eq!((program.operations(), program.notes.len()), (4, 4));
        odd.action = Alloc;
        let fault = programs(Snapshot { segments: Vec::new(), traces: vec![vec![odd]] }, "p").unwrap_err();
        assert_eq!(fault.at("s".as_ref()).to_string(), "s:device_traces[0][0]: the field addr is missing");
        let fault = programs(Snapshot::default(), "p").unwrap_err();
        assert!(fault.at("s".as_ref()).to_string().contains("_record_memory_history"));
    }
}
