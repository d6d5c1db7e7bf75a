//! Copies within a device.

use aquifer_device::{AccessKind, CopyEnd, CopyPart, Stream};

use super::region::{Plan, Region};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::layout::Rows;
use crate::transfer::counters::Direction;
use crate::transfer::enqueue::enqueue_rows;
use crate::transfer::runtime::Transfer;

/// Enqueues a copy, which it does not count. Returns its stream and its bytes, or `None` if there
/// is nothing to copy.
pub(super) fn enqueue<'a, T: Copy>(
    transfer: &'a Transfer,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    region: Option<&Region<'_>>,
) -> Result<Option<(&'a Stream, u64)>, Error> {
    transfer.check_device("buffer", from.storage().device_id())?;
    transfer.check_device("buffer", to.storage().device_id())?;
    let Some(plan) = Plan::of(region, from.len(), to.len())?.filter(|_| to.bytes() > 0) else { return Ok(None) };
    if region.is_none() {
        check_apart(from, to)?;
    } else if plan.overlaps_itself(from.ptr().0, to.ptr().0, size_of::<T>() as u64) {
        return Err(Error::Region { reason: "its elements to write and to read overlap, or may" });
    }
    let stream = transfer.next_stream(Direction::OnDevice);
    enqueue_on(transfer, stream, from, to, &plan.rows)?;
    Ok(Some((stream, plan.bytes::<T>())))
}

/// Enqueues a copy of rows, which must lie within both ends and not overlap. Records no event.
pub(super) fn enqueue_on<T: Copy>(
    transfer: &Transfer,
    stream: &Stream,
    from: &Buffer<T>,
    to: &mut Buffer<T>,
    rows: &Rows<2>,
) -> Result<(), Error> {
    let ends = (CopyEnd::Device(from.ptr()), CopyEnd::Device(to.ptr()));
    let memory = [(from.storage(), AccessKind::Read), (to.storage(), AccessKind::Write)];
    transfer.enqueue_uncovered(stream, &memory, &[], || {
        #[allow(unsafe_code, reason = "the driver's call is unsafe for host memory, of which there is none")]
        // SAFETY: no host memory is touched.
        unsafe {
            enqueue_rows(stream, rows, ends, size_of::<T>() as u64)
        }
    })
}

/// Refuses two ends on one device, of one length, that have memory in common.
pub(super) fn check_apart<T: Copy>(from: &Buffer<T>, to: &Buffer<T>) -> Result<(), Error> {
    let copy = CopyPart { dst: CopyEnd::Device(to.ptr()), src: CopyEnd::Device(from.ptr()), bytes: to.bytes() };
    if CopyPart::are_independent(&[copy]) { Ok(()) } else { Err(Error::Overlap { bytes: copy.bytes }) }
}

pub(super) fn check_lengths(from: usize, to: usize) -> Result<(), Error> {
    if from == to { Ok(()) } else { Err(Error::LengthMismatch { from: from as u64, to: to as u64 }) }
}
