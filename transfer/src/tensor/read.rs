//! Reading elements back on the host.

use super::memory::{Memory, Scalar};
use super::pack::pack_on_host;
use super::{Place, Tensor};
use crate::error::TransferError;
use crate::host_vec;
use aquifer_device::RequestError;

impl Tensor {
    /// The elements in row-major order. Waits on the host for the copy from a device, which is
    /// counted as a synchronisation, also where the device was quick.
    ///
    /// # Errors
    /// A tensor of another dtype, and as [`Tensor::to`].
    #[track_caller]
    pub fn to_vec_blocking<T: Scalar>(&self) -> Result<Vec<T>, TransferError> {
        let _place = self.called_here();
        self.check_dtype(T::DTYPE)?;
        let host = self.to(Place::Host)?.wait_counted()?;
        let len = host_vec::len_of(host.len() as u64, T::DTYPE.bytes())?;
        let mut elements = host_vec::zeroed::<T>(len)?;
        pack_on_host(host.memory.read()?, &host.layout, size_of::<T>(), bytemuck::cast_slice_mut(&mut elements));
        Ok(elements)
    }

    /// The element of a tensor that has one. Waits on the host, as [`Tensor::to_vec_blocking`]
    /// does: in a loop this keeps the device from working ahead.
    ///
    /// # Errors
    /// A tensor of another number of elements or another dtype, and as [`Tensor::to`].
    #[track_caller]
    pub fn item_blocking<T: Scalar>(&self) -> Result<T, TransferError> {
        let _place = self.called_here();
        self.check_dtype(T::DTYPE)?;
        // Before they are brought to the host, which may be many.
        let not_one = || TransferError::NotOneElement { shape: self.shape().to_vec() };
        if self.len() != 1 {
            return Err(not_one());
        }
        self.to_vec_blocking::<T>()?.pop().ok_or_else(not_one)
    }

    /// The bytes of a contiguous tensor in host memory.
    pub(crate) fn host_bytes(&self) -> Result<&[u8], TransferError> {
        if !self.is_contiguous() {
            return Err(self.not_contiguous());
        }
        let (first, len) = (
            host_vec::len_of(self.first() as u64, self.dtype.bytes())?,
            host_vec::len_of(self.len() as u64, self.dtype.bytes())?,
        );
        Ok(&self.memory.read()?[first * self.size()..(first + len) * self.size()])
    }

    /// The elements of a contiguous tensor in host memory, without a copy. Page-locked memory that
    /// a copy is still filling is waited for.
    ///
    /// # Errors
    /// A tensor on a device ([`Tensor::to_host`] brings it), of another dtype, or that is not
    /// contiguous.
    pub fn as_slice<T: Scalar>(&self) -> Result<&[T], TransferError> {
        self.check_dtype(T::DTYPE)?;
        if matches!(self.memory, Memory::Device(_)) {
            return Err(TransferError::NotOnHost { place: self.place().to_string() });
        }
        if !self.is_contiguous() {
            return Err(self.not_contiguous());
        }
        let first = host_vec::len_of(self.first() as u64, T::DTYPE.bytes())?;
        let elements: &[T] = bytemuck::try_cast_slice(self.memory.read()?).map_err(|_| {
            TransferError::Request(RequestError::Unsupported { what: "host memory that is aligned for its elements" })
        })?;
        Ok(&elements[first..first + host_vec::len_of(self.len() as u64, T::DTYPE.bytes())?])
    }
}
