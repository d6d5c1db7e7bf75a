//! Values that a prefetcher sends to a device.

use aquifer_transfer::{Direction, PinnedBuffer};
use bytemuck::Pod;

use crate::buffer::Buffer;
use crate::error::Error;
use crate::tensor::{Tensor, To};
use crate::transfer::{OnStreams, Pending, Source, Transfer};

/// A value to send to a device: a [`Tensor`], a `Vec` of numbers, pinned memory, or tuples,
/// arrays and `Option`s of these. Structs implement it by sending their fields and joining the
/// transfers.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::{Error, Pending};
/// use aquifer::transfer::{Batch, OnStreams, Transfer};
/// struct Sample<T> {
///     image: T,
///     label: T,
/// }
/// impl OnStreams for Sample<Tensor> {
///     fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
///         self.image.ready_on(stream)?;
///         self.label.ready_on(stream)
///     }
/// }
/// impl Batch for Sample<Tensor> {
///     type OnDevice = Sample<Tensor>;
///     fn send(self, to: &Transfer) -> Result<Pending<Sample<Tensor>>, Error> {
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
    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, Error>;
}

impl Batch for Tensor {
    type OnDevice = Tensor;

    fn send(self, to: &Transfer) -> Result<Pending<Tensor>, Error> {
        // The stream is for the copy, not for later uses of the tensor.
        self.to_with(&to.without_stream(), to.stream().into_iter().fold(To::new(), To::stream))
    }
}

impl<T: Pod + Send + Sync> Batch for Vec<T> {
    type OnDevice = Buffer<T>;

    fn send(self, to: &Transfer) -> Result<Pending<Buffer<T>>, Error> {
        send(self.len(), self, to)
    }
}

impl<T: Pod + Send + Sync> Batch for PinnedBuffer<T> {
    type OnDevice = Buffer<T>;

    fn send(self, to: &Transfer) -> Result<Pending<Buffer<T>>, Error> {
        send(self.len(), &self, to)
    }
}

/// Sends `len` elements to new memory.
fn send<T: Pod + Send + Sync>(len: usize, from: impl Source<T>, to: &Transfer) -> Result<Pending<Buffer<T>>, Error> {
    let mut buffer = to.allocator().alloc(len, to.next_stream(Direction::Upload))?;
    Ok(buffer.upload(from, to)?.map(|()| buffer))
}

impl<A: Batch, B: Batch> Batch for (A, B) {
    type OnDevice = (A::OnDevice, B::OnDevice);

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, Error> {
        Ok(self.0.send(to)?.join(self.1.send(to)?))
    }
}

impl<A: Batch, B: Batch, C: Batch> Batch for (A, B, C) {
    type OnDevice = (A::OnDevice, B::OnDevice, C::OnDevice);

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, Error> {
        Ok(((self.0, self.1), self.2).send(to)?.map(|((a, b), c)| (a, b, c)))
    }
}

/// The batches of an array arrive as a vector, in the same order.
impl<B: Batch, const N: usize> Batch for [B; N] {
    type OnDevice = Vec<B::OnDevice>;

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, Error> {
        let pendings = self.into_iter().map(|batch| batch.send(to)).collect::<Result<Vec<_>, _>>()?;
        Ok(Pending::all(pendings))
    }
}

impl<B: Batch> Batch for Option<B> {
    type OnDevice = Option<B::OnDevice>;

    fn send(self, to: &Transfer) -> Result<Pending<Self::OnDevice>, Error> {
        match self {
            Some(batch) => Ok(batch.send(to)?.map(Some)),
            None => Ok(Pending::ready(None)),
        }
    }
}
