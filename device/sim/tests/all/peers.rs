//! Waits and copies between devices: right programs are silent and their bytes arrive, wrong ones
//! are found where the memory is.

use std::sync::Arc;

use aquifer_device::AccessKind::{Read, Write};
use aquifer_device::{Code, DevicePtr, Driver, ErrorKind, Operation, RawStream};
use aquifer_sim::{Fault, Lagging, SimConfig, SimDriver, Violation, ViolationKind};

use crate::common::{GRANULE, MIB, Short, code};

const SEEDS: std::ops::Range<u64> = 0..64;
const BYTES: u64 = 4096;

/// Two devices that know nothing of each other yet: `one` is copied from, `two` copies.
struct Pair {
    one: Arc<SimDriver>,
    two: Arc<SimDriver>,
    from: RawStream,
    to: RawStream,
    src: DevicePtr,
    dst: DevicePtr,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        Pair::of(SimConfig::new(1 << 30).seed(seed), SimConfig::new(1 << 30).ordinal(1).seed(seed + 1000))
    }

    fn of(one: SimConfig, two: SimConfig) -> Pair {
        let (one, two) = (SimDriver::new(one), SimDriver::new(two));
        let (from, to) = (one.stream(), two.stream());
        let (src, dst) = (one.alloc(MIB).unwrap(), two.alloc(MIB).unwrap());
        Pair { one, two, from, to, src, dst }
    }

    fn fill(&self, value: u8) {
        self.one.memset(self.src, value, BYTES, self.from).unwrap();
    }

    fn copy(&self) {
        self.two.copy_peer(self.dst, &*self.one, self.src, BYTES, self.to).unwrap();
    }

    /// Makes the copying stream wait for the other one.
    fn before(&self) {
        order(&self.one, self.from, &self.two, self.to);
    }

    /// Makes the other stream wait for the copying one.
    fn after(&self) {
        order(&self.two, self.to, &self.one, self.from);
    }

    fn found(&self) -> [Vec<Violation>; 2] {
        [self.one.take_violations(), self.two.take_violations()]
    }

    /// Panics unless all that was found is one thing about the source.
    fn assert_found(&self, kind: ViolationKind, text: &[&str]) {
        let [one, two] = self.found();
        assert_eq!((one.len(), two), (1, Vec::new()));
        assert_eq!(one[0].kind, kind);
        let said = one[0].to_string();
        assert!(text.iter().all(|part| said.contains(part)), "{said}");
    }

    fn assert_silent(&self) {
        assert_eq!(self.found(), [Vec::new(), Vec::new()]);
    }
}

/// Records an event on a stream of one device and makes a stream of another one wait for it.
fn order(one: &SimDriver, from: RawStream, two: &SimDriver, to: RawStream) {
    let event = one.event();
    one.record(event, from).unwrap();
    two.wait_peer(to, one, event).unwrap();
    one.destroy_event(event).unwrap();
}

#[test]
fn bytes_arrive_and_a_right_program_is_silent() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        for round in 0..4 {
            pair.fill(round);
            pair.before();
            pair.copy();
            pair.after();
            assert_eq!(pair.two.get(pair.dst, 64, pair.to).unwrap(), [round; 64], "seed {seed}");
        }
        pair.one.put(pair.src, &[1, 2, 3, 4], pair.from).unwrap();
        pair.before();
        pair.copy();
        assert_eq!(pair.two.get(pair.dst, 5, pair.to).unwrap(), [1, 2, 3, 4, 3], "seed {seed}");
        pair.after();
        pair.one.free(pair.src).unwrap();
        pair.two.free(pair.dst).unwrap();
        pair.assert_silent();
    }
}

#[test]
fn a_copy_that_did_not_wait_for_its_source_is_found() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        pair.fill(1);
        pair.copy();
        let missing = ["'copy from a peer #", "of sim:1", "no event recorded on stream 1"];
        pair.assert_found(ViolationKind::WriteRead, &missing);
    }
}

#[test]
fn a_source_that_is_overwritten_too_early_is_found() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        pair.fill(1);
        pair.before();
        pair.copy();
        pair.fill(2);
        pair.assert_found(ViolationKind::ReadWrite, &["'copy from a peer #", "of sim:1 after", "'memset #"]);
        // The bytes are still those of the time of the copy: the detector changes nothing.
        assert_eq!(pair.two.get(pair.dst, 4, pair.to).unwrap(), [1; 4]);
    }
}

#[test]
fn a_target_that_is_read_too_early_is_found_where_it_is() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        let reader = pair.two.stream();
        pair.copy();
        pair.two.kernel("reads", &[(pair.dst, BYTES, Read)], None, reader).unwrap();
        let [one, two] = pair.found();
        assert_eq!((one.len(), two.len(), two[0].kind), (0, 1, ViolationKind::WriteRead));
        assert!(two[0].to_string().contains("'copy from a peer #"), "{}", two[0]);
        assert!(!two[0].to_string().contains("of sim"), "its own device needs no name: {}", two[0]);
    }
}

#[test]
fn a_source_that_is_taken_away_too_early_is_found() {
    for seed in SEEDS {
        // Plain memory: freeing waits for its own device, not for the one that copies.
        let pair = Pair::new(seed);
        pair.copy();
        pair.one.free(pair.src).unwrap();
        pair.assert_found(ViolationKind::PendingWork, &["'copy from a peer #", "the host has not waited for stream 1"]);

        // The driver's pool.
        let pair = Pair::new(seed);
        let pooled = pair.one.alloc_async(MIB, pair.from).unwrap();
        pair.before();
        pair.two.copy_peer(pair.dst, &*pair.one, pooled, BYTES, pair.to).unwrap();
        pair.one.free_async(pooled, pair.from).unwrap();
        pair.assert_found(ViolationKind::PendingWork, &["pool free"]);

        // A mapping.
        let pair = Pair::new(seed);
        let (mapped, physical) = pair.one.mapped();
        pair.two.copy_peer(pair.dst, &*pair.one, mapped, BYTES, pair.to).unwrap();
        pair.one.unmap(mapped, GRANULE).unwrap();
        pair.assert_found(ViolationKind::PendingWork, &["cuMemUnmap"]);
        pair.one.release_physical(physical).unwrap();
    }
}

/// Ways of knowing that a copy is done before its source goes.
#[test]
fn a_source_that_is_taken_away_in_time_is_not_found() {
    let ways: [fn(&Pair); 5] = [
        |pair| pair.two.synchronize_stream(pair.to).unwrap(),
        |pair| pair.two.synchronize().unwrap(),
        // Freeing waits for the stream that waits for the copy.
        Pair::after,
        // What waits for the copy is waited for on the other device.
        |pair| {
            pair.after();
            pair.one.synchronize_stream(pair.from).unwrap();
        },
        |pair| {
            let (event, other) = (pair.one.event(), pair.one.stream());
            order(&pair.two, pair.to, &pair.one, other);
            pair.one.record(event, other).unwrap();
            pair.one.synchronize_event(event).unwrap();
        },
    ];
    for seed in SEEDS {
        for (number, way) in ways.iter().enumerate() {
            let pair = Pair::new(seed);
            pair.fill(5);
            pair.before();
            pair.copy();
            way(&pair);
            pair.one.free(pair.src).unwrap();
            assert_eq!(pair.found(), [Vec::new(), Vec::new()], "seed {seed}, way {number}");
        }
    }
}

#[test]
fn waiting_for_the_sources_device_does_not_end_the_copy() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        pair.copy();
        pair.one.synchronize().unwrap();
        pair.one.synchronize().unwrap();
        pair.fill(1);
        pair.assert_found(ViolationKind::ReadWrite, &["'copy from a peer #"]);
    }
}

#[test]
fn knowledge_of_the_host_from_one_device_counts_on_all() {
    for seed in SEEDS {
        let pair = Pair::new(seed);
        let (mapped, physical) = pair.one.mapped();
        pair.one.kernel("writes", &[(mapped, GRANULE, Write)], None, pair.from).unwrap();
        pair.before();
        // No call waits for the first device itself.
        pair.two.synchronize_stream(pair.to).unwrap();
        pair.one.unmap(mapped, GRANULE).unwrap();
        pair.one.release_physical(physical).unwrap();
        pair.assert_silent();
    }
}

#[test]
fn order_passes_through_a_third_device() {
    for seed in SEEDS {
        for waits in [true, false] {
            let pair = Pair::new(seed);
            let third = SimDriver::new(SimConfig::new(1 << 30).ordinal(2).seed(seed + 2000));
            let (stream, memory) = (third.stream(), third.alloc(MIB).unwrap());
            pair.fill(9);
            pair.before();
            if waits {
                order(&pair.two, pair.to, &third, stream);
            }
            third.copy_peer(memory, &*pair.one, pair.src, BYTES, stream).unwrap();
            if waits {
                assert_eq!(third.get(memory, 4, stream).unwrap(), [9; 4]);
                order(&third, stream, &pair.two, pair.to);
                pair.after();
                pair.fill(1);
                pair.assert_silent();
            } else {
                pair.assert_found(ViolationKind::WriteRead, &["of sim:2"]);
            }
        }
    }
}

#[test]
fn a_source_that_is_gone_loses_the_device_that_copies() {
    let pair = Pair::new(3);
    pair.one.free(pair.src).unwrap();
    pair.copy();
    pair.assert_found(ViolationKind::UseAfterFree, &["'copy from a peer #", "was taken away by"]);
    assert_eq!(code(pair.two.synchronize()), Code::ILLEGAL_ADDRESS);
    pair.one.synchronize().unwrap();

    let pair = Pair::new(3);
    pair.two.copy_peer(pair.dst, &*pair.one, pair.src.offset(MIB - 8), 16, pair.to).unwrap();
    pair.assert_found(ViolationKind::NotAllocated, &["nothing is allocated"]);
}

#[test]
fn a_lost_source_is_an_error_that_names_it_and_nothing_else_is_lost() {
    let pair = Pair::new(1);
    pair.fill(1);
    let event = pair.one.event();
    pair.one.record(event, pair.from).unwrap();
    pair.one.inject(Fault::LostAt { nth: 1 });
    assert!(pair.one.synchronize().unwrap_err().is_device_lost());
    let waited = pair.two.wait_peer(pair.to, &*pair.one, event).unwrap_err();
    let copied = pair.two.copy_peer(pair.dst, &*pair.one, pair.src, BYTES, pair.to).unwrap_err();
    for (error, operation) in [(waited, Operation::Wait), (copied, Operation::CopyPeer)] {
        assert!(error.is_device_lost() && error.operation == operation, "{error}");
        assert!(error.to_string().contains("on the peer, sim:0 (Simulated"), "{error}");
    }
    pair.two.memset(pair.dst, 3, BYTES, pair.to).unwrap();
    assert_eq!(pair.two.get(pair.dst, 4, pair.to).unwrap(), [3; 4]);
    pair.assert_silent();
}

#[test]
fn a_device_lost_while_it_copies_holds_no_source_back() {
    for ends in [0, 1] {
        let pair = Pair::new(1);
        pair.copy();
        if ends == 0 {
            pair.two.inject(Fault::LostAt { nth: 1 });
            assert!(pair.two.synchronize().unwrap_err().is_device_lost());
            let error = pair.two.copy_peer(pair.dst, &*pair.one, pair.src, BYTES, pair.to).unwrap_err();
            assert!(error.is_device_lost() && !error.to_string().contains("on the peer"), "{error}");
            pair.fill(2);
            pair.one.free(pair.src).unwrap();
            pair.assert_silent();
        } else {
            // So does one that is gone.
            let Pair { one, two, src, from, .. } = pair;
            drop(two);
            one.memset(src, 2, BYTES, from).unwrap();
            one.free(src).unwrap();
            assert_eq!(one.violations(), []);
        }
    }
}

#[test]
fn faults_strike_before_the_calls_do_anything() {
    for lost in [false, true] {
        let fail = |operation| {
            let lost_code = Code::LAUNCH_FAILED;
            Fault::Nth { operation: Some(operation), nth: 1, code: if lost { lost_code } else { Code(999) } }
        };
        let pair = Pair::new(8);
        pair.fill(1);
        let event = pair.one.event();
        pair.one.record(event, pair.from).unwrap();
        let before = pair.one.now_ns();
        pair.two.inject(fail(Operation::Wait));
        let error = pair.two.wait_peer(pair.to, &*pair.one, event).unwrap_err();
        assert_eq!((error.operation, error.is_device_lost()), (Operation::Wait, lost));
        assert_eq!(pair.one.now_ns(), before, "the other device was let alone");
        if !lost {
            pair.two.wait_peer(pair.to, &*pair.one, event).unwrap();
        }

        let pair = Pair::new(8);
        pair.two.memset(pair.dst, 7, BYTES, pair.to).unwrap();
        pair.two.inject(fail(Operation::CopyPeer));
        let error = pair.two.copy_peer(pair.dst, &*pair.one, pair.src, BYTES, pair.to).unwrap_err();
        assert_eq!((error.operation, error.is_device_lost()), (Operation::CopyPeer, lost));
        pair.fill(2);
        pair.assert_silent();
        if !lost {
            assert_eq!(pair.two.get(pair.dst, 4, pair.to).unwrap(), [7; 4]);
            pair.before();
            pair.copy();
            assert_eq!(pair.two.get(pair.dst, 4, pair.to).unwrap(), [2; 4]);
        }
    }
}

#[test]
fn dead_handles_and_ranges_are_refused_on_both_sides() {
    let pair = Pair::new(0);
    let (one, two) = (&*pair.one, &*pair.two);
    let (theirs, ours) = (one.event(), two.event());
    assert_eq!(code(two.wait_peer(pair.from, one, theirs)), Code::INVALID_HANDLE, "a stream of the other device");
    assert_eq!(code(two.wait_peer(pair.to, one, ours)), Code::INVALID_HANDLE, "an event of the wrong device");
    two.wait_peer(pair.to, one, theirs).unwrap();
    one.destroy_event(theirs).unwrap();
    assert_eq!(code(two.wait_peer(pair.to, one, theirs)), Code::INVALID_HANDLE);
    assert_eq!(code(two.copy_peer(pair.dst, one, pair.src, 8, pair.from)), Code::INVALID_HANDLE);
    assert_eq!(code(two.copy_peer(DevicePtr(0), one, pair.src, 8, pair.to)), Code::INVALID_VALUE);
    assert_eq!(code(two.copy_peer(pair.dst, one, DevicePtr(u64::MAX), 8, pair.to)), Code::INVALID_VALUE);
    two.copy_peer(DevicePtr(0), one, DevicePtr(0), 0, pair.to).unwrap();
    pair.assert_silent();
}

#[test]
fn captures_are_refused_and_broken_as_by_other_calls() {
    let pair = Pair::new(0);
    let (one, two) = (&*pair.one, &*pair.two);
    let event = one.event();
    one.record(event, pair.from).unwrap();
    for call in 0..2 {
        two.begin_capture(pair.to).unwrap();
        let refused = match call {
            0 => (two.wait_peer(pair.to, one, event), Code::CAPTURE_ISOLATION),
            _ => (two.copy_peer(pair.dst, one, pair.src, BYTES, pair.to), Code::CAPTURE_UNSUPPORTED),
        };
        assert_eq!(code(refused.0), refused.1);
        assert_eq!(code(two.end_capture(pair.to)), Code::CAPTURE_INVALIDATED);
    }
    one.begin_capture(pair.from).unwrap();
    one.record(event, pair.from).unwrap();
    let error = two.wait_peer(pair.to, one, event).unwrap_err();
    assert_eq!((error.code, error.kind), (Code::CAPTURED_EVENT, ErrorKind::Capture));
    let graph = one.end_capture(pair.from).unwrap();
    one.destroy_graph(graph).unwrap();
    pair.copy();
    pair.assert_silent();
}

#[test]
fn a_device_is_its_own_peer() {
    let pair = Pair::new(2);
    let (two, event, other) = (&*pair.two, pair.two.event(), pair.two.stream());
    two.memset(pair.dst, 6, BYTES, pair.to).unwrap();
    two.record(event, pair.to).unwrap();
    two.wait_peer(other, two, event).unwrap();
    two.copy_peer(pair.dst.offset(BYTES), two, pair.dst, BYTES, other).unwrap();
    assert_eq!(two.get(pair.dst.offset(BYTES), 4, other).unwrap(), [6; 4]);
    assert_eq!(code(two.copy_peer(pair.dst.offset(8), two, pair.dst, 16, other)), Code::INVALID_VALUE);
    pair.assert_silent();
}

#[test]
fn devices_that_lag_are_peers_too() {
    let pair = Pair::new(2);
    let (one, two) = (Lagging::new(pair.one.clone(), 3), Lagging::new(pair.two.clone(), 3));
    let event = one.event();
    one.memset(pair.src, 6, BYTES, pair.from).unwrap();
    one.record(event, pair.from).unwrap();
    two.wait_peer(pair.to, &*one, event).unwrap();
    two.copy_peer(pair.dst, &*one, pair.src, BYTES, pair.to).unwrap();
    assert_eq!(two.get(pair.dst, 4, pair.to).unwrap(), [6; 4]);
    pair.assert_silent();
}

#[test]
fn a_copy_takes_the_link_and_large_fills_stay_small() {
    let config = || SimConfig::parse("1TiB,jitter=off,link=10").unwrap();
    let pair = Pair::of(config(), config().ordinal(1));
    let bytes = 500_000_000_000;
    let (src, dst) = (pair.one.alloc(bytes).unwrap(), pair.two.alloc(bytes).unwrap());
    pair.one.memset(src, 4, bytes, pair.from).unwrap();
    pair.before();
    pair.two.copy_peer(dst, &*pair.one, src, bytes, pair.to).unwrap();
    pair.two.synchronize().unwrap();
    assert_eq!(pair.two.engines().to_device_busy_ns, 50_000_000_000 + 1_500);
    assert_eq!(pair.two.get(dst.offset(bytes - 4), 4, pair.to).unwrap(), [4; 4]);
    assert_eq!(pair.one.engines().to_host_busy_ns, 0);
    pair.assert_silent();
}
