//! An ordinary cudarc program on the patched cudarc, on the stand-in driver and watched by its race
//! detector.
#![cfg(target_os = "linux")]

mod support;

use std::thread;

use cudarc::driver::{CudaContext, DriverError, sys};
use support::{Gpu, filled, value_of};

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

/// Without cudarc's event tracking, as programs capture.
#[test]
fn graphs_of_cudarc_have_memory_of_their_own() {
    let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=3").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    let memory = aquifer_cudarc_hook::install(&context).unwrap();
    let stream = context.new_stream().unwrap();
    // SAFETY: one stream uses what is allocated here.
    unsafe { context.disable_event_tracking() };
    const N: usize = 1 << 12;
    const FLAGS: sys::CUgraphInstantiate_flags =
        sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let begin = || stream.begin_capture(sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    // Free memory of the default pool, which the capture must not get.
    drop(stream.clone_htod(&[1.0_f32; N]).unwrap());
    let before = stream.clone_htod(&[3.0_f32; N]).unwrap();

    begin();
    let mut temporary = stream.alloc_zeros::<f32>(N).unwrap();
    stream.memcpy_dtod(&before, &mut temporary).unwrap();
    drop(before);
    let mut output = stream.alloc_zeros::<f32>(N).unwrap();
    stream.memcpy_dtod(&temporary, &mut output).unwrap();
    drop(temporary);
    let graph = stream.end_capture(FLAGS).unwrap().unwrap();

    for _ in 0..5 {
        let others: Vec<_> = (0..40).map(|_| stream.clone_htod(&[7.0_f32; N]).unwrap()).collect();
        assert!(stream.alloc_zeros::<u8>(1 << 30).is_err());
        memory.empty_cache().unwrap();
        graph.launch().unwrap();
        assert!(others.iter().all(|other| stream.clone_dtoh(other).unwrap() == [7.0; N]));
        assert_eq!(stream.clone_dtoh(&output).unwrap(), [3.0; N]);
    }

    // A capture that breaks leaves nothing behind.
    let held = memory.memory_reserved();
    begin();
    let lost = stream.alloc_zeros::<f32>(1 << 20).unwrap();
    assert!(stream.synchronize().is_err());
    let broken = stream.end_capture(FLAGS).err().unwrap();
    assert_eq!(broken, DriverError(sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    drop(lost);
    standin.run_destructors();
    memory.empty_cache().unwrap();
    assert_eq!(memory.memory_reserved(), held);
    begin();
    stream.end_capture(FLAGS).unwrap().unwrap().launch().unwrap();

    drop((graph, output));
    context.synchronize().unwrap();
    standin.run_destructors();
    memory.empty_cache().unwrap();
    assert_eq!((memory.memory_allocated(), memory.memory_reserved()), (0, 0), "{}", memory.summary());
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn slices_may_be_dropped_on_threads_without_a_context() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    for _ in 0..3 {
        let slice = filled(&stream, 200 << 20, 1);
        thread::spawn(|| drop(slice)).join().unwrap();
        gpu.context.check_err().unwrap();
    }
    gpu.assert_all_is_back();
}

#[test]
fn slices_are_copied_between_devices() {
    let (one, two) = (Gpu::new(), Gpu::new());
    let (from, to) = (one.stream(), two.stream());
    for value in 1..5 {
        let slice = filled(&from, 100 << 20, value);
        let copy = to.clone_dtod(&slice).unwrap();
        assert_eq!(value_of(&copy), value);
        drop(slice);
    }
    assert!(one.memory.memory_reserved() < 200 << 20, "each has memory of its own");
    one.assert_all_is_back();
    two.assert_all_is_back();
}
