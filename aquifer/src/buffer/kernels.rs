//! Kernels as methods of buffers.

use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{Element, Kernels, Operand, Target};

use super::{Buffer, Handle};
use crate::error::Error;

impl<T: Element> Buffer<T> {
    /// Sets every element to `value`.
    ///
    /// # Errors
    /// As [`Kernels::fill`].
    #[track_caller]
    pub fn fill(&mut self, value: T, stream: &Stream) -> Result<(), Error> {
        Ok(self.memory()?.kernels()?.fill(stream, self, value)?)
    }

    /// Adds `alpha · x`, element by element; see [`Kernels::axpy`].
    ///
    /// # Errors
    /// As [`Kernels::axpy`].
    #[track_caller]
    pub fn axpy(&mut self, alpha: impl Into<f64>, x: &Buffer<T, impl Handle>, stream: &Stream) -> Result<(), Error> {
        Ok(self.memory()?.kernels()?.axpy(stream, alpha.into(), x, self)?)
    }

    /// Adds `other`, element by element; see [`Kernels::add`].
    ///
    /// # Errors
    /// As [`Kernels::add`].
    #[track_caller]
    pub fn add_assign(&mut self, other: &Buffer<T, impl Handle>, stream: &Stream) -> Result<(), Error> {
        let own = self.share();
        Ok(own.memory()?.kernels()?.add(stream, &own, other, self)?)
    }
}

impl<T: Element, H: Handle> Buffer<T, H> {
    /// The sum of all elements, as a buffer of one element; see [`Kernels::reduce_sum`].
    ///
    /// # Errors
    /// As [`Kernels::reduce_sum`], and when memory runs out.
    #[track_caller]
    pub fn sum(&self, stream: &Stream) -> Result<Buffer<T::Sum>, Error> {
        let memory = self.memory()?;
        let mut scratch = memory.alloc::<u64>(Kernels::SUM_SCRATCH_LEN, stream)?;
        let mut sum = memory.alloc(1, stream)?;
        memory.kernels()?.reduce_sum(stream, self, &mut scratch, &mut sum)?;
        Ok(sum)
    }

    /// Every element as another type; see [`Kernels::cast`].
    ///
    /// # Errors
    /// As [`Kernels::cast`], and when memory runs out.
    #[track_caller]
    pub fn cast<U: Element>(&self, stream: &Stream) -> Result<Buffer<U>, Error> {
        let memory = self.memory()?;
        let mut to = memory.alloc(self.len, stream)?;
        memory.kernels()?.cast(stream, self, &mut to)?;
        Ok(to)
    }

    /// The product of this matrix, of `m` rows of `k` elements, and `b`, of `k` rows of `n`, with
    /// `shape` `[m, k, n]`; see [`Kernels::matmul`].
    ///
    /// # Errors
    /// As [`Kernels::matmul`], and when memory runs out.
    #[track_caller]
    pub fn matmul(&self, b: &Buffer<T, impl Handle>, shape: [usize; 3], stream: &Stream) -> Result<Buffer<T>, Error> {
        let [m, _, n] = shape;
        let (len, size) = ((m as u64).saturating_mul(n as u64), size_of::<T>() as u64);
        let len = usize::try_from(len).map_err(|_| RequestError::LengthOverflow { len, size })?;
        let memory = self.memory()?;
        let mut to = memory.alloc(len, stream)?;
        memory.kernels()?.matmul(stream, self, b, &mut to, shape.map(|extent| extent as u64))?;
        Ok(to)
    }
}

impl<'a, T: Element, H: Handle> From<&'a Buffer<T, H>> for Operand<'a> {
    fn from(buffer: &'a Buffer<T, H>) -> Self {
        Operand::new(buffer.storage(), buffer.ptr(), buffer.bytes(), T::DTYPE)
    }
}

impl<'a, T: Element> From<&'a mut Buffer<T>> for Operand<'a> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Operand::from(&*buffer)
    }
}

impl<'a, T: Element> From<&'a mut Buffer<T>> for Target<'a> {
    fn from(buffer: &'a mut Buffer<T>) -> Self {
        Target::new(Operand::from(buffer))
    }
}
