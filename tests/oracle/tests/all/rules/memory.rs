//! What touches memory: copies, the host, mappings and frees.

use aquifer_device::{AccessKind, Copy2d, CopyEnd, CopyPart};
use aquifer_oracle::RaceKind::{Host, Removal, Work};

use crate::bench::{BYTES, Bench, GRANULE};

#[test]
fn a_download_to_pageable_memory_is_complete_at_return() {
    let bench = Bench::new();
    let mut pageable = [0_u8; 64];
    bench.fill(bench.other, bench.free[0]);
    // SAFETY: the target outlives the copy, which is complete at return.
    unsafe { bench.both.copy_to_host(pageable.as_mut_ptr(), bench.memory, 64, bench.free[0]) }.unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn an_upload_from_pageable_memory_may_still_write() {
    let bench = Bench::new();
    let pageable = [0_u8; 64];
    // SAFETY: the source is read before the call returns.
    unsafe { bench.both.copy_to_device(bench.memory, pageable.as_ptr(), 64, bench.free[0]) }.unwrap();
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn a_copy_of_no_bytes_is_no_wait() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    // SAFETY: no byte is touched.
    unsafe { bench.both.copy_to_host(std::ptr::dangling_mut(), bench.memory, 0, bench.free[0]) }.unwrap();
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn downloads_to_the_same_page_locked_memory_race() {
    let bench = Bench::new();
    bench.download(64, bench.free[0]);
    bench.download(64, bench.free[1]);
    bench.races(Work);
}

#[test]
fn the_host_must_not_read_a_download_in_flight() {
    let bench = Bench::new();
    bench.download(64, bench.free[0]);
    bench.host_access(AccessKind::Read);
    bench.races(Host);
}

#[test]
fn the_host_must_not_write_an_upload_in_flight() {
    let bench = Bench::new();
    bench.upload(bench.free[0]);
    bench.host_access(AccessKind::Read);
    bench.both.assert_found(&[]);
    bench.host_access(AccessKind::Write);
    bench.races(Host);
}

#[test]
fn the_host_may_use_what_it_waited_for() {
    let bench = Bench::new();
    bench.download(64, bench.free[0]);
    bench.both.synchronize_stream(bench.free[0]).unwrap();
    bench.host_access(AccessKind::Write);
    bench.upload(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn page_locked_memory_is_freed_after_its_copies() {
    let bench = Bench::new();
    bench.upload(bench.free[0]);
    // SAFETY: nothing refers to it. The simulator keeps what its own work needs.
    unsafe { bench.both.host_free(bench.host) }.unwrap();
    bench.races(Removal);
}

#[test]
fn registered_memory_is_unregistered_after_its_copies() {
    let bench = Bench::new();
    let mut memory = vec![0_u8; 64];
    // SAFETY: the memory outlives the bench's work, which unregistering waits for.
    let host = unsafe { bench.both.host_register(memory.as_mut_ptr(), 64) }.unwrap();
    // SAFETY: as above.
    unsafe { bench.both.copy_to_device(bench.memory, memory.as_ptr(), 64, bench.free[0]) }.unwrap();
    // SAFETY: registered above.
    unsafe { bench.both.host_unregister(host) }.unwrap();
    bench.write(bench.free[1]);
    bench.races(Removal);
}

#[test]
fn unregistering_waits_for_all_work() {
    let bench = Bench::new();
    let mut memory = vec![0_u8; 64];
    // SAFETY: the memory outlives its registration.
    let host = unsafe { bench.both.host_register(memory.as_mut_ptr(), 64) }.unwrap();
    bench.write(bench.free[0]);
    // SAFETY: registered above.
    unsafe { bench.both.host_unregister(host) }.unwrap();
    bench.write(bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn copies_on_the_device_read_and_write() {
    let bench = Bench::new();
    bench.both.copy_on_device(bench.memory, bench.other, BYTES, bench.free[0]).unwrap();
    bench.kernel(&[(bench.other, AccessKind::Read)], bench.free[1]);
    bench.both.assert_found(&[]);
    bench.fill(bench.other, bench.free[1]);
    bench.races(Work);
}

#[test]
fn rows_leave_the_bytes_between_them_alone() {
    let copy = |bench: &Bench, from: u64, stream| {
        let (dst, src) = (CopyEnd::Device(bench.memory.offset(from)), CopyEnd::Device(bench.other));
        let rows = Copy2d { dst, dst_pitch: 64, src, src_pitch: 32, width: 32, height: 4 };
        // SAFETY: device memory alone.
        unsafe { bench.both.copy_2d(&rows, stream) }.unwrap();
    };
    let bench = Bench::new();
    copy(&bench, 0, bench.free[0]);
    copy(&bench, 32, bench.free[1]);
    bench.both.assert_found(&[]);
    copy(&bench, 31, bench.blocking[0]);
    bench.races(Work);
}

#[test]
fn rows_that_are_refused_or_empty_cost_nothing() {
    let bench = Bench::new();
    let end = CopyEnd::Device(bench.memory);
    for width in [0, 1] {
        let copy = Copy2d { dst: end, dst_pitch: 64, src: end, src_pitch: 64, width, height: u64::MAX };
        // SAFETY: device memory alone.
        let answer = unsafe { bench.both.copy_2d(&copy, bench.free[0]) };
        assert_eq!(answer.is_ok(), width == 0);
    }
    bench.races_nowhere();
}

#[test]
fn each_copy_of_a_batch_counts() {
    let bench = Bench::new();
    let part = |at| {
        let (dst, src) = (CopyEnd::Device(bench.memory.offset(at)), CopyEnd::Device(bench.other.offset(at)));
        CopyPart { dst, src, bytes: 16 }
    };
    // SAFETY: device memory alone.
    unsafe { bench.both.copy_batch(&[part(0), part(128)], bench.free[0]) }.unwrap();
    bench.both.memset(bench.memory.offset(16), 1, 112, bench.free[1]).unwrap();
    bench.both.assert_found(&[]);
    bench.both.memset(bench.memory.offset(143), 1, 1, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn two_addresses_of_one_memory_are_one() {
    let bench = Bench::new();
    let (one, two, physical) = (bench.addresses(), bench.addresses(), bench.physical());
    bench.map(one, physical);
    bench.map(two, physical);
    bench.both.release_physical(physical).unwrap();
    bench.fill(one, bench.free[0]);
    bench.fill(two.offset(BYTES), bench.free[1]);
    bench.both.assert_found(&[]);
    bench.fill(two, bench.free[1]);
    bench.races(Work);
}

#[test]
fn unmapping_needs_the_work_through_these_addresses_to_be_complete() {
    let bench = Bench::new();
    let (one, two, physical) = (bench.addresses(), bench.addresses(), bench.physical());
    bench.map(one, physical);
    bench.map(two, physical);
    bench.fill(one, bench.free[0]);
    bench.both.unmap(two, GRANULE).unwrap();
    bench.both.assert_found(&[]);
    bench.both.unmap(one, GRANULE).unwrap();
    bench.races(Removal);
}

#[test]
fn memory_keeps_its_work_when_it_moves() {
    let bench = Bench::new();
    let (one, two, physical) = (bench.addresses(), bench.addresses(), bench.physical());
    bench.map(one, physical);
    bench.map(two, physical);
    bench.fill(one, bench.free[0]);
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, physical);
    bench.fill(two, bench.free[1]);
    bench.races(Work);
}

#[test]
fn addresses_with_other_memory_behind_them_are_other_memory() {
    let bench = Bench::new();
    let (one, two) = (bench.addresses(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(one, first);
    bench.map(two, first);
    bench.fill(one, bench.free[0]);
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, second);
    bench.fill(two, bench.free[1]);
    bench.races_nowhere();
}

#[test]
fn work_across_mappings_uses_the_memory_of_each() {
    let bench = Bench::new();
    let (both, alias) = (bench.both.reserve(2 * GRANULE, 0).unwrap(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(both, first);
    bench.map(both.offset(GRANULE), second);
    bench.map(alias, second);
    bench.fill(both.offset(GRANULE - 1), bench.free[0]);
    bench.fill(alias.offset(BYTES - 1), bench.free[1]);
    bench.both.assert_found(&[]);
    bench.both.memset(alias.offset(BYTES - 2), 1, 1, bench.free[1]).unwrap();
    bench.both.assert_found(&[Work]);
    bench.both.unmap(both, 2 * GRANULE).unwrap();
    bench.both.assert_found(&[Work, Removal]);
}

#[test]
fn pool_memory_is_usable_in_the_order_of_its_stream() {
    let bench = Bench::new();
    let memory = bench.both.alloc_async(BYTES, bench.free[0]).unwrap();
    bench.fill(memory, bench.free[0]);
    bench.order(bench.free[0], bench.free[1]);
    bench.fill(memory, bench.free[1]);
    bench.order(bench.free[1], bench.free[0]);
    bench.both.free_async(memory, bench.free[0]).unwrap();
    bench.races_nowhere();
}

#[test]
fn pool_memory_is_not_usable_before_its_allocation() {
    let bench = Bench::new();
    let memory = bench.both.alloc_async(BYTES, bench.free[0]).unwrap();
    bench.fill(memory, bench.free[1]);
    bench.races(Work);
}

#[test]
fn pool_memory_is_freed_after_its_work() {
    let bench = Bench::new();
    let memory = bench.both.alloc_async(BYTES, bench.free[0]).unwrap();
    bench.order(bench.free[0], bench.free[1]);
    bench.fill(memory, bench.free[1]);
    bench.both.free_async(memory, bench.free[0]).unwrap();
    bench.races(Removal);
}
