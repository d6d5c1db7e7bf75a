//! Models of the table of raw pointers, and of calls that race for one pointer.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;

use aquifer_device::{Device, DevicePtr};
use aquifer_sim::{SimConfig, SimDriver};
use shuttle::thread;

use super::table::RawTable;
use crate::types::BlockId;
use crate::{AllocError, Allocator, Config};

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 2000);
    shuttle::check_pct(move || again(), 1000, 3);
}

/// The first levels have two and four buckets, so levels are added while other threads remove and
/// read.
#[test]
fn pointers_are_removed_while_levels_are_added() {
    explore(|| {
        let table = Arc::new(RawTable::default());
        let ptr = |at: u32| u64::from(at) << 9;
        (1..10).for_each(|at| table.insert(ptr(at), BlockId(at)));
        let removing = [1..5, 5..10].map(|part| {
            let table = table.clone();
            thread::spawn(move || {
                for at in part {
                    assert_eq!(table.remove(ptr(at)), Some(BlockId(at)));
                    assert_eq!(table.remove(ptr(at)), None);
                }
            })
        });
        (10..20).for_each(|at| table.insert(ptr(at), BlockId(at)));
        removing.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(table.last_until(ptr(11) + 1), Some(ptr(11)));
        (10..20).for_each(|at| assert_eq!(table.remove(ptr(at)), Some(BlockId(at))));
    });
}

#[test]
fn of_calls_that_free_a_pointer_one_succeeds() {
    explore(|| {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 28)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let [one, two] = [0; 2].map(|_| device.stream().unwrap());
        let ptr = allocator.alloc_raw(4096, &one).unwrap();
        let free = |ptr: DevicePtr| {
            let allocator = allocator.clone();
            thread::spawn(move || match allocator.free_raw(ptr) {
                Ok(()) => 1,
                Err(AllocError::InvalidPointer { .. }) => 0,
                Err(other) => panic!("{other}"),
            })
        };
        let threads = [free(ptr), free(ptr)];
        let recorded = allocator.record_stream_raw(ptr, &two);
        assert!(matches!(recorded, Ok(()) | Err(AllocError::InvalidPointer { .. })));
        let size = allocator.size_of_raw(ptr);
        assert!(matches!(size, Ok(4096) | Err(AllocError::InvalidPointer { .. })));
        let freed: u32 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        assert_eq!(freed, 1);
        assert_eq!(allocator.memory_allocated(), 0);
    });
}
