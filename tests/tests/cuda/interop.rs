//! Devices and streams to and from cudarc.

use std::thread;

use aquifer::device::cuda;
use aquifer::device::sim::SimDriver;
use aquifer_tests::prelude::*;
use cudarc::driver::{CudaContext, DevicePtr};

use crate::support::{Gpu, MIB, kind, standin};

#[test]
fn a_context_that_is_not_the_primary_one_is_a_device_of_its_own() {
    let standin = standin().add_device("1GiB").unwrap();
    let Ok(context) = CudaContext::new_non_primary(standin.ordinal() as usize, 0) else {
        eprintln!("skipped: the stand-in has no other contexts");
        return;
    };
    let device = cuda::device_of(context.clone()).unwrap();
    let primary = cuda::shared(standin.ordinal()).unwrap();
    let theirs = cuda::context_of(&primary).unwrap().new_stream().unwrap();
    assert_ne!(device.id(), primary.id());
    assert_eq!(kind(cuda::stream(&device, &theirs)), ErrorKind::InvalidUse, "of another context");
    assert_eq!(kind(cuda::forget_stream(&device, &theirs)), ErrorKind::InvalidUse);
    let adopted = cuda::stream(&device, &context.new_stream().unwrap()).unwrap();
    assert!(adopted.is_idle().unwrap());
}

#[test]
fn a_simulated_device_has_nothing_of_cudarcs() {
    let gpu = Gpu::new();
    let simulated = Device::new(SimDriver::new(SimConfig::default()));
    assert_eq!(kind(cuda::context_of(&simulated)), ErrorKind::Unsupported);
    assert_eq!(kind(cuda::stream_of(simulated.default_stream())), ErrorKind::Unsupported);
    let stream = gpu.context().default_stream();
    assert_eq!(kind(cuda::stream(&simulated, &stream)), ErrorKind::Unsupported);
}

#[test]
fn a_context_that_cudarc_cannot_make_is_an_error() {
    let gpu = Gpu::new();
    standin().fail("cuDeviceGet", 1, Code(999)).unwrap();
    let error = cuda::context_of(&gpu.device).unwrap_err();
    assert!(error.code == Code(999) && error.to_string().contains("cudarc"), "{error}");
    cuda::context_of(&gpu.device).unwrap();
}

#[test]
fn work_of_cudarc_is_ordered_by_ticks_of_the_adopted_stream() {
    let gpu = Gpu::new();
    let theirs = gpu.context().new_stream().unwrap();
    let adopted = cuda::stream(&gpu.device, &theirs).unwrap();
    // cudarc's work is covered by ticks of the adopted stream.
    let ours = gpu.device.stream().unwrap();
    let memory = theirs.clone_htod(&[7_u32; 1024]).unwrap();
    let (ptr, _guard) = memory.device_ptr(&theirs);
    ours.wait_for(&adopted.tick()).unwrap();
    let copy = gpu.device.alloc(4096).unwrap();
    ours.copy(copy, DevicePtr(ptr), 4096).unwrap();
    let mut bytes = [0; 4];
    ours.download_blocking(&mut bytes, copy).unwrap();
    assert_eq!(u32::from_ne_bytes(bytes), 7);
    drop(_guard);
    gpu.assert_no_violation();
}

#[test]
fn default_streams_of_cudarcs_are_those_of_the_device() {
    let gpu = Gpu::new();
    let context = gpu.context();
    let legacy = cuda::stream(&gpu.device, &context.default_stream()).unwrap();
    assert_eq!(legacy.id(), gpu.device.default_stream().id());
    cuda::forget_stream(&gpu.device, &context.default_stream()).unwrap();
    assert!(legacy.is_idle().unwrap());
    let per_thread = cuda::stream(&gpu.device, &context.per_thread_stream()).unwrap();
    assert_eq!(per_thread.id(), gpu.device.per_thread_stream().id());
    assert_eq!(cuda::stream_of(&per_thread).unwrap().cu_stream() as usize, 2);
    assert!(cuda::stream_of(gpu.device.default_stream()).unwrap().cu_stream().is_null());
    thread::scope(|scope| {
        scope.spawn(|| {
            assert_eq!(kind(cuda::stream_of(&per_thread)), ErrorKind::InvalidUse, "another thread's stream");
            assert_ne!(gpu.device.per_thread_stream().id(), per_thread.id());
        });
    });
}

#[test]
fn a_lent_stream_may_outlive_the_device() {
    let Gpu { device, standin } = Gpu::new();
    let lent = cuda::stream_of(&device.stream().unwrap()).unwrap();
    drop(device);
    let memory = lent.clone_htod(&[1_u8, 2, 3]).unwrap();
    assert_eq!(lent.clone_dtoh(&memory).unwrap(), [1, 2, 3]);
    drop(memory);
    drop(lent);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn memory_is_given_up_on_threads_without_a_context() {
    let gpu = Gpu::new();
    let allocator = Allocator::new(&gpu.device, Config::default()).unwrap();
    let stream = gpu.device.stream().unwrap();
    let blocks: Vec<_> = (0..8).map(|_| allocator.alloc_bytes(3 * MIB, &stream).unwrap()).collect();
    let event = gpu.device.create_event(false).unwrap();
    event.record(&stream).unwrap();
    thread::spawn(move || {
        drop(blocks);
        drop(event);
        drop(stream);
        drop(allocator);
    })
    .join()
    .unwrap();
    gpu.device.settle();
    let info = gpu.device.memory_info().unwrap();
    assert_eq!(info.free, info.total);
    let Gpu { device, standin } = gpu;
    thread::spawn(move || drop(device)).join().unwrap();
    assert_eq!(standin.violations(), Vec::<String>::new());
}
