//! Copies between host memory.

use std::sync::Arc;

use aquifer::memory::Config;
use aquifer::transfer::Transfer;
use aquifer::{Allocator, Buffer};
use aquifer_device::Device;
use aquifer_sim::{Fault, SimConfig, SimDriver};

use super::to_device;

fn bench() -> (Arc<SimDriver>, Transfer) {
    let sim = SimDriver::new(SimConfig::default());
    let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
    (sim, Transfer::new(&allocator).unwrap())
}

/// Both ends wait for copies of the device.
#[test]
fn copies_on_the_host_come_after_those_of_devices() {
    let (sim, transfer) = bench();
    let stream = transfer.device().stream().unwrap();
    let [mut from, mut to] = [(); 2].map(|()| transfer.pinned().alloc_zeroed::<u32>(1000).unwrap());
    let sent: Vec<u32> = (0..1000).collect();
    let buffer = to_device(&transfer, sent.clone(), &stream).unwrap().wait().unwrap();
    let mut target: Buffer<u32> = transfer.allocator().alloc(1000, &stream).unwrap();
    drop(target.upload(&to, &transfer).unwrap());
    drop(buffer.download(&mut from, &transfer).unwrap());
    to.write().unwrap().copy_from_slice(&from.read().unwrap());
    assert_eq!(to.read().unwrap(), sent);
    assert!(target.to_vec(&transfer).unwrap().iter().all(|&n| n == 0), "written too early");
    drop(target.upload(&to, &transfer).unwrap());
    assert_eq!(target.to_vec(&transfer).unwrap(), sent);

    assert_eq!(sim.take_violations(), []);
}

#[test]
fn a_lost_device_fails_reads_of_memory_that_it_was_to_write() {
    let (sim, transfer) = bench();
    let stream = transfer.device().stream().unwrap();
    let device = to_device(&transfer, vec![7u8; 1 << 20], &stream).unwrap().wait().unwrap();
    let mut lost = transfer.pinned().alloc_zeroed::<u8>(1 << 20).unwrap();
    drop(device.download(&mut lost, &transfer).unwrap());
    sim.inject(Fault::LostAt { nth: 1 });
    let error = lost.read().map(drop).unwrap_err();
    assert!(error.is_device_lost(), "{error}");
}
