//! Making tensors.

use aquifer_allocator::{AccessGuard, Allocator, Buffer};
use aquifer_device::{AccessKind, RequestError, Stream};
use aquifer_kernels::{DType, Target};

use super::Tensor;
use super::memory::{DeviceMemory, Memory, PinnedHost, Scalar, by_dtype};
use super::place::Place;
use crate::copy::Owned;
use crate::counters::Direction;
use crate::error::TransferError;
use crate::host_vec;
use crate::layout::{Layout, LayoutError};
use crate::runtime::Transfer;

impl Tensor {
    /// A tensor of the elements of a slice, which are copied, in row-major order.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_slice<T: Scalar>(elements: &[T], shape: &[usize]) -> Result<Tensor, TransferError> {
        Tensor::from_vec(elements.to_vec(), shape)
    }

    /// A tensor of the elements of a `Vec`, which it takes over, in row-major order.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_vec<T: Scalar>(elements: Vec<T>, shape: &[usize]) -> Result<Tensor, TransferError> {
        Tensor::from_owner(elements, shape)
    }

    /// A tensor of the elements that some owner lends, such as a `Box<[T]>`, an `Arc<[T]>` or a
    /// memory map, which it takes over and must lend the same elements each time.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_owner<T: Scalar, S>(owner: S, shape: &[usize]) -> Result<Tensor, TransferError>
    where
        S: AsRef<[T]> + Send + Sync + 'static,
    {
        let layout = Layout::row_major(shape)?;
        let memory = Owned::new::<T, S>(owner);
        check_len(&layout, memory.len() / size_of::<T>())?;
        Tensor::new(Memory::Host(memory), T::DTYPE, layout)
    }

    /// A tensor of one element and no dimension.
    ///
    /// # Errors
    /// None that is known; as [`Tensor::from_vec`].
    pub fn scalar<T: Scalar>(value: T) -> Result<Tensor, TransferError> {
        Tensor::from_vec(vec![value], &[])
    }

    /// A tensor of device memory, which it shares, in row-major order. The tensor's first use comes
    /// after all work enqueued until now on the stream that the memory was allocated for, and on
    /// those that it was made ready for.
    ///
    /// # Errors
    /// An access guard of this thread with the memory, a shape of another number of elements, and
    /// memory of another device than the runtime's.
    pub fn from_buffer<T: Scalar>(
        buffer: &Buffer<T>,
        shape: &[usize],
        transfer: &Transfer,
    ) -> Result<Tensor, TransferError> {
        transfer.check_device("buffer", buffer.storage().device_id())?;
        let layout = Layout::row_major(shape)?;
        check_len(&layout, buffer.len())?;
        let bytes = buffer.reinterpret::<u8>();
        let bytes = bytes.ok_or(RequestError::Unsupported { what: "device memory of whole bytes" })?.share();
        buffer.storage().take_over()?;
        Tensor::on_device(bytes, transfer, T::DTYPE, layout)
    }

    /// A tensor whose elements are undefined until they are written.
    ///
    /// # Errors
    /// When memory runs out, a shape that is too large, and errors of the driver.
    #[track_caller]
    pub fn empty(
        place: impl TryInto<Place, Error: Into<TransferError>>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Tensor, TransferError> {
        let place = Place::named(place)?;
        let _place = place.called_here();
        let layout = Layout::row_major(shape)?;
        let bytes = bytes_of(&layout, dtype)?;
        let memory = match place {
            Place::Host => Memory::Host(zeroed_host(dtype, layout.len())?),
            Place::Pinned(pool) => {
                let buffer = pool.alloc::<u8>(host_bytes(&layout, dtype)?)?;
                Memory::Pinned(PinnedHost { buffer: buffer.into(), pool })
            }
            Place::Device(transfer) => {
                let stream = transfer.next_stream(Direction::OnDevice).clone();
                Memory::Device(DeviceMemory { buffer: transfer.alloc_bytes(bytes, &stream)?, transfer })
            }
        };
        Tensor::new(memory, dtype, layout)
    }

    /// A tensor of zeros in an allocator's memory, written on `stream`.
    ///
    /// ```
    /// use aquifer_allocator::DeviceAllocator as _;
    /// use aquifer_device::Device;
    /// use aquifer_transfer::Tensor;
    /// let device = Device::simulated("24GiB")?;
    /// let (memory, stream) = (device.allocator()?, device.stream()?);
    /// let zeros = Tensor::zeros::<f32>(&[2, 3], &memory, &stream)?;
    /// assert_eq!((zeros.shape(), zeros.to_vec_blocking::<f32>()?), (&[2, 3][..], vec![0.0; 6]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::empty`], and a stream of another device.
    #[track_caller]
    pub fn zeros<T: Scalar>(shape: &[usize], memory: &Allocator, stream: &Stream) -> Result<Tensor, TransferError> {
        let transfer = Transfer::of(memory)?;
        let layout = Layout::row_major(shape)?;
        Tensor::from_buffer(&memory.alloc_zeros::<T>(layout.len(), stream)?, shape, &transfer)
    }

    /// A tensor of zeros. On a device they are enqueued to be written.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn zeros_in(
        place: impl TryInto<Place, Error: Into<TransferError>>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Tensor, TransferError> {
        let place = Place::named(place)?;
        let _place = place.called_here();
        match place {
            Place::Pinned(pool) => {
                let layout = Layout::row_major(shape)?;
                let buffer = pool.alloc_zeroed::<u8>(host_bytes(&layout, dtype)?)?;
                Tensor::new(Memory::Pinned(PinnedHost { buffer: buffer.into(), pool }), dtype, layout)
            }
            place => {
                let tensor = Tensor::empty(place, dtype, shape)?;
                if let Memory::Device(memory) = &tensor.memory
                    && !tensor.is_empty()
                {
                    let stream = memory.transfer.next_stream(Direction::OnDevice);
                    let _access = AccessGuard::acquire(stream, &[(memory.buffer.storage(), AccessKind::Write)])?;
                    stream.fill(memory.buffer.ptr(), 0, memory.buffer.bytes())?;
                }
                Ok(tensor)
            }
        }
    }

    /// A tensor of which every element is `value`. On a device they are enqueued to be written.
    ///
    /// # Errors
    /// As [`Tensor::empty`], and those of [`aquifer_kernels::Kernels::fill`].
    #[track_caller]
    pub fn full<T: Scalar>(
        place: impl TryInto<Place, Error: Into<TransferError>>,
        shape: &[usize],
        value: T,
    ) -> Result<Tensor, TransferError> {
        let place = Place::named(place)?;
        let _place = place.called_here();
        let layout = Layout::row_major(shape)?;
        let memory = match place {
            Place::Host => {
                let element = bytemuck::bytes_of(&value);
                Memory::Host(filled_host(T::DTYPE, layout.len(), |bytes| {
                    bytes.chunks_exact_mut(size_of::<T>()).for_each(|to| to.copy_from_slice(element));
                    Ok(())
                })?)
            }
            Place::Pinned(pool) => {
                let mut buffer = pool.alloc::<u8>(host_bytes(&layout, T::DTYPE)?)?;
                let element = bytemuck::bytes_of(&value);
                buffer.write()?.chunks_exact_mut(size_of::<T>()).for_each(|to| to.copy_from_slice(element));
                Memory::Pinned(PinnedHost { buffer: buffer.into(), pool })
            }
            Place::Device(transfer) => {
                let stream = transfer.next_stream(Direction::OnDevice).clone();
                let mut buffer: Buffer<u8> = transfer.alloc_bytes(bytes_of(&layout, T::DTYPE)?, &stream)?;
                transfer.kernels()?.fill(&stream, Target::of_bytes(&mut buffer, T::DTYPE), value)?;
                Memory::Device(DeviceMemory { buffer, transfer })
            }
        };
        Tensor::new(memory, T::DTYPE, layout)
    }

    /// [`Tensor::empty`] in the place, with the dtype and shape of this one.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn empty_like(&self) -> Result<Tensor, TransferError> {
        Tensor::empty(self.place(), self.dtype, self.shape())
    }

    /// [`Tensor::zeros_in`] in the place, with the dtype and shape of this one.
    ///
    /// # Errors
    /// As [`Tensor::zeros_in`].
    #[track_caller]
    pub fn zeros_like(&self) -> Result<Tensor, TransferError> {
        Tensor::zeros_in(self.place(), self.dtype, self.shape())
    }

    /// A tensor of ones in the place, with the dtype and shape of this one.
    ///
    /// # Errors
    /// As [`Tensor::full`].
    #[track_caller]
    pub fn ones_like(&self) -> Result<Tensor, TransferError> {
        by_dtype!(self.dtype, T => {
            let mut value = [0; size_of::<T>()];
            // Every dtype holds a one exactly.
            aquifer_kernels::convert_host(&[1], DType::U8, &mut value, self.dtype)?;
            Tensor::full(self.place(), self.shape(), bytemuck::pod_read_unaligned::<T>(&value))
        })
    }

    /// [`Tensor::full`] in the place and with the shape of this one.
    ///
    /// # Errors
    /// A value of another dtype than this one's, and as [`Tensor::full`].
    #[track_caller]
    pub fn full_like<T: Scalar>(&self, value: T) -> Result<Tensor, TransferError> {
        self.check_dtype(T::DTYPE)?;
        Tensor::full(self.place(), self.shape(), value)
    }
}

fn check_len(layout: &Layout, has: usize) -> Result<(), TransferError> {
    if layout.len() == has {
        return Ok(());
    }
    Err(LayoutError::OtherLength { from: vec![has], to: layout.shape().to_vec() }.into())
}

/// Size of a layout's elements in bytes.
pub(super) fn bytes_of(layout: &Layout, dtype: DType) -> Result<u64, TransferError> {
    let (len, size) = (layout.len() as u64, dtype.bytes());
    len.checked_mul(size).ok_or(TransferError::Request(RequestError::LengthOverflow { len, size }))
}

/// As [`bytes_of`], on the host.
pub(super) fn host_bytes(layout: &Layout, dtype: DType) -> Result<usize, TransferError> {
    let bytes = usize::try_from(bytes_of(layout, dtype)?).ok().filter(|&bytes| isize::try_from(bytes).is_ok());
    bytes.ok_or(TransferError::Request(RequestError::LengthOverflow { len: layout.len() as u64, size: dtype.bytes() }))
}

fn zeroed_host(dtype: DType, len: usize) -> Result<Owned, TransferError> {
    filled_host(dtype, len, |_| Ok(()))
}

/// Host memory for elements, written by `fill`.
pub(crate) fn filled_host(
    dtype: DType,
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> Result<(), TransferError>,
) -> Result<Owned, TransferError> {
    let len = host_vec::len_of(len as u64, dtype.bytes())?;
    macro_rules! by_size {
        ($type:ty) => {{
            let mut elements = host_vec::zeroed::<$type>(len)?;
            fill(bytemuck::cast_slice_mut(&mut elements))?;
            Ok(Owned::new::<$type, _>(elements))
        }};
    }
    match dtype.bytes() {
        1 => by_size!(u8),
        2 => by_size!(u16),
        4 => by_size!(u32),
        _ => by_size!(u64),
    }
}
