//! A step with a branch is captured once: a SWITCH node runs one of four bodies, which share
//! memory.
use std::ptr::{null, null_mut};
use std::sync::Arc;

use aquifer::memory::PoolOptions;
use aquifer::prelude::*;
use cudarc::driver::sys::{self, CUgraph, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaContext, CudaStream, DriverError};

const BODIES: u8 = 4;
const MIB: u64 = 1 << 20;

/// Puts a SWITCH behind what a stream captured, and returns its bodies. The condition is `value` at
/// the beginning of each launch. A kernel that decides gets the handle, is captured next, and calls
/// `cudaGraphSetConditional`; the nodes that the SWITCH comes after are asked for after that.
fn switch(stream: &CudaStream, value: u32) -> Result<Vec<CUgraph>, DriverError> {
    let (raw, context) = (stream.cu_stream(), stream.context().cu_ctx());
    let (mut status, mut graph) = (sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, null_mut());
    let (mut nodes, mut count, mut edges, mut node, mut handle) = (null(), 0, null(), null_mut(), 0);
    // SAFETY: the stream lives, and so do the places that the results go to.
    unsafe {
        sys::cuStreamGetCaptureInfo_v3(raw, &mut status, null_mut(), &mut graph, &mut nodes, &mut edges, &mut count)
    }
    .result()?;
    // SAFETY: the stream is captured into the graph; 1 asks for the value at each launch.
    unsafe { sys::cuGraphConditionalHandleCreate(&mut handle, graph, context, value, 1) }.result()?;
    // SAFETY: numbers and null pointers are all zeros.
    let mut params: sys::CUgraphNodeParams = unsafe { std::mem::zeroed() };
    params.type_ = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_CONDITIONAL;
    params.__bindgen_anon_1.conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS {
        handle,
        type_: sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_SWITCH,
        size: BODIES.into(),
        phGraph_out: null_mut(),
        ctx: context,
    };
    // SAFETY: the nodes and edges are those that the stream's next work comes after.
    unsafe { sys::cuGraphAddNode_v2(&mut node, graph, nodes, edges, count, &mut params) }.result()?;
    // SAFETY: the node is of that graph; 1 replaces what the stream's next work comes after.
    unsafe { sys::cuStreamUpdateCaptureDependencies_v2(raw, &mut node, null(), 1, 1) }.result()?;
    // SAFETY: the field of a conditional node's parameters, which the driver has filled in.
    let bodies = unsafe { params.__bindgen_anon_1.conditional.phGraph_out };
    // SAFETY: the driver wrote as many bodies as were asked for.
    Ok(unsafe { std::slice::from_raw_parts(bodies, BODIES.into()) }.to_vec())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&CudaContext::new(0)?)?;
    println!("{BODIES} bodies, of which one runs, share 64 MiB");
    Ok(())
}

/// Captures the step once for each choice, and launches it.
pub(crate) fn run(context: &Arc<CudaContext>) -> Result<(), Box<dyn std::error::Error>> {
    let (stream, side) = (context.new_stream()?, context.new_stream()?);
    let memory = aquifer_cudarc::allocator(context)?;
    let (ours, ours_side) = (aquifer_cudarc::stream(&stream)?, aquifer_cudarc::stream(&side)?);
    for chosen in 0..=BODIES {
        let pool = memory.create_pool(PoolOptions::default())?;
        let mut result = memory.alloc_zeros::<u8>(1, &ours)?;
        let capture = ours.begin_capture()?;
        let route = memory.capture(&ours, &pool)?;
        ours.fill(result.ptr(), 9, 1)?;
        for (number, body) in (0..).zip(switch(&stream, chosen.into())?) {
            // SAFETY: the body is the node's, and the stream lives.
            unsafe {
                sys::cuStreamBeginCaptureToGraph(
                    side.cu_stream(),
                    body,
                    null(),
                    null(),
                    0,
                    Mode::CU_STREAM_CAPTURE_MODE_RELAXED,
                )
            }
            .result()?;
            let announced = ours.announce_body(&ours_side)?;
            let scratch = memory.alloc_bytes(64 * MIB, &ours_side)?;
            ours_side.fill(scratch.ptr(), number, 64 * MIB)?;
            ours_side.copy(result.ptr(), scratch.ptr(), 1)?;
            drop(scratch);
            let mut same = null_mut();
            // SAFETY: the stream lives, and so does the place that the result goes to.
            unsafe { sys::cuStreamEndCapture(side.cu_stream(), &mut same) }.result()?;
            drop(announced);
        }
        let graph = capture.end()?;
        drop(route);
        assert_eq!(memory.reserved_by_private_pools()[&pool.id()], 64 * MIB, "the bodies share memory");
        with(&ours, [write(&mut result)], |stream, _| graph.launch(stream))?;
        let expected = if chosen < BODIES { chosen } else { 9 };
        assert_eq!(result.item(&ours)?, expected);
    }
    Ok(())
}
