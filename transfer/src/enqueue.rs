//! Driver calls for copies of rows and of many pieces, and the ticks after them.
//!
//! Streams that capture a graph are refused, and captures are held off while work is enqueued: a
//! graph's work runs later, perhaps many times, when the memory may have another owner.

use aquifer_device::internal::CapturesHeldOff;
use aquifer_device::{Code, Copy2d, CopyEnd, CopyPart, DeviceError, Operation, Stream, Tick};

use crate::rows::{RowBlock, Rows};

/// Refuses a stream that captures, with advice for the caller.
pub(crate) fn refuse_capture(stream: &Stream, advice: &'static str) -> Result<(), DeviceError> {
    stream.end_abandoned_captures()?;
    if stream.is_capturing() { Err(captured(advice)) } else { Ok(()) }
}

/// Refuses a stream that captures, and holds captures off while work is enqueued on it. Call it
/// after access guards are taken, because these may wait for a thread that is about to capture;
/// hold it until the tick after the work is taken, because a tick orders nothing while its stream
/// captures.
pub(crate) fn hold_off_captures<'a>(
    stream: &'a Stream,
    advice: &'static str,
) -> Result<CapturesHeldOff<'a>, DeviceError> {
    stream.hold_off_captures().ok_or_else(|| captured(advice))
}

fn captured(advice: &'static str) -> DeviceError {
    let error = DeviceError::refused(Operation::CaptureStatus, Code::CAPTURE_UNSUPPORTED);
    error.of_request("nothing was enqueued").with_detail(advice)
}

/// Enqueues a copy of all rows of elements of `size` bytes: one call for each block, or for each
/// row where rows overlap or repeat.
///
/// # Safety
/// The memory that the rows reach from `from` and `to` on must be as
/// [`aquifer_device::Driver::copy_2d`] requires.
#[allow(unsafe_code, reason = "passed on from the driver")]
pub(crate) unsafe fn enqueue_rows(
    stream: &Stream,
    rows: &Rows<2>,
    (from, to): (CopyEnd, CopyEnd),
    size: u64,
) -> Result<(), DeviceError> {
    rows.blocks(0..rows.len(), |block| {
        // SAFETY: passed on to the caller; the block is one of the rows.
        unsafe { enqueue_block(stream, block, (from, to), size) }
    })
}

/// Enqueues a copy of a block of elements of `size` bytes.
///
/// # Safety
/// As [`enqueue_rows`], for the block.
#[allow(unsafe_code, reason = "passed on from the driver")]
pub(crate) unsafe fn enqueue_block(
    stream: &Stream,
    block: RowBlock<2>,
    (from, to): (CopyEnd, CopyEnd),
    size: u64,
) -> Result<(), DeviceError> {
    if !block.is_apart() {
        return block.rows().try_for_each(|row| {
            // SAFETY: passed on to the caller; the row is part of the block.
            unsafe { enqueue_block(stream, row, (from, to), size) }
        });
    }
    let [from_at, to_at] = block.at.map(|at| at * size);
    let [src_pitch, dst_pitch] = block.pitches.map(|pitch| pitch * size);
    let (src, dst, width) = (offset(from, from_at), offset(to, to_at), block.width * size);
    if block.height == 1 {
        // SAFETY: passed on to the caller.
        return unsafe { enqueue_part(stream, CopyPart { dst, src, bytes: width }) };
    }
    let copy = Copy2d { dst, dst_pitch, src, src_pitch, width, height: block.height };
    // SAFETY: passed on to the caller.
    unsafe { stream.copy_2d(&copy) }
}

/// Enqueues some copies with one call, if the driver has such a call, and the others with one each.
///
/// # Safety
/// As [`aquifer_device::Driver::copy_batch`], for all of them.
#[allow(unsafe_code, reason = "passed on from the driver")]
pub(crate) unsafe fn enqueue_parts(
    stream: &Stream,
    batched: &[CopyPart],
    single: &[CopyPart],
) -> Result<(), DeviceError> {
    let mut one_by_one = batched;
    if batched.len() > 1 {
        // SAFETY: passed on to the caller.
        match unsafe { stream.copy_batch(batched) } {
            // Nothing was enqueued.
            Err(error) if error.code == Code::NOT_SUPPORTED => tracing::debug!(%error, "no call for many copies"),
            called => {
                called?;
                one_by_one = &[];
            }
        }
    }
    one_by_one.iter().chain(single).try_for_each(|part| {
        // SAFETY: passed on to the caller.
        unsafe { enqueue_part(stream, *part) }
    })
}

#[allow(unsafe_code, reason = "passed on from the driver")]
unsafe fn enqueue_part(stream: &Stream, CopyPart { dst, src, bytes }: CopyPart) -> Result<(), DeviceError> {
    let host_bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    match (src, dst) {
        // SAFETY: passed on to the caller.
        (CopyEnd::Host(from), CopyEnd::Device(to)) => unsafe { stream.upload(to, from, host_bytes) },
        // SAFETY: passed on to the caller.
        (CopyEnd::Device(from), CopyEnd::Host(to)) => unsafe { stream.download(to, from, host_bytes) },
        (CopyEnd::Device(from), CopyEnd::Device(to)) => stream.copy(to, from, bytes),
        (CopyEnd::Host(_), CopyEnd::Host(_)) => unreachable!("one end is the device's"),
    }
}

/// A tick that covers the stream's work so far, which the host can query without waiting for later
/// work.
pub fn covered_tick(stream: &Stream) -> Tick {
    let tick = stream.tick();
    // Without an event the tick can still be queried, at the cost of waiting for later work, too.
    if let Err(error) = tick.timeline().cover_copy(tick.n()) {
        tracing::debug!(%error, "no event could be recorded after a copy");
    }
    tick
}

/// The place `bytes` further on, within memory that was checked.
fn offset(place: CopyEnd, bytes: u64) -> CopyEnd {
    match place {
        CopyEnd::Device(ptr) => CopyEnd::Device(ptr.offset(bytes)),
        CopyEnd::Host(mut ptr) => {
            ptr.0 += usize::try_from(bytes).unwrap_or(usize::MAX);
            CopyEnd::Host(ptr)
        }
    }
}
