//! PyTorch's tests of streams, events and `record_stream`, one by one; `CHECKLIST.md` lists them
//! all.

use std::time::Duration;

use aquifer::Buffer;
use aquifer::device::{DevicePtr, StreamFlags};
use aquifer_device::Code;
use aquifer_tests::{Bench, GIB, MIB, write_on};

/// Uses a block on the side stream, which is busy for 10 ms, and records that.
fn used_on_side(bench: &Bench, ptr: DevicePtr, bytes: u64) {
    bench.side.wait_for(&bench.stream.tick()).unwrap();
    bench.driver.stall(&bench.side, Duration::from_millis(10)).unwrap();
    write_on(&bench.side, ptr, bytes);
}

#[test]
fn item_19_out_of_memory_waits_for_recorded_streams() {
    let bench = Bench::new(100 * MIB, "cross_stream:off,backing:segments");
    let held = bench.allocator.alloc_bytes(60 * MIB, &bench.stream).unwrap();
    used_on_side(&bench, held.ptr(), held.bytes());
    held.record_stream(&bench.side).unwrap();
    drop(held);
    assert_eq!(bench.allocator.stats().active_bytes.all.current, 60 * MIB);
    let next = bench.allocator.alloc_bytes(80 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, next.ptr(), next.bytes());
    assert_eq!(bench.allocator.stats().num_sync_all_streams, 1);
    drop(next);
    bench.assert_returned();
}

#[test]
fn item_26_record_stream() {
    for options in ["cross_stream:off,backing:segments", "cross_stream:ready,backing:segments"] {
        let bench = Bench::new(GIB, options);
        let held = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
        let place = held.ptr();
        used_on_side(&bench, place, held.bytes());
        held.record_stream(&bench.side).unwrap();
        drop(held);
        let other = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
        write_on(&bench.stream, other.ptr(), other.bytes());
        assert_ne!(other.ptr(), place, "reused while the side stream uses it");
        bench.side.synchronize().unwrap();
        let again = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
        write_on(&bench.stream, again.ptr(), again.bytes());
        assert_eq!(again.ptr(), place);
        drop((other, again));
        bench.assert_returned();
    }
}

#[test]
fn item_27_record_stream_on_a_part() {
    let bench = Bench::new(GIB, "backing:segments");
    let whole: Buffer<f32> = bench.allocator.alloc(10 << 20, &bench.stream).unwrap();
    let place = whole.ptr();
    let part = whole.slice(5 << 20..).share();
    used_on_side(&bench, part.ptr(), part.bytes());
    part.record_stream(&bench.side).unwrap();
    drop((whole, part));
    let next = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
    assert_ne!(next.ptr(), place);
    write_on(&bench.stream, next.ptr(), next.bytes());
    drop(next);
    bench.assert_returned();
}

#[test]
fn item_30_streams() {
    let bench = Bench::new(GIB, "");
    assert_eq!(bench.device.default_stream().id(), 0);
    assert_ne!(bench.stream.id(), bench.side.id());
    let held = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
    write_on(&bench.stream, held.ptr(), MIB);
    bench.driver.stall(&bench.stream, Duration::from_millis(1)).unwrap();
    write_on(&bench.stream, held.ptr(), MIB);
    assert!(!bench.stream.is_idle().unwrap());
    bench.stream.synchronize().unwrap();
    assert!(bench.stream.is_idle().unwrap());
}

#[test]
fn item_32_events() {
    let bench = Bench::new(GIB, "");
    let [begin, end] = [(); 2].map(|()| bench.device.create_event(true).unwrap());
    begin.record(&bench.stream).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_millis(5)).unwrap();
    end.record(&bench.stream).unwrap();
    assert!(!end.is_complete().unwrap());
    end.synchronize().unwrap();
    assert!(end.is_complete().unwrap() && begin.elapsed_ms(&end).unwrap() > 0.0);
}

#[test]
fn item_33_events_elapsed_time_errors() {
    let bench = Bench::new(GIB, "");
    let [timed, plain, never] = [true, false, true].map(|timing| bench.device.create_event(timing).unwrap());
    timed.record(&bench.stream).unwrap();
    plain.record(&bench.stream).unwrap();
    bench.stream.synchronize().unwrap();
    assert_eq!(timed.elapsed_ms(&plain).unwrap_err().code, Code::INVALID_HANDLE);
    assert_eq!(timed.elapsed_ms(&never).unwrap_err().code, Code::INVALID_HANDLE);
    bench.driver.stall(&bench.stream, Duration::from_millis(5)).unwrap();
    never.record(&bench.stream).unwrap();
    assert_eq!(timed.elapsed_ms(&never).unwrap_err().code, Code::NOT_READY);
}

#[test]
fn item_37_stream_priorities() {
    let bench = Bench::new(GIB, "");
    let (least, greatest) = bench.device.info().priorities;
    assert!(greatest <= least);
    for priority in [least, greatest, greatest - 100, least + 100] {
        let stream = bench.device.stream_with(StreamFlags { non_blocking: true, priority }).unwrap();
        let held = bench.allocator.alloc_bytes(MIB, &stream).unwrap();
        write_on(&stream, held.ptr(), MIB);
    }
    bench.assert_returned();
}

#[test]
fn item_38_events_wait() {
    let bench = Bench::new(GIB, "");
    let held = bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap();
    bench.driver.stall(&bench.stream, Duration::from_millis(5)).unwrap();
    bench.stream.fill(held.ptr(), 7, MIB).unwrap();
    let tick = bench.stream.tick();
    let event = bench.device.create_event(false).unwrap();
    event.record(&bench.stream).unwrap();
    bench.side.wait_event(&event).unwrap();
    let mut found = [0; 4];
    bench.side.download_blocking(&mut found, held.ptr()).unwrap();
    assert_eq!(found, [7; 4]);
    assert!(bench.side.is_ordered_after(&tick), "what the wait ordered needs no second one");
    drop(held);
    bench.assert_returned();
}

#[test]
fn item_42_a_stream_of_another_device_is_refused() {
    let (one, other) = (Bench::new(GIB, ""), Bench::new(GIB, ""));
    let held = one.allocator.alloc_bytes(MIB, &one.stream).unwrap();
    held.record_stream(&other.stream).unwrap_err();
    one.allocator.record_stream_raw(held.ptr(), &other.stream).unwrap_err();
    held.drop_on(&other.stream).unwrap_err();
    assert_eq!(one.allocator.memory_allocated(), 0, "given back all the same");
    one.assert_returned();
}

#[test]
fn defect_6_frees_alone_let_waiting_blocks_go() {
    let bench = Bench::new(GIB, "cross_stream:off");
    let held = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
    used_on_side(&bench, held.ptr(), held.bytes());
    held.record_stream(&bench.side).unwrap();
    drop(held);
    bench.side.synchronize().unwrap();
    // No allocation in between: giving memory back asks the streams itself.
    assert_eq!(bench.allocator.trim_to(0).unwrap(), 40 * MIB);
    bench.assert_returned();
}

#[test]
fn defect_7_a_failing_query_loses_no_block() {
    let bench = Bench::new(GIB, "cross_stream:off");
    let held = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
    let place = held.ptr();
    used_on_side(&bench, place, held.bytes());
    held.record_stream(&bench.side).unwrap();
    drop(held);
    let operation = Some(aquifer_device::Operation::QueryEvent);
    bench.driver.inject(aquifer::device::sim::Fault::Nth { operation, nth: 1, code: Code(999) });
    bench.allocator.alloc_bytes(MIB, &bench.stream).unwrap_err();
    bench.side.synchronize().unwrap();
    let again = bench.allocator.alloc_bytes(40 * MIB, &bench.stream).unwrap();
    assert_eq!(again.ptr(), place);
    drop(again);
    bench.assert_returned();
}

#[test]
fn spurious_out_of_memory_189504() {
    // The block that fits becomes free only while the ladder waits; it is a piece of a segment that
    // cannot be released.
    let bench = Bench::new(20 * MIB, "cross_stream:off");
    let keeps = bench.allocator.alloc_bytes(2 * MIB, &bench.stream).unwrap();
    let held = bench.allocator.alloc_bytes(9 * MIB, &bench.stream).unwrap();
    let rest = bench.allocator.alloc_bytes(9 * MIB, &bench.stream).unwrap();
    used_on_side(&bench, held.ptr(), held.bytes());
    held.record_stream(&bench.side).unwrap();
    let place = held.ptr();
    drop(held);
    let served = bench.allocator.alloc_bytes(9 * MIB, &bench.stream).unwrap();
    write_on(&bench.stream, served.ptr(), served.bytes());
    assert_eq!(served.ptr(), place);
    drop((keeps, rest, served));
    bench.assert_returned();
}

#[test]
fn item_40_external_streams_share_handles_with_their_owner() {
    let bench = Bench::new(GIB, "");
    let raw = bench.driver.create_stream(StreamFlags::default()).unwrap();
    bench.driver.destroy_stream(raw).unwrap();
    // The handle comes back for a new stream; ours is told apart by its own number.
    let again = bench.device.stream_with(StreamFlags::default()).unwrap();
    assert!(again.id() > bench.side.id());
    bench.assert_no_violation();
}
