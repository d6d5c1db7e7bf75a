//! Values that a prefetcher sends to a device.

use aquifer_allocator::Buffer;
use bytemuck::Pod;

use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::{OnStreams, Pending};
use crate::pinned::PinnedBuffer;
use crate::runtime::Transfer;
use crate::tensor::{Tensor, To};

/// A value to send to a device: a [`Tensor`], a `Vec` of numbers, page-locked memory, or tuples,
/// arrays and `Option`s of these. Structs implement it by sending their fields and joining the
/// transfers.
///
/// ```
/// use aquifer_device::Stream;
/// use aquifer_transfer::{Batch, OnStreams, Pending, Tensor, Transfer, TransferError};
/// struct Sample<T> {
///     image: T,
///     label: T,
/// }
/// impl OnStreams for Sample<Tensor> {
///     fn ready_on(&self, stream: &Stream) -> Result<(), TransferError> {
///         self.image.ready_on(stream)?;
///         self.label.ready_on(stream)
///     }
/// }
/// impl Batch for Sample<Tensor> {
///     type OnDevice = Sample<Tensor>;
///     fn send(self, to: &Transfer) -> Result<Pending<Sample<Tensor>>, TransferError> {
///         let both = (self.image, self.label).send(to)?;
///         Ok(both.map(|(image, label)| Sample { image, label }))
///     }
/// }
/// ```
pub trait Batch: Send + 'static {
    /// The type on the device.
    type OnDevice: OnStreams + Send + 'static;

    /// Enqueues the copies on the runtime's stream.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, TransferError>;
}

impl Batch for Tensor {
    type OnDevice = Tensor;

    fn send(self, to: &Transfer) -> Result<Pending<Tensor>, TransferError> {
        // The stream is for the copy, not for later uses of the tensor.
        let (runtime, stream) = to.without_stream();
        self.to_with(&runtime, stream.into_iter().fold(To::new(), To::stream))
    }
}

impl<T: Pod + Send + Sync> Batch for Vec<T> {
    type OnDevice = Buffer<T>;

    fn send(self, to: &Transfer) -> Result<Pending<Buffer<T>>, TransferError> {
        to.to_device(self, to.next_stream(Direction::Upload))
    }
}

impl<T: Pod + Send + Sync> Batch for PinnedBuffer<T> {
    type OnDevice = Buffer<T>;

    fn send(self, to: &Transfer) -> Result<Pending<Buffer<T>>, TransferError> {
        to.to_device(&self, to.next_stream(Direction::Upload))
    }
}

impl<A: Batch, B: Batch> Batch for (A, B) {
    type OnDevice = (A::OnDevice, B::OnDevice);

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, TransferError> {
        Ok(self.0.send(to)?.join(self.1.send(to)?))
    }
}

impl<A: Batch, B: Batch, C: Batch> Batch for (A, B, C) {
    type OnDevice = (A::OnDevice, B::OnDevice, C::OnDevice);

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, TransferError> {
        Ok(((self.0, self.1), self.2).send(to)?.map(|((a, b), c)| (a, b, c)))
    }
}

/// The batches of an array arrive as a vector, in the same order.
impl<B: Batch, const N: usize> Batch for [B; N] {
    type OnDevice = Vec<B::OnDevice>;

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, TransferError> {
        let pendings = self.into_iter().map(|batch| batch.send(to)).collect::<Result<Vec<_>, _>>()?;
        Ok(Pending::all(pendings).unwrap_or_else(|| Pending::ready(to.shared(), Vec::new())))
    }
}

impl<B: Batch> Batch for Option<B> {
    type OnDevice = Option<B::OnDevice>;

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, TransferError> {
        match self {
            Some(batch) => Ok(batch.send(to)?.map(Some)),
            None => Ok(Pending::ready(to.shared(), None)),
        }
    }
}
