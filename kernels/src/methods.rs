//! Kernels as methods of buffers.

use aquifer_allocator::{Allocator, Buffer};
use aquifer_device::{RequestError, Stream};

use crate::dtype::Element;
use crate::error::KernelError;
use crate::kernels::Kernels;

impl Kernels {
    /// The kernels that the methods of the allocator's buffers use ([`BufferKernels`]), loaded at
    /// the first call. They live as long as the allocator is open.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub fn of(allocator: &Allocator) -> Result<Kernels, KernelError> {
        let load = || Kernels::load(allocator.device());
        Ok(Kernels::clone(&*aquifer_allocator::internal::service(allocator, load)?))
    }
}

/// The kernels, as methods of [`Buffer`] and its views. Each enqueues on `stream` and returns; see
/// [`Kernels`].
///
/// The first call on an allocator loads the kernels ([`Kernels::load`]), which fails while a stream
/// captures. Results are new buffers of the same allocator.
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::Device;
/// use aquifer_sim::{SimConfig, SimDriver};
/// use aquifer_kernels::BufferKernels as _;
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (memory, stream) = (Allocator::new(&device, Config::default())?, device.stream()?);
/// let mut x = memory.alloc::<f32>(1000, &stream)?;
/// x.fill(2.0, &stream)?;
/// let mut y = memory.alloc_zeros::<f32>(1000, &stream)?;
/// y.axpy(0.5, &x, &stream)?;
/// let sum = y.sum(&stream)?;
/// let mut bytes = [0; 4];
/// stream.download_blocking(&mut bytes, sum.ptr())?;
/// assert_eq!(f32::from_le_bytes(bytes), 1000.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait BufferKernels<T: Element> {
    /// Sets every element to `value`.
    ///
    /// # Errors
    /// As [`Kernels::fill`].
    fn fill(&mut self, value: T, stream: &Stream) -> Result<(), KernelError>;

    /// Adds `alpha · x`, element by element; see [`Kernels::axpy`].
    ///
    /// # Errors
    /// As [`Kernels::axpy`].
    fn axpy(&mut self, alpha: impl Into<f64>, x: &Buffer<T>, stream: &Stream) -> Result<(), KernelError>;

    /// Adds `other`, element by element; see [`Kernels::add`].
    ///
    /// # Errors
    /// As [`Kernels::add`].
    fn add_assign(&mut self, other: &Buffer<T>, stream: &Stream) -> Result<(), KernelError>;

    /// The sum of all elements, as a buffer of one element; see [`Kernels::reduce_sum`].
    ///
    /// # Errors
    /// As [`Kernels::reduce_sum`], and when memory runs out.
    fn sum(&self, stream: &Stream) -> Result<Buffer<T::Sum>, KernelError>;

    /// Every element as another type; see [`Kernels::cast`].
    ///
    /// # Errors
    /// As [`Kernels::cast`], and when memory runs out.
    fn cast<U: Element>(&self, stream: &Stream) -> Result<Buffer<U>, KernelError>;

    /// The product of this matrix, of `m` rows of `k` elements, and `b`, of `k` rows of `n`; see
    /// [`Kernels::matmul`].
    ///
    /// # Errors
    /// As [`Kernels::matmul`], and when memory runs out.
    fn matmul(&self, b: &Buffer<T>, shape: [usize; 3], stream: &Stream) -> Result<Buffer<T>, KernelError>;

    /// The transpose of this matrix of `rows` rows; see [`Kernels::transpose`].
    ///
    /// # Errors
    /// As [`Kernels::transpose`], and when memory runs out.
    fn transpose(&self, rows: usize, columns: usize, stream: &Stream) -> Result<Buffer<T>, KernelError>;
}

impl<T: Element> BufferKernels<T> for Buffer<T> {
    #[track_caller]
    fn fill(&mut self, value: T, stream: &Stream) -> Result<(), KernelError> {
        Kernels::of(self.allocator())?.fill(stream, self, value)
    }

    #[track_caller]
    fn axpy(&mut self, alpha: impl Into<f64>, x: &Buffer<T>, stream: &Stream) -> Result<(), KernelError> {
        Kernels::of(self.allocator())?.axpy(stream, alpha.into(), x, self)
    }

    #[track_caller]
    fn add_assign(&mut self, other: &Buffer<T>, stream: &Stream) -> Result<(), KernelError> {
        let own = self.share();
        Kernels::of(self.allocator())?.add(stream, &own, other, self)
    }

    #[track_caller]
    fn sum(&self, stream: &Stream) -> Result<Buffer<T::Sum>, KernelError> {
        let mut scratch = self.allocator().alloc(Kernels::SUM_SCRATCH_LEN, stream)?;
        let mut sum = self.allocator().alloc(1, stream)?;
        Kernels::of(self.allocator())?.reduce_sum(stream, self, &mut scratch, &mut sum)?;
        Ok(sum)
    }

    #[track_caller]
    fn cast<U: Element>(&self, stream: &Stream) -> Result<Buffer<U>, KernelError> {
        let mut to = self.allocator().alloc(self.len(), stream)?;
        Kernels::of(self.allocator())?.cast(stream, self, &mut to)?;
        Ok(to)
    }

    #[track_caller]
    fn matmul(&self, b: &Buffer<T>, shape: [usize; 3], stream: &Stream) -> Result<Buffer<T>, KernelError> {
        let [m, _, n] = shape;
        let (len, size) = ((m as u64).saturating_mul(n as u64), size_of::<T>() as u64);
        let len = usize::try_from(len).map_err(|_| RequestError::LengthOverflow { len, size })?;
        let mut to = self.allocator().alloc(len, stream)?;
        let shape = shape.map(|extent| extent as u64);
        Kernels::of(self.allocator())?.matmul(stream, self, b, &mut to, shape)?;
        Ok(to)
    }

    #[track_caller]
    fn transpose(&self, rows: usize, columns: usize, stream: &Stream) -> Result<Buffer<T>, KernelError> {
        let mut to = self.like(stream)?;
        Kernels::of(self.allocator())?.transpose(stream, self, &mut to, rows as u64, columns as u64)?;
        Ok(to)
    }
}
