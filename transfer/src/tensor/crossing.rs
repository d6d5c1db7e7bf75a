//! Tensors between the host and devices, and between devices. `transport` has the rules.

use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{DType, Operand, Target};

use super::Tensor;
use super::converted::Converted;
use super::create::{bytes_of, filled_host, host_bytes};
use super::memory::{DeviceMemory, Memory, PinnedHost, by_dtype};
use super::pack::pack_on_device;
use super::place::Place;
use super::transport::{Sent, on};
use crate::copy::{Owned, Region, copy_from_peer, stage_upload, upload_owned};
use crate::counters::Direction;
use crate::error::TransferError;
use crate::layout::Layout;
use crate::pending::Pending;
use crate::runtime::Transfer;

/// The most bytes of converted or packed elements that go to page-locked memory directly. More go
/// through ordinary memory and the staging ring, so that no large piece is page-locked for one use.
const PINNED_AT_ONCE: u64 = 4 << 20;

/// The least bytes of a row for the copy engine, which takes a transaction for each row.
const LONG_ROW: u64 = 512;

impl Tensor {
    pub(super) fn upload(
        &self,
        to: &Transfer,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, TransferError> {
        let stream = on(to, stream)?.next_stream(Direction::Upload).clone();
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let sent = self.sent()?;
        let mut buffer: Buffer<u8> = to.alloc_bytes(bytes_of(&sent.dense()?, crossing)?, &stream)?;
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
    ) -> Result<Pending<()>, TransferError> {
        let as_it_lies = sent.first.filter(|_| crossing == self.dtype).map(|first| self.byte_range(first, sent.count));
        match (&self.memory, as_it_lies) {
            (Memory::Pinned(own), Some(range)) if own.pool.device().id() == to.device().id() => {
                to.upload(own.buffer.try_slice(range)?, buffer)
            }
            (Memory::Pinned(own), None) if self.has_long_rows() && crossing == self.dtype && own.serves(to) => {
                self.upload_rows(own, to, buffer)
            }
            (Memory::Host(own), Some(range)) => upload_owned(to, own.part(range), buffer, None),
            (Memory::Host(own), None) if buffer.bytes() > PINNED_AT_ONCE && sent.first.is_some() => {
                let range = self.byte_range(self.first(), sent.count);
                let source = Converted::new(own.part(range), self.dtype, crossing);
                Ok(stage_upload(to, Arc::new(source), buffer)?.1)
            }
            _ if buffer.bytes() <= PINNED_AT_ONCE => {
                let mut staged = to.pinned().alloc::<u8>(host_bytes(&sent.dense()?, crossing)?)?;
                self.write_sent(sent, crossing, staged.write()?)?;
                to.upload(&staged, buffer)
            }
            _ => {
                let memory = filled_host(crossing, sent.count, |bytes| self.write_sent(sent, crossing, bytes))?;
                upload_owned(to, memory.part(0..memory.len()), buffer, None)
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

    fn upload_rows(
        &self,
        own: &PinnedHost,
        to: &Transfer,
        buffer: &mut Buffer<u8>,
    ) -> Result<Pending<()>, TransferError> {
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
        to.upload(region.of(from), buffer)
    }

    pub(super) fn download(
        &self,
        own: &DeviceMemory,
        from: &Transfer,
        place: &Place,
        dtype: DType,
    ) -> Result<Pending<Tensor>, TransferError> {
        let stream = from.next_stream(Direction::Download).clone();
        let from = from.on(&stream)?;
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let (layout, buffer) = self.send_from(own, &from, crossing, &stream)?;
        let landed = match place {
            Place::Pinned(pool) if pool.device().id() == from.device().id() => {
                let (mut host, pool) = (pool.alloc::<u8>(buffer.len())?, pool.clone());
                let downloaded = from.download(&buffer, &mut host)?;
                downloaded.map(move |()| Memory::Pinned(PinnedHost { buffer: Arc::new(host), pool }))
            }
            _ => by_dtype!(crossing, T => {
                let typed = buffer.reinterpret::<T>();
                let typed = typed.ok_or(RequestError::Unsupported { what: "device memory that is aligned for its elements" })?;
                from.to_vec(&typed)?.map(|elements| Memory::Host(Owned::new::<T, Vec<T>>(elements)))
            }),
        };
        let place = place.clone();
        Ok(landed.and_then(move |memory| {
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
    ) -> Result<(Layout, Buffer<u8>), TransferError> {
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
    ) -> Result<Pending<Tensor>, TransferError> {
        let stream = on(transfer, stream)?.next_stream(Direction::OnDevice).clone();
        let (layout, buffer) = self.send_from(own, transfer, dtype, &stream)?;
        let tensor = Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: transfer.clone() }), dtype, layout)?;
        Ok(Pending::enqueued(transfer.shared(), transfer.covered_tick(&stream), tensor))
    }

    pub(super) fn to_peer(
        &self,
        own: &DeviceMemory,
        to: &Transfer,
        dtype: DType,
        stream: Option<&Stream>,
    ) -> Result<Pending<Tensor>, TransferError> {
        let here = own.transfer.next_stream(Direction::OnDevice).clone();
        let there = on(to, stream)?.next_stream(Direction::OnDevice).clone();
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let (layout, from) = self.send_from(own, &own.transfer, crossing, &here)?;
        let mut buffer: Buffer<u8> = to.alloc_bytes(from.bytes(), &there)?;
        let copied = copy_from_peer(&to.on(&there)?, &own.transfer.on(&here)?, &from, &mut buffer, None)?;
        arriving(copied, to, there, (buffer, crossing), dtype, layout)
    }
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
) -> Result<Pending<Tensor>, TransferError> {
    let (transfer, tick_stream) = (to.clone(), stream.clone());
    let finish = move || {
        let buffer = if crossing == dtype { buffer } else { cast(&transfer, &buffer, crossing, dtype, &stream)? };
        Tensor::new(Memory::Device(DeviceMemory { buffer, transfer }), dtype, layout)
    };
    // A copy that threads still work on may fail, and then there is nothing to convert.
    if crossing != dtype && copied.is_enqueued() {
        let tensor = finish()?;
        return Ok(Pending::enqueued(to.shared(), to.covered_tick(&tick_stream), tensor));
    }
    Ok(copied.and_then(move |_| finish()))
}

impl PinnedHost {
    /// Whether the copy engine of the runtime's device can read it.
    fn serves(&self, transfer: &Transfer) -> bool {
        self.buffer.is_pinned() && self.pool.device().id() == transfer.device().id()
    }
}

/// Enqueues converting elements to new memory, allocated for `stream`.
fn cast(
    transfer: &Transfer,
    from: &Buffer<u8>,
    from_dtype: DType,
    to_dtype: DType,
    stream: &Stream,
) -> Result<Buffer<u8>, TransferError> {
    let count = from.bytes() / from_dtype.bytes();
    let mut to: Buffer<u8> = transfer.alloc_bytes(count.saturating_mul(to_dtype.bytes()), stream)?;
    let kernels = transfer.kernels()?;
    kernels.cast(stream, Operand::of_bytes(from, from_dtype), Target::of_bytes(&mut to, to_dtype))?;
    Ok(to)
}
