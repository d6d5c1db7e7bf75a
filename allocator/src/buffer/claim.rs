//! Claims: reservations of memory for work that is still to be enqueued.
//!
//! A tick stands for work that was enqueued. Work that threads enqueue piece by piece, while their
//! caller goes on, has no tick yet. Until it has one, its memory is claimed, and a thread that
//! takes a conflicting turn with it waits on the host.
//!
//! Invariants: claims that conflict never hold at the same time; a thread that waits for a claim
//! holds no lock, so that it does not keep another thread from ending the claim.

use std::sync::Arc;

use aquifer_device::{AccessKind, Stream};

use crate::buffer::storage::Storage;
use crate::buffer::turn::Turn;
use crate::error::AllocError;
use crate::state::awake::WakeLock;

/// Memory claimed for work that is still to be enqueued, perhaps by other threads.
///
/// While a claim exists, conflicting turns and claims of others wait on the host until it is
/// dropped: all of them if the claim is for writing, and those that write if it is for reading. So
/// they come after all the work that was enqueued in the claim's turns ([`Claim::turn`]). A claim
/// keeps the memory alive.
///
/// The holder must enqueue the work, or give it up, and then drop the claim. A thread that is to
/// drop a claim must not take a conflicting turn or claim before that. A claim belongs to no
/// thread, so this cannot be detected, and a thread that waits for a claim which is never dropped
/// waits for ever.
///
/// ```
/// use aquifer_allocator::{Allocator, Claim, Config, Buffer, Turn};
/// use aquifer_device::{AccessKind, Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let buffer: Buffer<u8> = allocator.alloc(1 << 20, &one)?;
/// let claim = Claim::take(buffer.storage(), AccessKind::Write)?;
/// let (ptr, bytes) = (buffer.ptr(), buffer.bytes());
/// let filler = std::thread::spawn(move || {
///     for part in 0..4 {
///         let _turn = claim.turn(&one).unwrap();
///         one.fill(ptr.offset(part * bytes / 4), 7, bytes / 4).unwrap();
///     }
/// });
/// let mut bytes = vec![0; 1 << 20];
/// {
///     let _turn = Turn::take(&two, &[(buffer.storage(), AccessKind::Read)])?; // waits for the thread to enqueue all parts
///     two.download_blocking(&mut bytes, ptr)?;
/// }
/// filler.join().unwrap();
/// assert!(bytes.iter().all(|&byte| byte == 7));
/// device.assert_no_violations();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[must_use = "the claim ends when it is dropped"]
pub struct Claim {
    storage: Arc<Storage>,
    kind: AccessKind,
    /// Dropped after the claim has ended.
    _wake_lock: WakeLock,
}

impl Claim {
    /// Waits until no thread has a turn with the memory or a conflicting claim, and claims it. The
    /// memory's allocator does not go to sleep before the claim is dropped.
    ///
    /// # Errors
    /// [`AllocError::TurnHeld`] while this thread has a turn with the memory;
    /// [`AllocError::Asleep`] while its allocator sleeps or is about to.
    pub fn take(storage: &Arc<Storage>, kind: AccessKind) -> Result<Claim, AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        let wake_lock = WakeLock::new(storage.memory().state())?;
        let mut uses = storage.hold_unclaimed(kind)?;
        uses.note_free(None);
        uses.claim(kind);
        drop(uses);
        Ok(Claim { storage: storage.clone(), kind, _wake_lock: wake_lock })
    }

    /// The claimed memory.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.storage
    }

    /// Records the events that turns of `stream` with the memory will wait for. Without this they
    /// are recorded when the first turn is taken, which fails if a stream that used the memory
    /// before has begun a capture by then.
    ///
    /// # Errors
    /// When such a stream captures already; errors of the driver; [`AllocError::TurnHeld`] while
    /// this thread has a turn with the memory.
    pub fn prepare(&self, stream: &Stream) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        let held = self.storage.hold()?;
        held.before(self.kind).filter(|tick| !stream.is_ordered_after(tick)).try_for_each(|tick| Ok(tick.cover()?))
    }

    /// Takes a turn of a stream with the memory, for the work that the claim was made for. See
    /// [`Turn`].
    ///
    /// # Errors
    /// As [`Turn::take`].
    pub fn turn<'a>(&'a self, stream: &'a Stream) -> Result<Turn<'a>, AllocError> {
        Turn::claimed(stream, &self.storage, self.kind)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return;
        }
        self.storage.unclaim(self.kind);
    }
}
