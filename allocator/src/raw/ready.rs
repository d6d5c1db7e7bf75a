//! Raw memory that no work uses any more when it is given out.

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::types::{After, StreamId, Use};

impl Allocator {
    /// Allocates raw memory that may be used at once on every stream, and by the host's blocking
    /// copies, as that of the synchronous `cuMemAlloc`: all earlier uses of the memory are done.
    /// Memory of which that is known is taken first, then memory of the device; the host waits only
    /// before it would run out. (With `cross_stream:wait` memory of other streams comes before that
    /// of the device, and is waited for.)
    ///
    /// [`Allocator::free_raw`] gives it back for use at once, so before that **the caller must wait
    /// for all work that uses it**, as `cuMemFree` does, such as with
    /// [`aquifer_device::Device::synchronize`]. [`Allocator::free_raw_on`] gives it back in the
    /// order of a stream, without waiting, if no other stream uses it or those that do are
    /// recorded.
    ///
    /// # Errors
    /// As [`Allocator::alloc_raw`]; a driver that refuses a stream, or to wait for one.
    #[track_caller]
    pub fn alloc_raw_ready(&self, bytes: u64) -> Result<DevicePtr, AllocError> {
        fork::check(Operation::Alloc)?;
        let stream = self.ready_stream()?;
        let ptr = self.alloc_raw(bytes, stream)?;
        if let Err(error) = wait_for_all_before(self, stream) {
            self.free_raw(ptr)?;
            return Err(error);
        }
        Ok(ptr)
    }
}

/// Waits on the host until all is done that the later work of a stream is ordered after. Mostly all
/// is known done.
fn wait_for_all_before(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let clock = stream.timeline().clock();
    let shared = allocator.state().shared();
    let others = shared.streams.ids().filter(|&other| other != StreamId::of(stream));
    let pending =
        shared.streams.not_done(others.map(|other| Use { stream: other, after: After::ordered(&clock, other) }));
    drop(shared);
    for (timeline, after) in pending {
        timeline.synchronize(after.last_tick())?;
    }
    Ok(())
}
