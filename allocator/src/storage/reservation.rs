//! Reservations: reservations of memory for work that is still to be enqueued.
//!
//! A tick stands for work that was enqueued. Work that threads enqueue piece by piece, while their
//! caller goes on, has no tick yet. Until it has one, its memory is reserved, and a thread that
//! takes a conflicting access guard with it waits on the host.
//!
//! Invariants: reservations that conflict never hold at the same time; a thread that waits for a
//! reservation holds no lock, so that it does not keep another thread from ending the reservation.

use std::sync::Arc;

use aquifer_device::{AccessKind, Stream};

use crate::error::AllocError;
use crate::sleep::wake_lock::{Count, Kind};
use crate::storage::Storage;
use crate::storage::guard::AccessGuard;

/// Memory reserved for work that is still to be enqueued, perhaps by other threads.
///
/// While a reservation exists, conflicting access guards and reservations of others wait on the
/// host until it is dropped: all of them if the reservation is for writing, and those that write if
/// it is for reading. So they come after all the work that was enqueued in the reservation's access
/// guards ([`Reservation::access`]). A reservation keeps the memory alive.
///
/// The holder must enqueue the work, or give it up, and then drop the reservation. A thread that is
/// to drop a reservation must not take a conflicting guard or reservation before that. A
/// reservation belongs to no thread, so this cannot be detected, and a thread that waits for a
/// reservation which is never dropped waits for ever.
///
/// ```
/// use aquifer_allocator::{ALIGNMENT, AccessGuard, Allocator, Config, Reservation};
/// use aquifer_device::{AccessKind, Device};
/// use aquifer_sim::{SimConfig, SimDriver};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let memory = allocator.alloc_storage(1 << 20, ALIGNMENT, &one)?;
/// let reservation = Reservation::acquire(&memory, AccessKind::Write)?;
/// let (ptr, bytes) = (memory.ptr(), memory.bytes());
/// let filler = std::thread::spawn(move || {
///     for part in 0..4 {
///         let _access = reservation.access(&one).unwrap();
///         one.fill(ptr.offset(part * bytes / 4), 7, bytes / 4).unwrap();
///     }
/// });
/// let mut bytes = vec![0; 1 << 20];
/// {
///     // Waits until the thread has enqueued all parts.
///     let _access = AccessGuard::acquire(&two, &[(&memory, AccessKind::Read)])?;
///     two.download_blocking(&mut bytes, ptr)?;
/// }
/// filler.join().unwrap();
/// assert!(bytes.iter().all(|&byte| byte == 7));
/// device.assert_no_violations();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the reservation ends when it is dropped"]
pub struct Reservation {
    storage: Arc<Storage>,
    kind: AccessKind,
    /// Dropped after the reservation has ended.
    _count: Count,
}

impl Reservation {
    /// Waits until no thread has an access guard on the memory or a conflicting reservation, and
    /// reserves it. The memory's allocator cannot be put to sleep before the reservation is dropped.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] while this thread has an access guard on the memory;
    /// [`AllocError::Asleep`] while its allocator sleeps or is about to.
    pub fn acquire(storage: &Arc<Storage>, kind: AccessKind) -> Result<Reservation, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        let (state, range) = storage.place();
        let count = Count::new(state, Kind::Reservation, &range)?;
        let mut uses = storage.lock_unreserved(kind)?;
        uses.note_free(None);
        uses.record.reserve(kind);
        drop(uses);
        Ok(Reservation { storage: storage.clone(), kind, _count: count })
    }

    /// The reserved memory.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Records the events that access guards of `stream` with the memory will wait for. Without
    /// this they are recorded when the first guard is taken, which fails if a stream that used the
    /// memory before has begun a capture meanwhile.
    ///
    /// # Errors
    /// When such a stream captures already; errors of the driver; [`AllocError::AccessHeld`] while
    /// this thread has an access guard on the memory.
    pub fn prepare(&self, stream: &Stream) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        let held = self.storage.hold()?;
        held.record
            .before(self.kind)
            .filter(|tick| !stream.is_ordered_after(tick))
            .try_for_each(|tick| Ok(tick.cover()?))
    }

    /// Takes an access guard of a stream with the memory, for the work that the reservation was
    /// made for. See [`AccessGuard`].
    ///
    /// # Errors
    /// As [`AccessGuard::acquire`].
    pub fn access<'a>(&'a self, stream: &'a Stream) -> Result<AccessGuard<'a>, AllocError> {
        AccessGuard::reserved(stream, &self.storage, self.kind)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return;
        }
        self.storage.end_reservation(self.kind);
    }
}
