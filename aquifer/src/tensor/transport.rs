//! Tensors go from place to place, and from dtype to dtype on the way.
//!
//! Rules, in this order:
//! * nothing is copied unless the place or the dtype changes;
//! * elements without gaps between them cross as they lie, and keep their strides; those with gaps
//!   are packed first. From pinned memory with long rows the copy engine skips the gaps;
//! * between host and device, dtypes are converted where fewer bytes cross: to a smaller one
//!   before, to a larger one after. Of the same size, or within a device, the device converts;
//! * after an upload that threads still work on, work of the device is enqueued when the result is
//!   taken.

use std::sync::Arc;

use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{DType, convert_host};
use aquifer_transfer::internal::{bytes_of, len_of, zeroed};
use aquifer_transfer::{Direction, Owned, PinnedPool, Region};

use super::Tensor;
use super::converted::Converted;
use super::memory::{DeviceMemory, Memory, PinnedHost, by_size, filled, operand_of, target_of};
use super::pack::{pack_on_device, pack_on_host};
use super::place::Place;
use super::to::To;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::layout::Layout;
use crate::transfer::{OnStreams, Pending, Transfer};

/// The most bytes of converted or packed elements that go to pinned memory directly. More go
/// through ordinary memory and the staging ring, so that no large piece is pinned for one use.
const PINNED_AT_ONCE: u64 = 4 << 20;

/// The least bytes of a row for the copy engine, which takes a transaction for each row.
const LONG_ROW: u64 = 512;

/// The elements of a tensor as they cross.
pub(super) struct Sent {
    /// The place of the first in the tensor's memory, if they cross as they lie; `None` if they are
    /// packed.
    pub(super) first: Option<usize>,
    /// The number of elements.
    pub(super) count: usize,
    /// Their layout afterwards.
    pub(super) layout: Layout,
}

impl Tensor {
    /// The tensor in another place. Returns before the copy is done: streams can use device memory
    /// at once, as it carries its ticks. Shares the memory where it is in the place already;
    /// pinned memory is host memory, too.
    ///
    /// # Errors
    /// When memory runs out, and errors of the drivers.
    #[track_caller]
    pub fn to(&self, place: impl TryInto<Place, Error: Into<Error>>) -> Result<Pending<Tensor>, Error> {
        self.to_with(place, To::new())
    }

    /// The tensor in host memory; see [`Tensor::to`]. The result cannot be read before it is
    /// complete, as there is none before.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[doc(alias = "cpu")]
    #[track_caller]
    pub fn to_host(&self) -> Result<Pending<Tensor>, Error> {
        self.to(Place::Host)
    }

    /// The tensor in pinned host memory, from where copies to the pool's device are fastest;
    /// see [`Tensor::to`]. From host memory this is a copy by the calling thread: pin tensors that
    /// are sent often, or create them there.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    #[track_caller]
    pub fn pin(&self, pool: &PinnedPool) -> Result<Pending<Tensor>, Error> {
        self.to(pool)
    }

    /// The tensor with elements of another dtype, where it is. Shares the memory if they are of it
    /// already. On a device this is enqueued on `stream`; on the host the calling thread converts.
    ///
    /// # Errors
    /// As [`Tensor::to_with`].
    #[track_caller]
    pub fn cast(&self, dtype: DType, stream: &Stream) -> Result<Tensor, Error> {
        self.to_with(self.place(), To::new().dtype(dtype).stream(stream))?.enqueued_for(stream)
    }

    /// The tensor in a place, as `to` says; see [`Tensor::to`].
    ///
    /// # Errors
    /// A stream of another device than those that take part, and as [`Tensor::to`].
    #[track_caller]
    pub fn to_with(&self, place: impl TryInto<Place, Error: Into<Error>>, to: To) -> Result<Pending<Tensor>, Error> {
        let (place, dtype) = (Place::named(place)?, to.dtype.unwrap_or(self.dtype));
        // Dropped in reverse order, as they nest.
        let _from = self.called_here();
        let _to = place.called_here();
        if let Some(stream) = &to.stream
            && dtype == self.dtype
            && !place.is_host()
            && self.memory.place().serves_as(&place)
        {
            self.ready_on(stream)?;
        }
        let conveyed = self.convey(&place, dtype, to.stream.as_ref());
        if !to.or_host || place.is_host() {
            return conveyed;
        }
        let (source, wanted) = (self.clone(), place);
        let take_over = move |error: Error| match error.is_out_of_device_memory() {
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
    pub fn contiguous(&self) -> Result<Tensor, Error> {
        if self.is_contiguous() { Ok(self.clone()) } else { self.deep_copy() }
    }

    /// A tensor of the same elements, next to each other in row-major order, in memory of its own
    /// where this one is: later writes to one of them do not affect the other. (Clones share the
    /// memory.) On a device the copy is enqueued.
    ///
    /// # Errors
    /// As [`Tensor::contiguous`].
    #[track_caller]
    pub fn deep_copy(&self) -> Result<Tensor, Error> {
        let _place = self.called_here();
        let memory = match &self.memory {
            Memory::Device(memory) => {
                let stream = memory.transfer.next_stream(Direction::OnDevice);
                let buffer = pack_on_device(memory, &memory.transfer, self.dtype, &self.layout, stream)?;
                Memory::Device(DeviceMemory { buffer, transfer: memory.transfer.clone() })
            }
            host => Memory::on_host(host.pool(), self.dtype, self.len(), |to| {
                pack_on_host(host.read()?, &self.layout, self.size(), to);
                Ok(())
            })?,
        };
        Tensor::new(memory, self.dtype, Layout::row_major(self.shape())?)
    }

    /// Moves and converts the tensor; shares the memory if nothing changes.
    pub(crate) fn convey(
        &self,
        place: &Place,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, Error> {
        if dtype == self.dtype && self.memory.place().serves_as(place) {
            return Ok(Pending::ready(self.clone()));
        }
        match (&self.memory, place) {
            (Memory::Device(own), Place::Device(wanted)) if own.device().id() == wanted.device().id() => {
                self.cast_on_device(own, wanted, dtype, stream)
            }
            (Memory::Device(own), Place::Device(wanted)) => self.to_peer(own, wanted, dtype, stream),
            (Memory::Device(own), place) => self.download(own, &on(&own.transfer, stream)?, place, dtype),
            (_, Place::Device(wanted)) => self.upload(wanted, dtype, stream),
            // A copy by the calling thread needs no stream. Pinned memory stays pinned.
            (own, place) => self.convert_to(place.pool().or(own.pool()), dtype),
        }
    }

    fn convert_to(&self, pool: Option<&PinnedPool>, dtype: DType) -> Result<Pending<Tensor>, Error> {
        let sent = self.sent()?;
        let memory = Memory::on_host(pool, dtype, sent.count, |to| self.write_sent(&sent, dtype, to))?;
        Ok(Pending::ready(Tensor::new(memory, dtype, sent.layout)?))
    }

    /// The elements of a tensor on the host as they are sent, and where they lie then.
    pub(crate) fn elements_as(&self, dtype: DType) -> Result<(Vec<u8>, Layout), Error> {
        let sent = self.sent()?;
        let mut elements = zeroed(bytes_of(sent.count, dtype.bytes())?)?;
        self.write_sent(&sent, dtype, &mut elements)?;
        Ok((elements, sent.layout))
    }

    /// The way the elements cross: as they lie if there are no gaps between them, else packed.
    pub(super) fn sent(&self) -> Result<Sent, Error> {
        let (span, len) = (self.layout.span(), self.layout.len());
        if span > len {
            return Ok(Sent { first: None, count: len, layout: Layout::row_major(self.shape())? });
        }
        Ok(Sent { first: Some(self.first()), count: span, layout: self.layout.at(0) })
    }

    /// Writes the elements that cross as elements of `dtype`. Waits for the copy that fills
    /// pinned memory.
    pub(super) fn write_sent(&self, sent: &Sent, dtype: DType, to: &mut [u8]) -> Result<(), Error> {
        let from = self.memory.read()?;
        match sent.first {
            Some(first) => convert_host(&from[self.byte_range(first, sent.count)], self.dtype, to, dtype)?,
            None if dtype == self.dtype => pack_on_host(from, &self.layout, self.size(), to),
            None => {
                let packed = filled(self.dtype, sent.count, |packed| {
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

    pub(super) fn upload(
        &self,
        to: &Transfer,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, Error> {
        let stream = on(to, stream)?.next_stream(Direction::Upload).clone();
        let crossing = smaller(self.dtype, dtype);
        let sent = self.sent()?;
        let mut buffer: Buffer<u8> = to.alloc_elements(sent.count, crossing, &stream)?;
        let uploaded = self.upload_sent(&to.on(&stream)?, &sent, crossing, &mut buffer)?;
        arriving(uploaded, to, stream, (buffer, crossing), dtype, sent.layout)
    }

    /// Uploads elements as elements of `crossing`.
    pub(super) fn upload_sent(
        &self,
        to: &Transfer,
        sent: &Sent,
        crossing: DType,
        buffer: &mut Buffer<u8>,
    ) -> Result<Pending<()>, Error> {
        let as_it_lies = sent.first.filter(|_| crossing == self.dtype).map(|first| self.byte_range(first, sent.count));
        match (&self.memory, as_it_lies) {
            (Memory::Pinned(own), Some(range)) if own.pool.device().id() == to.device().id() => {
                buffer.upload(own.buffer.try_slice(range)?, to)
            }
            (Memory::Pinned(own), None) if self.has_long_rows() && crossing == self.dtype && own.serves(to) => {
                self.upload_rows(own, to, buffer)
            }
            (Memory::Host(own), Some(range)) => to.upload_bytes(own.part(range), buffer),
            (Memory::Host(own), None) if buffer.bytes() > PINNED_AT_ONCE && sent.first.is_some() => {
                let range = self.byte_range(self.first(), sent.count);
                let source = Converted::new(own.part(range), self.dtype, crossing);
                to.upload_from(Arc::new(source), buffer)
            }
            _ if buffer.bytes() <= PINNED_AT_ONCE => {
                let mut staged = to.pinned().alloc::<u8>(buffer.len())?;
                self.write_sent(sent, crossing, &mut staged.write()?)?;
                buffer.upload(&staged, to)
            }
            _ => {
                let memory = filled(crossing, sent.count, |bytes| self.write_sent(sent, crossing, bytes))?;
                to.upload_bytes(memory, buffer)
            }
        }
    }

    /// Whether rows of adjacent elements are long enough for the copy engine.
    fn has_long_rows(&self) -> bool {
        let merged = self.layout.merged();
        let innermost = merged.dimensions().next_back();
        merged.rank() <= 3
            && innermost.is_some_and(|(extent, stride)| stride == 1 && extent as u64 * self.dtype.bytes() >= LONG_ROW)
    }

    fn upload_rows(&self, own: &PinnedHost, to: &Transfer, buffer: &mut Buffer<u8>) -> Result<Pending<()>, Error> {
        let size = self.size();
        let merged = self.layout.merged();
        let dense = Layout::row_major(merged.shape())?;
        // In bytes: elements are the innermost dimension.
        let in_bytes =
            |strides: &[usize]| strides.iter().map(|stride| stride * size).chain([1]).collect::<Vec<usize>>();
        let extents: Vec<usize> = merged.shape().iter().copied().chain([size]).collect();
        let (from_strides, to_strides) = (in_bytes(merged.strides()), in_bytes(dense.strides()));
        let region = Region { extents: &extents, from_strides: &from_strides, to_strides: &to_strides };
        let from = own.buffer.try_slice(self.byte_range(merged.offset(), merged.span()))?;
        buffer.upload(region.of(from), to)
    }

    pub(super) fn download(
        &self,
        own: &DeviceMemory,
        from: &Transfer,
        place: &Place,
        dtype: DType,
    ) -> Result<Pending<Tensor>, Error> {
        let stream = from.next_stream(Direction::Download).clone();
        let from = from.on(&stream)?;
        // Each launch would write memory that tensors read.
        from.refuse_captured()?;
        let crossing = smaller(self.dtype, dtype);
        let (layout, buffer) = self.send_from(own, &from, crossing, &stream)?;
        let arrived = match place {
            Place::Pinned(pool) if pool.device().id() == from.device().id() => {
                let (mut host, pool) = (pool.alloc::<u8>(buffer.len())?, pool.clone());
                let downloaded = buffer.download(&mut host, &from)?;
                downloaded.map(move |()| Memory::Pinned(PinnedHost { buffer: Arc::new(host), pool }))
            }
            _ => by_size!(crossing, T => {
                let typed = buffer.reinterpret::<T>();
                let typed = typed.ok_or(RequestError::Unsupported { what: super::ALIGNED })?;
                Pending::arriving(from.download_new_vec(typed.device_part(), typed.len())?).map(|elements| Memory::Host(Owned::new::<T, Vec<T>>(elements)))
            }),
        };
        let place = place.clone();
        Ok(arrived.and_then(move |memory| {
            let tensor = Tensor::new(memory, crossing, layout)?;
            if dtype == crossing && tensor.place().serves_as(&place) {
                return Ok(tensor);
            }
            tensor.convey(&place, dtype, None)?.wait()
        }))
    }

    /// The elements in memory of their own, as elements of `crossing`.
    pub(super) fn send_from(
        &self,
        own: &DeviceMemory,
        transfer: &Transfer,
        crossing: DType,
        stream: &Stream,
    ) -> Result<(Layout, Buffer<u8>), Error> {
        let sent = self.sent()?;
        let buffer = match sent.first {
            Some(first) => own.elements(self.dtype, first, sent.count)?,
            None => pack_on_device(own, transfer, self.dtype, &self.layout, stream)?,
        };
        let buffer =
            if crossing == self.dtype { buffer } else { cast(transfer, &buffer, self.dtype, crossing, stream)? };
        Ok((sent.layout, buffer))
    }

    pub(super) fn cast_on_device(
        &self,
        own: &DeviceMemory,
        transfer: &Transfer,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, Error> {
        let stream = on(transfer, stream)?.next_stream(Direction::OnDevice).clone();
        let (layout, buffer) = self.send_from(own, transfer, dtype, &stream)?;
        let tensor = Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: transfer.clone() }), dtype, layout)?;
        transfer.after(&stream, tensor)
    }

    pub(super) fn to_peer(
        &self,
        own: &DeviceMemory,
        to: &Transfer,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, Error> {
        let here = own.transfer.next_stream(Direction::OnDevice).clone();
        let there = on(to, stream)?.next_stream(Direction::OnDevice).clone();
        let crossing = smaller(self.dtype, dtype);
        let (layout, from) = self.send_from(own, &own.transfer, crossing, &here)?;
        let mut buffer: Buffer<u8> = to.allocator().alloc(from.len(), &there)?;
        let copied = to.on(&there)?.copy_bytes(&own.transfer.on(&here)?, &from, &mut buffer)?;
        arriving(copied, to, there, (buffer, crossing), dtype, layout)
    }
}

/// The runtime with the caller's stream, if there is one. It is for the copy alone: tensors keep
/// the runtime of the caller, so that their later uses do not wait for that stream.
pub(super) fn on(transfer: &Transfer, stream: Option<&Stream>) -> Result<Transfer, Error> {
    stream.map_or_else(|| Ok(transfer.clone()), |stream| transfer.on(stream))
}

/// The tensor of the elements of `crossing` that a copy brings to a buffer, converted on the
/// device.
fn arriving<T: Send + 'static>(
    copied: Pending<T>,
    to: &Transfer,
    stream: Stream,
    (buffer, crossing): (Buffer<u8>, DType),
    dtype: DType,
    layout: Layout,
) -> Result<Pending<Tensor>, Error> {
    let (transfer, tick_stream) = (to.clone(), stream.clone());
    let finish = move || {
        let buffer = if crossing == dtype { buffer } else { cast(&transfer, &buffer, crossing, dtype, &stream)? };
        Tensor::new(Memory::Device(DeviceMemory { buffer, transfer }), dtype, layout)
    };
    // A copy that threads still work on may fail, and then there is nothing to convert.
    if crossing != dtype && copied.is_enqueued() {
        let tensor = finish()?;
        return to.after(&tick_stream, tensor);
    }
    Ok(copied.and_then(move |_| finish()))
}

impl PinnedHost {
    /// Whether the copy engine of the runtime's device can read it.
    fn serves(&self, transfer: &Transfer) -> bool {
        self.pool.device().id() == transfer.device().id()
    }
}

/// Enqueues converting elements to new memory, allocated for `stream`.
fn cast(
    transfer: &Transfer,
    from: &Buffer<u8>,
    from_dtype: DType,
    to_dtype: DType,
    stream: &Stream,
) -> Result<Buffer<u8>, Error> {
    let count = len_of(from.bytes() / from_dtype.bytes(), 1)?;
    let mut to = transfer.alloc_elements(count, to_dtype, stream)?;
    let kernels = transfer.allocator().kernels()?;
    kernels.cast(stream, operand_of(from, from_dtype), target_of(&mut to, to_dtype))?;
    Ok(to)
}

/// The dtype in which elements cross between the host and devices: the one of fewer bytes.
pub(crate) fn smaller(from: DType, to: DType) -> DType {
    if to.bytes() < from.bytes() { to } else { from }
}
