//! The raw interface: pointers instead of handles, for bindings to code that can only hold pointers.
//!
//! Each arena has a table from pointer to block (`table.rs`), for this interface alone; handles need no look-up. Which
//! arena a pointer belongs to is guessed by its address (`guess.rs`).

mod guess;
mod owner;
mod ready;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
mod table;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;

use std::panic::Location;

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::BlockId;
use crate::shell::Shell;
use crate::shell::arena::{Arena, UNKNOWN};
use crate::shell::core::Granted;

pub(crate) use guess::Guesses;
pub use owner::{RawOwner, owner_of};
pub(crate) use table::RawTable;

impl Shell {
    /// Removes a raw pointer.
    #[inline]
    fn remove_raw(&self, ptr: DevicePtr) -> Option<(&'static Arena, BlockId)> {
        let arena = self.arenas.get(self.guesses.slot_of(ptr.0))?;
        match arena.raw.remove(ptr.0) {
            Some(block) => Some((arena, block)),
            None => self.remove_raw_elsewhere(ptr),
        }
    }

    #[cold]
    #[inline(never)]
    fn remove_raw_elsewhere(&self, ptr: DevicePtr) -> Option<(&'static Arena, BlockId)> {
        self.arenas.iter().find_map(|arena| Some((arena, arena.raw.remove(ptr.0)?)))
    }

    /// Looks at a live raw allocation, which no thread can free meanwhile.
    fn look_at_raw<R>(&self, ptr: DevicePtr, look: impl Fn(&'static Arena, BlockId) -> R) -> Result<R, AllocError> {
        let look_in = |arena: &'static Arena| arena.raw.look(ptr.0, |block| look(arena, block));
        let guessed = self.arenas.get(self.guesses.slot_of(ptr.0)).and_then(look_in);
        let found = guessed.or_else(|| self.arenas.iter().find_map(look_in));
        found.ok_or(AllocError::InvalidPointer { ptr: ptr.0 })
    }
}

impl Allocator {
    /// Allocates and returns the bare pointer, to be freed with [`Allocator::free_raw`]. Zero bytes give a null
    /// pointer.
    ///
    /// Free the pointer before the last handle of the allocator is dropped. Afterwards it can no longer be freed, and
    /// its memory and device stay in use until the process ends.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`].
    #[track_caller]
    #[inline]
    pub fn alloc_raw(&self, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
        let at = Location::caller();
        let searched = match self.grant_cached(bytes, stream, at, true) {
            Ok(granted) => return Ok(DevicePtr(granted.addr)),
            Err(searched) => searched,
        };
        let Granted { arena, block, addr } = self.grant_the_long_way(bytes, stream, searched, at)?;
        if block != BlockId::NONE {
            arena.look(|_| arena.add_raw(addr, block));
        }
        Ok(DevicePtr(addr))
    }

    /// Frees a pointer from [`Allocator::alloc_raw`]. A null pointer is ignored.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here: foreign, inside a block, or freed before.
    #[track_caller]
    #[inline]
    pub fn free_raw(&self, ptr: DevicePtr) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let Some((arena, block)) = self.shell().remove_raw(ptr) else {
            return Err(AllocError::InvalidPointer { ptr: ptr.0 });
        };
        if self.is_checked() {
            arena.tell_of_end(ptr, Some(Location::caller()));
        }
        arena.free(block, None, UNKNOWN);
        Ok(())
    }

    /// Frees a raw allocation in the order of `stream`, as `cuMemFreeAsync(ptr, stream)`: work enqueued on `stream`
    /// until now may still use the memory. Nothing waits.
    ///
    /// The memory is reused once that work is done, or by streams that are ordered after it; also once the work is done
    /// that the streams noted by [`Allocator::record_stream_raw`] have until now. The stream of the allocation itself
    /// always counts, as of now. So `stream` need not be ordered after any other one. On the stream of the allocation,
    /// this is [`Allocator::free_raw`].
    ///
    /// # Errors
    /// As [`Allocator::free_raw`]; a stream of another device. The pointer is live afterwards.
    #[track_caller]
    pub fn free_raw_on(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Free)?;
        self.check_stream(stream)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        let removed = self.shell().remove_raw(ptr);
        let (arena, block) = removed.ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
        self.note_use(arena, block, stream);
        if self.is_checked() {
            arena.tell_of_end(ptr, Some(Location::caller()));
        }
        arena.free(block, None, UNKNOWN);
        Ok(())
    }

    /// Notes that `stream` uses a raw allocation too, as [`crate::Allocation::record_stream`].
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here; a stream of another device.
    pub fn record_stream_raw(&self, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        self.check_stream(stream)?;
        if ptr.0 == 0 {
            return Ok(());
        }
        self.shell().look_at_raw(ptr, |arena, block| self.note_use(arena, block, stream))
    }

    /// The size in bytes of a live raw allocation's block, rounding included.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] for a pointer that is not live here.
    pub fn size_of_raw(&self, ptr: DevicePtr) -> Result<u64, AllocError> {
        fork::check(Operation::MemoryInfo)?;
        self.shell().look_at_raw(ptr, |arena, block| arena.look(|desk| desk.heap.blocks[block].size))
    }

    fn check_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        let (theirs, ours) = (stream.device_id(), self.device().id());
        if theirs == ours { Ok(()) } else { Err(AllocError::wrong_device("stream", theirs, ours)) }
    }

    /// Notes that a stream uses a live block, which no other thread can free meanwhile.
    fn note_use(&self, arena: &'static Arena, block: BlockId, stream: &Stream) {
        let mut core = self.shell().core();
        let slot = core.slot(stream);
        core.note_use(arena, block, slot);
    }
}
