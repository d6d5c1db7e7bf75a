//! Conditional nodes, made while a stream captures, as programs make them.

use std::ptr::{null, null_mut};

use cudarc::driver::sys::{
    CUDA_CONDITIONAL_NODE_PARAMS, CUgraph, CUgraphConditionalNodeType as Kind, CUgraphNode, CUgraphNodeParams,
    CUgraphNodeType, CUstream, CUstreamCaptureMode as Mode, CUstreamCaptureStatus,
};

use crate::support::{Card, MIB, call};

const RELAXED: Mode = Mode::CU_STREAM_CAPTURE_MODE_RELAXED;
const INVALID: u32 = 1;
const NOT_SUPPORTED: u32 = 801;

/// The graph that a stream is captured into, and what its next work comes after.
fn inside(stream: CUstream) -> (CUgraph, *const CUgraphNode, usize) {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let (mut graph, mut nodes, mut count) = (null_mut(), null(), 0);
    let (number, edges) = (null_mut(), null_mut());
    let told = call!(cuStreamGetCaptureInfo_v3(stream, &mut status, number, &mut graph, &mut nodes, edges, &mut count));
    assert_eq!(told, 0);
    (graph, nodes, count)
}

fn condition(graph: CUgraph, value: u32) -> u64 {
    let mut condition = 0;
    assert_eq!(call!(cuGraphConditionalHandleCreate(&mut condition, graph, null_mut(), value, 1)), 0);
    condition
}

/// A node behind all that the stream captured: the answer, the node, and its bodies.
fn add(stream: CUstream, condition: u64, kind: Kind, size: u32) -> (u32, CUgraphNode, Vec<CUgraph>) {
    let (graph, nodes, count) = inside(stream);
    // SAFETY: numbers and null pointers may all be 0.
    let mut params: CUgraphNodeParams = unsafe { std::mem::zeroed() };
    params.type_ = CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
    let (handle, ctx) = (condition, null_mut());
    params.__bindgen_anon_1.conditional =
        CUDA_CONDITIONAL_NODE_PARAMS { handle, type_: kind, size, phGraph_out: null_mut(), ctx };
    let mut node = null_mut();
    let added = call!(cuGraphAddNode_v2(&mut node, graph, nodes, null(), count, &mut params));
    if added != 0 {
        return (added, node, Vec::new());
    }
    // SAFETY: it was written above, and the driver fills it in.
    let bodies = unsafe { params.__bindgen_anon_1.conditional.phGraph_out };
    // SAFETY: the driver gives as many bodies as were asked for.
    (0, node, unsafe { std::slice::from_raw_parts(bodies, size as usize) }.to_vec())
}

/// Puts what the stream captures next behind a node.
fn go_on_behind(stream: CUstream, mut node: CUgraphNode) -> u32 {
    call!(cuStreamUpdateCaptureDependencies_v2(stream, &mut node, null(), 1, 1))
}

fn begin_body(stream: CUstream, body: CUgraph) -> u32 {
    call!(cuStreamBeginCaptureToGraph(stream, body, null(), null(), 0, RELAXED))
}

fn end(stream: CUstream) -> CUgraph {
    let mut graph = null_mut();
    assert_eq!(call!(cuStreamEndCapture(stream, &mut graph)), 0);
    graph
}

#[test]
fn a_launch_runs_the_body_of_the_conditions_default() {
    let cases = [(Kind::CU_GRAPH_COND_TYPE_SWITCH, [1, 2, 3, 9]), (Kind::CU_GRAPH_COND_TYPE_IF, [2, 1, 1, 1])];
    for (kind, expected) in cases {
        for (value, expected) in (0..).zip(expected) {
            let card = Card::new();
            let (stream, side, memory) = (card.stream(1), card.stream(1), card.alloc(MIB));
            assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
            assert_eq!(call!(cuMemsetD8Async(memory, 9, MIB, stream)), 0);
            let condition = condition(inside(stream).0, value);
            let size = if kind == Kind::CU_GRAPH_COND_TYPE_IF { 2 } else { 3 };
            let (added, node, bodies) = add(stream, condition, kind, size);
            assert_eq!((added, go_on_behind(stream, node)), (0, 0));
            for (number, &body) in (1..).zip(&bodies) {
                assert_eq!(begin_body(side, body), 0);
                assert_eq!(inside(side).0, body);
                assert_eq!(call!(cuMemsetD8Async(memory, number, MIB, side)), 0);
                assert_eq!(end(side), body);
            }
            let graph = end(stream);
            let mut executable = null_mut();
            assert_eq!(call!(cuGraphInstantiateWithFlags(&mut executable, graph, 0)), 0);
            assert_eq!(call!(cuGraphDestroy(graph)), 0);
            for _ in 0..2 {
                assert_eq!(call!(cuGraphLaunch(executable, stream)), 0);
                assert_eq!(call!(cuStreamSynchronize(stream)), 0);
                assert_eq!(card.read(memory, 1), [expected], "{kind:?} of {value}");
            }
            assert_eq!(call!(cuGraphExecDestroy(executable)), 0);
            card.assert_no_violation();
        }
    }
}

#[test]
fn what_is_no_conditional_node_of_a_capture_is_refused() {
    let card = Card::new();
    let (stream, side) = (card.stream(1), card.stream(1));
    assert_eq!(inside(stream), (null_mut(), null(), 0), "it does not capture");
    assert_eq!(call!(cuStreamBeginCapture_v2(stream, RELAXED)), 0);
    let graph = inside(stream).0;
    let mut made = 0;
    assert_eq!(call!(cuGraphConditionalHandleCreate(&mut made, graph, null_mut(), 0, 0)), NOT_SUPPORTED);
    assert_eq!(call!(cuGraphConditionalHandleCreate(&mut made, null_mut(), null_mut(), 0, 1)), INVALID);
    let condition = condition(graph, 0);
    assert_eq!(add(stream, condition, Kind::CU_GRAPH_COND_TYPE_WHILE, 1).0, NOT_SUPPORTED);
    assert_eq!(add(stream, condition + 1, Kind::CU_GRAPH_COND_TYPE_IF, 1).0, INVALID);
    assert_eq!(add(stream, condition, Kind::CU_GRAPH_COND_TYPE_IF, 3).0, INVALID);
    assert_eq!(begin_body(side, graph), NOT_SUPPORTED, "no body");
    let (added, node, bodies) = add(stream, condition, Kind::CU_GRAPH_COND_TYPE_IF, 1);
    assert_eq!(added, 0);
    assert_eq!(add(stream, condition, Kind::CU_GRAPH_COND_TYPE_IF, 1).0, INVALID, "a condition has one node");
    assert_eq!(go_on_behind(stream, inside(stream).0.cast()), INVALID, "no node");
    assert_eq!(go_on_behind(stream, node), 0);
    assert_eq!(begin_body(side, bodies[0]), 0);
    end(side);
    end(stream);
    card.assert_no_violation();
}
