//! A program of cudarc's that knows nothing of Aquifer: two streams, slices that go from one to the
//! other, a kernel. The tests run it with the interposer before the stand-in driver, which tells at
//! the end whether its work was ordered.

use std::error::Error;
use std::ffi::c_char;

use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const N: u32 = 1 << 16;

fn main() -> Result<(), Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let module = context.load_module(Ptx::from_src(include_str!("../../cudarc/examples/arithmetic.ptx")))?;
    let axpy = module.load_function("axpy_f32")?;
    let (one, mut two) = (context.new_stream()?, context.new_stream()?);
    for step in 0..100_u16 {
        let host = vec![f32::from(step); N as usize];
        let x = one.clone_htod(&host)?;
        let mut y = two.alloc_zeros::<f32>(N as usize)?;
        let (alpha, n) = (2.0_f32, u64::from(N));
        let mut launch = two.launch_builder(&axpy);
        launch.arg(&mut y).arg(&x).arg(&alpha).arg(&n);
        // SAFETY: these are the kernel's parameters, and both slices have `n` elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(N)) }?;
        if step % 10 == 0 {
            assert!(two.clone_dtoh(&y)?.iter().all(|&found| found == alpha * f32::from(step)));
        }
        if step % 30 == 29 {
            two = context.new_stream()?; // the other one is destroyed, with work in flight
        }
    }
    context.synchronize()?;
    let (free, total) = cudarc::driver::result::mem_get_info()?;
    print!("{free} of {total} bytes are free");
    match violations()? {
        Some(violations) => println!("; {violations} violations"),
        None => println!(),
    }
    Ok(())
}

/// How long the list of violations is that the stand-in driver found. `None` with another driver.
fn violations() -> Result<Option<usize>, Box<dyn Error>> {
    #[repr(C)]
    struct Buffer {
        start: *mut c_char,
        capacity: usize,
        length: usize,
    }
    // SAFETY: the library is loaded already.
    let driver = unsafe { libloading::Library::new("libcuda.so") }?;
    // SAFETY: the stand-in's function has this signature.
    let ask = unsafe { driver.get::<unsafe extern "C" fn(u32, u32, *mut Buffer) -> u32>(b"standin_violations\0") };
    let Ok(ask) = ask else { return Ok(None) };
    let mut found = Buffer { start: std::ptr::null_mut(), capacity: 0, length: 0 };
    // SAFETY: the buffer outlives the call.
    let code = unsafe { ask(0, 0, &raw mut found) };
    assert_eq!(code, 0);
    Ok(Some(found.length))
}
