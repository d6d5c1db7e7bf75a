//! Page-locked memory that its owner left to the device, until its last uses are done.
//!
//! An owner that leaves memory here names the ticks of its last uses. Once they are known to be done, the memory goes back without
//! waiting for the device. Ticks keep the context alive, so the context must not keep them; the device's handles do. When the last
//! handle is dropped, memory that is still here goes to the context, without its ticks, and the device is waited for.
//!
//! The list's lock is a leaf: no driver call is made under it.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::mem::ManuallyDrop;

use crate::fork::Mutex;

use crate::context::Context;
use crate::driver::{Driver, HostPtr};
use crate::error::DeviceError;
use crate::fork;
use crate::lost::log_kept;
use crate::orphans::Orphan;
use crate::timeline::Tick;

/// Bytes of registered memory that may stay although its uses are done. Unregistering waits for the device, so it is done for much memory
/// at a time.
const REGISTERED_KEPT: u64 = 64 << 20;

/// The owner of registered memory, which keeps it where it is.
pub(crate) type LeftOwner = Box<dyn Any + Send>;

/// Page-locked memory that was left to the device. Invariant: nobody else uses it or gives it back; work of the device may still use it.
#[derive(Debug)]
pub(crate) struct Left {
    ptr: HostPtr,
    /// The owner of registered memory; dropped only once the memory is not registered any more.
    owner: Option<ManuallyDrop<LeftOwner>>,
}

impl Left {
    /// Takes memory over: allocated by the driver, or registered and kept by an owner.
    ///
    /// # Safety
    /// As for [`Driver::host_free`], or [`Driver::host_unregister`] if there is an owner, but for work of the device.
    pub(crate) unsafe fn new(ptr: HostPtr, owner: Option<Box<dyn Any + Send>>) -> Left {
        Left { ptr, owner: owner.map(ManuallyDrop::new) }
    }

    /// Gives the memory back. Returns its owner, if it has one, to be dropped where foreign code may run. After an error, nothing has
    /// changed.
    ///
    /// # Safety
    /// No work of the device uses it any more.
    pub(crate) unsafe fn free(self, driver: &dyn Driver) -> Result<Option<LeftOwner>, (DeviceError, Left)> {
        let gone = match self.owner {
            // SAFETY: nobody else uses it, by the invariant, and the device does not, as the caller vouches.
            None => unsafe { driver.host_free(self.ptr) },
            // SAFETY: nobody else uses it, by the invariant, and the device does not, as the caller vouches.
            Some(_) => unsafe { driver.host_unregister(self.ptr) },
        };
        match gone {
            Ok(()) => Ok(self.owner.map(ManuallyDrop::into_inner)),
            Err(error) => Err((error, self)),
        }
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "page-locked memory at {:#x}", self.ptr.0)
    }
}

/// Memory that waits for the ticks of its last uses.
#[derive(Debug)]
struct Waiting {
    memory: Left,
    bytes: u64,
    uses: Vec<Tick>,
}

impl Waiting {
    fn is_known_done(&self) -> bool {
        self.uses.iter().all(|tick| tick.timeline().is_known_done(tick.n()))
    }
}

/// The memory that was left to a device.
#[derive(Debug, Default)]
pub(crate) struct LeftMemory(Mutex<Vec<Waiting>>);

impl LeftMemory {
    /// Keeps memory until its uses are done. Makes no driver call.
    pub(crate) fn add(&self, memory: Left, bytes: u64, uses: Vec<Tick>) {
        if fork::is_child() {
            return std::mem::forget(uses);
        }
        self.0.lock().push(Waiting { memory, bytes, uses });
    }

    /// Asks the driver how far streams got, and gives back memory whose uses are done. Waits for nothing, unless much registered memory can
    /// go. Returns how many bytes went back.
    pub(crate) fn free_done(&self, context: &Context) -> u64 {
        let registered = |waiting: &&Waiting| waiting.memory.owner.is_some() && waiting.is_known_done();
        self.free_asked(context, |waiting| {
            waiting.iter().filter(registered).map(|waiting| waiting.bytes).sum::<u64>() > REGISTERED_KEPT
        })
    }

    /// Gives back memory that the driver allocated and whose uses are done. Waits for nothing.
    pub(crate) fn free_allocated(&self, context: &Context) {
        self.free_asked(context, |_| false);
    }

    fn free_asked(&self, context: &Context, goes_registered: impl Fn(&[Waiting]) -> bool) -> u64 {
        if fork::is_child() || self.0.lock().is_empty() {
            return 0;
        }
        let Some(held_off) = context.hold_off() else { return 0 };
        let waiting = std::mem::take(&mut *self.0.lock());
        ask(&waiting);
        let registered_too = goes_registered(&waiting);
        let (freed, owners) = self.free(waiting, context, |memory| registered_too || memory.owner.is_none());
        drop(held_off);
        drop(owners);
        freed
    }

    /// Gives all memory back. Waits for the device if it may still use some of it. Returns how many bytes went back.
    pub(crate) fn free_all(&self, context: &Context) -> u64 {
        if fork::is_child() || self.0.lock().is_empty() {
            return 0;
        }
        let Some(held_off) = context.hold_off() else { return 0 };
        let waiting = std::mem::take(&mut *self.0.lock());
        ask(&waiting);
        if !waiting.iter().all(Waiting::is_known_done)
            && let Err(error) = context.wait_for_all(&held_off)
        {
            log_kept(&error, "the device could not be waited for; page-locked memory that it may use stays");
        }
        let (freed, owners) = self.free(waiting, context, |_| true);
        drop(held_off);
        drop(owners);
        freed
    }

    /// Gives back memory whose uses are done and for which `goes` is true. The rest is kept; after a failure that is all the rest, so that
    /// not each fails in turn. Returns how many bytes went back, and their owners.
    fn free(&self, waiting: Vec<Waiting>, context: &Context, goes: impl Fn(&Left) -> bool) -> (u64, Vec<LeftOwner>) {
        let (mut freed, mut failed, mut kept, mut owners) = (0, false, Vec::new(), Vec::new());
        for Waiting { memory, bytes, uses } in waiting {
            let waiting = Waiting { memory, bytes, uses };
            if failed || !goes(&waiting.memory) || !waiting.is_known_done() {
                kept.push(waiting);
                continue;
            }
            // SAFETY: all its uses are known to be done.
            match unsafe { waiting.memory.free(&*context.driver) } {
                Ok(owner) => {
                    freed += bytes;
                    owners.extend(owner);
                }
                Err((error, memory)) => {
                    log_kept(&error, format_args!("{memory} could not be freed; it will be tried again"));
                    failed = true;
                    kept.push(Waiting { memory, bytes, uses: Vec::new() });
                }
            }
        }
        self.0.lock().extend(kept);
        (freed, owners)
    }

    /// Leaves all memory to the context, which gives it back with its other orphans.
    pub(crate) fn leave_to(&self, context: &Context) {
        for waiting in self.0.lock().drain(..) {
            context.orphans.add(Orphan::Host(waiting.memory));
        }
    }
}

/// Asks the driver how far the streams got that memory waits for, once for each stream. Uses about which the driver cannot tell count as
/// not done.
fn ask(waiting: &[Waiting]) {
    let ticks = || waiting.iter().flat_map(|waiting| &waiting.uses);
    // A tick that no event covers would never be known to be done.
    let mut outcome = Ok(());
    ticks().for_each(|tick| outcome = std::mem::replace(&mut outcome, Ok(())).and(tick.cover()));
    let mut asked = BTreeSet::new();
    for tick in ticks() {
        let known = tick.timeline().is_known_done(tick.n());
        if !known && asked.insert(tick.timeline().id()) {
            outcome = outcome.and(tick.is_done().map(drop));
        }
    }
    if let Err(error) = outcome {
        tracing::debug!(%error, "the device could not be asked about page-locked memory that was left to it");
    }
}
