//! Copies from one device to another.
//!
//! Both sides must hold still while neither's stream can speak for the other: the source is claimed, so that nobody begins to write it
//! between the copy and the note that its own device's stream comes after the copy; the target's stream waits for the source's before,
//! the source's for the target's after.

use aquifer_allocator::{Claim, DeviceBuffer, Turn};
use aquifer_device::{AccessKind, Stream};

use super::place::Route;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::Pending;
use crate::runtime::Transfer;

impl Transfer {
    /// Enqueues a copy from memory of another device to memory of this one, and returns; the runtime `from_runtime` is the other
    /// device's. Where devices cannot reach each other, the driver goes through the host. Both devices' later work is ordered
    /// after it, as if it were a copy within each.
    ///
    /// Between devices of different kinds, a real and a simulated one, bytes go through host memory, and this waits on the host.
    ///
    /// # Errors
    /// Ends of different lengths, memory of other devices than the runtimes', a stream that captures, and those of the drivers.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, DeviceBuffer};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_transfer::Transfer;
    /// let open = |ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal)));
    /// let one = Transfer::new(&Allocator::new(&open(0), Config::default())?)?;
    /// let two = Transfer::new(&Allocator::new(&open(1), Config::default())?)?;
    /// let (here, there) = (one.device().create_stream()?, two.device().create_stream()?);
    /// let from = one.to_device(vec![1u32, 2, 3], &here)?.wait()?;
    /// let mut to: DeviceBuffer<u32> = two.allocator().alloc_buffer(3, &there)?;
    /// two.copy_from_peer(&one, &from, &mut to)?.wait()?;
    /// assert_eq!(two.to_vec(&to)?.wait()?, [1, 2, 3]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn copy_from_peer<T: bytemuck::Pod>(
        &self,
        from_runtime: &Transfer,
        from: &DeviceBuffer<T>,
        to: &mut DeviceBuffer<T>,
    ) -> Result<Pending<()>, TransferError> {
        if from.len() != to.len() {
            return Err(TransferError::LengthMismatch { from: from.len(), to: to.len() });
        }
        from_runtime.check_device("buffer", from.storage().device_id())?;
        self.check_device("buffer", to.storage().device_id())?;
        if self.device().id() == from_runtime.device().id() {
            return self.copy(from, to);
        }
        if self.device().info().kind != from_runtime.device().info().kind {
            let bytes = from_runtime.to_vec(from)?.wait()?;
            return self.upload_from(bytes, to);
        }
        if to.bytes() == 0 {
            return Ok(Pending::ready(self.shared(), ()));
        }
        let (own, other) = (self.stream(Direction::OnDevice), from_runtime.stream(Direction::OnDevice));
        self.refuse_capture(own)?;
        from_runtime.refuse_capture(other)?;
        let claim = Claim::take(from.storage(), AccessKind::Read);
        let before = {
            let _turn = claim.turn(other)?;
            other.tick()
        };
        own.wait_for(&before)?;
        let copied = {
            let _turn = Turn::take(own, &[(to.storage(), AccessKind::Write)])?;
            own.copy_from_peer(to.ptr(), from_runtime.device(), from.ptr(), to.bytes())
        };
        // Even after a failure: nobody knows what the driver began.
        after_copy(own, other)?;
        drop(claim.turn(other)?);
        copied?;
        self.shared().tally.count(Direction::OnDevice, to.bytes());
        Ok(Pending::enqueued(self.shared(), self.covered_tick(own), ()))
    }

    /// The way that bytes go from another device to this one.
    pub fn route_from(&self, other: &Transfer) -> Route {
        Route::between(other.device(), self.device())
    }
}

/// Orders the source's stream after the copy on the target's; where that fails, the host waits for the copy instead.
fn after_copy(own: &Stream, other: &Stream) -> Result<(), TransferError> {
    let tick = own.tick();
    other.wait_for(&tick).or_else(|error| {
        tracing::debug!(%error, "streams of two devices could not be ordered; the host waits for the copy between them");
        tick.synchronize()
    })?;
    Ok(())
}
