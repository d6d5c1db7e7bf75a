//! Orphans: objects of the driver that only this library still knows, and that are to be given back later.
//!
//! A handle that is dropped where no driver call can be made leaves its object here, and so does one whose driver call failed. Each call
//! that may make driver calls tries them again, until the driver takes them. After a failure the other orphans
//! of the queue wait for the next such call. On a lost device nothing is tried: everything goes with the driver.
//!
//! The queues are lock-free, so an orphan can be left under any lock.

use std::fmt;
use std::sync::Arc;

use crossbeam_queue::SegQueue;

use crate::capturing_streams::{CapturingStreams, HeldOff};
use crate::counted::Counted;
use crate::driver::{DevicePtr, Driver, RawEvent, RawGraph, RawModule, RawPhysical, RawStream};
use crate::error::{Code, DeviceError, Result};
use crate::fork;
use crate::left::{Left, LeftOwner};
use crate::lost::log_kept;

/// An object that is to be given back later.
#[derive(Debug)]
pub(crate) enum Orphan {
    /// A plain allocation.
    Allocation(DevicePtr),
    /// Reserved addresses, and the memory mapped there.
    Reservation(Reservation),
    /// Physical memory that is mapped nowhere.
    Physical(RawPhysical),
    /// A module whose kernels may still run.
    Module(RawModule),
    /// Page-locked memory that copies may still use.
    Host(Left),
    /// A stream that nobody uses any more. Its pending work still runs when it is destroyed.
    Stream(RawStream),
    /// A graph that nobody launches any more. Launches of it still run when it is destroyed.
    Graph(RawGraph),
    /// An event that nobody waits for any more.
    Event(RawEvent),
}

impl Orphan {
    /// True if giving it back waits for nothing.
    fn is_unused(&self) -> bool {
        match self {
            Orphan::Physical(_) | Orphan::Stream(_) | Orphan::Graph(_) | Orphan::Event(_) => true,
            Orphan::Reservation(reservation) => reservation.mapped.is_empty(),
            Orphan::Allocation(_) | Orphan::Module(_) | Orphan::Host(_) => false,
        }
    }
}

impl fmt::Display for Orphan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Orphan::Allocation(ptr) => write!(f, "memory at {ptr}"),
            Orphan::Reservation(Reservation { ptr, bytes, mapped }) => {
                write!(f, "{bytes} bytes of addresses at {ptr}, with {} mappings,", mapped.len())
            }
            Orphan::Physical(RawPhysical(handle)) => write!(f, "physical memory {handle:#x}"),
            Orphan::Module(RawModule(handle)) => write!(f, "a module of kernels, {handle:#x},"),
            Orphan::Host(memory) => memory.fmt(f),
            Orphan::Stream(RawStream(handle)) => write!(f, "stream {handle:#x}"),
            Orphan::Graph(RawGraph(handle)) => write!(f, "graph {handle:#x}"),
            Orphan::Event(RawEvent(handle)) => write!(f, "event {handle:#x}"),
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
    /// Mappings: first address, length in bytes, and the physical memory mapped there.
    pub mapped: Vec<(DevicePtr, u64, RawPhysical)>,
}

/// The orphans of one device.
#[derive(Debug)]
pub(crate) struct Orphans {
    driver: Arc<Counted>,
    capturing: Arc<CapturingStreams>,
    /// Orphans that work may still use, so that the device is waited for.
    in_use: SegQueue<Orphan>,
    /// Orphans that no work can use.
    unused: SegQueue<Orphan>,
    /// Events that could not be recycled. They are destroyed before the next one is recorded.
    events: SegQueue<RawEvent>,
}

impl Orphans {
    pub(crate) fn new(driver: Arc<Counted>, capturing: Arc<CapturingStreams>) -> Arc<Orphans> {
        let (in_use, unused, events) = (SegQueue::new(), SegQueue::new(), SegQueue::new());
        Arc::new(Orphans { driver, capturing, in_use, unused, events })
    }

    /// Keeps an orphan until the next call that may make driver calls. Makes no driver call itself.
    pub(crate) fn add(&self, orphan: Orphan) {
        if fork::is_child() {
            return;
        }
        let queue = if orphan.is_unused() { &self.unused } else { &self.in_use };
        queue.push(orphan);
    }

    /// Keeps an event that was not known to be complete. Makes no driver call.
    pub(crate) fn add_event(&self, event: RawEvent) {
        self.events.push(event);
    }

    /// Gives an object back now. It becomes an orphan if the driver refuses.
    pub(crate) fn give_back(&self, orphan: Orphan) {
        if fork::is_child() {
            return;
        }
        if let Err((error, orphan)) = self.free_one(orphan) {
            log_kept(&error, format_args!("{orphan} could not be given back; it will be tried again"));
            self.add(orphan);
        }
    }

    /// True if there is an orphan. Events are too small to count.
    pub(crate) fn any(&self) -> bool {
        !self.in_use.is_empty() || !self.unused.is_empty()
    }

    /// Gives orphans back. Those that cannot go now stay orphans. While a stream captures, these are the ones that wait for the device,
    /// because that would break the capture.
    pub(crate) fn free(&self) {
        if fork::is_child() {
            return;
        }
        self.destroy_events();
        self.free_unused();
        if let Some(held_off) = self.capturing.hold_off() {
            let owners = self.free_all_of(&self.in_use);
            self.free_unused();
            drop(held_off);
            drop(owners);
        }
    }

    /// Gives back the orphans that no work can use, without waiting.
    pub(crate) fn free_unused(&self) {
        if fork::is_child() {
            return;
        }
        // None of them is memory of the host.
        let _no_owners = self.free_all_of(&self.unused);
    }

    /// Destroys events that could not be recycled.
    pub(crate) fn destroy_events(&self) {
        for _ in 0..self.events.len() {
            let Some(event) = self.events.pop() else { return };
            if let Err((error, _)) = self.free_one(Orphan::Event(event)) {
                tracing::debug!(%error, "an event could not be destroyed; it will be tried again");
                return self.events.push(event);
            }
        }
    }

    /// Gives all orphans of a device back that is gone. Returns true if none is left, or the device is lost, so that the driver can go.
    /// Also returns the owners of registered memory, to be dropped where foreign code may run.
    pub(crate) fn free_every(&self, _: &HeldOff<'_>) -> (bool, Vec<LeftOwner>) {
        let mut owners = Vec::new();
        // Each is tried: after a failure the queue's other orphans still go.
        for queue in [&self.in_use, &self.unused] {
            for _ in 0..queue.len() {
                if self.driver.lost().is_none() {
                    owners.extend(self.free_all_of(queue));
                }
            }
        }
        for _ in 0..self.events.len() {
            if self.driver.lost().is_none() {
                self.destroy_events();
            }
        }
        let is_empty = !self.any() && self.events.is_empty();
        (is_empty || self.driver.lost().is_some(), owners)
    }

    /// The streams that are known to capture in the driver's context.
    pub(crate) fn capturing(&self) -> &Arc<CapturingStreams> {
        &self.capturing
    }

    /// Gives back the orphans of a queue. After a failure the rest stays, so that not each fails in turn. Returns the owners of registered
    /// memory that went back, to be dropped where foreign code may run.
    fn free_all_of(&self, queue: &SegQueue<Orphan>) -> Vec<LeftOwner> {
        let mut owners = Vec::new();
        while let Some(orphan) = queue.pop() {
            match self.free_one(orphan) {
                Ok(owner) => owners.extend(owner),
                Err((error, orphan)) => {
                    log_kept(&error, format_args!("{orphan} could not be freed; it will be tried again"));
                    self.add(orphan);
                    break;
                }
            }
        }
        owners
    }

    fn free_one(&self, orphan: Orphan) -> std::result::Result<Option<LeftOwner>, (DeviceError, Orphan)> {
        let gone = match orphan {
            Orphan::Allocation(ptr) => self.driver.free(ptr),
            Orphan::Physical(physical) => self.driver.release_physical(physical),
            Orphan::Reservation(reservation) => return self.free_reservation(reservation).map(|()| None),
            // Waits for the device first, because neither unloading nor freeing page-locked memory waits for anything.
            Orphan::Module(module) => self.driver.synchronize().and_then(|()| self.driver.unload_module(module)),
            Orphan::Host(memory) => return self.free_host(memory),
            Orphan::Stream(stream) => unless_gone(self.driver.destroy_stream(stream)),
            Orphan::Graph(graph) => unless_gone(self.driver.destroy_graph(graph)),
            Orphan::Event(event) => unless_gone(self.driver.destroy_event(event)),
        };
        gone.map(|()| None).map_err(|error| (error, orphan))
    }

    fn free_host(&self, memory: Left) -> std::result::Result<Option<LeftOwner>, (DeviceError, Orphan)> {
        match self.driver.synchronize() {
            // SAFETY: no work can have begun to use it since it was left to the device, which was waited for.
            Ok(()) => unsafe { memory.free(&*self.driver) }.map_err(|(error, memory)| (error, Orphan::Host(memory))),
            Err(error) => Err((error, Orphan::Host(memory))),
        }
    }

    /// Gives back a reservation. Waits for the device first, because unmapping, unlike freeing a plain allocation, waits for nothing.
    fn free_reservation(&self, mut reservation: Reservation) -> std::result::Result<(), (DeviceError, Orphan)> {
        let waited = if reservation.mapped.is_empty() { Ok(()) } else { self.driver.synchronize() };
        let mut gone = waited;
        while gone.is_ok()
            && let Some(&(ptr, bytes, physical)) = reservation.mapped.last()
        {
            gone = self.driver.unmap(ptr, bytes);
            if gone.is_ok() {
                reservation.mapped.pop();
                self.add(Orphan::Physical(physical));
            }
        }
        let gone = gone.and_then(|()| self.driver.unreserve(reservation.ptr, reservation.bytes));
        gone.map_err(|error| (error, Orphan::Reservation(reservation)))
    }
}

/// Takes an object as given back if its device is lost, or somebody else destroyed it.
fn unless_gone(outcome: Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.is_device_lost() || error.code == Code::INVALID_HANDLE => {
            tracing::debug!(%error, "an object that is gone needs not be given back");
            Ok(())
        }
        outcome => outcome,
    }
}
