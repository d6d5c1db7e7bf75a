//! Two devices: copies from one to the other, waits for the other one's events, access to the other
//! one's memory.

use aquifer_standin::Number;
use cudarc::driver::sys::{CUcontext, CUevent, CUstream};

use crate::support::{Card, MIB, call};

const NON_BLOCKING: u32 = 1;
const NO_TIMING: u32 = 2;

fn contexts(one: &Card, two: &Card) -> [CUcontext; 2] {
    [one.context.cu_ctx(), two.context.cu_ctx()]
}

/// A device whose memory is filled on a stream, with an event recorded after that.
struct Source {
    card: Card,
    ptr: u64,
    stream: CUstream,
    event: CUevent,
}

impl Source {
    fn new() -> Source {
        let card = Card::new();
        let (ptr, stream, event) = (card.alloc(MIB), card.stream(NON_BLOCKING), card.event(NO_TIMING));
        assert_eq!(call!(cuMemsetD8Async(ptr, 42, MIB, stream)), 0);
        assert_eq!(call!(cuEventRecord(event, stream)), 0);
        Source { card, ptr, stream, event }
    }
}

#[test]
fn copies_with_a_wrong_side_are_refused() {
    let source = Source::new();
    let target = Card::new();
    let [from, to] = contexts(&source.card, &target);
    let (dst, stream) = (target.alloc(MIB), target.stream(NON_BLOCKING));
    let wild: CUcontext = std::ptr::without_provenance_mut(0xBAD_0000);
    assert_eq!(call!(cuMemcpyPeerAsync(dst, to, source.ptr, wild, 8, stream)), 201);
    assert_eq!(call!(cuMemcpyPeerAsync(source.ptr, from, dst, to, 8, stream)), 801, "not on the other side's stream");
    assert_eq!(call!(cuMemcpyPeerAsync(dst, to, source.ptr, from, 8, source.stream)), 400);
    assert_eq!(call!(cuMemcpyPeerAsync(dst, to, 0, from, 8, stream)), 1);
    assert_eq!(call!(cuStreamWaitEvent(source.stream, source.event, 0)), 400, "a stream of the other device");
    assert_eq!(call!(cuEventQuery(source.event)), 400, "only waits take events of others");
    source.card.context.bind_to_thread().unwrap();
    assert_eq!(call!(cuMemcpyPeerAsync(dst, to, source.ptr, from, 8, std::ptr::null_mut())), 801);
    assert_eq!(call!(cuMemcpyPeerAsync(dst, to, source.ptr, from, 8, stream)), 0, "the stream names the device");
    target.context.bind_to_thread().unwrap();
    assert_eq!(call!(cuStreamSynchronize(stream)), 0);
    let (event, card) = (source.event, source.card);
    drop(card);
    target.context.bind_to_thread().unwrap();
    assert_eq!(call!(cuStreamWaitEvent(stream, event, 0)), 400, "the event went with its device");
    target.assert_no_violation();
}

#[test]
fn access_to_plain_memory_is_enabled_once() {
    let (one, two) = (Card::new(), Card::new());
    let [from, to] = contexts(&one, &two);
    let peers = || [&one, &two].map(|card| card.device.number(Number::Peers));
    assert_eq!([call!(cuCtxEnablePeerAccess(from, 1)), call!(cuCtxEnablePeerAccess(to, 0))], [1, 101]);
    assert_eq!([call!(cuCtxDisablePeerAccess(from)), call!(cuCtxEnablePeerAccess(from, 0))], [705, 0]);
    assert_eq!((call!(cuCtxEnablePeerAccess(from, 0)), peers()), (704, [0, 1]));
    assert_eq!((call!(cuCtxDisablePeerAccess(from)), peers()), (0, [0, 0]));
}
