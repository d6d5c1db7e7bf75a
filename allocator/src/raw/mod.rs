//! The raw interface: pointers instead of handles, for bindings to code that can only hold pointers.
//!
//! A table from pointer to block (`table.rs`) serves this interface alone; handles need no look-up.

#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod table;

use std::panic::Location;

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::BlockId;
use crate::shell::arena::Arena;
use table::Entry;

pub(crate) use table::RawTable;

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
        let (arena, block) = allocation.into_block();
        if block != BlockId::NONE {
            self.shell().raw.insert(ptr.0, Entry { slot: arena.slot, block, bytes });
        }
        Ok(ptr)
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block, or freed before.
    #[track_caller]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let invalid = AllocError::InvalidPointer { ptr: ptr.0 };
        let Some(Entry { slot, block, bytes }) = self.shell().raw.remove(ptr.0) else { return Err(invalid) };
        let Some(arena) = self.shell().arenas.get(slot) else { return Err(invalid) };
        if self.is_checked() {
            arena.tell_of_end(ptr, Some(Location::caller()));
        }
        arena.free(block, None, bytes);
        Ok(())
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        if stream.device_id() != self.device().id() {
            return Err(AllocError::wrong_device("stream", stream.device_id(), self.device().id()));
        }
        if ptr.0 == 0 {
            return Ok(());
        }
        self.look_raw(ptr, |arena, entry| {
            let mut core = self.shell().core();
            let slot = core.slot(stream);
            core.note_use(arena, entry.block, slot);
        })
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        fork::check(Operation::MemoryInfo)?;
        self.look_raw(ptr, |arena, entry| arena.look(|desk| desk.heap.blocks[entry.block].size))
    }

    /// Looks at a live raw allocation, which nobody can free meanwhile.
    fn look_raw<R>(&self, ptr: DevicePtr, look: impl FnOnce(&'static Arena, Entry) -> R) -> Result<R, AllocError> {
        let shell = self.shell();
        let looked = shell.raw.look(ptr.0, |entry| Some(look(shell.arenas.get(entry.slot)?, entry)));
        looked.flatten().ok_or(AllocError::InvalidPointer { ptr: ptr.0 })
    }
}
