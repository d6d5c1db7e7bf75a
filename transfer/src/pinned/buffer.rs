//! The handle of a pinned buffer.

use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;
use std::sync::Arc;

use aquifer_device::{AccessKind, Tick};
use bytemuck::Pod;

use super::borrow::{PinnedRead, PinnedWrite};
use super::memory::{HostPart, Origin, PinnedMemory};
use super::slices::{PinnedSlice, PinnedSliceMut};
use crate::error::TransferError;
use crate::host_memory;

/// Pinned host memory for `len` values of `T`, with one owner.
///
/// # While a copy is in flight
/// A call that begins a copy takes a view of the buffer and returns while the copy goes on. The
/// view's borrow ends at return, so the buffer can be used again. The buffer knows the copies that
/// use it, and orders the host after them:
///
/// * [`PinnedBuffer::read`] waits for copies *into* the buffer; uploads from it go on;
/// * [`PinnedBuffer::write`] waits for all copies.
///
/// Both *wait visibly*: they document it, they return a `Result`, and
/// [`crate::HostMemoryStats::num_waits`] counts the waits. To avoid a wait, query
/// [`PinnedBuffer::is_idle`] first. The alternative, a borrow that lasts as long as the copy, would
/// rely on the destructor of a guard, which does not run if the guard is leaked.
///
/// They return guards. While one is alive, the borrow checker refuses copies that would conflict: a
/// download needs `&mut` of the buffer, and so does `write`. Launches of a graph
/// borrow nothing, so they are refused while the host reads memory that the graph writes, or writes
/// memory that it uses ([`TransferError::UsedByGraph`]). Between two
/// launches, read the buffer within one statement, or drop the guard.
///
/// Dropping the buffer waits for nothing: the memory goes back to its pool together with the ticks
/// of its copies, and is not handed out again before they are done. A graph that uses it keeps it.
/// Forgetting it leaks memory and does no other harm.
///
/// # Several devices
/// The memory belongs to the device of its pool. Copies to and from another device are refused
/// ([`WrongDevice`](aquifer_device::RequestError::WrongDevice)): take a buffer of that device's
/// pool, and copy on the host: `there.write()?.copy_from_slice(&here.read()?)`.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::PinnedPool;
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device);
/// let mut buffer = pool.alloc_zeroed::<u32>(8)?;
/// buffer.write()?[3] = 7;
/// assert_eq!(buffer.slice(2..5).read()?, [0, 7, 0]);
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct PinnedBuffer<T = u8> {
    /// It holds `len` values, and is aligned for them.
    memory: Arc<PinnedMemory>,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> PinnedBuffer<T> {
    /// The memory must hold `len` values, and be aligned for them.
    pub(super) fn new(memory: Arc<PinnedMemory>, len: usize) -> Self {
        PinnedBuffer { memory, len, element: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// Whether no copy is in flight, so that neither [`PinnedBuffer::read`] nor
    /// [`PinnedBuffer::write`] would wait.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_idle(&self) -> Result<bool, TransferError> {
        self.memory.uses.are_over()
    }

    /// Refuses a buffer of which a graph has captured copies: each launch may access it. For
    /// adapters that give the memory to another library.
    ///
    /// # Errors
    /// [`TransferError::UsedByGraph`].
    pub fn refuse_graphs(&self) -> Result<(), TransferError> {
        if Arc::strong_count(&self.memory) > 1 {
            return Err(self.memory.used_by_graph("drop the graph first"));
        }
        Ok(())
    }

    /// The values, after waiting on the host for copies into the buffer. Launches of graphs that
    /// write it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver, such as the loss of a device that was to write the buffer.
    pub fn read(&self) -> Result<PinnedRead<'_, T>, TransferError> {
        self.as_slice().read()
    }

    /// The values, to be changed, after waiting on the host for all copies that use the buffer.
    /// Launches of graphs that use it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<PinnedWrite<'_, T>, TransferError> {
        self.as_slice_mut().into_write()
    }

    /// All of it, to be copied from.
    pub fn as_slice(&self) -> PinnedSlice<'_, T> {
        PinnedSlice::new(HostPart::all(&self.memory), self.len)
    }

    /// All of it, to be copied into.
    pub fn as_slice_mut(&mut self) -> PinnedSliceMut<'_, T> {
        PinnedSliceMut::new(HostPart::all(&self.memory), self.len)
    }

    /// A part, to be copied from.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> PinnedSlice<'_, T> {
        self.as_slice().slice(range)
    }

    /// A part, to be copied into.
    ///
    /// # Panics
    /// If the range reaches beyond the end or is reversed.
    #[track_caller]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> PinnedSliceMut<'_, T> {
        match self.try_slice_mut(range) {
            Ok(part) => part,
            Err(error) => panic!("{error}"),
        }
    }

    /// As [`PinnedBuffer::slice`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`aquifer_device::RequestError::OutOfBounds`] when the range reaches beyond the end or is
    /// reversed.
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Result<PinnedSlice<'_, T>, TransferError> {
        self.as_slice().try_slice(range)
    }

    /// As [`PinnedBuffer::slice_mut`], with an error instead of a panic.
    ///
    /// # Errors
    /// [`aquifer_device::RequestError::OutOfBounds`] when the range reaches beyond the end or is
    /// reversed.
    pub fn try_slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<PinnedSliceMut<'_, T>, TransferError> {
        self.as_slice_mut().into_slice(range)
    }

    /// Its bytes, to be copied from.
    pub fn as_bytes(&self) -> PinnedSlice<'_, u8> {
        self.as_slice().as_bytes()
    }

    /// Waits until no copy uses the memory. Not counted: for the staging ring's threads.
    pub(crate) fn synchronize(&self) -> Result<(), TransferError> {
        Ok(self.memory.uses.before(AccessKind::Write).iter().try_for_each(Tick::synchronize)?)
    }
}

impl<T: Pod + Send> PinnedBuffer<T> {
    /// The values as ordinary memory, after waiting on the host for all copies. Memory that was
    /// registered comes back itself, no longer pinned, for which the driver waits for the
    /// device; other buffers are copied from.
    ///
    /// # Errors
    /// Registered memory that a graph uses
    /// ([`TransferError::UsedByGraph`]), errors of the driver, and
    /// [`TransferError::OutOfHostMemory`] where a copy is made;
    /// they return the buffer. A lost device never says that it is done with the memory, so it
    /// cannot come back.
    pub fn into_vec(mut self) -> Result<Vec<T>, Box<Returned<PinnedBuffer<T>>>> {
        self.take_values().map_err(|error| Box::new(Returned { memory: self, error }))
    }

    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    fn take_values(&mut self) -> Result<Vec<T>, TransferError> {
        // Before the wait, so that no launch comes after it.
        if matches!(self.memory.origin, Origin::Registered(_)) {
            self.refuse_graphs()?;
        }
        // Waits for all copies.
        drop(self.write()?);
        if let Some(memory) = Arc::get_mut(&mut self.memory)
            // SAFETY: the buffer is borrowed exclusively and becomes a vector, so there are no
            // views; all copies were waited for, and no graph has the memory.
            && let Some(values) = unsafe { memory.unregister()? }
        {
            return Ok(values);
        }
        host_memory::copied(&self.as_bytes().read()?, self.len)
    }
}

impl<'a, T: Pod> From<&'a PinnedBuffer<T>> for PinnedSlice<'a, T> {
    fn from(buffer: &'a PinnedBuffer<T>) -> Self {
        buffer.as_slice()
    }
}

impl<'a, T: Pod> From<&'a mut PinnedBuffer<T>> for PinnedSliceMut<'a, T> {
    fn from(buffer: &'a mut PinnedBuffer<T>) -> Self {
        buffer.as_slice_mut()
    }
}

/// The argument of a failed call, with the error. Converts to the error with `?`.
#[derive(thiserror::Error)]
#[error("{error}")]
pub struct Returned<M> {
    /// The argument.
    pub memory: M,
    /// The error.
    #[source]
    pub error: TransferError,
}

impl<M> fmt::Debug for Returned<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Returned").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> From<Box<Returned<M>>> for TransferError {
    fn from(returned: Box<Returned<M>>) -> Self {
        returned.error
    }
}

impl<T> fmt::Debug for PinnedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBuffer")
            .field("type", &std::any::type_name::<T>())
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
