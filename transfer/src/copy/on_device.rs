//! Copies within a device.

use aquifer_device::{AccessKind, CopyEnd, CopyPart, Stream};

use super::DevicePart;
use super::region::{Elements, Plan};
use crate::counters::Direction;
use crate::enqueue::enqueue_rows;
use crate::error::TransferError;
use crate::rows::Rows;
use crate::runtime::Transfer;

/// Enqueues a copy, and counts it. Returns its stream, or `None` if there is nothing to copy.
/// Records no event.
pub(super) fn enqueue<'a>(
    transfer: &'a Transfer,
    from: DevicePart<'_>,
    to: DevicePart<'_>,
    elements: &Elements<'_>,
) -> Result<Option<&'a Stream>, TransferError> {
    transfer.check_part(from)?;
    transfer.check_part(to)?;
    let Some(plan) = Plan::of(elements, from.bytes, to.bytes)? else { return Ok(None) };
    if elements.region.is_none() {
        check_apart(from, to)?;
    } else if plan.overlaps_itself(from.ptr.0, to.ptr.0) {
        return Err(TransferError::Region { reason: "its elements to write and to read overlap, or may" });
    }
    let stream = transfer.next_stream(Direction::OnDevice);
    enqueue_on(transfer, stream, from, to, &plan.rows, plan.size)?;
    transfer.shared().counters.count(Direction::OnDevice, plan.bytes());
    Ok(Some(stream))
}

/// Enqueues a copy of rows, which must lie within both ends and not overlap. Records no event.
pub(super) fn enqueue_on(
    transfer: &Transfer,
    stream: &Stream,
    from: DevicePart<'_>,
    to: DevicePart<'_>,
    rows: &Rows<2>,
    size: usize,
) -> Result<(), TransferError> {
    let ends = (CopyEnd::Device(from.ptr), CopyEnd::Device(to.ptr));
    let memory = [(from.storage, AccessKind::Read), (to.storage, AccessKind::Write)];
    transfer.enqueue_uncovered(stream, &memory, &[], || {
        #[allow(unsafe_code, reason = "the driver's call is unsafe for host memory, of which there is none")]
        // SAFETY: no host memory is touched.
        unsafe {
            enqueue_rows(stream, rows, ends, size as u64)
        }
    })
}

/// Refuses two ends on one device, of one length, that have memory in common.
pub(super) fn check_apart(from: DevicePart<'_>, to: DevicePart<'_>) -> Result<(), TransferError> {
    let copy = CopyPart { dst: CopyEnd::Device(to.ptr), src: CopyEnd::Device(from.ptr), bytes: to.bytes };
    if CopyPart::are_independent(&[copy]) { Ok(()) } else { Err(TransferError::Overlap { bytes: copy.bytes }) }
}

pub(super) fn check_lengths(from: u64, to: u64) -> Result<(), TransferError> {
    if from == to { Ok(()) } else { Err(TransferError::LengthMismatch { from, to }) }
}
