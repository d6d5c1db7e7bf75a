//! Streams and events: what they are, and how they order work.

use std::ptr::null_mut;
use std::time::Duration;

use aquifer_standin::Number;

use crate::support::{Card, call, wild};

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
fn handles_that_were_never_given_out_are_refused() {
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
