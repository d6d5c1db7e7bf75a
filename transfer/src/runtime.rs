//! `Transfer`: the transfer runtime of one device.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use aquifer_allocator::{AccessGuard, Allocator, Storage};
use aquifer_device::internal::CalledFrom;
use aquifer_device::{AccessKind, Device, DeviceError, RequestError, Stream, Tick};

use crate::captured::HostUses;
use crate::completion::{Completion, Shared};
use crate::config::{StagingStats, TransferConfig};
use crate::copy::DevicePart;
use crate::counters::{Counters, Direction};
use crate::enqueue::{covered_tick, hold_off_captures, refuse_capture};
use crate::error::TransferError;
use crate::pinned::{HostAccess, HostPart, PinnedPool};
use crate::staging::Staging;
use crate::streams::{Levels, Streams};

/// The advice in errors about streams that capture.
pub(crate) const NO_CAPTURE: &str = "this copy cannot be captured into a graph: copy before the capture, or \
     after a launch on its stream. In `Allocator::graph`, uploads from memory can be captured, and downloads to pinned memory";

/// Copies between the host and one device, and within the device. Cloning gives another handle of
/// the same runtime.
///
/// Copies run on streams of the runtime's own, or on the caller's ([`Transfer::on`]), and calls
/// return before copies are done.
///
/// *Order.* Memory carries the ticks of the work that uses it. So every stream that accesses it
/// ([`aquifer_allocator::AccessGuard`], kernels, other transfers) is ordered after the copies
/// without further calls. Host memory that is in flight cannot be touched: see
/// [`crate::PinnedBuffer`].
///
/// *Waiting.* Calls that make the host wait for the device say so in their name or documentation,
/// and [`Transfer::counters`] counts them. [`crate::HostMemoryStats::num_waits`] counts waits for
/// pinned memory that a copy still uses.
///
/// Streams that capture a graph are refused, because a graph's work runs later, and may run many
/// times.
#[derive(Clone)]
pub struct Transfer {
    pub(crate) inner: Arc<Runtime>,
    /// Not part of the runtime, which memory of the allocator may own.
    allocator: Allocator,
    /// The runtime's streams at this handle's priority.
    streams: Arc<Streams>,
    /// The caller's stream, which copies run on instead.
    stream: Option<Stream>,
}

/// What copies of one device need: pinned memory, streams, and a staging ring. It does not keep the
/// allocator of its [`Transfer`]s open.
pub struct Runtime {
    pinned: PinnedPool,
    levels: Levels,
    shared: Arc<Shared>,
    staging: Staging,
}

impl Runtime {
    /// A runtime for copies of `device`. Pins no memory and starts no thread before the first
    /// use.
    ///
    /// # Errors
    /// A forked child of a process that uses the device.
    pub fn new(device: &Device, config: TransferConfig) -> Result<Arc<Runtime>, TransferError> {
        aquifer_device::fork::check(aquifer_device::Operation::HostAlloc)?;
        let pinned = PinnedPool::new(device);
        pinned.set_limit(config.pinned_limit);
        let staging = Staging::new(&pinned, config);
        Ok(Arc::new(Runtime { pinned, levels: Levels::new(device), shared: Arc::default(), staging }))
    }

    /// Pinned memory for copies of its device.
    pub fn pinned(&self) -> &PinnedPool {
        &self.pinned
    }

    /// Copies to and from memory of an allocator of its device.
    ///
    /// # Errors
    /// An allocator of another device, and errors of the driver.
    pub fn transfer(self: &Arc<Self>, allocator: &Allocator) -> Result<Transfer, TransferError> {
        let (is, needed) = (allocator.device().id(), self.pinned.device().id());
        if is != needed {
            return Err(RequestError::wrong_device("allocator", is, needed).into());
        }
        // As urgent as the device allows: kernels wait for copies.
        let streams = self.levels.at(i32::MIN)?;
        Ok(Transfer { inner: self.clone(), allocator: allocator.clone(), streams, stream: None })
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Runtime").field("device", self.pinned.device()).finish_non_exhaustive()
    }
}

impl Transfer {
    /// A handle of the same runtime whose copies run on `stream`, in order with the caller's work
    /// there. Other threads enqueue staged copies later. Where the stream captures by then, or is
    /// one thread's, such copies run on a stream of the runtime's, after the caller's work so far;
    /// waiting for `stream` on the host waits for uploads there, too.
    ///
    /// # Errors
    /// A stream of another device.
    pub fn on(&self, stream: &Stream) -> Result<Transfer, TransferError> {
        self.check_device("stream", stream.device_id())?;
        Ok(Transfer { stream: Some(stream.clone()), ..self.clone() })
    }

    /// A handle of the same runtime whose transfers have this priority, numerically: lower is more
    /// urgent. Clamped to the device's range ([`aquifer_device::DeviceInfo::priorities`]);
    /// [`i32::MAX`] is the least urgent. The first call with a priority creates its streams.
    ///
    /// *Effect.* More urgent staged transfers get chunks of the ring first, and may hold more of
    /// them: a bulk transfer yields to them between two chunks. Kernels that transfers launch, such
    /// as conversions, run on streams of this priority, which a GPU prefers. Drivers do not reorder
    /// copies: stream priorities have no effect on copies between host and device (CUDA on
    /// `cuStreamCreateWithPriority`). So a copy of pinned memory waits for the copies before
    /// it on its engine; split bulk transfers of pinned memory where others must pass. Copies
    /// between host memory have no priority.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn at_priority(&self, priority: i32) -> Result<Transfer, TransferError> {
        Ok(Transfer { streams: self.inner.levels.at(priority)?, ..self.clone() })
    }

    /// The priority of this handle's transfers, within the device's range; lower is more urgent.
    pub fn priority(&self) -> i32 {
        self.streams.priority()
    }

    /// The caller's stream ([`Transfer::on`]).
    pub fn stream(&self) -> Option<&Stream> {
        self.stream.as_ref()
    }

    /// A handle of the same runtime whose copies run on its own streams.
    #[must_use]
    pub fn without_stream(&self) -> Transfer {
        Transfer { stream: None, ..self.clone() }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.allocator.device()
    }

    /// The allocator of device memory.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Pinned memory for copies of this device.
    pub fn pinned(&self) -> &PinnedPool {
        &self.inner.pinned
    }

    /// The stream for the next copy in this direction: the caller's ([`Transfer::on`]), or the next
    /// one in rotation of the runtime's own of this handle's priority. Each call advances the
    /// rotation.
    pub fn next_stream(&self, direction: Direction) -> &Stream {
        self.stream.as_ref().unwrap_or_else(|| self.streams.next(direction))
    }

    /// As [`Transfer::next_stream`], for work that threads of the runtime enqueue, and a stream of
    /// the runtime's for what the first cannot take.
    ///
    /// # Errors
    /// A stream that captures.
    pub(crate) fn streams_for_threads(&self, direction: Direction) -> Result<(&Stream, &Stream), TransferError> {
        let own = self.streams.next(direction);
        let stream = self.stream.as_ref().unwrap_or(own);
        self.refuse_capture(stream)?;
        Ok((stream, own))
    }

    /// All work enqueued on the stream so far.
    ///
    /// # Errors
    /// A stream of another device, or one that captures.
    pub fn enqueued_on(&self, stream: &Stream) -> Result<Completion, TransferError> {
        self.check_device("stream", stream.device_id())?;
        self.refuse_capture(stream)?;
        Ok(Completion::enqueued(self.shared(), [covered_tick(stream)]))
    }

    /// Waits on the host until all transfers that handles of this runtime began are complete, on
    /// all streams, including those whose [`Completion`] was dropped. The [`Completion`] of each
    /// transfer has its error. Counted as a synchronisation if a transfer was not complete.
    ///
    /// Do not call it while holding an [`AccessGuard`] that such a transfer waits for: the thread
    /// would wait for itself.
    ///
    /// # Errors
    /// The first error of the driver, such as a lost device, after waiting for all transfers.
    pub fn synchronize(&self) -> Result<(), TransferError> {
        let Shared { in_flight, counters, .. } = &*self.inner.shared;
        if in_flight.is_empty() {
            return Ok(());
        }
        counters.waits();
        in_flight.wait()
    }

    /// Counters of all handles of this runtime.
    pub fn counters(&self) -> Counters {
        self.inner.shared.counters.read()
    }

    /// Sizes and counters of the staging ring.
    pub fn staging_stats(&self) -> StagingStats {
        self.inner.staging.stats()
    }

    /// The staging ring.
    pub(crate) fn staging(&self) -> &Staging {
        &self.inner.staging
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// True if copies on the caller's stream are captured into a graph that keeps what they use.
    ///
    /// # Errors
    /// As [`HostUses::of`].
    pub(crate) fn is_captured(&self) -> Result<bool, TransferError> {
        let Some(stream) = &self.stream else { return Ok(false) };
        Ok(HostUses::of(stream)?.is_some())
    }

    /// Refuses a copy whose values are for the caller, which a capture does not have.
    ///
    /// # Errors
    /// The caller's stream captures.
    pub fn refuse_captured(&self) -> Result<(), TransferError> {
        self.stream.as_ref().map_or(Ok(()), |stream| self.refuse_capture(stream))
    }

    /// Names the caller's place in the program to the device's witness.
    #[doc(hidden)]
    #[track_caller]
    pub fn called_here(&self) -> Option<CalledFrom> {
        self.device().called_from(Location::caller())
    }

    /// Checks that something is of this device.
    ///
    /// # Errors
    /// [`RequestError::WrongDevice`] if it is not.
    #[doc(hidden)]
    pub fn check_device(&self, what: &'static str, is: u32) -> Result<(), TransferError> {
        let needed = self.device().id();
        if is == needed { Ok(()) } else { Err(RequestError::wrong_device(what, is, needed).into()) }
    }

    /// Checks that memory is of this device, and lies in its storage.
    ///
    /// # Errors
    /// [`RequestError::WrongDevice`], [`RequestError::OutOfBounds`].
    pub(crate) fn check_part(&self, part: DevicePart<'_>) -> Result<(), TransferError> {
        self.check_device("buffer", part.storage.device_id())?;
        let (first, len) = (part.storage.ptr().0, part.storage.bytes());
        let start = part.ptr.0.wrapping_sub(first);
        let end = start.saturating_add(part.bytes);
        if part.bytes > 0 && (part.ptr.0 < first || end > len) {
            return Err(RequestError::OutOfBounds { start, end, len }.into());
        }
        Ok(())
    }

    /// Checks that a stream does not capture.
    ///
    /// # Errors
    /// A stream that captures.
    #[doc(hidden)]
    pub fn refuse_capture(&self, stream: &Stream) -> Result<(), TransferError> {
        Ok(refuse_capture(stream, NO_CAPTURE)?)
    }

    /// Enqueues work on a stream while it holds access to the memory that the work uses. The memory
    /// then carries the tick.
    ///
    /// If `work` fails, the memory still counts as used: the driver may have begun the work.
    pub(crate) fn enqueue(
        &self,
        stream: &Stream,
        device: &[(&Arc<Storage>, AccessKind)],
        host: &[(HostPart<'_>, AccessKind)],
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<Tick, TransferError> {
        self.refuse_capture(stream)?;
        self.enqueue_uncovered(stream, device, host, work)?;
        Ok(covered_tick(stream))
    }

    /// Launches a graph on `stream`, after the work that uses its memory, on the device and on the
    /// host. Later uses of the memory come after the launch.
    ///
    /// # Errors
    /// A stream that captures, [`TransferError::UsedByGraph`], and errors of the launch.
    pub fn launch(
        &self,
        stream: &Stream,
        device: &[(&Arc<Storage>, AccessKind)],
        host: &HostUses,
        launch: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), TransferError> {
        let host = host.all();
        let parts: Vec<_> = host.iter().map(|(memory, kind)| (HostPart::all(memory), *kind)).collect();
        self.enqueue_uncovered(stream, device, &parts, || {
            host.iter().try_for_each(|(memory, kind)| memory.refuse_borrowed(*kind))?;
            Ok::<_, TransferError>(launch()?)
        })
    }

    /// As [`Transfer::enqueue`], for work that the host does not wait for: records no event after
    /// it. While a graph is captured that keeps what its copies use, the work becomes a part of it.
    pub(crate) fn enqueue_uncovered<E: Into<TransferError>>(
        &self,
        stream: &Stream,
        device: &[(&Arc<Storage>, AccessKind)],
        host: &[(HostPart<'_>, AccessKind)],
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), TransferError> {
        if let Some(uses) = HostUses::of(stream)? {
            let _noted = AccessGuard::acquire(stream, device)?;
            uses.note(host);
            return work().map_err(Into::into);
        }
        self.refuse_capture(stream)?;
        let access = AccessGuard::acquire(stream, device)?;
        let on_host = access_host(host, stream)?;
        let _held_off = hold_off_captures(stream, NO_CAPTURE)?;
        let worked = work();
        drop(on_host);
        drop(access);
        worked.map_err(Into::into)
    }
}

/// A stream's access to host memory. All threads lock in one order, by address, so that they do not
/// wait for each other in a circle.
fn access_host<'a>(
    host: &[(HostPart<'a>, AccessKind)],
    stream: &'a Stream,
) -> Result<Vec<HostAccess<'a>>, TransferError> {
    let mut wanted: Vec<_> = host.iter().map(|&(part, kind)| (part.memory, kind)).collect();
    // Writing sorts before reading, so that `dedup` keeps it where memory is listed twice.
    wanted.sort_unstable_by_key(|&(memory, kind)| (Arc::as_ptr(memory), std::cmp::Reverse(kind)));
    wanted.dedup_by_key(|(memory, _)| Arc::as_ptr(memory));
    wanted.into_iter().map(|(memory, kind)| memory.access(stream, kind)).collect()
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stream = self.stream.as_ref().map(Stream::id);
        f.debug_struct("Transfer")
            .field("device", &self.device().label())
            .field("stream", &stream)
            .finish_non_exhaustive()
    }
}
