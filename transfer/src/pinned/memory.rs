//! Host memory that copies use.
//!
//! Invariants:
//! * **N1** its bytes are initialised, and stay where they are until the last `Arc` is gone and no
//!   copy uses them;
//! * **N2** the host touches the bytes only after it waited for the copies that conflict. Meanwhile
//!   borrows keep new copies away ([`super::PinnedBuffer`]), and launches of graphs that conflict
//!   are refused ([`super::PinnedRead`]);
//! * memory of a pool goes back to it with the ticks of its copies; registered memory goes to the
//!   device, which drops it once it is not registered any more.
//!
//! Lock order: device memory ([`aquifer_allocator::AccessGuard`]), host memory by address, the
//! pool, timelines.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{AccessKind, HostPtr, RequestError, Stream};

use super::borrow::HostBorrow;
use super::class::UNIT;
use super::ladder::SharedPool;
use super::state::PoolBlock;
use super::uses::{HostAccess, Uses};
use crate::enqueue::refuse_capture;
use crate::error::TransferError;

/// A piece of host memory.
pub(crate) struct PinnedMemory {
    pool: Arc<SharedPool>,
    pub(super) ptr: HostPtr,
    bytes: usize,
    pub(super) origin: Origin,
    pub(super) uses: Uses,
}

/// The owner of the memory behind a buffer.
pub(super) enum Origin {
    /// There are no bytes.
    Nowhere,
    /// A block of the pool.
    Pool(PoolBlock),
    /// The caller's memory, pinned. `None` once it was given back.
    Registered(Mutex<Option<Box<dyn Any + Send>>>),
}

/// A part of host memory, as copies take it.
#[derive(Clone, Copy)]
pub(crate) struct HostPart<'a> {
    pub(crate) memory: &'a Arc<PinnedMemory>,
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
}

impl PinnedMemory {
    /// Pinned memory of the pool for `bytes` bytes, at a multiple of `alignment`.
    pub(super) fn alloc(
        pool: &Arc<SharedPool>,
        bytes: usize,
        alignment: usize,
    ) -> Result<Arc<PinnedMemory>, TransferError> {
        if bytes == 0 {
            return Ok(Self::empty(pool, alignment));
        }
        // Blocks start at multiples of UNIT; a larger alignment needs room to move.
        let room = (alignment as u64).saturating_sub(UNIT);
        let block = pool.take((bytes as u64).saturating_add(room))?;
        let ptr = HostPtr(block.ptr.0.next_multiple_of(alignment.max(1)));
        Ok(Self::new(pool, ptr, bytes, Origin::Pool(block)))
    }

    /// No bytes, at an address that is aligned.
    pub(super) fn empty(pool: &Arc<SharedPool>, alignment: usize) -> Arc<PinnedMemory> {
        Self::new(pool, HostPtr(alignment.max(1)), 0, Origin::Nowhere)
    }

    pub(super) fn new(pool: &Arc<SharedPool>, ptr: HostPtr, bytes: usize, origin: Origin) -> Arc<PinnedMemory> {
        Arc::new(PinnedMemory { pool: pool.clone(), ptr, bytes, origin, uses: Uses::default() })
    }

    /// Identity of the device whose copies may use it.
    pub(crate) fn device_id(&self) -> u32 {
        self.pool.device.id()
    }

    /// An access guard: orders the work that `stream` gets from now on after the copies that must
    /// come before one that does `kind` with the memory (it reads in an upload, and writes in a
    /// download). While it is held no other thread gets one.
    ///
    /// No event covers the tick that is noted when the access ends. The caller covers it
    /// ([`aquifer_device::Tick::cover`]), so that it is known to be done without more events; the
    /// pool covers it only when it needs the memory.
    ///
    /// # Errors
    /// When the stream is another device's, or captures: a graph could run when the memory has
    /// another owner; errors of the driver.
    pub(crate) fn access<'a>(&'a self, stream: &'a Stream, kind: AccessKind) -> Result<HostAccess<'a>, TransferError> {
        if stream.device_id() != self.device_id() {
            return Err(RequestError::wrong_device("pinned memory", self.device_id(), stream.device_id()).into());
        }
        refuse_capture(
            stream,
            "a graph may run when this pinned memory has another owner; copy outside of the capture",
        )?;
        Ok(self.uses.access(stream, kind)?)
    }

    /// Refuses the launch of a graph that uses the memory while a borrow by the host conflicts.
    /// Call it while the launch has access to the memory.
    pub(crate) fn refuse_borrowed(&self, kind: AccessKind) -> Result<(), TransferError> {
        let Some(borrow) = self.uses.borrowed_against(kind) else { return Ok(()) };
        Err(self.used_by_graph(match borrow {
            AccessKind::Read => "the host reads them, so nothing was launched; drop what `read` returned first",
            AccessKind::Write => "the host may write them, so nothing was launched; drop what `write` returned first",
        }))
    }

    pub(super) fn used_by_graph(&self, advice: &'static str) -> TransferError {
        TransferError::UsedByGraph { address: self.ptr.0 as u64, bytes: self.bytes as u64, advice }
    }

    /// The caller's own vector, no longer pinned; `None` if the memory was not registered.
    ///
    /// # Safety
    /// All copies that use it are done, and no view of it exists.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn unregister<T: 'static>(&mut self) -> Result<Option<Vec<T>>, TransferError> {
        let Origin::Registered(owner) = &mut self.origin else { return Ok(None) };
        let owner = owner.get_mut();
        if owner.is_none() {
            return Ok(None);
        }
        // SAFETY: it is registered while there is an owner, and the caller promises that it is
        // unused.
        unsafe { self.pool.device.driver().host_unregister(self.ptr)? };
        Ok(owner.take().and_then(|owner| owner.downcast().ok()).map(|values| *values))
    }
}

impl<'a> HostPart<'a> {
    pub(crate) fn all(memory: &'a Arc<PinnedMemory>) -> HostPart<'a> {
        HostPart { memory, ptr: memory.ptr, bytes: memory.bytes }
    }

    /// Waits until the host may access all of the memory, and reports the part that it is about
    /// to touch to the driver.
    ///
    /// No lock is held meanwhile, so copies that do not conflict can be enqueued. Until the result
    /// is dropped, launches of graphs that conflict are refused.
    pub(super) fn touch(self, kind: AccessKind) -> Result<HostBorrow<'a>, TransferError> {
        let HostPart { memory, ptr, bytes } = self;
        aquifer_device::fork::check(aquifer_device::Operation::SynchronizeEvent)?;
        let borrow = memory.uses.borrow(kind);
        for tick in &memory.uses.before(kind) {
            memory.pool.wait_for(tick)?;
        }
        if bytes > 0 {
            memory.pool.device.driver().host_access(ptr, bytes, kind)?;
        }
        Ok(borrow)
    }
}

impl fmt::Debug for HostPart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPart").field("ptr", &self.ptr).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Drop for PinnedMemory {
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            // The owner of registered memory stays with it.
            if let Origin::Registered(owner) = &mut self.origin {
                std::mem::forget(owner.get_mut().take());
            }
            return;
        }
        match &mut self.origin {
            Origin::Pool(block) => {
                let ticks = self.uses.take();
                self.pool.state.lock().give(block.id, ticks);
            }
            Origin::Registered(owner) => {
                if let Some(owner) = owner.get_mut().take() {
                    let (device, bytes, uses) = (&self.pool.device, self.bytes as u64, self.uses.take());
                    // SAFETY: it is registered while there is an owner; no view outlives this, and
                    // copies noted their ticks (N4).
                    unsafe { device.host_unregister_later(self.ptr, bytes, owner, uses) };
                }
            }
            Origin::Nowhere => {}
        }
    }
}
