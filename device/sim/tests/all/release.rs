//! Pinned memory that is left to the device, and goes back when its last uses are done.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_device::{Code, Device, Operation, PhysicalOptions, Reservation, Stream, Tick};
use aquifer_sim::Fault;

use crate::common::{Bench, MIB};

/// Leaves pinned memory to the device that a copy is in flight for.
fn leave_in_flight(bench: &Bench) {
    bench.driver.stall(bench.stream.raw(), Duration::from_secs(1)).unwrap();
    let host = bench.device.driver().host_alloc(4096).unwrap();
    // SAFETY: nothing touches the memory, and it is freed after the copy.
    unsafe { bench.stream.upload(bench.ptr, host, 4096) }.unwrap();
    // SAFETY: allocated above; nothing else has it, and the copy comes before the tick.
    unsafe { bench.device.host_free_later(host, 4096, vec![bench.stream.tick()]) };
}

/// Leaves registered memory to the device, with an owner that shows that it is there while the
/// answer can be upgraded.
fn leave_registered(bench: &Bench, bytes: usize, uses: Vec<Tick>) -> std::sync::Weak<()> {
    let (mut memory, life) = (vec![0_u8; bytes], Arc::new(()));
    let there = Arc::downgrade(&life);
    // SAFETY: the owner keeps the memory.
    let host = unsafe { bench.device.driver().host_register(memory.as_mut_ptr(), bytes) }.unwrap();
    let owner: Box<dyn Any + Send> = Box::new((memory, life));
    // SAFETY: registered above; nothing else has it.
    unsafe { bench.device.host_unregister_later(host, bytes as u64, owner, uses) };
    there
}

/// What an owner does when it is dropped is its own affair.
#[test]
fn the_owner_of_a_stream_may_begin_a_capture() {
    struct Owner(Vec<u8>, Stream, Arc<AtomicBool>);

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.fill(1);
            self.1.begin_capture().unwrap().end().unwrap();
            self.2.store(true, Ordering::Relaxed);
        }
    }

    let Bench { device, stream, .. } = Bench::new();
    let ended = Arc::new(AtomicBool::new(false));
    let mut memory = vec![0_u8; 4096];
    // SAFETY: the owner keeps the memory.
    let host = unsafe { device.driver().host_register(memory.as_mut_ptr(), 4096) }.unwrap();
    let owner = Box::new(Owner(memory, stream.clone(), ended.clone()));
    // SAFETY: registered above; nothing else has it.
    unsafe { device.host_unregister_later(host, 4096, owner, Vec::new()) };
    device.settle();
    assert!(ended.load(Ordering::Relaxed));
}

#[test]
fn page_locked_memory_is_freed_after_its_uses_without_a_wait_for_the_device() {
    let bench = Bench::new();
    leave_in_flight(&bench);
    assert_eq!(bench.device.settle_host(), 0);
    assert_eq!(bench.calls(Operation::HostFree), 0);
    bench.driver.advance(Duration::from_secs(2));
    assert_eq!(bench.device.settle_host(), 4096);
    assert_eq!((bench.calls(Operation::HostFree), bench.calls(Operation::Synchronize)), (1, 0));
    bench.assert_no_violation();
}

#[test]
fn settling_all_page_locked_memory_waits() {
    for settle in
        [|device: &Device| device.settle(), |device: &Device| assert_eq!(device.wait_and_settle_host(), 3 * 4096)]
    {
        let bench = Bench::new();
        (0..3).for_each(|_| leave_in_flight(&bench));
        settle(&bench.device);
        assert_eq!((bench.calls(Operation::HostFree), bench.calls(Operation::Synchronize)), (3, 1));
        bench.assert_no_violation();
    }
}

#[test]
fn ticks_of_streams_that_are_gone_are_answered() {
    let mut bench = Bench::new();
    leave_in_flight(&bench);
    bench.stream = bench.device.stream().unwrap();
    assert_eq!(bench.device.settle_host(), 0);
    bench.driver.advance(Duration::from_secs(2));
    assert_eq!(bench.device.settle_host(), 4096);
}

#[test]
fn much_registered_memory_is_unregistered_and_its_owners_dropped() {
    let bench = Bench::new();
    let first = leave_registered(&bench, 40 << 20, Vec::new());
    assert_eq!(bench.device.settle_host(), 0);
    let used = leave_registered(&bench, 100, vec![bench.stream.tick()]);
    bench.driver.stall(bench.stream.raw(), Duration::from_secs(1)).unwrap();
    let second = leave_registered(&bench, 40 << 20, Vec::new());
    assert_eq!(bench.device.settle_host(), 80 << 20);
    assert!(first.upgrade().is_none() && second.upgrade().is_none() && used.upgrade().is_some());
    bench.device.settle();
    assert!(used.upgrade().is_none());
}

#[test]
fn releases_break_no_capture_and_are_tried_again_after_a_failure() {
    let bench = Bench::new();
    leave_in_flight(&bench);
    bench.driver.advance(Duration::from_secs(2));
    let other = bench.device.stream().unwrap();
    let capture = other.begin_capture().unwrap();
    assert_eq!((bench.device.settle_host(), bench.device.wait_and_settle_host()), (0, 0));
    drop(capture.end().unwrap());
    let code = Code(999);
    bench.driver.inject(Fault::Rate { operation: Some(Operation::HostFree), rate: 1.0, code });
    assert_eq!(bench.device.settle_host(), 0);
    bench.driver.clear_faults();
    assert_eq!(bench.device.settle_host(), 4096);
}

#[test]
fn closing_a_device_releases_its_memory_but_a_lost_one_keeps_the_owners() {
    let bench = Bench::new();
    leave_in_flight(&bench);
    let there = leave_registered(&bench, 100, vec![bench.stream.tick()]);
    let Bench { driver: sim, device, stream, .. } = bench;
    drop((device, stream));
    assert!(there.upgrade().is_none());
    assert_eq!(sim.take_violations(), []);

    let bench = Bench::new();
    bench.driver.stall(bench.stream.raw(), Duration::from_secs(1)).unwrap();
    let there = leave_registered(&bench, 100, vec![bench.stream.tick()]);
    bench.driver.inject(Fault::Rate { operation: Some(Operation::Synchronize), rate: 1.0, code: Code(700) });
    drop(bench);
    assert!(there.upgrade().is_some(), "the device may still write there");
}

#[test]
fn an_object_that_cannot_be_released_at_the_end_does_not_keep_the_others() {
    for failing in [Operation::Free, Operation::Unmap, Operation::Synchronize, Operation::ReleasePhysical] {
        for nth in 1..=4 {
            let Bench { driver: sim, device, stream, ptr: memory } = Bench::new();
            let granule = device.info().granularity_bytes.unwrap();
            device.free_later(memory);
            for _ in 0..3 {
                device.free_later(device.alloc(MIB).unwrap());
                let ptr = device.driver().reserve(granule, 0).unwrap();
                let physical = device.driver().create_physical(granule, PhysicalOptions::default()).unwrap();
                device.driver().map(ptr, granule, physical).unwrap();
                device.unreserve_later(Reservation {
                    ptr,
                    bytes: granule,
                    mapped: vec![(ptr, granule, Some(physical))],
                });
            }
            sim.inject(Fault::Nth { operation: Some(failing), nth, code: Code(999) });
            drop((stream, device));
            assert_eq!(sim.held_bytes(), 0, "{failing:?} {nth}");
        }
    }
}
