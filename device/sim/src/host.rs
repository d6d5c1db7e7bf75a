//! Pinned host memory: real memory of the simulator's own, which pending copies keep alive, or
//! memory of the caller's that was registered.
//!
//! All reads and writes of host memory through raw pointers happen in this file. Invariant: a
//! block's bytes are initialised and stay allocated until the last [`Arc`] of it is gone; every
//! access checks the range first. A registered block's bytes are there until it is unregistered,
//! and nothing accesses them after that: pending work was run then, and later work finds the block
//! in `gone`.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use aquifer_device::Code;

use crate::refused::{Answer, Refused};
use crate::violation::OpRef;

/// Alignment of pinned memory in bytes.
const PAGE: usize = 4096;

const ALREADY_REGISTERED: Code = Code(712);
const NOT_REGISTERED: Code = Code(713);

/// One pinned piece of memory.
#[derive(Debug)]
pub(crate) struct HostBlock {
    start: NonNull<u8>,
    /// How it was allocated; `None` for registered memory.
    layout: Option<Layout>,
    bytes: usize,
}

// SAFETY: the block hands out no references to its memory; the rules for accesses to it are those
// of `Driver`'s copy calls, as for any pinned memory.
unsafe impl Send for HostBlock {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn new(bytes: usize) -> Answer<HostBlock> {
        let out_of_memory = || Refused::new(Code::OUT_OF_MEMORY, format!("{bytes} bytes of pinned memory asked for"));
        if bytes == 0 {
            return Err(Refused::value("0 bytes asked for"));
        }
        let layout = Layout::from_size_align(bytes, PAGE).map_err(|_| out_of_memory())?;
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or_else(out_of_memory)?;
        Ok(HostBlock { start, layout: Some(layout), bytes })
    }

    /// The caller's memory, which must outlive every access.
    fn registered(start: NonNull<u8>, bytes: usize) -> HostBlock {
        HostBlock { start, layout: None, bytes }
    }

    /// The host address of the first byte.
    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr().expose_provenance()
    }

    /// The addresses of `bytes` bytes from `offset` on.
    pub(crate) fn range(&self, offset: usize, bytes: usize) -> Range<u64> {
        let start = self.address() as u64 + offset as u64;
        start..start + bytes as u64
    }

    fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        inside.then(|| self.start.as_ptr().wrapping_add(offset))
    }

    /// Reads from the block; out of range reads nothing.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) {
        if let Some(from) = self.at(offset, into.len()) {
            // SAFETY: `from` and the length lie inside this live block, and `into` is the
            // simulator's own buffer.
            unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        }
    }

    /// Writes to the block; out of range writes nothing.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        if let Some(to) = self.at(offset, bytes.len()) {
            // SAFETY: `to` and the length lie inside this live block, and `bytes` is the
            // simulator's own buffer.
            unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        }
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated in `new` with this layout, and freed only here.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// The live pinned memory by address.
#[derive(Debug, Default)]
pub(crate) struct HostBlocks {
    blocks: BTreeMap<usize, Arc<HostBlock>>,
    /// Freed blocks that pending copies or graphs may still hold, with the operation that freed
    /// them.
    gone: Vec<(Arc<HostBlock>, OpRef)>,
}

impl HostBlocks {
    pub(crate) fn alloc(&mut self, bytes: usize) -> Answer<usize> {
        let block = HostBlock::new(bytes)?;
        let address = block.address();
        self.blocks.insert(address, Arc::new(block));
        Ok(address)
    }

    /// Pins the caller's memory, which must stay there until it is unregistered.
    pub(crate) fn register(&mut self, start: *mut u8, bytes: usize) -> Answer<usize> {
        let address = start.expose_provenance();
        let end = address.checked_add(bytes);
        let (Some(start), Some(end), true) = (NonNull::new(start), end, bytes > 0) else {
            return Err(Refused::value(format!("{bytes} bytes at {address:#x} are no host memory")));
        };
        let before = self.blocks.range(..end).next_back();
        if let Some((&other, _)) = before.filter(|(start, block)| **start + block.bytes > address) {
            let detail = format!("the memory at {other:#x} is pinned already");
            return Err(Refused::new(ALREADY_REGISTERED, detail));
        }
        self.blocks.insert(address, Arc::new(HostBlock::registered(start, bytes)));
        Ok(address)
    }

    /// Number of live pieces, allocated and registered.
    pub(crate) fn count(&self) -> usize {
        self.blocks.len()
    }

    /// The range of the live allocation that starts at `address`.
    pub(crate) fn allocated(&self, address: usize) -> Answer<Range<u64>> {
        let block = self.blocks.get(&address).filter(|block| block.layout.is_some());
        let none = || Refused::value(format!("no pinned allocation starts at {address:#x}"));
        block.map(|block| block.range(0, block.bytes)).ok_or_else(none)
    }

    /// The range of the registered memory that starts at `address`.
    pub(crate) fn registered(&self, address: usize) -> Answer<Range<u64>> {
        let block = self.blocks.get(&address).filter(|block| block.layout.is_none());
        let none = || Refused::new(NOT_REGISTERED, format!("no registered memory starts at {address:#x}"));
        block.map(|block| block.range(0, block.bytes)).ok_or_else(none)
    }

    pub(crate) fn free(&mut self, address: usize, by: OpRef) {
        self.gone.retain(|(block, _)| Arc::strong_count(block) > 1);
        if let Some(block) = self.blocks.remove(&address) {
            self.gone.push((block, by));
            self.gone.retain(|(block, _)| Arc::strong_count(block) > 1);
        }
    }

    /// The live allocation that holds all of the range, with the offset of its start in it.
    pub(crate) fn find(&self, address: usize, bytes: usize) -> Option<(&Arc<HostBlock>, usize)> {
        let (&start, block) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        block.at(offset, bytes).map(|_| (block, offset))
    }

    /// The operation that freed the block, if it is not live any more.
    pub(crate) fn freed(&self, block: &Arc<HostBlock>) -> Option<OpRef> {
        self.gone.iter().find(|(gone, _)| Arc::ptr_eq(gone, block)).map(|&(_, by)| by)
    }
}

/// Takes bytes from the caller's memory.
///
/// # Safety
/// `from..from + bytes` must be readable.
pub(crate) unsafe fn take(from: *const u8, bytes: usize) -> Vec<u8> {
    let mut taken = vec![0; bytes];
    // SAFETY: the caller vouches for the source; the target was just made with this length.
    unsafe { ptr::copy_nonoverlapping(from, taken.as_mut_ptr(), bytes) };
    taken
}

/// Gives bytes to the caller's memory.
///
/// # Safety
/// `to..to + bytes.len()` must be writable.
pub(crate) unsafe fn give(to: *mut u8, bytes: &[u8]) {
    // SAFETY: the caller vouches for the target; the source is a slice.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
}
