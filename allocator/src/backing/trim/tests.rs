//! Memory moves before the device is done with it, and what could not be unmapped goes back later.

use std::sync::Arc;

use aquifer_device::{Code, Device, Driver, Operation};
use aquifer_sim::{Fault, Lagging, SimConfig, SimDriver, ViolationKind};

use super::*;
use crate::{Allocation, Contents};

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 1 << 30;

/// A program on a device that lags.
struct Bench {
    sim: Arc<SimDriver>,
    lagging: Arc<Lagging>,
    device: Device,
    allocator: Allocator,
}

impl Bench {
    fn new(lag: u64) -> Bench {
        Bench::on(SimConfig::new(CAPACITY), lag)
    }

    fn on(config: SimConfig, lag: u64) -> Bench {
        let sim = SimDriver::new(config);
        let lagging = Lagging::new(sim.clone(), lag);
        let device = Device::new(lagging.clone());
        let allocator = Allocator::new(&device, "").unwrap();
        Bench { sim, lagging, device, allocator }
    }

    fn alloc(&self, mib: u64) -> Allocation {
        self.lagging.advance();
        let block = self.allocator.alloc_bytes(mib * MIB, self.device.default_stream()).unwrap();
        self.lagging.allocated(block.ptr(), mib * MIB);
        block
    }

    fn free(&self, block: Allocation) {
        self.lagging.advance();
        self.lagging.freed(block.ptr());
        drop(block);
    }

    /// Leaves two free blocks of 64 MiB that the device is using and that a live block
    /// separates.
    fn with_gap(&self) -> Allocation {
        let [low, between, high] = [64, 4, 64].map(|mib| self.alloc(mib));
        [low, high].into_iter().for_each(|block| self.free(block));
        between
    }

    /// Leaves two old mappings. Returns the block whose memory was there, and two others.
    fn with_two_old_mappings(&self) -> [Allocation; 3] {
        let [low, one, middle, other, high] = [64, 4, 64, 4, 64].map(|mib| self.alloc(mib));
        [low, middle, high].into_iter().for_each(|block| self.free(block));
        let block = self.alloc(192);
        assert_eq!((self.old_mappings(), self.lagging.stalls()), (2, 0));
        [block, one, other]
    }

    fn old_mappings(&self) -> usize {
        self.allocator.state().shared().paged().old_mappings.len()
    }

    fn free_bytes(&self) -> u64 {
        self.device.memory_info().unwrap().free
    }

    /// Nothing is held once the allocator gave its memory back, and nothing went too early.
    fn check_empty(self) {
        self.device.synchronize().unwrap();
        self.allocator.empty_cache().unwrap();
        assert_eq!((self.allocator.memory_reserved(), self.old_mappings(), self.free_bytes()), (0, 0, CAPACITY));
        assert_eq!(self.lagging.take_violation(), None);
    }
}

#[test]
fn a_stream_uses_its_memory_elsewhere_before_the_device_is_done_with_it() {
    let bench = Bench::new(1000);
    let between = bench.with_gap();
    let before = bench.allocator.memory_reserved();
    let block = bench.alloc(128);
    let reserved = bench.allocator.memory_reserved();
    assert!(reserved <= before + 8 * MIB && bench.lagging.stalls() == 0, "{before}, then {reserved}");
    assert!(bench.old_mappings() > 0 && bench.allocator.stats().remaps == 1);
    assert_eq!(bench.free_bytes(), CAPACITY - reserved);
    [block, between].into_iter().for_each(|block| bench.free(block));
    bench.check_empty();
}

#[test]
fn earlier_mappings_go_once_the_device_is_done() {
    let bench = Bench::new(50);
    let _between = bench.with_gap();
    let block = bench.alloc(128);
    assert!(bench.old_mappings() > 0);
    // An event covers the uses, and the device gets there.
    bench.free(block);
    (0..200).for_each(|_| bench.lagging.advance());
    bench.device.default_stream().tick().cover().unwrap();
    bench.free(bench.alloc(200));
    assert_eq!(bench.old_mappings(), 0);
    assert_eq!(bench.lagging.take_violation(), None);
}

#[test]
fn another_stream_does_not_get_it_before_the_device_is_done_with_it() {
    let bench = Bench::new(1000);
    let _between = bench.with_gap();
    let block = bench.alloc(128);
    bench.free(block);
    let side = bench.device.stream().unwrap();
    bench.lagging.advance();
    let other = bench.allocator.alloc_bytes(128 * MIB, &side).unwrap();
    bench.lagging.allocated(other.ptr(), 128 * MIB);
    assert_eq!(bench.lagging.take_violation(), None, "unmapped too early, or given out twice");
}

#[test]
fn work_of_another_stream_at_the_new_address_must_wait_for_work_at_the_old_one() {
    let bench = Bench::new(1000);
    let _between = {
        let [low, between, high] = [64, 4, 64].map(|mib| bench.alloc(mib));
        bench.device.default_stream().fill(low.ptr(), 1, 64 * MIB).unwrap();
        [low, high].into_iter().for_each(|block| bench.free(block));
        between
    };
    let (block, side) = (bench.alloc(128), bench.device.stream().unwrap());
    assert!(bench.old_mappings() > 0);
    let at = block.ptr();
    bench.free(block);
    assert_eq!(bench.sim.take_violations(), []);
    side.fill(at, 2, 128 * MIB).unwrap();
    let found = bench.sim.take_violations();
    assert!(found.iter().any(|violation| violation.kind == ViolationKind::WriteWrite), "{found:?}");
}

#[test]
fn a_move_that_fails_leaves_nothing_behind() {
    let maps = [1, 2, 5, 9].map(|nth| (Operation::Map, nth));
    for (operation, nth) in maps.into_iter().chain([(Operation::SetAccess, 1), (Operation::CreatePhysical, 1)]) {
        let bench = Bench::new(1000);
        let between = bench.with_gap();
        let calls = || bench.device.driver_calls().of(operation);
        let before = calls();
        bench.sim.inject(Fault::Nth { operation: Some(operation), nth, code: Code::OUT_OF_MEMORY });
        // A little more than there is, so that memory is created, too.
        let block = bench.alloc(132);
        assert!(calls() - before >= nth, "{operation:?} {nth}: {} calls", calls() - before);
        [block, between].into_iter().for_each(|block| bench.free(block));
        bench.check_empty();
    }
}

#[test]
fn an_old_mapping_that_cannot_be_unmapped_stays_until_a_later_try() {
    for nth in [1, 2] {
        let bench = Bench::new(1000);
        let blocks = bench.with_two_old_mappings();
        let reserved = bench.allocator.memory_reserved();
        bench.device.synchronize().unwrap();
        bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth, code: Code(999) });
        let other = bench.alloc(200);
        assert_eq!(bench.old_mappings(), 1, "the other mapping went, and the request was served");
        assert_eq!(bench.allocator.memory_reserved(), reserved + 200 * MIB);
        bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth: 1, code: Code(999) });
        bench.allocator.empty_cache().unwrap_err();
        assert_eq!(bench.old_mappings(), 0, "a trim tries again at its end");
        blocks.into_iter().chain([other]).for_each(|block| bench.free(block));
        bench.check_empty();
    }
}

#[test]
fn a_trim_releases_what_it_can_while_a_mapping_cannot_be_unmapped() {
    let bench = Bench::new(1000);
    let blocks = bench.with_two_old_mappings();
    blocks.into_iter().for_each(|block| bench.free(block));
    bench.device.synchronize().unwrap();
    for nth in [1, 2] {
        bench.sim.inject(Fault::Nth { operation: Some(Operation::Unmap), nth, code: Code(999) });
    }
    bench.allocator.empty_cache().unwrap_err();
    assert_eq!(bench.allocator.memory_reserved(), 0);
    bench.check_empty();
}

#[test]
fn nothing_moves_early_where_the_driver_maps_memory_only_once() {
    // The second mapping of the probe is refused.
    for operation in [Operation::Map, Operation::SetAccess] {
        let fault = Fault::Nth { operation: Some(operation), nth: 2, code: Code::NOT_SUPPORTED };
        let bench = Bench::on(SimConfig::new(CAPACITY).fault(fault), 1000);
        assert_eq!(bench.allocator.why_segments(), None);
        let between = bench.with_gap();
        let block = bench.alloc(128);
        assert_eq!(bench.old_mappings(), 0);
        [block, between].into_iter().for_each(|block| bench.free(block));
        bench.check_empty();
    }
}

#[test]
fn sleep_and_an_end_of_the_allocator_leave_no_earlier_mapping() {
    for sleeps in [true, false] {
        let bench = Bench::new(1000);
        let between = bench.with_gap();
        let block = bench.alloc(128);
        assert!(bench.old_mappings() > 0);
        if sleeps {
            bench.allocator.sleep(Contents::Discard).unwrap();
            assert_eq!((bench.free_bytes(), bench.old_mappings()), (CAPACITY, 0));
            bench.allocator.wake().unwrap();
        }
        [block, between].into_iter().for_each(|block| bench.free(block));
        let Bench { lagging, device, allocator, .. } = bench;
        drop(allocator);
        device.settle();
        assert_eq!(device.memory_info().unwrap().free, CAPACITY);
        // Sleep unmaps live memory, which the device takes for a violation.
        assert!(sleeps || lagging.take_violation().is_none());
    }
}
