//! Host memory that copies use.
//!
//! Invariants:
//! * **N1** its bytes are initialised, and stay where they are until the last `Arc` is gone and no copy uses them;
//! * **N2** the host touches the bytes only after it waited for the copies that conflict, and while it does, borrows keep new ones
//!   away ([`super::PinnedBuffer`]);
//! * memory of a pool goes back there with the ticks of its copies; memory that was registered goes to the device, which drops it
//!   when it is not registered any more.
//!
//! Lock order: device memory ([`aquifer_allocator::Turn`]), host memory by address, the pool, timelines.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::{AccessKind, HostPtr, RequestError};
use memmap2::MmapMut;

use super::class::UNIT;
use super::ladder::Inner;
use super::pool::PinnedPool;
use super::register::Owner;
use super::state::Block;
use super::uses::Uses;
use crate::error::TransferError;

/// A piece of host memory.
pub(crate) struct PinnedMemory {
    pool: Arc<Inner>,
    ptr: HostPtr,
    bytes: usize,
    origin: Origin,
    uses: Uses,
}

/// Where the memory is from, and goes back to.
pub(super) enum Origin {
    /// There are no bytes.
    Nowhere,
    /// A block of the pool.
    Pool(Block),
    /// The caller's, page-locked. `None` once it was given back.
    Registered(Mutex<Option<Owner>>),
    /// Not page-locked. Drivers are done with such memory when a copy call returns, so it needs no more care than any other.
    Pageable { _map: MmapMut },
}

/// A part of host memory, as copies take it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPart<'a> {
    pub(crate) memory: &'a Arc<PinnedMemory>,
    pub(crate) ptr: HostPtr,
    pub(crate) bytes: usize,
}

impl PinnedMemory {
    /// Page-locked memory of the pool for `bytes` bytes, at a multiple of `alignment`.
    pub(super) fn alloc(pool: &PinnedPool, bytes: usize, alignment: usize) -> Result<Arc<PinnedMemory>, TransferError> {
        if bytes == 0 {
            return Ok(Self::empty(pool, alignment));
        }
        // Blocks start at multiples of UNIT; more than that takes room to move.
        let room = alignment.saturating_sub(UNIT);
        let too_long = TransferError::Request(RequestError::LengthOverflow { len: bytes as u64, size: 1 });
        let block = pool.inner().take(bytes.checked_add(room).ok_or(too_long)?)?;
        let ptr = HostPtr(block.start.next_multiple_of(alignment));
        Ok(Self::new(pool, ptr, bytes, Origin::Pool(block)))
    }

    /// No bytes, at an address that is aligned.
    pub(super) fn empty(pool: &PinnedPool, alignment: usize) -> Arc<PinnedMemory> {
        Self::new(pool, HostPtr(alignment.max(UNIT)), 0, Origin::Nowhere)
    }

    pub(super) fn new(pool: &PinnedPool, ptr: HostPtr, bytes: usize, origin: Origin) -> Arc<PinnedMemory> {
        Arc::new(PinnedMemory { pool: pool.inner().clone(), ptr, bytes, origin, uses: Uses::default() })
    }

    /// The first byte.
    pub(crate) fn ptr(&self) -> HostPtr {
        self.ptr
    }

    /// Identity of the device whose copies may use it.
    pub(crate) fn device_id(&self) -> u32 {
        self.pool.device.id()
    }

    /// Whether it is page-locked, so that copies need not be staged.
    pub(crate) fn is_pinned(&self) -> bool {
        !matches!(self.origin, Origin::Pageable { .. })
    }

    /// Whether no copy is in flight, nor to come. Asks the driver if that is not known.
    pub(crate) fn is_idle(&self) -> Result<bool, TransferError> {
        self.uses.are_over()
    }

    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    /// Waits until the host may do this with all of the memory, and tells the driver which part it is about to touch.
    ///
    /// No lock is held meanwhile, so copies that do not conflict can be enqueued.
    pub(super) fn touch(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<(), TransferError> {
        aquifer_device::fork::check(aquifer_device::Operation::SynchronizeEvent)?;
        for tick in &self.uses.before(kind) {
            self.pool.wait_for(tick)?;
        }
        self.announce(ptr, bytes, kind)
    }

    /// Tells the driver which part the host is about to touch, where that is the driver's business.
    pub(super) fn announce(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<(), TransferError> {
        if bytes > 0 && self.is_pinned() {
            self.pool.device.driver().host_access(ptr, bytes, kind)?;
        }
        Ok(())
    }

    /// The caller's own memory, no longer page-locked; `None` if it is not that.
    ///
    /// # Safety
    /// Copies that use it are over, and nobody has a view of it.
    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    pub(super) unsafe fn unregister(&self) -> Result<Option<Box<dyn Any + Send>>, TransferError> {
        let Origin::Registered(owner) = &self.origin else { return Ok(None) };
        let mut owner = owner.lock();
        if owner.is_some() {
            // SAFETY: it is registered while there is an owner, and nobody uses it, as the caller vouches.
            unsafe { self.pool.device.driver().host_unregister(self.ptr)? };
        }
        Ok(owner.take().map(Owner::into_memory))
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
            Origin::Pool(block) => self.pool.give(block.id, self.uses.take()),
            Origin::Registered(owner) => {
                if let Some(owner) = owner.get_mut().take() {
                    let (device, bytes, uses) = (&self.pool.device, self.bytes as u64, self.uses.take());
                    // SAFETY: it is registered while there is an owner; no view outlives this, and copies noted their ticks (N4).
                    unsafe { device.host_unregister_later(self.ptr, bytes, owner.into_memory(), uses) };
                }
            }
            Origin::Nowhere | Origin::Pageable { .. } => {}
        }
    }
}

impl fmt::Debug for PinnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedMemory")
            .field("ptr", &self.ptr)
            .field("bytes", &self.bytes)
            .field("pinned", &self.is_pinned())
            .finish_non_exhaustive()
    }
}
