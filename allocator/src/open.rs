//! The allocators of a process: the shared one of each device, and giving unused memory back, of
//! all open ones and of one that closes.

use std::sync::{Arc, Weak};

use aquifer_device::fork::{self, Mutex};
use aquifer_device::{Device, Operation};

use crate::allocator::{Allocator, AtLast, Inner, all_open};
use crate::config::Config;
use crate::error::AllocError;
use crate::recovery::hooks::is_within_an_observer;
use crate::state::close_abandoned;

/// Gives the unused memory of all allocators of a device back to it, for another allocator of the
/// process whose memory ran out: such as cudarc's or the driver's pool. Returns how many bytes that
/// was.
///
/// May be called on any thread, and where no allocator is known. Waits for streams that still use
/// memory which was given back here, as [`crate::Allocator::empty_cache`] does, so no stream may
/// wait for the caller meanwhile. To leave some memory cached, use [`crate::Allocator::trim_to`].
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer_allocator::empty_caches;
/// let device = aquifer::open("sim:64MiB")?;
/// let memory = Allocator::of(&device)?;
/// drop(memory.alloc_bytes(40 << 20, device.default_stream())?);
/// assert!(device.alloc(40 << 20).is_err()); // for another library
/// assert_eq!(empty_caches(&device)?, 40 << 20);
/// device.alloc(40 << 20)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// # Errors
/// The first error, of the driver, or [`AllocError::Observing`] within an observer of mappings. The
/// other allocators give their memory back, too.
pub fn empty_caches(device: &Device) -> Result<u64, AllocError> {
    fork::check(Operation::Free)?;
    let ours = all_open(Some(device.id()));
    let freed: Vec<_> = ours.into_iter().map(|allocator| allocator.empty_cache()).collect();
    freed.into_iter().sum()
}

/// Has the other open allocators of the device give unused memory back, about `bytes` if they have
/// as much, rather than that a request is refused. Returns how many bytes that was.
///
/// The caller holds no lock, so two allocators may ask each other at the same time. An observer of
/// mappings runs under the gate of its allocator: requests that it makes of others ask nobody.
pub(crate) fn trim_others(allocator: &Allocator, bytes: u64) -> u64 {
    if is_within_an_observer() || allocator.device().is_capturing() {
        return 0;
    }
    let mut freed = 0;
    for other in all_open(Some(allocator.device().id())) {
        if freed >= bytes || std::ptr::eq(other.state(), allocator.state()) {
            continue;
        }
        let left = other.memory_reserved().saturating_sub(bytes.saturating_sub(freed));
        match other.trim_to(left) {
            Ok(more) => freed += more,
            Err(error) => tracing::debug!(%error, "another allocator could not give its unused memory back"),
        }
    }
    freed
}

impl Drop for AtLast {
    fn drop(&mut self) {
        let Some(inner) = self.inner.take() else { return };
        let weak = Arc::downgrade(&inner);
        if !fork::is_child() {
            inner.state.end_handle();
        }
        // Buffers may keep it open; bare allocations do not.
        let closes = Arc::strong_count(&inner) == 1 && !fork::is_child();
        let closing = Allocator::keeping(inner);
        if closes {
            closing.state().shared().set_reserve(0);
        }
        if closes
            && closing.memory_allocated() > 0
            && let Err(error) = closing.trim_to(0)
        {
            tracing::warn!(%error, "unused memory of an allocator stays until its last allocation is gone");
        }
        drop(closing);
        if weak.strong_count() == 0 {
            self.device.settle();
            close_abandoned();
        }
    }
}

/// The shared allocators, by the identity of their device. The lock is held while one is made, so
/// that there is one.
static SHARED: Mutex<Vec<(u32, Weak<Inner>)>> = Mutex::new(Vec::new());

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
    /// let block = memory.alloc_bytes(4000, &stream)?;
    /// assert_eq!(Allocator::of(&device)?.memory_allocated(), memory.memory_allocated());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// At the first call: a wrong configuration in the environment, and errors of the driver.
    pub fn of(device: &Device) -> Result<Allocator, AllocError> {
        shared(device, |open| match open {
            Some(open) => Ok(open),
            None => Allocator::new(device, Config::from_env()?),
        })
    }

    /// As [`Allocator::of`], configured by `config` instead of by the environment: a [`Config`], or
    /// options as text, such as `"limit_mb:4096"`. Call it before any other part of the process
    /// asks for the allocator.
    ///
    /// # Errors
    /// [`AllocError::AlreadyOpen`] if the shared allocator is open; a configuration that
    /// contradicts itself, and errors of the driver.
    pub fn of_with(
        device: &Device,
        config: impl TryInto<Config, Error: Into<AllocError>>,
    ) -> Result<Allocator, AllocError> {
        let config = config.try_into().map_err(Into::into)?;
        shared(device, |open| match open {
            Some(_) => Err(AllocError::AlreadyOpen { device: device.label() }),
            None => Allocator::new(device, config),
        })
    }
}

fn shared(
    device: &Device,
    choose: impl FnOnce(Option<Allocator>) -> Result<Allocator, AllocError>,
) -> Result<Allocator, AllocError> {
    let (chosen, closed);
    {
        let mut shared = SHARED.lock();
        let open = shared.iter().find(|(id, _)| *id == device.id()).and_then(|(_, inner)| inner.upgrade());
        // Dropped without the lock, as the last handle of an allocator may call the driver.
        closed = open.clone();
        chosen = choose(open.map(Allocator::of_inner));
        if let (Ok(allocator), None) = (&chosen, &closed) {
            shared.retain(|(_, inner)| inner.strong_count() > 0);
            shared.push((device.id(), Arc::downgrade(allocator.inner())));
        }
    }
    drop(closed);
    chosen
}

#[cfg(test)]
mod tests {
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    fn device() -> Device {
        Device::new(SimDriver::new(SimConfig::default()))
    }

    #[test]
    fn all_parts_of_a_process_get_one_allocator_of_a_device() {
        let (device, other) = (device(), device());
        let allocators: Vec<Allocator> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| Allocator::of(&device).unwrap())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(allocators.iter().all(|allocator| Arc::ptr_eq(allocator.inner(), allocators[0].inner())));
        assert!(!Arc::ptr_eq(Allocator::of(&other).unwrap().inner(), allocators[0].inner()));
    }

    #[test]
    fn the_shared_allocator_can_be_configured_before_its_first_use_alone() {
        let device = device();
        assert!(matches!(Allocator::of_with(&device, "limit:100"), Err(AllocError::Config(_))));
        let config = || Config::parse("limit_mb:100").unwrap();
        let memory = Allocator::of_with(&device, "limit_mb:100").unwrap();
        assert_eq!(Allocator::of(&device).unwrap().limit(), Some(100 << 20));
        let error = Allocator::of_with(&device, config()).unwrap_err();
        assert!(matches!(error, AllocError::AlreadyOpen { .. }), "{error}");
        drop(memory);
        drop(Allocator::of_with(&device, config()).unwrap());
    }

    #[test]
    fn memory_keeps_the_shared_allocator_open() {
        let device = device();
        let stream = device.stream().unwrap();
        let storage = Allocator::of(&device).unwrap().alloc_storage(1000, 1, &stream).unwrap();
        assert_eq!(Allocator::of(&device).unwrap().memory_allocated(), 1024);
        let allocator = Arc::downgrade(storage.allocator().inner());
        drop(storage);
        assert!(allocator.upgrade().is_none());
        assert_eq!(Allocator::of(&device).unwrap().memory_reserved(), 0);
    }
}
