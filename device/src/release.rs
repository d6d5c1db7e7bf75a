//! Deferred release: the queue of a device's objects that nothing uses any more and that go back to
//! the driver at a later call.
//!
//! An object comes here when its handle is dropped where no driver call may be made, when work of
//! the device may still use it, or when the driver refused to take it back.
//! [`ReleaseQueue::settle`] is the one policy for all of them:
//! * It takes the objects in the order in which they came. After a failure it keeps the rest,
//!   because the next ones would fail, too.
//! * Objects that no work can use go at once. For the others it waits for the device, or asks for
//!   the ticks that page-locked memory carries. While a stream captures they stay, because waiting
//!   would break the capture.
//! * On a lost device objects go with the driver.
//!
//! When its device is closed, the queue tries each object once more, and finishes later if that
//! fails ([`crate::unfinished`]). Events are the exception: there are many, so they have a
//! lock-free list of their own, which is emptied before the next record.
//!
//! The queue's lock is a leaf: no driver call is made under it, and nothing is dropped.

use std::any::Any;
use std::collections::BTreeSet;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crossbeam_queue::SegQueue;

use crate::capturing_streams::CapturingStreams;
use crate::counted::Counted;
use crate::driver::{DevicePtr, Driver, HostPtr, RawEvent, RawGraph, RawModule, RawPhysical, RawStream};
use crate::error::{Code, DeviceError, Result};
use crate::fork::{self, Mutex};
use crate::unfinished::CleanUp;

/// Bytes of registered memory that may stay although its uses are done. Unregistering waits for the
/// device, so it is done for much memory at a time.
const REGISTERED_KEPT_BYTES: u64 = 64 << 20;

/// How often each object is tried when the device is closed.
const ATTEMPTS_AT_CLOSE: usize = 3;

/// An object to be given back to the driver.
#[derive(Debug)]
pub(crate) enum Object {
    /// A plain allocation. The driver waits for the device when it frees one.
    Allocation(DevicePtr),
    /// Reserved addresses, and the memory mapped there.
    Reservation(Reservation),
    /// Physical memory that is mapped nowhere.
    Physical(RawPhysical),
    /// A module whose kernels may still run.
    Module(RawModule),
    /// Page-locked memory that copies may still use.
    Host(HostMemory),
    /// A stream. Its pending work still runs when it is destroyed.
    Stream(RawStream),
    /// A graph. Its launches still run when it is destroyed.
    Graph(RawGraph),
    /// An event.
    Event(RawEvent),
}

impl Object {
    /// True if no work can use it, and releasing it waits for nothing.
    fn is_unused(&self) -> bool {
        match self {
            Object::Physical(_) | Object::Stream(_) | Object::Graph(_) | Object::Event(_) => true,
            Object::Reservation(reservation) => reservation.mapped.is_empty(),
            Object::Allocation(_) | Object::Module(_) | Object::Host(_) => false,
        }
    }

    /// True if the device must be waited for before the driver is called.
    fn needs_wait(&self) -> bool {
        match self {
            Object::Allocation(_) => false,
            Object::Host(memory) => !memory.is_known_done(),
            _ => !self.is_unused(),
        }
    }

    fn host(&self) -> Option<&HostMemory> {
        if let Object::Host(memory) = self { Some(memory) } else { None }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Allocation(ptr) => write!(f, "memory at {ptr}"),
            Object::Reservation(Reservation { ptr, bytes, mapped }) => {
                write!(f, "{bytes} bytes of addresses at {ptr}, with {} mappings,", mapped.len())
            }
            Object::Physical(RawPhysical(handle)) => write!(f, "physical memory {handle:#x}"),
            Object::Module(RawModule(handle)) => write!(f, "a module of kernels, {handle:#x},"),
            Object::Host(memory) => write!(f, "page-locked memory at {:#x}", memory.ptr.0),
            Object::Stream(RawStream(handle)) => write!(f, "stream {handle:#x}"),
            Object::Graph(RawGraph(handle)) => write!(f, "graph {handle:#x}"),
            Object::Event(RawEvent(handle)) => write!(f, "event {handle:#x}"),
        }
    }
}

/// Reserved addresses and the physical memory mapped there, for [`crate::Device::unreserve_later`].
#[derive(Clone, Debug)]
pub struct Reservation {
    /// First address.
    pub ptr: DevicePtr,
    /// Length in bytes.
    pub bytes: u64,
    /// Mappings: first address, length in bytes, and the physical memory to be released after that
    /// is unmapped; `None` if it is mapped elsewhere, too, and released there.
    pub mapped: Vec<(DevicePtr, u64, Option<RawPhysical>)>,
}

/// The owner of registered memory, which keeps it where it is.
pub(crate) type MemoryOwner = Box<dyn Any + Send>;

/// The work that may still use an object.
pub(crate) trait Uses: fmt::Debug + Send {
    /// True if all of it is known to be done. No driver call.
    fn are_known_done(&self) -> bool;

    /// Makes sure that the driver can be asked about all of it.
    fn cover(&self) -> Result<()>;

    /// Asks the driver about streams that were not `asked` yet.
    fn ask(&self, asked: &mut BTreeSet<u32>) -> Result<()>;
}

/// Page-locked memory to be released. Invariant: nothing but work of the device uses it, and
/// nothing else gives it back.
#[derive(Debug)]
pub(crate) struct HostMemory {
    ptr: HostPtr,
    bytes: u64,
    /// The owner of registered memory; dropped only once the memory is not registered any more.
    owner: Option<ManuallyDrop<MemoryOwner>>,
    /// `None` once the device's last handle is gone: then only a wait for the device answers.
    uses: Option<Box<dyn Uses>>,
}

impl HostMemory {
    /// Takes memory over: allocated by the driver, or registered and kept by an owner.
    ///
    /// # Safety
    /// As for [`Driver::host_free`], or [`Driver::host_unregister`] if there is an owner, but for
    /// the work that `uses` names.
    pub(crate) unsafe fn new(ptr: HostPtr, bytes: u64, owner: Option<MemoryOwner>, uses: Box<dyn Uses>) -> HostMemory {
        HostMemory { ptr, bytes, owner: owner.map(ManuallyDrop::new), uses: Some(uses) }
    }

    fn is_known_done(&self) -> bool {
        self.uses.as_ref().is_some_and(|uses| uses.are_known_done())
    }
}

/// How far [`ReleaseQueue::settle`] may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Wait for nothing.
    WithoutWaiting,
    /// Wait only to unregister much memory at a time.
    MuchAtATime,
    /// Wait for the device.
    Waiting,
}

/// The result of [`ReleaseQueue::settle`]. The owners of registered memory run code of
/// callers when they are dropped, so they are dropped where no lock is held and captures are not
/// held off.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Settled {
    /// Bytes of page-locked memory that were released.
    pub(crate) host_bytes: u64,
    pub(crate) owners: Vec<MemoryOwner>,
}

/// The queue of one device.
#[derive(Debug)]
pub(crate) struct ReleaseQueue {
    driver: Arc<Counted>,
    capturing: Arc<CapturingStreams>,
    objects: Mutex<Vec<Object>>,
    /// Events that could not be recycled. They are destroyed before the next one is recorded.
    events: SegQueue<RawEvent>,
}

impl ReleaseQueue {
    pub(crate) fn new(driver: Arc<Counted>, capturing: Arc<CapturingStreams>) -> Arc<ReleaseQueue> {
        Arc::new(ReleaseQueue { driver, capturing, objects: Mutex::default(), events: SegQueue::new() })
    }

    /// Adds an object. Makes no driver call, so it may be called anywhere.
    pub(crate) fn add(&self, object: Object) {
        if fork::is_child() {
            return std::mem::forget(object);
        }
        self.objects.lock().push(object);
    }

    /// Adds an event that is not known to be complete. Makes no driver call.
    pub(crate) fn add_event(&self, event: RawEvent) {
        self.events.push(event);
    }

    /// Releases an object that no work can use now, or later if the driver refuses.
    pub(crate) fn release(&self, object: Object) {
        if fork::is_child() {
            return std::mem::forget(object);
        }
        if let Err((error, object)) = self.give_back(object) {
            log_kept(&error, format_args!("{object} could not be given back; it will be tried again"));
            self.add(object);
        }
    }

    /// True if the queue has objects. Events are too small to count.
    pub(crate) fn any(&self) -> bool {
        !self.objects.lock().is_empty()
    }

    /// True if the queue has page-locked memory.
    pub(crate) fn any_host_memory(&self) -> bool {
        self.objects.lock().iter().any(|object| object.host().is_some())
    }

    /// True if nothing is left, or the device is lost, so that everything goes with the driver.
    fn is_finished(&self) -> bool {
        self.driver.lost().is_some() || (!self.any() && self.events.is_empty())
    }

    /// Releases the objects that can go. `wait` waits for the device; it is `None` while a stream
    /// captures, and then only objects go that no work can use.
    pub(crate) fn settle(&self, effort: Effort, wait: Option<&dyn Fn() -> Result<()>>) -> Settled {
        if effort == Effort::Waiting {
            self.destroy_events();
        }
        let objects = std::mem::take(&mut *self.objects.lock());
        let Some(wait) = wait else { return self.release_those(objects, Object::is_unused) };
        ask(&objects);
        if effort == Effort::Waiting {
            let waited = if objects.iter().any(Object::needs_wait) { wait() } else { Ok(()) };
            if let Err(error) = &waited {
                log_kept(error, "the device could not be waited for; objects that it may use stay");
            }
            let goes = |object: &Object| match object {
                Object::Host(memory) => memory.is_known_done() || (waited.is_ok() && memory.uses.is_none()),
                _ => waited.is_ok() || !object.needs_wait(),
            };
            let mut settled = self.release_those(objects, goes);
            // Also the memory of reservations, and the objects after one that the driver refused.
            let rest = std::mem::take(&mut *self.objects.lock());
            settled.owners.extend(self.release_those(rest, Object::is_unused).owners);
            return settled;
        }
        let registered = |memory: &&HostMemory| memory.owner.is_some() && memory.is_known_done();
        let registered_bytes: u64 =
            objects.iter().filter_map(Object::host).filter(registered).map(|memory| memory.bytes).sum();
        let unregisters = effort == Effort::MuchAtATime && registered_bytes > REGISTERED_KEPT_BYTES;
        self.release_those(objects, |object| match object {
            Object::Host(memory) => memory.is_known_done() && (unregisters || memory.owner.is_none()),
            _ => object.is_unused(),
        })
    }

    /// Releases the objects for which `goes` is true. The rest stays; after a failure that is all
    /// the rest.
    fn release_those(&self, objects: Vec<Object>, goes: impl Fn(&Object) -> bool) -> Settled {
        let (mut settled, mut refused, mut kept) = (Settled::default(), None, Vec::new());
        for object in objects {
            if refused.is_some() || !goes(&object) {
                kept.push(object);
                continue;
            }
            let bytes = object.host().map_or(0, |memory| memory.bytes);
            match self.give_back(object) {
                Ok(owner) => {
                    settled.host_bytes += bytes;
                    settled.owners.extend(owner);
                }
                Err((error, object)) => {
                    log_kept(&error, format_args!("{object} could not be released; it will be tried again"));
                    refused = Some(object);
                }
            }
        }
        // The others go first next time.
        kept.extend(refused);
        self.objects.lock().extend(kept);
        settled
    }

    /// Forgets which work uses page-locked memory, because ticks keep the device's context alive.
    /// The device is waited for instead.
    pub(crate) fn forget_uses(&self) {
        let mut ticks = Vec::new();
        for object in &mut *self.objects.lock() {
            if let Object::Host(memory) = object {
                ticks.extend(memory.uses.take());
            }
        }
        drop(ticks);
    }

    /// Destroys events that could not be recycled.
    pub(crate) fn destroy_events(&self) {
        for _ in 0..self.events.len() {
            let Some(event) = self.events.pop() else { return };
            if let Err((error, _)) = self.give_back(Object::Event(event)) {
                tracing::debug!(%error, "an event could not be destroyed; it will be tried again");
                return self.events.push(event);
            }
        }
    }

    /// Gives an object back to the driver. Page-locked memory must not be in use any more. Returns
    /// the owner of registered memory.
    fn give_back(&self, object: Object) -> std::result::Result<Option<MemoryOwner>, (DeviceError, Object)> {
        let driver = &*self.driver;
        let gone = match object {
            Object::Allocation(ptr) => driver.free(ptr),
            Object::Physical(physical) => driver.release_physical(physical),
            Object::Module(module) => driver.unload_module(module),
            Object::Stream(stream) => unless_gone(driver.destroy_stream(stream)),
            Object::Graph(graph) => unless_gone(driver.destroy_graph(graph)),
            Object::Event(event) => unless_gone(driver.destroy_event(event)),
            Object::Reservation(mut reservation) => {
                return match self.unreserve(&mut reservation) {
                    Ok(()) => Ok(None),
                    Err(error) => Err((error, Object::Reservation(reservation))),
                };
            }
            Object::Host(memory) => {
                let gone = match memory.owner {
                    // SAFETY: nothing uses it, by the invariant and the contract of this function.
                    None => unsafe { driver.host_free(memory.ptr) },
                    // SAFETY: as above.
                    Some(_) => unsafe { driver.host_unregister(memory.ptr) },
                };
                return match gone {
                    Ok(()) => Ok(memory.owner.map(ManuallyDrop::into_inner)),
                    Err(error) => Err((error, Object::Host(memory))),
                };
            }
        };
        gone.map(|()| None).map_err(|error| (error, object))
    }

    fn unreserve(&self, reservation: &mut Reservation) -> Result<()> {
        while let Some(&(ptr, bytes, physical)) = reservation.mapped.last() {
            self.driver.unmap(ptr, bytes)?;
            reservation.mapped.pop();
            physical.into_iter().for_each(|physical| self.add(Object::Physical(physical)));
        }
        self.driver.unreserve(reservation.ptr, reservation.bytes)
    }
}

impl CleanUp for ReleaseQueue {
    /// Releases everything that is left of a device that was closed. Objects of a lost device go
    /// with the driver.
    fn finish(&self) -> bool {
        let held_off = self.capturing.hold_off();
        let wait = || self.driver.synchronize();
        let mut owners = Vec::new();
        let attempts = ATTEMPTS_AT_CLOSE.max(self.objects.lock().len());
        for _ in 0..attempts {
            if self.is_finished() {
                break;
            }
            let wait: Option<&dyn Fn() -> Result<()>> = if held_off.is_some() { Some(&wait) } else { None };
            owners.extend(self.settle(Effort::Waiting, wait).owners);
        }
        drop(held_off);
        drop(owners);
        self.is_finished()
    }
}

/// Asks the driver how far the streams got that page-locked memory waits for, once for each stream.
/// Uses about which the driver cannot tell count as not done.
fn ask(objects: &[Object]) {
    let all = || objects.iter().filter_map(Object::host).filter_map(|memory| memory.uses.as_ref());
    // A tick that no event covers would never be known to be done.
    let covered = all().map(|uses| uses.cover()).fold(Ok(()), Result::and);
    let mut asked = BTreeSet::new();
    let answered = all().map(|uses| uses.ask(&mut asked)).fold(Ok(()), Result::and);
    if let Err(error) = covered.and(answered) {
        tracing::debug!(%error, "the device could not be asked about page-locked memory");
    }
}

/// Takes an object as given back if its device is lost, or something else destroyed it.
fn unless_gone(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.is_device_lost() || error.code == Code::INVALID_HANDLE => {
            tracing::debug!(%error, "an object that is gone needs not be given back");
            Ok(())
        }
        outcome => outcome,
    }
}

/// Logs that something could not be released. That is a warning, unless the device is lost: then
/// everything goes with it, and an error has reported the loss.
fn log_kept(error: &DeviceError, what: impl fmt::Display) {
    if error.is_device_lost() {
        tracing::debug!(%error, "{what}");
    } else {
        tracing::warn!(%error, "{what}");
    }
}
