//! Threads as owners of per-thread default streams.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// A thread's own number, which no other thread has, before or after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(u64);

impl Owner {
    /// The calling thread. Fit for destructors of thread-local values.
    #[inline]
    pub(crate) fn this_thread() -> Owner {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        thread_local! {
            static HERE: Cell<u64> = const { Cell::new(0) };
        }
        HERE.with(|here| {
            if here.get() == 0 {
                here.set(NEXT.fetch_add(1, Ordering::Relaxed));
            }
            Owner(here.get())
        })
    }
}

/// The owner of a stream, if it has one. It changes when the stream's number goes to another
/// stream. A stream that is gone counts as another thread's for every thread, so that one check
/// finds both.
#[derive(Debug)]
pub(super) struct OwnerCell(AtomicU64);

/// The number of no thread.
const NO_THREAD: u64 = u64::MAX;

impl OwnerCell {
    pub(super) fn new(owner: Option<Owner>) -> OwnerCell {
        OwnerCell(AtomicU64::new(Self::bits(owner)))
    }

    pub(super) fn set(&self, owner: Option<Owner>) {
        self.0.store(Self::bits(owner), Ordering::Relaxed);
    }

    /// Marks the stream as gone, so that no thread can use it any more.
    pub(super) fn close(&self) {
        self.0.store(NO_THREAD, Ordering::Relaxed);
    }

    /// True if no thread can use the stream any more.
    pub(super) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Relaxed) == NO_THREAD
    }

    /// True if the stream is another thread's, or gone.
    #[inline]
    pub(super) fn is_foreign(&self) -> bool {
        let owner = self.0.load(Ordering::Relaxed);
        owner != 0 && Owner(owner) != Owner::this_thread()
    }

    fn bits(owner: Option<Owner>) -> u64 {
        owner.map_or(0, |Owner(number)| number)
    }
}
