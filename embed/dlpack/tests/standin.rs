//! Device memory to and from other libraries, on the stand-in driver and watched by its race
//! detector.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use aquifer::device::cuda;
use aquifer::prelude::*;
use aquifer_dlpack::{Dlpack, Error, export_buffer, export_tensor, import_buffer, import_tensor};
use aquifer_standin::StandinDevice;
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;

struct Gpu {
    memory: Allocator,
    device: Device,
    standin: StandinDevice,
}

impl Gpu {
    fn new() -> Gpu {
        let standin = aquifer_standin::load().unwrap().add_device("256MiB,seed=5").unwrap();
        let device = cuda::shared(standin.ordinal()).unwrap();
        Gpu { memory: Allocator::of(&device).unwrap(), device, standin }
    }
}

#[test]
fn memory_is_shared_and_ordered_between_two_libraries() {
    let gpu = Gpu::new();
    let [ours, theirs] = [(); 2].map(|()| gpu.device.stream().unwrap());
    for step in 0..40 {
        let mut buffer = gpu.memory.alloc::<f32>(1000, &ours).unwrap();
        buffer.fill(step as f32, &ours).unwrap();
        let exported = export_buffer(&buffer, &theirs).unwrap();
        // SAFETY: it describes the buffer above.
        let mut imported = unsafe { import_buffer::<f32>(exported, &gpu.memory, &theirs) }.unwrap();
        assert_eq!(imported.ptr(), buffer.ptr());
        imported
            .axpy(1.0, &buffer.like(&theirs).and_then(|mut one| one.zero(&theirs).map(|()| one)).unwrap(), &theirs)
            .unwrap();
        if step % 2 == 0 {
            drop(imported);
            buffer.fill(0.0, &ours).unwrap();
        } else {
            // The other library may keep it for longer than we do.
            drop(buffer);
            assert_eq!(imported.to_vec(&theirs).unwrap(), vec![step as f32; 1000]);
        }
    }
    gpu.device.synchronize().unwrap();
    assert_eq!(gpu.standin.violations(), Vec::<String>::new());
    assert_eq!(gpu.memory.memory_allocated(), 0);
}

#[test]
fn tensors_keep_their_shape_and_elements() {
    let gpu = Gpu::new();
    let stream = gpu.device.stream().unwrap();
    let host = Tensor::from_vec((0..24_i64).collect(), &[2, 3, 4]).unwrap();
    let device = host.to((&gpu.memory, &stream)).unwrap().wait().unwrap();
    for tensor in [&host, &device] {
        let exported = export_tensor(tensor, &stream).unwrap();
        assert_eq!(exported.validate().unwrap().shape(), [2, 3, 4]);
        // SAFETY: it describes the tensor above.
        let again = unsafe { import_tensor(exported, &gpu.memory, &stream) }.unwrap();
        assert_eq!((again.shape(), again.dtype()), (tensor.shape(), tensor.dtype()));
        assert_eq!(again.to_vec::<i64>().unwrap(), (0..24).collect::<Vec<i64>>());
    }
    let empty = Tensor::from_vec(Vec::<f32>::new(), &[0, 4]).unwrap();
    for tensor in [empty.clone(), empty.to(&gpu.memory).unwrap().wait().unwrap()] {
        // SAFETY: it describes the tensor above.
        let again = unsafe { import_tensor(export_tensor(&tensor, &stream).unwrap(), &gpu.memory, &stream) }.unwrap();
        assert_eq!(again.shape(), [0, 4]);
    }
    assert_eq!(gpu.standin.violations(), Vec::<String>::new());
}

/// A tensor that counts its deletion.
struct Foreign(Arc<AtomicUsize>);

impl Drop for Foreign {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn foreign(
    deleted: &Arc<AtomicUsize>,
    start: u64,
    (shape, strides): (&[i64], &[i64]),
    device: DLDevice,
    dtype: DLDataType,
) -> Dlpack {
    let prepared = Dynamic::new(shape, strides).prepare_as::<DLManagedTensorVersioned>().unwrap();
    let mut tensor = prepared.initialize(Box::new(Foreign(deleted.clone())));
    tensor.set_device(device).set_dtype(dtype).set_data(start as *mut c_void);
    // SAFETY: tests look at the description alone, or pass memory that is there.
    unsafe { tensor.finish() }
}

#[test]
fn what_is_refused_goes_back_to_its_producer() {
    let gpu = Gpu::new();
    let stream = gpu.device.stream().unwrap();
    let here = DLDevice::cuda(i32::try_from(gpu.standin.ordinal()).unwrap());
    let cases = [
        (DLDevice::cuda(99), &[2, 1], DLDataType::F32, "is on DLPack device"),
        (here, &[1, 2], DLDataType::F32, "with strides [1, 2] cannot be imported; make it contiguous first"),
        (here, &[2, 1], DLDataType::BOOL, "cannot be handed over here"),
    ];
    let deleted = Arc::new(AtomicUsize::new(0));
    for (at, (device, strides, dtype, text)) in cases.into_iter().enumerate() {
        let tensor = foreign(&deleted, 4096, (&[2, 2], strides), device, dtype);
        // SAFETY: nothing is done with the memory.
        let error = unsafe { import_tensor(tensor, &gpu.memory, &stream) }.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(deleted.load(Ordering::Relaxed), at + 1);
    }
    let tensor = foreign(&deleted, 4096, (&[2, 2], &[2, 1]), here, DLDataType::F32);
    // SAFETY: nothing is done with the memory.
    let error = unsafe { import_buffer::<i32>(tensor, &gpu.memory, &stream) }.unwrap_err();
    assert!(matches!(error, Error::DType { .. }), "{error}");

    let simulated = aquifer::open("sim:1GiB").unwrap();
    let (memory, stream) = (Allocator::of(&simulated).unwrap(), simulated.stream().unwrap());
    let refused = export_buffer(&memory.alloc::<f32>(4, &stream).unwrap(), &stream);
    assert!(matches!(refused, Err(Error::Simulated { .. })));
}

/// As PyTorch exports a batch of one.
#[test]
fn strides_of_dimensions_with_one_element_mean_nothing() {
    let gpu = Gpu::new();
    let stream = gpu.device.stream().unwrap();
    let here = DLDevice::cuda(i32::try_from(gpu.standin.ordinal()).unwrap());
    let host = [1.0_f32, 2.0, 3.0, 4.0];
    let buffer = gpu.memory.from_slice(&host, &stream).unwrap();
    let layouts: [(&[i64], &[i64]); 4] =
        [(&[1, 4], &[1, 1]), (&[2, 1, 2], &[2, 77, 1]), (&[1, 1], &[0, -5]), (&[0, 3], &[7, 7])];
    let deleted = Arc::new(AtomicUsize::new(0));
    for (shape, strides) in layouts {
        for (start, device) in [(buffer.ptr().0, here), (host.as_ptr() as u64, DLDevice::CPU)] {
            let tensor = foreign(&deleted, start, (shape, strides), device, DLDataType::F32);
            // SAFETY: the memory has four elements, which nothing writes.
            let tensor = unsafe { import_tensor(tensor, &gpu.memory, &stream) }.unwrap();
            let elements = tensor.to_vec::<f32>().unwrap();
            assert_eq!(elements, host[..elements.len()]);
            assert_eq!(elements.len() as i64, shape.iter().product::<i64>());
        }
    }
    assert_eq!(deleted.load(Ordering::Relaxed), 8);
    // One past an element.
    let tensor = foreign(&deleted, host.as_ptr() as u64 + 1, (&[1], &[1]), DLDevice::CPU, DLDataType::F32);
    // SAFETY: nothing is done with the memory.
    let error = unsafe { import_tensor(tensor, &gpu.memory, &stream) }.unwrap_err();
    assert!(matches!(error, Error::Malformed(_)), "{error}");
    gpu.device.synchronize().unwrap();
    assert_eq!(gpu.standin.violations(), Vec::<String>::new());
}

#[test]
fn the_producer_gets_its_memory_back_once_the_device_is_done() {
    let gpu = Gpu::new();
    let stream = gpu.device.stream().unwrap();
    let here = DLDevice::cuda(i32::try_from(gpu.standin.ordinal()).unwrap());
    let theirs = gpu.memory.alloc_zeros::<f32>(4, &stream).unwrap();
    let deleted = Arc::new(AtomicUsize::new(0));
    let tensor = foreign(&deleted, theirs.ptr().0, (&[2, 2], &[2, 1]), here, DLDataType::F32);
    // SAFETY: the memory is that of `theirs`, which nothing else uses.
    let mut imported = unsafe { import_buffer::<f32>(tensor, &gpu.memory, &stream) }.unwrap();
    let again = imported.share();
    imported.fill(2.0, &stream).unwrap();
    drop(imported);
    assert_eq!(deleted.load(Ordering::Relaxed), 0);
    drop(again);
    assert_eq!(deleted.load(Ordering::Relaxed), 1);
    assert!(stream.is_idle().unwrap(), "the drop waited");
    assert_eq!(gpu.standin.violations(), Vec::<String>::new());
}
