//! Writing in place, which all tensors that share the memory see.
//!
//! Only memory of devices is written: there, ticks order reads and writes. Host memory is lent as
//! slices, and stays as it is.
//!
//! Elements that lie as the target's do are copied there directly. Others become dense first, in
//! memory of the target's device, from where the scatter kernel brings them to their places; so do
//! those that lie, or may lie, where the target is written.

use std::sync::Arc;

use aquifer_allocator::Buffer;
use aquifer_device::Stream;

use super::Tensor;
use super::memory::{DeviceMemory, Memory, Scalar};
use super::operations::Operands;
use super::pack::{fill_on_device, pack_on_device, pack_to, spread_on_device};
use crate::copy::copy_from_peer;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::layout::Layout;
use crate::pending::Pending;
use crate::runtime::Transfer;

impl Tensor {
    /// Enqueues setting every element to `value`, for all tensors that share the memory. Later work
    /// on any stream comes after it. The memory between the elements of a view stays as it is; that
    /// takes memory for as many elements until it is done.
    ///
    /// # Errors
    /// A tensor that is not on a device, of another dtype, or that repeats elements; those of
    /// [`aquifer_kernels::Kernels::fill`], and when memory runs out.
    #[track_caller]
    pub fn fill_shared<T: Scalar>(&mut self, value: T, stream: &Stream) -> Result<(), TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "fill_shared", tensors: &[("a", self)], stream };
        let own = operands.written()?;
        self.check_dtype(T::DTYPE)?;
        let dense = self.permute(&self.layout.by_falling_stride())?;
        if dense.is_contiguous() {
            let mut buffer = dense.device_buffer::<T>()?;
            return Ok(own.transfer.kernels()?.fill(stream, &mut buffer, value)?);
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
    /// use aquifer_allocator::{Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// use aquifer_kernels::DType;
    /// use aquifer_transfer::{Tensor, Transfer};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let transfer = Transfer::new(&Allocator::new(&device, Config::default())?)?;
    /// let stream = device.stream()?;
    ///
    /// let matrix = Tensor::zeros_in(&transfer, DType::F32, &[2, 3])?;
    /// let column = Tensor::from_vec(vec![1.0f32, 2.0], &[2])?; // on the host
    /// matrix.select(1, 1)?.assign_shared(&column, &stream)?.wait()?;
    /// assert_eq!(matrix.to_vec_blocking::<f32>()?, [0.0, 1.0, 0.0, 0.0, 2.0, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Tensors of different dtypes or shapes ([`Tensor::to_dtype`] and [`Tensor::broadcast`] make
    /// them fit), one to be written that is not on a device or repeats elements, a stream of
    /// another device or one that captures; and as [`Tensor::to`].
    #[track_caller]
    pub fn assign_shared(&mut self, from: &Tensor, stream: &Stream) -> Result<Pending<()>, TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "assign_shared", tensors: &[("to", self), ("from", from)], stream };
        let own = operands.written()?;
        operands.same_dtype()?;
        operands.same_shape()?;
        let transfer = own.transfer.on(stream)?;
        transfer.refuse_capture(stream)?;
        if self.is_empty() || self.tie() == from.tie() {
            return Ok(Pending::ready(transfer.shared(), ()));
        }
        // In which order elements are copied does not matter, so it is that of the target's memory.
        let order = self.layout.by_falling_stride();
        let (to, from) = (self.permute(&order)?, from.permute(&order)?);
        if let Some(copied) = to.assign_directly(own, &from, &transfer)? {
            return Ok(copied);
        }
        let place = (&own.transfer).into();
        let here = from.convey(&place, from.dtype(), Some(stream))?.enqueued_for(stream)?;
        let Memory::Device(arrived) = &here.memory else {
            return Err(TransferError::NotOnDevice { place: here.place().to_string() });
        };
        to.assign_on_device(own, &here, arrived, &transfer, stream)
    }

    /// The same elements in memory of the same device, arranged so that [`Tensor::assign_shared`]
    /// brings them to `to` without taking memory: this tensor, or one with the order of `to` where
    /// neither is dense in that order. Loads the kernels if they are needed then.
    pub(crate) fn arranged_for(&self, to: &Tensor, stream: &Stream) -> Result<Tensor, TransferError> {
        let order = to.layout.by_falling_stride();
        let (target, from) = (to.permute(&order)?, self.permute(&order)?);
        let Memory::Device(own) = &from.memory else {
            return Err(TransferError::NotOnDevice { place: self.place().to_string() });
        };
        if target.is_contiguous() && from.is_contiguous() {
            return Ok(self.clone());
        }
        own.transfer.kernels()?;
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
    pub(crate) fn check_assignable(&self) -> Result<(), TransferError> {
        let Memory::Device(own) = &self.memory else {
            return Err(TransferError::NotOnDevice { place: self.place().to_string() });
        };
        let stream = own.transfer.next_stream(Direction::OnDevice);
        own.transfer.refuse_capture(stream)?;
        Operands { operation: "assign_shared", tensors: &[("to", self)], stream }.written().map(drop)
    }

    /// Begins bringing elements of another place to this tensor's memory, if they go there as one
    /// piece. On the stream of `transfer`.
    fn assign_directly(
        &self,
        own: &DeviceMemory,
        from: &Tensor,
        transfer: &Transfer,
    ) -> Result<Option<Pending<()>>, TransferError> {
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
                Ok(Some(copy_from_peer(transfer, &other.transfer.on(&there)?, &dense, &mut to, None)?.map(|_route| ())))
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
    ) -> Result<Pending<()>, TransferError> {
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
        Ok(Pending::enqueued(transfer.shared(), transfer.covered_tick(stream), ()))
    }
}

/// Whether two pieces of device memory have bytes in common.
fn meet(a: &Buffer<u8>, b: &Buffer<u8>) -> bool {
    let (from, to) = (a.ptr().0, b.ptr().0);
    Arc::ptr_eq(a.storage(), b.storage()) && from < to + b.bytes() && to < from + a.bytes()
}

impl<'a> Operands<'a> {
    /// The memory of the first operand, which is written: that of the stream's device, and each
    /// place of it once.
    fn written(&self) -> Result<&'a DeviceMemory, TransferError> {
        let Some(Memory::Device(own)) = self.tensors.first().map(|(_, tensor)| &tensor.memory) else {
            return Err(self
                .refuse("writes to devices alone, as host memory never changes; make another tensor")
                .into());
        };
        if !self.tensors.first().is_some_and(|(_, tensor)| tensor.layout.is_distinct()) {
            return Err(self.refuse("several elements of what is written lie at one place, or may").into());
        }
        own.transfer.check_stream(self.stream)?;
        Ok(own)
    }
}
