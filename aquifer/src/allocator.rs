//! The memory of a device: the allocator, with the pinned memory, transfers and kernels that
//! its buffers use.

use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::{Arc, OnceLock, Weak};

use aquifer_allocator::{AllocError, Allocation, Config, PrivatePool};
use aquifer_device::fork::{self, Mutex};
use aquifer_device::{Device, DevicePtr, RequestError, Stream, Tick};
use aquifer_kernels::Kernels;
use aquifer_transfer::{Runtime, TransferConfig};
use bytemuck::Pod;

use crate::buffer::Buffer;
use crate::error::Error;
use crate::params::{Checkpoint, Load, ParamSet};
use crate::pinned::{PinnedBuffer, PinnedPool};
use crate::prefetch::{Batch, Prefetcher};
use crate::transfer::Transfer;

/// The batches that [`Allocator::prefetch`] keeps ahead of their use.
const AHEAD: usize = 2;

/// The memory of one device. It allocates [`Buffer`]s and pinned memory, and loads models.
/// Cloning gives another handle of the same allocator.
///
/// It derefs to the allocator below, which has statistics, limits, private pools, sleep, and
/// allocation without types.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let x = memory.from_slice(&[1.0_f32, 2.0, 3.0], &stream)?;
/// assert_eq!(x.sum(&stream)?.item(&stream)?, 6.0);
/// assert_eq!(memory.memory_allocated(), 512);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone)]
pub struct Allocator {
    // Dropped before the memory below: see `services_of`.
    services: Arc<Services>,
    memory: aquifer_allocator::Allocator,
}

/// What the buffers of an allocator use, made at the first use. Buffers keep it, and it does not
/// keep the allocator.
pub(crate) struct Services {
    device: Device,
    runtime: OnceLock<Runtime>,
    kernels: OnceLock<Kernels>,
}

/// The services of all allocators, by the identity of the allocator.
///
/// Whoever holds services also holds their allocator, and drops the services first. So while the
/// services are alive, no other allocator has its identity.
static SERVICES: Mutex<Vec<(usize, Weak<Services>)>> = Mutex::new(Vec::new());

fn services_of(memory: &aquifer_allocator::Allocator) -> Arc<Services> {
    let identity = aquifer_allocator::internal::identity(memory);
    let mut known = SERVICES.lock();
    if let Some(services) = known.iter().find(|(id, _)| *id == identity).and_then(|(_, services)| services.upgrade()) {
        return services;
    }
    known.retain(|(id, services)| *id != identity && services.strong_count() > 0);
    let device = memory.device().clone();
    let services = Arc::new(Services { device, runtime: OnceLock::new(), kernels: OnceLock::new() });
    known.push((identity, Arc::downgrade(&services)));
    services
}

impl Services {
    /// Copies to and from memory of an allocator that has these services, on `stream`.
    pub(crate) fn copies(
        &self,
        memory: &aquifer_allocator::Allocator,
        stream: &Stream,
    ) -> Result<aquifer_transfer::Transfer, Error> {
        Ok(self.runtime()?.transfer(memory)?.on(stream)?)
    }

    pub(crate) fn runtime(&self) -> Result<&Runtime, Error> {
        if let Some(runtime) = self.runtime.get() {
            return Ok(runtime);
        }
        // If two threads come here, the first one's is taken.
        let made = Runtime::new(&self.device, TransferConfig::default())?;
        Ok(self.runtime.get_or_init(|| made))
    }

    pub(crate) fn kernels(&self) -> Result<&Kernels, Error> {
        if let Some(kernels) = self.kernels.get() {
            return Ok(kernels);
        }
        let loaded = Kernels::load(&self.device)?;
        Ok(self.kernels.get_or_init(|| loaded))
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        // The last owner may be a buffer, whose drop makes no driver call.
        let services = (self.runtime.take(), self.kernels.take());
        if !fork::is_child() && (services.0.is_some() || services.1.is_some()) {
            self.device.drop_later(Box::new(services));
        }
    }
}

impl fmt::Debug for Services {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Services").finish_non_exhaustive()
    }
}

impl From<aquifer_allocator::Allocator> for Allocator {
    fn from(memory: aquifer_allocator::Allocator) -> Allocator {
        Allocator { services: services_of(&memory), memory }
    }
}

impl Deref for Allocator {
    type Target = aquifer_allocator::Allocator;

    fn deref(&self) -> &aquifer_allocator::Allocator {
        &self.memory
    }
}

#[allow(clippy::wrong_self_convention, reason = "the allocator makes the buffer")]
impl Allocator {
    /// The allocator of a device that all parts of the process share, so that memory which one of
    /// them no longer needs serves the others. The first call makes it, as the environment says
    /// ([`Config::from_env`]).
    ///
    /// It is open while a handle or a buffer of it exists; the next call makes a new one.
    /// [`Allocator::new`] makes one that is not shared.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let buffer = memory.alloc::<f32>(1000, &stream)?;
    /// assert_eq!(Allocator::of(&device)?.memory_allocated(), memory.memory_allocated());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// At the first call: a wrong configuration in the environment, and errors of the driver.
    pub fn of(device: &Device) -> Result<Allocator, Error> {
        Ok(aquifer_allocator::Allocator::of(device)?.into())
    }

    /// As [`Allocator::of`], configured by `config` instead of by the environment: a [`Config`], or
    /// options as text, such as `"limit_mb:4096"`. Call it before any other part of the process
    /// asks for the allocator.
    ///
    /// # Errors
    /// [`AllocError::AlreadyOpen`] if the shared allocator is open; a configuration that
    /// contradicts itself, and errors of the driver.
    pub fn of_with(device: &Device, config: impl TryInto<Config, Error: Into<AllocError>>) -> Result<Allocator, Error> {
        Ok(aquifer_allocator::Allocator::of_with(device, config)?.into())
    }

    /// An allocator that is not shared with other parts of the process, configured by `config`: a
    /// [`Config`], or options as text, such as `"limit_mb:4096"`.
    ///
    /// # Errors
    /// A configuration that contradicts itself, and errors of the driver.
    pub fn new(device: &Device, config: impl TryInto<Config, Error: Into<AllocError>>) -> Result<Allocator, Error> {
        Ok(aquifer_allocator::Allocator::new(device, config)?.into())
    }

    /// Allocates memory for `len` values of `T`, for work of `stream` and of others. The content is
    /// undefined until it is written.
    ///
    /// # Errors
    /// When memory runs out ([`Error::is_out_of_memory`]), a length whose bytes overflow, a stream
    /// of another device, and errors of the driver.
    #[track_caller]
    pub fn alloc<T: Copy>(&self, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let (bytes, alignment) = size_of_values::<T>(len)?;
        Ok(Buffer::new(self.services.clone(), self.memory.alloc_storage(bytes, alignment, stream)?, len))
    }

    /// Allocates memory for `len` values of `T` of which every byte is zero.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn alloc_zeros<T: Copy>(&self, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let mut buffer = self.alloc(len, stream)?;
        buffer.zero(stream)?;
        Ok(buffer)
    }

    /// As [`Allocator::alloc`], from a private pool of this allocator.
    ///
    /// # Errors
    /// As [`Allocator::alloc`].
    #[track_caller]
    pub fn alloc_in<T: Copy>(&self, pool: &PrivatePool, len: usize, stream: &Stream) -> Result<Buffer<T>, Error> {
        let (bytes, alignment) = size_of_values::<T>(len)?;
        Ok(Buffer::new(self.services.clone(), pool.alloc_storage(bytes, alignment, stream)?, len))
    }

    /// A buffer with a copy of `values`, which the caller may reuse when this returns. The copy may
    /// still be in flight then: calls that use the buffer come after it.
    ///
    /// # Errors
    /// When device memory or pinned memory runs out, a stream of another device or that
    /// captures, and errors of the driver.
    #[track_caller]
    pub fn from_slice<T: Pod + Send + Sync>(&self, values: &[T], stream: &Stream) -> Result<Buffer<T>, Error> {
        let mut buffer = self.alloc(values.len(), stream)?;
        // All that can fail did, or is the device's.
        let _in_flight = buffer.upload(values, stream)?;
        Ok(buffer)
    }

    /// Makes a buffer of an allocation of this allocator: as many whole values as it holds. The
    /// memory counts as written by the work enqueued on `stream` until now, so earlier work of
    /// other streams with it must be ordered before that.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let allocation = memory.alloc_bytes(4000, &stream)?;
    /// stream.fill(allocation.ptr(), 0, 4000)?;
    /// let zeros = memory.buffer_of::<f32>(allocation, &stream)?;
    /// assert_eq!(zeros.len(), 1000);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the stream belongs to another device, or the allocation to another allocator. The
    /// allocation is then dropped.
    pub fn buffer_of<T: Copy>(&self, allocation: Allocation, stream: &Stream) -> Result<Buffer<T>, Error> {
        Ok(Buffer::of(&self.memory.storage_of(allocation, stream)?))
    }

    /// Makes a buffer of memory that another library owns. The allocator is the one that
    /// [`Buffer::like`] uses; it does not count the memory.
    ///
    /// When the last handle is dropped, `release` gets the ticks of work that may still use the
    /// memory. It must see to it that the memory is not reused before: by making the owner's stream
    /// wait for them ([`Stream::wait_for`]), or by waiting on the host ([`Tick::synchronize`]). It
    /// must not panic.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// # let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let theirs = memory.alloc_bytes(4000, &stream)?; // stands for memory of another library
    /// let (ptr, owner) = (theirs.ptr(), stream.clone());
    /// let buffer = memory.import::<f32>(ptr, 1000, &stream, move |ticks| {
    ///     ticks.iter().for_each(|tick| owner.wait_for(tick).expect("the device is there"));
    ///     drop(theirs); // it goes back in the order of its stream
    /// })?;
    /// assert_eq!(buffer.len(), 1000);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// It is up to the caller that there are `len` values of `T` at `ptr`, aligned, in memory of
    /// this allocator's device that lives until `release` is called; that earlier work on it comes
    /// before what is enqueued on `stream` from now on; and that only the buffer uses it until
    /// then.
    ///
    /// # Errors
    /// A stream of another device, and a length whose bytes overflow. `release` is called with no
    /// ticks then.
    pub fn import<T: Copy>(
        &self,
        ptr: DevicePtr,
        len: usize,
        stream: &Stream,
        release: impl FnOnce(&[Tick]) + Send + 'static,
    ) -> Result<Buffer<T>, Error> {
        match size_of_values::<T>(len) {
            Ok((bytes, _)) => {
                let storage = self.memory.import(ptr, bytes, stream, release)?;
                Ok(Buffer::new(self.services.clone(), storage, len))
            }
            Err(error) => {
                release(&[]);
                Err(error)
            }
        }
    }

    /// Pinned memory for `len` values of `T`, which copies of this device read and write
    /// without staging. Its contents are undefined.
    ///
    /// # Errors
    /// When pinned memory runs out, and errors of the driver.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        PinnedPool::of(self.services.runtime()?.pinned()).alloc(len)
    }

    /// Pinned memory with a copy of `values`.
    ///
    /// # Errors
    /// As [`Allocator::pinned`].
    pub fn pinned_from_slice<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, Error> {
        PinnedPool::of(self.services.runtime()?.pinned()).alloc_from(values)
    }

    /// Brings the batches that `source` gives to the device, two ahead of their use on `stream`: an
    /// iterator of batches that are ready for `stream`. A thread calls `source`. [`Prefetcher`] has
    /// more settings.
    ///
    /// # Errors
    /// As [`Prefetcher::new`].
    pub fn prefetch<S>(&self, source: S, stream: &Stream) -> Result<Prefetcher<S::Item>, Error>
    where
        S: IntoIterator,
        S::IntoIter: Send + 'static,
        S::Item: Batch,
    {
        Prefetcher::new(source, self, stream, AHEAD)
    }

    /// The tensors of a safetensors file, in this allocator's memory. Waits until they are there.
    /// [`Checkpoint`] loads a part, converts, and reports progress.
    ///
    /// # Errors
    /// As [`Checkpoint::open`] and [`Checkpoint::load_blocking`].
    pub fn load_safetensors(&self, path: impl AsRef<Path>) -> Result<ParamSet, Error> {
        Checkpoint::open(path)?.load_blocking(&self.transfer()?, Load::new())
    }

    /// The kernels that the methods of buffers use, loaded at the first call.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub fn kernels(&self) -> Result<Kernels, Error> {
        self.services.kernels().cloned()
    }

    /// The runtime that copies to and from this allocator's memory: for its settings, counters and
    /// pinned memory, for batches of copies, and for copies on streams of its own.
    ///
    /// # Errors
    /// Errors of the driver, at the first call.
    pub fn transfer(&self) -> Result<Transfer, Error> {
        Transfer::of_runtime(self.services.runtime()?, self)
    }

    pub(crate) fn with_services(services: &Arc<Services>, memory: &aquifer_allocator::Allocator) -> Allocator {
        Allocator { services: services.clone(), memory: memory.clone() }
    }

    /// The services of an allocator whose memory came from below.
    pub(crate) fn services_of(memory: &aquifer_allocator::Allocator) -> Arc<Services> {
        services_of(memory)
    }
}

/// The bytes of `len` values, and their alignment.
fn size_of_values<T>(len: usize) -> Result<(u64, u64), Error> {
    let (count, size) = (len as u64, size_of::<T>() as u64);
    let bytes = count.checked_mul(size).ok_or(RequestError::LengthOverflow { len: count, size })?;
    Ok((bytes, (align_of::<T>() as u64).max(aquifer_allocator::ALIGNMENT)))
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}
