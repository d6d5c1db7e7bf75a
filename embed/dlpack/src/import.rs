//! From other libraries.

use aquifer::device::{DevicePtr, Tick, cuda};
use aquifer::kernels::DType;
use aquifer::kernels::Element;
use aquifer::{Allocator, Buffer, Stream, Tensor};
use dlpark::ffi::DLDeviceType;
use dlpark::{DlpackElement, TensorRef};

use crate::{Dlpack, Error, data_type, typed};

/// Imports device memory as a buffer of all its elements. The data is ready on `stream`.
///
/// Dropping the last handle waits on the host for work that uses the memory, and then gives it back
/// to its producer.
///
/// # Safety
/// The tensor is what it says: its memory is there, and nothing else writes it. What is read-only
/// must not be written.
///
/// # Errors
/// A tensor on another device than the allocator's, of other elements than `T`, or not in row-major
/// order; a stream of another device.
pub unsafe fn import_buffer<T: DlpackElement + Copy>(
    dlpack: Dlpack,
    memory: &Allocator,
    stream: &Stream,
) -> Result<Buffer<T>, Error> {
    let tensor = dlpack.validate()?;
    if !tensor.dtype().is::<T>() {
        return Err(Error::DType { dtype: format!("{:?}", tensor.dtype()) });
    }
    let (device, info) = (tensor.device(), memory.device().info());
    let is_here = device.device_type == DLDeviceType::CUDA && i64::from(device.device_id) == i64::from(info.ordinal);
    if !is_here || info.kind != cuda::KIND {
        return Err(Error::WrongDevice {
            is: format!("{:?}:{}", device.device_type, device.device_id),
            needed: memory.device().label().to_string(),
        });
    }
    check_compact(&tensor)?;
    let len = tensor.num_elements();
    // SAFETY: the caller promises that the memory is there.
    let ptr = if len == 0 { 0 } else { unsafe { tensor.offset_data_ptr::<T>() }?.addr() as u64 };
    Ok(memory.import(DevicePtr(ptr), len, stream, move |ticks: &[Tick]| {
        // Memory that may be in use is better lost than reused.
        if ticks.iter().all(|tick| tick.synchronize().is_ok()) {
            drop(dlpack);
        } else {
            std::mem::forget(dlpack);
        }
    })?)
}

/// Imports a tensor, which shares the memory: device memory as [`import_buffer`] does, and host
/// memory, which needs no stream.
///
/// # Safety
/// As [`import_buffer`].
///
/// # Errors
/// As [`import_buffer`], and elements that Aquifer does not know.
pub unsafe fn import_tensor(dlpack: Dlpack, memory: &Allocator, stream: &Stream) -> Result<Tensor, Error> {
    let is = dlpack.validate()?.dtype();
    let known = DType::ALL.iter().find(|&&known| data_type(known).is_some_and(|known| known.matches(is)));
    let Some(&dtype) = known else { return Err(Error::DType { dtype: format!("{is:?}") }) };
    typed!(dtype, import_typed::<T>(dlpack, memory, stream))
}

fn import_typed<T: Element + DlpackElement>(
    dlpack: Dlpack,
    memory: &Allocator,
    stream: &Stream,
) -> Result<Tensor, Error> {
    let tensor = dlpack.validate()?;
    let shape: Vec<usize> = tensor.shape().iter().map(|&extent| usize::try_from(extent).unwrap_or(0)).collect();
    if tensor.device().device_type != DLDeviceType::CPU {
        // SAFETY: the caller of `import_tensor` promises what is needed.
        let buffer = unsafe { import_buffer::<T>(dlpack, memory, stream) }?;
        return Ok(Tensor::from_buffer(&buffer, &shape)?);
    }
    check_compact(&tensor)?;
    // SAFETY: the caller of `import_tensor` promises that the memory is there.
    let (start, len) = (unsafe { tensor.offset_data_ptr::<T>() }?, tensor.num_elements());
    Ok(Tensor::from_owner::<T, _>(OnHost { start, len, _dlpack: dlpack }, &shape)?)
}

/// Checks that the elements are in row-major order without gaps. Strides of dimensions with one
/// element mean nothing: PyTorch sets them to 1.
fn check_compact(tensor: &TensorRef<'_>) -> Result<(), Error> {
    let (shape, strides) = (tensor.shape(), tensor.strides_or_compact()?);
    let mut expected = 1_i64;
    let is_in_place = |(&extent, &stride): (&i64, &i64)| {
        let is_in_place = extent == 1 || stride == expected;
        expected = expected.saturating_mul(extent);
        is_in_place
    };
    if tensor.num_elements() == 0 || shape.iter().zip(strides.iter()).rev().all(is_in_place) {
        return Ok(());
    }
    Err(Error::Strided { shape: shape.to_vec(), strides: strides.into_owned() })
}

/// Host memory of a DLPack tensor.
struct OnHost<T> {
    start: *const T,
    len: usize,
    _dlpack: Dlpack,
}

// SAFETY: it owns the tensor, which may go to other threads, and lends its elements to be read.
unsafe impl<T: Send> Send for OnHost<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for OnHost<T> {}

impl<T> AsRef<[T]> for OnHost<T> {
    fn as_ref(&self) -> &[T] {
        // SAFETY: the tensor has so many elements there for as long as it lives, which nothing else
        // writes.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}
