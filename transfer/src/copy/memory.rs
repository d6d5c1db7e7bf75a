//! Host memory that threads of the staging ring read and write (N3: `host_memory.rs`).

use std::any::TypeId;
use std::fmt;
use std::ops::Range;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use aquifer_device::fork::RwLock;
use bytemuck::Pod;

use crate::error::TransferError;
use crate::foreign_code;
use crate::host_memory::HostRange;
use crate::staging::{HostSource, HostTarget};

/// The bytes of an owner. `AsRef` is the caller's code: the caller's thread calls it once, and
/// threads of the runtime never do. Clones share the owner, which is dropped with the last of them.
#[derive(Clone)]
pub struct Owned {
    range: HostRange,
    elements: usize,
    /// `None` only during the drop. It never moves, so its slice stays valid.
    owner: Option<Arc<dyn Send + Sync>>,
    /// Whether dropping the owner may run code of the caller.
    is_foreign: bool,
}

// The owner is only kept and dropped.
impl UnwindSafe for Owned {}
impl RefUnwindSafe for Owned {}

impl Owned {
    /// The memory that `owner` returns now.
    pub fn new<T: Pod, S: AsRef<[T]> + Send + Sync + 'static>(owner: S) -> Owned {
        let owner = Arc::new(owner);
        let slice: &[T] = (*owner).as_ref();
        let range = HostRange::new(slice.as_ptr().cast_mut().cast(), size_of_val(slice));
        let elements = slice.len();
        Owned { range, elements, owner: Some(owner), is_foreign: is_foreign::<T, S>() }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        #[allow(unsafe_code, reason = "the owner returns its slice once")]
        // SAFETY: the slice is valid while the owner is borrowed. The owner is never moved nor
        // borrowed mutably, and lives as long as `self`. Elements of plain data can be read as
        // bytes.
        unsafe {
            self.range.as_slice()
        }
    }

    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// A part of the bytes, which shares the owner. A range beyond the end is cut.
    pub fn part(&self, range: Range<usize>) -> Owned {
        let end = range.end.min(self.len());
        let start = range.start.min(end);
        Owned {
            range: self.range.cut(start..end),
            elements: end - start,
            owner: self.owner.clone(),
            is_foreign: self.is_foreign,
        }
    }

    /// An address that clones share, and no other live value has.
    pub fn identity(&self) -> usize {
        self.owner.as_ref().map_or(0, |owner| Arc::as_ptr(owner).addr())
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owned").field("bytes", &self.len()).finish_non_exhaustive()
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

impl HostSource for Owned {
    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.range.read(offset, into)
    }
}

/// Host memory that threads access, and that the caller promised to lend until they are done.
pub(crate) struct LentRange(HostRange);

impl LentRange {
    /// Memory to read, which the caller lends.
    ///
    /// # Safety
    /// It must stay as it is until every job that has it is settled.
    #[allow(unsafe_code, reason = "the lender must wait")]
    pub(crate) unsafe fn lent(memory: &[u8]) -> LentRange {
        LentRange(HostRange::new(memory.as_ptr().cast_mut(), memory.len()))
    }

    /// Memory to write, which the caller lends.
    ///
    /// # Safety
    /// It must stay live, and untouched by others, until every job that has it is settled.
    #[allow(unsafe_code, reason = "the lender must wait")]
    pub(crate) unsafe fn lent_mut(memory: &mut [u8]) -> LentRange {
        LentRange(HostRange::new(memory.as_mut_ptr(), memory.len()))
    }
}

impl HostSource for LentRange {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        self.0.read(offset, into)
    }
}

impl HostTarget for LentRange {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        self.0.write(offset, from)
    }
}

/// A `Vec` that bytes are written to.
pub(crate) struct Destination<T> {
    /// Taken once the job is settled. Writers hold the lock shared.
    memory: RwLock<Option<Vec<T>>>,
    target: HostRange,
}

impl<T: Pod + Send + Sync> Destination<T> {
    pub(crate) fn new(mut memory: Vec<T>) -> Self {
        let target = HostRange::new(memory.as_mut_ptr().cast(), size_of_val(memory.as_slice()));
        Destination { memory: RwLock::new(Some(memory)), target }
    }

    /// The memory. Later writes are refused.
    pub(crate) fn take(&self) -> Result<Vec<T>, TransferError> {
        self.memory.write().take().ok_or(TransferError::AlreadyTaken)
    }
}

impl<T: Pod + Send + Sync> HostTarget for Destination<T> {
    fn bytes(&self) -> u64 {
        self.target.len() as u64
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let memory = self.memory.read();
        if memory.is_none() {
            return Err(TransferError::AlreadyTaken);
        }
        self.target.write(offset, from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_memory_has_the_written_bytes() {
        let destination = Destination::new(vec![0u32; 4]);
        destination.write(4, &7u32.to_le_bytes()).unwrap();
        assert!(destination.write(13, &[0; 4]).is_err() && destination.write(u64::MAX, &[0]).is_err());
        assert_eq!(destination.take().unwrap(), [0, 7, 0, 0]);
        assert!(destination.take().is_err() && destination.write(0, &[1]).is_err());
    }

    #[test]
    fn sources_return_the_requested_bytes() {
        let owned = Owned::new::<u16, _>(vec![1u16, 2, 3]);
        let mut bytes = [0; 4];
        owned.read(2, &mut bytes).unwrap();
        assert_eq!((bytes, owned.len()), ([2, 0, 3, 0], 6));
        assert!(owned.read(4, &mut bytes).is_err());
    }
}
