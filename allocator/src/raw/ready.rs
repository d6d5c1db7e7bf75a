//! Raw memory that no work uses any more when it is given out.

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;

/// The stream that such memory is allocated for. Nothing is enqueued on it but waits, so memory that it owns is unused
/// as soon as what it waits for is done.
struct Ready(Stream);

impl Allocator {
    /// Allocates raw memory that may be used at once on every stream, and by the host's blocking copies, as that of the
    /// synchronous `cuMemAlloc`: whatever used the memory before is done. Memory of which that is known is taken first,
    /// then memory of the device; the host waits only before it would run out. (With `cross_stream:wait` memory of
    /// other streams comes before that of the device, and is waited for.)
    ///
    /// [`Allocator::free_raw`] gives it back for use at once, so before that **the caller must wait for all work that
    /// uses it**, as `cuMemFree` does, such as with [`aquifer_device::Device::synchronize`]. [`Allocator::free_raw_on`]
    /// gives it back in the order of a stream, without waiting, if no other stream uses it or those that do are
    /// recorded.
    ///
    /// # Errors
    /// As [`Allocator::alloc_raw`]; a driver that refuses a stream, or to wait for one.
    #[track_caller]
    pub fn alloc_raw_ready(&self, bytes: u64) -> Result<DevicePtr, AllocError> {
        fork::check(Operation::Alloc)?;
        let ready = self.service(|| self.device().stream().map(Ready))?;
        let ptr = self.alloc_raw(bytes, &ready.0)?;
        if let Err(error) = self.wait_for_all_before(&ready.0) {
            self.free_raw(ptr)?;
            return Err(error);
        }
        Ok(ptr)
    }

    /// Waits on the host until all is done that the later work of a stream is ordered after. Mostly all is known done.
    fn wait_for_all_before(&self, stream: &Stream) -> Result<(), AllocError> {
        let clock = stream.timeline().clock();
        let core = self.shell().core();
        let slots = 0..u32::try_from(core.timelines.len()).unwrap_or(u32::MAX);
        let others = slots.filter(|&slot| slot != stream.id());
        let pending = core.unknown(others.map(|slot| (slot, clock.of(slot))));
        drop(core);
        for (timeline, after) in pending {
            timeline.synchronize(after.saturating_sub(1))?;
        }
        Ok(())
    }
}
