//! Copies to the device.
//!
//! Page-locked memory is copied by the driver. Of other memory, a little is taken into page-locked memory by the calling
//! thread, and the copy is enqueued when the call returns; more goes through the staging ring, whose threads work on
//! while the caller goes on. Files always do.

use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{AccessKind, CopyEnd, Stream};
use bytemuck::Pod;

use crate::copy::memory::{Lent, Owned};
use crate::copy::packed::{OnDevice, Packed};
use crate::copy::region::Plan;
use crate::copy::{FilePart, Region, Source};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::job::{Job, Progress};
use crate::pending::Pending;
use crate::pinned::PinnedSlice;
use crate::regular_file;
use crate::runtime::Transfer;
use crate::staging::{DeviceEnd, FileReport, FileSource, Gathered, HostSource, Spread};

/// Up to this many bytes the calling thread copies by itself: about 25 µs at 10 GB/s, as long as handing it to other threads takes.
pub(crate) const UNSTAGED_BYTES: usize = 256 << 10;

impl Transfer {
    /// Enqueues filling device memory, and returns; see [`Source`]. Whatever uses `to` next, on any stream, comes after all
    /// of it, and waits on the host while threads are still enqueuing.
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a place twice; a stream that
    /// captures; when page-locked memory runs out; a file that is not there or too short; errors of the driver. What goes
    /// wrong while threads read a source is the pending transfer's.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::{FilePart, Region, Transfer};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let (memory, stream) = (Allocator::new(&device, Config::default())?, device.stream()?);
    /// let transfer = Transfer::new(&memory)?;
    /// let mut buffer = memory.alloc_zeros::<u8>(4, &stream)?;
    /// transfer.upload(vec![1, 2, 3, 4], &mut buffer)?.wait()?;
    ///
    /// // The second column of a 4 × 3 matrix.
    /// let column = Region { extents: &[4], from_strides: &[3], to_strides: &[1] };
    /// let _ = transfer.upload(column.of(&(1..12).collect::<Vec<u8>>()), &mut buffer)?;
    /// assert_eq!(transfer.to_vec(&buffer)?.wait()?, [1, 4, 7, 10]);
    ///
    /// let path = std::env::temp_dir().join(format!("aquifer-file-example-{}", std::process::id()));
    /// std::fs::write(&path, [1, 2, 3, 4, 5])?;
    /// let report = transfer.upload(FilePart::new(&path).offset(1), &mut buffer)?.wait()?;
    /// assert_eq!((report.bytes, transfer.to_vec(&buffer)?.wait()?), (4, vec![2, 3, 4, 5]));
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn upload<T: Pod + Send + Sync, S: Source<T>>(
        &self,
        from: S,
        to: &mut Buffer<T>,
    ) -> Result<Pending<S::Report>, TransferError> {
        let _place = self.called_here();
        self.check_device("buffer", to.storage().device_id())?;
        from.upload_to(self, to, None)
    }

    /// Allocates device memory for `stream` and fills it as [`Transfer::upload`] does, with all of the source.
    ///
    /// # Errors
    /// As [`Transfer::upload`], when device memory runs out, and a stream of another device.
    #[track_caller]
    pub fn to_device<T: Pod + Send + Sync, S: Source<T>>(
        &self,
        from: S,
        stream: &Stream,
    ) -> Result<Pending<Buffer<T>>, TransferError> {
        let _place = self.called_here();
        self.check_stream(stream)?;
        let mut buffer = self.allocator().alloc(from.elements()?, stream)?;
        Ok(from.upload_to(self, &mut buffer, None)?.map(|_report| buffer))
    }

    /// Device memory of as many bytes.
    #[track_caller]
    pub(crate) fn alloc_bytes(&self, bytes: u64, stream: &Stream) -> Result<Buffer<u8>, TransferError> {
        Ok(self.allocator().alloc(host_vec::len_of(bytes, 1)?, stream)?)
    }

    pub(super) fn upload_pinned<T: Pod>(
        &self,
        from: PinnedSlice<'_, T>,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let part = from.part();
        self.check_device("page-locked memory", part.memory.device_id())?;
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        if !part.memory.is_pinned() {
            return Ok(self.stage_upload_plan(part.into_source()?, to, &plan)?.1);
        }
        let stream = self.next_stream(Direction::Upload);
        let (src, dst, size) = (CopyEnd::Host(part.ptr), CopyEnd::Device(to.ptr()), size_of::<T>() as u64);
        let tick = self.enqueue(stream, &[(to.storage(), AccessKind::Write)], &[(part, AccessKind::Read)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: the part is memory of its pool, live as `from` borrows its buffer now, and kept by the pool until the tick is done
            // that its turn leaves; until then the host does not write it, as the buffer waits for that tick first (N1, N2). The plan
            // was checked to lie within both ends.
            unsafe {
                plan.enqueue(stream, src, dst, size)
            }
        })?;
        self.shared().tally.count(Direction::Upload, plan.bytes::<T>());
        Ok(Pending::enqueued(self.shared(), tick, ()))
    }

    pub(super) fn upload_owned<T: Pod + Send + Sync>(
        &self,
        from: Owned,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let Some(plan) = Plan::of(region, from.elements(), to.len())?.filter(|_| from.len() > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
            return self.upload_small(bytemuck::cast_slice::<u8, T>(from.bytes()), to, &plan);
        }
        Ok(self.stage_upload_plan(Arc::new(from), to, &plan)?.1)
    }

    pub(crate) fn upload_borrowed<T: Pod + Send + Sync>(
        &self,
        from: &[T],
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<()>, TransferError> {
        let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| size_of_val(from) > 0) else {
            return Ok(Pending::ready(self.shared(), ()));
        };
        if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
            return self.upload_small(from, to, &plan);
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, and here is where it is made")]
        // SAFETY: the memory is borrowed until this returns, which waits until the job is settled.
        let lent = unsafe { Lent::to_read(from) };
        let (job, pending) = self.stage_upload_plan(Arc::new(lent), to, &plan)?;
        match job.wait() {
            Progress::Finished(Err(error)) => Err(error),
            _ => Ok(pending),
        }
    }

    /// Packs the elements into page-locked memory now, and copies them from there.
    fn upload_small<T: Pod>(&self, from: &[T], to: &mut Buffer<T>, plan: &Plan) -> Result<Pending<()>, TransferError> {
        if plan.is_dense() && from.len() == to.len() {
            return self.upload_pinned(self.pinned().alloc_from(from)?.as_slice(), to, None);
        }
        let packed = Packed::new(plan, OnDevice::To);
        let mut staged = self.pinned().alloc(host_vec::len_of(plan.elements, size_of::<T>() as u64)?)?;
        packed.gather_on_host(from, staged.write()?)?;
        self.upload_pinned(staged.as_slice(), to, Some(&packed.scattering()))
    }

    pub(super) fn upload_file<T: Pod>(
        &self,
        part: &FilePart,
        to: &mut Buffer<T>,
    ) -> Result<Pending<FileReport>, TransferError> {
        let source = FileSource::open(&part.path, part.offset, to.bytes(), self.staging().config().direct_io)?;
        let progress = source.progress().clone();
        let (_, pending) = self.stage_upload(Arc::new(source), to)?;
        Ok(pending.map(move |()| progress.report()))
    }

    /// Leaves filling a buffer to the staging ring. The memory is claimed when this returns.
    pub(crate) fn stage_upload<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut Buffer<T>,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        let spread = Spread::dense(to.bytes());
        self.stage_upload_to(source, to, spread)
    }

    fn stage_upload_plan<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut Buffer<T>,
        plan: &Plan,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        if plan.is_dense() && source.bytes() == to.bytes() {
            return self.stage_upload(source, to);
        }
        let (from_spread, to_spread) = Packed::new(plan, OnDevice::To).spreads(size_of::<T>() as u64);
        self.stage_upload_to(Arc::new(Gathered { source, spread: from_spread }), to, to_spread)
    }

    /// The same to those bytes of a buffer that lie so, which must be within it.
    fn stage_upload_to<T: Pod>(
        &self,
        source: Arc<dyn HostSource>,
        to: &mut Buffer<T>,
        spread: Spread,
    ) -> Result<(Arc<Job>, Pending<()>), TransferError> {
        let (stream, bytes) = (self.staging_stream(Direction::Upload)?, spread.bytes());
        let end = DeviceEnd::claim_rows(to, spread, AccessKind::Write)?;
        let job = self.staging().upload(source, end, stream, self.priority())?;
        self.shared().tally.count(Direction::Upload, bytes);
        Ok((job.clone(), Pending::job(self.shared(), job, || Ok(()))))
    }

    /// What threads of the ring enqueue on: not a stream that captures, nor one that only its own thread may use.
    pub(super) fn staging_stream(&self, direction: Direction) -> Result<&Stream, TransferError> {
        let stream = self.stream_for_threads(direction);
        self.refuse_capture(stream)?;
        Ok(stream)
    }
}

impl FilePart {
    /// Bytes from the offset to the file's end.
    pub(super) fn len(&self) -> Result<u64, TransferError> {
        let (_, len) = regular_file::open(&self.path)
            .map_err(|cause| TransferError::File { path: self.path.display().to_string(), cause: Arc::new(cause) })?;
        Ok(len.saturating_sub(self.offset))
    }
}
