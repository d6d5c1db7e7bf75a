//! Clean-up that a failing driver or a capture in progress interrupted, after the last handle was
//! dropped: captures to be ended, and the release queues of devices that were closed.
//!
//! Captures are tried again when one is in the way of a call of their device. What belongs to
//! devices of which callers have no handle is tried whenever any device of the process is opened or
//! settled. Invariant: an unfinished clean-up is in the list, or, if it is of a release queue, one
//! thread is trying it.
//!
//! Things whose drop makes driver calls, and that are dropped where none may be made, wait in a
//! list of their own, by device: handles of a device whose allocator went with its last buffer, and
//! what other crates kept for it. They are dropped at a later call of the device, with its last
//! handle of a caller, or, if callers have none any more, when any device of the process is opened
//! or settled.
//!
//! The lists' locks are leaves: nothing is called or dropped under them.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::capturing_streams::CapturingStreams;
use crate::fork::{self, Mutex};

/// A clean-up that may have to be tried several times.
pub(crate) trait CleanUp: Send + Sync {
    /// Tries to finish. Returns true if nothing is left to do.
    fn finish(&self) -> bool;

    /// For a capture to be ended: the capturing streams that its own are among.
    fn captures_in(&self) -> Option<Arc<CapturingStreams>> {
        None
    }

    /// True if callers have a handle of the device, whose calls then do the clean-up.
    fn has_callers(&self) -> bool {
        false
    }
}

static UNFINISHED: Mutex<Vec<Arc<dyn CleanUp>>> = Mutex::new(Vec::new());

/// Something that is dropped later.
struct Left {
    device: u32,
    /// Number of handles of the device that callers have.
    handles: Arc<AtomicUsize>,
    _thing: Box<dyn Any + Send>,
}

#[cfg(not(aquifer_shuttle))]
static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

// A scheduler's locks, which devices have, are bound to one execution.
#[cfg(aquifer_shuttle)]
shuttle::lazy_static! {
    static ref LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());
}

/// False if that list is empty. Changed under its lock, and read without it.
static ANY_LEFT: AtomicBool = AtomicBool::new(false);

/// Leaves something of a device to be dropped where driver calls are allowed. Makes none.
pub(crate) fn drop_later(device: u32, handles: Arc<AtomicUsize>, thing: Box<dyn Any + Send>) {
    let mut all = LEFT.lock();
    all.push(Left { device, handles, _thing: thing });
    ANY_LEFT.store(true, Ordering::Release);
}

/// Drops what is left of a device.
pub(crate) fn drop_left_of(device: u32) {
    drop_those(|left| left.device == device);
}

/// Drops what is left of devices of which callers have no handle. The others' next call does it.
pub fn drop_left() {
    drop_those(|left| left.handles.load(Ordering::Acquire) == 0);
}

fn drop_those(is_one: impl Fn(&Left) -> bool) {
    if fork::is_child() || !ANY_LEFT.load(Ordering::Acquire) {
        return;
    }
    let mut all = LEFT.lock();
    let those: Vec<_> = all.extract_if(.., |left| is_one(left)).collect();
    ANY_LEFT.store(!all.is_empty(), Ordering::Release);
    drop(all);
    drop(those);
}

/// Adds a clean-up to the list. Makes no driver call.
pub(crate) fn keep(clean_up: Arc<dyn CleanUp>) {
    UNFINISHED.lock().push(clean_up);
}

/// Tries a clean-up now, and adds it to the list if it cannot be finished.
pub(crate) fn finish_or_keep(clean_up: Arc<dyn CleanUp>) {
    if !clean_up.finish() {
        keep(clean_up);
    }
}

/// Drops what was left, and tries the clean-up of devices of which callers have no handle.
pub fn finish_all() {
    drop_left();
    end_those(|capture| !capture.has_callers());
    if fork::is_child() {
        return;
    }
    let queues: Vec<_> = UNFINISHED.lock().extract_if(.., |clean_up| clean_up.captures_in().is_none()).collect();
    queues.into_iter().for_each(finish_or_keep);
}

/// Tries to end the captures that were dropped on streams of these.
pub(crate) fn end_captures(of: &Arc<CapturingStreams>) {
    end_those(|capture| capture.captures_in().is_some_and(|own| Arc::ptr_eq(&own, of)));
}

/// Tries to end captures. They stay in the list meanwhile, so another thread that one is in the way
/// of waits for this one.
fn end_those(is_one: impl Fn(&dyn CleanUp) -> bool) {
    if fork::is_child() {
        return;
    }
    let listed: Vec<_> = UNFINISHED.lock().iter().map(Arc::clone).collect();
    let captures = listed.into_iter().filter(|clean_up| clean_up.captures_in().is_some() && is_one(&**clean_up));
    for capture in captures.filter(|capture| capture.finish()) {
        let is_it = |other: &mut Arc<dyn CleanUp>| std::ptr::addr_eq(Arc::as_ptr(other), Arc::as_ptr(&capture));
        let ended: Vec<_> = UNFINISHED.lock().extract_if(.., is_it).collect();
        drop(ended);
    }
}
