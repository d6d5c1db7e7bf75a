//! Small tensors, sent to a device together.

use aquifer_device::{Stream, Tick};
use aquifer_kernels::DType;

use crate::copy::TransferBatch;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::layout::Layout;
use crate::pending::Pending;
use crate::runtime::Transfer;
use crate::tensor::Tensor;

/// Tensors of at most so many bytes, before and after conversion, are sent together with others.
pub(super) const SMALL_TENSOR_BYTES: u64 = 64 << 10;

/// Small tensors are sent when there are so many bytes of them, as until then they are in
/// page-locked memory.
pub(super) const BATCH_BYTES: u64 = 4 << 20;

/// Small tensors that are to be sent together.
pub(super) struct Small {
    transfer: Transfer,
    stream: Stream,
    batch: TransferBatch,
    tensors: usize,
    bytes: u64,
}

/// The enqueued work of a batch.
pub(super) struct Enqueued {
    transfer: Transfer,
    tick: Tick,
}

impl Small {
    /// An empty batch for a stream, or for the next one in rotation.
    pub(super) fn new(transfer: &Transfer, stream: Option<&Stream>) -> Result<Small, TransferError> {
        let stream = stream.unwrap_or_else(|| transfer.next_stream(Direction::Upload)).clone();
        let batch = transfer.on(&stream)?.batch();
        Ok(Small { transfer: transfer.clone(), stream, batch, tensors: 0, bytes: 0 })
    }

    pub(super) fn transfer(&self) -> &Transfer {
        &self.transfer
    }

    /// The number of them.
    pub(super) fn tensors(&self) -> usize {
        self.tensors
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds a tensor of these elements, and returns it; its copy begins when the batch is sent.
    pub(super) fn add(&mut self, elements: &[u8], dtype: DType, layout: Layout) -> Result<Tensor, TransferError> {
        let mut buffer = self.transfer.allocator().alloc::<u8>(elements.len(), &self.stream)?;
        self.batch.upload(elements, &mut buffer)?;
        self.tensors += 1;
        self.bytes += elements.len() as u64;
        Tensor::on_device(buffer, &self.transfer, dtype, layout)
    }

    /// Sends them.
    pub(super) fn send(self) -> Result<Enqueued, TransferError> {
        // Dropped, the batch goes on; its stream's tick stands for it.
        drop(self.batch.run()?);
        Ok(Enqueued { tick: self.transfer.covered_tick(&self.stream), transfer: self.transfer })
    }
}

impl Enqueued {
    /// One of the tensors, in flight.
    pub(super) fn with(&self, tensor: Tensor) -> Pending<Tensor> {
        Pending::enqueued(self.transfer.shared(), self.tick.clone(), tensor)
    }
}
