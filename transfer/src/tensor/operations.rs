//! Operations of the kernels on tensors.
//!
//! Operands must be on one device and of one dtype, and their shapes must fit as they are: nothing
//! is moved, converted or repeated unless the caller does it ([`Tensor::to`], [`Tensor::to_dtype`],
//! [`Tensor::broadcast`]). Errors name every operand. Results are new memory on the operands'
//! device, allocated for the stream that computes them. Operands that are not contiguous are made
//! so first, on the device.

use aquifer_allocator::Buffer;
use aquifer_device::{DeviceMismatch, Stream};
use aquifer_kernels::{DType, Kernels, Operand, Target};

use super::create::bytes_of;
use super::memory::Memory;
use super::pack::pack_on_device;
use super::place::device_name;
use super::{OperandInfo, OperandsError, Tensor};
use crate::error::TransferError;
use crate::layout::Layout;
use crate::runtime::Transfer;

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
    pub fn add(&self, other: &Tensor, stream: &Stream) -> Result<Tensor, TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "add", tensors: &[("a", self), ("b", other)], stream };
        let transfer = operands.check()?;
        operands.same_shape()?;
        let (a, b) = (self.dense(transfer, stream)?, other.dense(transfer, stream)?);
        let mut to = operands.result(transfer, self.dtype, self.shape())?;
        let dtype = self.dtype;
        transfer.kernels()?.add(
            stream,
            Operand::of_bytes(&a, dtype),
            Operand::of_bytes(&b, dtype),
            Target::of_bytes(&mut to, dtype),
        )?;
        of_result(transfer, to, dtype, self.shape())
    }

    /// Enqueues `a · x` added to this tensor, as a new one. Floats only; rounded as
    /// [`Kernels::axpy`] does.
    ///
    /// # Errors
    /// Operands in different places, not on a device, of different dtypes or shapes; and those of
    /// [`Kernels::axpy`].
    #[track_caller]
    pub fn add_scaled(&self, a: f64, x: &Tensor, stream: &Stream) -> Result<Tensor, TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "add_scaled", tensors: &[("y", self), ("x", x)], stream };
        let transfer = operands.check()?;
        operands.same_shape()?;
        let (y, x) = (self.dense(transfer, stream)?, x.dense(transfer, stream)?);
        let mut to = operands.result(transfer, self.dtype, self.shape())?;
        transfer.on(stream)?.fill_from(&y, &mut to)?;
        transfer.kernels()?.axpy(
            stream,
            a,
            Operand::of_bytes(&x, self.dtype),
            Target::of_bytes(&mut to, self.dtype),
        )?;
        of_result(transfer, to, self.dtype, self.shape())
    }

    /// Enqueues the matrix product: `[m, k]` by `[k, n]` gives `[m, n]`. Dtypes and rounding are
    /// those of [`Kernels::matmul`].
    ///
    /// # Errors
    /// Operands in different places, not on a device, of different dtypes, or of shapes that do not
    /// fit; and those of [`Kernels::matmul`].
    #[track_caller]
    pub fn matmul(&self, other: &Tensor, stream: &Stream) -> Result<Tensor, TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "matmul", tensors: &[("a", self), ("b", other)], stream };
        let transfer = operands.check()?;
        let (&[m, k], &[rows, n]) = (self.shape(), other.shape()) else {
            return Err(operands.refuse("needs two matrices").into());
        };
        if k != rows {
            return Err(operands.refuse(format!("a has {k} columns and b {rows} rows, which must be as many")).into());
        }
        let (a, b) = (self.dense(transfer, stream)?, other.dense(transfer, stream)?);
        let mut to = operands.result(transfer, self.dtype, &[m, n])?;
        let dtype = self.dtype;
        transfer.kernels()?.matmul(
            stream,
            Operand::of_bytes(&a, dtype),
            Operand::of_bytes(&b, dtype),
            Target::of_bytes(&mut to, dtype),
            [m, k, n].map(|extent| extent as u64),
        )?;
        of_result(transfer, to, dtype, &[m, n])
    }

    /// Enqueues the sum of all elements, as a scalar tensor: `f32` for floats up to that, `f64`,
    /// `i64` or `u64`, as [`Kernels::reduce_sum`] has it. Repeated elements count as often.
    ///
    /// # Errors
    /// An operand that is not on a device, and those of [`Kernels::reduce_sum`].
    #[track_caller]
    pub fn sum(&self, stream: &Stream) -> Result<Tensor, TransferError> {
        let _place = self.called_here();
        let operands = Operands { operation: "sum", tensors: &[("a", self)], stream };
        let transfer = operands.check()?;
        let from = self.dense(transfer, stream)?;
        let dtype = self.dtype.of_sum();
        let mut scratch: Buffer<u64> = transfer.allocator().alloc(Kernels::SUM_SCRATCH_LEN, stream)?;
        let mut to = operands.result(transfer, dtype, &[])?;
        transfer.kernels()?.reduce_sum(
            stream,
            Operand::of_bytes(&from, self.dtype),
            &mut scratch,
            Target::of_bytes(&mut to, dtype),
        )?;
        of_result(transfer, to, dtype, &[])
    }

    /// The elements, contiguous: shared where they are, else collected in new memory.
    pub(super) fn dense(&self, transfer: &Transfer, stream: &Stream) -> Result<Buffer<u8>, TransferError> {
        match &self.memory {
            Memory::Device(memory) if self.is_contiguous() => memory.elements(self.dtype, self.first(), self.len()),
            Memory::Device(memory) => pack_on_device(memory, transfer, self.dtype, &self.layout, stream),
            _ => Err(TransferError::NotOnDevice { place: self.place().to_string() }),
        }
    }
}

impl<'a> Operands<'a> {
    /// Checks that all are on one device, of which the stream must be one, and of one dtype.
    fn check(&self) -> Result<&'a Transfer, TransferError> {
        let device = |tensor: &'a Tensor| match &tensor.memory {
            Memory::Device(memory) => Some(&memory.transfer),
            _ => None,
        };
        let mut devices = self.tensors.iter().map(|(_, tensor)| device(tensor));
        let Some(transfer) = devices.next().flatten() else {
            return Err(self.refuse("computes on devices; move operands there with `Tensor::to`").into());
        };
        let id = transfer.device().id();
        if let Some(other) = devices.find(|other| other.is_none_or(|other| other.device().id() != id)) {
            let namesake = other.filter(|other| device_name(other.device()) == device_name(transfer.device()));
            let reason = namesake.map_or_else(
                || "operands must be on one device; move them with `Tensor::to`".to_owned(),
                |other| format!("one operand is on {}", DeviceMismatch::between(other.device().id(), id)),
            );
            return Err(self.refuse(reason).into());
        }
        self.same_dtype()?;
        transfer.check_stream(self.stream)?;
        Ok(transfer)
    }

    pub(super) fn same_dtype(&self) -> Result<(), TransferError> {
        let mut dtypes = self.tensors.iter().map(|(_, tensor)| tensor.dtype());
        let first = dtypes.next();
        if dtypes.all(|dtype| Some(dtype) == first) {
            return Ok(());
        }
        Err(self.refuse("operands must be of one dtype; convert them with `Tensor::to_dtype`").into())
    }

    pub(super) fn same_shape(&self) -> Result<(), TransferError> {
        let mut shapes = self.tensors.iter().map(|(_, tensor)| tensor.shape());
        let first = shapes.next();
        if shapes.all(|shape| Some(shape) == first) {
            return Ok(());
        }
        Err(self
            .refuse("operands must have one shape; repeat elements with `Tensor::broadcast` where that is meant")
            .into())
    }

    pub(super) fn refuse(&self, reason: impl Into<String>) -> Box<OperandsError> {
        let info = |&(name, tensor): &(&'static str, &Tensor)| {
            let (place, shape) = (tensor.place().to_string(), tensor.shape().to_vec());
            OperandInfo { name, place, dtype: tensor.dtype(), shape }
        };
        let operands = self.tensors.iter().map(info).collect();
        Box::new(OperandsError { operation: self.operation, reason: reason.into(), operands })
    }

    /// Memory for a result.
    fn result(&self, transfer: &Transfer, dtype: DType, shape: &[usize]) -> Result<Buffer<u8>, TransferError> {
        transfer.alloc_bytes(bytes_of(&Layout::row_major(shape)?, dtype)?, self.stream)
    }
}

fn of_result(transfer: &Transfer, buffer: Buffer<u8>, dtype: DType, shape: &[usize]) -> Result<Tensor, TransferError> {
    Tensor::on_device(buffer, transfer, dtype, Layout::row_major(shape)?)
}
