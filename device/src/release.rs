//! Deferred release: the queue of a device's objects that nothing uses any more and that go back to
//! the driver at a later call.
//!
//! An object comes here when its handle is dropped where no driver call may be made, when work of
//! the device may still use it, or when the driver refused to take it back.
//! [`ReleaseQueue::settle`] is the one policy for all of them:
//! * It takes the objects in the order in which they came. After a failure it keeps the rest,
//!   because the next ones would fail, too.
//! * Objects that no work can use go at once. For the others it waits for the device, or asks for
//!   the ticks that memory carries. While a stream captures they stay, because waiting would break
//!   the capture.
//! * On a lost device objects go with the driver.
//! * One thread settles at a time, so that a thread which needs memory does not miss what another
//!   one is just giving back.
//!
//! When its device is closed, the queue tries each object once more, and finishes later if that
//! fails ([`crate::unfinished`]). Events are the exception: there are many, so they have a
//! lock-free list of their own, which is emptied before the next record.
//!
//! The queue's lock is a leaf: no driver call is made under it, and nothing is dropped.

use std::any::Any;
use std::cell::OnceCell;
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
use crate::sync::Mutex as Turn;
use crate::unfinished::CleanUp;
use crate::waits::{WaitMark, Waits};

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
    /// Pinned memory that copies may still use.
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
            Object::Host(memory) => write!(f, "pinned memory at {:#x}", memory.ptr.0),
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
pub(crate) trait Uses: fmt::Debug + Send + Sync {
    /// True if all of it is known to be done. No driver call.
    fn are_known_done(&self) -> bool;

    /// Makes sure that the driver can be asked about all of it.
    fn cover(&self) -> Result<()>;

    /// Asks the driver about streams that were not `asked` yet.
    fn ask(&self, asked: &mut BTreeSet<u32>) -> Result<()>;
}

/// Pinned memory to be released. Invariant: nothing but work of the device uses it, and
/// nothing else gives it back.
#[derive(Debug)]
pub(crate) struct HostMemory {
    ptr: HostPtr,
    bytes: u64,
    /// The owner of registered memory; dropped only once the memory is not registered any more.
    owner: Option<ManuallyDrop<MemoryOwner>>,
}

impl HostMemory {
    /// Takes memory over: allocated by the driver, or registered and kept by an owner.
    ///
    /// # Safety
    /// As for [`Driver::host_free`], or [`Driver::host_unregister`] if there is an owner, but for
    /// the work that [`ReleaseQueue::add_used`] is told with it.
    pub(crate) unsafe fn new(ptr: HostPtr, bytes: u64, owner: Option<MemoryOwner>) -> HostMemory {
        HostMemory { ptr, bytes, owner: owner.map(ManuallyDrop::new) }
    }
}

/// An object in the queue.
#[derive(Debug)]
struct Entry {
    object: Object,
    /// The work that may use it. `None` if only a wait for the device tells.
    uses: Option<Arc<dyn Uses>>,
    /// All work that was enqueued before the object came here.
    mark: WaitMark,
}

impl Entry {
    /// True if no work uses it, as far as the host knows.
    fn is_known_done(&self) -> bool {
        self.mark.is_passed() || self.uses.as_ref().is_some_and(|uses| uses.are_known_done())
    }

    /// True if the device must be waited for before the driver is called. The driver itself waits
    /// when it frees an allocation.
    fn needs_wait(&self) -> bool {
        !matches!(self.object, Object::Allocation(_)) && !self.object.is_unused() && !self.is_known_done()
    }
}

/// The work of a device, while captures are held off.
pub(crate) trait Work {
    /// Waits on the host until all of it is done.
    fn wait(&self) -> Result<()>;

    /// True if all of it is done, so that calls by which the driver waits take no time.
    fn is_over(&self) -> bool;
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
    /// Bytes of pinned memory that were released.
    pub(crate) host_bytes: u64,
    pub(crate) owners: Vec<MemoryOwner>,
}

/// The queue of one device.
#[derive(Debug)]
pub(crate) struct ReleaseQueue {
    driver: Arc<Counted>,
    capturing: Arc<CapturingStreams>,
    waits: Arc<Waits>,
    entries: Mutex<Vec<Entry>>,
    /// Held by the thread that settles, across its driver calls. No leaf.
    settling: Turn<()>,
    /// Events that could not be recycled. They are destroyed before the next one is recorded.
    events: SegQueue<RawEvent>,
}

impl ReleaseQueue {
    pub(crate) fn new(driver: Arc<Counted>, capturing: Arc<CapturingStreams>, waits: Arc<Waits>) -> Arc<ReleaseQueue> {
        Arc::new(ReleaseQueue {
            driver,
            capturing,
            waits,
            entries: Mutex::default(),
            settling: Turn::default(),
            events: SegQueue::new(),
        })
    }

    /// Adds an object. Makes no driver call, so it may be called anywhere.
    pub(crate) fn add(&self, object: Object) {
        self.add_used(object, None);
    }

    /// As [`ReleaseQueue::add`], with the work that may use the object.
    pub(crate) fn add_used(&self, object: Object, uses: Option<Arc<dyn Uses>>) {
        if fork::is_child() {
            return std::mem::forget((object, uses));
        }
        self.entries.lock().push(Entry { object, uses, mark: self.waits.mark() });
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
        !self.entries.lock().is_empty()
    }

    /// True if a thread is giving objects back, or there are some to be given back.
    pub(crate) fn may_give_back(&self) -> bool {
        self.settling.try_lock().is_none() || self.any()
    }

    /// True if the queue has objects that work may use.
    pub(crate) fn any_in_use(&self) -> bool {
        self.entries.lock().iter().any(|entry| !entry.object.is_unused())
    }

    /// True if the queue has memory of the device.
    pub(crate) fn any_memory(&self) -> bool {
        let is_memory = |entry: &Entry| {
            matches!(entry.object, Object::Allocation(_) | Object::Reservation(_) | Object::Physical(_))
        };
        self.entries.lock().iter().any(is_memory)
    }

    /// True if nothing is left, or the device is lost, so that everything goes with the driver.
    fn is_finished(&self) -> bool {
        self.driver.lost().is_some() || (!self.any() && self.events.is_empty())
    }

    /// Releases the objects that can go. `work` is `None` while a stream captures, and then only
    /// objects go that no work can use. Unless it may wait, this does nothing while another thread
    /// settles.
    pub(crate) fn settle(&self, effort: Effort, work: Option<&dyn Work>) -> Settled {
        let _turn = match effort {
            Effort::Waiting => self.settling.lock(),
            Effort::WithoutWaiting | Effort::MuchAtATime => match self.settling.try_lock() {
                Some(turn) => turn,
                None => return Settled::default(),
            },
        };
        if effort == Effort::Waiting {
            self.destroy_events();
        }
        let entries = std::mem::take(&mut *self.entries.lock());
        let Some(work) = work else { return self.release_those(entries, |entry| entry.object.is_unused()) };
        ask(&entries);
        if effort == Effort::Waiting {
            let waited = if entries.iter().any(Entry::needs_wait) { work.wait() } else { Ok(()) };
            if let Err(error) = &waited {
                log_kept(error, "the device could not be waited for; objects that it may use stay");
            }
            let mut settled = self.release_those(entries, |entry| waited.is_ok() || !entry.needs_wait());
            // Also the memory of reservations, and the objects after one that the driver refused.
            let rest = std::mem::take(&mut *self.entries.lock());
            settled.owners.extend(self.release_those(rest, |entry| entry.object.is_unused()).owners);
            return settled;
        }
        let is_registered = |entry: &&Entry| entry.object.host().is_some_and(|memory| memory.owner.is_some());
        let registered = entries.iter().filter(is_registered).filter(|entry| entry.is_known_done());
        let registered_bytes: u64 = registered.filter_map(|entry| entry.object.host()).map(|memory| memory.bytes).sum();
        let unregisters = effort == Effort::MuchAtATime && registered_bytes > REGISTERED_KEPT_BYTES;
        let is_over = OnceCell::new();
        let mut settled = self.release_those(entries, |entry| match &entry.object {
            Object::Host(memory) => entry.is_known_done() && (unregisters || memory.owner.is_none()),
            Object::Reservation(_) => entry.object.is_unused() || entry.is_known_done(),
            // The driver waits for all work.
            Object::Allocation(_) | Object::Module(_) => {
                entry.is_known_done() && *is_over.get_or_init(|| work.is_over())
            }
            _ => true,
        });
        // The memory of reservations.
        let rest = std::mem::take(&mut *self.entries.lock());
        settled.owners.extend(self.release_those(rest, |entry| entry.object.is_unused()).owners);
        settled
    }

    /// Releases the objects for which `goes` is true. The rest stays; after a failure that is all
    /// the rest.
    fn release_those(&self, entries: Vec<Entry>, goes: impl Fn(&Entry) -> bool) -> Settled {
        let (mut settled, mut refused, mut kept) = (Settled::default(), None, Vec::new());
        for entry in entries {
            if refused.is_some() || !goes(&entry) {
                kept.push(entry);
                continue;
            }
            let Entry { object, uses, mark } = entry;
            let bytes = object.host().map_or(0, |memory| memory.bytes);
            match self.give_back(object) {
                Ok(owner) => {
                    settled.host_bytes += bytes;
                    settled.owners.extend(owner);
                }
                Err((error, object)) => {
                    log_kept(&error, format_args!("{object} could not be released; it will be tried again"));
                    refused = Some(Entry { object, uses, mark });
                }
            }
        }
        // The others go first next time.
        kept.extend(refused);
        self.entries.lock().extend(kept);
        settled
    }

    /// Forgets which work uses objects, because ticks keep the device's context alive. The device
    /// is waited for instead.
    pub(crate) fn forget_uses(&self) {
        // Another thread that settles has entries out of the queue, and would put them back as they
        // are.
        let _turn = self.settling.lock();
        let uses: Vec<_> = self.entries.lock().iter_mut().filter_map(|entry| entry.uses.take()).collect();
        drop(uses);
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

    /// Gives an object back to the driver. Pinned memory must not be in use any more. Returns
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
        let work = OfDriver(&self.driver);
        let mut owners = Vec::new();
        let attempts = ATTEMPTS_AT_CLOSE.max(self.entries.lock().len());
        for _ in 0..attempts {
            if self.is_finished() {
                break;
            }
            let work = held_off.is_some().then_some(&work as &dyn Work);
            owners.extend(self.settle(Effort::Waiting, work).owners);
        }
        drop(held_off);
        drop(owners);
        self.is_finished()
    }
}

/// The work of a device without handles.
struct OfDriver<'a>(&'a Counted);

impl Work for OfDriver<'_> {
    fn wait(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn is_over(&self) -> bool {
        false
    }
}

/// Asks the driver how far the streams got that memory waits for, once for each stream. Uses about
/// which the driver cannot tell count as not done.
fn ask(entries: &[Entry]) {
    let all = || entries.iter().filter(|entry| !entry.is_known_done()).filter_map(|entry| entry.uses.as_ref());
    // A tick that no event covers would never be known to be done.
    let covered = all().map(|uses| uses.cover()).fold(Ok(()), Result::and);
    let mut asked = BTreeSet::new();
    let answered = all().map(|uses| uses.ask(&mut asked)).fold(Ok(()), Result::and);
    if let Err(error) = covered.and(answered) {
        tracing::debug!(%error, "the device could not be asked about memory that is to go back");
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
