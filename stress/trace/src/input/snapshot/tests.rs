//! Histories entry by entry.

use super::super::program::{Event, Recorded};
use super::*;

fn entry(action: Action, addr: u64, stream: u64, time_us: u64, frames: u64) -> Entry {
    Entry {
        action,
        addr: Some(addr << 20),
        size: Some(addr * 10),
        device_free: None,
        stream,
        time_us,
        frames,
        site: Site::default(),
        private_pool: false,
    }
}

fn events(trace: Vec<Entry>, segments: Vec<Segment>) -> Program {
    programs(Snapshot { segments, traces: vec![Vec::new(), trace], ..Snapshot::default() }, "p", false)
        .unwrap()
        .remove(0)
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
    let segment = |device, allocated: Vec<(u64, u64)>| {
        let allocated = allocated.into_iter().map(|(addr, size)| (addr, size, Site::default())).collect();
        Segment { device, address: 0, stream: 3, pool: (0, 0), allocated, blocks: Vec::new() }
    };
    let program = events(trace, vec![segment(1, vec![(2 << 20, 22), (6 << 20, 60)]), segment(0, vec![(1 << 20, 11)])]);
    assert_eq!(program.device, 1);
    assert_eq!(program.streams, [0, 7, 3]);
    assert_eq!(
        program.events,
        [
            Event::Alloc { slot: 2, bytes: 22, stream: 2 },
            Event::Alloc { slot: 0, bytes: 50, stream: 1 },
            Event::Free { slot: 0 },
            Event::Alloc { slot: 0, bytes: 50, stream: 0 },
            Event::Alloc { slot: 1, bytes: 60, stream: 0 },
        ]
    );
    assert_eq!(program.peak_requested_bytes, 132);
    assert!(program.notes[0].starts_with("blocks that were allocated before the history begins"));
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
    let trace = vec![
        entry(Alloc, 1, 0, 0, 0),
        entry(FreeRequested, 1, 0, 0, 0),
        entry(Alloc, 2, 0, 0, 0),
        entry(FreeCompleted, 1, 0, 0, 0),
    ];
    let program = events(trace, Vec::new());
    assert_eq!(program.streams, [0, 1]);
    assert_eq!(program.events[1], Event::RecordStream { slot: 0, stream: 1 });
}

/// Allocations and frees of a program without gaps, with at most three live blocks.
fn whole() -> Vec<Entry> {
    let freed = |addr, time| [entry(FreeRequested, addr, 0, time, 0), entry(FreeCompleted, addr, 0, time, 0)];
    let mut trace = Vec::new();
    for round in 0..10 {
        trace.extend([entry(Alloc, 10, 0, round, 0), entry(Alloc, 200, 0, round, 0), entry(Alloc, 3000, 0, round, 0)]);
        trace.extend([freed(200, round), freed(10, round), freed(3000, round)].concat());
    }
    trace
}

#[test]
fn frees_are_found_in_the_entries_that_there_are() {
    let without = |skipped: &[Action]| {
        events(whole().into_iter().filter(|entry| !skipped.contains(&entry.action)).collect(), Vec::new())
    };
    let program = without(&[]);
    assert_eq!((program.peak_requested_bytes, &program.notes[..]), (32_100, &[][..]));
    for (skipped, note) in [(FreeRequested, "no free_requested entries"), (FreeCompleted, "no free_completed entries")]
    {
        let partial = without(&[skipped]);
        assert_eq!(partial.events, program.events, "without {skipped:?}");
        assert!(matches!(&partial.notes[..], [only] if only.contains(note)), "{:?}", partial.notes);
    }
    // Memory that is allocated again was freed; the last blocks stay.
    let partial = without(&[FreeRequested, FreeCompleted]);
    assert_eq!((partial.peak_requested_bytes, partial.operations()), (32_100, 57));
    assert!(partial.notes[0].contains("no frees") && partial.notes[1].ends_with(": 27"));
    let partial = without(&[Alloc]);
    assert_eq!((partial.peak_requested_bytes, partial.operations()), (32_100, 6));
    assert!(partial.notes[0].contains("no alloc entries"), "{:?}", partial.notes);
}

#[test]
fn a_completed_free_without_its_request_is_a_free() {
    let trace = vec![
        entry(Alloc, 1, 0, 0, 0),
        entry(Alloc, 2, 0, 0, 0),
        entry(FreeCompleted, 1, 0, 0, 0),
        entry(FreeRequested, 2, 0, 0, 0),
        entry(FreeCompleted, 2, 0, 0, 0),
        entry(Alloc, 3, 0, 0, 0),
    ];
    let program = events(trace, Vec::new());
    assert_eq!((program.operations(), program.peak_requested_bytes), (5, 30));
    assert_eq!(program.notes, ["frees that were completed without a request in the history: 1"]);
}

#[test]
fn memory_that_is_allocated_or_released_was_freed() {
    let at = |action, addr, size| Entry { addr: Some(addr), size: Some(size), ..entry(action, 0, 0, 0, 0) };
    let program = events(
        vec![
            at(Alloc, 1000, 100),
            at(Alloc, 1100, 100),
            at(Alloc, 1200, 100),
            // Over the end of one and the start of another.
            at(Alloc, 1150, 51),
            at(Alloc, 5000, 10),
            at(Action::SegmentFree, 4000, 1001),
            at(Action::SegmentFree, 9000, 1000),
            at(FreeRequested, 1000, 100),
            at(FreeCompleted, 1000, 100),
        ],
        Vec::new(),
    );
    assert_eq!((program.operations(), program.peak_requested_bytes), (9, 300));
    assert_eq!(program.notes.len(), 1);
    assert!(program.notes[0].starts_with("blocks without a free in the history") && program.notes[0].ends_with(": 3"));
}

#[test]
fn a_history_that_may_be_incomplete_is_noted() {
    let note = |count: usize| {
        let trace = (0..count).map(|index| entry(Alloc, 10 + index as u64, 0, 0, 0));
        let trace = trace.chain([entry(FreeRequested, 9, 0, 0, 0), entry(FreeCompleted, 9, 0, 0, 0)]);
        let trace = trace.map(|entry| Entry { size: Some(8), ..entry }).take(count.max(1)).collect();
        events(trace, Vec::new()).notes.join("; ")
    };
    assert!(note(1).contains("only one entry"));
    assert!(note(3000).contains("exactly 3000 entries, so max_entries has probably cut off what came before"));
    assert!(note(4096).contains("exactly 4096 entries"));
    assert!(!note(3001).contains("exactly") && !note(500).contains("exactly"));
}

#[test]
fn refused_requests_are_noted() {
    let refused = |size| Entry { addr: None, size, ..entry(Action::Oom, 0, 0, 0, 0) };
    let notes = |entries: &[Entry]| {
        let program = events([entries, &[entry(Alloc, 1, 0, 0, 0)]].concat(), Vec::new());
        assert_eq!(program.operations(), 1);
        program.notes
    };
    let what = "requests refused for lack of memory, skipped";
    assert_eq!(
        notes(&[refused(Some(7)), refused(Some(1 << 30)), refused(None)]),
        [format!("{what}: 3; the largest: 1073741824 bytes")]
    );
    assert_eq!(notes(&[refused(None)]), [format!("{what}: 1")]);
}

#[test]
fn a_refusal_alone_is_no_history() {
    let refused = Entry { addr: None, size: Some(70), ..entry(Action::Oom, 0, 0, 0, 0) };
    let snapshot = |options: &str| Snapshot {
        traces: vec![vec![Entry { device_free: Some(5 << 20), ..refused }]],
        options: Some(options.to_owned()),
        overwritten: Some(0),
        ..Snapshot::default()
    };
    assert!(programs(snapshot(""), "p", false).is_err());
    let program = |options| programs(snapshot(options), "p", true).unwrap().remove(0);
    let capacity = |options| program(options).recorded.oom().unwrap().capacity_bytes();
    assert_eq!([capacity("tags:span"), capacity("tags:span,limit_mb:2")], [Some(5 << 20), Some(2 << 20)]);
    let program = program("");
    assert_eq!((program.has_history, program.refused()), (false, Some(70)));
    assert!(program.notes[0].contains("no history"), "{:?}", program.notes);
}

#[test]
fn the_request_that_ended_the_program_is_replayed() {
    let refused = |size| Entry { addr: Some(3), size, ..entry(Action::Oom, 0, 0, 0, 0) };
    let block = |action| Entry { size: Some(40), ..entry(action, 1, 0, 0, 0) };
    let trace = vec![
        refused(Some(90)),
        block(Alloc),
        refused(Some(60)),
        block(FreeRequested),
        refused(Some(50)),
        refused(Some(1 << 60)),
    ];
    let program = events(trace, Vec::new());
    assert_eq!((program.operations(), program.peak_requested_bytes, program.refused()), (4, 50, Some(50)));
    assert_eq!(
        program.notes[1..],
        [
            "requests refused for lack of memory, skipped: 3; the largest: 1152921504606846976 bytes",
            "requests refused for lack of memory at the end, replayed as blocks that are freed at once: 1; the \
             largest: 50 bytes"
        ]
    );
}

#[test]
fn a_program_that_frees_most_of_its_memory_after_a_refusal_went_on() {
    let refused = Entry { addr: None, size: Some(100 << 30), ..entry(Action::Oom, 0, 0, 0, 0) };
    let block = |action, addr, size| Entry { size: Some(size), ..entry(action, addr, 0, 0, 0) };
    let of = |freed: u64| {
        let trace = vec![
            block(Alloc, 1 << 40, 1 << 30),
            block(Alloc, 2 << 40, freed << 20),
            refused,
            block(FreeRequested, 2 << 40, freed << 20),
            block(FreeCompleted, 2 << 40, freed << 20),
        ];
        let program = events(trace, Vec::new());
        (program.peak_requested_bytes, program.refused())
    };
    assert_eq!(of(3 << 10), (4 << 30, None), "it went on");
    assert_eq!(of(1), ((101 << 30) + (1 << 20), Some(100 << 30)), "what an error unwinds is freed");
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
    assert_eq!((program.operations(), program.notes.len()), (4, 4), "{:?}", program.notes);
    odd.action = Alloc;
    let fault = programs(Snapshot { traces: vec![vec![odd]], ..Snapshot::default() }, "p", false).unwrap_err();
    assert_eq!(fault.at("s".as_ref()).to_string(), "s:device_traces[0][0]: the field addr is missing");
    let fault = programs(Snapshot::default(), "p", false).unwrap_err();
    assert!(fault.at("s".as_ref()).to_string().contains("_record_memory_history"));
}

#[test]
fn what_was_held_and_refused_is_told() {
    use Action::{Oom, SegmentAlloc, SegmentFree};
    let sized = |action, addr, size, frames| Entry { size: Some(size), ..entry(action, addr, 0, 0, frames) };
    let refused = Entry { addr: None, device_free: Some(5), ..sized(Oom, 0, 70, 0) };
    let block = |addr: u64, bytes| (addr << 20, bytes, Site::default());
    let segment = |allocated: Vec<_>, bytes| Segment {
        device: 1,
        address: 0,
        stream: 0,
        pool: (0, 0),
        allocated,
        blocks: vec![(bytes, Use::Live)],
    };
    let trace = vec![
        sized(SegmentAlloc, 1, 100, 3),
        sized(Alloc, 1, 60, 3),
        // A release for a request, which has its call stack, and one of `empty_cache`.
        sized(SegmentFree, 5, 30, 4),
        sized(SegmentAlloc, 6, 40, 4),
        sized(Alloc, 6, 40, 4),
        sized(SegmentFree, 7, 10, 8),
        sized(FreeRequested, 6, 40, 9),
        sized(FreeCompleted, 6, 40, 9),
        sized(SegmentFree, 6, 40, 9),
        refused,
    ];
    let program = events(trace, vec![segment(vec![block(1, 60)], 100)]);
    let Recorded { peak_held_bytes, begins_late, retries, releases, ref ooms } = program.recorded;
    assert_eq!((peak_held_bytes, begins_late, retries, releases), (150, true, 1, 1));
    let [oom] = ooms[..] else { panic!("{ooms:?}") };
    assert_eq!(
        (oom.event, oom.bytes, oom.held_bytes, oom.capacity_bytes(), oom.is_last),
        (4, 70, 100, Some(105), true)
    );
    assert_eq!((program.recorder, program.has_history), (Recorder::PyTorch, true));
    let profile = crate::profile::Profile::of(&program);
    assert_eq!((profile.peak.bytes, profile.moment.bytes, profile.moment.blocks), (130, 60, 1));
    let live: Vec<_> = profile.groups[0].rows.iter().map(|group| (group.peak_bytes, group.peak_blocks)).collect();
    assert_eq!(live, [(60, 1)], "what was refused is not alive");
}

#[test]
fn a_history_that_begins_late_or_has_one_entry_says_so() {
    let live = || Segment {
        device: 1,
        address: 0,
        stream: 0,
        pool: (0, 3),
        allocated: vec![(9 << 20, 90, Site::default())],
        blocks: vec![(90, Use::Live), (10, Use::Free), (5, Use::Waiting)],
    };
    let from_before = events(vec![entry(Alloc, 1, 0, 0, 0), entry(FreeRequested, 1, 0, 0, 0)], vec![live()]);
    assert!(from_before.recorded.begins_late && from_before.has_history);
    let [pool] = from_before.pools[..] else { panic!("{:?}", from_before.pools) };
    assert_eq!((pool.id, pool.held_bytes, pool.free_bytes, pool.waiting_bytes), ((0, 3), 105, 10, 5));
    let whole = events(vec![entry(Alloc, 1, 0, 0, 0), entry(FreeRequested, 1, 0, 0, 0)], Vec::new());
    assert!(!whole.recorded.begins_late && whole.recorded.oom().is_none());
    assert!(!events(vec![entry(FreeCompleted, 1, 0, 0, 0)], vec![live()]).has_history);
}
