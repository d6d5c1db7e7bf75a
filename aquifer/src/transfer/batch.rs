//! Many small copies as one, of typed memory.

use std::marker::PhantomData;

use aquifer_transfer::BatchResults;
use aquifer_transfer::internal::copied;
use bytemuck::Pod;

use super::endpoints::bytes_of;
use super::pending::Pending;
use crate::buffer::{Buffer, Handle};
use crate::error::Error;

/// Many copies that are made together, in the order in which they were added.
///
/// Elements to upload are copied when they are added, into one buffer; downloads return in one.
/// Pieces that are adjacent at both ends become one copy. Copies of one direction and at most 1 MiB
/// that were added one after the other go to the driver in one call, if the driver has such a call,
/// else in one call each. So add copies of one direction together. Copies of which one writes what
/// another one uses are made one by one.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let transfer = Transfer::new(&Allocator::of(&device)?)?;
/// let stream = device.stream()?;
/// let mut buffers = Vec::new();
/// for _ in 0..100 {
///     buffers.push(transfer.allocator().alloc::<u32>(16, &stream)?);
/// }
/// let mut batch = transfer.batch();
/// for (number, buffer) in buffers.iter_mut().enumerate() {
///     batch.upload(&[number as u32; 16], buffer)?;
/// }
/// let last = batch.download(&buffers[99])?;
/// let _ = batch.run()?;
/// assert_eq!(last.to_vec()?, [99; 16]); // waits
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is copied before `run`"]
pub struct TransferBatch(aquifer_transfer::Batch);

/// A download of a batch.
#[derive(Clone, Debug)]
pub struct Downloaded<T> {
    results: BatchResults,
    offset: usize,
    len: usize,
    element: PhantomData<fn() -> T>,
}

impl<T: Pod> Downloaded<T> {
    /// The elements, after waiting on the host for the batch's copies in this direction.
    ///
    /// # Errors
    /// [`NotRun`](super::TransferError::NotRun) before the batch is run,
    /// [`OutOfHostMemory`](super::TransferError::OutOfHostMemory), and errors of the driver.
    pub fn to_vec(&self) -> Result<Vec<T>, Error> {
        let bytes = self.results.read(self.offset, self.len * size_of::<T>())?;
        Ok(copied(&bytes, self.len)?)
    }
}

impl TransferBatch {
    /// An empty batch.
    pub(super) fn new(copies: &aquifer_transfer::Transfer) -> TransferBatch {
        TransferBatch(copies.batch())
    }

    /// Adds a copy to the device. The elements are copied now.
    ///
    /// # Errors
    /// Ends of different lengths, a buffer of another device, and when pinned memory runs out.
    /// The batch is then unchanged.
    pub fn upload<T: Pod>(&mut self, from: &[T], to: &mut Buffer<T>) -> Result<(), Error> {
        check_lengths(from.len(), to.len())?;
        Ok(self.0.upload(bytes_of(from), to.device_part())?)
    }

    /// Adds a copy within the device.
    ///
    /// # Errors
    /// Ends of different lengths, that overlap, or of another device. The batch is then unchanged.
    pub fn copy<T: Copy>(&mut self, from: &Buffer<T, impl Handle>, to: &mut Buffer<T>) -> Result<(), Error> {
        check_lengths(from.len(), to.len())?;
        Ok(self.0.copy(from.device_part(), to.device_part())?)
    }

    /// Adds a copy from the device, to be read once the batch was run.
    ///
    /// # Errors
    /// A buffer of another device, or too long for the host. The batch is then unchanged.
    pub fn download<T: Pod>(&mut self, from: &Buffer<T, impl Handle>) -> Result<Downloaded<T>, Error> {
        let offset = self.0.download(from.device_part())?;
        Ok(Downloaded { results: self.0.results().clone(), offset, len: from.len(), element: PhantomData })
    }

    /// The number of copies for the driver: fewer than were added where pieces are adjacent.
    /// [`aquifer_transfer::Transfer::counters`] counts the added ones, once they are enqueued.
    pub fn pieces(&self) -> usize {
        self.0.pieces()
    }

    /// Enqueues all copies.
    ///
    /// # Errors
    /// When pinned memory runs out, a stream that captures, and errors of the driver. Some
    /// copies may have been enqueued then.
    #[track_caller]
    pub fn run(self) -> Result<Pending<()>, Error> {
        Ok(Pending::new(self.0.run()?, ()))
    }
}

/// In elements, also of those without bytes.
fn check_lengths(from: usize, to: usize) -> Result<(), Error> {
    if from == to {
        return Ok(());
    }
    Err(super::TransferError::LengthMismatch { from: from as u64, to: to as u64 }.into())
}
