//! User objects: who holds them, and when their destructors run.

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Mutex;
use std::thread::{self, ThreadId};
use std::time::Duration;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus,
    CUuserObject,
};

use crate::support::{Card, MIB, call, wild};

const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const NO_SYNC: u32 = 1;
const MOVE: u32 = 1;

/// Notes each run of its destructor: the thread, and what the driver answered to it.
struct Probe(Mutex<Vec<(ThreadId, u32)>>);

impl Probe {
    fn new() -> &'static Probe {
        Box::leak(Box::new(Probe(Mutex::default())))
    }

    /// An object with this many references of the caller.
    fn object(&'static self, references: u32) -> CUuserObject {
        let mut object = null_mut();
        let value = std::ptr::from_ref(self).cast_mut().cast();
        assert_eq!(call!(cuUserObjectCreate(&mut object, value, Some(note), references, NO_SYNC)), 0);
        object
    }

    fn runs(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

/// The destructor of a probe.
unsafe extern "C" fn note(probe: *mut c_void) {
    // SAFETY: probes are never freed.
    let probe = unsafe { &*probe.cast::<Probe>() };
    let answer = call!(cuMemAlloc_v2(&mut 0, MIB));
    probe.0.lock().unwrap().push((thread::current().id(), answer));
}

/// The graph that a stream is captured into.
fn capturing(stream: CUstream) -> CUgraph {
    let (mut status, mut number) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let (mut graph, nodes, count) = (null_mut(), null_mut(), null_mut());
    assert_eq!(call!(cuStreamGetCaptureInfo_v2(stream, &mut status, &mut number, &mut graph, nodes, count)), 0);
    graph
}

/// Captures a fill, and an object that the graph owns.
fn captured(card: &Card, stream: CUstream, probe: &'static Probe) -> CUgraph {
    let ptr = card.alloc(MIB);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    let during = capturing(stream);
    assert_eq!(call!(cuGraphRetainUserObject(during, probe.object(1), 1, MOVE)), 0);
    assert_eq!(call!(cuMemsetD8Async(ptr, 5, MIB, stream)), 0);
    let mut graph = null_mut();
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), 0);
    assert_eq!(graph, during, "the graph has the handle that it had during the capture");
    graph
}

fn instantiated(graph: CUgraph) -> CUgraphExec {
    let mut executable = null_mut();
    assert_eq!(call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
    executable
}

#[test]
fn the_destructor_runs_once_on_another_thread_after_the_last_reference() {
    let (card, probe) = (Card::new(), Probe::new());
    let object = probe.object(2);
    assert_eq!([call!(cuUserObjectRetain(object, 1)), call!(cuUserObjectRelease(object, 2))], [0, 0]);
    card.device.run_destructors();
    assert_eq!(probe.runs(), 0);
    card.device.hold_destructors();
    assert_eq!(call!(cuUserObjectRelease(object, 2)), 1, "more than there are");
    assert_eq!(call!(cuUserObjectRelease(object, 1)), 0);
    assert_eq!(probe.runs(), 0, "not within the call");
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
    assert_ne!(probe.0.lock().unwrap()[0].0, thread::current().id());
    assert_eq!([call!(cuUserObjectRelease(object, 1)), call!(cuUserObjectRetain(object, 1))], [1, 1]);
}

#[test]
fn a_destructor_must_not_call_the_driver() {
    let (card, probe) = (Card::new(), Probe::new());
    assert_eq!(call!(cuUserObjectRelease(probe.object(1), 1)), 0);
    card.device.run_destructors();
    assert_eq!(probe.0.lock().unwrap()[0].1, 800);
}

#[test]
fn executables_hold_what_their_graph_holds() {
    let (card, probe) = (Card::new(), Probe::new());
    let stream = card.stream(1);
    let graph = captured(&card, stream, probe);
    let executables = [instantiated(graph), instantiated(graph)];
    assert_eq!(call!(cuGraphDestroy(graph)), 0);
    for executable in executables {
        card.device.run_destructors();
        assert_eq!(probe.runs(), 0);
        assert_eq!(call!(cuGraphExecDestroy(executable)), 0);
    }
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
}

#[test]
fn a_launch_in_flight_holds_what_its_executable_held() {
    let (card, probe) = (Card::new(), Probe::new());
    let stream = card.stream(1);
    let graph = captured(&card, stream, probe);
    let executable = instantiated(graph);
    card.device.stall(stream as u64, Duration::from_millis(5)).unwrap();
    assert_eq!(call!(cuGraphLaunch(executable, stream)), 0);
    assert_eq!([call!(cuGraphDestroy(graph)), call!(cuGraphExecDestroy(executable))], [0, 0]);
    card.device.run_destructors();
    assert_eq!(probe.runs(), 0, "the launch has not run yet");
    card.device.advance(Duration::from_millis(8));
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
}

#[test]
fn clones_and_parents_hold_what_a_graph_held() {
    let (card, probe) = (Card::new(), Probe::new());
    let graph = captured(&card, card.stream(1), probe);
    let (mut clone, mut parent, mut node) = (null_mut(), null_mut(), null_mut());
    assert_eq!([call!(cuGraphClone(&mut clone, graph)), call!(cuGraphCreate(&mut parent, 0))], [0, 0]);
    assert_eq!(call!(cuGraphAddChildGraphNode(&mut node, parent, null(), 0, graph)), 0);
    for graph in [graph, clone, parent] {
        card.device.run_destructors();
        assert_eq!(probe.runs(), 0);
        assert_eq!(call!(cuGraphDestroy(graph)), 0);
    }
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
}

#[test]
fn an_updated_executable_holds_what_the_new_graph_holds() {
    let (card, [old, new]) = (Card::new(), [Probe::new(), Probe::new()]);
    let stream = card.stream(1);
    let [first, second] = [old, new].map(|probe| captured(&card, stream, probe));
    let executable = instantiated(first);
    card.device.stall(stream as u64, Duration::from_millis(5)).unwrap();
    assert_eq!(call!(cuGraphLaunch(executable, stream)), 0);
    // SAFETY: a result and null pointers may all be 0.
    let mut info: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    assert_eq!(call!(cuGraphExecUpdate_v2(executable, second, &mut info)), 0);
    assert_eq!([call!(cuGraphDestroy(first)), call!(cuGraphDestroy(second))], [0, 0]);
    card.device.run_destructors();
    assert_eq!([old.runs(), new.runs()], [0, 0], "the launch of the old work goes on");
    card.device.advance(Duration::from_millis(8));
    card.device.run_destructors();
    assert_eq!([old.runs(), new.runs()], [1, 0]);
    assert_eq!(call!(cuGraphExecDestroy(executable)), 0);
    card.device.run_destructors();
    assert_eq!([old.runs(), new.runs()], [1, 1]);
}

#[test]
fn a_broken_capture_gives_up_its_objects() {
    let (card, probe) = (Card::new(), Probe::new());
    let stream = card.stream(1);
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    let object = probe.object(1);
    assert_eq!(call!(cuGraphRetainUserObject(capturing(stream), object, 1, 0)), 0);
    assert_eq!(call!(cuUserObjectRelease(object, 1)), 0);
    assert_eq!(call!(cuStreamSynchronize(stream)), 900);
    card.device.run_destructors();
    assert_eq!(probe.runs(), 0, "the capture goes on");
    let mut graph = null_mut();
    assert_eq!((call!(cuStreamEndCapture(stream, &mut graph)), graph), (901, null_mut()));
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
}

#[test]
fn a_graph_releases_references_of_its_own_alone() {
    let (card, probe) = (Card::new(), Probe::new());
    let graph = captured(&card, card.stream(1), probe);
    let object = probe.object(1);
    assert_eq!(call!(cuGraphReleaseUserObject(graph, object, 1)), 1, "the caller's");
    assert_eq!(call!(cuGraphRetainUserObject(graph, object, 2, MOVE)), 1, "the caller has one");
    assert_eq!(call!(cuGraphReleaseUserObject(graph, object, 1)), 1);
    assert_eq!(call!(cuGraphRetainUserObject(graph, object, 1, MOVE)), 0);
    assert_eq!(call!(cuUserObjectRelease(object, 1)), 1, "the graph's");
    assert_eq!(call!(cuGraphReleaseUserObject(graph, object, 1)), 0);
    card.device.run_destructors();
    assert_eq!(probe.runs(), 1);
}

#[test]
fn wrong_arguments_are_refused() {
    let (card, probe) = (Card::new(), Probe::new());
    let (object, mut other) = (probe.object(1), null_mut());
    let graph = captured(&card, card.stream(1), probe);
    let answers = [
        call!(cuUserObjectCreate(&mut other, null_mut(), Some(note), 1, 0)),
        call!(cuUserObjectCreate(&mut other, null_mut(), Some(note), 0, NO_SYNC)),
        call!(cuUserObjectCreate(&mut other, null_mut(), None, 1, NO_SYNC)),
        call!(cuUserObjectCreate(null_mut(), null_mut(), Some(note), 1, NO_SYNC)),
        call!(cuUserObjectRetain(object, 0)),
        call!(cuUserObjectRelease(wild(), 1)),
        call!(cuGraphRetainUserObject(graph, object, 1, 2)),
        call!(cuGraphRetainUserObject(graph, wild(), 1, 0)),
        call!(cuGraphRetainUserObject(wild(), object, 1, 0)),
        call!(cuGraphRetainUserObject(instantiated(graph).cast(), object, 1, 0)),
    ];
    assert_eq!(answers, [1; 10]);
}

#[test]
fn drivers_before_11_3_have_none() {
    let _card = Card::new();
    let found = [11020, 11030].map(|version| {
        let mut function = null_mut();
        let name = c"cuGraphRetainUserObject".as_ptr();
        call!(cuGetProcAddress_v2(name, &mut function, version, 0, null_mut()));
        !function.is_null()
    });
    assert_eq!(found, [false, true]);
}
