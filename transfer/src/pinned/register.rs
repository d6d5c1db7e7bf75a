//! Memory that the pool did not make: the caller's own, page-locked while a buffer holds it, and pageable memory where the caller
//! accepts that.

use std::any::Any;
use std::fmt;

use aquifer_device::fork::Mutex;
use aquifer_device::{AccessKind, Code, HostPtr, RequestError};
use bytemuck::Pod;
use memmap2::MmapMut;

use super::buffer::{PinnedBuffer, bytes_of};
use super::memory::{Origin, PinnedMemory};
use super::pool::PinnedPool;
use crate::error::TransferError;
use crate::host_vec;

/// CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED.
const ALREADY_REGISTERED: Code = Code(712);

/// The caller's memory, which nobody touches through this while it is registered.
pub(super) struct Owner(Box<dyn Any + Send>);

impl Owner {
    pub(super) fn into_memory(self) -> Box<dyn Any + Send> {
        self.0
    }
}

/// What a failed call did not take, with the reason. Turns into the reason with `?`.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Returned<M> {
    /// What was passed.
    pub memory: M,
    /// Why it was not taken.
    #[source]
    pub error: TransferError,
}

impl<M> fmt::Debug for Returned<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> From<Box<Returned<M>>> for TransferError {
    fn from(returned: Box<Returned<M>>) -> Self {
        returned.error
    }
}

impl PinnedPool {
    /// Page-locks the caller's memory where it is, without a copy. [`PinnedBuffer::into_vec`] gives it back. A `Box<[T]>` becomes a `Vec`
    /// at no cost. It counts towards no limit and no statistic of the pool.
    ///
    /// Locking takes time for each page, and unlocking makes the driver wait for the device: this is for memory that is copied often, or is
    /// too large to exist twice. The system locks whole pages, so two small pieces in one page cannot both be registered. A buffer that is
    /// dropped leaves its memory to the device, which drops it at its next [`aquifer_device::Device::settle`], or when a pool of the device gets more memory and more than 64 MiB of such memory are done.
    ///
    /// ```
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{PinnedConfig, PinnedPool};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
    /// let weights = vec![1.5_f32; 1 << 20];
    /// let address = weights.as_ptr();
    /// let buffer = pool.register(weights)?;
    /// let weights = buffer.into_vec()?;
    /// assert_eq!((weights.as_ptr(), weights[9]), (address, 1.5));
    /// # Ok::<(), aquifer_transfer::TransferError>(())
    /// ```
    ///
    /// # Errors
    /// [`TransferError::AlreadyPinned`] when a page of it is page-locked already; errors of the driver. They return the memory.
    pub fn register<T: Pod + Send>(&self, mut memory: Vec<T>) -> Result<PinnedBuffer<T>, Box<Returned<Vec<T>>>> {
        let (len, bytes) = (memory.len(), size_of_val(memory.as_slice()));
        if bytes == 0 {
            return Ok(PinnedBuffer::new(PinnedMemory::empty(self, align_of::<T>()), len));
        }
        match self.page_lock(memory.as_mut_ptr().cast(), bytes) {
            Ok(ptr) => {
                let origin = Origin::Registered(Mutex::new(Some(Owner(Box::new(memory)))));
                Ok(PinnedBuffer::new(PinnedMemory::new(self, ptr, bytes, origin), len))
            }
            Err(error) => Err(Box::new(Returned { memory, error })),
        }
    }

    #[allow(unsafe_code, reason = "the driver is given memory by its address")]
    fn page_lock(&self, start: *mut u8, bytes: usize) -> Result<HostPtr, TransferError> {
        self.device().settle_host();
        // SAFETY: the caller keeps the memory, which it owns, until it is unregistered: `Owner`, or the device after that.
        let locked = unsafe { self.device().driver().host_register(start, bytes) };
        locked.map_err(|cause| match cause.code {
            ALREADY_REGISTERED => {
                TransferError::AlreadyPinned { address: start.expose_provenance() as u64, bytes: bytes as u64, cause }
            }
            _ => cause.into(),
        })
    }

    /// As [`PinnedPool::alloc_zeroed`], but where page-locked memory cannot be had the buffer is ordinary memory:
    /// [`PinnedBuffer::is_pinned`] tells. Copies from and to it are staged, which takes time of the host. A lost device is an error all
    /// the same.
    ///
    /// # Errors
    /// [`TransferError::OutOfHostMemory`] when the system has no memory at all; [`RequestError::LengthOverflow`]; a
    /// lost device.
    pub fn alloc_or_pageable<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        let bytes = bytes_of::<T>(len)?;
        let error = match self.alloc_zeroed(len) {
            Ok(buffer) => return Ok(buffer),
            Err(error) if error.is_device_lost() => return Err(error),
            Err(error) => error,
        };
        tracing::warn!(%error, bytes, "no page-locked memory; the buffer is pageable, as the caller accepts");
        // A map starts at a page; more than that is not to be had.
        let align = align_of::<T>();
        let mapped = bytes.checked_add(align).ok_or(RequestError::LengthOverflow { len: bytes as u64, size: 1 })?;
        let mut map = MmapMut::map_anon(mapped)
            .map_err(|cause| TransferError::OutOfHostMemory { bytes: bytes as u64, cause: cause.into() })?;
        let ptr = HostPtr(map.as_mut_ptr().expose_provenance().next_multiple_of(align));
        Ok(PinnedBuffer::new(PinnedMemory::new(self, ptr, bytes, Origin::Pageable { _map: map }), len))
    }
}

impl<T: Pod + Send> PinnedBuffer<T> {
    /// The values as ordinary memory, after waiting on the host for all copies. Memory that was registered comes back itself, no longer
    /// page-locked, for which the driver waits for the device; other buffers are copied from.
    ///
    /// # Errors
    /// Errors of the driver, and [`TransferError::OutOfHostMemory`] where a copy is made; they return the buffer. A lost device never
    /// says that it is done with the memory, so it cannot come back.
    pub fn into_vec(mut self) -> Result<Vec<T>, Box<Returned<PinnedBuffer<T>>>> {
        match self.take_values() {
            Ok(values) => Ok(values),
            Err(error) => Err(Box::new(Returned { memory: self, error })),
        }
    }

    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    fn take_values(&mut self) -> Result<Vec<T>, TransferError> {
        let len = self.len();
        let part = self.as_slice_mut().part();
        part.memory.touch(part.ptr, part.bytes, AccessKind::Write)?;
        // SAFETY: the buffer is borrowed exclusively and becomes a vector, so there are no views; all copies were waited for.
        let own = unsafe { part.memory.unregister()? };
        match own.map(|own| own.downcast::<Vec<T>>()) {
            Some(Ok(values)) => Ok(*values),
            _ => host_vec::copied(self.as_bytes().read()?, len),
        }
    }
}
