//! Keeping an allocator awake: turns with its memory and claims do so, and callers of [`Allocator::keep_awake`].
//!
//! Work that is about to be enqueued has no tick yet, so waiting for the device does not wait for it. So an allocator that is to
//! sleep first becomes *drowsy*: nothing new may keep it awake, and it waits for what already does. Threads that keep it awake may go on
//! meanwhile, also with further turns, because they could not come to an end otherwise; and so may work for which memory was claimed
//! (invariant A9).
//!
//! A newcomer counts itself before it checks whether the allocator is drowsy; a thread that puts the allocator to sleep makes it drowsy
//! before it reads the count. Both accesses are sequentially consistent, so at least one of the two sees the other.
//!
//! Who waits for the allocator to wake up checks that under a lock, which is taken after drowsiness has ended and before that is told. So it
//! is not missed.

use std::cell::RefCell;
use std::fmt;
use std::marker::PhantomData;

use aquifer_device::fork::Mutex;
use parking_lot::Condvar;

use crate::error::AllocError;
use crate::shell::Shell;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::pause;

#[cfg(aquifer_shuttle)]
use shuttle::thread_local;

thread_local! {
    /// The shells that this thread keeps awake, each listed as often as the thread does so.
    static KEPT: RefCell<Vec<&'static Shell>> = const { RefCell::new(Vec::new()) };
}

/// The part of a shell that says whether it is drowsy and how much keeps it awake.
#[derive(Debug, Default)]
pub(crate) struct Wakefulness {
    drowsy: AtomicBool,
    keepers: AtomicU64,
    /// A leaf: see the module's documentation.
    pub(crate) waking: Mutex<()>,
    pub(crate) woken: Condvar,
}

/// A count of one in what keeps an allocator awake. While there is a keeper, on any thread, the allocator does not give its memory back.
pub(crate) struct Keeper(&'static Shell);

impl Keeper {
    /// # Errors
    /// When the allocator sleeps, or is about to, and this thread does not keep it awake already.
    pub(crate) fn new(shell: &'static Shell) -> Result<Keeper, AllocError> {
        // Checked before counting, too, so that a thread that is refused and tries again and again does not keep the allocator awake.
        if shell.refuses_keepers() {
            return Err(AllocError::Asleep);
        }
        shell.wakefulness.keepers.fetch_add(1, Ordering::SeqCst);
        let keeper = Keeper(shell);
        if shell.refuses_keepers() { Err(AllocError::Asleep) } else { Ok(keeper) }
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.wakefulness.keepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A thread's hold on an allocator that keeps it awake; each of the thread's turns has one. The shell has live memory, or a handle, so it
/// is not recycled.
pub(crate) struct KeptAwake {
    shell: &'static Shell,
    /// `None` for a turn of a claim, where the claim keeps the allocator awake.
    _keeper: Option<Keeper>,
    /// Bound to its thread.
    _thread: PhantomData<*const ()>,
}

impl KeptAwake {
    pub(crate) fn new(shell: &'static Shell) -> Result<KeptAwake, AllocError> {
        Keeper::new(shell).map(|keeper| KeptAwake::note(shell, Some(keeper)))
    }

    /// Keeps each of these shells awake.
    pub(crate) fn of_all(shells: impl Iterator<Item = &'static Shell>) -> Result<Vec<KeptAwake>, AllocError> {
        let mut kept: Vec<KeptAwake> = Vec::new();
        for shell in shells {
            if !kept.iter().any(|kept| std::ptr::eq(kept.shell, shell)) {
                kept.push(KeptAwake::new(shell)?);
            }
        }
        Ok(kept)
    }

    /// The hold of a turn of a claim.
    pub(crate) fn of_claim(shell: &'static Shell) -> KeptAwake {
        KeptAwake::note(shell, None)
    }

    fn note(shell: &'static Shell, keeper: Option<Keeper>) -> KeptAwake {
        // Fails only on a thread that is ending, which puts nothing to sleep any more.
        let _ = KEPT.try_with(|kept| kept.borrow_mut().push(shell));
        KeptAwake { shell, _keeper: keeper, _thread: PhantomData }
    }
}

impl fmt::Debug for KeptAwake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptAwake").finish_non_exhaustive()
    }
}

impl Drop for KeptAwake {
    fn drop(&mut self) {
        let _ = KEPT.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if let Some(at) = kept.iter().rposition(|&other| std::ptr::eq(other, self.shell)) {
                kept.swap_remove(at);
            }
        });
    }
}

impl Shell {
    /// True if the allocator sleeps, or is about to.
    pub(crate) fn is_drowsy(&self) -> bool {
        self.wakefulness.drowsy.load(Ordering::SeqCst)
    }

    /// True if the calling thread may not begin to keep the allocator awake.
    pub(crate) fn refuses_keepers(&'static self) -> bool {
        self.is_drowsy() && !self.is_kept_awake_here()
    }

    /// True if the calling thread keeps the allocator awake.
    pub(crate) fn is_kept_awake_here(&'static self) -> bool {
        KEPT.try_with(|kept| kept.borrow().iter().any(|&other| std::ptr::eq(other, self))).unwrap_or(false)
    }

    /// Makes the allocator drowsy, so that nobody begins to keep it awake, and waits until nobody does. The calling thread must not keep it
    /// awake.
    pub(crate) fn grow_drowsy(&self) {
        self.wakefulness.drowsy.store(true, Ordering::SeqCst);
        while self.wakefulness.keepers.load(Ordering::SeqCst) > 0 {
            pause();
        }
    }

    /// Ends drowsiness: others may keep the allocator awake again.
    pub(crate) fn end_drowsiness(&self) {
        self.wakefulness.drowsy.store(false, Ordering::SeqCst);
        drop(self.wakefulness.waking.lock());
        self.wakefulness.woken.notify_all();
    }
}
