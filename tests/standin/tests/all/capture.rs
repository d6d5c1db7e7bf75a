//! Graph capture: what is recorded, and what must not be called meanwhile.

use std::ptr::null_mut;
use std::sync::mpsc;
use std::thread;

use cudarc::driver::sys::{
    CUgraphInstantiate_flags as Flags, CUstream, CUstreamCaptureMode as Mode, CUstreamCaptureStatus,
};

use crate::support::{Card, MIB, call};

const GLOBAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const THREAD_LOCAL: Mode = Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// The status of a stream and the number of its capture, 0 for none.
fn info(stream: CUstream) -> (CUstreamCaptureStatus, u64) {
    let (mut status, mut number) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let (graph, nodes, count) = (null_mut(), null_mut(), null_mut());
    assert_eq!(call!(cuStreamGetCaptureInfo_v2(stream, &mut status, &mut number, graph, nodes, count)), 0);
    (status, number)
}

fn status(stream: CUstream) -> u32 {
    info(stream).0 as u32
}

/// Sets the calling thread's mode and returns the one before.
fn exchange(mode: Mode) -> Mode {
    let mut mode = mode;
    assert_eq!(call!(cuThreadExchangeStreamCaptureMode(&mut mode)), 0);
    mode
}

#[test]
fn captured_work_runs_when_it_is_launched() {
    let card = Card::new();
    // SAFETY: all work is on one stream.
    unsafe { card.context.disable_event_tracking() };
    let stream = card.context.new_stream().unwrap();
    let mut data = stream.clone_htod(&[1_u32; 4]).unwrap();
    stream.synchronize().unwrap();
    stream.begin_capture(THREAD_LOCAL).unwrap();
    stream.memset_zeros(&mut data).unwrap();
    let graph = stream.end_capture(Flags(0)).unwrap().unwrap();
    assert_eq!(stream.clone_dtoh(&data).unwrap(), [1; 4], "nothing ran yet");
    let mut nodes = 0;
    assert_eq!((call!(cuGraphGetNodes(graph.cu_graph(), null_mut(), &mut nodes)), nodes), (0, 1));
    graph.upload().unwrap();
    for value in [2_u32, 3] {
        stream.memcpy_htod(&[value; 4], &mut data).unwrap();
        graph.launch().unwrap();
        assert_eq!(stream.clone_dtoh(&data).unwrap(), [0; 4]);
    }
    card.assert_no_violation();
}

#[test]
fn an_executable_outlives_its_graph() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let (mut graph, mut executable) = (null_mut(), null_mut());
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    assert_eq!(call!(cuMemsetD8Async(ptr, 5, MIB, stream)), 0);
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), 0);
    assert_eq!(call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
    assert_eq!(call!(cuGraphLaunch(graph.cast(), stream)), 400, "a graph is no executable");
    assert_eq!(call!(cuGraphDestroy(graph)), 0);
    assert_eq!(call!(cuGraphDestroy(graph)), 400);
    assert_eq!(call!(cuGraphLaunch(executable, stream)), 0);
    assert_eq!(card.read(ptr, 4), [5; 4]);
    assert_eq!([call!(cuGraphExecDestroy(executable)), call!(cuGraphLaunch(executable, stream))], [0, 400]);
}

#[test]
fn memory_can_be_allocated_and_freed_in_a_capture() {
    let card = Card::new();
    let (stream, out) = (card.stream(1), card.alloc(MIB));
    let (mut graph, mut executables, mut ptr) = (null_mut(), [null_mut(); 2], 0);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, GLOBAL)), 0);
    assert_eq!(call!(cuMemAllocAsync(&mut ptr, MIB, stream)), 0);
    assert_eq!(call!(cuMemsetD8Async(ptr, 5, MIB, stream)), 0);
    assert_eq!(call!(cuMemcpyDtoDAsync_v2(out, ptr, MIB, stream)), 0);
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), 0);
    for (executable, flags) in executables.iter_mut().zip([0, 1]) {
        assert_eq!(call!(cuGraphInstantiateWithFlags(executable, graph, flags)), 0);
    }
    let [plain, freeing] = executables;
    assert_eq!([call!(cuGraphLaunch(plain, stream)), call!(cuGraphLaunch(plain, stream))], [0, 1], "still allocated");
    assert_eq!([call!(cuMemFreeAsync(ptr, stream)), call!(cuGraphLaunch(plain, stream))], [0, 0]);
    assert_eq!(
        [call!(cuGraphLaunch(freeing, stream)), call!(cuGraphLaunch(freeing, stream))],
        [0, 0],
        "freed on launch"
    );
    assert_eq!((call!(cuStreamSynchronize(stream)), card.read(out, 4)), (0, vec![5; 4]));
    card.assert_no_violation();
}

#[test]
fn launches_wait_for_those_of_the_same_executable_alone() {
    let card = Card::new();
    let (one, two, ptr) = (card.stream(1), card.stream(1), card.alloc(MIB));
    let (mut graph, mut executables) = (null_mut(), [null_mut(); 2]);
    assert_eq!(call!(cuStreamBeginCapture_v2(one, RELAXED)), 0);
    assert_eq!(call!(cuMemsetD8Async(ptr, 5, MIB, one)), 0);
    assert_eq!(call!(cuStreamEndCapture(one, &mut graph)), 0);
    for executable in &mut executables {
        assert_eq!(call!(cuGraphInstantiateWithFlags(executable, graph, 0)), 0);
    }
    assert_eq!([call!(cuGraphLaunch(executables[0], one)), call!(cuGraphLaunch(executables[0], two))], [0; 2]);
    card.assert_no_violation();
    assert_eq!(call!(cuGraphLaunch(executables[1], one)), 0);
    assert_eq!(card.device.violations().len(), 1);
}

#[test]
fn the_status_tells_active_from_broken() {
    let card = Card::new();
    let (stream, side) = (card.stream(1), card.stream(1));
    let event = card.event(2);
    assert_eq!(status(stream), 0);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    assert_eq!([call!(cuEventRecord(event, stream)), call!(cuStreamWaitEvent(side, event, 0))], [0, 0]);
    assert_eq!(info(side), info(stream), "the other stream joined");
    assert_eq!((status(stream), info(stream).1 > 0), (1, true));
    assert_eq!(call!(cuStreamSynchronize(stream)), 900);
    assert_eq!(status(stream), 2);
    let mut graph = null_mut();
    assert_eq!((call!(cuStreamEndCapture(stream, &mut graph)), graph), (901, null_mut()));
    assert_eq!((status(stream), status(side)), (0, 0));
    assert_eq!(call!(cuStreamBeginCapture_v2(null_mut(), RELAXED)), 900, "not the legacy stream");
}

/// Begins a capture in a mode, makes a call, and tells its answer and whether the capture was
/// broken.
fn during(card: &Card, mode: Mode, make: impl FnOnce() -> u32) -> (u32, bool) {
    let stream = card.stream(1);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, mode)), 0);
    let answer = make();
    let broken = status(stream) == 2;
    let mut graph = null_mut();
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), if broken { 901 } else { 0 });
    (answer, broken)
}

#[test]
fn unsafe_calls_break_captures_unless_thread_or_capture_is_relaxed() {
    let card = Card::new();
    let (event, other) = (card.event(2), card.stream(1));
    let unsafe_calls: [fn(u64, u64) -> u32; 8] = [
        |_, _| call!(cuMemAlloc_v2(&mut 0, MIB)),
        |_, _| call!(cuMemHostAlloc(&mut null_mut(), 4096, 0)),
        |event, _| call!(cuEventQuery(pointer(event))),
        |event, _| call!(cuEventSynchronize(pointer(event))),
        |_, stream| call!(cuStreamQuery(pointer(stream))),
        |_, stream| call!(cuStreamSynchronize(pointer(stream))),
        |_, _| call!(cuMemFree_v2(0)),
        |_, _| call!(cuModuleLoadData(&mut null_mut(), c".version 7.0\n.target sm_75\n".as_ptr().cast())),
    ];
    for (place, make) in unsafe_calls.into_iter().enumerate() {
        let make = || make(event as u64, other as u64);
        for mode in [GLOBAL, THREAD_LOCAL] {
            assert_eq!(during(&card, mode, make), (900, true), "call {place} in {mode:?}");
        }
        assert_eq!(during(&card, RELAXED, make), (0, false), "call {place} in a relaxed capture");
        assert_eq!(exchange(RELAXED), GLOBAL);
        assert_eq!(during(&card, GLOBAL, make), (0, false), "call {place} of a relaxed thread");
        assert_eq!(exchange(GLOBAL), RELAXED);
    }
}

fn pointer<T>(address: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap())
}

#[test]
fn calls_about_mappings_are_safe() {
    let card = Card::new();
    let reserve = || call!(cuMemAddressReserve(&mut 0, 2 * MIB, 0, 0, 0));
    assert_eq!(during(&card, GLOBAL, reserve), (0, false));
}

#[test]
fn other_threads_are_bound_by_global_captures_alone() {
    let card = Card::new();
    let (context, event) = (card.context.cu_ctx() as u64, card.event(2) as u64);
    let ask = |mode: Mode| {
        thread::spawn(move || {
            assert_eq!(call!(cuCtxSetCurrent(pointer(context))), 0);
            exchange(mode);
            call!(cuEventQuery(pointer(event)))
        })
        .join()
        .unwrap()
    };
    assert_eq!(during(&card, GLOBAL, || ask(GLOBAL)), (900, true));
    assert_eq!(during(&card, GLOBAL, || ask(THREAD_LOCAL)), (0, false));
    assert_eq!(during(&card, GLOBAL, || ask(RELAXED)), (0, false));
    assert_eq!(during(&card, THREAD_LOCAL, || ask(GLOBAL)), (0, false));
}

#[test]
fn a_capture_ends_on_its_thread_unless_it_is_relaxed() {
    let card = Card::new();
    let (context, stream) = (card.context.cu_ctx() as u64, card.stream(1));
    let address = stream as u64;
    let end_elsewhere = || {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            assert_eq!(call!(cuCtxSetCurrent(pointer(context))), 0);
            sender.send(call!(cuStreamEndCapture(pointer(address), &mut null_mut()))).unwrap();
        });
        receiver.recv().unwrap()
    };
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL)), 0);
    assert_eq!((end_elsewhere(), status(stream)), (908, 1));
    assert_eq!(call!(cuStreamEndCapture(stream, &mut null_mut())), 0);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    assert_eq!((end_elsewhere(), status(stream)), (0, 0));
}

#[test]
fn the_capture_of_a_stream_that_is_destroyed_goes_on() {
    let card = Card::new();
    let stream = card.stream(1);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    assert_eq!(call!(cuStreamDestroy_v2(stream)), 0);
    assert_eq!(call!(cuCtxSynchronize()), 900);
}
