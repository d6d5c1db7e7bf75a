//! Copies between device memory and the host.
//!
//! The driver copies pinned memory. The calling thread copies up to 256 KiB of other memory
//! into or out of pinned memory. More than that goes through the staging ring, whose threads
//! work on while the caller goes on. Files always do.

use std::path::Path;
use std::sync::Arc;

use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use super::DevicePart;
use super::memory::{Destination, LentRange, Owned};
use super::packed::{OnDevice, Packed};
use super::region::{Elements, Plan};
use crate::completion::Completion;
use crate::counters::Direction;
use crate::enqueue::{covered_tick, enqueue_rows};
use crate::error::TransferError;
use crate::host_memory;
use crate::job::{Job, JobProgress};
use crate::pinned::{HostPart, PinnedSlice, PinnedSliceMut};
use crate::rows::Rows;
use crate::runtime::Transfer;
use crate::staging::{DeviceEndpoint, HostEndpoint, HostSource, InRows, open_file};

/// The calling thread copies up to this many bytes: about 25 µs at 10 GB/s, as long as handing the
/// copy to other threads takes.
const UNSTAGED_BYTES: u64 = 256 << 10;

/// Takes the result of a download, once that is complete.
pub type Arrival<T> = Box<dyn FnOnce() -> Result<T, TransferError> + Send>;

impl Transfer {
    /// Begins a copy of pinned memory to the device.
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a
    /// place twice; a stream that captures; errors of the driver.
    pub fn upload_pinned(
        &self,
        from: PinnedSlice<'_>,
        to: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<Completion, TransferError> {
        self.copy_pinned(Direction::Upload, from.host(), to, elements)
    }

    /// Begins a copy of memory that the copy owns.
    ///
    /// # Errors
    /// As [`Transfer::upload_pinned`], and when pinned memory runs out.
    pub fn upload_owned(
        &self,
        from: Owned,
        to: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<Completion, TransferError> {
        let Some(plan) = self.plan(to, elements, from.len() as u64, to.bytes)? else {
            return Ok(Completion::complete());
        };
        if plan.bytes() <= UNSTAGED_BYTES || self.is_captured()? {
            return self.upload_small(from.bytes(), to, &plan);
        }
        Ok(self.staged(self.stage_plan(HostEndpoint::Source(Arc::new(from)), to, &plan)?))
    }

    /// Begins a copy of borrowed memory, all of which was read when this returns.
    ///
    /// # Errors
    /// As [`Transfer::upload_owned`].
    pub fn upload_borrowed(
        &self,
        from: &[u8],
        to: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<Completion, TransferError> {
        let Some(plan) = self.plan(to, elements, from.len() as u64, to.bytes)? else {
            return Ok(Completion::complete());
        };
        if plan.bytes() <= UNSTAGED_BYTES || self.is_captured()? {
            return self.upload_small(from, to, &plan);
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
        // SAFETY: the memory is borrowed until this function returns, and it waits until the job is
        // settled.
        let lent = unsafe { LentRange::lent(from) };
        let job = self.stage_plan(HostEndpoint::Source(Arc::new(lent)), to, &plan)?;
        match job.wait() {
            JobProgress::Finished(Err(error)) => {
                job.note_reported();
                Err(error)
            }
            _ => Ok(self.staged(job)),
        }
    }

    /// Begins to fill device memory from a file, from `offset` on.
    ///
    /// # Errors
    /// A file that is missing, not a regular file, or too short; a stream that captures, and errors
    /// of the driver.
    pub fn upload_file(&self, path: &Path, offset: u64, to: DevicePart<'_>) -> Result<Completion, TransferError> {
        self.upload_source(Arc::new(open_file(path, offset, to.bytes)?), to)
    }

    /// Begins to fill device memory from a source of its length, which threads of the staging ring
    /// read. The memory is reserved when this returns.
    ///
    /// # Errors
    /// A source of another length, a stream that captures, and errors of the driver.
    pub fn upload_source(&self, source: Arc<dyn HostSource>, to: DevicePart<'_>) -> Result<Completion, TransferError> {
        self.check_part(to)?;
        super::on_device::check_lengths(source.bytes(), to.bytes)?;
        Ok(self.staged(self.stage_rows(HostEndpoint::Source(source), to, Rows::dense(to.bytes))?))
    }

    /// Begins a copy of device memory to pinned memory.
    ///
    /// # Errors
    /// As [`Transfer::upload_pinned`].
    pub fn download_pinned(
        &self,
        from: DevicePart<'_>,
        to: PinnedSliceMut<'_>,
        elements: &Elements<'_>,
    ) -> Result<Completion, TransferError> {
        self.copy_pinned(Direction::Download, to.host(), from, elements)
    }

    /// Begins a copy of device memory to a new vector.
    ///
    /// # Errors
    /// As [`Transfer::download_vec`].
    pub fn download_new_vec<T: Pod + Send + Sync>(
        &self,
        from: DevicePart<'_>,
        len: usize,
    ) -> Result<(Completion, Arrival<Vec<T>>), TransferError> {
        self.refuse_captured()?;
        let elements = Elements { size: size_of::<T>(), from: len, to: len, region: None };
        if from.bytes <= UNSTAGED_BYTES {
            let Some(plan) = self.plan(from, &elements, from.bytes, from.bytes)? else {
                return Ok((Completion::complete(), Box::new(move || host_memory::zeroed(len))));
            };
            return self.download_small(from, &plan, move |host| host_memory::copied(host, len));
        }
        self.download_vec(from, host_memory::zeroed(len)?, &elements)
    }

    /// Begins a copy of device memory to a vector that the copy owns.
    ///
    /// # Errors
    /// As [`Transfer::upload_pinned`], and when pinned memory or host memory runs out.
    pub fn download_vec<T: Pod + Send + Sync>(
        &self,
        from: DevicePart<'_>,
        mut to: Vec<T>,
        elements: &Elements<'_>,
    ) -> Result<(Completion, Arrival<Vec<T>>), TransferError> {
        let Some(plan) = self.plan(from, elements, from.bytes, size_of_val(to.as_slice()) as u64)? else {
            return Ok((Completion::complete(), Box::new(move || Ok(to))));
        };
        self.refuse_captured()?;
        if plan.bytes() <= UNSTAGED_BYTES {
            let (scattering, size) = (Packed::new(&plan, OnDevice::From).scattering(), plan.size);
            return self.download_small(from, &plan, move |host| {
                scattering.copy_bytes(size, host, bytemuck::cast_slice_mut(&mut to));
                Ok(to)
            });
        }
        let target = Arc::new(Destination::new(to));
        let job = self.stage_plan(HostEndpoint::Target(target.clone()), from, &plan)?;
        Ok((self.staged(job), Box::new(move || target.take())))
    }

    /// Copies device memory to borrowed memory, and waits on the host for it.
    ///
    /// # Errors
    /// As [`Transfer::download_vec`]. The contents of `to` are then unspecified.
    pub fn download_blocking(
        &self,
        from: DevicePart<'_>,
        to: &mut [u8],
        elements: &Elements<'_>,
    ) -> Result<(), TransferError> {
        self.refuse_captured()?;
        let Some(plan) = self.plan(from, elements, from.bytes, to.len() as u64)? else { return Ok(()) };
        if plan.bytes() <= UNSTAGED_BYTES {
            let mut host = self.pinned().alloc(to.len())?;
            self.download_pinned(from, host.as_slice_mut(), elements)?.wait()?;
            to.copy_from_slice(&host.read()?);
            return Ok(());
        }
        #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
        // SAFETY: the memory is borrowed mutably until this function returns, and it waits until
        // the job is settled.
        let lent = unsafe { LentRange::lent_mut(to) };
        let job = self.stage_plan(HostEndpoint::Target(Arc::new(lent)), from, &plan)?;
        job.wait();
        self.staged(job).wait()
    }

    /// Checks a copy to or from memory of the device.
    fn plan(
        &self,
        device: DevicePart<'_>,
        elements: &Elements<'_>,
        from_bytes: u64,
        to_bytes: u64,
    ) -> Result<Option<Plan>, TransferError> {
        self.check_part(device)?;
        Plan::of(elements, from_bytes, to_bytes)
    }

    /// Begins a copy between device memory and a block of pinned memory.
    fn copy_pinned(
        &self,
        direction: Direction,
        host: HostPart<'_>,
        device: DevicePart<'_>,
        elements: &Elements<'_>,
    ) -> Result<Completion, TransferError> {
        self.check_device("pinned memory", host.memory.device_id())?;
        let (here, there) = (host.bytes as u64, device.bytes);
        let (from, to) = if direction == Direction::Upload { (here, there) } else { (there, here) };
        let Some(plan) = self.plan(device, elements, from, to)? else { return Ok(Completion::complete()) };
        self.enqueue_pinned(direction, device, host, &plan.rows, plan.size)
    }

    /// Packs the elements into pinned memory now, and copies them from there.
    fn upload_small(&self, from: &[u8], to: DevicePart<'_>, plan: &Plan) -> Result<Completion, TransferError> {
        let bytes = host_memory::len_of(plan.bytes(), 1)?;
        if plan.rows.is_dense() {
            let host = self.pinned().alloc_from(&from[..bytes])?;
            return self.enqueue_pinned(Direction::Upload, to, host.as_slice().host(), &plan.rows, plan.size);
        }
        let packed = Packed::new(plan, OnDevice::To);
        let mut host = self.pinned().alloc(bytes)?;
        packed.gathering().copy_bytes(plan.size, from, &mut host.write()?);
        self.enqueue_pinned(Direction::Upload, to, host.as_slice().host(), &packed.scattering(), plan.size)
    }

    /// Packs the elements into pinned memory; `take` gets them when that is complete.
    fn download_small<R>(
        &self,
        from: DevicePart<'_>,
        plan: &Plan,
        take: impl FnOnce(&[u8]) -> Result<R, TransferError> + Send + 'static,
    ) -> Result<(Completion, Arrival<R>), TransferError> {
        let mut host = self.pinned().alloc(host_memory::len_of(plan.bytes(), 1)?)?;
        let part = host.as_slice_mut().host();
        let copied = if plan.rows.is_dense() {
            self.enqueue_pinned(Direction::Download, from, part, &plan.rows, plan.size)?
        } else {
            let gathering = Packed::new(plan, OnDevice::From).gathering();
            self.enqueue_pinned(Direction::Download, from, part, &gathering, plan.size)?
        };
        Ok((copied, Box::new(move || take(&host.read()?))))
    }

    /// Enqueues a copy of rows between device memory and pinned memory. They must lie within
    /// both.
    fn enqueue_pinned(
        &self,
        direction: Direction,
        device: DevicePart<'_>,
        host: HostPart<'_>,
        rows: &Rows<2>,
        size: usize,
    ) -> Result<Completion, TransferError> {
        let (stream, size) = (self.next_stream(direction), size as u64);
        let (here, there) = (CopyEnd::Host(host.ptr), CopyEnd::Device(device.ptr));
        let (ends, on_host, on_device) = match direction {
            Direction::Upload => ((here, there), AccessKind::Read, AccessKind::Write),
            _ => ((there, here), AccessKind::Write, AccessKind::Read),
        };
        let is_captured = self.is_captured()?;
        self.enqueue_uncovered(stream, &[(device.storage, on_device)], &[(host, on_host)], || {
            #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
            // SAFETY: the part is memory of its pool, which the caller borrows now, mutably if it
            // is written. The pool keeps it until the tick of this access is done; until then the
            // host does not touch it in conflict, as the block waits for that tick first (N1, N2).
            // The rows lie within both ends.
            unsafe {
                enqueue_rows(stream, rows, ends, size)
            }
        })?;
        if is_captured {
            // Nothing was copied, and launches of the graph order themselves.
            return Ok(Completion::complete());
        }
        self.shared().counters.count(direction, rows.len() * size);
        Ok(Completion::enqueued(self.shared(), [covered_tick(stream)]))
    }

    fn stage_plan(&self, host: HostEndpoint, device: DevicePart<'_>, plan: &Plan) -> Result<Arc<Job>, TransferError> {
        if plan.rows.is_dense() && host.bytes() == device.bytes {
            return self.stage_rows(host, device, Rows::dense(device.bytes));
        }
        let ends = |order| Packed::new(plan, order).ends(plan.size as u64);
        match host {
            HostEndpoint::Source(source) => {
                let (rows, on_device) = ends(OnDevice::To);
                self.stage_rows(HostEndpoint::Source(Arc::new(InRows { end: source, rows })), device, on_device)
            }
            HostEndpoint::Target(target) => {
                let (on_device, rows) = ends(OnDevice::From);
                self.stage_rows(HostEndpoint::Target(Arc::new(InRows { end: target, rows })), device, on_device)
            }
        }
    }

    /// Hands a copy between a host end and some bytes of device memory, which must lie within it,
    /// to the staging ring. The memory is reserved when this returns.
    fn stage_rows(&self, host: HostEndpoint, device: DevicePart<'_>, rows: Rows<1>) -> Result<Arc<Job>, TransferError> {
        let (direction, kind) = match &host {
            HostEndpoint::Source(_) => (Direction::Upload, AccessKind::Write),
            HostEndpoint::Target(_) => (Direction::Download, AccessKind::Read),
        };
        let ((stream, own), bytes) = (self.streams_for_threads(direction)?, rows.len());
        let device = DeviceEndpoint::reserve(device, rows, kind)?;
        let job = self.staging().begin(host, device, stream, own, self.priority())?;
        self.shared().counters.count(direction, bytes);
        Ok(job)
    }

    fn staged(&self, job: Arc<Job>) -> Completion {
        Completion::job(self.shared(), job)
    }
}
