//! Streams and events: what they are, and how they order work.

use std::ptr::null_mut;
use std::time::Duration;

use aquifer_standin::Number;
use cudarc::driver::sys::CUstream;

use crate::support::{Card, MIB, call, wild};

const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;

#[test]
fn streams_have_flags_priorities_and_identities() {
    let card = Card::new();
    let (mut least, mut greatest) = (9, 9);
    assert_eq!(call!(cuCtxGetStreamPriorityRange(&mut least, &mut greatest)), 0);
    assert_eq!((least, greatest), (0, -5));
    let mut stream = null_mut();
    assert_eq!(call!(cuStreamCreateWithPriority(&mut stream, NON_BLOCKING, -100)), 0);
    let (mut flags, mut priority, mut id) = (9, 9, 9);
    assert_eq!(
        [call!(cuStreamGetFlags(stream, &mut flags)), call!(cuStreamGetPriority(stream, &mut priority))],
        [0, 0]
    );
    assert_eq!((flags, priority), (NON_BLOCKING, -5));
    assert_eq!(call!(cuStreamGetId(stream, &mut id)), 0);
    assert_eq!((call!(cuStreamDestroy_v2(stream)), card.device.number(Number::Streams)), (0, 0));
    let (again, mut other) = (card.stream(0), 0);
    assert_eq!(again, stream, "the handle comes back");
    assert_eq!(call!(cuStreamGetId(again, &mut other)), 0);
    assert_ne!(id, other, "the identity does not");
    assert_eq!(call!(cuStreamCreate(&mut stream, 2)), 1, "no such flag");
    let mut context = null_mut();
    assert_eq!((call!(cuStreamGetCtx(again, &mut context)), context), (0, card.context.cu_ctx()));
}

#[test]
fn handles_that_nobody_gave_out_are_refused() {
    let card = Card::new();
    let stream = card.stream(0);
    let answers = [
        call!(cuStreamSynchronize(wild())),
        call!(cuStreamQuery(wild())),
        call!(cuStreamDestroy_v2(wild())),
        call!(cuStreamDestroy_v2(null_mut())),
        call!(cuStreamGetFlags(wild(), &mut 0)),
        call!(cuStreamWaitEvent(stream, wild(), 0)),
        call!(cuEventRecord(wild(), stream)),
        call!(cuEventQuery(wild())),
        call!(cuEventSynchronize(null_mut())),
        call!(cuEventDestroy_v2(wild())),
        call!(cuGraphLaunch(wild(), stream)),
        call!(cuGraphDestroy(wild())),
        call!(cuModuleUnload(wild())),
    ];
    assert_eq!(answers, [400; 13]);
    assert_eq!([call!(cuMemFreeHost(wild())), call!(cuMemHostUnregister(wild()))], [1, 713]);
}

#[test]
fn work_takes_its_time() {
    let card = Card::with("1GiB,jitter=off");
    let (stream, event) = (card.stream(NON_BLOCKING), card.event(NO_TIMING));
    assert_eq!(call!(cuEventQuery(event)), 0, "an event never recorded is complete");
    card.device.stall(stream as u64, Duration::from_millis(5)).unwrap();
    assert_eq!(call!(cuEventRecord(event, stream)), 0);
    assert_eq!([call!(cuEventQuery(event)), call!(cuStreamQuery(stream))], [600, 600]);
    card.device.advance(Duration::from_millis(6));
    assert_eq!([call!(cuEventQuery(event)), call!(cuStreamQuery(stream))], [0, 0]);
    card.device.stall(stream as u64, Duration::from_millis(5)).unwrap();
    let before = card.device.number(Number::NowNs);
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    assert!(card.device.number(Number::NowNs) >= before + 5_000_000);
    assert!(card.device.stall(0xDEAD_BEEF, Duration::ZERO).is_err());
}

#[test]
fn events_measure_time() {
    let card = Card::with("1GiB,jitter=off");
    let (stream, start, end) = (card.stream(NON_BLOCKING), card.event(0), card.event(0));
    assert_eq!(call!(cuEventRecord(start, stream)), 0);
    card.device.stall(stream as u64, Duration::from_millis(3)).unwrap();
    assert_eq!(call!(cuEventRecord(end, stream)), 0);
    let mut milliseconds = 0.0;
    assert_eq!(call!(cuEventElapsedTime(&mut milliseconds, start, end)), 600);
    assert_eq!(call!(cuEventSynchronize(end)), 0);
    assert_eq!(call!(cuEventElapsedTime_v2(&mut milliseconds, start, end)), 0);
    assert!((2.99..3.5).contains(&milliseconds), "{milliseconds}");
    let silent = card.event(NO_TIMING);
    assert_eq!(call!(cuEventRecord(silent, stream)), 0);
    assert_eq!(call!(cuEventElapsedTime(&mut milliseconds, start, silent)), 400);
    assert_eq!(call!(cuEventCreate(&mut null_mut(), 8)), 1, "no such flag");
}

/// Writes a range on two streams, with something between.
fn two_writes(card: &Card, streams: [CUstream; 2], between: impl FnOnce()) {
    let ptr = card.alloc(MIB);
    assert_eq!(call!(cuMemsetD8Async(ptr, 1, MIB, streams[0])), 0);
    between();
    assert_eq!(call!(cuMemsetD8Async(ptr, 2, MIB, streams[1])), 0);
    assert_eq!(call!(cuCtxSynchronize()), 0);
}

#[test]
fn events_order_streams_and_without_them_work_races() {
    let card = Card::new();
    let streams = [card.stream(NON_BLOCKING), card.stream(NON_BLOCKING)];
    let event = card.event(NO_TIMING);
    two_writes(&card, streams, || {
        assert_eq!(call!(cuEventRecord(event, streams[0])), 0);
        assert_eq!(call!(cuStreamWaitEvent(streams[1], event, 0)), 0);
    });
    card.assert_no_violation();
    two_writes(&card, streams, || {});
    let found = card.device.violations();
    assert!(found.len() == 1 && found[0].contains("two unordered writes"), "{found:?}");
    assert_eq!(card.device.take_violations(), found);
    card.assert_no_violation();
}

#[test]
fn the_legacy_stream_orders_blocking_streams() {
    let card = Card::new();
    let blocking = [card.stream(0), card.stream(0)];
    let word = card.alloc(4096);
    two_writes(&card, blocking, || assert_eq!(call!(cuMemsetD8Async(word, 0, 4, null_mut())), 0));
    card.assert_no_violation();
    let per_thread = std::ptr::without_provenance_mut(2);
    two_writes(&card, [per_thread, blocking[0]], || assert_eq!(call!(cuMemsetD8_v2(word, 0, 4)), 0));
    card.assert_no_violation();
    let others = [card.stream(NON_BLOCKING), card.stream(NON_BLOCKING)];
    two_writes(&card, others, || assert_eq!(call!(cuMemsetD8Async(word, 0, 4, null_mut())), 0));
    assert_eq!(card.device.violations().len(), 1);
}
