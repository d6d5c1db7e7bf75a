//! The memory of a device: the allocator, with the pinned memory, transfers and kernels that
//! its buffers use.

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use aquifer_allocator::{AllocError, Config};
use aquifer_device::{Device, fork};
use aquifer_kernels::Kernels;
use aquifer_transfer::{Runtime, TransferConfig};

use crate::error::Error;

/// The memory of one device. It allocates [`Buffer`](crate::Buffer)s and pinned memory, and loads
/// models. Cloning gives another handle of the same allocator.
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
    memory: aquifer_allocator::Allocator,
}

/// What the buffers of an allocator use, made at the first use and kept with the allocator.
pub(crate) struct Services {
    device: Device,
    runtime: OnceLock<Arc<Runtime>>,
    kernels: OnceLock<Kernels>,
}

impl Services {
    pub(crate) fn runtime(&self) -> Result<&Arc<Runtime>, Error> {
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
        Allocator { memory }
    }
}

impl Deref for Allocator {
    type Target = aquifer_allocator::Allocator;

    fn deref(&self) -> &aquifer_allocator::Allocator {
        &self.memory
    }
}

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

    /// The kernels that the methods of buffers use, loaded at the first call.
    ///
    /// # Errors
    /// As [`Kernels::load`].
    pub fn kernels(&self) -> Result<Kernels, Error> {
        self.services()?.kernels().cloned()
    }

    /// What its buffers share.
    pub(crate) fn services(&self) -> Result<&Services, Error> {
        let device = || self.memory.device().clone();
        let made =
            self.memory.services(|| Services { device: device(), runtime: OnceLock::new(), kernels: OnceLock::new() });
        made.ok_or_else(|| Error::other("another version of this crate serves the allocator"))
    }

    /// The allocator below, of untyped memory.
    pub(crate) fn untyped(&self) -> &aquifer_allocator::Allocator {
        &self.memory
    }
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}
