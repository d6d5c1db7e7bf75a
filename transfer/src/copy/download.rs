//! Copies to the host: by the driver into page-locked memory, and from there, or through the
//! staging ring, into other memory.

use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{AccessKind, CopyEnd};
use bytemuck::Pod;

use super::memory::{Destination, Lent};
use super::packed::{OnDevice, Packed};
use super::region::{Plan, Region};
use super::upload::UNSTAGED_BYTES;
use crate::counters::Direction;
use crate::enqueue::enqueue_rows;
use crate::error::TransferError;
use crate::host_vec;
use crate::job::{Job, Progress};
use crate::layout::Rows;
use crate::pending::Pending;
use crate::pinned::{HostPart, PinnedBuffer, PinnedSliceMut};
use crate::runtime::Transfer;
use crate::staging::{DeviceEndpoint, HostTarget, Scattered};

pub(super) fn pinned<T: Pod>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: PinnedSliceMut<'_, T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<()>, TransferError> {
    let part = to.part();
    transfer.check_device("page-locked memory", part.memory.device_id())?;
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| part.bytes > 0) else {
        return Ok(Pending::ready(transfer.shared(), ()));
    };
    if !part.memory.is_pinned() {
        let job = stage_plan(transfer, from, Arc::new(part.reserve(AccessKind::Write)?), &plan)?;
        return Ok(Pending::job(transfer.shared(), job, || Ok(())));
    }
    enqueue_pinned(transfer, from, part, &plan.rows)
}

/// Enqueues a copy of rows to page-locked memory, which must lie within both ends.
fn enqueue_pinned<T: Pod>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: HostPart<'_>,
    rows: &Rows<2>,
) -> Result<Pending<()>, TransferError> {
    let stream = transfer.next_stream(Direction::Download);
    let (ends, size) = ((CopyEnd::Device(from.ptr()), CopyEnd::Host(to.ptr)), size_of::<T>() as u64);
    let tick = transfer.enqueue(stream, &[(from.storage(), AccessKind::Read)], &[(to, AccessKind::Write)], || {
        #[allow(unsafe_code, reason = "the driver gets an address; what keeps it good is above")]
        // SAFETY: the part is memory of its pool, borrowed mutably by the caller now. The pool
        // keeps it until the tick of this access is done; until then the host does not touch it, as
        // the buffer waits for that tick first (N1, N2). The rows lie within both ends.
        unsafe {
            enqueue_rows(stream, rows, ends, size)
        }
    })?;
    transfer.shared().counters.count(Direction::Download, rows.len() * size);
    Ok(Pending::enqueued(transfer.shared(), tick, ()))
}

pub(super) fn new_vec<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
) -> Result<Pending<Vec<T>>, TransferError> {
    transfer.check_device("buffer", from.storage().device_id())?;
    if from.bytes() <= UNSTAGED_BYTES as u64 {
        return small(transfer, from, &Plan::dense(from.len() as u64), |staged| Ok(staged.to_vec()));
    }
    vec(transfer, from, host_vec::zeroed::<T>(from.len())?, None)
}

pub(super) fn blocking<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
    to: &mut [T],
) -> Result<(), TransferError> {
    transfer.check_device("buffer", from.storage().device_id())?;
    let Some(plan) = Plan::of(None, from.len(), to.len())?.filter(|_| from.bytes() > 0) else { return Ok(()) };
    if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
        let mut staged = transfer.pinned().alloc::<T>(to.len())?;
        pinned(transfer, from, staged.as_slice_mut(), None)?.wait()?;
        to.copy_from_slice(staged.read()?);
        return Ok(());
    }
    #[allow(unsafe_code, reason = "lending is a promise to wait, which this function keeps")]
    // SAFETY: the memory is borrowed mutably until this function returns, and it waits until the
    // job is settled.
    let lent = unsafe { Lent::to_write(to) };
    let job = stage_plan(transfer, from, Arc::new(lent), &plan)?;
    match job.wait() {
        Progress::Finished(Err(error)) => Err(error),
        _ => Pending::job(transfer.shared(), job, || Ok(())).wait(),
    }
}

pub(super) fn vec<T: Pod + Send + Sync>(
    transfer: &Transfer,
    from: &Buffer<T>,
    mut to: Vec<T>,
    region: Option<&Region<'_>>,
) -> Result<Pending<Vec<T>>, TransferError> {
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| from.bytes() > 0) else {
        return Ok(Pending::ready(transfer.shared(), to));
    };
    if plan.bytes::<T>() <= UNSTAGED_BYTES as u64 {
        let scattering = Packed::new(&plan, OnDevice::From).scattering();
        return small(transfer, from, &plan, move |staged| {
            scattering.copy(staged, &mut to);
            Ok(to)
        });
    }
    let target = Arc::new(Destination::new(to));
    let job = stage_plan(transfer, from, target.clone(), &plan)?;
    Ok(Pending::job(transfer.shared(), job, move || target.take()))
}

/// Packs the elements into page-locked memory, and calls `take` with them when that is complete.
fn small<T: Pod + Send + Sync, R>(
    transfer: &Transfer,
    from: &Buffer<T>,
    plan: &Plan,
    take: impl FnOnce(&[T]) -> Result<R, TransferError> + Send + 'static,
) -> Result<Pending<R>, TransferError> {
    let len = host_vec::len_of(plan.rows.len(), size_of::<T>() as u64)?;
    let mut staged: PinnedBuffer<T> = transfer.pinned().alloc(len)?;
    let part = staged.as_slice_mut().part();
    let pending = if part.bytes == 0 {
        Pending::ready(transfer.shared(), ())
    } else if plan.rows.is_dense() {
        enqueue_pinned(transfer, from, part, &plan.rows)?
    } else {
        enqueue_pinned(transfer, from, part, &Packed::new(plan, OnDevice::From).gathering())?
    };
    Ok(pending.map(|()| staged).and_then(|staged| take(staged.read()?)))
}

fn stage_plan<T: Pod>(
    transfer: &Transfer,
    from: &Buffer<T>,
    target: Arc<dyn HostTarget>,
    plan: &Plan,
) -> Result<Arc<Job>, TransferError> {
    if plan.rows.is_dense() && target.bytes() == from.bytes() {
        return stage_rows(transfer, from, Rows::dense(from.bytes()), target);
    }
    let (from_rows, rows) = Packed::new(plan, OnDevice::From).ends(size_of::<T>() as u64);
    stage_rows(transfer, from, from_rows, Arc::new(Scattered { target, rows }))
}

/// Hands a copy of some bytes of a buffer, which must lie within it, to the staging ring. The
/// memory is reserved when this returns.
fn stage_rows<T: Pod>(
    transfer: &Transfer,
    from: &Buffer<T>,
    rows: Rows<1>,
    target: Arc<dyn HostTarget>,
) -> Result<Arc<Job>, TransferError> {
    let (stream, bytes) = (transfer.stream_for_threads(Direction::Download)?, rows.len());
    let end = DeviceEndpoint::reserve(from, rows, AccessKind::Read)?;
    let job = transfer.staging().download(end, target, stream, transfer.priority())?;
    transfer.shared().counters.count(Direction::Download, bytes);
    Ok(job)
}
