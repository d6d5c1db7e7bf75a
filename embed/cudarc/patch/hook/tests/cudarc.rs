//! An ordinary cudarc program on the patched cudarc, on the stand-in driver and watched by its race
//! detector.
#![cfg(target_os = "linux")]

use cudarc::driver::{CudaContext, DriverError, sys};

#[test]
fn slices_come_from_aquifer_and_go_back_in_order() {
    let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    let before = context.default_stream().alloc_zeros::<u8>(1000).unwrap();
    let memory = aquifer_cudarc_hook::install(&context).unwrap();
    aquifer_cudarc_hook::install(&context).unwrap();
    let driver_calls = || standin.calls("cuMemAllocAsync").unwrap() + standin.calls("cuMemFreeAsync").unwrap();
    drop(before);
    let calls = driver_calls();
    let [one, two] = [(); 2].map(|()| context.new_stream().unwrap());
    for step in 0..100_usize {
        let (on, other) = if step % 2 == 0 { (&one, &two) } else { (&two, &one) };
        let x = on.clone_htod(&vec![step as f32; 1 << 12]).unwrap();
        let mut y = other.alloc_zeros::<f32>(1 << 12).unwrap();
        other.memcpy_dtod(&x, &mut y).unwrap();
        assert_eq!(other.clone_dtoh(&y).unwrap()[7], step as f32);
        // Both are dropped with what the other stream does ordered by cudarc's events.
        let empty = on.alloc_zeros::<f32>(0);
        assert!(empty.is_ok() || empty.is_err(), "as without the hook");
    }
    assert!(memory.stats().allocation.all.allocated >= 200, "{}", memory.summary());
    assert_eq!(memory.memory_allocated(), 0);
    let full = one.alloc_zeros::<u8>(1 << 30).unwrap_err();
    assert_eq!(full, DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    assert!(driver_calls() - calls <= 200, "empty slices alone go to the driver");
    assert_eq!(standin.violations(), Vec::<String>::new());
}
