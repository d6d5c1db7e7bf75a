//! Blocks that rest in a heap of many small ones (`heap/deferred.rs` of the allocator) are found
//! when nothing else serves a request.

use aquifer::Allocator;
use aquifer::memory::{Allocation, Config};
use aquifer_device::Operation;
use aquifer_tests::{GIB, KIB, Subject};

#[test]
fn what_rests_is_found_before_memory_moves() {
    let driver = Subject::new(GIB);
    let device = driver.device();
    let allocator = Allocator::new(&device, Config::default()).unwrap();
    let stream = device.default_stream();
    let mut live: Vec<Allocation> = (0..16 * KIB).map(|_| allocator.alloc_bytes(4 * KIB, stream).unwrap()).collect();
    // Every granule is full now, so that what is freed next is the only memory there is; and
    // requests are smaller than it.
    allocator.empty_cache().unwrap();
    let mapping = || {
        let calls = device.driver_calls();
        [Operation::CreatePhysical, Operation::Map, Operation::Unmap].map(|one| calls.of(one))
    };
    let before = mapping();
    let mut replaced = Vec::new();
    for n in 1..200 {
        let (at, bytes) = (live[n * 16].ptr(), live[n * 16].bytes());
        drop(live.swap_remove(n * 16));
        let next = allocator.alloc_bytes(bytes - 512, stream).unwrap();
        assert_eq!(next.ptr(), at, "there is no other memory");
        replaced.push(next);
        // The rest of it is no longer free, either.
        replaced.push(allocator.alloc_bytes(512, stream).unwrap());
    }
    assert_eq!(mapping(), before);
    driver.assert_no_violation();
}
