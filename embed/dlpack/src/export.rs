//! To other libraries.

use std::ffi::c_void;

use aquifer::buffer::Handle;
use aquifer::device::cuda;
use aquifer::kernels::DType;
use aquifer::kernels::Element;
use aquifer::{Buffer, Device, Stream, Tensor};
use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackElement, DlpackFlags};

use crate::{Dlpack, Error, data_type, typed};

/// Exports a buffer as a tensor of one dimension, which shares its memory. The consumer's work on
/// `stream` comes after all work so far.
///
/// # Errors
/// A buffer of a simulated device, a stream of another device, and as [`Buffer::ready_on`].
pub fn export_buffer<T: DlpackElement + Copy>(
    buffer: &Buffer<T, impl Handle>,
    stream: &Stream,
) -> Result<Dlpack, Error> {
    export_device(buffer, &[buffer.len()], T::DTYPE, stream)
}

/// Exports a tensor, which shares its memory. The consumer's work on `stream` comes after all work
/// so far. A tensor on the host is exported to be read only, and needs no stream: any will do.
///
/// # Errors
/// As [`export_buffer`], and a tensor that is not contiguous.
pub fn export_tensor(tensor: &Tensor, stream: &Stream) -> Result<Dlpack, Error> {
    let dtype = tensor.dtype();
    typed!(dtype, export_typed::<T>(tensor, stream))
}

fn export_typed<T: Element>(tensor: &Tensor, stream: &Stream) -> Result<Dlpack, Error> {
    let Some(data_type) = data_type(tensor.dtype()) else {
        return Err(Error::DType { dtype: tensor.dtype().name().to_owned() });
    };
    if !tensor.place().is_host() {
        return export_device(&tensor.device_buffer::<T>()?, tensor.shape(), data_type, stream);
    }
    let start = tensor.as_slice::<T>()?.as_ptr().cast_mut().cast();
    finish(tensor.clone(), start, tensor.shape(), data_type, DLDevice::CPU, DlpackFlags::READ_ONLY)
}

fn export_device<T: Copy + 'static>(
    buffer: &Buffer<T, impl Handle>,
    shape: &[usize],
    data_type: DLDataType,
    stream: &Stream,
) -> Result<Dlpack, Error> {
    let device = cuda_device(buffer.allocator().device())?;
    buffer.ready_on(stream)?;
    let start = buffer.ptr().0 as *mut c_void;
    finish(buffer.share(), start, shape, data_type, device, DlpackFlags::empty())
}

/// DLPack's name of a CUDA device.
fn cuda_device(device: &Device) -> Result<DLDevice, Error> {
    let info = device.info();
    if info.kind != cuda::KIND {
        return Err(Error::Simulated { device: device.label().to_string() });
    }
    Ok(DLDevice::cuda(i32::try_from(info.ordinal).unwrap_or(i32::MAX)))
}

/// A tensor that keeps `owner` until its consumer deletes it.
fn finish<O: Send + 'static>(
    owner: O,
    start: *mut c_void,
    shape: &[usize],
    data_type: DLDataType,
    device: DLDevice,
    flags: DlpackFlags,
) -> Result<Dlpack, Error> {
    let is_empty = shape.contains(&0);
    let prepared = Dynamic::compact(shape).prepare_as::<DLManagedTensorVersioned>()?;
    let mut tensor = prepared.initialize(Box::new(owner));
    tensor.set_device(device).set_dtype(data_type);
    tensor.set_data(if is_empty { std::ptr::null_mut() } else { start });
    // SAFETY: no flag is set that promises more than what holds: the memory is shared, not copied.
    unsafe { tensor.set_flags_unchecked(flags) };
    // SAFETY: `owner` keeps the memory, in which elements of this type and number lie in row-major
    // order from `start` on.
    Ok(unsafe { tensor.finish() })
}
