//! What counters say of transfers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer::memory::Config;
use aquifer::transfer::Transfer;
use aquifer::{Allocator, Tensor};
use aquifer_device::{Device, Operation};
use aquifer_sim::{SimConfig, SimDriver};

use super::{content, runtime, small, to_device};

/// A copy that was done before the wait, and one that a task awaited, blocked no thread.
#[test]
fn transfers_that_blocked_no_thread_overlap_fully() {
    let device = Device::new(SimDriver::new(SimConfig::default()));
    let transfer = Transfer::new(&Allocator::new(&device, Config::default()).unwrap()).unwrap();
    let stream = device.stream().unwrap();
    let pending = to_device(&transfer, vec![1u8; 1000], &stream).unwrap();
    device.synchronize().unwrap();
    drop(pending.wait().unwrap());
    let first = transfer.counters();
    assert_eq!((first.overlap(), first.synchronisations), (Some(1.0), 0));
    drop(pollster::block_on(to_device(&transfer, vec![1u8; 1000], &stream).unwrap()).unwrap());
    let second = transfer.counters();
    assert_eq!((second.overlap(), second.synchronisations), (Some(1.0), 0));
    assert!(second.time_in_flight > first.time_in_flight);
    // An empty copy was not in flight.
    drop(to_device(&transfer, Vec::<u8>::new(), &stream).unwrap().wait().unwrap());
    assert_eq!(transfer.counters().time_in_flight, second.time_in_flight);
}

/// Whether a copy is done by the time that it is waited for is chance.
#[test]
fn reading_one_element_always_counts_as_waiting() {
    let sim = SimDriver::new(SimConfig::default());
    let memory = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
    let (transfer, stream) = (memory.transfer().unwrap(), memory.device().stream().unwrap());
    let buffer = to_device(&transfer, vec![1u8; 1000], &stream).unwrap().wait().unwrap();
    let tensor = Tensor::from_buffer(&buffer, &[1000]).unwrap().select(0, 7).unwrap();
    let before = transfer.counters().synchronisations;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                sim.advance(Duration::from_millis(1));
            }
        });
        for _ in 0..500 {
            buffer.slice(0..=0).item(&transfer).unwrap();
            tensor.item::<u8>().unwrap();
        }
        over.store(true, Ordering::Relaxed);
    });
    assert_eq!(transfer.counters().synchronisations - before, 1000);
    Tensor::scalar(1u8).unwrap().item::<u8>().unwrap();
    assert_eq!(transfer.counters().synchronisations - before, 1000, "there is nothing to wait for");
}

/// However far the device is behind: a copy and an event each, and few events that are not known to
/// be complete.
#[test]
fn small_uploads_cost_two_driver_calls_each_and_leave_few_events() {
    const UPLOADS: usize = 10_000;
    for waits in [0, 1000, 100, 1] {
        let (sim, transfer) = runtime(small());
        let stream = transfer.device().stream().unwrap();
        let mut buffer = transfer.allocator().alloc_zeros::<u8>(4096, &stream).unwrap();
        let on = transfer.on(&stream).unwrap();
        let (before, mut events) = (transfer.device().driver_calls(), 0);
        for nth in 1..=UPLOADS {
            drop(buffer.upload(content(4096, nth), &on).unwrap());
            if waits > 0 && nth % waits == 0 {
                stream.synchronize().unwrap();
            }
            events = events.max(sim.live_objects().events);
        }
        let calls = transfer.device().driver_calls().since(&before);
        let others = calls.total() - calls.of(Operation::SynchronizeStream);
        assert!(others * 100 <= UPLOADS as u64 * 215 && events <= 80, "waits {waits}: {events} events, {calls:?}");
        assert_eq!(buffer.to_vec(&transfer).unwrap(), content(4096, UPLOADS));
        assert_eq!(sim.take_violations(), []);
    }
}
