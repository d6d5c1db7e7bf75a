//! Copies to the device.
//!
//! The driver copies page-locked memory. The calling thread copies up to 256 KiB of other memory
//! into page-locked memory, and the copy from there is enqueued when the call returns. More than
//! that goes through the staging ring, whose threads work on while the caller goes on. Files always
//! do.

use std::path::Path;
use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use super::memory::{Lent, Owned};
use super::packed::{OnDevice, Packed};
use super::region::{Plan, Region};
use crate::counters::Direction;
use crate::enqueue::enqueue_rows;
use crate::error::TransferError;
use crate::host_vec;
use crate::job::{Job, Progress};
use crate::layout::Rows;
use crate::pending::Pending;
use crate::pinned::{HostPart, PinnedSlice};
use crate::runtime::Transfer;
use crate::staging::{DeviceEndpoint, FileReport, FileSource, Gathered, HostSource};

/// The calling thread copies up to this many bytes: about 25 µs at 10 GB/s, as long as handing the
/// copy to other threads takes.
pub(super) const UNSTAGED_BYTES: usize = 256 << 10;

pub(super) fn pinned<T: Pod>(
    transfer: &Transfer,
    from: PinnedSlice<'_, T>,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, TransferError> {
    let part = from.part();
    transfer.check_device("page-locked memory", part.memory.device_id())?;
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if !part.memory.is_pinned() {
        return Ok(stage_plan(transfer, Arc::new(part.reserve(AccessKind::Read)?), to, &plan)?.1);
    }
    enqueue_pinned(transfer, part, to, &plan.rows)
}

/// Enqueues a copy of page-locked rows, which must lie within both ends.
fn enqueue_pinned<T: Pod>(
    transfer: &Transfer,
    from: HostPart<'_>,
    to: &mut Buffer<T>,
    rows: &Rows<2>,
) -> Result<Pending<()>, TransferError> {
    let stream = transfer.next_stream(Direction::Upload);
    let (ends, size) = ((CopyEnd::Host(from.ptr), CopyEnd::Device(to.ptr())), size_of::<T>() as u64);
    let tick = transfer.enqueue(stream, &[(to.storage(), AccessKind::Write)], &[(from, AccessKind::Read)], || {
        #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
        // SAFETY: the part is memory of its pool, borrowed by the caller now. The pool keeps it
        // until the tick of this access is done; until then the host does not write it, as the
        // buffer waits for that tick first (N1, N2). The rows lie within both ends.
        unsafe {
            enqueue_rows(stream, rows, ends, size)
        }
    })?;
    transfer.shared().counters.count(Direction::Upload, rows.len() * size);
    Ok(Pending::enqueued(transfer.shared(), tick, ()))
}

pub(crate) fn owned<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: Owned,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, TransferError> {
    let Some(plan) = Plan::of(region, from.elements(), to.len())?.filter(|_| from.len() > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
        return small(transfer, bytemuck::cast_slice::<u8, T>(from.bytes()), to, &plan);
    }
    Ok(stage_plan(transfer, Arc::new(from), to, &plan)?.1)
}

pub(super) fn borrowed<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &[T],
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, TransferError> {
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| size_of_val(from) > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
        return small(transfer, from, to, &plan);
    }
    #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
    // SAFETY: the memory is borrowed until this function returns, and it waits until the job is
    // settled.
    let lent = unsafe { Lent::to_read(from) };
    let (job, pending) = stage_plan(transfer, Arc::new(lent), to, &plan)?;
    match job.wait() {
        Progress::Finished(Err(error)) => Err(error),
        _ => Ok(pending),
    }
}

/// Packs the elements into page-locked memory now, and copies them from there.
fn small<T: Pod>(
    transfer: &Transfer,
    from: &[T],
    to: &mut Buffer<T>,
    plan: &Plan,
) -> Result<Pending<()>, TransferError> {
    let len = host_vec::len_of(plan.rows.len(), size_of::<T>() as u64)?;
    if plan.rows.is_dense() {
        return enqueue_pinned(transfer, transfer.pinned().alloc_from(&from[..len])?.as_slice().part(), to, &plan.rows);
    }
    let packed = Packed::new(plan, OnDevice::To);
    let mut staged = transfer.pinned().alloc(len)?;
    packed.gathering().copy(from, staged.write()?);
    enqueue_pinned(transfer, staged.as_slice().part(), to, &packed.scattering())
}

pub(super) fn file<T: Pod>(
    transfer: &Transfer,
    path: &Path,
    offset: u64,
    to: &mut Buffer<T>,
) -> Result<Pending<FileReport>, TransferError> {
    let source = FileSource::open(path, offset, to.bytes(), transfer.staging().config().direct_io)?;
    let progress = source.progress().clone();
    let (_, pending) = stage(transfer, Arc::new(source), to)?;
    Ok(pending.map(move |()| progress.report()))
}

/// Hands the filling of a buffer to the staging ring. Its memory is reserved when this returns.
pub(crate) fn stage<T: Pod>(
    transfer: &Transfer,
    source: Arc<dyn HostSource>,
    to: &mut Buffer<T>,
) -> Result<(Arc<Job>, Pending<()>), TransferError> {
    let rows = Rows::dense(to.bytes());
    stage_rows(transfer, source, to, rows)
}

fn stage_plan<T: Pod>(
    transfer: &Transfer,
    source: Arc<dyn HostSource>,
    to: &mut Buffer<T>,
    plan: &Plan,
) -> Result<(Arc<Job>, Pending<()>), TransferError> {
    if plan.rows.is_dense() && source.bytes() == to.bytes() {
        return stage(transfer, source, to);
    }
    let (rows, to_rows) = Packed::new(plan, OnDevice::To).ends(size_of::<T>() as u64);
    stage_rows(transfer, Arc::new(Gathered { source, rows }), to, to_rows)
}

/// As [`stage`], for some bytes of a buffer, which must lie within it.
fn stage_rows<T: Pod>(
    transfer: &Transfer,
    source: Arc<dyn HostSource>,
    to: &mut Buffer<T>,
    rows: Rows<1>,
) -> Result<(Arc<Job>, Pending<()>), TransferError> {
    let (stream, bytes) = (transfer.stream_for_threads(Direction::Upload)?, rows.len());
    let end = DeviceEndpoint::reserve(to, rows, AccessKind::Write)?;
    let job = transfer.staging().upload(source, end, stream, transfer.priority())?;
    transfer.shared().counters.count(Direction::Upload, bytes);
    Ok((job.clone(), Pending::job(transfer.shared(), job, || Ok(()))))
}
