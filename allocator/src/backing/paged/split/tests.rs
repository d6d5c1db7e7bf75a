//! Splitting serves requests that would be refused, and keeps the contents.

use std::collections::BTreeSet;
use std::sync::{Arc, Barrier};

use aquifer_device::{AccessKind, Code, Device, DevicePtr, Operation, Stream};
use aquifer_sim::{Fault, SimConfig, SimDriver};
use proptest::prelude::*;

use crate::{AccessGuard, AllocError, Allocation, Allocator, Config, MappingChange, PoolOptions};

const MIB: u64 = 1 << 20;
const GRANULE: u64 = 2 * MIB;

struct Program {
    sim: Arc<SimDriver>,
    device: Device,
    allocator: Allocator,
    stream: Stream,
    live: Vec<(Allocation, u8)>,
}

impl Program {
    fn new(config: &str) -> Program {
        let sim = SimDriver::new(SimConfig::new(1 << 30));
        let device = Device::new(sim.clone());
        let allocator = Allocator::new(&device, config.parse::<Config>().unwrap()).unwrap();
        let stream = device.stream().unwrap();
        Program { sim, device, allocator, stream, live: Vec::new() }
    }

    /// Four frames of 16 MiB with a live block of 2 MiB in each, and a limit that leaves `more`
    /// bytes.
    fn sieve(config: &str, more: u64) -> Program {
        let mut program = Program::new(config);
        let blocks = program.sieved(|| program.alloc(2 * MIB).unwrap(), Allocation::ptr, more);
        program.live = blocks.into_iter().zip(0..).collect();
        program.fill();
        program
    }

    /// As [`Program::sieve`], with blocks of 2 MiB that `alloc` gives.
    fn sieved<T>(&self, alloc: impl Fn() -> T, ptr: impl Fn(&T) -> DevicePtr, more: u64) -> Vec<T> {
        drop(self.alloc(64 * MIB).unwrap());
        // The memory is in whole frames but for what lies below the first border.
        let count = self.allocator.memory_reserved() / (2 * MIB);
        let mut blocks: Vec<T> = (0..count).map(|_| alloc()).collect();
        blocks.retain(|block| ptr(block).0.is_multiple_of(16 * MIB));
        self.allocator.empty_cache().unwrap();
        assert_eq!((blocks.len(), self.allocator.memory_reserved()), (4, 64 * MIB));
        self.allocator.set_limit(Some(64 * MIB + more));
        blocks
    }

    fn alloc(&self, bytes: u64) -> Result<Allocation, AllocError> {
        self.allocator.alloc_bytes(bytes, &self.stream)
    }

    fn fill(&self) {
        for (block, byte) in &self.live {
            self.stream.fill(block.ptr(), *byte, block.bytes()).unwrap();
        }
    }

    fn assert_contents(&self) {
        for (block, byte) in &self.live {
            let mut found = vec![0; usize::try_from(block.bytes()).unwrap()];
            self.stream.download_blocking(&mut found, block.ptr()).unwrap();
            assert!(found.iter().all(|found| found == byte), "block {byte}");
        }
        self.device.assert_no_violations();
    }

    /// Number of granules that live blocks touch.
    fn touched(&self) -> u64 {
        let ranges = self.live.iter().map(|(block, _)| block.range());
        let granules: BTreeSet<u64> =
            ranges.flat_map(|range| range.start / GRANULE..range.end.div_ceil(GRANULE)).collect();
        granules.len() as u64
    }
}

const SIEVE: &str = "frame_mb:16,split_frames:on";

#[test]
fn a_request_is_served_by_memory_of_frames_that_are_partly_in_use() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let large = program.alloc(56 * MIB).unwrap();
    program.stream.fill(large.ptr(), 9, large.bytes()).unwrap();
    program.assert_contents();
    // The window lies in the fourth.
    assert_eq!(program.allocator.stats().frames_split, 3);
    assert!(program.allocator.memory_reserved() <= 66 * MIB);
    assert!(matches!(program.alloc(4 * MIB), Err(AllocError::OutOfMemory(_))), "all memory is in use");
}

#[test]
fn frames_are_split_only_where_that_is_allowed() {
    for config in ["frame_mb:16", "frame_mb:16,split_frames:off"] {
        let program = Program::sieve(config, 2 * MIB);
        program.device.synchronize().unwrap();
        let refused = program.alloc(56 * MIB).unwrap_err();
        assert!(refused.to_string().contains("try: set split_frames:on"), "{refused}");
        assert_eq!(program.allocator.stats().frames_split, 0);
        program.assert_contents();
        let too_much = program.alloc(64 * MIB).unwrap_err();
        assert!(!too_much.to_string().contains("split_frames"), "splitting does not serve it: {too_much}");
    }
}

#[test]
fn no_more_frames_are_split_than_a_request_needs() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let _large = program.alloc(20 * MIB).unwrap();
    assert_eq!(program.allocator.stats().frames_split, 1);
    program.assert_contents();
}

#[test]
fn pinned_frames_stay() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let _pinned: Vec<_> = program.live.iter().map(|(block, _)| program.allocator.pin_mapping(block).unwrap()).collect();
    assert!(matches!(program.alloc(20 * MIB), Err(AllocError::OutOfMemory(_))));
    program.assert_contents();
}

#[test]
fn nothing_is_split_during_a_capture() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let other = program.device.stream().unwrap();
    let capture = other.begin_capture().unwrap();
    assert!(program.alloc(20 * MIB).is_err());
    drop(capture);
    let _large = program.alloc(20 * MIB).unwrap();
    program.assert_contents();
}

#[test]
fn work_under_way_on_any_stream_is_waited_for() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let other = program.device.stream().unwrap();
    for (block, byte) in &program.live {
        other.wait_for(&program.stream.tick()).unwrap();
        other.fill(block.ptr(), *byte, block.bytes()).unwrap();
        block.record_stream(&other).unwrap();
    }
    let large = program.alloc(56 * MIB).unwrap();
    program.stream.fill(large.ptr(), 9, large.bytes()).unwrap();
    program.stream.wait_for(&other.tick()).unwrap();
    program.assert_contents();
}

#[test]
fn observers_follow_live_memory() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let unmapped: Arc<std::sync::Mutex<BTreeSet<u64>>> = Arc::default();
    let seen = unmapped.clone();
    let live: Vec<u64> = program.live.iter().map(|(block, _)| block.ptr().0).collect();
    let _observer = program.allocator.observe_mappings(move |change| {
        let mut seen = seen.lock().unwrap();
        match *change {
            MappingChange::BeforeUnmap { addr, bytes } => {
                seen.extend(live.iter().filter(|&&at| addr <= at && at < addr + bytes));
            }
            MappingChange::Mapped { addr, bytes } => seen.retain(|at| !(addr..addr + bytes).contains(at)),
        }
    });
    let _large = program.alloc(56 * MIB).unwrap();
    assert!(program.allocator.stats().frames_split > 0 && unmapped.lock().unwrap().is_empty());
}

#[test]
fn frames_of_a_pool_that_a_graph_may_use_stay() {
    let program = Program::new(SIEVE);
    let pool = program.allocator.create_pool(PoolOptions::default()).unwrap();
    drop(pool.alloc_bytes(64 * MIB, &program.stream).unwrap());
    program.allocator.set_limit(Some(program.allocator.memory_reserved() + 2 * MIB));
    let blocks: Vec<_> = (0..32).map(|_| pool.alloc_bytes(2 * MIB, &program.stream).unwrap()).collect();
    let _live: Vec<_> = blocks.into_iter().step_by(8).collect();
    assert!(matches!(program.alloc(56 * MIB), Err(AllocError::OutOfMemory(_))));
    assert_eq!(program.allocator.stats().frames_split, 0);
}

#[test]
fn nothing_is_split_while_another_thread_has_an_access_guard() {
    let program = Program::sieve(SIEVE, 4 * MIB);
    let buffer = program.allocator.alloc_storage(1000, 1, &program.stream).unwrap();
    let (taken, end) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _access = AccessGuard::acquire(&program.stream, &[(&buffer, AccessKind::Read)]).unwrap();
            taken.wait();
            end.wait();
        });
        taken.wait();
        let refused = program.alloc(20 * MIB);
        end.wait();
        assert!(matches!(refused, Err(AllocError::OutOfMemory(_))));
    });
    let _own = AccessGuard::acquire(&program.stream, &[(&buffer, AccessKind::Read)]).unwrap();
    let _large = program.alloc(20 * MIB).unwrap();
}

#[test]
fn work_of_another_thread_that_begins_in_the_middle_waits() {
    let mut program = Program::new(SIEVE);
    let alloc = || program.allocator.alloc_storage(2 << 20, 1, &program.stream).unwrap();
    let live = program.sieved(alloc, |buffer| buffer.ptr(), 2 * MIB);
    let threads: Arc<std::sync::Mutex<Vec<_>>> = Arc::default();
    let (started, used) = (threads.clone(), live.clone());
    let stream = program.device.stream().unwrap();
    let observer = program.allocator.observe_mappings(move |change| {
        let (stream, used) = (stream.clone(), used.clone());
        if let MappingChange::BeforeUnmap { .. } = change {
            started.lock().unwrap().push(std::thread::spawn(move || {
                for buffer in &used {
                    let _access = AccessGuard::acquire(&stream, &[(buffer, AccessKind::Write)]).unwrap();
                    stream.fill(buffer.ptr(), 5, buffer.bytes()).unwrap();
                }
            }));
            std::thread::yield_now();
        }
    });
    let large = program.alloc(40 * MIB).unwrap();
    drop(observer);
    assert!(program.allocator.stats().frames_split > 0);
    for thread in std::mem::take(&mut *threads.lock().unwrap()) {
        thread.join().unwrap();
    }
    program.device.synchronize().unwrap();
    for buffer in &live {
        let mut found = vec![0; 2 << 20];
        program.stream.download_blocking(&mut found, buffer.ptr()).unwrap();
        assert!(found.iter().all(|&byte| byte == 5));
    }
    program.live.clear();
    drop(large);
    program.device.assert_no_violations();
}

#[test]
fn live_memory_that_cannot_be_mapped_sleeps_until_the_driver_recovers() {
    let program = Program::sieve(SIEVE, 2 * MIB);
    let kept = program.allocator.keep_awake().unwrap();
    // The first call gives access to the addresses that the contents are copied to.
    (2..40).for_each(|nth| {
        program.sim.inject(Fault::Nth { operation: Some(Operation::SetAccess), nth, code: Code(999) });
    });
    let error = program.alloc(20 * MIB).unwrap_err().to_string();
    assert!(error.contains("sleeps: call `Allocator::wake`"), "{error}");
    assert!(program.alloc(2 * MIB).is_err() || program.allocator.memory_reserved() <= 66 * MIB);
    program.sim.clear_faults();
    program.allocator.wake().unwrap();
    drop(kept);
    program.assert_contents();
    drop(program.alloc(20 * MIB).unwrap());
    program.assert_contents();
}

/// Whichever driver call fails: contents stay, the allocator can be woken up if it sleeps, and the
/// request succeeds later.
#[test]
fn any_driver_call_may_fail_once_or_several_times() {
    for times in [1, 3] {
        let mut reached_the_end = false;
        for nth in 1..400 {
            let program = Program::sieve(SIEVE, 2 * MIB);
            let before = program.device.driver_calls().total();
            (0..times).for_each(|more| {
                let code = if nth % 2 == 0 { Code::OUT_OF_MEMORY } else { Code(999) };
                program.sim.inject(Fault::Nth { operation: None, nth: nth + more, code });
            });
            let first = program.alloc(56 * MIB);
            if program.device.driver_calls().total() - before < nth {
                reached_the_end = true;
                break;
            }
            program.sim.clear_faults();
            program.allocator.wake().unwrap();
            program.assert_contents();
            drop(first);
            let large = program.alloc(56 * MIB).unwrap();
            program.stream.fill(large.ptr(), 9, large.bytes()).unwrap();
            program.assert_contents();
            assert!(program.allocator.memory_reserved() <= 66 * MIB);
            drop((large, program.live.len()));
            let Program { allocator, live, device, .. } = program;
            drop(live);
            allocator.empty_cache().unwrap();
            assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0), "call {nth}");
            device.assert_no_violations();
        }
        assert!(reached_the_end);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    /// A request is refused only if the granules that live blocks touch, those that it needs, and
    /// one frame do not fit below the limit.
    #[test]
    fn a_request_is_refused_only_if_it_must_be(
        steps in prop::collection::vec((0..8u8, 1..24 * MIB, any::<prop::sample::Index>()), 1..200),
        whole in any::<bool>(),
    ) {
        const LIMIT: u64 = 256 * MIB;
        let mut program = Program::new("limit_mb:256,split_frames:on");
        let mut next = 0;
        for (what, bytes, which) in steps {
            if what >= 5 && !program.live.is_empty() {
                drop(program.live.swap_remove(which.index(program.live.len())));
                continue;
            }
            let bytes = if what == 4 { bytes * 4 } else { bytes };
            let bytes = if whole { bytes.next_multiple_of(GRANULE) } else { bytes };
            match program.alloc(bytes) {
                Ok(block) => {
                    program.stream.fill(block.ptr(), next, bytes).unwrap();
                    program.live.push((block, next));
                    next = next.wrapping_add(1);
                }
                Err(AllocError::OutOfMemory(_)) => {
                    let frame = 8;
                    let needed = program.touched() + bytes.div_ceil(GRANULE) + frame;
                    prop_assert!(needed * GRANULE > LIMIT, "{} granules of {}", needed, LIMIT / GRANULE);
                }
                Err(error) => panic!("{error}"),
            }
            prop_assert!(program.allocator.memory_reserved() <= LIMIT);
        }
        program.assert_contents();
    }
}
