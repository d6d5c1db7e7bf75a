//! Access guards: the scopes that order work of different streams on the same memory. And
//! reservations, for work that is still to be enqueued.
//!
//! A tick stands for work that was enqueued. Work that threads enqueue piece by piece, while their
//! caller goes on, has no tick yet. Until it has one, its memory is reserved, and a thread that
//! takes a conflicting access guard with it waits on the host.
//!
//! A thread that holds the lock on the uses of a storage and takes it again would wait for itself.
//! So a thread that takes the lock leaves its mark ([`crate::sync::Holder`]). The mark is read only
//! if the lock is not free, and a thread that finds its own mark gets an error instead of waiting.
//!
//! Invariants: reservations that conflict never hold at the same time; a thread that waits for a
//! reservation holds no lock, so that it does not keep another thread from ending the reservation.

use std::error::Error;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use aquifer_device::fork::parking_lot::MutexGuard;
use aquifer_device::{AccessKind, DevicePtr, Stream, Tick};

use crate::error::AllocError;
use crate::sleep::wake_lock::{Count, Kind, NotedCount};
use crate::storage::{GraphUses, Storage, Uses};

/// A stream's access guard on some memory: the scope in which the stream enqueues work that uses
/// the memory.
///
/// Taking an access guard orders the stream's later work after all work that must come before it:
/// work that reads comes after the last work that wrote; work that writes comes after all work.
/// While an access guard is held, no other thread gets an access guard on the same memory. When it
/// is dropped, the work enqueued on the stream until then is noted, so that later access guards
/// come after it and the memory is not reused before it is done.
///
/// This order costs at most one event and one wait for each stream that must be waited for, and
/// nothing where the streams are ordered already. Parts of one buffer count as the whole buffer.
///
/// Hold an access guard only while enqueuing, and only one at a time on a thread. A second guard on
/// the same memory is refused ([`AllocError::AccessHeld`]), and two threads that each take several
/// guards, one after the other, can deadlock. One guard on all the memory cannot; where several
/// streams work together, also of several devices, [`AccessGuard::of_streams`] takes it for all of
/// them.
///
/// Access guards do not see work that bypasses them, such as [`Stream::fill`] with a bare address,
/// except on streams that the memory was made ready for ([`Storage::ready_on`]).
///
/// Inside a capture that collects the memory that its graph uses ([`GraphUses`]), access guards
/// order nothing and keep no other thread away: they note the use, and a launch orders itself.
/// Inside another one, a stream can take access guards on memory that it is ordered after already;
/// note what a launched graph does by an access guard around the launch.
///
/// ```
/// use aquifer::device::AccessKind;
/// use aquifer::memory::AccessGuard;
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
/// let x = memory.alloc::<u8>(1 << 20, &one)?;
/// {
///     let _access = AccessGuard::acquire(&one, &[(x.storage(), AccessKind::Write)])?;
///     one.fill(x.ptr(), 7, x.bytes())?;
/// }
/// let mut bytes = vec![0; 1 << 20];
/// {
///     let _access = AccessGuard::acquire(&two, &[(x.storage(), AccessKind::Read)])?;
///     two.download_blocking(&mut bytes, x.ptr())?;
/// }
/// assert!(bytes.iter().all(|&byte| byte == 7));
/// device.assert_no_violations();
/// # Ok::<(), aquifer::Error>(())
/// ```
#[must_use = "the access guard ends when it is dropped"]
pub struct AccessGuard<'a> {
    /// What most guards hold, of a single stream. Written in place: a list would take it by way of
    /// the stack, from where it is read back in larger pieces than it was written, which stalls.
    few: [Option<Held<'a>>; 2],
    many: Vec<Held<'a>>,
}

/// Memory that an access guard is wanted for, and what it holds of that.
pub(super) struct Held<'a> {
    pub(super) stream: &'a Stream,
    pub(super) storage: &'a Arc<Storage>,
    pub(super) kind: AccessKind,
    uses: Option<LockedUses<'a>>,
    /// Of the first memory of each allocator. Dropped after the work is noted.
    awake: Option<NotedCount>,
}

impl fmt::Debug for AccessGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = self.few.iter().flatten().count() + self.many.len();
        f.debug_struct("AccessGuard").field("memory", &memory).finish_non_exhaustive()
    }
}

impl<'a> AccessGuard<'a> {
    /// Waits until no thread has an access guard on any of the memory, or a [`crate::Reservation`]
    /// that conflicts. Then orders the stream's later work. The same memory may be listed several
    /// times.
    ///
    /// # Errors
    /// When memory belongs to another device than the stream; [`AllocError::AccessHeld`] while this
    /// thread has an access guard on some of the memory; [`AllocError::Asleep`] while its allocator
    /// sleeps or is about to; errors of the driver; when the stream captures and is not ordered
    /// already. No work is noted then.
    pub fn acquire(
        stream: &'a Stream,
        memory: &[(&'a Arc<Storage>, AccessKind)],
    ) -> Result<AccessGuard<'a>, AllocError> {
        let mut access = AccessGuard::none();
        access.take(stream, memory.iter().copied())?;
        Ok(access)
    }

    /// An access guard on no memory, for [`AccessGuard::take`].
    #[doc(hidden)]
    #[inline]
    pub fn none() -> AccessGuard<'a> {
        AccessGuard { few: [None, None], many: Vec::new() }
    }

    /// Makes a guard on no memory what [`AccessGuard::acquire`] returns, without copying it.
    ///
    /// # Errors
    /// As [`AccessGuard::acquire`]. The guard is on no memory then.
    #[doc(hidden)]
    #[inline]
    pub fn take(
        &mut self,
        stream: &'a Stream,
        memory: impl ExactSizeIterator<Item = (&'a Arc<Storage>, AccessKind)> + Clone,
    ) -> Result<(), AllocError> {
        let mut first = memory.clone();
        let is_taken = match (memory.len(), first.next(), first.next()) {
            (1, Some((storage, kind)), _) => self.take_one(stream, storage, kind)?,
            (2, Some(one), Some(two)) => self.take_two(stream, one, two)?,
            _ => false,
        };
        if is_taken {
            return Ok(());
        }
        self.take_all(memory.map(|(storage, kind)| Held::new(stream, storage, kind)).collect())
    }

    /// As [`AccessGuard::acquire`], for several streams, each with the memory that it uses: the
    /// streams of a copy between two devices, say. Streams that use the same memory need access
    /// guards of their own, one after the other.
    ///
    /// # Errors
    /// As [`AccessGuard::acquire`]; [`AllocError::AccessHeld`] also if the same memory is listed
    /// for different streams.
    ///
    /// ```
    /// use aquifer::device::AccessKind::{Read, Write};
    /// use aquifer::memory::AccessGuard;
    /// use aquifer::prelude::*;
    /// let (one, two) = (aquifer::open("sim:24GiB")?, aquifer::open("sim:24GiB,ordinal=1")?);
    /// let (source, target) = (one.stream()?, two.stream()?);
    /// let from = Allocator::of(&one)?.from_slice(&[7_u8; 1000], &source)?;
    /// let to = Allocator::of(&two)?.alloc::<u8>(1000, &target)?;
    /// {
    ///     let ends = [(&source, from.storage(), Read), (&target, to.storage(), Write)];
    ///     let _access = AccessGuard::of_streams(&ends)?;
    ///     target.wait_for(&source.tick())?;
    ///     target.copy_from_peer(to.ptr(), &one, from.ptr(), to.bytes())?;
    ///     source.wait_for(&target.tick())?; // the copy reads what later work of this stream may write
    /// }
    /// assert_eq!(to.to_vec(&target)?, [7; 1000]);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn of_streams(work: &[(&'a Stream, &'a Arc<Storage>, AccessKind)]) -> Result<AccessGuard<'a>, AllocError> {
        let mut access = AccessGuard::none();
        access.take_all(work.iter().map(|&(stream, storage, kind)| Held::new(stream, storage, kind)).collect())?;
        Ok(access)
    }

    /// What [`AccessGuard::take_all`] does, for one piece of memory where nothing is in the way. False
    /// if something is.
    #[inline(never)]
    fn take_one(
        &mut self,
        stream: &'a Stream,
        storage: &'a Arc<Storage>,
        kind: AccessKind,
    ) -> Result<bool, AllocError> {
        if !is_plain(stream)? || !storage.is_plain_for(stream) {
            return Ok(false);
        }
        let Some(awake) = NotedCount::of_guard_at_once(storage.state()) else { return Ok(false) };
        let Some(mut uses) = LockedUses::at_once(storage, kind) else { return Ok(false) };
        uses.order(storage, stream, kind)?;
        self.few[0] = Some(Held { stream, storage, kind, uses: Some(uses), awake: Some(awake) });
        Ok(true)
    }

    /// As [`AccessGuard::take_one`], for two pieces of memory of one allocator.
    #[inline(never)]
    fn take_two(
        &mut self,
        stream: &'a Stream,
        one: (&'a Arc<Storage>, AccessKind),
        two: (&'a Arc<Storage>, AccessKind),
    ) -> Result<bool, AllocError> {
        let state = one.0.state();
        if !is_plain(stream)?
            || !one.0.is_plain_for(stream)
            || !two.0.is_plain_for(stream)
            || !std::ptr::eq(state, two.0.state())
        {
            return Ok(false);
        }
        let ((storage, kind), (other, and)) = if one.0.order() <= two.0.order() { (one, two) } else { (two, one) };
        let Some(awake) = NotedCount::of_guard_at_once(state) else { return Ok(false) };
        let Some(mut uses) = LockedUses::at_once(storage, kind) else { return Ok(false) };
        // If both are one, this thread has the lock already.
        let Some(mut others) = LockedUses::at_once(other, and) else { return Ok(false) };
        uses.order(storage, stream, kind)?;
        others.order(other, stream, and)?;
        self.few[0] = Some(Held { stream, storage, kind, uses: Some(uses), awake: Some(awake) });
        self.few[1] = Some(Held { stream, storage: other, kind: and, uses: Some(others), awake: None });
        Ok(true)
    }

    #[cold]
    #[inline(never)]
    fn take_all(&mut self, mut wanted: Vec<Held<'a>>) -> Result<(), AllocError> {
        aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
        wanted.retain(|held| held.storage.bytes() > 0);
        // The same order for all guards, so that they do not wait for each other in a circle; and
        // writing before reading, so that removing duplicates keeps it.
        let place = |held: &Held<'_>| (held.storage.order(), held.stream.device_id(), held.stream.id());
        wanted.sort_unstable_by_key(|held| (place(held), std::cmp::Reverse(held.kind)));
        wanted.dedup_by_key(|held| place(held));
        if let Some(Held { stream, storage, .. }) =
            wanted.iter().find(|held| held.storage.device_id() != held.stream.device_id())
        {
            return Err(AllocError::wrong_device("buffer", storage.device_id(), stream.device_id()));
        }
        wanted.iter().try_for_each(|held| held.stream.end_abandoned_captures())?;
        keep_awake(&mut wanted)?;
        GraphUses::take_captured(&mut wanted)?;
        lock_unreserved(&mut wanted)?;
        for Held { stream, storage, kind, uses, .. } in &mut wanted {
            if let Some(uses) = uses {
                uses.note_free(Some(stream));
                uses.order(storage, stream, *kind)?;
            }
        }
        self.many = wanted;
        Ok(())
    }

    /// Takes an access guard on memory that the caller has reserved.
    pub(crate) fn reserved(
        stream: &'a Stream,
        storage: &'a Arc<Storage>,
        kind: AccessKind,
    ) -> Result<AccessGuard<'a>, AllocError> {
        if storage.device_id() != stream.device_id() {
            return Err(AllocError::wrong_device("buffer", storage.device_id(), stream.device_id()));
        }
        stream.end_abandoned_captures()?;
        let awake = Some(NotedCount::of_reservation(storage.state()));
        let mut uses = storage.hold()?;
        uses.order(storage, stream, kind)?;
        let held = Held { stream, storage, kind, uses: Some(uses), awake };
        Ok(AccessGuard { few: [Some(held), None], many: Vec::new() })
    }

    /// Notes that work of another device's stream reads `storage`, which the access guard must be
    /// with, until `tick`: later access guards that write come after it. This is for work that the
    /// access guard's own stream could not be ordered after. The memory is not kept for it: the
    /// caller must hold a handle until the tick is done.
    #[doc(hidden)]
    pub fn note_reader(&mut self, storage: &Storage, tick: &Tick) {
        let held = self.few.iter_mut().flatten().chain(&mut self.many);
        let uses = held.filter(|held| std::ptr::eq(&**held.storage, storage)).filter_map(|held| held.uses.as_mut());
        uses.for_each(|uses| uses.others_mut().record.note(tick.clone(), AccessKind::Read));
    }
}

impl<'a> Held<'a> {
    /// Nothing yet.
    fn new(stream: &'a Stream, storage: &'a Arc<Storage>, kind: AccessKind) -> Held<'a> {
        Held { stream, storage, kind, uses: None, awake: None }
    }

    /// Notes the work that was enqueued.
    #[inline]
    fn note(&mut self) {
        if let Some(uses) = &mut self.uses {
            uses.note_now(self.stream, self.kind);
        }
    }
}

/// False if the stream captures. Ends captures that were dropped.
#[inline]
fn is_plain(stream: &Stream) -> Result<bool, AllocError> {
    aquifer_device::fork::check(aquifer_device::Operation::Wait)?;
    stream.end_abandoned_captures()?;
    Ok(stream.timeline().device_id_unless_capturing() == stream.device_id())
}

/// Keeps the allocators of all this memory awake.
fn keep_awake(wanted: &mut [Held<'_>]) -> Result<(), AllocError> {
    for at in 0..wanted.len() {
        let (state, range) = wanted[at].storage.place();
        // The first memory of an allocator is among the first.
        if !wanted[..at].iter().any(|before| before.awake.is_some() && std::ptr::eq(before.storage.state(), state)) {
            wanted[at].awake = Some(NotedCount::of_guard(state, &range)?);
        } else if state.refuses(&range) {
            return Err(AllocError::Asleep);
        }
    }
    Ok(())
}

/// Locks all storages, in the given order, once no reservation conflicts. While it waits for the
/// end of a reservation it holds no lock, because the threads that end reservations may need any of
/// them.
fn lock_unreserved(wanted: &mut [Held<'_>]) -> Result<(), AllocError> {
    let mut at = 0;
    while let Some(next) = wanted.get_mut(at) {
        let mut uses = next.storage.hold()?;
        if uses.is_reserved_against(next.kind) {
            let kind = next.kind;
            wanted[..at].iter_mut().for_each(|held| held.uses = None);
            uses.wait_unreserved(kind);
            at = 0;
        } else {
            uses.report_failure()?;
            next.uses = Some(uses);
            at += 1;
        }
    }
    Ok(())
}

impl Drop for AccessGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.few.iter_mut().flatten().for_each(Held::note);
        self.many.iter_mut().for_each(Held::note);
    }
}

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
/// use aquifer::device::AccessKind;
/// use aquifer::memory::AccessGuard;
/// use aquifer::prelude::*;
/// use aquifer_allocator::Reservation;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, one, two) = (Allocator::of(&device)?, device.stream()?, device.stream()?);
/// let x = memory.alloc::<u8>(1 << 20, &one)?;
/// let reservation = Reservation::acquire(x.storage(), AccessKind::Write)?;
/// let (ptr, bytes) = (x.ptr(), x.bytes());
/// let filler = std::thread::spawn(move || {
///     for part in 0..4 {
///         let _access = reservation.access(&one).unwrap();
///         one.fill(ptr.offset(part * bytes / 4), 7, bytes / 4).unwrap();
///     }
/// });
/// let mut bytes = vec![0; 1 << 20];
/// {
///     // Waits until the thread has enqueued all parts.
///     let _access = AccessGuard::acquire(&two, &[(x.storage(), AccessKind::Read)])?;
///     two.download_blocking(&mut bytes, ptr)?;
/// }
/// filler.join().unwrap();
/// assert!(bytes.iter().all(|&byte| byte == 7));
/// device.assert_no_violations();
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the reservation ends when it is dropped"]
pub struct Reservation {
    /// Dropped after the reservation has ended, and before the memory.
    _count: Count,
    storage: Arc<Storage>,
    kind: AccessKind,
}

impl Reservation {
    /// Waits until no thread has an access guard on the memory or a conflicting reservation, and
    /// reserves it. The memory's allocator cannot be put to sleep before the reservation is
    /// dropped.
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
        uses.others_mut().record.reserve(kind);
        drop(uses);
        Ok(Reservation { _count: count, storage: storage.clone(), kind })
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
        let mut held = self.storage.hold()?;
        held.record(self.storage.state())
            .before(self.kind)
            .filter(|tick| !stream.is_ordered_after(tick))
            .try_for_each(|tick| Ok(tick.cover()?))
    }

    /// Notes that the work failed: the first access to the memory to which `unreported` returns the
    /// error reports it. It returns `None` while a caller can ask for the result, and once one did.
    pub fn note_failure(&self, unreported: impl Fn() -> Option<Arc<dyn Error + Send + Sync>> + Send + 'static) {
        // Fails only within an access guard of this thread, which the work's threads do not have.
        let _ = self.storage.hold().map(|mut held| held.others_mut().failure = Some(Failure(Box::new(unreported))));
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

/// The failure of work that was to write some memory.
pub(crate) struct Failure(Box<dyn Fn() -> Option<Arc<dyn Error + Send + Sync>> + Send>);

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Failure")
    }
}

/// The uses of a storage, locked.
#[derive(Debug)]
pub(crate) struct LockedUses<'a> {
    storage: &'a Storage,
    uses: MutexGuard<'a, Uses>,
}

// Uses are changed after the driver calls that may panic.
impl UnwindSafe for LockedUses<'_> {}
impl RefUnwindSafe for LockedUses<'_> {}

impl Storage {
    /// The place of the memory in the order in which access guards lock: by its address.
    #[inline]
    fn order(self: &Arc<Self>) -> (u32, DevicePtr, *const Storage) {
        (self.device_id(), self.ptr(), Arc::as_ptr(self))
    }

    /// True if there is memory, of the stream's device.
    #[inline]
    fn is_plain_for(&self, stream: &Stream) -> bool {
        self.device_id() == stream.device_id() && self.bytes() > 0
    }

    /// Locks the uses of the memory.
    ///
    /// # Errors
    /// [`AllocError::AccessHeld`] if this very thread holds the lock, as it does during an access
    /// guard.
    pub(crate) fn hold(&self) -> Result<LockedUses<'_>, AllocError> {
        let uses = match self.uses.try_lock() {
            Some(uses) => uses,
            None if self.holder.is_this_thread() => return Err(AllocError::AccessHeld),
            None => self.uses.lock(),
        };
        self.holder.mark();
        Ok(LockedUses { storage: self, uses })
    }

    /// Waits until no reservation conflicts with an access of this kind, and locks the uses of the
    /// memory.
    ///
    /// # Errors
    /// As [`Storage::hold`].
    pub(crate) fn lock_unreserved(&self, kind: AccessKind) -> Result<LockedUses<'_>, AllocError> {
        let mut held = self.hold()?;
        held.wait_unreserved(kind);
        held.report_failure()?;
        Ok(held)
    }

    /// Ends a reservation: now or, if this very thread has an access guard on the memory, at the
    /// end of that guard.
    pub(crate) fn end_reservation(&self, kind: AccessKind) {
        match self.hold() {
            Ok(mut held) => held.others_mut().record.end_reservation(kind),
            Err(_) => {
                self.holder.ended.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
        self.unreserved.notify_all();
    }
}

impl<'a> LockedUses<'a> {
    /// The uses of memory that no thread has locked, and that no reservation, failed work or stream
    /// without access guards keeps from being used at once.
    #[inline]
    fn at_once(storage: &'a Storage, kind: AccessKind) -> Option<LockedUses<'a>> {
        let uses = storage.uses.try_lock()?;
        storage.holder.mark();
        let uses = LockedUses { storage, uses };
        uses.others.as_ref().is_none_or(|others| others.are_plain_for(kind)).then_some(uses)
    }

    /// Waits until no reservation conflicts with an access of this kind. The lock is released
    /// meanwhile.
    pub(crate) fn wait_unreserved(&mut self, kind: AccessKind) {
        while self.uses.is_reserved_against(kind) {
            self.storage.holder.unmark();
            self.storage.unreserved.wait_in_place(&mut self.uses);
            self.storage.holder.mark();
        }
    }

    /// Reports a failure to write the memory, unless a caller has learned of it, or may.
    ///
    /// # Errors
    /// [`AllocError::NotWritten`].
    fn report_failure(&mut self) -> Result<(), AllocError> {
        let Some(others) = &mut self.uses.others else { return Ok(()) };
        let Some(cause) = others.failure.as_ref().and_then(|Failure(unreported)| unreported()) else {
            return Ok(());
        };
        others.failure = None;
        Err(AllocError::NotWritten { cause })
    }

    /// Ends the reservations that were dropped during the access guard. Reservations that hold at
    /// the same time are all of one kind.
    #[cold]
    fn end_reservations(&mut self) {
        for _ in 0..self.storage.holder.ended.swap(0, Ordering::Relaxed) {
            let kind =
                if self.uses.is_reserved_against(AccessKind::Read) { AccessKind::Write } else { AccessKind::Read };
            self.uses.others_mut().record.end_reservation(kind);
        }
        self.storage.unreserved.notify_all();
    }
}

impl Deref for LockedUses<'_> {
    type Target = Uses;

    fn deref(&self) -> &Uses {
        &self.uses
    }
}

impl DerefMut for LockedUses<'_> {
    fn deref_mut(&mut self) -> &mut Uses {
        &mut self.uses
    }
}

impl Drop for LockedUses<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.storage.holder.ended.load(Ordering::Relaxed) > 0 {
            self.end_reservations();
        }
        self.storage.holder.unmark();
    }
}
