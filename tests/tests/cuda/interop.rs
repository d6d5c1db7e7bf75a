//! Devices and streams to and from cudarc.

use std::sync::Arc;
use std::thread;

use aquifer::device::sim::{SimConfig, SimDriver};
use aquifer::device::{DriverKind, ErrorKind, cuda};
use aquifer::memory::Config;
use aquifer::{Allocator, Device};
use aquifer_device::Code;
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};

use crate::support::{Gpu, MIB, kind, standin};

#[test]
fn a_context_of_cudarcs_becomes_a_device_and_is_kept() {
    let standin = standin().add_device("1GiB").unwrap();
    let context = CudaContext::new(standin.ordinal() as usize).unwrap();
    let device = cuda::device_of(context.clone()).unwrap();
    assert_eq!((device.info().kind, device.info().ordinal), (DriverKind::Cuda, standin.ordinal()));
    assert!(Arc::ptr_eq(&cuda::context_of(&device).unwrap(), &context));
    let held = Arc::strong_count(&context);
    drop(context);
    let stream = device.stream().unwrap();
    let memory = device.alloc(MIB).unwrap();
    stream.fill(memory, 4, MIB).unwrap();
    let mut bytes = [0; 4];
    stream.download_blocking(&mut bytes, memory).unwrap();
    assert_eq!((bytes, held), ([4; 4], 2));
    device.free(memory).unwrap();
}

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
fn the_context_of_a_device_is_one_object_of_cudarcs() {
    let gpu = Gpu::new();
    let context = cuda::context_of(&gpu.device).unwrap();
    assert!(Arc::ptr_eq(&context, &cuda::context_of(&gpu.device).unwrap()));
    assert_eq!(context.cu_ctx(), gpu.context().cu_ctx());
    assert_eq!(context.ordinal(), gpu.standin.ordinal() as usize);
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
fn a_context_that_cudarc_cannot_make_is_an_error_without_a_word_of_the_driver() {
    let gpu = Gpu::new();
    standin().fail("cuDeviceGet", 1, Code(999)).unwrap();
    let error = cuda::context_of(&gpu.device).unwrap_err();
    assert!(error.code == Code(999) && error.to_string().contains("cudarc"), "{error}");
    cuda::context_of(&gpu.device).unwrap();
}

#[test]
fn streams_of_cudarcs_are_adopted_ordered_and_released() {
    let gpu = Gpu::new();
    let theirs = gpu.context().new_stream().unwrap();
    let held = Arc::strong_count(&theirs);
    let adopted = cuda::stream(&gpu.device, &theirs).unwrap();
    assert_eq!(cuda::stream(&gpu.device, &theirs).unwrap().id(), adopted.id(), "adopted once");
    assert_eq!(Arc::strong_count(&theirs), held + 1);
    // cudarc's work is covered by ticks of the adopted stream.
    let ours = gpu.device.stream().unwrap();
    let memory = theirs.clone_htod(&[7_u32; 1024]).unwrap();
    let (ptr, _guard) = memory.device_ptr(&theirs);
    ours.wait_for(&adopted.tick()).unwrap();
    let copy = gpu.device.alloc(4096).unwrap();
    ours.copy(copy, aquifer::device::DevicePtr(ptr), 4096).unwrap();
    let mut bytes = [0; 4];
    ours.download_blocking(&mut bytes, copy).unwrap();
    assert_eq!(u32::from_ne_bytes(bytes), 7);
    let (tick, held) = (adopted.tick(), Arc::strong_count(&theirs));
    cuda::forget_stream(&gpu.device, &theirs).unwrap();
    assert_eq!(Arc::strong_count(&theirs), held - 1, "the reference that kept it alive is gone");
    assert_eq!(kind(adopted.fill(copy, 0, 16)), ErrorKind::InvalidUse, "and so is the right to use it");
    tick.synchronize().unwrap();
    cuda::forget_stream(&gpu.device, &theirs).expect("once is enough");
    // The same stream again has another number: handles of the forgotten one stay dead.
    let again = cuda::stream(&gpu.device, &theirs).unwrap();
    assert_ne!(again.id(), adopted.id());
    assert!(again.is_idle().unwrap());
    drop(_guard);
    gpu.assert_no_violation();
}

#[test]
fn an_adopted_stream_outlives_its_owners_interest() {
    let gpu = Gpu::new();
    let destroyed = || gpu.calls("cuStreamDestroy_v2");
    let theirs = gpu.context().new_stream().unwrap();
    let adopted = cuda::stream(&gpu.device, &theirs).unwrap();
    let before = destroyed();
    drop(theirs);
    assert!(adopted.is_idle().unwrap());
    gpu.device.forget_stream(adopted.raw()).unwrap();
    assert_eq!(destroyed(), before + 1);
    // Until its device is closed.
    let adopted = cuda::stream(&gpu.device, &gpu.context().new_stream().unwrap()).unwrap();
    assert_eq!(destroyed(), before + 1);
    let Gpu { device, standin } = gpu;
    drop(device);
    assert_eq!(standin.calls("cuStreamDestroy_v2").unwrap(), before + 2);
    assert_eq!(kind(adopted.is_idle()), ErrorKind::InvalidUse);
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
fn our_streams_are_lent_to_cudarc_and_destroyed_when_they_are_back() {
    let gpu = Gpu::new();
    let stream = gpu.device.stream().unwrap();
    let lent = cuda::stream_of(&stream).unwrap();
    assert!(Arc::ptr_eq(&lent, &cuda::stream_of(&stream).unwrap()));
    assert_eq!(cuda::stream(&gpu.device, &lent).unwrap().id(), stream.id(), "it is ours already");
    cuda::forget_stream(&gpu.device, &lent).expect("it is not adopted");
    assert!(stream.is_idle().unwrap());
    let mut memory = lent.alloc_zeros::<u8>(4096).unwrap();
    let destroyed = || gpu.calls("cuStreamDestroy_v2");
    let before = destroyed();
    drop(stream);
    assert_eq!(destroyed(), before, "cudarc still has it");
    lent.memcpy_htod(&[3_u8; 4096], &mut memory).unwrap();
    assert_eq!(lent.clone_dtoh(&memory).unwrap(), [3; 4096]);
    let _ = memory.device_ptr_mut(&lent);
    drop(memory);
    drop(lent);
    drop(gpu.device.stream().unwrap());
    assert_eq!(destroyed(), before + 2, "the one lent and the last one");
    gpu.assert_no_violation();
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
