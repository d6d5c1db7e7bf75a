//! Dedicated memory: memory mapped for one owner at addresses of its own, outside of every heap
//! ([`crate::Growable`], [`crate::Exportable`]).
//!
//! It counts in `reserved` and `allocated` as a block of the large pool. Memory that its owner
//! gives up is *deferred*: it is listed with a tick of each stream that used it, which makes no
//! driver call. Later operations on mappings unmap deferred memory whose ticks are done, and
//! recycle or release it. Ticks that are not known done are asked about and waited for together
//! with those of free blocks (`donors.rs`).
//!
//! Invariant: the owner's record in the table of mapped memory lives until [`DedicatedMemory`] is
//! dropped, which the handle and the buffers made of it share. Dropping it retires all memory that
//! the owner has.

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::fork::{self, Mutex};
use aquifer_device::{DeviceError, DevicePtr, NewBlock, Operation, Stream, Witness};

use crate::allocator::Allocator;
use crate::backing::paged::carry_out::{release, unless_capturing, unmap_range, unreserve};
use crate::core::Core;
use crate::core::dedicated::Recycling;
use crate::core::paged::deferred_release::DeferredRelease;
use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::tags::Tag;
use crate::types::StreamId;

/// Unmaps deferred memory that is known done. Its frames become spare; those of exportable memory
/// go back to the device. Returns how many bytes went back. Unless it `waits`, it does nothing
/// while another thread changes mappings, which may take long.
pub(crate) fn recycle_deferred_releases(allocator: &Allocator, waits: bool) -> Result<u64, AllocError> {
    if !may_recycle(allocator, &mut allocator.state().shared()) {
        return Ok(0);
    }
    // Exclusive, so that a reservation never goes before the last memory mapped in it.
    let gate = allocator.gate()?;
    let Some(_alone) = (if waits { Some(gate.exclusive()) } else { gate.try_exclusive() }) else { return Ok(0) };
    let mut released = 0;
    loop {
        let recycled = allocator.state().shared().begin_recycling();
        let Some(recycled) = recycled else { break };
        let failed = unmap_recycled(allocator, &recycled);
        let mut guard = allocator.state().lock();
        let frames = guard.commit_recycling(recycled, failed.is_none());
        let bytes = frames.iter().map(|&(_, bytes)| bytes).sum::<u64>();
        guard.begin_releasing(bytes);
        drop(guard);
        frames.into_iter().for_each(|(physical, _)| release(allocator.device(), physical));
        allocator.state().shared().end_releasing(bytes);
        released += bytes;
        if let Some(error) = failed {
            // A capture that began meanwhile.
            return unless_capturing(Err(error)).map(|()| released).map_err(AllocError::from);
        }
    }
    loop {
        let vacant = allocator.state().shared().take_vacant_reservation();
        let Some((ptr, bytes)) = vacant else { return Ok(released) };
        unreserve(allocator.device(), ptr, bytes)?;
    }
}

/// True if some deferred memory is known done and may be unmapped now.
pub(crate) fn may_recycle(allocator: &Allocator, core: &mut Core) -> bool {
    !allocator.device().is_capturing() && core.is_recyclable()
}

/// Unmaps deferred memory. Returns the error, if any; the memory is then mapped still, and stays
/// deferred.
fn unmap_recycled(allocator: &Allocator, recycled: &Recycling) -> Option<DeviceError> {
    let DeferredRelease { range, was_told, .. } = &recycled.piece;
    if *was_told {
        unmap_range(allocator.device(), allocator.hooks(), range).err()
    } else {
        allocator.device().unmap(DevicePtr(range.start), range.end - range.start).err()
    }
}

/// Dedicated memory, from the first address on. It keeps the allocator open. Dropping it makes no
/// driver call and does not wait.
#[derive(Debug)]
pub(crate) struct DedicatedMemory {
    allocator: Allocator,
    ptr: DevicePtr,
    /// Requested bytes.
    bytes: AtomicU64,
    /// Streams that use it, in order: the one that it was made for, and others.
    users: Mutex<Vec<StreamId>>,
}

impl DedicatedMemory {
    /// The hold of the owner of the reservation at `ptr`.
    pub(crate) fn new(allocator: &Allocator, ptr: DevicePtr, bytes: u64, stream: StreamId) -> DedicatedMemory {
        DedicatedMemory {
            allocator: allocator.kept_open(),
            ptr,
            bytes: AtomicU64::new(bytes),
            users: Mutex::new(vec![stream]),
        }
    }

    pub(crate) fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// Sets the requested bytes, and tells the device's witness.
    pub(crate) fn resize(&self, bytes: u64, at: &'static Location<'static>) {
        let before = self.bytes.swap(bytes, Ordering::AcqRel);
        self.state().tell_witness(|witness| match before {
            0 => self.report_block(witness, bytes, at),
            _ => witness.resized(self.ptr, bytes, Some(at)),
        });
    }

    /// Tells the device's witness of memory that is handed out.
    pub(crate) fn report_block(&self, witness: &dyn Witness, bytes: u64, at: &'static Location<'static>) {
        let tag = Tag::current().name();
        witness.begins(NewBlock { ptr: self.ptr, bytes, tag, is_for_graphs: false, at: Some(at) });
    }

    pub(crate) fn users(&self) -> Vec<StreamId> {
        self.users.lock().clone()
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(crate) fn state(&self) -> &'static AllocatorState {
        self.allocator.state()
    }

    /// Notes that `stream` uses the memory, too.
    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        self.allocator.check_stream(stream)?;
        let stream = self.allocator.state().shared().stream(stream);
        let mut users = self.users.lock();
        if let Err(at) = users.binary_search(&stream) {
            users.insert(at, stream);
        }
        Ok(())
    }
}

impl Drop for DedicatedMemory {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.state().tell_witness(|witness| witness.ends(self.ptr, None));
        self.allocator.state().lock().end_owned(self.ptr.0, self.users.get_mut());
    }
}
