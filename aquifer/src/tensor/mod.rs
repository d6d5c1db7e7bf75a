//! Tensors: elements of one dtype in an explicit place, which never changes silently.
//!
//! * `memory` holds the elements, in a [`Place`]; all views share it;
//! * `create` makes tensors, and reads elements back on the host;
//! * `transport` moves and converts tensors; `pack` makes tensors with gaps dense;
//! * `operations` computes on a device, and changes elements there in place.
//!
//! Sets of named tensors, and files of them, are here, too: [`ParamSet`], [`Checkpoint`].

mod converted;
mod create;
mod memory;
mod operations;
mod pack;
mod place;
mod to;
mod transport;

use std::fmt;
use std::ops::Range;

use aquifer_device::internal::CalledFrom;
use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{DType, Element};

use crate::buffer::Buffer;

pub(crate) use converted::Converted;
pub(crate) use memory::{DeviceMemory, Memory};
pub use place::Place;
pub use to::To;

pub use crate::layout::{Layout, LayoutError, MAX_DIMENSIONS};
pub use crate::params::{Checkpoint, Load, ParamSet, Progress, TensorEntry};
pub(crate) use transport::smaller;

use crate::error::Error;
use crate::transfer::{OnStreams, Transfer};

/// Elements of one dtype in a shape, in host memory, pinned host memory or the memory of a
/// device.
///
/// Clones and views share the memory; [`Tensor::deep_copy`] does not. No method changes elements
/// that another tensor shares, except where its name and documentation say so
/// ([`Tensor::copy_from`], [`Tensor::fill`]), and those are for memory of devices.
///
/// *Placement.* The place of a tensor never changes: [`Tensor::to`] makes another tensor.
/// Operations on tensors in different places, of different dtypes, or of shapes that do not fit are
/// errors that name every operand.
///
/// *Order.* Operations on a device are enqueued, and later work on any stream is ordered after them
/// by the ticks that the memory carries.
///
/// *Waiting.* Methods that wait on the host say so in their names. Beyond that, where the host
/// itself changes, copies or converts elements in pinned memory, it waits for copies that
/// still fill that memory ([`crate::transfer::HostMemoryStats::num_waits`] counts these waits).
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
///
/// let host = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// let x = host.to(&memory)?.wait()?;
/// let sums = x.add(&x, &stream)?;
/// assert_eq!(sums.transpose(0, 1)?.to_vec::<f32>()?, [2.0, 8.0, 4.0, 10.0, 6.0, 12.0]);
///
/// let error = x.add(&host, &stream).unwrap_err().to_string();
/// assert!(error.contains("a: f32 [2, 3] on sim:0") && error.contains("b: f32 [2, 3] on cpu"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Tensor {
    pub(crate) memory: Memory,
    pub(crate) dtype: DType,
    pub(crate) layout: Layout,
}

/// The requirement in errors about parts of device memory.
const ALIGNED: &str = "device memory that is aligned for its elements";

/// The identity of a part of memory.
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Tie {
    memory: usize,
    start: u64,
    dtype: DType,
    layout: Layout,
}

/// Reading pinned memory waits for its copies.
impl OnStreams for Tensor {
    fn ready_on(&self, stream: &Stream) -> Result<(), Error> {
        match &self.memory {
            Memory::Device(memory) => memory.buffer.ready_on(stream),
            Memory::Host(_) | Memory::Pinned(_) => Ok(()),
        }
    }
}

impl Tensor {
    /// A tensor of memory that must hold the layout.
    pub(crate) fn new(memory: Memory, dtype: DType, layout: Layout) -> Result<Tensor, Error> {
        let has = usize::try_from(memory.len() / dtype.bytes()).unwrap_or(usize::MAX);
        if layout.end() > has {
            let (shape, needed) = (layout.shape(), layout.end());
            let problem = format!("a layout of {shape:?} needs {needed} elements, the storage has {has}");
            return Err(LayoutError(problem).into());
        }
        Ok(Tensor { memory, dtype, layout })
    }

    /// A tensor of new device memory.
    pub(crate) fn on_device(
        buffer: Buffer<u8>,
        transfer: &Transfer,
        dtype: DType,
        layout: Layout,
    ) -> Result<Tensor, Error> {
        Tensor::new(Memory::Device(DeviceMemory { buffer, transfer: transfer.clone() }), dtype, layout)
    }

    /// As [`Transfer::called_here`], where it is on a device.
    #[track_caller]
    fn called_here(&self) -> Option<CalledFrom> {
        match &self.memory {
            Memory::Device(own) => own.transfer.called_here(),
            _ => None,
        }
    }

    /// An identity that tied tensors share, while it lives.
    pub(crate) fn tie(&self) -> Tie {
        // Parts of one buffer share memory, and may each begin elsewhere in it.
        let start = self.memory.start() + self.first() as u64 * self.dtype.bytes();
        Tie { memory: self.memory.identity(), start, dtype: self.dtype, layout: self.layout.at(0) }
    }

    /// Its place.
    pub fn place(&self) -> Place {
        self.memory.place()
    }

    /// The dtype of its elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The layout of its elements in its memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Extents, outermost first. Empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// Strides in elements, outermost first.
    pub fn strides(&self) -> &[usize] {
        self.layout.strides()
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.layout.len()
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.layout.is_empty()
    }

    /// Size of its elements in bytes, repeated ones counted as often.
    pub fn bytes(&self) -> u64 {
        (self.len() as u64).saturating_mul(self.dtype.bytes())
    }

    /// Whether its elements lie next to each other in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// Whether both share their memory, be it different parts of it.
    pub fn shares_memory_with(&self, other: &Tensor) -> bool {
        self.memory.is_same(&other.memory)
    }

    /// The device memory of its elements, typed and sharing it, for the caller's kernels and
    /// copies. Use it with access guards, or make it ready for a stream first
    /// ([`Buffer::ready_on`]).
    ///
    /// # Errors
    /// A tensor on the host, of another dtype, or that is not contiguous.
    pub fn device_buffer<T: Element>(&self) -> Result<Buffer<T>, Error> {
        self.check_dtype(T::DTYPE)?;
        let memory = self.device_memory()?;
        if !self.is_contiguous() {
            return Err(self.not_contiguous());
        }
        let bytes = memory.elements(self.dtype, self.first(), self.len())?;
        let typed = bytes.reinterpret().map(|view| view.share());
        Ok(typed.ok_or(RequestError::Unsupported { what: ALIGNED })?)
    }

    /// The device memory of the tensor.
    pub(crate) fn device_memory(&self) -> Result<&DeviceMemory, Error> {
        match &self.memory {
            Memory::Device(memory) => Ok(memory),
            Memory::Host(_) | Memory::Pinned(_) => Err(Error::NotOnDevice { place: self.place().to_string() }),
        }
    }

    /// The indices `range` of a dimension, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::narrow`].
    pub fn narrow(&self, dimension: usize, range: Range<usize>) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.narrow(dimension, range)?))
    }

    /// One index of a dimension, which is removed, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::select`].
    pub fn select(&self, dimension: usize, index: usize) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.select(dimension, index)?))
    }

    /// The dimensions in another order, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::permute`].
    pub fn permute(&self, order: &[usize]) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.permute(order)?))
    }

    /// Two dimensions exchanged, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::transpose`].
    pub fn transpose(&self, a: usize, b: usize) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.transpose(a, b)?))
    }

    /// A dimension of extent 1 removed, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::squeeze`].
    pub fn squeeze(&self, dimension: usize) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.squeeze(dimension)?))
    }

    /// A dimension of extent 1 inserted, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::unsqueeze`].
    pub fn unsqueeze(&self, dimension: usize) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.unsqueeze(dimension)?))
    }

    /// Another shape with the same elements in the same order, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::reshape`]: never copies.
    pub fn reshape(&self, shape: &[usize]) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.reshape(shape)?))
    }

    /// A larger shape that repeats elements, sharing the memory.
    ///
    /// # Errors
    /// As [`Layout::broadcast`].
    pub fn broadcast(&self, shape: &[usize]) -> Result<Tensor, Error> {
        Ok(self.view(self.layout.broadcast(shape)?))
    }

    /// The same memory with a layout within the present one.
    pub(crate) fn view(&self, layout: Layout) -> Tensor {
        Tensor { memory: self.memory.clone(), dtype: self.dtype, layout }
    }

    /// The first element that the layout reaches; 0 where it has none.
    pub(crate) fn first(&self) -> usize {
        if self.is_empty() { 0 } else { self.layout.offset() }
    }

    pub(crate) fn check_dtype(&self, needed: DType) -> Result<(), Error> {
        if self.dtype == needed { Ok(()) } else { Err(Error::WrongDType { is: self.dtype, needed }) }
    }

    pub(crate) fn not_contiguous(&self) -> Error {
        Error::NotContiguous { shape: self.shape().to_vec(), strides: self.strides().to_vec() }
    }
}

/// Dtype, shape, strides where they are not the dense ones, and place.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape())?;
        if !self.is_contiguous() {
            write!(f, " strides {:?}", self.strides())?;
        }
        write!(f, " on {}", self.place())
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({self})")
    }
}

#[cfg(test)]
mod tests;
