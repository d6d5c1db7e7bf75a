//! Clean-up to be finished later, which no handle stands for any more: captures to be ended, and the remains of devices that are gone.
//!
//! A clean-up is deferred where it would need a driver call that failed, or that cannot be made now. It is tried again whenever a device is
//! opened or settled, of any driver. Invariant: a deferred clean-up is finished, in the list, or in the hands of one thread.
//!
//! The list's lock is a leaf: no driver call is made under it, and nothing is dropped.

use std::sync::Arc;

use crate::fork::Mutex;

use crate::capture::{self, Scope};
use crate::capturing_streams::{CapturingStreams, HeldOff};
use crate::device;
use crate::fork;
use crate::orphans::Orphans;
use crate::timeline::Retired;

/// A clean-up that is still to be done.
pub(crate) enum Deferred {
    /// A device whose last handle was dropped where no driver call can be made.
    Device(Box<device::Inner>),
    /// A capture that nobody holds.
    Capture(Arc<Scope>),
    /// Streams of a device that is gone.
    Streams(Arc<Retired>),
    /// The objects that a device left behind, with its driver.
    Orphans(Arc<Orphans>),
}

static DEFERRED: Mutex<Vec<Deferred>> = Mutex::new(Vec::new());

impl Deferred {
    /// Tries to finish. Returns the rest.
    fn finish(self) -> Option<Deferred> {
        match self {
            Deferred::Device(device) => {
                drop(device);
                None
            }
            Deferred::Capture(scope) => (!capture::end_left(&scope)).then_some(Deferred::Capture(scope)),
            Deferred::Streams(streams) => {
                streams.destroy_at_last();
                streams.has_undestroyed().then_some(Deferred::Streams(streams))
            }
            Deferred::Orphans(orphans) => {
                let capturing = orphans.capturing().clone();
                let Some(held_off) = capturing.hold_off() else { return Some(Deferred::Orphans(orphans)) };
                let (is_done, owners) = orphans.free_every(&held_off);
                // Waits for the device where the driver still has memory, so captures are held off.
                let rest = (!is_done).then_some(Deferred::Orphans(orphans));
                drop(held_off);
                drop(owners);
                rest
            }
        }
    }
}

/// Defers a clean-up. Makes no driver call.
pub(crate) fn keep(deferred: Deferred) {
    if fork::is_child() {
        return std::mem::forget(deferred);
    }
    DEFERRED.lock().push(deferred);
}

/// Tries a clean-up now, and defers the rest.
pub(crate) fn finish_or_keep(deferred: Deferred) {
    if fork::is_child() {
        return std::mem::forget(deferred);
    }
    deferred.finish().into_iter().for_each(keep);
}

/// Tries everything that is deferred.
pub(crate) fn settle() {
    finish_those(|_| true);
}

/// Holds captures off, as [`CapturingStreams::hold_off`] does. If only captures that nobody holds are in the way, ends them.
pub(crate) fn hold_off(capturing: &CapturingStreams) -> Option<HeldOff<'_>> {
    capturing.hold_off().or_else(|| {
        finish_those(|deferred| matches!(deferred, Deferred::Capture(_)));
        capturing.hold_off()
    })
}

fn finish_those(is_one: impl Fn(&Deferred) -> bool) {
    if fork::is_child() {
        return;
    }
    let taken: Vec<_> = DEFERRED.lock().extract_if(.., |deferred| is_one(deferred)).collect();
    taken.into_iter().for_each(finish_or_keep);
}
