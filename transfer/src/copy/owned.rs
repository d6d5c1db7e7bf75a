//! Copies of memory that is passed in or returned as a whole: allocated on the other side, and owned by the transfer meanwhile.
//!
//! Small memory is copied through page-locked memory by the calling thread, and the copy is enqueued when the call returns. Large memory goes
//! through the staging ring, whose threads work on while the caller goes on.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use std::sync::Arc;

use aquifer_allocator::DeviceBuffer;
use aquifer_device::{AccessKind, Stream};
use bytemuck::Pod;

use crate::copy::direct::check_lengths;
use crate::copy::memory::{Landing, Owned};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::job::Job;
use crate::pending::Pending;
use crate::pinned::{PinnedBuffer, PinnedSlice};
use crate::runtime::Transfer;
use crate::staging::{DeviceEnd, HostSource, HostTarget, Spread};

/// Up to this many bytes the calling thread copies by itself: about 25 µs at 10 GB/s, as long as handing it to other threads takes.
pub(crate) const UNSTAGED_BYTES: usize = 256 << 10;

impl Transfer {
    /// Allocates device memory for `stream` and fills it from host memory of any kind: a `Vec`, `Box<[T]>`, `Arc<[T]>`,
    /// a memory map, or whatever else lends a slice, which it is asked for once. Returns before the copy is done; the
    /// source is dropped once it was read. A source of a type that is not the standard library's is dropped on a thread
    /// of its own, perhaps after the [`Pending`] is complete: its `Drop` may wait for other transfers, and a panic in
    /// it is logged.
    ///
    /// # Errors
    /// When device memory or page-locked memory runs out, a stream of another device or that captures, and errors of the driver.
    #[track_caller]
    pub fn to_device<T: Pod + Send + Sync, S>(
        &self,
        source: S,
        stream: &Stream,
    ) -> Result<Pending<DeviceBuffer<T>>, TransferError>
    where
        S: AsRef<[T]> + Send + Sync + 'static,
    {
        let _place = self.called_here();
        self.check_stream(stream)?;
        let source = Owned::new::<T, S>(source);
        let mut buffer = self.allocator().alloc_buffer(source.elements(), stream)?;
        Ok(self.upload_owned(source, &mut buffer)?.map(|()| buffer))
    }

    /// Allocates device memory for `stream` and fills it from page-locked memory.
    ///
    /// # Errors
    /// As [`Transfer::upload`], and when device memory runs out.
    #[track_caller]
    pub fn pinned_to_device<'a, T: Pod + Send + Sync>(
        &self,
        from: impl Into<PinnedSlice<'a, T>>,
        stream: &Stream,
    ) -> Result<Pending<DeviceBuffer<T>>, TransferError> {
        let _place = self.called_here();
        self.check_stream(stream)?;
        let from = from.into();
        let mut buffer = self.allocator().alloc_buffer(from.len() as u64, stream)?;
        Ok(self.upload(from, &mut buffer)?.map(|()| buffer))
    }

    /// Fills device memory from host memory of any kind, as [`Transfer::to_device`] does. Whoever uses `to` next, on any stream, comes
    /// after all of it, and waits on the host while threads are still enqueuing.
    ///
    /// # Errors
    /// Ends of different lengths, and as [`Transfer::to_device`].
    #[track_caller]
    pub fn upload_from<T: Pod + Send + Sync, S>(
        &self,
        source: S,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError>
    where
        S: AsRef<[T]> + Send + Sync + 'static,
    {
        let _place = self.called_here();
        self.upload_owned(Owned::new::<T, S>(source), to)
    }

    fn upload_owned<T: Pod + Send + Sync>(
        &self,
        source: Owned,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError> {
        check_lengths(source.elements(), to.len())?;
        self.check_device("buffer", to.storage().device_id())?;
        if source.len() == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        if source.len() <= UNSTAGED_BYTES {
            return self.upload_small::<T>(bytemuck::cast_slice(source.bytes()), to);
        }
        Ok(self.stage_upload(Arc::new(source), to)?.1)
    }

    /// Copies device memory to new page-locked memory.
    ///
    /// # Errors
    /// When page-locked memory runs out, memory of another device, a stream that captures, and errors of the driver.
    #[track_caller]
    pub fn to_host<T: Pod + Send + Sync>(
        &self,
        from: &DeviceBuffer<T>,
    ) -> Result<Pending<PinnedBuffer<T>>, TransferError> {
        let _place = self.called_here();
        let mut to = self.pinned().alloc(host_vec::len_of(from.len(), size_of::<T>() as u64)?)?;
        Ok(self.download(from, &mut to)?.map(|()| to))
    }

    /// Copies device memory to a new `Vec`.
    ///
    /// # Errors
    /// As [`Transfer::to_host`], and [`TransferError::OutOfHostMemory`] when the system has no memory for it.
    #[track_caller]
    pub fn to_vec<T: Pod + Send + Sync>(&self, from: &DeviceBuffer<T>) -> Result<Pending<Vec<T>>, TransferError> {
        let _place = self.called_here();
        let len = host_vec::len_of(from.len(), size_of::<T>() as u64)?;
        self.check_device("buffer", from.storage().device_id())?;
        if len * size_of::<T>() <= UNSTAGED_BYTES {
            let pending = self.to_host(from)?;
            return Ok(pending.and_then(|buffer: PinnedBuffer<T>| buffer.read().map(<[T]>::to_vec)));
        }
        let target = Arc::new(Landing::new(host_vec::zeroed::<T>(len)?));
        let job = self.stage_download(from, target.clone())?;
        Ok(Pending::job(self.shared(), job, move || target.take()))
    }

    /// Takes the bytes into page-locked memory now, and copies from there.
    pub(crate) fn upload_small<T: Pod + Send + Sync>(
        &self,
        from: &[T],
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError> {
        let staged = self.pinned().alloc_from(from)?;
        self.upload(&staged, to)
    }

    /// Leaves the copy to the staging ring. The memory is claimed when this returns.
    pub(crate) fn stage_upload<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        let spread = Spread::dense(to.bytes());
        self.stage_upload_to(source, to, spread)
    }

    /// The same to those bytes of a buffer that lie so, which must be within it.
    pub(crate) fn stage_upload_to<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut DeviceBuffer<T>,
        spread: Spread,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        let (stream, bytes) = (self.staging_stream(Direction::Upload)?, spread.bytes());
        let end = DeviceEnd::claim_rows(to, spread, AccessKind::Write)?;
        let job = self.staging().upload(source, end, stream, self.priority())?;
        self.shared().tally.count(Direction::Upload, bytes);
        Ok((job.clone(), Pending::job(self.shared(), job, || Ok(()))))
    }

    /// Leaves a copy to the host to the staging ring. The memory is claimed when this returns.
    pub(crate) fn stage_download<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        target: Arc<dyn HostTarget>,
    ) -> Result<Arc<Job>, TransferError> {
        self.stage_download_from(from, Spread::dense(from.bytes()), target)
    }

    /// The same from those bytes of a buffer that lie so, which must be within it.
    pub(crate) fn stage_download_from<T: Pod>(
        &self,
        from: &DeviceBuffer<T>,
        spread: Spread,
        target: Arc<dyn HostTarget>,
    ) -> Result<Arc<Job>, TransferError> {
        let (stream, bytes) = (self.staging_stream(Direction::Download)?, spread.bytes());
        let end = DeviceEnd::claim_rows(from, spread, AccessKind::Read)?;
        let job = self.staging().download(end, target, stream, self.priority())?;
        self.shared().tally.count(Direction::Download, bytes);
        Ok(job)
    }

    /// What threads of the ring enqueue on: not a stream that captures, nor one that only its own thread may use.
    fn staging_stream(&self, direction: Direction) -> Result<&Stream, TransferError> {
        let stream = self.stream_for_threads(direction);
        self.refuse_capture(stream)?;
        Ok(stream)
    }
}
