//! Ticks and events that cross devices: their cost, and the bytes of copies between devices.

use aquifer_tests::prelude::*;

use super::common::{LONG, MIB, kind};

/// Two devices, with a stream and memory on each.
struct Pair {
    subjects: [Subject; 2],
    devices: [Device; 2],
    streams: [Stream; 2],
    memory: [DevicePtr; 2],
}

impl Pair {
    fn new() -> Pair {
        Pair::seeded(1)
    }

    fn seeded(seed: u64) -> Pair {
        let config = |ordinal| SimConfig::new(1 << 30).seed(seed + u64::from(ordinal)).ordinal(ordinal);
        let subjects = [0, 1].map(|ordinal| Subject::open(&config(ordinal)));
        let devices = subjects.each_ref().map(Subject::device);
        let streams = devices.each_ref().map(|device| device.stream().unwrap());
        let memory = devices.each_ref().map(|device| device.alloc(MIB).unwrap());
        Pair { subjects, devices, streams, memory }
    }

    /// Work on the first device that takes long, and the tick after it.
    fn long(&self) -> Tick {
        self.subjects[0].stall(&self.streams[0], LONG).unwrap();
        self.streams[0].fill(self.memory[0], 7, MIB).unwrap();
        self.streams[0].tick()
    }

    /// Copies from the first device to the second.
    fn copy(&self) {
        self.streams[1].copy_from_peer(self.memory[1], &self.devices[0], self.memory[0], MIB).unwrap();
    }

    /// Events recorded and waits inserted so far, on each device.
    fn cost(&self) -> [(u64, u64); 2] {
        self.devices.each_ref().map(|device| {
            let counts = device.timeline_counts();
            (counts.events_recorded, counts.waits_inserted)
        })
    }

    fn assert_no_race(&self) {
        self.subjects.iter().for_each(Subject::assert_no_violation);
    }

    /// The first bytes of the second device's memory.
    fn bytes(&self) -> [u8; 4] {
        let mut bytes = [0; 4];
        self.streams[1].download_blocking(&mut bytes, self.memory[1]).unwrap();
        bytes
    }
}

#[test]
fn a_tick_of_another_device_costs_an_event_there_and_a_wait_here_and_is_not_paid_twice() {
    let pair = Pair::new();
    let early = pair.streams[0].tick();
    let tick = pair.long();
    assert!(!pair.streams[1].is_ordered_after(&tick));
    for _ in 0..5 {
        pair.streams[1].wait_for(&tick).unwrap();
        pair.streams[1].wait_for(&early).unwrap();
        assert_eq!(pair.cost(), [(1, 0), (0, 1)]);
    }
    assert!(pair.streams[1].is_ordered_after(&tick));
    pair.copy();
    let later = pair.streams[0].tick();
    assert!(!pair.streams[1].is_ordered_after(&later), "the event covers no later tick");
    pair.streams[1].wait_for(&later).unwrap();
    assert_eq!(pair.cost(), [(2, 0), (0, 2)]);
    assert_eq!(pair.bytes(), [7; 4]);
    assert_eq!(pair.devices[1].driver_calls().of(Operation::CopyPeer), 1);
    pair.assert_no_race();
}

#[test]
fn streams_of_the_same_number_on_two_devices_are_two_streams() {
    let pair = Pair::new();
    assert_eq!(pair.streams[0].id(), pair.streams[1].id());
    let tick = pair.long();
    assert!(!pair.streams[1].is_ordered_after(&tick), "not its own");
    // Nor does another stream's knowledge of the stream with that number here count.
    let third = pair.devices[1].stream().unwrap();
    third.wait_for(&pair.streams[1].tick()).unwrap();
    assert!(!third.is_ordered_after(&tick));
    third.wait_for(&tick).unwrap();
    third.copy_from_peer(pair.memory[1], &pair.devices[0], pair.memory[0], MIB).unwrap();
    pair.assert_no_race();
}

#[test]
fn ticks_that_are_done_cost_nothing() {
    let pair = Pair::new();
    pair.streams[0].fill(pair.memory[0], 7, MIB).unwrap();
    let tick = pair.streams[0].tick();
    tick.synchronize().unwrap();
    assert!(pair.streams[1].is_ordered_after(&tick));
    pair.streams[1].wait_for(&tick).unwrap();
    assert_eq!(pair.cost(), [(1, 0), (0, 0)]);
    pair.copy();
    assert_eq!(pair.bytes(), [7; 4]);
    pair.assert_no_race();
}

#[test]
fn a_barrier_of_two_ticks_lets_memory_be_used_again() {
    for seed in 0..8 {
        let pair = Pair::seeded(seed);
        for value in 0..6 {
            pair.streams[0].fill(pair.memory[0], value, MIB).unwrap();
            pair.streams[1].wait_for(&pair.streams[0].tick()).unwrap();
            pair.copy();
            pair.streams[0].wait_for(&pair.streams[1].tick()).unwrap();
            assert_eq!(pair.bytes(), [value; 4], "seed {seed}");
        }
        assert_eq!(pair.cost(), [(6, 6), (6, 6)]);
        pair.devices[0].free(pair.memory[0]).unwrap();
        pair.assert_no_race();
    }
}

#[test]
fn an_event_of_another_device_orders_as_a_tick_does() {
    let pair = Pair::new();
    let event = pair.devices[0].create_event(false).unwrap();
    pair.streams[1].wait_event(&event).unwrap();
    let tick = pair.long();
    event.record(&pair.streams[0]).unwrap();
    pair.streams[1].wait_event(&event).unwrap();
    assert!(pair.streams[1].is_ordered_after(&tick));
    assert!(!pair.streams[1].is_ordered_after(&pair.streams[0].tick()));
    pair.streams[1].wait_for(&tick).unwrap();
    assert_eq!(pair.cost(), [(0, 0), (0, 0)]);
    pair.copy();
    assert_eq!(pair.bytes(), [7; 4]);
    let error = event.record(&pair.streams[1]).unwrap_err();
    assert_eq!((error.code, error.kind), (Code::INVALID_HANDLE, ErrorKind::InvalidUse), "events stay on their device");
    pair.assert_no_race();
}

#[test]
fn t2_a_failed_record_or_wait_changes_nothing_and_can_be_repeated() {
    for (failing, operation) in [(0, Operation::Record), (1, Operation::Wait)] {
        let pair = Pair::new();
        let tick = pair.long();
        pair.subjects[failing].inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
        let error = pair.streams[1].wait_for(&tick).unwrap_err();
        assert_eq!((error.kind, error.operation), (ErrorKind::Other, operation));
        assert!(!pair.streams[1].is_ordered_after(&tick));
        pair.streams[1].wait_for(&tick).unwrap();
        assert_eq!(pair.cost(), [(1, 0), (0, 1)]);
        pair.subjects[1].inject(Fault::Nth { operation: Some(Operation::CopyPeer), nth: 1, code: Code(999) });
        let copied = pair.streams[1].copy_from_peer(pair.memory[1], &pair.devices[0], pair.memory[0], MIB);
        assert_eq!(kind(copied), ErrorKind::Other);
        pair.copy();
        assert_eq!(pair.bytes(), [7; 4]);
        pair.assert_no_race();
    }
}

#[test]
fn t3_and_t4_ticks_of_a_stream_that_is_gone_stay_answerable() {
    let pair = Pair::new();
    let [source, target] = &pair.devices;
    let gone = source.stream().unwrap();
    pair.subjects[0].stall(&gone, LONG).unwrap();
    gone.fill(pair.memory[0], 5, MIB).unwrap();
    let tick = gone.tick();
    drop(gone);
    pair.streams[1].wait_for(&tick).unwrap();
    pair.copy();
    assert_eq!(pair.bytes(), [5; 4]);
    // And those of another thread's default stream.
    pair.streams[0].wait_for(&pair.streams[1].tick()).unwrap();
    let tick = std::thread::scope(|scope| {
        let work = || {
            let theirs = source.per_thread_stream();
            theirs.wait_for(&pair.streams[0].tick()).unwrap();
            theirs.fill(pair.memory[0], 6, MIB).unwrap();
            theirs.tick()
        };
        scope.spawn(work).join().unwrap()
    });
    let mine = target.per_thread_stream();
    mine.wait_for(&tick).unwrap();
    mine.wait_for(&pair.streams[1].tick()).unwrap();
    mine.copy_from_peer(pair.memory[1], source, pair.memory[0], MIB).unwrap();
    pair.streams[1].wait_for(&mine.tick()).unwrap();
    assert_eq!(pair.bytes(), [6; 4]);
    pair.assert_no_race();
}

#[test]
fn t5_captures_wait_for_no_other_device_and_no_other_device_joins_them() {
    let pair = Pair::new();
    let tick = pair.long();
    let capture = pair.streams[1].begin_capture().unwrap();
    assert_eq!(kind(pair.streams[1].wait_for(&tick)), ErrorKind::Capture);
    let graph = capture.end().unwrap();
    assert_eq!(pair.cost(), [(0, 0), (0, 0)]);
    graph.launch(&pair.streams[1]).unwrap();

    let event = pair.devices[0].create_event(false).unwrap();
    let capture = pair.streams[0].begin_capture().unwrap();
    assert_eq!(kind(pair.streams[1].wait_for(&tick)), ErrorKind::Capture, "no event of a capture covers it");
    event.record(&pair.streams[0]).unwrap();
    assert_eq!(kind(pair.streams[1].wait_event(&event)), ErrorKind::Capture);
    assert!(!pair.streams[1].is_capturing());
    drop(capture.end().unwrap());
    pair.streams[1].wait_for(&tick).unwrap();
    pair.copy();
    pair.assert_no_race();
}

#[test]
fn each_of_many_streams_of_another_device_costs_once() {
    let pair = Pair::new();
    let streams: Vec<_> = (0..40).map(|_| pair.devices[0].stream().unwrap()).collect();
    let ticks: Vec<_> = streams.iter().map(Stream::tick).collect();
    ticks.iter().for_each(|tick| pair.streams[1].wait_for(tick).unwrap());
    assert_eq!(pair.cost(), [(40, 0), (0, 40)]);
    ticks.iter().for_each(|tick| pair.streams[1].wait_for(tick).unwrap());
    assert_eq!(pair.cost(), [(40, 0), (0, 40)]);
}

#[test]
fn threads_on_two_devices_pass_memory_back_and_forth() {
    use std::sync::mpsc::sync_channel;
    for seed in 0..4 {
        let pair = Pair::seeded(seed);
        let ((to_second, second), (to_first, first)) = (sync_channel(1), sync_channel(1));
        std::thread::scope(|scope| {
            let pair = &pair;
            scope.spawn(move || {
                for value in 0..50_u8 {
                    pair.streams[0].fill(pair.memory[0], value, MIB).unwrap();
                    to_second.send((value, pair.streams[0].tick())).unwrap();
                    pair.streams[0].wait_for(&first.recv().unwrap()).unwrap();
                }
            });
            for (value, tick) in second {
                pair.streams[1].wait_for(&tick).unwrap();
                pair.copy();
                to_first.send(pair.streams[1].tick()).unwrap();
                if value % 8 == 0 {
                    assert_eq!(pair.bytes(), [value; 4], "seed {seed}");
                }
            }
        });
        pair.assert_no_race();
    }
}
