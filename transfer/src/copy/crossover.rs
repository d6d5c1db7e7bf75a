//! Up to which size one call for many copies pays, measured on the device.
//!
//! A batch saves one call for each copy, but on some devices and drivers large copies take longer in a batch, and not in each direction alike.
//! So both ways are timed at the first use of a direction, by events on a separate stream, with sizes of 4 KiB to 256 KiB.

use aquifer_allocator::{Buffer, Storage, Turn};
use aquifer_device::{AccessKind, Attribute, CopyEnd, CopyPart, DeviceError, ErrorKind, Stream};

use crate::copy::batch::enqueue_parts;
use crate::copy::region::further;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::pinned::{HostPart, PinnedBuffer, PinnedSliceMut};
use crate::runtime::Transfer;

/// Sizes that are tried, in bytes, by rising order.
const SIZES: [u64; 4] = [4 << 10, 16 << 10, 64 << 10, 256 << 10];
/// Copies of each size.
const COPIES: u64 = 16;
/// Measurements of each way, of which the shortest counts.
const ROUNDS: u32 = 3;

/// Where copies are measured, and the memory that they use.
struct Bench<'a> {
    stream: &'a Stream,
    device: &'a [(&'a Storage, AccessKind)],
    host: &'a [(HostPart<'a>, AccessKind)],
}

impl Transfer {
    /// Copies in this direction of less than so many bytes go to the driver together when they are part of a batch: `None` where the driver
    /// has no such call, `u64::MAX` where it pays at all sizes. Measured at the first call for a direction, which takes some milliseconds
    /// and 4 MiB of memory at either end, and waits for copies on a stream of its own, counted in [`Transfer::counters`]. If memory is too
    /// short to measure, batched calls stay off until a later call can measure. A batch whose measurement fails otherwise settles for `None`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn batch_calls_pay_below(&self, direction: Direction) -> Result<Option<u64>, TransferError> {
        self.crossover(direction, &mut self.inner.crossovers[direction as usize].lock())
    }

    /// The same for a batch, which does without that call where measuring failed: single copies do as well. Where the driver refused, it
    /// is not asked again.
    pub(super) fn batched_below(&self, direction: Direction) -> Result<Option<u64>, TransferError> {
        // While somebody measures, others do without.
        let Some(mut known) = self.inner.crossovers[direction as usize].try_lock() else { return Ok(None) };
        match self.crossover(direction, &mut known) {
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

    fn crossover(&self, direction: Direction, known: &mut Option<Option<u64>>) -> Result<Option<u64>, TransferError> {
        if let Some(crossover) = *known {
            return Ok(crossover);
        }
        if self.device().driver().attribute(Attribute::BatchedCopies)? == 0 {
            *known = Some(None);
            return Ok(None);
        }
        match self.measure(direction) {
            Ok(crossover) => {
                *known = Some(Some(crossover));
                Ok(Some(crossover))
            }
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn measure(&self, direction: Direction) -> Result<u64, TransferError> {
        let bytes = COPIES * SIZES[SIZES.len() - 1];
        let (on_host, other) = if direction == Direction::OnDevice { (0, bytes) } else { (bytes, 0) };
        // One that nobody else's work is on: it is waited for.
        let stream = &self.device().stream()?;
        let mut host: PinnedBuffer<u8> = self.pinned().alloc(host_vec::len_of(on_host, 1)?)?;
        let device: Buffer<u8> = self.alloc_bytes(bytes, stream)?;
        let other: Buffer<u8> = self.alloc_bytes(other, stream)?;
        let host = PinnedSliceMut::from(&mut host).part();
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
        let memory = [(device.storage().as_ref(), kinds.0), (other.storage().as_ref(), AccessKind::Write)];
        let bench = Bench { stream, device: &memory, host: &[(host, kinds.1)] };
        // What the memory holds does not matter.
        let _moves = self.move_contents();
        for size in SIZES {
            // Gaps of a line keep the copies apart, so that no driver makes one of them.
            let part = |at| CopyPart { dst: further(writes, at), src: further(reads, at), bytes: size - 64 };
            let copies: Vec<CopyPart> = (0..COPIES).map(|number| part(number * size)).collect();
            let batched = self.time(&bench, &copies, &[])?;
            let single = self.time(&bench, &[], &copies)?;
            if batched > single {
                return Ok(size);
            }
        }
        Ok(u64::MAX)
    }

    /// Milliseconds that copies take, some with one call, the others with one each.
    fn time(&self, bench: &Bench<'_>, batched: &[CopyPart], single: &[CopyPart]) -> Result<f64, TransferError> {
        let Bench { stream, device, host } = *bench;
        let mut least = f64::INFINITY;
        for _ in 0..ROUNDS {
            let (start, end) = (self.device().create_event(true)?, self.device().create_event(true)?);
            {
                let _turn = Turn::take(stream, device)?;
            }
            self.shared().tally.waits();
            stream.synchronize()?;
            self.enqueue(stream, device, host, || -> Result<(), DeviceError> {
                start.record(stream)?;
                #[allow(unsafe_code, reason = "the driver gets addresses; what keeps them good is above")]
                // SAFETY: what of the copies is on the host lies in `host`, which the pool keeps until the tick is done that its turn
                // leaves; the host does not touch it before (N1, N2).
                unsafe { enqueue_parts(stream, batched, single) }?;
                end.record(stream)
            })?;
            self.shared().tally.waits();
            end.synchronize()?;
            least = least.min(start.elapsed_ms(&end)?);
        }
        Ok(least)
    }
}
