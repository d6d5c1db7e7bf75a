//! Copies between device memory and the host.
//!
//! The driver copies page-locked memory. The calling thread copies up to 256 KiB of other memory
//! into or out of page-locked memory. More than that goes through the staging ring, whose threads
//! work on while the caller goes on. Files always do.

use std::path::Path;
use std::sync::Arc;

use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use super::memory::{Destination, GuardedRange, Lent, Owned};
use super::packed::{OnDevice, Packed};
use super::region::{Plan, Region};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::layout::Rows;
use crate::transfer::counters::Direction;
use crate::transfer::enqueue::{covered_tick, enqueue_rows};
use crate::transfer::host_memory;
use crate::transfer::job::{Job, JobProgress};
use crate::transfer::pending::Pending;
use crate::transfer::pinned::{HostPart, PinnedBuffer, PinnedSlice, PinnedSliceMut};
use crate::transfer::runtime::Transfer;
use crate::transfer::staging::{DeviceEndpoint, FileReport, FileSource, HostEndpoint, HostSource, InRows};

/// The calling thread copies up to this many bytes: about 25 µs at 10 GB/s, as long as handing the
/// copy to other threads takes.
const UNSTAGED_BYTES: u64 = 256 << 10;

pub(super) fn upload_pinned<T: Pod>(
    transfer: &Transfer,
    from: PinnedSlice<'_, T>,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, Error> {
    let part = from.part();
    transfer.check_device("page-locked memory", part.memory.device_id())?;
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if !part.memory.is_pinned() {
        let source = HostEndpoint::Source(Arc::new(GuardedRange::from(part.reserve(AccessKind::Read)?)));
        return Ok(staged(transfer, stage_plan(transfer, source, to, &plan)?));
    }
    enqueue_pinned(transfer, Direction::Upload, to, part, &plan.rows)
}

pub(crate) fn upload_owned<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: Owned,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, Error> {
    let Some(plan) = Plan::of(region, from.elements(), to.len())?.filter(|_| from.len() > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if plan.bytes::<T>() <= UNSTAGED_BYTES || transfer.is_captured() {
        return upload_small(transfer, bytemuck::cast_slice::<u8, T>(from.bytes()), to, &plan);
    }
    Ok(staged(transfer, stage_plan(transfer, HostEndpoint::Source(Arc::new(from)), to, &plan)?))
}

pub(super) fn upload_borrowed<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &[T],
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, Error> {
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| size_of_val(from) > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if plan.bytes::<T>() <= UNSTAGED_BYTES || transfer.is_captured() {
        return upload_small(transfer, from, to, &plan);
    }
    #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
    // SAFETY: the memory is borrowed until this function returns, and it waits until the job is
    // settled.
    let lent = unsafe { Lent::to_read(from) };
    let job = stage_plan(transfer, HostEndpoint::Source(Arc::new(lent)), to, &plan)?;
    match job.wait() {
        JobProgress::Finished(Err(error)) => Err(error),
        _ => Ok(staged(transfer, job)),
    }
}

/// Packs the elements into page-locked memory now, and copies them from there.
fn upload_small<T: Pod>(
    transfer: &Transfer,
    from: &[T],
    to: &mut Buffer<T>,
    plan: &Plan,
) -> Result<Pending<()>, Error> {
    let len = host_memory::len_of(plan.rows.len(), size_of::<T>() as u64)?;
    if plan.rows.is_dense() {
        let host = transfer.pinned().alloc_from(&from[..len])?;
        return enqueue_pinned(transfer, Direction::Upload, to, host.as_slice().part(), &plan.rows);
    }
    let packed = Packed::new(plan, OnDevice::To);
    let mut host = transfer.pinned().alloc(len)?;
    packed.gathering().copy(from, host.write()?);
    enqueue_pinned(transfer, Direction::Upload, to, host.as_slice().part(), &packed.scattering())
}

pub(super) fn upload_file<T: Pod>(
    transfer: &Transfer,
    path: &Path,
    offset: u64,
    to: &mut Buffer<T>,
) -> Result<Pending<FileReport>, Error> {
    let source = FileSource::open(path, offset, to.bytes(), transfer.staging().config().direct_io)?;
    let report = source.report().clone();
    Ok(stage_upload(transfer, Arc::new(source), to)?.map(move |()| *report.lock()))
}

pub(super) fn download_pinned<T: Pod>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: PinnedSliceMut<'_, T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, Error> {
    let part = to.part();
    transfer.check_device("page-locked memory", part.memory.device_id())?;
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if !part.memory.is_pinned() {
        let target = HostEndpoint::Target(Arc::new(GuardedRange::from(part.reserve(AccessKind::Write)?)));
        return Ok(staged(transfer, stage_plan(transfer, target, from, &plan)?));
    }
    enqueue_pinned(transfer, Direction::Download, from, part, &plan.rows)
}

pub(super) fn download_new_vec<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
) -> Result<Pending<Vec<T>>, Error> {
    transfer.check_device("buffer", from.storage().device_id())?;
    transfer.refuse_captured()?;
    if from.bytes() <= UNSTAGED_BYTES {
        return download_small(transfer, from, &Plan::dense(from.len() as u64), |host| Ok(host.to_vec()));
    }
    download_vec(transfer, from, host_memory::zeroed::<T>(from.len())?, None)
}

pub(super) fn download_vec<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
    mut to: Vec<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<Vec<T>>, Error> {
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| from.bytes() > 0) else {
        return Ok(Pending::ready(transfer.shared(), to));
    };
    transfer.refuse_captured()?;
    if plan.bytes::<T>() <= UNSTAGED_BYTES {
        let scattering = Packed::new(&plan, OnDevice::From).scattering();
        return download_small(transfer, from, &plan, move |host| {
            scattering.copy(host, &mut to);
            Ok(to)
        });
    }
    let target = Arc::new(Destination::new(to));
    let job = stage_plan(transfer, HostEndpoint::Target(target.clone()), from, &plan)?;
    Ok(Pending::job(transfer.shared(), job, move || target.take()))
}

pub(super) fn download_blocking<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: &mut [T],
) -> Result<(), Error> {
    transfer.check_device("buffer", from.storage().device_id())?;
    transfer.refuse_captured()?;
    let Some(plan) = Plan::of(None, from.len(), to.len())?.filter(|_| from.bytes() > 0) else { return Ok(()) };
    if plan.bytes::<T>() <= UNSTAGED_BYTES {
        let mut host = transfer.pinned().alloc::<T>(to.len())?;
        download_pinned(transfer, from, host.as_slice_mut(), None)?.wait()?;
        to.copy_from_slice(host.read()?);
        return Ok(());
    }
    #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
    // SAFETY: the memory is borrowed mutably until this function returns, and it waits until the
    // job is settled.
    let lent = unsafe { Lent::to_write(to) };
    let job = stage_plan(transfer, HostEndpoint::Target(Arc::new(lent)), from, &plan)?;
    job.wait();
    staged(transfer, job).wait()
}

/// Packs the elements into page-locked memory, and calls `take` with them when that is complete.
fn download_small<T: Pod + Send + Sync, R>(
    transfer: &Transfer,
    from: &Buffer<T>,
    plan: &Plan,
    take: impl FnOnce(&[T]) -> Result<R, Error> + Send + 'static,
) -> Result<Pending<R>, Error> {
    let len = host_memory::len_of(plan.rows.len(), size_of::<T>() as u64)?;
    let mut host: PinnedBuffer<T> = transfer.pinned().alloc(len)?;
    let part = host.as_slice_mut().part();
    let pending = match part.bytes {
        0 => Pending::ready(transfer.shared(), ()),
        _ if plan.rows.is_dense() => enqueue_pinned(transfer, Direction::Download, from, part, &plan.rows)?,
        _ => {
            let gathering = Packed::new(plan, OnDevice::From).gathering();
            enqueue_pinned(transfer, Direction::Download, from, part, &gathering)?
        }
    };
    Ok(pending.map(|()| host).and_then(|host| take(host.read()?)))
}

/// Enqueues a copy of rows between a buffer and page-locked memory. They must lie within both.
fn enqueue_pinned<T: Pod>(
    transfer: &Transfer,
    direction: Direction,
    buffer: &Buffer<T>,
    host: HostPart<'_>,
    rows: &Rows<2>,
) -> Result<Pending<()>, Error> {
    let (stream, size) = (transfer.next_stream(direction), size_of::<T>() as u64);
    let (here, there) = (CopyEnd::Host(host.ptr), CopyEnd::Device(buffer.ptr()));
    let (ends, on_host, on_device) = match direction {
        Direction::Upload => ((here, there), AccessKind::Read, AccessKind::Write),
        _ => ((there, here), AccessKind::Write, AccessKind::Read),
    };
    let is_captured = transfer.is_captured();
    transfer.enqueue_uncovered(stream, &[(buffer.storage(), on_device)], &[(host, on_host)], || {
        #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
        // SAFETY: the part is memory of its pool, which the caller borrows now, mutably if it is
        // written. The pool keeps it until the tick of this access is done; until then the host
        // does not touch it in conflict, as the buffer waits for that tick first (N1, N2). The rows
        // lie within both ends.
        unsafe {
            enqueue_rows(stream, rows, ends, size)
        }
    })?;
    if is_captured {
        // Nothing was copied, and launches of the graph order themselves.
        return Ok(Pending::ready(transfer.shared(), ()));
    }
    transfer.shared().counters.count(direction, rows.len() * size);
    Ok(Pending::enqueued(transfer.shared(), covered_tick(stream), ()))
}

/// Hands the filling of a buffer to the staging ring. Its memory is reserved when this returns.
pub(crate) fn stage_upload<T: Pod>(
    transfer: &Transfer,
    source: Arc<dyn HostSource>,
    to: &mut Buffer<T>,
) -> Result<Pending<()>, Error> {
    let rows = Rows::dense(to.bytes());
    Ok(staged(transfer, stage_rows(transfer, HostEndpoint::Source(source), to, rows)?))
}

fn stage_plan<T: Pod>(
    transfer: &Transfer,
    host: HostEndpoint,
    buffer: &Buffer<T>,
    plan: &Plan,
) -> Result<Arc<Job>, Error> {
    if plan.rows.is_dense() && host.bytes() == buffer.bytes() {
        return stage_rows(transfer, host, buffer, Rows::dense(buffer.bytes()));
    }
    let ends = |order| Packed::new(plan, order).ends(size_of::<T>() as u64);
    match host {
        HostEndpoint::Source(source) => {
            let (rows, on_device) = ends(OnDevice::To);
            stage_rows(transfer, HostEndpoint::Source(Arc::new(InRows { end: source, rows })), buffer, on_device)
        }
        HostEndpoint::Target(target) => {
            let (on_device, rows) = ends(OnDevice::From);
            stage_rows(transfer, HostEndpoint::Target(Arc::new(InRows { end: target, rows })), buffer, on_device)
        }
    }
}

/// Hands a copy between a host end and some bytes of a buffer, which must lie within it, to the
/// staging ring. The memory is reserved when this returns.
fn stage_rows<T: Pod>(
    transfer: &Transfer,
    host: HostEndpoint,
    buffer: &Buffer<T>,
    rows: Rows<1>,
) -> Result<Arc<Job>, Error> {
    let (direction, kind) = match &host {
        HostEndpoint::Source(_) => (Direction::Upload, AccessKind::Write),
        HostEndpoint::Target(_) => (Direction::Download, AccessKind::Read),
    };
    let (stream, bytes) = (transfer.stream_for_threads(direction)?, rows.len());
    let device = DeviceEndpoint::reserve(buffer, rows, kind)?;
    let job = transfer.staging().begin(host, device, stream, transfer.priority())?;
    transfer.shared().counters.count(direction, bytes);
    Ok(job)
}

fn staged(transfer: &Transfer, job: Arc<Job>) -> Pending<()> {
    Pending::job(transfer.shared(), job, || Ok(()))
}
