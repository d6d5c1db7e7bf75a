//! Programs with a known answer, by rule. Both checkers must give it.

use std::thread;

use aquifer_device::sim::{Fault, SimConfig, SimDriver};
use aquifer_device::{
    Access, AccessKind, Copy2d, CopyEnd, CopyPart, DevicePtr, Driver, HostPtr, Launch, PhysicalOptions, RawPhysical,
    RawStream, StreamFlags,
};
use aquifer_oracle::Judged;
use aquifer_oracle::RaceKind::{self, Host, Removal, Work};

use crate::both::Both;

const LEGACY: RawStream = RawStream::LEGACY;
const MINE: RawStream = RawStream::PER_THREAD;
const BYTES: u64 = 256;
const GRANULE: u64 = 2 << 20;

/// A device with two blocking and two non-blocking streams, memory, and page-locked memory.
struct Bench {
    both: Both,
    blocking: [RawStream; 2],
    free: [RawStream; 2],
    memory: DevicePtr,
    other: DevicePtr,
    host: HostPtr,
}

impl Bench {
    fn new() -> Bench {
        let both = Both::new(1, None);
        let stream = |non_blocking| both.create_stream(StreamFlags { non_blocking, priority: 0 }).unwrap();
        Bench {
            blocking: [stream(false), stream(false)],
            free: [stream(true), stream(true)],
            memory: both.alloc(BYTES).unwrap(),
            other: both.alloc(BYTES).unwrap(),
            host: both.host_alloc(usize::try_from(BYTES).unwrap()).unwrap(),
            both,
        }
    }

    fn write(&self, stream: RawStream) {
        self.fill(self.memory, stream);
    }

    fn fill(&self, ptr: DevicePtr, stream: RawStream) {
        self.both.memset(ptr, 1, BYTES, stream).unwrap();
    }

    fn read(&self, stream: RawStream) {
        self.kernel(&[(self.memory, AccessKind::Read)], stream);
    }

    fn kernel(&self, touched: &[(DevicePtr, AccessKind)], stream: RawStream) {
        let accesses = touched.iter().map(|&(ptr, kind)| Access { ptr, bytes: BYTES, kind }).collect();
        // SAFETY: the kernel has no code.
        unsafe { self.both.launch(&Launch { name: "k", accesses, ..Launch::default() }, stream) }.unwrap();
    }

    /// Copies `bytes` bytes of the memory to page-locked memory.
    fn download(&self, bytes: usize, stream: RawStream) {
        // SAFETY: the host memory lives as long as the bench, and only the simulator touches it.
        unsafe { self.both.copy_to_host(self.host.as_ptr(), self.memory, bytes, stream) }.unwrap();
    }

    fn upload(&self, stream: RawStream) {
        let bytes = usize::try_from(BYTES).unwrap();
        // SAFETY: the host memory lives as long as the bench, and only the simulator touches it.
        unsafe { self.both.copy_to_device(self.memory, self.host.as_ptr(), bytes, stream) }.unwrap();
    }

    /// Orders later work of `second` after the work of `first` until now.
    fn order(&self, first: RawStream, second: RawStream) {
        let event = self.both.create_event(false).unwrap();
        self.both.record(event, first).unwrap();
        self.both.wait(second, event).unwrap();
        self.both.destroy_event(event).unwrap();
    }

    fn host_access(&self, kind: AccessKind) {
        self.both.host_access(self.host, usize::try_from(BYTES).unwrap(), kind).unwrap();
    }

    /// A range of addresses.
    fn addresses(&self) -> DevicePtr {
        self.both.reserve(GRANULE, 0).unwrap()
    }

    fn physical(&self) -> RawPhysical {
        self.both.create_physical(GRANULE, PhysicalOptions::default()).unwrap()
    }

    fn map(&self, at: DevicePtr, physical: RawPhysical) {
        self.both.map(at, GRANULE, physical).unwrap();
        self.both.set_access(at, GRANULE, &[0]).unwrap();
    }

    #[track_caller]
    fn races(self, kind: RaceKind) {
        self.both.assert_found(&[kind]);
    }

    #[track_caller]
    fn is_race_free(self) {
        self.both.assert_found(&[]);
    }
}

#[test]
fn work_of_one_stream_is_ordered() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.read(bench.free[0]);
    bench.write(bench.free[0]);
    bench.is_race_free();
}

#[test]
fn streams_are_not_ordered() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.read(bench.blocking[1]);
    bench.races(Work);
}

#[test]
fn readers_do_not_race() {
    let bench = Bench::new();
    bench.read(bench.free[0]);
    bench.read(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_writer_waits_for_every_reader() {
    let bench = Bench::new();
    bench.read(bench.free[0]);
    bench.read(bench.free[1]);
    bench.order(bench.free[0], bench.blocking[0]);
    bench.write(bench.blocking[0]);
    bench.races(Work);
}

#[test]
fn ranges_that_meet_in_one_byte_race() {
    let bench = Bench::new();
    bench.both.memset(bench.memory, 1, 65, bench.free[0]).unwrap();
    bench.both.memset(bench.memory.offset(64), 1, 64, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn adjacent_ranges_do_not_race() {
    let bench = Bench::new();
    bench.both.memset(bench.memory, 1, 64, bench.free[0]).unwrap();
    bench.both.memset(bench.memory.offset(64), 1, 64, bench.free[1]).unwrap();
    bench.is_race_free();
}

#[test]
fn a_wait_orders_what_was_recorded() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.free[1]);
    bench.read(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_wait_does_not_order_work_after_the_record() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.both.record(event, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.wait(bench.free[1], event).unwrap();
    bench.read(bench.free[1]);
    bench.races(Work);
}

#[test]
fn order_passes_through_a_third_stream() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.blocking[0]);
    bench.order(bench.blocking[0], bench.free[1]);
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_wait_keeps_the_record_it_was_made_for() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.both.wait(bench.free[1], event).unwrap();
    bench.both.record(event, bench.blocking[0]).unwrap();
    bench.read(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_later_record_replaces_the_earlier_one() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.both.record(event, bench.blocking[0]).unwrap();
    bench.both.wait(bench.free[1], event).unwrap();
    bench.read(bench.free[1]);
    bench.races(Work);
}

#[test]
fn an_event_never_recorded_orders_nothing() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.wait(LEGACY, event).unwrap();
    bench.both.wait(bench.blocking[1], event).unwrap();
    bench.both.synchronize_event(event).unwrap();
    bench.read(bench.blocking[1]);
    bench.races(Work);
}

#[test]
fn the_legacy_stream_and_blocking_streams_wait_for_each_other() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.write(LEGACY);
    bench.read(bench.blocking[1]);
    bench.read(MINE);
    bench.write(RawStream(0));
    bench.is_race_free();
}

#[test]
fn non_blocking_streams_do_not_wait_for_the_legacy_stream() {
    let bench = Bench::new();
    bench.write(LEGACY);
    bench.write(bench.free[0]);
    bench.races(Work);
}

#[test]
fn the_legacy_stream_does_not_wait_for_non_blocking_streams() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.write(LEGACY);
    bench.races(Work);
}

#[test]
fn a_record_on_the_legacy_stream_orders_blocking_streams() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.record(event, LEGACY).unwrap();
    bench.write(bench.blocking[1]);
    bench.is_race_free();
}

#[test]
fn a_wait_of_the_legacy_stream_orders_blocking_streams() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.order(bench.free[0], LEGACY);
    bench.write(bench.blocking[1]);
    bench.is_race_free();
}

#[test]
fn the_legacy_stream_waits_for_a_destroyed_stream() {
    let bench = Bench::new();
    bench.write(bench.blocking[0]);
    bench.both.destroy_stream(bench.blocking[0]).unwrap();
    bench.write(LEGACY);
    bench.is_race_free();
}

#[test]
fn the_work_of_a_destroyed_stream_still_runs() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.destroy_stream(bench.free[0]).unwrap();
    // It may get the handle of the destroyed one.
    let new = bench.both.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap();
    bench.write(new);
    bench.races(Work);
}

#[test]
fn waiting_for_the_device_covers_destroyed_streams() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.destroy_stream(bench.free[0]).unwrap();
    bench.both.synchronize().unwrap();
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn threads_have_default_streams_of_their_own() {
    let bench = Bench::new();
    bench.write(MINE);
    thread::scope(|scope| scope.spawn(|| bench.write(MINE)).join()).unwrap();
    bench.races(Work);
}

#[test]
fn the_legacy_stream_waits_for_the_stream_of_an_ended_thread() {
    let bench = Bench::new();
    thread::scope(|scope| scope.spawn(|| bench.write(MINE)).join()).unwrap();
    bench.write(LEGACY);
    bench.is_race_free();
}

#[test]
fn what_one_thread_waited_for_is_known_to_the_next_caller() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    thread::scope(|scope| scope.spawn(|| bench.both.synchronize_stream(bench.free[0])).join()).unwrap().unwrap();
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn waiting_for_a_stream_on_the_host_orders_others() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.synchronize_stream(bench.free[0]).unwrap();
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn waiting_for_an_event_covers_the_record_alone() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.fill(bench.other, bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.synchronize_event(event).unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.both.assert_found(&[]);
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn a_query_tells_only_when_it_is_true() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    let is_done = || bench.both.query_event(event).unwrap() && bench.both.query_stream(bench.free[0]).unwrap();
    assert!(!is_done());
    bench.both.sim.advance(std::time::Duration::from_secs(1));
    assert!(is_done());
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_query_that_is_false_orders_nothing() {
    let bench = Bench::new();
    let event = bench.both.create_event(false).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(event, bench.free[0]).unwrap();
    assert!(!bench.both.query_event(event).unwrap() && !bench.both.query_stream(bench.free[0]).unwrap());
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn an_elapsed_time_tells_that_both_events_are_complete() {
    let bench = Bench::new();
    let [start, end] = [(); 2].map(|()| bench.both.create_event(true).unwrap());
    bench.both.record(start, bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.both.record(end, bench.free[0]).unwrap();
    bench.both.sim.advance(std::time::Duration::from_secs(1));
    bench.both.elapsed_ms(start, end).unwrap();
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn freeing_device_memory_waits_for_all_work() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.free(bench.other).unwrap();
    bench.write(bench.free[1]);
    bench.is_race_free();
}

#[test]
fn a_download_to_pageable_memory_is_complete_at_return() {
    let bench = Bench::new();
    let mut pageable = [0_u8; 64];
    bench.fill(bench.other, bench.free[0]);
    // SAFETY: the target outlives the copy, which is complete at return.
    unsafe { bench.both.copy_to_host(pageable.as_mut_ptr(), bench.memory, 64, bench.free[0]) }.unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.write(bench.free[1]);
    bench.is_race_free();
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
    bench.is_race_free();
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
    bench.is_race_free();
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
    bench.is_race_free();
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
    bench.is_race_free();
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

#[test]
fn captured_work_does_not_run() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.write(bench.free[1]);
    bench.both.end_capture(bench.free[0]).unwrap();
    bench.is_race_free();
}

#[test]
fn a_launch_is_work_of_its_stream() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.launch_graph(graph, bench.blocking[0]).unwrap();
    bench.write(bench.blocking[0]);
    bench.both.assert_found(&[]);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.races(Work);
}

#[test]
fn what_a_stream_did_before_its_capture_does_not_order_the_graph() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.read(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn launches_of_one_graph_wait_for_each_other() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.fill(bench.other, bench.free[0]);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.fill(bench.other, bench.free[1]);
    bench.is_race_free();
}

#[test]
fn launches_of_two_graphs_do_not_wait_for_each_other() {
    let bench = Bench::new();
    let graphs = bench.free.map(|stream| {
        bench.both.begin_capture(stream).unwrap();
        bench.write(stream);
        bench.both.end_capture(stream).unwrap()
    });
    bench.both.launch_graph(graphs[0], bench.free[0]).unwrap();
    bench.both.launch_graph(graphs[1], bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn events_order_the_streams_of_a_capture() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.write(bench.free[0]);
    bench.order(bench.free[0], bench.free[1]);
    bench.write(bench.free[1]);
    bench.order(bench.free[1], bench.free[0]);
    bench.write(bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.is_race_free();
}

#[test]
fn branches_of_a_capture_race() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.order(bench.free[0], bench.free[1]);
    bench.read(bench.free[1]);
    bench.write(bench.free[0]);
    bench.races(Work);
}

#[test]
fn a_launch_uses_the_memory_behind_its_addresses_by_then() {
    let bench = Bench::new();
    let (one, two) = (bench.addresses(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(one, first);
    bench.map(two, second);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.fill(two, bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.fill(one, bench.free[0]);
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, first);
    bench.both.launch_graph(graph, bench.free[1]).unwrap();
    bench.races(Work);
}

#[test]
fn branches_race_if_their_addresses_become_one_memory() {
    let bench = Bench::new();
    let (one, two) = (bench.addresses(), bench.addresses());
    let (first, second) = (bench.physical(), bench.physical());
    bench.map(one, first);
    bench.map(two, second);
    bench.both.begin_capture(bench.free[0]).unwrap();
    bench.order(bench.free[0], bench.free[1]);
    bench.fill(one, bench.free[0]);
    bench.fill(two, bench.free[1]);
    bench.order(bench.free[1], bench.free[0]);
    let graph = bench.both.end_capture(bench.free[0]).unwrap();
    bench.both.unmap(two, GRANULE).unwrap();
    bench.map(two, first);
    bench.both.launch_graph(graph, bench.free[0]).unwrap();
    bench.races(Work);
}

#[test]
fn a_broken_capture_records_nothing() {
    let bench = Bench::new();
    bench.both.begin_capture(bench.blocking[0]).unwrap();
    bench.both.memset(bench.memory, 1, BYTES, LEGACY).unwrap_err();
    bench.both.end_capture(bench.blocking[0]).unwrap_err();
    bench.write(bench.blocking[0]);
    bench.write(bench.blocking[1]);
    bench.races(Work);
}

#[test]
fn calls_that_fail_do_nothing() {
    let bench = Bench::new();
    bench.write(bench.free[0]);
    let not_a_stream = RawStream(0xdead);
    bench.both.synchronize_stream(not_a_stream).unwrap_err();
    bench.both.free(bench.memory.offset(1)).unwrap_err();
    bench.write(bench.free[1]);
    bench.races(Work);
}

#[test]
fn the_work_of_a_lost_device_never_happens() {
    let bench = Bench::new();
    bench.download(64, bench.free[0]);
    bench.both.sim.inject(Fault::LostAt { nth: 1 });
    assert!(bench.both.create_event(false).unwrap_err().is_device_lost());
    bench.host_access(AccessKind::Write);
    bench.is_race_free();
}

#[test]
fn peers_invent_no_races() {
    let bench = Bench::new();
    let peer = Judged::new(SimDriver::new(SimConfig::new(64 << 20).ordinal(1)));
    let (theirs, event) = (peer.create_stream(StreamFlags::default()).unwrap(), peer.create_event(false).unwrap());
    let memory = peer.alloc(BYTES).unwrap();
    bench.write(bench.free[0]);
    let ours = bench.both.create_event(false).unwrap();
    bench.both.record(ours, bench.free[0]).unwrap();
    peer.wait_peer(theirs, &*bench.both.judged, ours).unwrap();
    peer.record(event, theirs).unwrap();
    bench.both.wait_peer(bench.free[1], &*peer, event).unwrap();
    bench.both.copy_peer(bench.memory, &*peer, memory, BYTES, bench.free[1]).unwrap();
    bench.both.assert_found(&[]);
    bench.write(bench.free[0]);
    bench.races(Work);
}
