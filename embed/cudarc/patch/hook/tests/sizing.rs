//! Engines size a cache by what the context has free once the model is loaded.
#![cfg(target_os = "linux")]

mod support;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as GLOBAL;
use support::Gpu;

const MIB: usize = 1 << 20;

/// What the context has free after a program that leaves 820 MiB in use, and whether a cache of
/// about that size is served.
fn free_after_loading(is_hooked: bool) -> usize {
    let standin = aquifer_standin::load().unwrap().add_device("4GiB,seed=3").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    let _memory = is_hooked.then(|| aquifer_cudarc_hook::install(&context).unwrap());
    let stream = context.default_stream();
    // SAFETY: the contents do not matter.
    let alloc = |mib| unsafe { stream.alloc::<u8>(mib * MIB) };
    let mut weights = Vec::new();
    for _ in 0..20 {
        let transient = alloc(64).unwrap(); // what a layer is converted from
        weights.extend([alloc(40).unwrap(), alloc(1).unwrap()]);
        drop(transient);
    }
    drop((0..20).map(|_| alloc(64).unwrap()).collect::<Vec<_>>());
    context.synchronize().unwrap();
    let (free, total) = context.mem_get_info().unwrap();
    assert_eq!(total, 4096 * MIB);
    alloc(free / MIB - 64).unwrap();
    free / MIB
}

#[test]
fn a_cache_has_the_size_that_it_has_without_the_hook() {
    let (before, now) = (free_after_loading(false), free_after_loading(true));
    assert_eq!(before, 3276);
    assert!(before - now <= before / 50, "{now} for {before}");
}

#[test]
fn memory_in_use_in_part_is_not_free() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    let mut pieces: Vec<_> = (0..70).map(|_| Some(stream.alloc_zeros::<u8>(3 * MIB).unwrap())).collect();
    pieces.iter_mut().step_by(2).for_each(|piece| *piece = None);
    let (free, _) = gpu.context.mem_get_info().unwrap();
    assert!(free < (256 - 35 * 3) * MIB);
    stream.alloc_zeros::<u8>(free / (2 * MIB) * 2 * MIB).unwrap();
}

#[test]
fn a_trim_gives_the_cache_to_other_libraries() {
    let gpu = Gpu::new();
    let stream = gpu.stream();
    drop(stream.alloc_zeros::<u8>(200 * MIB).unwrap());
    let free = || cudarc::driver::result::mem_get_info().unwrap().0 / MIB;
    assert!(free() <= 56);
    // While a stream captures, it goes back neither by calls that would break the capture.
    stream.begin_capture(GLOBAL).unwrap();
    gpu.context.trim().unwrap();
    let in_capture = gpu.context.mem_get_info().unwrap().0 / MIB;
    assert!(stream.end_capture(support::FLAGS).unwrap().is_some());
    assert_eq!(in_capture, gpu.context.mem_get_info().unwrap().0 / MIB);
    gpu.context.trim().unwrap();
    assert_eq!(free(), 256);
    gpu.assert_all_is_back();
}

#[test]
fn an_error_leaves_its_message() {
    let gpu = Gpu::new();
    let allocator = gpu.context.allocator().unwrap();
    assert_eq!(allocator.last_error(), None);
    gpu.stream().alloc_zeros::<u8>(1 << 30).unwrap_err();
    let message = allocator.last_error().unwrap();
    assert!(message.contains("1.00 GiB") && message.contains("256.00 MiB"), "{message}");
}
