//! Blocks with deferred coalescing in a heap of many small ones (`heap/deferred.rs` of the
//! allocator) are found when nothing else serves a request.

use aquifer_tests::prelude::*;

#[test]
fn blocks_with_deferred_coalescing_are_found_before_memory_moves() {
    let bench = Bench::new(GIB, "");
    let mut live: Vec<Allocation> = (0..16 * KIB).map(|_| bench.alloc(4 * KIB)).collect();
    // Every granule is full now, so that the next freed block is the only free memory. Requests are
    // smaller.
    bench.allocator.empty_cache().unwrap();
    let mapping = || [Operation::CreatePhysical, Operation::Map, Operation::Unmap].map(|one| bench.calls(one));
    let before = mapping();
    let mut replaced = Vec::new();
    for n in 1..200 {
        let (at, bytes) = (live[n * 16].ptr(), live[n * 16].bytes());
        drop(live.swap_remove(n * 16));
        let next = bench.alloc(bytes - 512);
        assert_eq!(next.ptr(), at, "there is no other memory");
        replaced.push(next);
        // The rest of it is no longer free, either.
        replaced.push(bench.alloc(512));
    }
    assert_eq!(mapping(), before);
    bench.assert_no_violation();
}
