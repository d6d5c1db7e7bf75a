//! The calling thread: the place in the program that the simulator was called from, and whether it
//! may panic there.

use std::cell::Cell;
use std::marker::PhantomData;
use std::panic::Location;

/// A place in the program, as `#[track_caller]` gives it.
pub(crate) type Caller = &'static Location<'static>;

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

/// The place that the present call was made from, for work that another thread enqueues.
#[doc(hidden)]
pub fn caller() -> Option<Caller> {
    CALLER.get()
}

/// The last place that this thread made a call from. For destructors, which have no place of their
/// own. A thread that ends has none.
pub(super) fn last_caller() -> Option<Caller> {
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

pub(super) fn moves_contents() -> bool {
    MOVES.get()
}

/// Keeps violations from panicking on this thread from now on: other threads wait for its work.
/// They panic in the next wait of another thread instead. See
/// [`SimConfig::panic_on_violation`](super::SimConfig::panic_on_violation).
#[doc(hidden)]
pub fn defer_panics_here() {
    DEFERS.set(true);
}

/// True if a violation may panic on this thread now.
pub(super) fn may_panic() -> bool {
    !std::thread::panicking() && DEFERS.try_with(|defers| !defers.get()).unwrap_or(false)
}
