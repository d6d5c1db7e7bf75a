//! The owner's hold on dedicated memory, which the handle and the buffers made of it share.
//!
//! Invariant: the owner's record in the table of mapped memory lives until this is dropped.
//! Dropping it retires all memory that the owner has.

use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_device::fork::{self, Mutex};
use aquifer_device::{DevicePtr, NewBlock, Operation, Stream, Witness};

use crate::allocator::Allocator;
use crate::error::AllocError;
use crate::state::AllocatorState;
use crate::tags::Tag;
use crate::types::StreamId;

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

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
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

    pub(crate) fn state(&self) -> &'static AllocatorState {
        self.allocator.state()
    }

    /// Notes that `stream` uses the memory, too.
    pub(crate) fn record_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        fork::check(Operation::Record)?;
        let device_id = self.allocator.device().id();
        if stream.device_id() != device_id {
            return Err(AllocError::wrong_device("stream", stream.device_id(), device_id));
        }
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
