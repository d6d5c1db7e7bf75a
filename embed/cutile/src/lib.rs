//! Memory and streams of Aquifer for programs that use [cutile] or its `cuda-core`, and the
//! reverse, without a copy.
//!
//! ```no_run
//! use aquifer::prelude::*;
//! use cutile::tensor::Tensor;
//!
//! let device = aquifer::open("cuda:0")?;
//! let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
//! let theirs = aquifer_cutile::stream(&device, &stream)?;
//! let mut buffer = memory.alloc_zeros::<f32>(32, &stream)?;
//! let lent = aquifer_cutile::lend(&buffer)?;
//! // Everything that cutile enqueues on the buffer stands in a call of `with`, on its stream:
//! with(&stream, [write(&mut buffer)], |_, _| {
//!     // SAFETY: `with` orders the work, which is enqueued on `theirs` here, with all other.
//!     let tensor = unsafe { Tensor::<f32>::from_foreign(lent, vec![32], vec![1]) };
//!     // launch here, with `.async_on(&theirs)`
//!     drop((tensor, theirs));
//!     Ok::<_, aquifer::Error>(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What is checked, and what is not
//!
//! cutile's `DeviceAllocation` promises that the memory is there: [`lend`] sees to that, once, and
//! is safe. That nothing else touches the memory while cutile's work does is for each borrow, and
//! `Tensor::from_foreign` is unsafe for that. Within `with`, it holds for what is enqueued on that
//! stream. Two tensors of one buffer are two for cutile: do not write one of them.
//!
//! [cutile]: https://docs.rs/cutile

use std::sync::Arc;

use aquifer::device::{DeviceError, DevicePtr, RawStream, Tick, cuda};
use aquifer::memory::Storage;
use aquifer::{Allocator, Buffer, Device, Stream};
use aquifer_device::{Code, ExternalStream, Operation};
use cuda_core::{Context, DType, DeviceAllocation, RawDeviceBuffer};

/// The context of a device of Aquifer's, which it keeps.
///
/// # Errors
/// A simulated device; errors of the driver.
pub fn context(device: &Device) -> Result<Arc<Context>, DeviceError> {
    let owner = cuda::context_of(device)?;
    let (raw, gpu, ordinal) = (owner.cu_ctx().cast(), owner.cu_device(), owner.ordinal());
    // SAFETY: the context is retained, for this GPU, as long as its owner lives.
    Ok(unsafe { Context::borrow_with_owner(raw, gpu, ordinal, owner) })
}

/// A stream of a device of Aquifer's: the same queue, which this keeps.
///
/// # Errors
/// A stream of another device, or one that is gone; as [`context()`].
pub fn stream(device: &Device, stream: &Stream) -> Result<Arc<cuda_core::Stream>, DeviceError> {
    let operation = Operation::StreamId;
    if stream.device_id() != device.id() {
        return Err(DeviceError::refused(operation, Code::INVALID_HANDLE)
            .with_detail("the stream belongs to another device: pass the device that made it"));
    }
    let raw = std::ptr::with_exposed_provenance_mut(stream.usable(operation)?.0 as usize);
    // SAFETY: the stream is of this context, and lives as long as its handle.
    Ok(unsafe { cuda_core::Stream::borrow_with_owner(raw, &context(device)?, Arc::new(stream.clone())) })
}

/// A stream of cuda-core's that Aquifer uses, too, until this is dropped.
#[derive(Debug)]
pub struct Adopted {
    // Released before the stream goes.
    adopted: ExternalStream,
    _owner: Arc<cuda_core::Stream>,
}

impl Adopted {
    /// Adopts a stream of the device's context.
    ///
    /// # Safety
    /// The stream is of the device's context.
    pub unsafe fn new(device: &Device, stream: &Arc<cuda_core::Stream>) -> Adopted {
        let raw = RawStream(stream.cu_stream().expose_provenance() as u64);
        // SAFETY: it lives as long as its owner, which is kept; the caller vouches for the device.
        Adopted { adopted: unsafe { device.adopt_stream(raw) }, _owner: stream.clone() }
    }

    /// The stream as Aquifer has it.
    pub fn stream(&self) -> &Stream {
        self.adopted.stream()
    }
}

/// Memory of a buffer's for cutile's tensors.
struct Lent {
    ptr: u64,
    bytes: usize,
    context: Arc<Context>,
    _storage: Arc<Storage>,
}

// SAFETY: a storage keeps its memory, at one address and of one size, in a context that is kept.
unsafe impl DeviceAllocation for Lent {
    fn device_ptr(&self) -> u64 {
        self.ptr
    }

    fn len_bytes(&self) -> usize {
        self.bytes
    }

    fn context(&self) -> Arc<Context> {
        self.context.clone()
    }
}

/// The memory of a buffer, as long as the result lives, for `Tensor::from_foreign` or
/// [`RawDeviceBuffer::foreign`]. The buffer goes on being used.
///
/// # Errors
/// As [`context()`].
pub fn lend<T>(buffer: &Buffer<T>) -> Result<Arc<dyn DeviceAllocation>, DeviceError> {
    let (ptr, bytes, storage) = (buffer.ptr().0, buffer.bytes() as usize, buffer.storage().clone());
    let context = context(storage.allocator().device())?;
    Ok(Arc::new(Lent { ptr, bytes, context, _storage: storage }))
}

/// A buffer of memory of cuda-core's, which it keeps. Its data is ready on `stream`. Dropping the
/// last handle waits on the host for work that uses the memory.
///
/// # Safety
/// The memory is of the allocator's device, holds values of `T`, and nothing else uses it as long
/// as the buffer or work on it lives.
///
/// # Errors
/// As [`Allocator::import`].
pub unsafe fn import<T: DType>(
    theirs: RawDeviceBuffer,
    memory: &Allocator,
    stream: &Stream,
) -> Result<Buffer<T>, aquifer::Error> {
    let (ptr, len) = (DevicePtr(theirs.cu_deviceptr()), theirs.len_bytes() / size_of::<T>());
    memory.import(ptr, len, stream, move |ticks: &[Tick]| {
        // Memory that may be in use is better lost than reused.
        if ticks.iter().all(|tick| tick.synchronize().is_ok()) {
            drop(theirs);
        } else {
            std::mem::forget(theirs);
        }
    })
}
