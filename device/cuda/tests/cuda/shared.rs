//! One device per context in a process.

use std::sync::{Arc, Barrier};
use std::thread;

use aquifer_cuda::{self as cuda, CudaDriver};
use aquifer_device::{Code, Device};
use aquifer_standin::{Number, StandinDevice};
use cudarc::driver::CudaContext;

use crate::bench::{MIB, standin};

fn gpu() -> StandinDevice {
    standin().add_device("1GiB").unwrap()
}

/// How often the primary context is retained.
fn retained(gpu: &StandinDevice) -> u64 {
    gpu.number(Number::Retained)
}

#[test]
fn a_gpu_that_is_opened_twice_is_one_device() {
    let gpu = gpu();
    let (one, two) = (cuda::shared(gpu.ordinal()).unwrap(), cuda::shared(gpu.ordinal()).unwrap());
    assert_eq!((one.id(), retained(&gpu)), (two.id(), 1));
    // What one handle knows the other one knows.
    let (stream, memory) = (one.stream().unwrap(), one.alloc(MIB).unwrap());
    stream.fill(memory, 1, MIB).unwrap();
    let other = two.stream().unwrap();
    other.wait_for(&stream.tick()).unwrap();
    other.fill(memory, 2, MIB).unwrap();
    drop(one);
    two.synchronize().unwrap();
    two.free(memory).unwrap();
    assert_eq!(gpu.violations(), Vec::<String>::new());
}

#[test]
fn the_last_handle_closes_a_device_and_the_next_open_makes_a_new_one() {
    let gpu = gpu();
    let device = cuda::shared(gpu.ordinal()).unwrap();
    let (id, clone) = (device.id(), device.clone());
    drop(device);
    assert_eq!(cuda::shared(gpu.ordinal()).unwrap().id(), id);
    drop(clone);
    assert_eq!(retained(&gpu), 0);
    let again = cuda::shared(gpu.ordinal()).unwrap();
    assert!(again.id() != id && retained(&gpu) == 1);
    assert!(again.stream().unwrap().is_idle().unwrap());
}

#[test]
fn different_gpus_are_different_devices() {
    let (one, two) = (gpu(), gpu());
    assert_ne!(cuda::shared(one.ordinal()).unwrap().id(), cuda::shared(two.ordinal()).unwrap().id());
    // The stand-in's own GPU is listed; added ones are not counted.
    let listed: Vec<u32> = cuda::gpus().unwrap().iter().map(|gpu| gpu.ordinal).collect();
    assert!(listed.contains(&0) && !listed.contains(&one.ordinal()));
}

#[test]
fn a_device_of_a_driver_is_another_one() {
    let gpu = gpu();
    let shared = cuda::shared(gpu.ordinal()).unwrap();
    let own = Device::new(CudaDriver::open(gpu.ordinal()).unwrap());
    assert_ne!(own.id(), shared.id());
    drop(shared);
    assert_ne!(cuda::shared(gpu.ordinal()).unwrap().id(), own.id());
}

#[test]
fn the_primary_context_has_one_device_however_it_is_opened() {
    let gpu = gpu();
    let context = || CudaContext::new(gpu.ordinal() as usize).unwrap();
    let opened = cuda::shared(gpu.ordinal()).unwrap();
    let ours = context();
    let lent = cuda::device_of(ours.clone()).unwrap();
    assert_eq!(lent.id(), opened.id());
    assert!(Arc::ptr_eq(&cuda::context_of(&opened).unwrap(), &ours), "the caller's object, as there was none");
    // Another object of the context changes nothing.
    assert_eq!(cuda::device_of(context()).unwrap().id(), opened.id());
    assert!(Arc::ptr_eq(&cuda::context_of(&opened).unwrap(), &ours));
    drop((opened, lent));
    // The other way round.
    let lent = cuda::device_of(ours).unwrap();
    let opened = cuda::shared(gpu.ordinal()).unwrap();
    assert_eq!(lent.id(), opened.id());
    drop(lent);
    assert!(opened.stream().unwrap().is_idle().unwrap(), "each handle keeps the context");
}

#[test]
fn another_context_of_a_gpu_is_another_device() {
    let gpu = gpu();
    let context = CudaContext::new_non_primary(gpu.ordinal() as usize, 0).unwrap();
    let (device, primary) = (cuda::device_of(context.clone()).unwrap(), cuda::shared(gpu.ordinal()).unwrap());
    assert_ne!(device.id(), primary.id());
    let again = cuda::device_of(context).unwrap();
    assert_eq!(again.id(), device.id());
    // A context that comes after may have the handle of one that is gone.
    let id = device.id();
    drop((device, again));
    let context = CudaContext::new_non_primary(gpu.ordinal() as usize, 0).unwrap();
    let later = cuda::device_of(context).unwrap();
    assert!(later.id() != id && later.stream().unwrap().is_idle().unwrap());
}

#[test]
fn threads_that_open_a_gpu_at_the_same_time_get_one_device() {
    const THREADS: usize = 4;
    let gpu = gpu();
    let barrier = Barrier::new(THREADS);
    for round in 0..200 {
        let open = |thread: usize| {
            barrier.wait();
            let device = match (thread + round) % 3 {
                0 => cuda::device_of(CudaContext::new(gpu.ordinal() as usize).unwrap()).unwrap(),
                _ => cuda::shared(gpu.ordinal()).unwrap(),
            };
            // No thread closes it before all have opened it.
            barrier.wait();
            device.id()
        };
        let open = &open;
        let ids: Vec<_> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS).map(|thread| scope.spawn(move || open(thread))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(ids.iter().all(|id| *id == ids[0]), "{ids:?}");
    }
    assert_eq!(gpu.violations(), Vec::<String>::new());
}

/// While one thread drops the last handle, another one opens the GPU.
#[test]
fn a_device_that_is_closed_and_opened_at_the_same_time_works() {
    let gpu = gpu();
    let open_and_close = || {
        for _ in 0..200 {
            let device = cuda::shared(gpu.ordinal()).unwrap();
            let (stream, memory) = (device.stream().unwrap(), device.alloc(4096).unwrap());
            stream.fill(memory, 1, 4096).unwrap();
            stream.synchronize().unwrap();
            device.free(memory).unwrap();
        }
    };
    thread::scope(|scope| {
        scope.spawn(open_and_close);
        scope.spawn(open_and_close);
    });
    assert_eq!((retained(&gpu), gpu.violations()), (0, Vec::new()));
}

#[test]
fn a_gpu_that_could_not_be_opened_is_opened_later() {
    let gpu = gpu();
    for function in ["cuDevicePrimaryCtxRetain", "cuCtxGetStreamPriorityRange"] {
        standin().fail(function, 1, Code(999)).unwrap();
        assert_eq!(cuda::shared(gpu.ordinal()).unwrap_err().code, Code(999), "{function}");
        assert_eq!(retained(&gpu), 0, "{function}");
        assert!(cuda::shared(gpu.ordinal()).unwrap().stream().is_ok());
    }
}

#[test]
fn a_context_that_is_lent_later_stays_current_where_it_was() {
    let (gpu, other) = (gpu(), gpu());
    let device = cuda::shared(gpu.ordinal()).unwrap();
    cuda::context_of(&device).unwrap();
    let context = CudaContext::new(gpu.ordinal() as usize).unwrap();
    let theirs = CudaContext::new(other.ordinal() as usize).unwrap();
    theirs.bind_to_thread().unwrap();
    // The object is dropped, as there is one already.
    drop(cuda::device_of(context).unwrap());
    let current = cudarc::driver::result::ctx::get_current().unwrap();
    assert_eq!(current, Some(theirs.cu_ctx()));
    assert!(device.driver().memory_info().is_ok());
}
