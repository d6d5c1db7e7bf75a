//! Leaving objects to a device, which gives them back to the driver later.

use std::any::Any;
use std::sync::Arc;

use super::Device;
use crate::driver::{DevicePtr, Driver, HostPtr, RawModule, RawPhysical};
use crate::fork;
use crate::launches::Launches;
use crate::release::{Effort, HostMemory, Object, Reservation, Uses};
use crate::timeline::Tick;
use crate::unfinished;

impl Device {
    /// Leaves a plain driver allocation to the device, to be freed at the next [`Device::settle`],
    /// at a [`Device::alloc`] that lacks memory, or when the last handle of the device is dropped.
    /// Makes no driver call, so it can be used in destructors.
    pub fn free_later(&self, ptr: DevicePtr) {
        self.free_after(ptr, None);
    }

    /// As [`Device::free_later`], with the work that may use the memory: all work of these ticks'
    /// streams before them. Once that is done, the next call of the device that is no work frees
    /// the memory, or, if other work is under way, the next one that waits for the device. With
    /// `None`, only a wait for the device tells.
    #[doc(hidden)]
    pub fn free_after(&self, ptr: DevicePtr, uses: Option<&Arc<Vec<Tick>>>) {
        self.add_used(Object::Allocation(ptr), uses);
    }

    /// As [`Device::unreserve_later`], with the work that may use the memory, as in
    /// [`Device::free_after`].
    #[doc(hidden)]
    pub fn unreserve_after(&self, reservation: Reservation, uses: Option<&Arc<Vec<Tick>>>) {
        self.add_used(Object::Reservation(reservation), uses);
    }

    fn add_used(&self, object: Object, uses: Option<&Arc<Vec<Tick>>>) {
        self.0.context.releases.add_used(object, uses.map(|uses| uses.clone() as Arc<dyn Uses>));
    }

    /// Leaves reserved addresses, and the memory mapped there, to the device, to be given back when
    /// memory of [`Device::free_later`] is. That waits for the device, unless nothing is mapped
    /// there. Makes no driver call.
    pub fn unreserve_later(&self, reservation: Reservation) {
        self.unreserve_after(reservation, None);
    }

    /// Leaves physical memory that is mapped nowhere to the device, to be released when memory of
    /// [`Device::free_later`] is freed. Makes no driver call.
    pub fn release_later(&self, physical: RawPhysical) {
        self.0.context.releases.add(Object::Physical(physical));
    }

    /// Leaves a module of kernels to the device, to be unloaded when memory of
    /// [`Device::free_later`] is freed. That waits for the device. Makes no driver call.
    pub fn unload_later(&self, module: RawModule) {
        self.0.context.releases.add(Object::Module(module));
    }

    /// Leaves pinned memory of [`crate::Driver::host_alloc`] to the device, to be freed once
    /// its last `uses` are known to be done: at the next [`Device::settle_host`], at the next
    /// [`Device::settle`], which waits for the device if need be, or when the last handle of the
    /// device is dropped. Makes no driver call.
    ///
    /// Like [`crate::Driver::host_free`], this takes memory away, so only the owner may call it:
    ///
    /// ```compile_fail,E0133
    /// let device = aquifer::open("sim:24GiB")?;
    /// let lent = device.driver().host_alloc(4096)?;
    /// device.host_free_later(lent, 4096, Vec::new());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Safety
    /// As for [`crate::Driver::host_free`], but for work that was enqueued before a tick in `uses`
    /// was taken, on that tick's stream. The ticks are of this device, and one of its allocations
    /// starts at `ptr`, which nothing else frees.
    pub unsafe fn host_free_later(&self, ptr: HostPtr, bytes: u64, uses: Vec<Tick>) {
        // SAFETY: passed on to the caller.
        let memory = unsafe { HostMemory::new(ptr, bytes, None) };
        self.0.context.releases.add_used(Object::Host(memory), Some(Arc::new(uses)));
    }

    /// Leaves registered memory to the device, to be unregistered
    /// ([`crate::Driver::host_unregister`]) when [`Device::host_free_later`] would free it. Then
    /// drops the `owner` of the memory, which must keep it readable and writable until then.
    /// Unregistering waits for the device, so [`Device::settle_host`] does it only when there are
    /// more than 64 MiB. If it never succeeds, as on a lost device, the owner is leaked, because
    /// the device may still write there. Makes no driver call.
    ///
    /// # Safety
    /// As for [`crate::Driver::host_unregister`], but for work that was enqueued before a tick in
    /// `uses` was taken, on that tick's stream. The ticks are of this device, and memory registered
    /// with it starts at `ptr`, which nothing else unregisters.
    pub unsafe fn host_unregister_later(&self, ptr: HostPtr, bytes: u64, owner: Box<dyn Any + Send>, uses: Vec<Tick>) {
        // SAFETY: passed on to the caller.
        let memory = unsafe { HostMemory::new(ptr, bytes, Some(owner)) };
        self.0.context.releases.add_used(Object::Host(memory), Some(Arc::new(uses)));
    }

    /// Leaves something to the device whose drop makes driver calls: it is dropped at a later call
    /// of the device that is no work, or when its last handle of a caller is. Makes no driver call.
    #[doc(hidden)]
    pub fn drop_later(&self, thing: Box<dyn Any + Send>) {
        unfinished::drop_later(self.id(), self.0.context.handles.clone(), thing);
    }

    /// Drops what was left, and gives memory back that outlived its allocator, as far as no work
    /// uses it any more. Waits for nothing.
    pub(super) fn give_back_left(&self) {
        unfinished::drop_left_of(self.id());
        self.0.context.settle_left();
    }

    /// Asks the driver how far streams got, and gives back pinned memory of
    /// [`Device::host_free_later`] whose uses are done, and registered memory if there is much of
    /// it. Does nothing while a stream captures. Returns how many bytes went back.
    #[doc(hidden)]
    pub fn settle_host(&self) -> u64 {
        self.0.context.settle(Effort::MuchAtATime)
    }

    /// As [`Device::settle_host`], for all such memory. Waits for the device if it may still use
    /// some of it.
    pub fn wait_and_settle_host(&self) -> u64 {
        self.0.context.settle(Effort::Waiting)
    }

    /// Gives back everything that was left to be given back later (`free_later` and the like).
    /// Waits for the device if it may still use some of it. The rest stays if a call fails, and is
    /// tried again later.
    pub fn settle(&self) {
        self.settle_graphs();
        self.settle_but_graphs();
    }

    /// As [`Device::settle`], without [`Device::settle_graphs`], for callers that hold locks of an
    /// allocator: what was kept for a graph may be a pool of it.
    #[doc(hidden)]
    pub fn settle_but_graphs(&self) {
        if fork::is_child() {
            return;
        }
        self.give_up_captures_of_ended_threads();
        unfinished::drop_left_of(self.id());
        unfinished::end_captures(&self.0.context.capturing);
        unfinished::finish_all();
        self.0.context.settle(Effort::Waiting);
    }

    /// Drops what was kept for graphs of other libraries that are gone by now
    /// ([`crate::Stream::follow_capture`]). Waits for nothing.
    #[doc(hidden)]
    pub fn settle_graphs(&self) {
        let gone = if fork::is_child() { Vec::new() } else { self.0.context.driver.take_kept() };
        // This runs code of callers.
        gone.into_iter().filter_map(|kept| kept.downcast::<Launches>().ok()).for_each(|gone| drop(gone.note_gone()));
    }

    /// As [`Device::settle`], but only for things that are known not to be in use any more. Waits
    /// for nothing.
    #[doc(hidden)]
    pub fn settle_unused(&self) {
        self.0.context.settle(Effort::WithoutWaiting);
    }
}
