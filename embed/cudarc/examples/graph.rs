//! A step of cudarc's is captured once and launched many times. Its memory comes from Aquifer.
use aquifer::prelude::*;
use aquifer_cudarc::{AllocatorExt, StreamExt};
use cudarc::driver::sys::{CUgraphInstantiate_flags as Flags, CUstreamCaptureMode as Mode};
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;
use std::sync::Arc;

const N: u32 = 1 << 16;

/// `y += alpha * x`
fn axpy(kernel: &CudaFunction, on: &Arc<CudaStream>, y: u64, alpha: f32, x: u64) -> Result<(), DriverError> {
    let n = u64::from(N);
    let mut launch = on.launch_builder(kernel);
    // SAFETY: these are the kernel's parameters, and both buffers have `n` elements.
    unsafe { launch.arg(&y).arg(&x).arg(&alpha).arg(&n).launch(LaunchConfig::for_num_elems(N)) }.map(drop)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = CudaContext::new(0)?;
    let (memory, stream, other) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?, context.new_stream()?);
    let kernel = context.load_module(Ptx::from_src(include_str!("arithmetic.ptx")))?.load_function("axpy_f32")?;
    let ours = aquifer_cudarc::stream(&stream)?;
    let mut gradient = memory.from_slice(&[1.0_f32; N as usize], &ours)?; // a parameter
    let mut weights = memory.alloc_zeros_on::<f32>(N as usize, &stream)?;

    let capture = memory.begin_capture(&stream, Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let mut scaled = memory.alloc_zeros_on::<f32>(N as usize, &stream)?; // of the graph's pool
    stream.with([write(&mut scaled), read(&gradient)], |on, [scaled, gradient]| {
        axpy(&kernel, on, scaled.device_ptr(), 0.5, gradient.device_ptr())
    })?;
    stream.with([write(&mut weights), read(&scaled)], |on, [weights, scaled]| {
        axpy(&kernel, on, weights.device_ptr(), -1.0, scaled.device_ptr())
    })?;
    drop(scaled); // each launch uses it again
    let graph = capture.end(Flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, ())?;

    for step in 0..10_u8 {
        graph.graph().update(&mut gradient, vec![f32::from(step); N as usize], &ours)?;
        graph.launch_on(if step % 2 == 0 { &stream } else { &other })?; // ordered with the update, and among each other
    }
    assert_eq!(weights.slice(..1).item(&ours)?, -22.5);
    println!("ten launches of one graph: the weights are -22.5");
    Ok(())
}
