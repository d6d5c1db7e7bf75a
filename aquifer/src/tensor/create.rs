//! Making tensors of elements, and reading elements back on the host.

use aquifer_device::{RequestError, Stream};
use aquifer_kernels::{DType, Element};
use aquifer_transfer::internal::zeroed;
use aquifer_transfer::{Direction, Owned};

use super::Tensor;
use super::memory::{DeviceMemory, Memory, target_of};
use super::pack::pack_on_host;
use super::place::Place;
use crate::buffer::{Buffer, Handle};
use crate::error::Error;
use crate::layout::{Layout, other_length};
use crate::transfer::Transfer;

impl Tensor {
    /// A tensor of the elements of a slice, which are copied, in row-major order.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_slice<T: Element>(elements: &[T], shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::from_vec(elements.to_vec(), shape)
    }

    /// A tensor of the elements of a `Vec`, which it takes over, in row-major order.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_vec<T: Element>(elements: Vec<T>, shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::from_owner(elements, shape)
    }

    /// A tensor of the elements that some owner lends, such as a `Box<[T]>`, an `Arc<[T]>` or a
    /// memory map, which it takes over and must lend the same elements each time.
    ///
    /// # Errors
    /// A shape of another number of elements.
    pub fn from_owner<T: Element, S>(owner: S, shape: &[usize]) -> Result<Tensor, Error>
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
    pub fn scalar<T: Element>(value: T) -> Result<Tensor, Error> {
        Tensor::from_vec(vec![value], &[])
    }

    /// A tensor of device memory, which it shares, in row-major order. The tensor's first use comes
    /// after all work enqueued until now on the stream that the memory was allocated for, and on
    /// those that it was made ready for.
    ///
    /// # Errors
    /// An access guard of this thread with the memory, and a shape of another number of elements.
    pub fn from_buffer<T: Element>(buffer: &Buffer<T, impl Handle>, shape: &[usize]) -> Result<Tensor, Error> {
        let layout = Layout::row_major(shape)?;
        check_len(&layout, buffer.len())?;
        let bytes = buffer.reinterpret::<u8>();
        let bytes = bytes.ok_or(RequestError::Unsupported { what: "device memory of whole bytes" })?.share();
        buffer.storage().take_over()?;
        Tensor::on_device(bytes, &buffer.allocator().transfer()?, T::DTYPE, layout)
    }

    /// A tensor whose elements are undefined until they are written.
    ///
    /// # Errors
    /// When memory runs out, a shape that is too large, and errors of the driver.
    #[track_caller]
    pub fn empty(
        shape: &[usize],
        dtype: DType,
        place: impl TryInto<Place, Error: Into<Error>>,
    ) -> Result<Tensor, Error> {
        Tensor::written(Place::named(place)?, dtype, shape, |_| {}, |_, _, _| Ok(()))
    }

    /// A new tensor: `write` fills memory of the host, which pinned memory needs, and
    /// `enqueue` that of a device.
    #[track_caller]
    fn written(
        place: Place,
        dtype: DType,
        shape: &[usize],
        write: impl FnOnce(&mut [u8]),
        enqueue: impl FnOnce(&Transfer, &Stream, &mut Buffer<u8>) -> Result<(), Error>,
    ) -> Result<Tensor, Error> {
        let _place = place.called_here();
        let layout = Layout::row_major(shape)?;
        let memory = match place {
            Place::Device(transfer) => {
                let stream = transfer.next_stream(Direction::OnDevice).clone();
                let mut buffer = transfer.alloc_elements(layout.len(), dtype, &stream)?;
                enqueue(&transfer, &stream, &mut buffer)?;
                Memory::Device(DeviceMemory { buffer, transfer })
            }
            host => Memory::on_host(host.pool(), dtype, layout.len(), |bytes| {
                write(bytes);
                Ok(())
            })?,
        };
        Tensor::new(memory, dtype, layout)
    }

    /// A tensor of zeros. On a device they are enqueued to be written.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let zeros = Tensor::zeros(&[2, 3], DType::F32, (&memory, &stream))?;
    /// assert_eq!((zeros.shape(), zeros.to_vec::<f32>()?), (&[2, 3][..], vec![0.0; 6]));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    #[track_caller]
    pub fn zeros(
        shape: &[usize],
        dtype: DType,
        place: impl TryInto<Place, Error: Into<Error>>,
    ) -> Result<Tensor, Error> {
        let place = Place::named(place)?;
        let is_zero = !place.is_pinned();
        let write = |bytes: &mut [u8]| {
            if !is_zero {
                bytes.fill(0)
            }
        };
        Tensor::written(place, dtype, shape, write, |_, stream, buffer| buffer.zero(stream))
    }

    /// A tensor of which every element is `value`. On a device they are enqueued to be written.
    ///
    /// # Errors
    /// As [`Tensor::empty`], and those of [`aquifer_kernels::Kernels::fill`].
    #[track_caller]
    pub fn full<T: Element>(
        shape: &[usize],
        value: T,
        place: impl TryInto<Place, Error: Into<Error>>,
    ) -> Result<Tensor, Error> {
        let element = bytemuck::bytes_of(&value);
        let write =
            |bytes: &mut [u8]| bytes.chunks_exact_mut(size_of::<T>()).for_each(|to| to.copy_from_slice(element));
        Tensor::written(Place::named(place)?, T::DTYPE, shape, write, |transfer, stream, buffer| {
            Ok(transfer.allocator().kernels()?.fill(stream, target_of(buffer, T::DTYPE), value)?)
        })
    }

    /// The elements in row-major order. Waits on the host for the copy from a device, which is
    /// counted as a synchronisation, also where the device was quick.
    ///
    /// # Errors
    /// A tensor of another dtype, and as [`Tensor::to`].
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, Error> {
        let _place = self.called_here();
        self.check_dtype(T::DTYPE)?;
        let host = self.to(Place::Host)?.wait_counted()?;
        let mut elements = zeroed::<T>(host.len())?;
        pack_on_host(host.memory.read()?, &host.layout, size_of::<T>(), bytemuck::cast_slice_mut(&mut elements));
        Ok(elements)
    }

    /// The element of a tensor that has one. Waits on the host, as [`Tensor::to_vec`]
    /// does: in a loop this keeps the device from working ahead.
    ///
    /// # Errors
    /// A tensor of another number of elements or another dtype, and as [`Tensor::to`].
    #[track_caller]
    pub fn item<T: Element>(&self) -> Result<T, Error> {
        let _place = self.called_here();
        self.check_dtype(T::DTYPE)?;
        // Before they are brought to the host, which may be many.
        let not_one = || Error::NotOneElement { shape: self.shape().to_vec() };
        if self.len() != 1 {
            return Err(not_one());
        }
        self.to_vec::<T>()?.pop().ok_or_else(not_one)
    }

    /// The bytes of a contiguous tensor in host memory.
    pub(crate) fn host_bytes(&self) -> Result<&[u8], Error> {
        if !self.is_contiguous() {
            return Err(self.not_contiguous());
        }
        Ok(&self.memory.read()?[self.byte_range(self.first(), self.len())])
    }

    /// The elements of a contiguous tensor in host memory, without a copy. Pinned memory that
    /// a copy is still filling is waited for.
    ///
    /// # Errors
    /// A tensor on a device ([`Tensor::to_host`] brings it), of another dtype, or that is not
    /// contiguous.
    pub fn as_slice<T: Element>(&self) -> Result<&[T], Error> {
        self.check_dtype(T::DTYPE)?;
        if matches!(self.memory, Memory::Device(_)) {
            return Err(Error::NotOnHost { place: self.place().to_string() });
        }
        let what = "host memory that is aligned for its elements";
        Ok(bytemuck::try_cast_slice(self.host_bytes()?).map_err(|_| RequestError::Unsupported { what })?)
    }
}

fn check_len(layout: &Layout, has: usize) -> Result<(), Error> {
    if layout.len() == has {
        return Ok(());
    }
    Err(other_length(&[has], layout.shape()).into())
}
