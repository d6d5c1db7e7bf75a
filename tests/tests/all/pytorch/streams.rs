//! PyTorch's tests of streams, events and `record_stream`, one by one; `CHECKLIST.md` lists them
//! all.

use aquifer_tests::prelude::*;

/// How long the side stream is busy.
const BUSY: Duration = Duration::from_millis(10);

#[test]
fn item_26_record_stream() {
    for options in ["cross_stream:off,backing:segments", "cross_stream:ready,backing:segments"] {
        let bench = Bench::new(GIB, options);
        let held = bench.alloc(40 * MIB);
        let place = held.ptr();
        bench.drop_in_use(held, BUSY);
        let other = bench.written(40 * MIB);
        assert_ne!(other.ptr(), place, "reused while the side stream uses it");
        bench.side.synchronize().unwrap();
        let again = bench.written(40 * MIB);
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
    bench.use_on_side(part.ptr(), part.bytes(), BUSY);
    part.record_stream(&bench.side).unwrap();
    drop((whole, part));
    let next = bench.alloc(40 * MIB);
    assert_ne!(next.ptr(), place);
    write_on(&bench.stream, next.ptr(), next.bytes());
    drop(next);
    bench.assert_returned();
}

#[test]
fn items_32_and_33_elapsed_time_of_events() {
    let bench = Bench::new(GIB, "");
    let [timed, plain, never] = [true, false, true].map(|timing| bench.device.create_event(timing).unwrap());
    timed.record(&bench.stream).unwrap();
    plain.record(&bench.stream).unwrap();
    bench.stream.synchronize().unwrap();
    assert_eq!(timed.elapsed_ms(&plain).unwrap_err().code, Code::INVALID_HANDLE);
    assert_eq!(timed.elapsed_ms(&never).unwrap_err().code, Code::INVALID_HANDLE);
    bench.stall(&bench.stream, Duration::from_millis(5));
    never.record(&bench.stream).unwrap();
    assert_eq!(timed.elapsed_ms(&never).unwrap_err().code, Code::NOT_READY);
    assert!(!never.is_complete().unwrap());
    never.synchronize().unwrap();
    assert!(never.is_complete().unwrap() && timed.elapsed_ms(&never).unwrap() > 0.0);
}

#[test]
fn item_37_stream_priorities() {
    let bench = Bench::new(GIB, "");
    let (least, greatest) = bench.device.info().priorities;
    assert!(greatest <= least);
    for priority in [least, greatest, greatest - 100, least + 100] {
        let stream = bench.device.stream_with(StreamFlags { non_blocking: true, priority }).unwrap();
        let _held = bench.written_on(&stream, MIB);
    }
    bench.assert_returned();
}

#[test]
fn item_42_a_stream_of_another_device_is_refused() {
    let (one, other) = (Bench::new(GIB, ""), Bench::new(GIB, ""));
    let held = one.alloc(MIB);
    held.record_stream(&other.stream).unwrap_err();
    one.allocator.record_stream_raw(held.ptr(), &other.stream).unwrap_err();
    held.drop_on(&other.stream).unwrap_err();
    assert_eq!(one.allocator.memory_allocated(), 0, "given back all the same");
    one.assert_returned();
}

#[test]
fn defect_6_frees_alone_let_waiting_blocks_go() {
    let bench = Bench::new(GIB, "cross_stream:off");
    let held = bench.alloc(40 * MIB);
    bench.drop_in_use(held, BUSY);
    bench.side.synchronize().unwrap();
    // No allocation in between: giving memory back asks the streams itself.
    assert_eq!(bench.allocator.trim_to(0).unwrap(), 40 * MIB);
    bench.assert_returned();
}

#[test]
fn defect_7_a_failing_query_loses_no_block() {
    let bench = Bench::new(GIB, "cross_stream:off");
    let held = bench.alloc(40 * MIB);
    let place = held.ptr();
    bench.drop_in_use(held, BUSY);
    let operation = Some(Operation::QueryEvent);
    bench.driver.inject(Fault::Nth { operation, nth: 1, code: Code(999) });
    bench.refused(MIB);
    bench.side.synchronize().unwrap();
    let again = bench.alloc(40 * MIB);
    assert_eq!(again.ptr(), place);
    drop(again);
    bench.assert_returned();
}
