//! The raw interface: pointers instead of handles, for bindings to code that can only hold
//! pointers.
//!
//! Each arena has a table from pointer to block (`table.rs`), for this interface alone; handles
//! need no look-up. Which arena a pointer belongs to is guessed by its address (`guess.rs`).

pub(crate) mod guess;
mod owner;
pub(crate) mod ready;
#[cfg(all(test, aquifer_shuttle))]
mod schedules;
pub(crate) mod table;
#[cfg(all(test, not(aquifer_shuttle)))]
mod tests;

use std::panic::Location;

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::alloc::grant_cached;
use crate::alloc::grant_uncached;
use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::heap::BlockId;
use crate::state::AllocatorState;
use crate::state::arena::Granted;
use crate::state::arena::{Arena, UNKNOWN};
use crate::sync::atomic::Ordering;

pub use owner::{RawOwner, owner_of};

impl AllocatorState {
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

/// See [`Allocator::alloc_raw`].
#[track_caller]
#[inline]
pub(crate) fn alloc_raw(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<DevicePtr, AllocError> {
    let at = Location::caller();
    let searched = match grant_cached(allocator, bytes, stream, at, true) {
        Ok(granted) => return Ok(DevicePtr(granted.addr)),
        Err(searched) => searched,
    };
    let Granted { arena, block, addr } = grant_uncached(allocator, bytes, stream, searched, at)?;
    if block != BlockId::NONE {
        arena.look(|_| arena.add_raw(addr, block));
    }
    Ok(DevicePtr(addr))
}

/// See [`Allocator::free_raw`].
#[track_caller]
#[inline]
pub(crate) fn free_raw(allocator: &Allocator, ptr: DevicePtr) -> Result<(), AllocError> {
    fork::check(Operation::Free)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    let Some((arena, block)) = allocator.state().remove_raw(ptr) else {
        return Err(AllocError::InvalidPointer { ptr: ptr.0 });
    };
    if allocator.is_watched() {
        arena.report_end(ptr, Some(Location::caller()));
    }
    arena.free(block, None, UNKNOWN);
    Ok(())
}

/// See [`Allocator::free_raw_on`].
#[track_caller]
pub(crate) fn free_raw_on(allocator: &Allocator, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
    fork::check(Operation::Free)?;
    check_stream(allocator, stream)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    let removed = allocator.state().remove_raw(ptr);
    let (arena, block) = removed.ok_or(AllocError::InvalidPointer { ptr: ptr.0 })?;
    // Only the stream of the arena owns blocks there, unless it has lent some.
    let is_surely_own = arena.slot == stream.id() && !arena.has_lent.load(Ordering::Relaxed);
    if !is_surely_own && arena.look(|inner| inner.heap.blocks[block].owner != stream.id()) {
        note_use(allocator, arena, block, stream);
    }
    if allocator.is_watched() {
        arena.report_end(ptr, Some(Location::caller()));
    }
    arena.free(block, None, UNKNOWN);
    Ok(())
}

/// See [`Allocator::record_stream_raw`].
pub(crate) fn record_stream_raw(allocator: &Allocator, ptr: DevicePtr, stream: &Stream) -> Result<(), AllocError> {
    fork::check(Operation::Record)?;
    check_stream(allocator, stream)?;
    if ptr.0 == 0 {
        return Ok(());
    }
    allocator.state().look_at_raw(ptr, |arena, block| note_use(allocator, arena, block, stream))
}

/// See [`Allocator::size_of_raw`].
pub(crate) fn size_of_raw(allocator: &Allocator, ptr: DevicePtr) -> Result<u64, AllocError> {
    fork::check(Operation::MemoryInfo)?;
    allocator.state().look_at_raw(ptr, |arena, block| arena.look(|inner| inner.heap.blocks[block].size))
}

fn check_stream(allocator: &Allocator, stream: &Stream) -> Result<(), AllocError> {
    let (theirs, ours) = (stream.device_id(), allocator.device().id());
    if theirs == ours { Ok(()) } else { Err(AllocError::wrong_device("stream", theirs, ours)) }
}

/// Notes that a stream uses a live block, which no other thread can free meanwhile.
fn note_use(allocator: &Allocator, arena: &'static Arena, block: BlockId, stream: &Stream) {
    let mut shared = allocator.state().shared();
    let slot = shared.slot(stream);
    shared.note_use(arena, block, slot);
}
