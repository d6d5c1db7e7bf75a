//! Work of the caller's own on buffers: [`StreamAccess::with`].

use std::error::Error;
use std::fmt;
use std::marker::PhantomData;

use aquifer_device::{AccessKind, DevicePtr, Stream};

use super::{AccessGuard, Buffer, Storage};
use crate::error::AllocError;

/// A buffer that work will read or write, made by [`read()`] or [`write()`].
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    storage: &'a Storage,
    ptr: DevicePtr,
    bytes: u64,
    kind: AccessKind,
}

/// The address of a buffer, for as long as work may be enqueued on it.
#[derive(Debug)]
pub struct Bound<'a> {
    ptr: DevicePtr,
    bytes: u64,
    access: PhantomData<&'a ()>,
}

impl Bound<'_> {
    /// Its first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// Its size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Says that work reads `buffer`.
pub fn read<T>(buffer: &Buffer<T>) -> Access<'_> {
    access(buffer, AccessKind::Read)
}

/// Says that work writes `buffer`, or reads and writes it.
pub fn write<T>(buffer: &mut Buffer<T>) -> Access<'_> {
    access(buffer, AccessKind::Write)
}

fn access<T>(buffer: &Buffer<T>, kind: AccessKind) -> Access<'_> {
    Access { storage: buffer.storage(), ptr: buffer.ptr(), bytes: buffer.bytes(), kind }
}

/// Work of the caller's own on buffers.
pub trait StreamAccess {
    /// Calls `work` to enqueue work on the stream. It comes after everything that was enqueued on
    /// these buffers before, on any stream, and later uses come after it. They can be dropped when
    /// this returns.
    ///
    /// `work` gets the stream, to be given to anything that enqueues on it, and the addresses of
    /// the buffers in the order of `accesses`. It should only enqueue: other threads wait for it
    /// when they use the same buffers. All that it enqueues is noted, also when it fails or panics.
    ///
    /// ```
    /// use aquifer_allocator::{Allocator, Config, StreamAccess, read, write};
    /// use aquifer_device::Device;
    /// use aquifer_sim::{SimConfig, SimDriver};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let (memory, one, two) = (Allocator::new(&device, Config::default())?, device.stream()?, device.stream()?);
    /// let x = memory.alloc_zeros::<f32>(1000, &one)?;
    /// let mut y = memory.alloc::<f32>(1000, &one)?;
    /// two.with([read(&x), write(&mut y)], |stream, [x, y]| stream.copy(y.ptr(), x.ptr(), x.bytes()))?;
    /// drop(x); // its memory is not reused before the copy is done
    ///
    /// // Work of several steps says its error once.
    /// let z = memory.alloc_zeros::<f32>(1000, &one)?;
    /// two.with([read(&z), write(&mut y)], |stream, [z, y]| {
    ///     stream.fill(y.ptr(), 0, y.bytes())?;
    ///     stream.copy(y.ptr(), z.ptr(), z.bytes())?;
    ///     Ok::<_, aquifer_device::DeviceError>(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`WithError::Work`] with what `work` returns. [`WithError::Order`] if `work` was not called:
    /// a buffer of another device than the stream's, a thread that is within [`StreamAccess::with`]
    /// or an [`AccessGuard`] with one of them, an allocator that sleeps, a stream that captures and
    /// is not ordered after the buffers' last work, or a failing driver.
    fn with<const N: usize, R, E>(
        &self,
        accesses: [Access<'_>; N],
        work: impl FnOnce(&Stream, [Bound<'_>; N]) -> Result<R, E>,
    ) -> Result<R, WithError<E>>;
}

impl StreamAccess for Stream {
    fn with<const N: usize, R, E>(
        &self,
        accesses: [Access<'_>; N],
        work: impl FnOnce(&Stream, [Bound<'_>; N]) -> Result<R, E>,
    ) -> Result<R, WithError<E>> {
        let memory = accesses.map(|access| (access.storage, access.kind));
        let _access = AccessGuard::acquire(self, &memory).map_err(WithError::Order)?;
        let bound = accesses.map(|access| Bound { ptr: access.ptr, bytes: access.bytes, access: PhantomData });
        work(self, bound).map_err(WithError::Work)
    }
}

/// Why [`StreamAccess::with`] failed.
#[derive(Clone)]
pub enum WithError<E> {
    /// The stream could not be ordered after the buffers' earlier work. The caller's work was not
    /// called.
    Order(AllocError),
    /// The error of the caller's work.
    Work(E),
}

/// That of the error inside.
impl<E: fmt::Debug> fmt::Debug for WithError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WithError::Order(error) => error.fmt(f),
            WithError::Work(error) => error.fmt(f),
        }
    }
}

impl<E: fmt::Display> fmt::Display for WithError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WithError::Order(error) => error.fmt(f),
            WithError::Work(error) => error.fmt(f),
        }
    }
}

impl<E: Error> Error for WithError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            WithError::Order(error) => error.source(),
            WithError::Work(error) => error.source(),
        }
    }
}
