//! The raw interface: pointers instead of handles, for bindings to code that can only hold pointers.
//!
//! A map from pointer to block serves this interface alone; handles need no look-up.

use std::panic::Location;

use aquifer_device::{DevicePtr, Stream};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::shell::arena::UNKNOWN;

impl Allocator {
    /// Allocates and returns the bare pointer, to be freed with [`Allocator::free_raw`]. Zero bytes give a null pointer.
    ///
    /// Free the pointer before the last handle of the allocator is dropped. Afterwards it can no longer be freed, and its memory and device
    /// stay in use until the process ends.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`].
    #[track_caller]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let allocation = self.alloc_bytes(bytes, stream)?;
        let ptr = allocation.ptr();
        if bytes > 0 {
            self.shell().core().raw.insert(ptr.0, allocation.into_block());
        }
        Ok(ptr)
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block, or freed before.
    #[track_caller]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Free)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let removed = self.shell().core().raw.remove(&ptr.0);
        let (arena, block) = removed.ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        let at = Location::caller();
        self.shell().tell_checks(|checks| checks.dropped(ptr, Some(at)));
        arena.free(block, None, UNKNOWN);
        Ok(())
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Record)?;
        if stream.device_id() != self.device().id() {
            return Err(AllocError::wrong_device("stream", stream.device_id(), self.device().id()));
        }
        if ptr.0 == 0 {
            return Ok(());
        }
        let mut core = self.shell().core();
        let (arena, block) = *core.raw.get(&ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        let slot = core.slot(stream);
        core.note_use(arena, block, slot);
        Ok(())
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::MemoryInfo)?;
        let core = self.shell().core();
        let (arena, block) = *core.raw.get(&ptr.0).ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        Ok(arena.look(|desk| desk.heap.blocks[block].size))
    }
}
