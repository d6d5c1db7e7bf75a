//! Copies between host memory.

use std::sync::Arc;

use aquifer::Allocator;
use aquifer::Buffer;
use aquifer::Error;
use aquifer::memory::Config;
use aquifer::transfer::{PinnedConfig, PinnedPool, Region, Transfer, TransferError};
use aquifer_device::{Device, RequestError};
use aquifer_sim::{Fault, SimConfig, SimDriver};

fn bench() -> (Arc<SimDriver>, Transfer) {
    let sim = SimDriver::new(SimConfig::default());
    let allocator = Allocator::new(&Device::new(sim.clone()), Config::default()).unwrap();
    (sim, Transfer::new(&allocator).unwrap())
}

/// Both ends wait for copies of any pool's device.
#[test]
fn copies_on_the_host_come_after_those_of_devices() {
    let (sim, transfer) = bench();
    let other = Device::new(SimDriver::new(SimConfig::default()));
    let stream = transfer.device().stream().unwrap();
    let [mut from, mut to] = [(); 2].map(|()| transfer.pinned().alloc_zeroed::<u32>(1000).unwrap());
    let sent: Vec<u32> = (0..1000).collect();
    let buffer = transfer.to_device(sent.clone(), &stream).unwrap().wait().unwrap();
    let mut target: Buffer<u32> = transfer.allocator().alloc(1000, &stream).unwrap();
    drop(transfer.upload(&to, &mut target).unwrap());
    drop(transfer.download(&buffer, &mut from).unwrap());
    drop(transfer.copy_on_host(&from, &mut to).unwrap());
    assert_eq!(to.read().unwrap(), sent);
    assert!(transfer.to_vec(&target).unwrap().wait().unwrap().iter().all(|&n| n == 0), "written too early");
    drop(transfer.upload(&to, &mut target).unwrap());
    assert_eq!(transfer.to_vec(&target).unwrap().wait().unwrap(), sent);

    let elsewhere = PinnedPool::new(&other, PinnedConfig::default()).unwrap();
    let mut there = elsewhere.alloc_zeroed::<u32>(20).unwrap();
    // A column, and next to it the same three elements in each row.
    let region = Region { extents: &[5], from_strides: &[200], to_strides: &[4] };
    drop(transfer.copy_on_host(region.of(&to), &mut there).unwrap());
    let region = Region { extents: &[5, 3], from_strides: &[0, 1], to_strides: &[4, 1] };
    let beside = there.slice_mut(1..);
    transfer.copy_on_host(region.of(to.slice(7..)), beside).unwrap().wait().unwrap();
    let expected: Vec<u32> = (0..5).flat_map(|row| [200 * row, 7, 8, 9]).collect();
    assert_eq!(there.read().unwrap(), expected);

    let refused = transfer.copy_on_host(&from, &mut there).unwrap_err();
    assert!(matches!(refused, Error::Transfer(TransferError::LengthMismatch { from: 1000, to: 20 })), "{refused}");
    let beyond = Region { extents: &[21], from_strides: &[1], to_strides: &[1] };
    let refused = transfer.copy_on_host(beyond.of(&from), &mut there).unwrap_err();
    assert!(matches!(refused, Error::Request(RequestError::OutOfBounds { end: 21, len: 20, .. })), "{refused}");
    let on_host = transfer.counters().on_host;
    assert_eq!((on_host.copies, on_host.bytes), (3, 4 * (1000 + 5 + 15)));
    assert_eq!(sim.take_violations(), []);
}

#[test]
fn parts_of_one_buffer_are_copied_to_each_other() {
    let (_, transfer) = bench();
    let mut buffer = transfer.pinned().alloc_from(&[1u8, 2, 3, 4]).unwrap();
    let (head, mut tail) = buffer.as_slice_mut().split_at(2).unwrap();
    drop(transfer.copy_on_host(head.as_shared(), tail.reborrow()).unwrap());
    assert_eq!(buffer.read().unwrap(), [1, 2, 1, 2]);
}

#[test]
fn a_lost_device_fails_copies_of_memory_that_it_was_to_write() {
    let ((sim, transfer), (_, other)) = (bench(), bench());
    let stream = transfer.device().stream().unwrap();
    let device = transfer.to_device(vec![7u8; 1 << 20], &stream).unwrap().wait().unwrap();
    let [mut lost, mut here] = [&transfer, &other].map(|of| of.pinned().alloc_zeroed::<u8>(1 << 20).unwrap());
    drop(transfer.download(&device, &mut lost).unwrap());
    sim.inject(Fault::LostAt { nth: 1 });
    let error = other.copy_on_host(&lost, &mut here).map(drop).unwrap_err();
    assert!(error.is_device_lost(), "{error}");
    other.copy_on_host(vec![5u8; 1 << 20], &mut here).unwrap().wait().unwrap();
    assert!(here.read().unwrap().iter().all(|&byte| byte == 5));
}
