//! Tensors go from place to place, and from dtype to dtype on the way.
//!
//! Rules, in this order:
//! * nothing is copied unless the place or the dtype changes;
//! * elements without gaps between them cross as they lie, and keep their strides; those with gaps
//!   are packed first. From page-locked memory with long rows the copy engine skips the gaps;
//! * between host and device, dtypes are converted where fewer bytes cross: to a smaller one
//!   before, to a larger one after. Of the same size, or within a device, the device converts;
//! * after an upload that threads still work on, work of the device is enqueued when the result is
//!   taken.

use std::sync::Arc;

use aquifer_device::Stream;
use aquifer_kernels::{DType, convert_host};

use super::Tensor;
use super::create::{filled_host, host_bytes};
use super::memory::{DeviceMemory, Memory, PinnedHost};
use super::pack::{pack_on_device, pack_on_host};
use super::place::Place;
use super::to::To;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::layout::Layout;
use crate::pending::{OnStreams, Pending, Shared};
use crate::pinned::PinnedPool;
use crate::placement::Fallback;
use crate::runtime::Transfer;

/// The elements of a tensor as they cross.
pub(super) struct Sent {
    /// The place of the first in the tensor's memory, if they cross as they lie; `None` if they are
    /// packed.
    pub(super) first: Option<usize>,
    /// The number of copies that were added.
    pub(super) count: usize,
    /// Their layout afterwards.
    pub(super) layout: Layout,
}

impl Tensor {
    /// The tensor in another place. Returns before the copy is done: streams can use device memory
    /// at once, as it carries its ticks. Shares the memory where it is in the place already;
    /// page-locked memory is host memory, too.
    ///
    /// # Errors
    /// When memory runs out, and errors of the drivers.
    #[track_caller]
    pub fn to(&self, place: impl TryInto<Place, Error: Into<TransferError>>) -> Result<Pending<Tensor>, TransferError> {
        self.to_with(place, To::new())
    }

    /// The tensor in host memory; see [`Tensor::to`]. The result cannot be read before it is
    /// complete, as there is none before.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[doc(alias = "cpu")]
    #[track_caller]
    pub fn to_host(&self) -> Result<Pending<Tensor>, TransferError> {
        self.to(Place::Host)
    }

    /// The tensor in page-locked host memory, from where copies to the pool's device are fastest;
    /// see [`Tensor::to`]. From host memory this is a copy by the calling thread: pin tensors that
    /// are sent often, or create them there.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[track_caller]
    pub fn pin(&self, pool: &PinnedPool) -> Result<Pending<Tensor>, TransferError> {
        self.to(pool)
    }

    /// The tensor with elements of another dtype, where it is. Shares the memory if they are of it
    /// already.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        self.to_with(self.place(), To::new().dtype(dtype))
    }

    /// The tensor in a place, as `to` says; see [`Tensor::to`].
    ///
    /// # Errors
    /// A stream of another device than those that take part, a dtype that the device lacks
    /// instructions for if it must have them, and as [`Tensor::to`].
    #[track_caller]
    pub fn to_with(
        &self,
        place: impl TryInto<Place, Error: Into<TransferError>>,
        to: To,
    ) -> Result<Pending<Tensor>, TransferError> {
        let (place, dtype) = (Place::named(place)?, to.dtype.unwrap_or(self.dtype));
        // Dropped in reverse order, as they nest.
        let _from = self.called_here();
        let _to = place.called_here();
        to.check_native(&place, dtype)?;
        if let Some(stream) = &to.stream
            && dtype == self.dtype
            && !place.is_host()
            && self.memory.place().serves_as(&place)
        {
            self.ready_on(stream)?;
        }
        let conveyed = self.convey(&place, dtype, to.stream.as_ref());
        if to.fallback == Fallback::Error || place.is_host() {
            return conveyed;
        }
        let (source, wanted) = (self.clone(), place);
        let take_over = move |error: TransferError| match error.is_out_of_device_memory() {
            true => {
                tracing::warn!(%error, place = %wanted, "the device has no memory for a tensor; it goes to the host, as the caller allowed");
                source.convey(&Place::Host, dtype, None)
            }
            false => Err(error),
        };
        match conveyed {
            // Memory for conversions on the device is allocated when the result is taken.
            Ok(pending) => Ok(pending.or_else(move |error| take_over(error)?.wait())),
            Err(error) => take_over(error),
        }
    }

    /// The tensor with its elements next to each other in row-major order, where it is; shares the
    /// memory if they are already. On a device the copy is enqueued.
    ///
    /// # Errors
    /// When memory runs out, and errors of the driver.
    #[track_caller]
    pub fn contiguous(&self) -> Result<Tensor, TransferError> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.deep_copy() }
    }

    /// A tensor of the same elements, next to each other in row-major order, in memory of its own
    /// where this one is: later writes to one of them do not affect the other. (Clones share the
    /// memory.) On a device the copy is enqueued.
    ///
    /// # Errors
    /// As [`Tensor::contiguous`].
    #[track_caller]
    pub fn deep_copy(&self) -> Result<Tensor, TransferError> {
        let _place = self.called_here();
        let memory = match &self.memory {
            Memory::Device(memory) => {
                let stream = memory.transfer.next_stream(Direction::OnDevice);
                let buffer = pack_on_device(memory, &memory.transfer, self.dtype, &self.layout, stream)?;
                Memory::Device(DeviceMemory { buffer, transfer: memory.transfer.clone() })
            }
            Memory::Pinned(own) => {
                let mut buffer = own.pool.alloc::<u8>(host_bytes(&self.layout, self.dtype)?)?;
                pack_on_host(self.memory.read()?, &self.layout, self.size(), buffer.write()?);
                Memory::Pinned(PinnedHost { buffer: Arc::new(buffer), pool: own.pool.clone() })
            }
            Memory::Host(own) => Memory::Host(filled_host(self.dtype, self.len(), |to| {
                pack_on_host(own.bytes(), &self.layout, self.size(), to);
                Ok(())
            })?),
        };
        Tensor::new(memory, self.dtype, Layout::row_major(self.shape())?)
    }

    /// Moves and converts the tensor; shares the memory if nothing changes.
    pub(crate) fn convey(
        &self,
        place: &Place,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, TransferError> {
        if dtype == self.dtype && self.memory.place().serves_as(place) {
            return Ok(Pending::ready(&self.shared_with(place), self.clone()));
        }
        match (&self.memory, place) {
            (Memory::Device(own), Place::Device(wanted)) if own.device().id() == wanted.device().id() => {
                self.cast_on_device(own, wanted, dtype, stream)
            }
            (Memory::Device(own), Place::Device(wanted)) => self.to_peer(own, wanted, dtype, stream),
            (Memory::Device(own), place) => self.download(own, &on(&own.transfer, stream)?, place, dtype),
            (_, Place::Device(wanted)) => self.upload(wanted, dtype, stream),
            // A copy by the calling thread needs no stream. Page-locked memory stays page-locked.
            (Memory::Pinned(own), Place::Host) => self.convert_to(&Place::Pinned(own.pool.clone()), dtype),
            (_, place) => self.convert_to(place, dtype),
        }
    }

    fn convert_to(&self, place: &Place, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        let sent = self.sent()?;
        let memory = match place {
            Place::Pinned(pool) => {
                let mut buffer = pool.alloc::<u8>(host_bytes(&sent.dense()?, dtype)?)?;
                self.write_sent(&sent, dtype, buffer.write()?)?;
                Memory::Pinned(PinnedHost { buffer: Arc::new(buffer), pool: pool.clone() })
            }
            _ => Memory::Host(filled_host(dtype, sent.count, |to| self.write_sent(&sent, dtype, to))?),
        };
        Ok(Pending::ready(&self.shared_with(place), Tensor::new(memory, dtype, sent.layout)?))
    }

    /// The elements of a tensor on the host as they are sent, and where they lie then.
    pub(crate) fn elements_as(&self, dtype: DType) -> Result<(Vec<u8>, Layout), TransferError> {
        let sent = self.sent()?;
        let mut elements = host_vec::zeroed(host_bytes(&sent.dense()?, dtype)?)?;
        self.write_sent(&sent, dtype, &mut elements)?;
        Ok((elements, sent.layout))
    }

    /// The way the elements cross: as they lie if there are no gaps between them, else packed.
    pub(super) fn sent(&self) -> Result<Sent, TransferError> {
        let (span, len) = (self.layout.span(), self.layout.len());
        if span > len {
            return Ok(Sent { first: None, count: len, layout: Layout::row_major(self.shape())? });
        }
        Ok(Sent { first: Some(self.first()), count: span, layout: self.layout.at(0) })
    }

    /// Writes the elements that cross as elements of `dtype`. Waits for the copy that fills
    /// page-locked memory.
    pub(super) fn write_sent(&self, sent: &Sent, dtype: DType, to: &mut [u8]) -> Result<(), TransferError> {
        let from = self.memory.read()?;
        match sent.first {
            Some(first) => convert_host(&from[self.byte_range(first, sent.count)], self.dtype, to, dtype)?,
            None if dtype == self.dtype => pack_on_host(from, &self.layout, self.size(), to),
            None => {
                let packed = filled_host(self.dtype, sent.count, |packed| {
                    pack_on_host(from, &self.layout, self.size(), packed);
                    Ok(())
                })?;
                convert_host(packed.bytes(), self.dtype, to, dtype)?;
            }
        }
        Ok(())
    }

    /// The bytes of some elements in host memory.
    pub(super) fn byte_range(&self, first: usize, count: usize) -> std::ops::Range<usize> {
        first.saturating_mul(self.size())..first.saturating_add(count).saturating_mul(self.size())
    }

    pub(super) fn size(&self) -> usize {
        usize::try_from(self.dtype.bytes()).unwrap_or(usize::MAX)
    }

    /// The shared state for a transfer between two places: that of a runtime, if one takes part.
    fn shared_with(&self, place: &Place) -> Arc<Shared> {
        match (&self.memory, place) {
            (_, Place::Device(transfer)) => transfer.shared().clone(),
            (Memory::Device(own), _) => own.transfer.shared().clone(),
            _ => Arc::default(),
        }
    }
}

impl Sent {
    /// The layout of as many elements next to each other.
    pub(super) fn dense(&self) -> Result<Layout, TransferError> {
        Ok(Layout::row_major(&[self.count])?)
    }
}

/// The runtime with the caller's stream, if there is one. It is for the copy alone: tensors keep
/// the runtime of the caller, so that their later uses do not wait for that stream.
pub(super) fn on(transfer: &Transfer, stream: Option<&Stream>) -> Result<Transfer, TransferError> {
    stream.map_or_else(|| Ok(transfer.clone()), |stream| transfer.on(stream))
}
