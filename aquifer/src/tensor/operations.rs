//! Operations on tensors of devices: those of the kernels, and writing in place.
//!
//! *Kernels.* Operands must be on one device and of one dtype, and their shapes must fit as they
//! are: nothing is moved, converted or repeated unless the caller does it ([`Tensor::to`],
//! [`Tensor::cast`], [`Tensor::broadcast`]). Errors name every operand. Results are new memory
//! on the operands' device, allocated for the stream that computes them. Operands that are not
//! contiguous are made so first, on the device.
//!
//! *Writing in place* is seen by all tensors that share the memory. Only memory of devices is
//! written: there, ticks order reads and writes. Host memory is lent as slices, and stays as it is.
//! Elements that lie as the target's do are copied there directly. Others become dense first, in
//! memory of the target's device, from where the scatter kernel brings them to their places; so do
//! those that lie, or may lie, where the target is written.

use std::sync::Arc;

use aquifer_device::{DeviceMismatch, Stream};
use aquifer_kernels::{DType, Element, KernelError, Kernels, Operand, Target};
use aquifer_transfer::Direction;

use super::Tensor;
use super::memory::{DeviceMemory, Memory, operand_of, target_of};
use super::pack::{fill_on_device, pack_on_device, pack_to, spread_on_device};
use super::place::device_name;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::layout::Layout;
use crate::transfer::{Pending, Transfer};

/// Operands of an operation, by name.
pub(super) struct Operands<'a> {
    pub(super) operation: &'static str,
    pub(super) tensors: &'a [(&'static str, &'a Tensor)],
    pub(super) stream: &'a Stream,
}

impl Tensor {
    /// Enqueues the sum of both, element by element: integers wrap, floats are rounded once.
    ///
    /// # Errors
    /// Operands in different places, not on a device, of different dtypes or shapes; and those of
    /// [`Kernels::add`].
    #[track_caller]
    pub fn add(&self, other: &Tensor, stream: &Stream) -> Result<Tensor, Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "add", tensors: &[("a", self), ("b", other)], stream };
        let transfer = operands.check()?;
        operands.same_shape()?;
        operands
            .compute(transfer, self.dtype, self.shape(), |kernels, from, to| kernels.add(stream, from[0], from[1], to))
    }

    /// Enqueues the sum of this tensor and `alpha · x`, as a new one. Floats only; rounded as
    /// [`Kernels::axpy`] does.
    ///
    /// # Errors
    /// Operands in different places, not on a device, of different dtypes or shapes; and those of
    /// [`Kernels::axpy`].
    #[track_caller]
    pub fn add_scaled(&self, alpha: impl Into<f64>, x: &Tensor, stream: &Stream) -> Result<Tensor, Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "add_scaled", tensors: &[("y", self), ("x", x)], stream };
        let transfer = operands.check()?;
        operands.same_shape()?;
        let x = x.dense(transfer, stream)?;
        let mut to = pack_on_device(self.device_memory()?, transfer, self.dtype, &self.layout, stream)?;
        let (x, target) = (operand_of(&x, self.dtype), target_of(&mut to, self.dtype));
        transfer.allocator().kernels()?.axpy(stream, alpha.into(), x, target)?;
        Tensor::on_device(to, transfer, self.dtype, Layout::row_major(self.shape())?)
    }

    /// Enqueues the matrix product: `[m, k]` by `[k, n]` gives `[m, n]`. Dtypes and rounding are
    /// those of [`Kernels::matmul`].
    ///
    /// # Errors
    /// Operands in different places, not on a device, of different dtypes, or of shapes that do not
    /// fit; and those of [`Kernels::matmul`].
    #[track_caller]
    pub fn matmul(&self, other: &Tensor, stream: &Stream) -> Result<Tensor, Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "matmul", tensors: &[("a", self), ("b", other)], stream };
        let transfer = operands.check()?;
        let (&[m, k], &[rows, n]) = (self.shape(), other.shape()) else {
            return Err(operands.refuse("needs two matrices"));
        };
        if k != rows {
            return Err(operands.refuse(format!("a has {k} columns and b {rows} rows, which must be as many")));
        }
        operands.compute(transfer, self.dtype, &[m, n], |kernels, from, to| {
            kernels.matmul(stream, from[0], from[1], to, [m, k, n].map(|extent| extent as u64))
        })
    }

    /// Enqueues the sum of all elements, as a scalar tensor: `f32` for floats up to that, `f64`,
    /// `i64` or `u64`, as [`Kernels::reduce_sum`] has it. Repeated elements count as often.
    ///
    /// # Errors
    /// An operand that is not on a device, and those of [`Kernels::reduce_sum`].
    #[track_caller]
    pub fn sum(&self, stream: &Stream) -> Result<Tensor, Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "sum", tensors: &[("a", self)], stream };
        let transfer = operands.check()?;
        let mut scratch: Buffer<u64> = transfer.allocator().alloc(Kernels::SUM_SCRATCH_LEN, stream)?;
        operands.compute(transfer, self.dtype.of_sum(), &[], |kernels, from, to| {
            kernels.reduce_sum(stream, from[0], &mut scratch, to)
        })
    }

    /// The elements, contiguous: shared where they are, else collected in new memory.
    fn dense(&self, transfer: &Transfer, stream: &Stream) -> Result<Buffer<u8>, Error> {
        let memory = self.device_memory()?;
        if self.is_contiguous() {
            return memory.elements(self.dtype, self.first(), self.len());
        }
        pack_on_device(memory, transfer, self.dtype, &self.layout, stream)
    }

    /// Enqueues setting every element to `value`, for all tensors that share the memory. Later work
    /// on any stream comes after it. The memory between the elements of a view stays as it is; that
    /// takes memory for as many elements until it is done.
    ///
    /// # Errors
    /// A tensor that is not on a device, of another dtype, or that repeats elements; those of
    /// [`aquifer_kernels::Kernels::fill`], and when memory runs out.
    #[track_caller]
    pub fn fill<T: Element>(&mut self, value: T, stream: &Stream) -> Result<(), Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "fill", tensors: &[("a", self)], stream };
        let own = operands.written()?;
        self.check_dtype(T::DTYPE)?;
        let dense = self.permute(&self.layout.by_falling_stride())?;
        if dense.is_contiguous() {
            let mut buffer = dense.device_buffer::<T>()?;
            return Ok(own.transfer.allocator().kernels()?.fill(stream, &mut buffer, value)?);
        }
        fill_on_device(own, &own.transfer, &dense.layout, value, stream)
    }

    /// Begins setting every element to that of `from` with the same indices, for all tensors that
    /// share the memory, and returns: PyTorch's `copy_`. Later work on any stream comes after it,
    /// and the memory between the elements of a view stays as it is.
    ///
    /// `from` may be in any place. It may share the memory, too: then all of it is read before
    /// anything is written. What is on another device, or on the host, crosses as it does for
    /// [`Tensor::to`], without further memory where both are dense in one order. Otherwise the host
    /// waits until threads of the runtime have enqueued that. Where a copy fails after this
    /// returned, some elements may have been written.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    ///
    /// let matrix = Tensor::zeros(&[2, 3], DType::F32, &memory)?;
    /// let column = Tensor::from_vec(vec![1.0f32, 2.0], &[2])?; // on the host
    /// matrix.select(1, 1)?.copy_from(&column, &stream)?.wait()?;
    /// assert_eq!(matrix.to_vec::<f32>()?, [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Tensors of different dtypes or shapes ([`Tensor::cast`] and [`Tensor::broadcast`] make
    /// them fit), one to be written that is not on a device or repeats elements, a stream of
    /// another device or one that captures; and as [`Tensor::to`].
    #[track_caller]
    pub fn copy_from(&mut self, from: &Tensor, stream: &Stream) -> Result<Pending<()>, Error> {
        let _place = self.called_here();
        let operands = Operands { operation: "copy_from", tensors: &[("to", self), ("from", from)], stream };
        let own = operands.written()?;
        operands.same_dtype()?;
        operands.same_shape()?;
        let transfer = own.transfer.on(stream)?;
        transfer.refuse_capture(stream)?;
        if self.is_empty() || self.tie() == from.tie() {
            return Ok(Pending::ready(()));
        }
        // In which order elements are copied does not matter, so it is that of the target's memory.
        let order = self.layout.by_falling_stride();
        let (to, from) = (self.permute(&order)?, from.permute(&order)?);
        if let Some(copied) = to.assign_directly(own, &from, &transfer)? {
            return Ok(copied);
        }
        let place = (&own.transfer).into();
        let here = from.convey(&place, from.dtype(), Some(stream))?.enqueued_for(stream)?;
        to.assign_on_device(own, &here, here.device_memory()?, &transfer, stream)
    }

    /// The same elements in memory of the same device, arranged so that [`Tensor::copy_from`]
    /// brings them to `to` without taking memory: this tensor, or one with the order of `to` where
    /// neither is dense in that order. Loads the kernels if they are needed then.
    pub(crate) fn arranged_for(&self, to: &Tensor, stream: &Stream) -> Result<Tensor, Error> {
        let order = to.layout.by_falling_stride();
        let (target, from) = (to.permute(&order)?, self.permute(&order)?);
        let own = from.device_memory()?;
        if target.is_contiguous() && from.is_contiguous() {
            return Ok(self.clone());
        }
        own.transfer.allocator().kernels()?;
        if target.is_contiguous() || from.is_contiguous() {
            return Ok(self.clone());
        }
        let dense = pack_on_device(own, &own.transfer, self.dtype, &from.layout, stream)?;
        let arranged = Tensor::on_device(dense, &own.transfer, self.dtype, Layout::row_major(from.shape())?)?;
        let mut back = order.clone();
        order.iter().enumerate().for_each(|(at, &dimension)| back[dimension] = at);
        arranged.permute(&back)
    }

    /// Checks that a tensor on a device can be assigned to, on a stream of its runtime.
    pub(crate) fn check_assignable(&self) -> Result<(), Error> {
        let own = self.device_memory()?;
        let stream = own.transfer.next_stream(Direction::OnDevice);
        own.transfer.refuse_capture(stream)?;
        Operands { operation: "copy_from", tensors: &[("to", self)], stream }.written().map(drop)
    }

    /// Begins bringing elements of another place to this tensor's memory, if they go there as one
    /// piece. On the stream of `transfer`.
    fn assign_directly(
        &self,
        own: &DeviceMemory,
        from: &Tensor,
        transfer: &Transfer,
    ) -> Result<Option<Pending<()>>, Error> {
        let sent = from.sent()?;
        if !self.is_contiguous() || !sent.layout.is_contiguous() {
            return Ok(None);
        }
        let mut to = own.elements(self.dtype, self.first(), self.len())?;
        match &from.memory {
            Memory::Device(other) if other.device().id() == own.device().id() => Ok(None),
            Memory::Device(other) => {
                let there = other.transfer.next_stream(Direction::OnDevice).clone();
                let (_, dense) = from.send_from(other, &other.transfer, self.dtype, &there)?;
                Ok(Some(transfer.copy_bytes(&other.transfer.on(&there)?, &dense, &mut to)?))
            }
            _ => Ok(Some(from.upload_sent(transfer, &sent, self.dtype, &mut to)?)),
        }
    }

    /// Enqueues copying from memory of the same device.
    fn assign_on_device(
        &self,
        own: &DeviceMemory,
        from: &Tensor,
        other: &DeviceMemory,
        transfer: &Transfer,
        stream: &Stream,
    ) -> Result<Pending<()>, Error> {
        let mut to = own.elements(self.dtype, self.first(), self.layout.span())?;
        let read = other.elements(self.dtype, from.first(), from.layout.span())?;
        let meet = meet(&to, &read);
        if self.is_contiguous() && !meet {
            pack_to(other, transfer, self.dtype, &from.layout, &mut to, stream)?;
        } else {
            let dense = if meet || !from.is_contiguous() {
                pack_on_device(other, transfer, self.dtype, &from.layout, stream)?
            } else {
                read
            };
            spread_on_device(&dense, own, transfer, self.dtype, &self.layout, stream)?;
        }
        transfer.after(stream, ())
    }
}

impl<'a> Operands<'a> {
    /// Checks that all are on one device, of which the stream must be one, and of one dtype.
    fn check(&self) -> Result<&'a Transfer, Error> {
        let device = |tensor: &'a Tensor| match &tensor.memory {
            Memory::Device(memory) => Some(&memory.transfer),
            _ => None,
        };
        let mut devices = self.tensors.iter().map(|(_, tensor)| device(tensor));
        let Some(transfer) = devices.next().flatten() else {
            return Err(self.refuse("computes on devices; move operands there with `Tensor::to`"));
        };
        let id = transfer.device().id();
        if let Some(other) = devices.find(|other| other.is_none_or(|other| other.device().id() != id)) {
            let namesake = other.filter(|other| device_name(other.device()) == device_name(transfer.device()));
            let reason = namesake.map_or_else(
                || "operands must be on one device; move them with `Tensor::to`".to_owned(),
                |other| format!("one operand is on {}", DeviceMismatch::between(other.device().id(), id)),
            );
            return Err(self.refuse(reason));
        }
        self.same_dtype()?;
        transfer.check_device("stream", self.stream.device_id())?;
        Ok(transfer)
    }

    pub(super) fn same_dtype(&self) -> Result<(), Error> {
        let mut dtypes = self.tensors.iter().map(|(_, tensor)| tensor.dtype());
        let first = dtypes.next();
        if dtypes.all(|dtype| Some(dtype) == first) {
            return Ok(());
        }
        Err(self.refuse("operands must be of one dtype; convert them with `Tensor::cast`"))
    }

    pub(super) fn same_shape(&self) -> Result<(), Error> {
        let mut shapes = self.tensors.iter().map(|(_, tensor)| tensor.shape());
        let first = shapes.next();
        if shapes.all(|shape| Some(shape) == first) {
            return Ok(());
        }
        Err(self.refuse("operands must have one shape; repeat elements with `Tensor::broadcast` where that is meant"))
    }

    pub(super) fn refuse(&self, reason: impl Into<String>) -> Error {
        let info = |&(name, tensor): &(&'static str, &Tensor)| {
            format!("{name}: {} {:?} on {}", tensor.dtype(), tensor.shape(), tensor.place())
        };
        let operands = self.tensors.iter().map(info).collect();
        Error::Operands { operation: self.operation, reason: reason.into(), operands }
    }

    /// Enqueues a kernel that computes new memory from all operands, which become dense first.
    fn compute(
        &self,
        transfer: &Transfer,
        dtype: DType,
        shape: &[usize],
        launch: impl FnOnce(&Kernels, &[Operand<'_>], Target<'_>) -> Result<(), KernelError>,
    ) -> Result<Tensor, Error> {
        let layout = Layout::row_major(shape)?;
        let dense = self.tensors.iter().map(|(_, tensor)| Ok((tensor.dense(transfer, self.stream)?, tensor.dtype)));
        let dense = dense.collect::<Result<Vec<_>, Error>>()?;
        let operands: Vec<_> = dense.iter().map(|(bytes, dtype)| operand_of(bytes, *dtype)).collect();
        let mut to = transfer.alloc_elements(layout.len(), dtype, self.stream)?;
        launch(&transfer.allocator().kernels()?, &operands, target_of(&mut to, dtype))?;
        Tensor::on_device(to, transfer, dtype, layout)
    }

    /// The memory of the first operand, which is written: that of the stream's device, and each
    /// place of it once.
    fn written(&self) -> Result<&'a DeviceMemory, Error> {
        let Some(Memory::Device(own)) = self.tensors.first().map(|(_, tensor)| &tensor.memory) else {
            return Err(self.refuse("writes to devices alone, as host memory never changes; make another tensor"));
        };
        if !self.tensors.first().is_some_and(|(_, tensor)| tensor.layout.is_distinct()) {
            return Err(self.refuse("several elements of what is written lie at one place, or may"));
        }
        own.transfer.check_device("stream", self.stream.device_id())?;
        Ok(own)
    }
}

/// Whether two pieces of device memory have bytes in common.
fn meet(a: &Buffer<u8>, b: &Buffer<u8>) -> bool {
    let (from, to) = (a.ptr().0, b.ptr().0);
    Arc::ptr_eq(a.storage(), b.storage()) && from < to + b.bytes() && to < from + a.bytes()
}
