//! Both ways, on the stand-in driver and watched by its race detector. No kernel of cutile's runs
//! there.
#![cfg(target_os = "linux")]

use aquifer::prelude::*;
use aquifer_cutile::{Adopted, import, lend};
use aquifer_standin::StandinDevice;
use cuda_core::RawDeviceBuffer;
use cuda_core::memory::{malloc_sync, memset_d8_async};
use cutile::tensor::Tensor;

const LEN: usize = 1 << 16;
const BYTES: usize = LEN * 4;
/// A value of four bytes that are 1.
const ONES: u32 = 0x0101_0101;

fn open() -> (StandinDevice, Device, Allocator) {
    let standin = aquifer_standin::load().unwrap().add_device("64MiB,seed=3").unwrap();
    let device = aquifer::device::cuda::shared(standin.ordinal()).unwrap();
    let memory = Allocator::of(&device).unwrap();
    (standin, device, memory)
}

#[test]
fn tensors_of_cutile_lie_in_memory_of_aquifer_which_outlives_the_buffer() {
    let (standin, device, memory) = open();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let theirs = aquifer_cutile::stream(&device, &stream).unwrap();
    let (_elsewhere, elsewhere, _) = open();
    assert!(aquifer_cutile::stream(&elsewhere, &stream).unwrap_err().to_string().contains("another device"));
    let mut buffer = memory.alloc_zeros::<u32>(LEN, &other).unwrap();
    let lent = lend(&buffer).unwrap();
    assert_eq!((lent.len_bytes(), lent.device_id()), (BYTES, standin.ordinal() as usize));
    let tensor = with(&stream, [write(&mut buffer)], |_, _| {
        // SAFETY: `with` orders what is enqueued on `theirs` here with all other work.
        let tensor = unsafe { Tensor::<u32>::from_foreign(lent, vec![LEN as i32], vec![1]) };
        theirs.context().bind_to_thread().unwrap();
        // SAFETY: the tensor has so many bytes.
        unsafe { memset_d8_async(tensor.device_pointer().cu_deviceptr(), 1, BYTES, theirs.cu_stream()) }.unwrap();
        Ok::<_, aquifer::Error>(tensor)
    })
    .unwrap();
    assert_eq!(buffer.to_vec(&other).unwrap(), vec![ONES; LEN]);
    drop(buffer);
    assert_eq!(memory.memory_allocated(), BYTES as u64, "the tensor keeps it");
    drop(tensor);
    assert_eq!(memory.memory_allocated(), 0);
    drop(theirs);
    assert_eq!(standin.violations(), Vec::<String>::new());
}

#[test]
fn memory_and_streams_of_cuda_core_serve_aquifer() {
    let (standin, device, memory) = open();
    let context = cuda_core::Context::new(standin.ordinal() as usize).unwrap();
    let theirs = context.new_stream().unwrap();
    // SAFETY: it is the device's primary context.
    let adopted = unsafe { Adopted::new(&device, &theirs) };
    context.bind_to_thread().unwrap();
    // SAFETY: it is written before it is read.
    let ptr = unsafe { malloc_sync(BYTES) }.unwrap();
    // SAFETY: the memory is there, and nothing else has it.
    let owned = unsafe { RawDeviceBuffer::from_raw_parts(ptr, BYTES, context.clone()) };
    // SAFETY: as above.
    unsafe { memset_d8_async(ptr, 1, BYTES, theirs.cu_stream()) }.unwrap();
    let view = owned.slice_bytes(0, BYTES).unwrap();
    // SAFETY: only the buffer uses it, after the work on `theirs`.
    let buffer = unsafe { import::<u32>(view, &memory, adopted.stream()) }.unwrap();
    let other = device.stream().unwrap();
    assert_eq!(buffer.to_vec(&other).unwrap(), vec![ONES; LEN]);
    assert!(!owned.is_unique());
    drop(buffer);
    assert!(owned.is_unique());
    drop((owned, adopted, theirs));
    assert_eq!(standin.violations(), Vec::<String>::new());
}
