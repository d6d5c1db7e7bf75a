//! The handle of a block of pinned memory.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{AccessKind, Tick};
use bytemuck::Pod;

use super::borrow::{PinnedRead, PinnedWrite};
use super::memory::{Origin, PinnedMemory};
use super::part::{PinnedPart, PinnedPartMut};
use crate::error::TransferError;
use crate::host_memory;

/// A block of pinned host memory, with one owner. It knows the copies that use it:
/// [`PinnedBlock::read`] waits for copies into it, [`PinnedBlock::write`] for all.
///
/// Dropping it waits for nothing: the memory goes back to its pool together with the ticks of its
/// copies, and is not handed out again before they are done. Forgetting it leaks memory and does no
/// other harm.
///
/// ```
/// use aquifer_transfer::{PinnedConfig, PinnedPool};
/// let device = aquifer::open("sim:24GiB")?;
/// let pool = PinnedPool::new(&device, PinnedConfig::default())?;
/// let mut block = pool.alloc_zeroed(8, 1)?;
/// block.write()?[3] = 7;
/// assert_eq!(block.part(2..5)?.read()?, [0, 7, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PinnedBlock(pub(super) Arc<PinnedMemory>);

impl PinnedBlock {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// Whether no copy is in flight, so that neither [`PinnedBlock::read`] nor
    /// [`PinnedBlock::write`] would wait.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_idle(&self) -> Result<bool, TransferError> {
        self.0.uses.are_over()
    }

    /// Refuses memory of which a graph has captured copies: each launch may access it.
    ///
    /// # Errors
    /// [`TransferError::UsedByGraph`].
    pub fn refuse_graphs(&self) -> Result<(), TransferError> {
        if Arc::strong_count(&self.0) > 1 {
            return Err(self.0.used_by_graph("drop the graph first"));
        }
        Ok(())
    }

    /// The bytes, after waiting on the host for copies into the block. Launches of graphs that
    /// write it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver, such as the loss of a device that was to write the block.
    pub fn read(&self) -> Result<PinnedRead<'_>, TransferError> {
        self.all().read()
    }

    /// The bytes, to be changed, after waiting on the host for all copies that use the block.
    /// Launches of graphs that use it are refused until the result is dropped.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn write(&mut self) -> Result<PinnedWrite<'_>, TransferError> {
        self.all_mut().into_write()
    }

    /// Waits until no copy uses the block. Not counted: for the staging ring's threads.
    pub(crate) fn synchronize(&self) -> Result<(), TransferError> {
        Ok(self.0.uses.before(AccessKind::Write).iter().try_for_each(Tick::synchronize)?)
    }

    /// All of it, to be copied from.
    pub fn all(&self) -> PinnedPart<'_> {
        PinnedPart::all(&self.0)
    }

    /// All of it, to be copied into.
    pub fn all_mut(&mut self) -> PinnedPartMut<'_> {
        PinnedPartMut::all(&self.0)
    }

    /// A part, to be copied from.
    ///
    /// # Errors
    /// [`aquifer_device::RequestError::OutOfBounds`] when the range reaches beyond the end or is
    /// reversed.
    pub fn part(&self, bytes: Range<usize>) -> Result<PinnedPart<'_>, TransferError> {
        self.all().part(bytes)
    }

    /// The first `len` values of `T` as ordinary memory, after waiting on the host for all copies.
    /// A vector that was registered ([`super::PinnedPool::register`]) comes back itself, all of it
    /// and no longer pinned, for which the driver waits for the device; other blocks are
    /// copied from.
    ///
    /// # Errors
    /// A block of fewer bytes, registered memory that a graph uses
    /// ([`TransferError::UsedByGraph`]), errors of the driver, and
    /// [`TransferError::OutOfHostMemory`] where a copy is made; they return the block. A lost
    /// device never says that it is done with the memory, so it cannot come back.
    pub fn into_vec<T: Pod + Send>(mut self, len: usize) -> Result<Vec<T>, (PinnedBlock, TransferError)> {
        match self.take_values(len) {
            Ok(values) => Ok(values),
            Err(error) => Err((self, error)),
        }
    }

    #[allow(unsafe_code, reason = "the driver takes memory back by its address")]
    fn take_values<T: Pod + Send>(&mut self, len: usize) -> Result<Vec<T>, TransferError> {
        let wanted = host_memory::bytes_of(len, size_of::<T>() as u64)?;
        self.part(0..wanted)?;
        // Before the wait, so that no launch comes after it.
        if matches!(self.0.origin, Origin::Registered(_)) {
            self.refuse_graphs()?;
        }
        // Waits for all copies.
        drop(self.write()?);
        if let Some(memory) = Arc::get_mut(&mut self.0)
            // SAFETY: the block is borrowed exclusively and becomes a vector, so there are no
            // views; all copies were waited for, and no graph has the memory.
            && let Some(values) = unsafe { memory.unregister()? }
        {
            return Ok(values);
        }
        host_memory::copied(&self.read()?, len)
    }
}

impl fmt::Debug for PinnedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedBlock").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}
