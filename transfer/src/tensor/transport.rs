//! Tensors go from place to place, and from dtype to dtype on the way.
//!
//! Rules, in this order:
//! * nothing is copied unless place or dtype change;
//! * elements without gaps between them are sent as they lie, and keep their strides; those with gaps become dense where they are, so
//!   that gaps are not sent. From page-locked memory with long rows the copy engine leaves the gaps out;
//! * between host and device, dtypes are converted where fewer bytes cross: to a smaller one before, to a larger one after. Of the same
//!   size, or within a device, the device converts;
//! * what the device does after an upload that threads still work on is enqueued when the result is taken.

use std::sync::Arc;

use aquifer_allocator::DeviceBuffer;
use aquifer_device::Stream;
use aquifer_kernels::{DType, Operand, Target, convert_host};

use super::converted::Converted;
use super::create::{bytes_of, filled_host, host_bytes};
use super::layout::Layout;
use super::memory::{DeviceMemory, HostMemory, HostPart, Memory, PinnedHost, by_dtype};
use super::pack::{pack_on_device, pack_on_host};
use super::place::Place;
use super::Tensor;
use crate::copy::Region;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::pending::{Pending, Shared};
use crate::pinned::PinnedPool;
use crate::placement::Fallback;
use crate::runtime::Transfer;

/// Converted or packed elements of at most so many bytes are written to page-locked memory at once; more go through ordinary memory and
/// the staging ring, so that no large piece is page-locked for one use.
const PINNED_AT_ONCE: u64 = 4 << 20;

/// Rows of at least so many bytes are left to the copy engine, which takes a transaction for each.
const LONG_ROW: u64 = 512;

/// What a tensor becomes on the way: dtype, stream, and what happens where memory runs out.
///
/// ```
/// use aquifer_kernels::DType;
/// use aquifer_transfer::{Fallback, To};
/// let to = To::new().dtype(DType::BF16).fallback(Fallback::Host);
/// # let _ = to;
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "nothing moves before it is given to `Tensor::to_with`"]
pub struct To {
    dtype: Option<DType>,
    stream: Option<Stream>,
    native: bool,
    fallback: Fallback,
}

impl To {
    /// The same dtype, on streams of the runtime, and an error where memory runs out.
    pub fn new() -> To {
        To::default()
    }

    /// Another dtype, by the rules of [`aquifer_kernels::Kernels::cast`].
    pub fn dtype(self, dtype: DType) -> To {
        To { dtype: Some(dtype), ..self }
    }

    /// The stream that the copy runs on, in order with the rest of its work, and that device memory is allocated for.
    pub fn stream(self, stream: &Stream) -> To {
        To { stream: Some(stream.clone()), ..self }
    }

    /// Refuses a device that does not compute with the dtype by instructions of its own, and says what it lacks.
    pub fn native(self) -> To {
        To { native: true, ..self }
    }

    /// What happens where the device has no memory for it. With [`Fallback::Host`] the result is on the host, as [`Tensor::place`] says.
    pub fn fallback(self, fallback: Fallback) -> To {
        To { fallback, ..self }
    }
}

/// The elements of a tensor as they are sent.
struct Sent {
    /// Place of the first in the tensor's memory, if they are sent as they lie; `None` if they are packed.
    first: Option<u64>,
    /// How many.
    count: u64,
    /// Where they lie then.
    layout: Layout,
}

impl Tensor {
    /// The tensor in another place. Returns before it is there: what a device holds can be used by streams at once, as the memory carries its
    /// ticks. Shares the memory where it is in the place already; page-locked memory is host memory, too.
    ///
    /// # Errors
    /// When memory runs out, and those of the drivers.
    pub fn to(&self, place: impl Into<Place>) -> Result<Pending<Tensor>, TransferError> {
        self.to_with(place, To::new())
    }

    /// The tensor in host memory; see [`Tensor::to`]. The result cannot be read before it is complete, as there is none before.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    pub fn to_host(&self) -> Result<Pending<Tensor>, TransferError> {
        self.to(Place::Host)
    }

    /// The tensor in page-locked host memory, from where copies to the pool's device are fastest; see [`Tensor::to`]. From host memory this
    /// is a copy by the calling thread: pin what is sent often, or make it there.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    pub fn pin(&self, pool: &PinnedPool) -> Result<Pending<Tensor>, TransferError> {
        self.to(pool)
    }

    /// The tensor with elements of another dtype, where it is. Shares the memory if they are of it already.
    ///
    /// # Errors
    /// As [`Tensor::to`].
    pub fn to_dtype(&self, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        self.to_with(self.place(), To::new().dtype(dtype))
    }

    /// The tensor in a place, as `to` says; see [`Tensor::to`].
    ///
    /// # Errors
    /// A stream of another device than those that take part, a dtype that the device lacks instructions for if it must have them, and as
    /// [`Tensor::to`].
    pub fn to_with(&self, place: impl Into<Place>, to: To) -> Result<Pending<Tensor>, TransferError> {
        let (place, dtype) = (place.into(), to.dtype.unwrap_or(self.dtype));
        if let (true, Some(device)) = (to.native, place.device()) {
            let info = device.info();
            if let Some(missing) = dtype.missing_on(info.compute_capability).filter(|_| !dtype.is_native_on(info.compute_capability)) {
                return Err(TransferError::NotNative { dtype, device: info.name.clone(), missing });
            }
        }
        let conveyed = self.convey(&place, dtype, to.stream.as_ref());
        match conveyed {
            Err(error) if error.is_out_of_memory() && to.fallback == Fallback::Host && !place.is_host() => {
                tracing::warn!(%error, %place, "the device has no memory for a tensor; it goes to the host, as the caller allowed");
                self.convey(&Place::Host, dtype, None)
            }
            conveyed => conveyed,
        }
    }

    /// The tensor with its elements next to each other in row-major order, where it is; shares the memory if they are already. On a device the
    /// copy is enqueued.
    ///
    /// # Errors
    /// When memory runs out, and those of the driver.
    pub fn contiguous(&self) -> Result<Tensor, TransferError> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        let memory = match &self.memory {
            Memory::Device(memory) => {
                let stream = memory.transfer.stream(Direction::OnDevice);
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

    /// The memory and what it becomes, if anything.
    fn convey(&self, place: &Place, dtype: DType, stream: Option<&Stream>) -> Result<Pending<Tensor>, TransferError> {
        if dtype == self.dtype && self.memory.place().serves_as(place) {
            return Ok(Pending::ready(&self.shared_with(place), self.clone()));
        }
        match (&self.memory, place) {
            (Memory::Device(own), Place::Device(wanted)) if own.device().id() == wanted.device().id() => {
                self.cast_on_device(own, &on(wanted, stream)?, dtype)
            }
            (Memory::Device(own), Place::Device(wanted)) => self.to_peer(own, &on(wanted, stream)?, dtype),
            (Memory::Device(own), place) => self.download(own, &on(&own.transfer, stream)?, place, dtype),
            (_, Place::Device(wanted)) => self.upload(&on(wanted, stream)?, dtype),
            // A host's copy by its own hands needs no stream, and to the host page-locked memory stays what it is.
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

    fn upload(&self, to: &Transfer, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        let stream = to.stream(Direction::Upload).clone();
        let to = to.on(&stream)?;
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let sent = self.sent()?;
        let mut buffer: DeviceBuffer<u8> = to.allocator().alloc_buffer(bytes_of(&sent.dense()?, crossing)?, &stream)?;
        let (uploaded, enqueued) = self.upload_sent(&to, &sent, crossing, &mut buffer)?;
        let layout = sent.layout;
        let finish = move |to: Transfer, stream: Stream, buffer: DeviceBuffer<u8>| {
            let buffer = if crossing == dtype { buffer } else { cast(&to, &buffer, crossing, dtype, &stream)? };
            Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: to }), dtype, layout)
        };
        if crossing != dtype && enqueued {
            let tensor = finish(to.clone(), stream.clone(), buffer)?;
            return Ok(Pending::enqueued(to.shared(), to.covered_tick(&stream), tensor));
        }
        Ok(uploaded.and_then(move |()| finish(to, stream, buffer)))
    }

    /// Uploads what is sent, as elements of `crossing`; tells whether all of it is enqueued.
    fn upload_sent(
        &self,
        to: &Transfer,
        sent: &Sent,
        crossing: DType,
        buffer: &mut DeviceBuffer<u8>,
    ) -> Result<(Pending<()>, bool), TransferError> {
        let as_it_lies = sent.first.filter(|_| crossing == self.dtype).map(|first| self.byte_range(first, sent.count));
        match (&self.memory, as_it_lies) {
            (Memory::Pinned(own), Some(range)) if own.pool.device().id() == to.device().id() => {
                Ok((to.upload(own.buffer.slice(range)?, buffer)?, true))
            }
            (Memory::Pinned(own), None) if self.has_long_rows() && crossing == self.dtype && own.serves(to) => {
                Ok((self.upload_rows(own, to, buffer)?, true))
            }
            (Memory::Host(own), Some(range)) => Ok((to.upload_from::<u8, HostPart>(own.part(range), buffer)?, false)),
            (Memory::Host(own), None) if buffer.bytes() > PINNED_AT_ONCE && sent.first.is_some() => {
                let range = self.byte_range(self.first(), sent.count);
                let source = Converted::new(own.part(range), self.dtype, crossing);
                Ok((to.stage_upload(Arc::new(source), buffer)?.1, false))
            }
            _ if buffer.bytes() <= PINNED_AT_ONCE => {
                let mut staged = to.pinned().alloc::<u8>(host_bytes(&sent.dense()?, crossing)?)?;
                self.write_sent(sent, crossing, staged.write()?)?;
                Ok((to.upload(&staged, buffer)?, true))
            }
            _ => {
                let memory = filled_host(crossing, sent.count, |bytes| self.write_sent(sent, crossing, bytes))?;
                let all = 0..memory.bytes().len();
                Ok((to.upload_from::<u8, HostPart>(memory.part(all), buffer)?, false))
            }
        }
    }

    /// Whether the innermost elements are next to each other, and many, so that copying rows pays.
    fn has_long_rows(&self) -> bool {
        let merged = self.layout.merged();
        let innermost = merged.dimensions().next_back();
        merged.rank() <= 3 && innermost.is_some_and(|(extent, stride)| stride == 1 && extent * self.dtype.bytes() >= LONG_ROW)
    }

    fn upload_rows(&self, own: &PinnedHost, to: &Transfer, buffer: &mut DeviceBuffer<u8>) -> Result<Pending<()>, TransferError> {
        let size = self.dtype.bytes();
        let merged = self.layout.merged();
        let dense = Layout::row_major(merged.shape())?;
        // In bytes, of which elements are the innermost dimension.
        let in_bytes = |strides: &[u64]| strides.iter().map(|stride| stride * size).chain([1]).collect::<Vec<u64>>();
        let extents: Vec<u64> = merged.shape().iter().copied().chain([size]).collect();
        let (from_strides, to_strides) = (in_bytes(merged.strides()), in_bytes(dense.strides()));
        let region = Region { extents: &extents, from_strides: &from_strides, to_strides: &to_strides };
        let from = own.buffer.slice(self.byte_range(merged.offset(), merged.span()))?;
        to.upload_region(from, buffer, &region)
    }

    fn download(&self, own: &DeviceMemory, from: &Transfer, place: &Place, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        let stream = from.stream(Direction::Download).clone();
        let from = from.on(&stream)?;
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let (layout, buffer) = self.send_from(own, &from, crossing, &stream)?;
        let landed = match place {
            Place::Pinned(pool) if pool.device().id() == from.device().id() => {
                let len = usize::try_from(buffer.bytes())
                    .map_err(|_| TransferError::LengthOverflow { len: buffer.bytes(), size: 1 })?;
                let (mut host, pool) = (pool.alloc::<u8>(len)?, pool.clone());
                let downloaded = from.download(&buffer, &mut host)?;
                downloaded.map(move |()| Memory::Pinned(PinnedHost { buffer: Arc::new(host), pool }))
            }
            _ => by_dtype!(crossing, T => {
                let typed = buffer.cast::<T>();
                let typed = typed.ok_or(TransferError::Unsupported { what: "device memory that is aligned for its elements" })?;
                from.to_vec(&typed)?.map(|elements| Memory::Host(HostMemory::of::<T, Vec<T>>(elements)))
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

    /// The elements in memory of their device that holds nothing else, as elements of `crossing`.
    fn send_from(
        &self,
        own: &DeviceMemory,
        transfer: &Transfer,
        crossing: DType,
        stream: &Stream,
    ) -> Result<(Layout, DeviceBuffer<u8>), TransferError> {
        let sent = self.sent()?;
        let buffer = match sent.first {
            Some(first) => own.elements(self.dtype, first, sent.count)?,
            None => pack_on_device(own, transfer, self.dtype, &self.layout, stream)?,
        };
        let buffer = if crossing == self.dtype { buffer } else { cast(transfer, &buffer, self.dtype, crossing, stream)? };
        Ok((sent.layout, buffer))
    }

    fn cast_on_device(&self, own: &DeviceMemory, transfer: &Transfer, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        let stream = transfer.stream(Direction::OnDevice).clone();
        let (layout, buffer) = self.send_from(own, transfer, dtype, &stream)?;
        let tensor = Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: transfer.clone() }), dtype, layout)?;
        Ok(Pending::enqueued(transfer.shared(), transfer.covered_tick(&stream), tensor))
    }

    fn to_peer(&self, own: &DeviceMemory, to: &Transfer, dtype: DType) -> Result<Pending<Tensor>, TransferError> {
        let (here, there) =
            (own.transfer.stream(Direction::OnDevice).clone(), to.stream(Direction::OnDevice).clone());
        let crossing = if dtype.bytes() < self.dtype.bytes() { dtype } else { self.dtype };
        let (layout, from) = self.send_from(own, &own.transfer, crossing, &here)?;
        let mut buffer: DeviceBuffer<u8> = to.allocator().alloc_buffer(from.bytes(), &there)?;
        let copied = to.on(&there)?.copy_from_peer(&from, &own.transfer.on(&here)?, &mut buffer)?;
        let buffer = if crossing == dtype { buffer } else { cast(to, &buffer, crossing, dtype, &there)? };
        let tensor = Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: to.clone() }), dtype, layout)?;
        if crossing == dtype {
            return Ok(copied.map(|_| tensor));
        }
        Ok(Pending::enqueued(to.shared(), to.covered_tick(&there), tensor))
    }

    /// The elements of a tensor on the host as they are sent, and where they lie then.
    pub(crate) fn elements_as(&self, dtype: DType) -> Result<(Vec<u8>, Layout), TransferError> {
        let sent = self.sent()?;
        let mut elements = vec![0; host_bytes(&sent.dense()?, dtype)?];
        self.write_sent(&sent, dtype, &mut elements)?;
        Ok((elements, sent.layout))
    }

    /// How the elements are sent: as they lie if there are no gaps between them, else packed.
    fn sent(&self) -> Result<Sent, TransferError> {
        let (span, len) = (self.layout.span(), self.layout.len());
        if span > len {
            return Ok(Sent { first: None, count: len, layout: Layout::row_major(self.shape())? });
        }
        Ok(Sent { first: Some(self.first()), count: span, layout: self.layout.at(0) })
    }

    /// Writes what is sent as elements of `dtype`. Waits for the copy that fills page-locked memory.
    fn write_sent(&self, sent: &Sent, dtype: DType, to: &mut [u8]) -> Result<(), TransferError> {
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
    fn byte_range(&self, first: u64, count: u64) -> std::ops::Range<usize> {
        let byte = |element: u64| usize::try_from(element).map_or(usize::MAX, |element| element.saturating_mul(self.size()));
        byte(first)..byte(first.saturating_add(count))
    }

    pub(super) fn size(&self) -> usize {
        usize::try_from(self.dtype.bytes()).unwrap_or(usize::MAX)
    }

    /// What pendings of a way between two places share: that of a runtime, if one takes part.
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
    fn dense(&self) -> Result<Layout, TransferError> {
        Ok(Layout::row_major(&[self.count])?)
    }
}

impl PinnedHost {
    /// Whether the copy engine of the runtime's device can read it.
    fn serves(&self, transfer: &Transfer) -> bool {
        self.buffer.is_pinned() && self.pool.device().id() == transfer.device().id()
    }
}

/// The runtime with the caller's stream, if there is one.
fn on(transfer: &Transfer, stream: Option<&Stream>) -> Result<Transfer, TransferError> {
    stream.map_or_else(|| Ok(transfer.clone()), |stream| transfer.on(stream))
}

/// Enqueues converting elements to new memory, allocated for `stream`.
fn cast(
    transfer: &Transfer,
    from: &DeviceBuffer<u8>,
    from_dtype: DType,
    to_dtype: DType,
    stream: &Stream,
) -> Result<DeviceBuffer<u8>, TransferError> {
    let count = from.bytes() / from_dtype.bytes();
    let mut to: DeviceBuffer<u8> = transfer.allocator().alloc_buffer(count.saturating_mul(to_dtype.bytes()), stream)?;
    let kernels = transfer.kernels()?;
    kernels.cast(stream, Operand::of_bytes(from, from_dtype), Target::of_bytes(&mut to, to_dtype))?;
    Ok(to)
}
