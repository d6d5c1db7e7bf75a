//! Callers that keep an allocator awake, or wait until it is; and what keeps it awake.

use std::fmt;
use std::time::{Duration, Instant};

use aquifer_device::DevicePtr;

use crate::allocator::Allocator;
use crate::core::heap::State;
use crate::error::AllocError;
use crate::kept::{KeptAwakeBy, UsedAllocation};
use crate::state::AllocatorState;
use crate::state::awake::{Keeper, Kept, KeptAwake};
use crate::tags::Tag;

/// Keeps an allocator from falling asleep while a thread works in several steps. Made by
/// [`Allocator::keep_awake`].
#[must_use = "it ends when it is dropped"]
pub struct Awake {
    _kept: KeptAwake,
    /// Keeps the allocator state in use by this allocator.
    _allocator: Allocator,
}

impl fmt::Debug for Awake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Awake").finish_non_exhaustive()
    }
}

impl Allocator {
    /// Keeps the allocator awake until the result is dropped: [`Allocator::sleep`] fails or waits
    /// until then.
    /// It is for work in several steps that would be in vain if the allocator slept in between,
    /// such as allocating memory and then using it. Work that bypasses access guards may use the
    /// memory meanwhile, too.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer_allocator::{AllocError, Allocator, Config, Contents, SleepOptions};
    /// use aquifer_device::Device;
    /// use aquifer_sim::SimDriver;
    /// let device = Device::new(SimDriver::new(Default::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// let awake = allocator.keep_awake()?;
    /// let control = std::thread::spawn({
    ///     let allocator = allocator.clone();
    ///     let options = SleepOptions::all(Contents::SaveToHost).waiting(Duration::from_secs(60));
    ///     move || allocator.sleep(options) // waits for the request to be served
    /// });
    /// let request = allocator.alloc_bytes(4 << 20, &stream)?;
    /// stream.fill(request.ptr(), 7, 4 << 20)?;
    /// drop(awake);
    /// assert_eq!(control.join().unwrap()?, 4 << 20);
    /// assert!(matches!(allocator.keep_awake(), Err(AllocError::Asleep)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AllocError::Asleep`] when the allocator sleeps, or is about to and this thread does not
    /// keep it awake already.
    pub fn keep_awake(&self) -> Result<Awake, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Map)?;
        let kept = KeptAwake::new(self.state(), Keeper::Awake, &(0..0))?;
        Ok(Awake { _kept: kept, _allocator: self.kept_open() })
    }

    /// Waits until the allocator is awake, for at most `timeout`. Returns true if it is awake, and
    /// false if it sleeps still, or is about to sleep. A thread that keeps it awake itself does not
    /// wait. It may fall asleep again before this returns, so requests after it are still to be
    /// tried again, unless [`Allocator::keep_awake`] succeeds first.
    ///
    /// ```
    /// use std::time::Duration;
    /// use aquifer_allocator::{AllocError, Allocator, Config, Contents};
    /// use aquifer_device::Device;
    /// use aquifer_sim::SimDriver;
    /// let device = Device::new(SimDriver::new(Default::default()));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.stream()?;
    /// allocator.sleep(Contents::SaveToHost)?;
    /// assert!(!allocator.wait_awake(Duration::from_millis(1)));
    /// let control = std::thread::spawn({
    ///     let allocator = allocator.clone();
    ///     move || allocator.wake()
    /// });
    /// let request = loop {
    ///     match allocator.alloc_bytes(4 << 20, &stream) {
    ///         Err(AllocError::Asleep) if allocator.wait_awake(Duration::from_secs(60)) => {}
    ///         done => break done?,
    ///     }
    /// };
    /// # drop(request);
    /// # control.join().unwrap()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[doc(hidden)]
    pub fn wait_awake(&self, timeout: Duration) -> bool {
        let state = self.state();
        // `None` is later than any clock tells.
        let until = Instant::now().checked_add(timeout);
        let mut waking = state.wakefulness.waking.lock();
        while state.refuses_wake_locks() {
            match until {
                None => state.wakefulness.woken.wait(&mut waking),
                Some(until) if state.wakefulness.woken.wait_until(&mut waking, until).timed_out() => {
                    return !state.refuses_wake_locks();
                }
                Some(_) => {}
            }
        }
        true
    }
}

/// What keeps an allocator awake, for the error of a caller that asked it to sleep.
pub(crate) fn kept_awake_by(state: &'static AllocatorState, kept: [Kept; 4]) -> KeptAwakeBy {
    let [access_guards, reservations, awake, others] = kept.map(|kept| kept.number);
    let allocations = kept.iter().filter_map(|kept| used_at(state, kept.addr?)).collect();
    let is_this_thread = state.is_kept_awake_here();
    KeptAwakeBy { access_guards, reservations, awake, others, is_this_thread, allocations }
}

/// The live allocation at an address.
fn used_at(state: &'static AllocatorState, addr: u64) -> Option<UsedAllocation> {
    let owned = state.shared().paged().and_then(|paged| paged.owned.get(&addr).copied());
    let mut found = owned.map(|owned| (addr, owned.requested, owned.tag, owned.stream));
    state.walk(|_, passed| {
        let block = &passed.block;
        if block.state == State::Live && block.range().contains(&addr) {
            found = Some((block.addr, block.requested, Tag(block.tag), block.owner));
        }
    });
    found.map(|(addr, bytes, tag, stream)| UsedAllocation {
        ptr: DevicePtr(addr),
        bytes,
        tag: tag.name(),
        stream: stream.0,
    })
}
