//! Copies as methods of buffers, allocators and devices.

use std::path::Path;

use aquifer_allocator::{Allocator, Buffer, DeviceAllocator};
use aquifer_device::{Device, Stream};
use bytemuck::Pod;

use crate::copy::{DeviceSource, Source, Target};
use crate::error::TransferError;
use crate::params::{Checkpoint, Load, ParamSet};
use crate::pending::Pending;
use crate::pinned::PinnedBuffer;
use crate::prefetch::{Batch, Prefetcher};
use crate::runtime::Transfer;

/// The batches that [`DeviceTransfers::prefetch`] keeps ahead of their use.
const AHEAD: usize = 2;

/// Copies, as methods of [`Buffer`] and its views. Each runs on `stream`, after everything that was
/// enqueued on the buffer before, on any stream.
///
/// Copies between device memory return `()` once they are enqueued. Those with an end on the host
/// return a [`Pending`], which can be waited for, awaited or dropped: the copy goes on. The others
/// wait on the host, and are counted ([`Transfer::counters`]).
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::Device;
/// use aquifer_sim::{SimConfig, SimDriver};
/// use aquifer_transfer::{AllocatorTransfers as _, BufferTransfers as _};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (memory, stream) = (Allocator::new(&device, Config::default())?, device.stream()?);
/// let x = memory.from_slice(&[1.0f32, 2.0, 3.0], &stream)?;
/// let mut y = memory.alloc::<f32>(2, &stream)?;
/// y.copy_from(&x.slice(1..), &stream)?;
/// assert_eq!(y.to_vec(&stream)?, [2.0, 3.0]);
/// assert_eq!(y.slice(..1).item(&stream)?, 2.0);
/// y.upload(vec![4.0, 5.0], &stream)?.wait()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait BufferTransfers<T: Pod + Send + Sync> {
    /// Enqueues filling the buffer from the host, or from a file; see [`Source`].
    ///
    /// # Errors
    /// As [`Transfer::upload`].
    fn upload<S: Source<T>>(&mut self, from: S, stream: &Stream) -> Result<Pending<S::Report>, TransferError>;

    /// Enqueues a copy to the host; see [`Target`].
    ///
    /// # Errors
    /// As [`Transfer::download`].
    fn download<D: Target<T>>(&self, to: D, stream: &Stream) -> Result<Pending<D::Output>, TransferError>;

    /// Copies to borrowed host memory, and waits until it is there.
    ///
    /// # Errors
    /// As [`Transfer::download`].
    fn download_blocking(&self, to: &mut [T], stream: &Stream) -> Result<(), TransferError>;

    /// Copies to a new `Vec`, and waits until it is there.
    ///
    /// # Errors
    /// As [`Transfer::to_vec`].
    fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, TransferError>;

    /// The element of a buffer of one; of a longer one, `x.slice(..1).item(&stream)` is the first.
    /// Waits until it is there.
    ///
    /// # Errors
    /// As [`Transfer::item`].
    fn item(&self, stream: &Stream) -> Result<T, TransferError>;

    /// Enqueues filling the buffer from device memory, also of another device; see
    /// [`Transfer::copy`].
    ///
    /// # Errors
    /// As [`Transfer::copy`].
    fn copy_from(&mut self, from: impl DeviceSource<T>, stream: &Stream) -> Result<(), TransferError>;

    /// A copy in memory of another allocator, such as another device's, enqueued on `stream` of
    /// that device.
    ///
    /// # Errors
    /// As [`Transfer::copy`], and when device memory runs out.
    fn to(&self, memory: &Allocator, stream: &Stream) -> Result<Buffer<T>, TransferError>;
}

impl<T: Pod + Send + Sync> BufferTransfers<T> for Buffer<T> {
    #[track_caller]
    fn upload<S: Source<T>>(&mut self, from: S, stream: &Stream) -> Result<Pending<S::Report>, TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.upload(from, self)
    }

    #[track_caller]
    fn download<D: Target<T>>(&self, to: D, stream: &Stream) -> Result<Pending<D::Output>, TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.download(self, to)
    }

    #[track_caller]
    fn download_blocking(&self, to: &mut [T], stream: &Stream) -> Result<(), TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.download_blocking(self, to)
    }

    #[track_caller]
    fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.to_vec(self)?.wait()
    }

    #[track_caller]
    fn item(&self, stream: &Stream) -> Result<T, TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.item(self)
    }

    #[track_caller]
    fn copy_from(&mut self, from: impl DeviceSource<T>, stream: &Stream) -> Result<(), TransferError> {
        Transfer::of_stream(self.allocator(), stream)?.fill_from(from, self)
    }

    #[track_caller]
    fn to(&self, memory: &Allocator, stream: &Stream) -> Result<Buffer<T>, TransferError> {
        let mut to = memory.alloc(self.len(), stream)?;
        to.copy_from(self, stream)?;
        Ok(to)
    }
}

/// Buffers with content from the host, as methods of [`Allocator`].
#[allow(clippy::wrong_self_convention, reason = "the allocator makes the buffer")]
pub trait AllocatorTransfers {
    /// A buffer with a copy of `values`, which the caller may reuse when this returns. The copy may
    /// still be in flight then: calls that use the buffer come after it.
    ///
    /// # Errors
    /// When device memory or page-locked memory runs out, a stream of another device or that
    /// captures, and errors of the driver.
    fn from_slice<T: Pod + Send + Sync>(&self, values: &[T], stream: &Stream) -> Result<Buffer<T>, TransferError>;

    /// The runtime that copies to and from this allocator's memory, with its settings, counters and
    /// page-locked memory; see [`Transfer::of`].
    ///
    /// # Errors
    /// Errors of the driver, at the first call.
    fn transfer(&self) -> Result<Transfer, TransferError>;

    /// The tensors of a safetensors file, in this allocator's memory. Waits until they are there.
    /// [`Checkpoint`] loads a part, converts, and reports progress.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`Checkpoint::load_blocking`].
    fn load_safetensors(&self, path: impl AsRef<Path>) -> Result<ParamSet, TransferError>;

    /// As [`AllocatorTransfers::from_slice`], of a `Vec`.
    ///
    /// # Errors
    /// As [`AllocatorTransfers::from_slice`].
    fn from_vec<T: Pod + Send + Sync>(&self, values: Vec<T>, stream: &Stream) -> Result<Buffer<T>, TransferError>;
}

impl AllocatorTransfers for Allocator {
    fn transfer(&self) -> Result<Transfer, TransferError> {
        Transfer::of(self)
    }

    fn load_safetensors(&self, path: impl AsRef<Path>) -> Result<ParamSet, TransferError> {
        Checkpoint::open(path)?.load_blocking(&Transfer::of(self)?, Load::new())
    }

    #[track_caller]
    fn from_slice<T: Pod + Send + Sync>(&self, values: &[T], stream: &Stream) -> Result<Buffer<T>, TransferError> {
        let mut buffer = self.alloc(values.len(), stream)?;
        // All that can fail did, or is the device's.
        let _in_flight = buffer.upload(values, stream)?;
        Ok(buffer)
    }

    #[track_caller]
    fn from_vec<T: Pod + Send + Sync>(&self, values: Vec<T>, stream: &Stream) -> Result<Buffer<T>, TransferError> {
        self.from_slice(&values, stream)
    }
}

/// Page-locked memory and prefetching, as methods of [`Device`]. They use the process's allocator
/// of the device ([`DeviceAllocator::allocator`]); with another allocator, [`Transfer::pinned`] and
/// [`Prefetcher::new`] do the same.
pub trait DeviceTransfers {
    /// Page-locked memory for `len` values of `T`, which copies of this device read and write
    /// without staging. Its contents are undefined.
    ///
    /// # Errors
    /// As [`crate::PinnedPool::alloc`].
    fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError>;

    /// Page-locked memory with a copy of `values`.
    ///
    /// # Errors
    /// As [`DeviceTransfers::pinned`].
    fn pinned_from_slice<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, TransferError>;

    /// Brings the batches that `source` gives to the device, two ahead of their use on `stream`: an
    /// iterator of batches that are ready for `stream`. A thread calls `source`. [`Prefetcher`] has
    /// more settings.
    ///
    /// # Errors
    /// As [`Prefetcher::new`].
    fn prefetch<S>(&self, source: S, stream: &Stream) -> Result<Prefetcher<S::Item>, TransferError>
    where
        S: IntoIterator,
        S::IntoIter: Send + 'static,
        S::Item: Batch;
}

impl DeviceTransfers for Device {
    fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, TransferError> {
        Transfer::of(&self.allocator()?)?.pinned().alloc(len)
    }

    fn pinned_from_slice<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, TransferError> {
        Transfer::of(&self.allocator()?)?.pinned().alloc_from(values)
    }

    fn prefetch<S>(&self, source: S, stream: &Stream) -> Result<Prefetcher<S::Item>, TransferError>
    where
        S: IntoIterator,
        S::IntoIter: Send + 'static,
        S::Item: Batch,
    {
        Prefetcher::new(source, &Transfer::of(&self.allocator()?)?, stream, AHEAD)
    }
}
