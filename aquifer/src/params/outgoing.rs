//! Tensors in flight to a place, in order. Small tensors go to a device in batches.

use std::collections::VecDeque;

use aquifer_device::Stream;
use aquifer_kernels::DType;
use aquifer_transfer::Direction;

use crate::error::Error;
use crate::layout::Layout;
use crate::tensor::Tensor;
use crate::transfer::{Pending, Transfer, TransferBatch};

/// The most bytes of a tensor in a batch, before and after conversion.
pub(super) const SMALL_TENSOR_BYTES: u64 = 64 << 10;

/// A batch of this many bytes is sent: until then its tensors are in pinned memory.
const BATCH_BYTES: u64 = 4 << 20;

/// Tensors in flight. Small ones wait in a batch until it is sent.
#[derive(Default)]
pub(super) struct Outgoing {
    steps: VecDeque<Outbound>,
    batch: Option<Batch>,
}

enum Outbound {
    Sent(Pending<Tensor>),
    /// Part of the next batch.
    Batched(Tensor),
}

struct Batch {
    transfer: Transfer,
    stream: Stream,
    copies: TransferBatch,
    tensors: usize,
    bytes: u64,
}

impl Outgoing {
    /// The number of tensors.
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    /// The number of tensors that are sent.
    pub(super) fn in_flight(&self) -> usize {
        self.len() - self.batch.as_ref().map_or(0, |batch| batch.tensors)
    }

    /// Adds a tensor that is sent.
    pub(super) fn push(&mut self, tensor: Pending<Tensor>) {
        self.steps.push_back(Outbound::Sent(tensor));
    }

    /// Adds a small tensor of these elements to the batch, and sends a full batch. Its copies run
    /// on `stream`, or on the next one in rotation.
    pub(super) fn push_small(
        &mut self,
        transfer: &Transfer,
        stream: Option<&Stream>,
        elements: &[u8],
        (dtype, layout): (DType, Layout),
    ) -> Result<(), Error> {
        let batch = match &mut self.batch {
            Some(batch) => batch,
            none => {
                let stream = stream.unwrap_or_else(|| transfer.next_stream(Direction::Upload)).clone();
                let copies = transfer.on(&stream)?.batch();
                none.insert(Batch { transfer: transfer.clone(), stream, copies, tensors: 0, bytes: 0 })
            }
        };
        let mut buffer = transfer.allocator().alloc::<u8>(elements.len(), &batch.stream)?;
        batch.copies.upload(elements, &mut buffer)?;
        batch.tensors += 1;
        batch.bytes += elements.len() as u64;
        self.steps.push_back(Outbound::Batched(Tensor::on_device(buffer, transfer, dtype, layout)?));
        if batch.bytes >= BATCH_BYTES { self.send_batch() } else { Ok(()) }
    }

    /// Sends the batch of small tensors.
    pub(super) fn send_batch(&mut self) -> Result<(), Error> {
        let Some(Batch { transfer, stream, copies, .. }) = self.batch.take() else { return Ok(()) };
        drop(copies.run()?);
        // One event covers all copies.
        let sent = transfer.enqueued_on(&stream)?;
        for step in &mut self.steps {
            if let Outbound::Batched(tensor) = step {
                *step = Outbound::Sent(sent.with(tensor.clone()));
            }
        }
        Ok(())
    }

    /// Waits for the oldest tensor, after sending its batch; `None` if there is none.
    pub(super) fn wait_oldest(&mut self) -> Result<Option<Tensor>, Error> {
        if matches!(self.steps.front(), Some(Outbound::Batched(_))) {
            self.send_batch()?;
        }
        match self.steps.pop_front() {
            Some(Outbound::Sent(tensor)) => tensor.wait().map(Some),
            Some(Outbound::Batched(tensor)) => Ok(Some(tensor)),
            None => Ok(None),
        }
    }

    /// The transfers of all tensors that are sent.
    pub(super) fn into_pendings(self) -> impl Iterator<Item = Pending<Tensor>> {
        self.steps.into_iter().filter_map(|step| if let Outbound::Sent(tensor) = step { Some(tensor) } else { None })
    }

    /// Cancels the transfers, and waits until no thread works on them.
    pub(super) fn abandon(self) {
        self.into_pendings().for_each(Pending::abandon);
    }
}
