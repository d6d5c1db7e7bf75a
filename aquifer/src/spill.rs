//! Spilling: buffers that move to pinned host memory when the device runs out of memory, and
//! come back when they are used.
//!
//! The allocator's out-of-memory ladder calls a [`Spiller`]. It spills unused buffers, of lower
//! priority first, and among equals the one unused for longest.
//!
//! Invariants:
//! * the contents are in exactly one place, on the device or on the host; the place changes under
//!   the buffer's own lock, after the copy is enqueued, and not after a failure;
//! * a spilled buffer has no other handle, so that dropping it frees its memory; its block waits
//!   for the copy by its ticks.
//!
//! Lock order: the spiller runs on threads that request device memory, whatever locks they hold; so
//! it only tries buffers' locks, and skips those that are taken. No device memory is requested
//! under a buffer's lock, because that runs other reclaimers. The list's lock is a leaf.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use aquifer_allocator::Registration;
use aquifer_device::fork::Mutex;
use aquifer_device::internal::MovesContents;
use aquifer_device::{RequestError, Stream};
use aquifer_transfer::PinnedBuffer;
use bytemuck::Pod;

use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::Transfer;

/// Spills buffers of one device: moves them to pinned host memory when the allocator runs out
/// of device memory, and brings them back when they are used ([`Spillable::access`]). Cloning gives
/// another handle. When the last handle is dropped, spilling ends, and buffers stay where they are.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Spiller;
/// let device = aquifer::open("sim:64MiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
///
/// let spiller = Spiller::new(&memory, 0)?;
/// let cache = spiller.add(memory.from_slice(&vec![7u8; 40 << 20], &stream)?, 0)?;
/// let activations = memory.alloc_bytes(40 << 20, &stream)?; // does not fit next to the cache, which is spilled
/// assert!(!cache.is_on_device());
/// drop(activations);
/// let access = cache.access(&stream)?; // comes back
/// assert_eq!(access.slice(12345..=12345).item(&stream)?, 7);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Spiller {
    inner: Arc<SpillerState>,
    _registrations: Arc<[Registration; 3]>,
}

struct SpillerState {
    transfer: Transfer,
    entries: Mutex<Vec<Weak<SpillEntry>>>,
    /// Counts uses, to order them by age.
    clock: AtomicU64,
    spills: AtomicU64,
    returns: AtomicU64,
    failures: AtomicU64,
}

/// A spillable buffer.
struct SpillEntry {
    spiller: Arc<SpillerState>,
    priority: i32,
    last_used: AtomicU64,
    home: Mutex<Home>,
    /// The number of accesses. Raised under the lock.
    users: AtomicUsize,
}

enum Home {
    Device(Buffer<u8>),
    Host(PinnedBuffer<u8>),
}

/// Counters of a spiller, and the places of its buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SpillStats {
    /// Bytes on the device.
    pub device_bytes: u64,
    /// Bytes on the host.
    pub host_bytes: u64,
    /// The number of buffers that went to the host.
    pub spills: u64,
    /// The number of buffers that came back.
    pub returns: u64,
    /// The number of buffers that could not go to the host, mostly for lack of pinned memory:
    /// then spilling does not help.
    pub failures: u64,
}

/// Device memory that may be on the host while it is unused.
pub struct Spillable<T> {
    entry: Arc<SpillEntry>,
    element: PhantomData<fn() -> T>,
}

/// A spillable buffer in use: it stays on the device until this is dropped. It is ready on the
/// stream of the access ([`aquifer_allocator::Storage::ready_on`]): any work of that stream may use
/// it. Other streams use access guards ([`aquifer_allocator::AccessGuard`]). The work need not be
/// done when this is dropped.
#[must_use = "the memory may be spilled again once this is dropped"]
pub struct Resident<'a, T> {
    buffer: Buffer<T>,
    in_use: InUse<'a>,
}

impl Spiller {
    /// A spiller for an allocator (`&memory`), which copies by its runtime, or by that of a
    /// `&transfer`. It is a reclaimer of the given priority,
    /// asked before those of lower priority, and spills as much as is lacking. If the freed memory
    /// does not serve the request, because it is in pieces, the spiller is asked again after all
    /// other reclaimers: first for as much as was requested, then for all that it can spill.
    ///
    /// # Errors
    /// Errors of the driver, at the first use of the allocator's runtime.
    pub fn new(by: impl TryInto<Transfer, Error: Into<Error>>, priority: i32) -> Result<Spiller, Error> {
        let inner = Arc::new(SpillerState {
            transfer: by.try_into().map_err(Into::into)?,
            entries: Mutex::default(),
            clock: AtomicU64::new(0),
            spills: AtomicU64::new(0),
            returns: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        let allocator = inner.transfer.allocator();
        // A weak reference: the spiller owns the allocator that it is registered with.
        let registered = |priority, bytes: fn(&SpillerState, u64) -> u64| {
            let spiller = Arc::downgrade(&inner);
            allocator.register_reclaimer(priority, "spiller", move |request| {
                let Some(spiller) = spiller.upgrade() else { return 0 };
                let spilled = spiller.spill(bytes(&spiller, request.bytes));
                spilled.why().into_iter().for_each(|why| request.explain(why));
                spilled.bytes
            })
        };
        let registrations = [
            registered(priority, SpillerState::lacking),
            registered(i32::MIN, |_, requested| requested),
            registered(i32::MIN, |_, _| u64::MAX),
        ];
        Ok(Spiller { inner, _registrations: Arc::new(registrations) })
    }

    /// Takes over a buffer. Of several buffers that could be spilled, one of lower `priority` goes
    /// first. While other handles of the buffer's memory exist, it stays on the device; a
    /// [`Growable`](aquifer_allocator::Growable) is one for all buffers made of it.
    ///
    /// # Errors
    /// A buffer of another device, or of another allocator than the runtime's: to spill it would
    /// help that one. Elements without bytes. An access guard of this thread with the buffer.
    pub fn add<T: Pod + Send + Sync>(&self, buffer: Buffer<T>, priority: i32) -> Result<Spillable<T>, Error> {
        let transfer = &self.inner.transfer;
        transfer.check_device("buffer", buffer.storage().device_id())?;
        buffer.storage().check_allocator("buffer", transfer.allocator())?;
        if size_of::<T>() == 0 {
            return Err(Error::Request(RequestError::Unsupported { what: "elements that have bytes" }));
        }
        let bytes = buffer.reinterpret::<u8>();
        let bytes = bytes.ok_or(RequestError::Unsupported { what: "device memory of whole bytes" })?.share();
        // Spilling comes after the work of streams that used the buffer without access guards.
        buffer.storage().take_over()?;
        let entry = Arc::new(SpillEntry {
            spiller: self.inner.clone(),
            priority,
            last_used: AtomicU64::new(self.inner.now()),
            home: Mutex::new(Home::Device(bytes)),
            users: AtomicUsize::new(0),
        });
        let mut entries = self.inner.entries.lock();
        // Forgets those that are gone, at a cost that is shared by those that came since.
        if entries.len() == entries.capacity() {
            entries.retain(|entry| entry.strong_count() > 0);
        }
        entries.push(Arc::downgrade(&entry));
        drop(entries);
        Ok(Spillable { entry, element: PhantomData })
    }

    /// Spills unused buffers until `bytes` of device memory are freed or there are no more such
    /// buffers. Returns the bytes freed. Their memory is free once their copies are done.
    pub fn spill(&self, bytes: u64) -> u64 {
        self.inner.spill(bytes).bytes
    }

    /// Its counters, and the places of its buffers. Waits for buffers that are moving.
    pub fn stats(&self) -> SpillStats {
        let mut stats = SpillStats {
            spills: self.inner.spills.load(Ordering::Relaxed),
            returns: self.inner.returns.load(Ordering::Relaxed),
            failures: self.inner.failures.load(Ordering::Relaxed),
            ..SpillStats::default()
        };
        for entry in self.inner.entries() {
            match &*entry.home.lock() {
                Home::Device(buffer) => stats.device_bytes += buffer.bytes(),
                Home::Host(buffer) => stats.host_bytes += buffer.bytes() as u64,
            }
        }
        stats
    }
}

impl SpillerState {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed)
    }

    fn entries(&self) -> Vec<Arc<SpillEntry>> {
        self.entries.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// The bytes that a request needs in addition to the free ones, in any number of pieces.
    fn lacking(&self, requested: u64) -> u64 {
        let allocator = self.transfer.allocator();
        let Ok(info) = self.transfer.device().memory_info() else { return requested.max(1) };
        let (allocated, reserved) = (allocator.memory_allocated(), allocator.memory_reserved());
        let growth = allocator.limit().map_or(info.free, |limit| info.free.min(limit.saturating_sub(reserved)));
        let free = growth.saturating_add(reserved.saturating_sub(allocated));
        requested.saturating_sub(free).max(1)
    }

    fn spill(&self, bytes: u64) -> Spilled {
        let mut entries = self.entries();
        entries.sort_by_key(|entry| (entry.priority, entry.last_used.load(Ordering::Relaxed)));
        let mut spilled = Spilled::default();
        for entry in entries {
            if spilled.bytes >= bytes {
                break;
            }
            match entry.spill() {
                Ok(Some(freed)) => spilled.bytes += freed,
                Ok(None) => spilled.in_use += 1,
                // The request fails by itself then.
                Err(error) if error.is_asleep() => break,
                Err(error) => {
                    self.failures.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(%error, "a buffer could not be spilled and stays on the device");
                    // Without host memory others cannot go either.
                    let is_last = error.is_out_of_memory() || error.is_device_lost();
                    spilled.failure = Some(error);
                    if is_last {
                        break;
                    }
                }
            }
        }
        spilled
    }
}

/// The result of an attempt to spill buffers.
#[derive(Default)]
struct Spilled {
    /// Bytes of device memory given up.
    bytes: u64,
    /// The number of buffers that stay because they are in use.
    in_use: usize,
    /// The last failure.
    failure: Option<Error>,
}

impl Spilled {
    /// The reason why no more was freed, for out-of-memory reports.
    fn why(&self) -> Option<String> {
        match (&self.failure, self.in_use) {
            (Some(failure), _) => Some(format!("a buffer could not go to the host: {failure}")),
            (None, 0) => None,
            (None, 1) => Some("a buffer that could go to the host is in use".to_owned()),
            (None, many) => Some(format!("{many} buffers that could go to the host are in use")),
        }
    }
}

impl SpillEntry {
    /// Moves the contents to the host, and returns the freed bytes of device memory: 0 if the
    /// contents were there before, and `None` if they are in use.
    fn spill(&self) -> Result<Option<u64>, Error> {
        // The thread with the lock brings the contents back, or is this thread.
        let Some(mut home) = self.home.try_lock() else { return Ok(None) };
        let Home::Device(buffer) = &*home else { return Ok(Some(0)) };
        // Accesses have a handle, too, but a caller may have forgotten one.
        if self.users.load(Ordering::Acquire) > 0 || Arc::strong_count(buffer.storage()) > 1 {
            return Ok(None);
        }
        let freed = buffer.storage().bytes();
        let transfer = &self.spiller.transfer;
        let mut host = transfer.pinned().alloc::<u8>(buffer.len())?;
        // Readers of the memory wait for the copy, and so does the freed block.
        let moves = MovesContents::begin();
        drop(buffer.download(&mut host, transfer)?);
        drop(moves);
        *home = Home::Host(host);
        self.spiller.spills.fetch_add(1, Ordering::Relaxed);
        Ok(Some(freed))
    }

    /// Brings the contents to the device, if they are not there, and counts a user.
    fn access(&self, stream: &Stream) -> Result<Buffer<u8>, Error> {
        let transfer = &self.spiller.transfer;
        transfer.check_device("stream", stream.device_id())?;
        let mut memory: Option<Buffer<u8>> = None;
        loop {
            let mut home = self.home.lock();
            let buffer = match (&*home, memory) {
                (Home::Device(buffer), _) => buffer.share(),
                (Home::Host(host), Some(mut buffer)) => {
                    let moves = MovesContents::begin();
                    drop(buffer.upload(host, transfer)?);
                    drop(moves);
                    self.spiller.returns.fetch_add(1, Ordering::Relaxed);
                    // The host memory goes back to its pool with the tick of the copy.
                    *home = Home::Device(buffer.share());
                    buffer
                }
                (Home::Host(host), None) => {
                    let bytes = host.bytes();
                    drop(home);
                    memory = Some(transfer.allocator().alloc(bytes, stream)?);
                    continue;
                }
            };
            self.users.fetch_add(1, Ordering::AcqRel);
            return Ok(buffer);
        }
    }
}

impl<T: Pod + Send + Sync> Spillable<T> {
    /// The buffer on the device, brought back if it was spilled, and ready on `stream`. It stays
    /// there while the result exists. Later work of `stream` comes after the copy and after what
    /// was noted of earlier accesses; the host does not wait for it. Accesses that exist at the
    /// same time for several streams, and write, must be ordered by the caller.
    ///
    /// # Errors
    /// When device memory runs out although other buffers were spilled; a stream of another device;
    /// errors of the driver. The contents stay where they were.
    #[track_caller]
    pub fn access(&self, stream: &Stream) -> Result<Resident<'_, T>, Error> {
        let _place = self.entry.spiller.transfer.called_here();
        let bytes = self.entry.access(stream)?;
        // Uncounts the access after a failure below.
        let in_use = InUse(&self.entry);
        bytes.ready_on(stream)?;
        let buffer = bytes
            .reinterpret()
            .ok_or(RequestError::Unsupported { what: "device memory that is aligned for its elements" })?
            .share();
        Ok(Resident { buffer, in_use })
    }
}

impl<T> Spillable<T> {
    /// Whether it is on the device. It may change at any time while it is unused.
    pub fn is_on_device(&self) -> bool {
        matches!(*self.entry.home.lock(), Home::Device(_))
    }

    /// Moves the buffer to the host now, unless it is in use or there already. Returns how many
    /// bytes of device memory it gave up.
    ///
    /// # Errors
    /// When pinned memory runs out, and errors of the driver. The contents are on the device
    /// then.
    #[track_caller]
    pub fn spill(&self) -> Result<u64, Error> {
        let _place = self.entry.spiller.transfer.called_here();
        Ok(self.entry.spill()?.unwrap_or(0))
    }
}

/// Counts a user as long as it exists.
struct InUse<'a>(&'a SpillEntry);

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        self.0.last_used.store(self.0.spiller.now(), Ordering::Relaxed);
        self.0.users.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<T> Drop for Resident<'_, T> {
    fn drop(&mut self) {
        // Under the lock, so that no other access begins meanwhile. Where that is not possible,
        // spilling waits for later work, too.
        let InUse(entry) = self.in_use;
        if let Some(_home) = entry.home.try_lock()
            && entry.users.load(Ordering::Acquire) == 1
            && let Err(error) = self.buffer.storage().end_ready()
        {
            tracing::debug!(%error, "a buffer is spilled after all work of the streams that used it");
        }
    }
}

impl<T> Deref for Resident<'_, T> {
    type Target = Buffer<T>;

    fn deref(&self) -> &Buffer<T> {
        &self.buffer
    }
}

impl<T> Resident<'_, T> {
    /// The buffer, to be written.
    pub fn buffer_mut(&mut self) -> &mut Buffer<T> {
        &mut self.buffer
    }
}

impl fmt::Debug for Spiller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Spiller").field("transfer", &self.inner.transfer).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Spillable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_device = self.entry.home.try_lock().map(|home| matches!(*home, Home::Device(_)));
        f.debug_struct("Spillable")
            .field("priority", &self.entry.priority)
            .field("on_device", &on_device)
            .finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Resident<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Resident").field(&self.buffer).finish()
    }
}

#[cfg(test)]
mod tests;
