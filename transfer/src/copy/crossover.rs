//! The size up to which one call for many copies pays, measured on the device.
//!
//! A batch saves one call for each copy, but on some devices and drivers large copies take longer
//! in a batch, differently in each direction. So the first use of a direction times both ways, by
//! events on a separate stream, with sizes of 4 KiB to 256 KiB.

use std::sync::Arc;
use std::time::Duration;

use aquifer_allocator::{AccessGuard, Storage};
use aquifer_device::internal::MovesContents;
use aquifer_device::{AccessKind, Attribute, CopyEnd, CopyPart, ErrorKind, Stream};

use crate::counters::Direction;
use crate::enqueue::{enqueue_parts, offset};
use crate::error::TransferError;
use crate::pinned::HostPart;
use crate::runtime::Transfer;
use crate::timer::Timer;

/// The sizes to try, in bytes, in rising order.
const SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Copies of each size.
const COPIES: u64 = 16;
/// Measurements of each way; the shortest counts.
const ROUNDS: u32 = 3;

/// The stream and memory of a measurement.
struct Bench<'a> {
    stream: &'a Stream,
    device: &'a [(&'a Arc<Storage>, AccessKind)],
    host: &'a [(HostPart<'a>, AccessKind)],
}

impl Transfer {
    /// The size in bytes below which copies of a batch in this direction go to the driver in one
    /// call: `None` if the driver has no such call, `u64::MAX` if it pays at all sizes. Measured at
    /// the first call for a direction, which takes some milliseconds and 4 MiB of memory at either
    /// end, and waits for copies on a stream of its own, counted in [`Transfer::counters`]. If
    /// memory is too short to measure, batched calls stay off until a later call can measure. If
    /// the measurement of a batch fails otherwise, the answer is `None` from then on.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn batch_calls_pay_below(&self, direction: Direction) -> Result<Option<u64>, TransferError> {
        crossover(self, direction, &mut self.inner.crossovers[direction as usize].lock())
    }
}

/// As [`Transfer::batch_calls_pay_below`], for a batch: `None` if the measurement fails, as single
/// copies do as well. After a refusal of the driver there is no other attempt.
pub(super) fn batched_below(transfer: &Transfer, direction: Direction) -> Result<Option<u64>, TransferError> {
    // While one thread measures, others do without.
    let Some(mut known) = transfer.inner.crossovers[direction as usize].try_lock() else { return Ok(None) };
    match crossover(transfer, direction, &mut known) {
        Err(error) if !error.is_device_lost() => {
            if matches!(&error, TransferError::Device(error) if error.kind != ErrorKind::Capture) {
                tracing::warn!(%error, "one call for many copies is not used: whether it pays could not be measured");
                *known = Some(None);
            }
            Ok(None)
        }
        answer => answer,
    }
}

fn crossover(
    transfer: &Transfer,
    direction: Direction,
    known: &mut Option<Option<u64>>,
) -> Result<Option<u64>, TransferError> {
    if let Some(crossover) = *known {
        return Ok(crossover);
    }
    if transfer.device().driver().attribute(Attribute::BatchedCopies)? == 0 {
        *known = Some(None);
        return Ok(None);
    }
    match measure(transfer, direction) {
        Ok(crossover) => {
            *known = Some(Some(crossover));
            Ok(Some(crossover))
        }
        Err(error) if error.is_out_of_memory() => Ok(None),
        Err(error) => Err(error),
    }
}

fn measure(transfer: &Transfer, direction: Direction) -> Result<u64, TransferError> {
    let bytes = COPIES * SIZES[SIZES.len() - 1];
    let (on_host, other) = if direction == Direction::OnDevice { (0, bytes) } else { (bytes, 0) };
    // A stream without other work, because it is waited for.
    let stream = &transfer.device().stream()?;
    let mut host = transfer.pinned().alloc(usize::try_from(on_host).unwrap_or(usize::MAX), 1)?;
    let alloc = |bytes| transfer.allocator().alloc_storage(bytes, aquifer_allocator::ALIGNMENT, stream);
    let (device, other) = (alloc(bytes)?, alloc(other)?);
    let host = host.all_mut().host();
    let (reads, writes) = match direction {
        Direction::Upload => (CopyEnd::Host(host.ptr), CopyEnd::Device(device.ptr())),
        Direction::Download => (CopyEnd::Device(device.ptr()), CopyEnd::Host(host.ptr)),
        Direction::OnDevice => (CopyEnd::Device(device.ptr()), CopyEnd::Device(other.ptr())),
    };
    let kinds = if direction == Direction::Upload {
        (AccessKind::Write, AccessKind::Read)
    } else {
        (AccessKind::Read, AccessKind::Write)
    };
    let memory = [(&device, kinds.0), (&other, AccessKind::Write)];
    let bench = Bench { stream, device: &memory, host: &[(host, kinds.1)] };
    // The contents do not matter.
    let _moves = MovesContents::begin();
    for size in SIZES {
        // Gaps of a cache line keep drivers from merging the copies.
        let part = |at| CopyPart { dst: offset(writes, at), src: offset(reads, at), bytes: size - 64 };
        let copies: Vec<CopyPart> = (0..COPIES).map(|number| part(number * size)).collect();
        let batched = time(transfer, &bench, &copies, &[])?;
        let single = time(transfer, &bench, &[], &copies)?;
        if batched > single {
            return Ok(size);
        }
    }
    Ok(u64::MAX)
}

/// The time of copies, some with one call, the others with one each.
fn time(
    transfer: &Transfer,
    bench: &Bench<'_>,
    batched: &[CopyPart],
    single: &[CopyPart],
) -> Result<Duration, TransferError> {
    let Bench { stream, device, host } = *bench;
    let mut least = Duration::MAX;
    for _ in 0..ROUNDS {
        drop(AccessGuard::acquire(stream, device)?);
        transfer.shared().counters.waits();
        stream.synchronize()?;
        let timer = Timer::start(transfer.device(), stream)?;
        transfer.enqueue_uncovered(stream, device, host, || {
            #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
            // SAFETY: the host ends lie in `host`, which the pool keeps until the tick of this
            // access is done; the host does not touch it before (N1, N2).
            unsafe {
                enqueue_parts(stream, batched, single)
            }
        })?;
        transfer.shared().counters.waits();
        least = least.min(timer.stop(stream)?.wait()?);
    }
    Ok(least)
}
