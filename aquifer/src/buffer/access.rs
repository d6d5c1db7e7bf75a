//! Work of the caller's own on buffers: [`with`].

use std::error::Error;
use std::fmt;
use std::sync::Arc;

use aquifer_allocator::{AccessGuard, AllocError, Storage};
use aquifer_device::{AccessKind, AccessRange, DevicePtr, Stream};

use super::{Buffer, Handle};

/// A buffer that work will read or write, made by [`read()`] or [`write()`].
#[derive(Clone, Copy, Debug)]
pub struct Access<'a> {
    storage: &'a Arc<Storage>,
    ptr: DevicePtr,
    bytes: u64,
    kind: AccessKind,
}

impl<'a> Access<'a> {
    fn new<T>(buffer: &'a Buffer<T, impl Handle>, kind: AccessKind) -> Access<'a> {
        Access { storage: buffer.storage(), ptr: buffer.ptr(), bytes: buffer.bytes(), kind }
    }

    /// The first address; null for zero bytes.
    pub fn ptr(&self) -> DevicePtr {
        self.ptr
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The memory as a launch of a kernel declares it ([`Launch::accesses`]).
    ///
    /// [`Launch::accesses`]: aquifer_device::Launch::accesses
    pub fn range(&self) -> AccessRange {
        AccessRange { ptr: self.ptr, bytes: self.bytes, kind: self.kind }
    }
}

/// Says that work reads `buffer`.
pub fn read<T, H: Handle>(buffer: &Buffer<T, H>) -> Access<'_> {
    Access::new(buffer, AccessKind::Read)
}

/// Says that work writes `buffer`, or reads and writes it.
pub fn write<T>(buffer: &mut Buffer<T>) -> Access<'_> {
    Access::new(buffer, AccessKind::Write)
}

/// Calls `work` to enqueue work on `stream`. It comes after everything that was enqueued on these
/// buffers before, on any stream, and later uses come after it. They can be dropped when this
/// returns.
///
/// `accesses` is an array, a slice or a `Vec`. `work` gets the stream, to be given to anything that
/// enqueues on it, and the accesses, which have the addresses. It should only enqueue: other
/// threads wait for it when they use the same buffers. All that it enqueues is noted, also when it
/// fails or panics.
///
/// ```
/// use aquifer::prelude::*;
/// # use aquifer::device::DeviceError;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
/// let x = memory.alloc_zeros::<f32>(1000, &one)?;
/// let mut y = memory.alloc::<f32>(1000, &one)?;
/// with(&two, [read(&x), write(&mut y)], |stream, [x, y]| stream.copy(y.ptr(), x.ptr(), x.bytes()))?;
/// drop(x); // its memory is not reused before the copy is done
///
/// // As many as there are, and work of several steps, which says its error once.
/// let more = [memory.alloc_zeros::<u8>(10, &one)?, memory.alloc_zeros::<u8>(20, &one)?];
/// let reads: Vec<_> = more.iter().map(read).collect();
/// let mut sum = [0; 30];
/// with(&two, reads, |stream, reads| {
///     stream.download_blocking(&mut sum[..10], reads[0].ptr())?;
///     stream.download_blocking(&mut sum[10..], reads[1].ptr())?;
///     Ok::<_, DeviceError>(())
/// })?;
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// [`WithError::Work`] with what `work` returns. [`WithError::Order`] if `work` was not called: a
/// buffer of another device than the stream's, a thread that is within [`with`] or an
/// [`AccessGuard`] with one of them, an allocator that sleeps, a stream that captures and is not
/// ordered after the buffers' last work, or a failing driver.
pub fn with<'a, A: AsRef<[Access<'a>]>, R, E>(
    stream: &Stream,
    accesses: A,
    work: impl FnOnce(&Stream, A) -> Result<R, E>,
) -> Result<R, WithError<E>> {
    let mut guard = AccessGuard::none();
    let memory = accesses.as_ref().iter().map(|access| (access.storage, access.kind));
    guard.take(stream, memory).map_err(WithError::Order)?;
    work(stream, accesses).map_err(WithError::Work)
}

/// Why [`with`] failed.
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

impl<E: Into<crate::error::Error>> From<WithError<E>> for crate::error::Error {
    fn from(error: WithError<E>) -> crate::error::Error {
        match error {
            WithError::Work(error) => error.into(),
            WithError::Order(error) => error.into(),
        }
    }
}
