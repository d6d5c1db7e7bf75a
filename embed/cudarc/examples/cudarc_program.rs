//! A cudarc program keeps its context, streams and kernels, and takes its memory from Aquifer.
use aquifer::prelude::*;
use aquifer_cudarc::{AllocatorExt, StreamExt};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let context = CudaContext::new(0)?;
    let memory = aquifer_cudarc::allocator(&context)?; // one for the process and this context
    let (a, b) = (context.new_stream()?, context.new_stream()?);
    let axpy = context.load_module(Ptx::from_src(include_str!("arithmetic.ptx")))?.load_function("axpy_f32")?;

    let x = memory.alloc_zeros_on::<f32>(1 << 20, &a)?; // Buffer<f32> on cudarc's stream
    let mut y = memory.alloc_zeros_on::<f32>(1 << 20, &a)?;
    b.with([read(&x), write(&mut y)], |stream, [x, y]| {
        let (y, x, alpha, n) = (y.device_ptr(), x.device_ptr(), 1.0_f32, 1_u64 << 20);
        let mut launch = stream.launch_builder(&axpy);
        // SAFETY: these are the kernel's parameters, and both buffers have `n` elements.
        unsafe { launch.arg(&y).arg(&x).arg(&alpha).arg(&n).launch(LaunchConfig::for_num_elems(1 << 20)) }.map(drop)
    })?;

    let slice = memory.alloc_slice_zeros::<f32>(1 << 20, &a)?; // Deref<Target = CudaSlice<f32>>: goes wherever cudarc's own goes
    let host: Vec<f32> = a.clone_dtoh(&*slice)?;
    assert_eq!(host.len(), 1 << 20);
    println!("{}", memory.summary());
    Ok(())
}
