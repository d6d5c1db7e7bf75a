//! A step of cudarc's is captured once and launched many times. Its buffers come from Aquifer.
use aquifer::prelude::*;
use aquifer_cudarc::{AllocatorExt, StreamExt};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    const N: u32 = 1 << 16;
    let context = CudaContext::new(0)?;
    let (memory, stream) = (aquifer_cudarc::allocator(&context)?, context.new_stream()?);
    let axpy = context.load_module(Ptx::from_src(include_str!("arithmetic.ptx")))?.load_function("axpy_f32")?;
    let ours = aquifer_cudarc::stream(&stream)?;
    let gradient = memory.from_slice(&[1.0_f32; N as usize], &ours)?;
    let mut weights = memory.alloc_zeros_on::<f32>(N as usize, &stream)?;

    let capture = ours.begin_capture()?;
    stream.with([read(&gradient), write(&mut weights)], |stream, [gradient, weights]| {
        let (weights, gradient, alpha, n) = (weights.device_ptr(), gradient.device_ptr(), -0.5_f32, u64::from(N));
        let mut launch = stream.launch_builder(&axpy);
        // SAFETY: these are the kernel's parameters, and both buffers have `n` elements.
        unsafe { launch.arg(&weights).arg(&gradient).arg(&alpha).arg(&n).launch(LaunchConfig::for_num_elems(N)) }
            .map(drop)
    })?;
    let graph = capture.end()?;

    for _ in 0..10 {
        // The graph uses its buffers like any other work: this orders it with what other streams do
        // with them.
        with(&ours, [read(&gradient), write(&mut weights)], |stream, _| graph.launch(stream))?;
    }
    assert_eq!(weights.slice(..1).item(&ours)?, -5.0);
    println!("ten launches of one graph: the weights are -5");
    Ok(())
}
