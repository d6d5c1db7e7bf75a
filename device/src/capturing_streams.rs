//! Mutual exclusion of captures and of the calls that would break them.
//!
//! Such a call *holds captures off* while it runs. Invariant: while captures are held off none
//! begins, and while a stream captures none are held off. So no capture can begin between the check
//! and the call.
//!
//! The lock is a leaf. Beginning a capture waits for calls that hold captures off, and calls that
//! would hold off all captures wait for captures that are about to begin, so that neither waits for
//! ever. So neither is done under a lock that the other needs, such as that of a timeline. A thread
//! that already holds captures off does not wait to do so once more, for instance when it drops the
//! last handle of another device. No foreign code runs meanwhile.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Attempt, DeviceError, ErrorKind};
use crate::fork::{self, Mutex as Leaf};
use crate::sync::{Condvar, Mutex};

/// The streams of a context that are known to capture. While any stream captures, nothing may wait
/// for the device; while a blocking stream captures, nothing may be enqueued on the legacy stream.
/// So all drivers of one context share this: [`crate::Driver::capturing_streams`].
#[derive(Debug, Default)]
pub struct CapturingStreams {
    /// Number of capturing streams. Changed under the lock of `holding_off`, and read without it.
    all: AtomicU32,
    /// Number of the blocking ones among them, likewise.
    blocking: AtomicU32,
    holding_off: Mutex<HoldingOff>,
    changed: Condvar,
    /// The first call since a stream began to capture that the driver refused because of a capture:
    /// such a call breaks the capture, and the driver does not tell which it was. A leaf.
    refused: Leaf<Option<DeviceError>>,
}

/// The calls under way that would break a capture, and the captures that wait for them.
#[derive(Debug, Default)]
struct HoldingOff {
    /// Number of captures that are about to begin.
    beginning: u32,
    /// Number of calls that wait for the device.
    any: u32,
    /// Number of calls on the legacy stream.
    blocking: u32,
}

impl CapturingStreams {
    /// Notes that a stream captures from now on. Waits until no call holds that off.
    pub fn enter(&self, blocking: bool) {
        let mut holding_off = self.holding_off.lock();
        holding_off.beginning += 1;
        while holding_off.any > 0 || (blocking && holding_off.blocking > 0) {
            holding_off = self.changed.wait(holding_off);
        }
        holding_off.beginning -= 1;
        self.count(blocking);
        drop(holding_off);
        self.changed.notify_all();
    }

    /// As [`CapturingStreams::enter`], for a capture that another library has begun. Does not wait,
    /// because a call that holds captures off may be waiting for the end of this one.
    pub(crate) fn enter_begun(&self, blocking: bool) {
        let holding_off = self.holding_off.lock();
        self.count(blocking);
        drop(holding_off);
        self.changed.notify_all();
    }

    fn count(&self, blocking: bool) {
        if self.all.fetch_add(1, Ordering::AcqRel) == 0 {
            *self.refused.lock() = None;
        }
        self.blocking.fetch_add(blocking.into(), Ordering::AcqRel);
    }

    /// Notes that a stream does not capture any more.
    pub(crate) fn leave(&self, blocking: bool) {
        let holding_off = self.holding_off.lock();
        self.all.fetch_sub(1, Ordering::AcqRel);
        self.blocking.fetch_sub(blocking.into(), Ordering::AcqRel);
        drop(holding_off);
        self.changed.notify_all();
    }

    /// Holds captures off while the result lives. `None` if a stream captures already, or is about
    /// to.
    pub(crate) fn hold_off(&self) -> Option<HeldOff<'_>> {
        // A thread that is ending has no such count, and counts as holding captures off.
        let once_more = HELD_OFF.try_with(Cell::get).unwrap_or(1) > 0;
        let mut holding_off = self.holding_off.lock();
        while holding_off.beginning > 0 && !self.any() && !once_more {
            holding_off = self.changed.wait(holding_off);
        }
        (!self.any()).then(|| {
            holding_off.any += 1;
            HeldOff(self, HeldByThread::new())
        })
    }

    /// As [`CapturingStreams::hold_off`], but only for blocking streams. Does not wait, so that it
    /// may be called under the lock of a timeline.
    pub(crate) fn hold_off_blocking(&self) -> Option<BlockingHeldOff<'_>> {
        let mut holding_off = self.holding_off.lock();
        (self.blocking.load(Ordering::Acquire) == 0).then(|| {
            holding_off.blocking += 1;
            BlockingHeldOff(self, HeldByThread::new())
        })
    }

    /// Notes an error of the driver while a stream captures.
    #[cold]
    pub(crate) fn note_refused(&self, error: &DeviceError) {
        let was_called = matches!(error.attempt, Attempt::Call | Attempt::Function(_));
        if error.kind == ErrorKind::Capture && was_called && self.any() {
            self.refused.lock().get_or_insert_with(|| error.clone());
        }
    }

    /// The first call that the driver refused because of a capture, since a stream began to
    /// capture.
    pub(crate) fn refused(&self) -> Option<DeviceError> {
        self.refused.lock().clone()
    }

    /// True if any stream captures.
    pub fn any(&self) -> bool {
        self.all.load(Ordering::Acquire) > 0
    }
}

thread_local! {
    /// How many times the thread holds captures off at present.
    static HELD_OFF: Cell<u32> = const { Cell::new(0) };
}

/// One of the times that the thread holds captures off. It stays on the thread, which counts it.
#[derive(Debug)]
struct HeldByThread(PhantomData<*const ()>);

impl HeldByThread {
    fn new() -> HeldByThread {
        let _ = HELD_OFF.try_with(|held_off| held_off.set(held_off.get() + 1));
        HeldByThread(PhantomData)
    }
}

impl Drop for HeldByThread {
    fn drop(&mut self) {
        let _ = HELD_OFF.try_with(|held_off| held_off.set(held_off.get().saturating_sub(1)));
    }
}

/// Holds captures off while it lives.
#[derive(Debug)]
pub(crate) struct HeldOff<'a>(&'a CapturingStreams, HeldByThread);

impl Drop for HeldOff<'_> {
    fn drop(&mut self) {
        self.0.holding_off.lock().any -= 1;
        self.0.changed.notify_all();
    }
}

/// Holds captures of blocking streams off while it lives.
#[derive(Debug)]
pub(crate) struct BlockingHeldOff<'a>(&'a CapturingStreams, HeldByThread);

impl Drop for BlockingHeldOff<'_> {
    fn drop(&mut self) {
        // Another thread may have had the lock.
        if fork::is_child() {
            return;
        }
        self.0.holding_off.lock().blocking -= 1;
        self.0.changed.notify_all();
    }
}
