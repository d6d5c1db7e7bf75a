//! Graphs that are copied, made of others, and given to executables.

use std::ptr::{null, null_mut};

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphExecUpdateResult as Updated, CUgraphExecUpdateResultInfo, CUgraphNode, CUstream,
    CUstreamCaptureMode,
};

use crate::support::{Card, MIB, call, wild};

const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const NOT_SUPPORTED: u32 = 801;

/// A capture of some work.
fn captured(stream: CUstream, work: impl FnOnce()) -> CUgraph {
    let mut graph = null_mut();
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    work();
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), 0);
    graph
}

/// A capture of a fill.
fn filling(stream: CUstream, ptr: u64, value: u8) -> CUgraph {
    captured(stream, || assert_eq!(call!(cuMemsetD8Async(ptr, value, MIB, stream)), 0))
}

/// A capture of an allocation that it frees.
fn allocating(stream: CUstream) -> CUgraph {
    captured(stream, || {
        let mut ptr = 0;
        assert_eq!([call!(cuMemAllocAsync(&mut ptr, MIB, stream)), call!(cuMemFreeAsync(ptr, stream))], [0, 0]);
    })
}

fn launch(graph: CUgraph, stream: CUstream) -> CUgraphExec {
    let mut executable = null_mut();
    assert_eq!(call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
    assert_eq!([call!(cuGraphLaunch(executable, stream)), call!(cuStreamSynchronize(stream))], [0, 0]);
    executable
}

/// Adds a child graph behind others: the answer, and the node.
fn add(graph: CUgraph, child: CUgraph, after: &[CUgraphNode]) -> (u32, CUgraphNode) {
    let mut node = null_mut();
    (call!(cuGraphAddChildGraphNode(&mut node, graph, after.as_ptr(), after.len(), child)), node)
}

fn len(graph: CUgraph) -> usize {
    let mut nodes = 0;
    assert_eq!(call!(cuGraphGetNodes(graph, null_mut(), &mut nodes)), 0);
    nodes
}

/// Updates an executable: the answer, and the result.
fn update(executable: CUgraphExec, graph: CUgraph) -> (u32, Updated) {
    // SAFETY: a result and null pointers may all be 0.
    let mut info: CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    (call!(cuGraphExecUpdate_v2(executable, graph, &mut info)), info.result)
}

#[test]
fn a_clone_has_work_of_its_own() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let (graph, mut clone) = (filling(stream, ptr, 5), null_mut());
    assert_eq!([call!(cuGraphClone(&mut clone, graph)), call!(cuGraphDestroy(graph))], [0, 0]);
    launch(clone, stream);
    assert_eq!(card.read(ptr, 4), [5; 4]);
    assert_eq!(call!(cuGraphClone(&mut clone, graph)), 400);
    assert_eq!(call!(cuGraphClone(&mut clone, allocating(stream))), NOT_SUPPORTED);
}

#[test]
fn handles_of_graphs_come_back_and_dead_ones_are_refused() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let first = filling(stream, ptr, 5);
    assert_eq!([call!(cuGraphDestroy(first)), call!(cuGraphDestroy(first))], [0, 400]);
    let second = filling(stream, ptr, 6);
    assert_eq!(second, first);
    let executable = launch(second, stream);
    assert_eq!(card.read(ptr, 4), [6; 4], "the work is the new one's");
    assert_eq!(call!(cuGraphExecDestroy(executable)), 0);
    assert_eq!(launch(second, stream), executable);
}

#[test]
fn child_graphs_run_behind_those_that_they_depend_on() {
    let card = Card::new();
    let (stream, ptr, out) = (card.stream(1), card.alloc(MIB), card.alloc(MIB));
    let copy = captured(stream, || assert_eq!(call!(cuMemcpyDtoDAsync_v2(out, ptr, MIB, stream)), 0));
    let (fill, mut parent) = (filling(stream, ptr, 5), null_mut());
    assert_eq!(call!(cuGraphCreate(&mut parent, 0)), 0);
    let (_, first) = add(parent, fill, &[]);
    let (_, second) = add(parent, copy, &[first]);
    let (added, _) = add(parent, fill, &[second]);
    assert_eq!((added, len(parent)), (0, 3));
    assert_eq!([call!(cuGraphDestroy(fill)), call!(cuGraphDestroy(copy))], [0, 0]);
    launch(parent, stream);
    assert_eq!(card.read(out, 4), [5; 4]);
    card.assert_no_violation();
}

#[test]
fn child_graphs_that_nothing_orders_race() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let (child, mut parent) = (filling(stream, ptr, 5), filling(stream, ptr + MIB as u64 / 2, 6));
    assert_eq!(add(parent, child, &[]).0, 0);
    assert_eq!(card.device.take_violations().len(), 1, "with the work of the graph itself");
    assert_eq!(call!(cuGraphCreate(&mut parent, 0)), 0);
    assert_eq!([add(parent, child, &[]).0, add(parent, child, &[]).0], [0, 0]);
    assert_eq!(card.device.take_violations().len(), 1);
}

#[test]
fn what_cannot_be_a_child_is_refused() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let (child, mut parent, mut other) = (filling(stream, ptr, 5), null_mut(), null_mut());
    assert_eq!([call!(cuGraphCreate(&mut parent, 0)), call!(cuGraphCreate(&mut other, 0))], [0, 0]);
    let (_, elsewhere) = add(other, child, &[]);
    assert_eq!(add(parent, allocating(stream), &[]).0, NOT_SUPPORTED);
    assert_eq!([add(wild(), child, &[]).0, add(parent, wild(), &[]).0], [400, 400]);
    assert_eq!([add(parent, child, &[wild()]).0, add(parent, child, &[elsewhere]).0], [1, 1]);
    assert_eq!(call!(cuGraphAddChildGraphNode(null_mut(), parent, null(), 0, child)), 1);
    assert_eq!(call!(cuGraphCreate(&mut parent, 1)), 1);
    assert_eq!(len(parent), 0);
}

#[test]
fn an_executable_takes_the_work_of_a_graph_of_the_same_kind() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(MIB));
    let executable = launch(filling(stream, ptr, 5), stream);
    let next = filling(stream, ptr, 6);
    assert_eq!(update(executable, next), (0, Updated::CU_GRAPH_EXEC_UPDATE_SUCCESS));
    assert_eq!([call!(cuGraphDestroy(next)), call!(cuGraphLaunch(executable, stream))], [0, 0]);
    assert_eq!((call!(cuStreamSynchronize(stream)), card.read(ptr, 4)), (0, vec![6; 4]));
    let parents = [7, 8].map(|value| {
        let mut parent = null_mut();
        assert_eq!(call!(cuGraphCreate(&mut parent, 0)), 0);
        assert_eq!(add(parent, filling(stream, ptr, value), &[]).0, 0);
        parent
    });
    assert_eq!(update(launch(parents[0], stream), parents[1]).0, 0, "child graphs, too");
    card.assert_no_violation();
}

#[test]
fn an_executable_refuses_the_work_of_other_graphs_and_keeps_its_own() {
    let card = Card::new();
    let (stream, ptr) = (card.stream(1), card.alloc(2 * MIB));
    let executable = launch(filling(stream, ptr, 5), stream);
    let second = ptr + MIB as u64;
    let copy = captured(stream, || assert_eq!(call!(cuMemcpyDtoDAsync_v2(ptr, second, MIB, stream)), 0));
    let longer = captured(stream, || {
        for ptr in [ptr, second] {
            assert_eq!(call!(cuMemsetD8Async(ptr, 6, MIB, stream)), 0);
        }
    });
    assert_eq!(update(executable, copy), (910, Updated::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED));
    assert_eq!(update(executable, longer), (910, Updated::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED));
    let memory = launch(allocating(stream), stream);
    assert_eq!(update(memory, allocating(stream)), (910, Updated::CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED));
    assert_eq!(update(executable, wild()), (400, Updated::CU_GRAPH_EXEC_UPDATE_ERROR));
    assert_eq!([call!(cuGraphLaunch(executable, stream)), call!(cuStreamSynchronize(stream))], [0, 0]);
    assert_eq!(card.read(ptr, 4), [5; 4]);
}
