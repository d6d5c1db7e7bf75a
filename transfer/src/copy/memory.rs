//! Host memory that threads of the staging ring read and write.
//!
//! Invariant **N3**: the ring reads a source and writes a target only before the job is settled,
//! and no two threads write the same bytes of a target.

use std::any::TypeId;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::RequestError;
use aquifer_device::fork::RwLock;
use bytemuck::Pod;

use crate::error::TransferError;
use crate::foreign_code;
use crate::pinned::Reserved;
use crate::staging::{HostSource, HostTarget};

/// The bytes of an owner. `AsRef` is the caller's code: the caller's thread calls it once, and
/// threads of the runtime never do. Clones share the owner, which is dropped with the last of them.
#[derive(Clone)]
pub(crate) struct Owned {
    bytes: Raw,
    elements: usize,
    /// `None` only during the drop. It never moves, so its slice stays valid.
    owner: Option<Arc<dyn Send + Sync>>,
    /// Whether dropping the owner may run code of the caller.
    is_foreign: bool,
}

impl Owned {
    /// The memory that `owner` returns now.
    pub(crate) fn new<T: Pod, S: AsRef<[T]> + Send + Sync + 'static>(owner: S) -> Owned {
        let owner = Arc::new(owner);
        let slice: &[T] = (*owner).as_ref();
        let bytes = Raw { ptr: slice.as_ptr().cast_mut().cast(), bytes: size_of_val(slice) };
        let elements = slice.len();
        Owned { bytes, elements, owner: Some(owner), is_foreign: is_foreign::<T, S>() }
    }

    /// The bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        #[allow(unsafe_code, reason = "the owner's slice is asked for once")]
        // SAFETY: the slice is valid while the owner is borrowed. The owner is never moved nor
        // borrowed mutably, and lives as long as `self`. Elements of plain data can be read as
        // bytes.
        unsafe {
            std::slice::from_raw_parts(self.bytes.ptr, self.bytes.bytes)
        }
    }

    /// The number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.bytes.bytes
    }

    /// The number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// A part of the bytes, which shares the owner. A range beyond the end is cut.
    pub(crate) fn part(&self, range: Range<usize>) -> Owned {
        let end = range.end.min(self.len());
        let start = range.start.min(end);
        let bytes = Raw { ptr: self.bytes.ptr.wrapping_add(start), bytes: end - start };
        Owned { bytes, elements: end - start, owner: self.owner.clone(), is_foreign: self.is_foreign }
    }

    /// An address that clones share, and no other live value has.
    pub(crate) fn identity(&self) -> usize {
        self.owner.as_ref().map_or(0, |owner| Arc::as_ptr(owner).addr())
    }
}

/// Whether dropping an owner may run code of the caller: not for types of the standard library.
fn is_foreign<T: Pod, S: 'static>() -> bool {
    let own = [
        TypeId::of::<Vec<T>>(),
        TypeId::of::<Box<[T]>>(),
        TypeId::of::<Arc<[T]>>(),
        TypeId::of::<Arc<Vec<T>>>(),
        TypeId::of::<Arc<Box<[T]>>>(),
    ];
    std::mem::needs_drop::<S>() && !own.contains(&TypeId::of::<S>())
}

impl Drop for Owned {
    fn drop(&mut self) {
        if self.is_foreign && foreign_code::is_deferring() {
            let owner = self.owner.take();
            foreign_code::run("an owner of host memory that was dropped", move || drop(owner));
        }
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owned").field("bytes", &self.len()).finish_non_exhaustive()
    }
}

impl HostSource for Owned {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        into.copy_from_slice(&self.bytes()[part(offset, into.len(), self.len())?]);
        Ok(())
    }
}

/// Pageable buffers: the driver's own copies of them would wait for the device.
impl HostSource for Reserved {
    fn bytes(&self) -> u64 {
        Reserved::bytes(self) as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        Reserved::read(self, offset, into)
    }
}

impl HostTarget for Reserved {
    fn bytes(&self) -> u64 {
        Reserved::bytes(self) as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        Reserved::write(self, offset, from)
    }
}

/// A `Vec` that bytes are written to.
pub(crate) struct Destination<T> {
    /// Taken once the job is settled. Writers hold the lock shared.
    memory: RwLock<Option<Vec<T>>>,
    target: Raw,
}

/// A range of host memory with another owner.
#[derive(Clone, Copy)]
struct Raw {
    ptr: *mut u8,
    bytes: usize,
}

#[allow(unsafe_code, reason = "threads of the runtime copy for others")]
// SAFETY: a range is two numbers; its users keep N3.
unsafe impl Send for Raw {}

#[allow(unsafe_code, reason = "threads of the runtime copy for others")]
// SAFETY: a range is two numbers; its users keep N3.
unsafe impl Sync for Raw {}

impl Raw {
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let part = part(offset, from.len(), self.bytes)?;
        #[allow(unsafe_code, reason = "several threads write disjoint parts of one memory")]
        // SAFETY: the part lies within the range, of live memory that no other thread touches there
        // now (N3).
        unsafe { std::slice::from_raw_parts_mut(self.ptr.wrapping_add(part.start), part.len()) }.copy_from_slice(from);
        Ok(())
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let part = part(offset, into.len(), self.bytes)?;
        #[allow(unsafe_code, reason = "threads of the runtime read what the caller lends")]
        // SAFETY: the part lies within the range, of live memory that no thread writes now (N3).
        let from = unsafe { std::slice::from_raw_parts(self.ptr.wrapping_add(part.start), part.len()) };
        into.copy_from_slice(from);
        Ok(())
    }
}

/// The part of a memory of `len` bytes that begins at `offset`.
fn part(offset: u64, bytes: usize, len: usize) -> Result<Range<usize>, TransferError> {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    match start.checked_add(bytes).filter(|&end| end <= len) {
        Some(end) => Ok(start..end),
        None => Err(TransferError::Request(RequestError::OutOfBounds {
            start: offset,
            end: offset.saturating_add(bytes as u64),
            len: len as u64,
        })),
    }
}

impl<T: Pod + Send + Sync> Destination<T> {
    pub(crate) fn new(mut memory: Vec<T>) -> Self {
        let target = Raw { ptr: memory.as_mut_ptr().cast(), bytes: size_of_val(memory.as_slice()) };
        Destination { memory: RwLock::new(Some(memory)), target }
    }

    /// The memory. Later writes are refused.
    pub(crate) fn take(&self) -> Result<Vec<T>, TransferError> {
        self.memory.write().take().ok_or(TransferError::AlreadyTaken)
    }
}

impl<T: Pod + Send + Sync> HostTarget for Destination<T> {
    fn bytes(&self) -> u64 {
        self.target.bytes as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let memory = self.memory.read();
        if memory.is_none() {
            return Err(TransferError::AlreadyTaken);
        }
        self.target.write(offset, from)
    }
}

/// Memory that the caller lends until the job is settled.
pub(crate) struct Lent(Raw);

impl Lent {
    /// Memory to read.
    ///
    /// # Safety
    /// It must stay as it is until every job that has it is settled.
    #[allow(unsafe_code, reason = "whoever lends must wait")]
    pub(crate) unsafe fn to_read<T: Pod + Send + Sync>(memory: &[T]) -> Lent {
        Lent(Raw { ptr: memory.as_ptr().cast_mut().cast(), bytes: size_of_val(memory) })
    }

    /// Memory to write.
    ///
    /// # Safety
    /// It must stay live, and untouched by others, until every job that has it is settled.
    #[allow(unsafe_code, reason = "whoever lends must wait")]
    pub(crate) unsafe fn to_write<T: Pod + Send + Sync>(memory: &mut [T]) -> Lent {
        Lent(Raw { ptr: memory.as_mut_ptr().cast(), bytes: size_of_val(memory) })
    }
}

impl HostSource for Lent {
    fn bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.0.read(offset, into)
    }
}

impl HostTarget for Lent {
    fn bytes(&self) -> u64 {
        self.0.bytes as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        self.0.write(offset, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_bytes_are_there_when_the_memory_is_taken() {
        let destination = Destination::new(vec![0u32; 4]);
        destination.write(4, &7u32.to_le_bytes()).unwrap();
        assert!(destination.write(13, &[0; 4]).is_err() && destination.write(u64::MAX, &[0]).is_err());
        assert_eq!(destination.take().unwrap(), [0, 7, 0, 0]);
        assert!(destination.take().is_err() && destination.write(0, &[1]).is_err());
    }

    #[test]
    fn sources_give_the_bytes_asked_for() {
        let owned = Owned::new::<u16, _>(vec![1u16, 2, 3]);
        let mut bytes = [0; 4];
        owned.read(2, &mut bytes).unwrap();
        assert_eq!((bytes, owned.len()), ([2, 0, 3, 0], 6));
        assert!(owned.read(4, &mut bytes).is_err());
    }
}
