//! What a driver that checks programs learns beyond its calls: the [`Witness`], and what the
//! calling thread does.
//!
//! A driver sees the work that is enqueued, but not why. The layers above it say which memory
//! allocators hand out in blocks, from which place in the program a call was made, and whether a
//! copy only moves contents elsewhere. A real GPU has no witness, and nothing is recorded for it.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::panic::{Location, RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use crate::driver::DevicePtr;

/// A place in the program, as `#[track_caller]` gives it.
pub type Caller = &'static Location<'static>;

/// A block that an allocator hands out.
#[derive(Clone, Debug)]
pub struct NewBlock {
    /// First address.
    pub ptr: DevicePtr,
    /// Bytes requested.
    pub bytes: u64,
    /// Name of the allocation.
    pub tag: Option<Arc<str>>,
    /// True if graphs keep using the memory after the block is dropped.
    pub is_for_graphs: bool,
    /// Where it was allocated.
    pub at: Option<Caller>,
}

/// Watches how allocators hand memory out, for a driver that checks its use
/// ([`Driver::witness`](crate::Driver::witness)).
///
/// A caching allocator holds memory that no block uses at the moment, and blocks lie side by side
/// in one allocation of the driver. So a driver alone cannot see that work goes beyond its block,
/// or uses a block that was dropped. Each method does nothing unless it is implemented, and must
/// neither call the driver nor take a lock that is held while something waits. It stays usable
/// after a panic.
pub trait Witness: fmt::Debug + Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Whether the other methods do anything. Allocators ask once, when they open.
    fn watches_blocks(&self) -> bool {
        false
    }

    /// From now on an allocator hands this range out in blocks, until the driver takes it back.
    fn managed(&self, _range: Range<u64>) {}

    /// A block is handed out. Its bytes are unwritten, even if the memory was written before.
    fn begins(&self, _block: NewBlock) {}

    /// The block at an address has `bytes` bytes from now on. Bytes that it gained are unwritten.
    fn resized(&self, _ptr: DevicePtr, _bytes: u64, _at: Option<Caller>) {}

    /// The block at an address was dropped: work that is enqueued from now on must not use it.
    fn ends(&self, _ptr: DevicePtr, _at: Option<Caller>) {}

    /// The contents of a range were lost: its bytes are unwritten.
    fn lost(&self, _range: Range<u64>) {}
}

thread_local! {
    /// The place that the present call was made from.
    static CALLER: Cell<Option<Caller>> = const { Cell::new(None) };
    /// The last place that a call was made from.
    static LAST: Cell<Option<Caller>> = const { Cell::new(None) };
    /// True while the contents of memory are moved elsewhere and back.
    static MOVES: Cell<bool> = const { Cell::new(false) };
    /// True if a panic would end a thread that others wait for.
    static DEFERS: Cell<bool> = const { Cell::new(false) };
}

/// Names the place that calls are made from while this exists. The outermost place counts.
#[derive(Debug)]
pub struct CalledFrom(Option<Caller>, OfThread);

/// Belongs to the thread that made it.
type OfThread = PhantomData<*const ()>;

impl CalledFrom {
    pub(crate) fn new(at: Caller) -> CalledFrom {
        let outer = CALLER.get();
        if outer.is_none() {
            CALLER.set(Some(at));
            LAST.set(Some(at));
        }
        CalledFrom(outer, PhantomData)
    }
}

impl Drop for CalledFrom {
    fn drop(&mut self) {
        CALLER.set(self.0);
    }
}

/// The place that the present call was made from, for work that another thread enqueues. `None`
/// where no witness wants to know it.
pub fn caller() -> Option<Caller> {
    CALLER.get()
}

/// The last place that this thread made a call from. For destructors, which have no place of their
/// own. A thread that ends has none.
pub fn last_caller() -> Option<Caller> {
    LAST.try_with(Cell::get).ok().flatten()
}

/// While this exists, the thread's copies move contents of memory elsewhere and back, and nothing
/// reads them meanwhile. Their ranges need not be blocks, and bytes that were never written stay
/// unwritten.
#[derive(Debug)]
pub struct MovesContents(bool, OfThread);

impl MovesContents {
    /// Begins, on this thread.
    pub fn begin() -> MovesContents {
        MovesContents(MOVES.replace(true), PhantomData)
    }
}

impl Drop for MovesContents {
    fn drop(&mut self) {
        MOVES.set(self.0);
    }
}

/// Whether the calling thread's copies only move contents: see [`MovesContents`].
pub fn moves_contents() -> bool {
    MOVES.get()
}

/// Keeps drivers from panicking on this thread from now on, because other threads wait for its
/// work. A driver that found an error of the program panics in the next wait of another thread
/// instead.
pub fn defer_panics_here() {
    DEFERS.set(true);
}

/// Whether a driver may report an error of the program by a panic on this thread now.
pub fn may_panic() -> bool {
    !std::thread::panicking() && DEFERS.try_with(|defers| !defers.get()).unwrap_or(false)
}
