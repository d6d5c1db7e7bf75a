//! `Transfer`: the transfer runtime of one device.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use aquifer_allocator::{AccessGuard, Storage};
use aquifer_device::fork::Mutex;
use aquifer_device::internal::CalledFrom;
use aquifer_device::{AccessKind, Device, DeviceError, RawStream, RequestError, Stream, Tick};
use aquifer_kernels::DType;

use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::captured::HostUses;
use crate::transfer::counters::{Counters, Direction};
use crate::transfer::enqueue::{covered_tick, hold_off_captures, refuse_capture};
use crate::transfer::host_memory;
use crate::transfer::pending::{Pending, Shared};
use crate::transfer::pinned::{HostAccess, HostPart, PinnedConfig, PinnedPool};
use crate::transfer::staging::{Staging, StagingConfig, StagingStats};
use crate::transfer::streams::{Levels, Streams};

/// The advice in errors about streams that capture.
pub(crate) const NO_CAPTURE: &str = "this copy cannot be captured into a graph: copy before the capture, or after a launch on its stream. In \
     `Allocator::graph`, uploads from memory can be captured, and downloads to a `PinnedBuffer`";

/// The configuration of a [`Transfer`].
///
/// ```
/// use aquifer::transfer::{PinnedConfig, StagingConfig, TransferConfig};
/// let config = TransferConfig::default()
///     .pinned(PinnedConfig::default().limit_bytes(16 << 30))
///     .staging(StagingConfig::default().threads(4))
///     .streams(1);
/// assert_eq!((config.pinned.limit_bytes, config.streams), (Some(16 << 30), 1));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransferConfig {
    /// Page-locked memory.
    pub pinned: PinnedConfig,
    /// Number of streams per direction and priority, 1 to 32: fewer count as 1, more as 32.
    /// Transfers use them in rotation, so that a small one need not wait for a large one.
    pub streams: usize,
    /// The ring that stages ordinary memory and files.
    pub staging: StagingConfig,
    /// The default priority of transfers ([`Transfer::at_priority`]), numerically: lower is more
    /// urgent. Clamped to the device's range.
    pub priority: i32,
}

impl Default for TransferConfig {
    /// Two streams per direction, as urgent as the device allows: kernels wait for copies.
    fn default() -> Self {
        TransferConfig {
            pinned: PinnedConfig::default(),
            streams: 2,
            staging: StagingConfig::default(),
            priority: i32::MIN,
        }
    }
}

impl TransferConfig {
    /// Sets [`TransferConfig::pinned`].
    #[must_use]
    pub fn pinned(self, pinned: PinnedConfig) -> Self {
        Self { pinned, ..self }
    }

    /// Sets [`TransferConfig::streams`].
    #[must_use]
    pub fn streams(self, streams: usize) -> Self {
        Self { streams, ..self }
    }

    /// Sets [`TransferConfig::staging`].
    #[must_use]
    pub fn staging(self, staging: StagingConfig) -> Self {
        Self { staging, ..self }
    }

    /// Sets [`TransferConfig::priority`].
    #[must_use]
    pub fn priority(self, priority: i32) -> Self {
        Self { priority, ..self }
    }
}

/// Copies between the host and one device, and within the device. Cloning gives another handle of
/// the same runtime.
///
/// Copies run on streams of the runtime's own, or on the caller's ([`Transfer::on`]), and calls
/// return before copies are done.
///
/// *Order.* Buffers carry the ticks of the work that uses them. So every stream that accesses a
/// buffer ([`aquifer_allocator::AccessGuard`], the kernels of `aquifer-kernels`, other transfers)
/// is ordered after the copies without further calls. Host memory that is in flight cannot be
/// touched: see [`crate::PinnedBuffer`].
///
/// *Waiting.* Calls that make the host wait for the device say so in their name or documentation,
/// and [`Transfer::counters`] counts them. [`crate::transfer::HostMemoryStats::num_waits`] counts
/// waits for page-locked memory that a copy still uses.
///
/// Streams that capture a graph are refused, because a graph's work runs later, and may run many
/// times.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::kernels::Kernels;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let allocator = Allocator::of(&device)?;
/// let transfer = Transfer::new(&allocator)?;
/// let (kernels, stream) = (Kernels::load(&device)?, device.stream()?);
///
/// let mut host = transfer.pinned().alloc::<f32>(1000)?;
/// host.write()?.fill(2.0);
/// let mut x: Buffer<f32> = allocator.alloc(1000, &stream)?;
/// let mut y: Buffer<f32> = allocator.alloc(1000, &stream)?;
/// let _ = transfer.upload(&host, &mut x)?;     // returns at once
/// kernels.fill(&stream, &mut y, 1.0f32)?;      // runs at the same time
/// kernels.axpy(&stream, 3.0, &x, &mut y)?;     // ordered after it
/// let result = transfer.to_pinned(&y)?.wait()?;  // waits on the host
/// assert_eq!(result.read()?[999], 7.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Transfer {
    pub(crate) inner: Arc<Runtime>,
    /// Not part of `Runtime`, which an open allocator owns.
    allocator: Allocator,
    /// The runtime's streams at this handle's priority.
    streams: Arc<Streams>,
    /// The caller's stream, which copies run on instead.
    stream: Option<Stream>,
}

pub(crate) struct Runtime {
    pub(crate) pinned: PinnedPool,
    levels: Levels,
    /// The default priority.
    priority: i32,
    /// The size up to which batched copies pay, by direction, once measured; an inner `None` if the
    /// driver has no batched copies.
    pub(crate) crossovers: [Mutex<Option<Option<u64>>>; 3],
    pub(crate) shared: Arc<Shared>,
    staging: Staging,
}

impl Runtime {
    pub(crate) fn new(device: &Device, config: TransferConfig) -> Result<Runtime, Error> {
        aquifer_device::fork::check(aquifer_device::Operation::HostAlloc)?;
        let pinned = PinnedPool::new(device, config.pinned)?;
        let staging = Staging::new(&pinned, config.staging);
        let (levels, priority) = (Levels::new(device, config.streams), config.priority);
        Ok(Runtime { pinned, levels, priority, crossovers: Default::default(), shared: Arc::default(), staging })
    }
}

impl Transfer {
    /// A runtime for the allocator's device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(allocator: &Allocator) -> Result<Transfer, Error> {
        Transfer::with_config(allocator, TransferConfig::default())
    }

    /// A runtime for the allocator's device, configured by `config`. Page-locks no memory and
    /// starts no thread before the first use.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn with_config(allocator: &Allocator, config: TransferConfig) -> Result<Transfer, Error> {
        Transfer::of_runtime(Arc::new(Runtime::new(allocator.device(), config)?), allocator)
    }

    pub(crate) fn of_runtime(inner: Arc<Runtime>, allocator: &Allocator) -> Result<Transfer, Error> {
        let streams = inner.levels.at(inner.priority)?;
        Ok(Transfer { inner, allocator: allocator.clone(), streams, stream: None })
    }

    /// A handle of the same runtime whose copies run on `stream`, in order with the caller's work
    /// there. Other threads enqueue staged copies later; wait for them before the stream captures,
    /// or they fail.
    ///
    /// # Errors
    /// A stream of another device.
    pub fn on(&self, stream: &Stream) -> Result<Transfer, Error> {
        self.check_stream(stream)?;
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
    /// `cuStreamCreateWithPriority`). So a copy of page-locked memory waits for the copies before
    /// it on its engine; split bulk transfers of page-locked memory where others must pass. Copies
    /// between host memory have no priority.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::Transfer;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (allocator, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let transfer = Transfer::new(&allocator)?; // as urgent as the device allows
    /// let background = transfer.at_priority(i32::MAX)?;
    /// assert!(background.priority() > transfer.priority());
    ///
    /// let mut weights: Buffer<u8> = allocator.alloc(64 << 20, &stream)?;
    /// let mut tokens: Buffer<u32> = allocator.alloc(1 << 20, &stream)?;
    /// let bulk = background.upload(vec![1u8; 64 << 20], &mut weights)?;
    /// transfer.upload(vec![7u32; 1 << 20], &mut tokens)?.wait()?; // passes the weights
    /// bulk.wait()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn at_priority(&self, priority: i32) -> Result<Transfer, Error> {
        Ok(Transfer { streams: self.inner.levels.at(priority)?, ..self.clone() })
    }

    /// The priority of this handle's transfers, within the device's range; lower is more urgent.
    pub fn priority(&self) -> i32 {
        self.streams.priority()
    }

    /// The runtime without the caller's stream, and that stream.
    pub(crate) fn without_stream(&self) -> (Transfer, Option<&Stream>) {
        (Transfer { stream: None, ..self.clone() }, self.stream.as_ref())
    }

    /// The device.
    pub fn device(&self) -> &Device {
        self.allocator.device()
    }

    /// The allocator of device memory.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Page-locked memory for copies of this device.
    pub fn pinned(&self) -> &PinnedPool {
        &self.inner.pinned
    }

    /// The stream for the next copy in this direction: the caller's ([`Transfer::on`]), or the next
    /// one in rotation of the runtime's own of this handle's priority. Each call advances the
    /// rotation.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{Direction, Transfer};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let [first, second, third] = [(); 3].map(|()| transfer.next_stream(Direction::Upload).id());
    /// assert!(first != second && first == third); // two streams a direction, in rotation
    ///
    /// let own = device.stream()?;
    /// assert_eq!(transfer.on(&own)?.next_stream(Direction::Upload).id(), own.id());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn next_stream(&self, direction: Direction) -> &Stream {
        self.stream.as_ref().unwrap_or_else(|| self.streams.next(direction))
    }

    /// As [`Transfer::next_stream`], for work that threads of the runtime enqueue: never a stream
    /// of one thread.
    ///
    /// # Errors
    /// A stream that captures.
    pub(crate) fn stream_for_threads(&self, direction: Direction) -> Result<&Stream, Error> {
        let for_all = self.stream.as_ref().filter(|stream| stream.raw() != RawStream::PER_THREAD);
        let stream = for_all.unwrap_or_else(|| self.streams.next(direction));
        self.refuse_capture(stream)?;
        Ok(stream)
    }

    /// New device memory for `len` elements.
    #[track_caller]
    pub(crate) fn alloc_elements(&self, len: usize, dtype: DType, stream: &Stream) -> Result<Buffer<u8>, Error> {
        self.allocator().alloc(host_memory::bytes_of(len, dtype.bytes())?, stream)
    }

    /// All work enqueued on the stream so far, as a [`Pending`] to wait for or to await.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::Transfer;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let stream = device.stream()?;
    /// let tick = stream.tick();
    /// transfer.enqueued_on(&stream)?.wait()?; // or `.await`
    /// assert!(tick.is_done()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A stream of another device, or one that captures.
    pub fn enqueued_on(&self, stream: &Stream) -> Result<Pending<()>, Error> {
        self.check_stream(stream)?;
        self.refuse_capture(stream)?;
        Ok(Pending::enqueued(self.shared(), covered_tick(stream), ()))
    }

    /// Waits on the host until all transfers that handles of this runtime began are complete, on
    /// all streams, including those whose [`Pending`] was dropped. The [`Pending`] of each transfer
    /// has its error. Counted as a synchronisation if a transfer was not complete.
    ///
    /// Do not call it while holding an [`AccessGuard`] that such a transfer waits for: the thread
    /// would wait for itself.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::Transfer;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (allocator, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let transfer = Transfer::new(&allocator)?;
    /// let mut weights: Buffer<u8> = allocator.alloc(64 << 20, &stream)?;
    /// let upload = transfer.upload(vec![1u8; 64 << 20], &mut weights)?; // threads of the runtime go on with it
    /// transfer.synchronize()?;
    /// assert!(upload.is_done()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The first error of the driver, such as a lost device, after waiting for all transfers.
    pub fn synchronize(&self) -> Result<(), Error> {
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
    pub(crate) fn is_captured(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| HostUses::of(stream).is_some())
    }

    /// Refuses a copy whose values are for the caller, which a capture does not have.
    pub(crate) fn refuse_captured(&self) -> Result<(), Error> {
        self.stream.as_ref().map_or(Ok(()), |stream| self.refuse_capture(stream))
    }

    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<(), Error> {
        self.check_device("stream", stream.device_id())
    }

    /// Names the caller's place in the program to the device's witness.
    #[track_caller]
    pub(crate) fn called_here(&self) -> Option<CalledFrom> {
        self.device().called_from(Location::caller())
    }

    pub(crate) fn check_device(&self, what: &'static str, is: u32) -> Result<(), Error> {
        let needed = self.device().id();
        if is == needed { Ok(()) } else { Err(RequestError::wrong_device(what, is, needed).into()) }
    }

    pub(crate) fn refuse_capture(&self, stream: &Stream) -> Result<(), Error> {
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
    ) -> Result<Tick, Error> {
        self.refuse_capture(stream)?;
        self.enqueue_uncovered(stream, device, host, work)?;
        Ok(covered_tick(stream))
    }

    /// As [`Transfer::enqueue`], for work that the host does not wait for: records no event after
    /// it. While a graph is captured that keeps what its copies use, the work becomes a part of it.
    pub(crate) fn enqueue_uncovered(
        &self,
        stream: &Stream,
        device: &[(&Arc<Storage>, AccessKind)],
        host: &[(HostPart<'_>, AccessKind)],
        work: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), Error> {
        if let Some(uses) = HostUses::of(stream) {
            let _noted = AccessGuard::acquire(stream, device)?;
            uses.note(host);
            return Ok(work()?);
        }
        self.refuse_capture(stream)?;
        let (access, on_host) = loop {
            // Without device memory: the threads that end reservations may need it.
            host.iter().for_each(|(part, kind)| part.memory.wait_unreserved(*kind));
            let access = AccessGuard::acquire(stream, device)?;
            // Another part of the memory may have been reserved meanwhile.
            if let Some(on_host) = access_host(host, stream)? {
                break (access, on_host);
            }
        };
        let _held_off = hold_off_captures(stream, NO_CAPTURE)?;
        let worked = work();
        drop(on_host);
        drop(access);
        Ok(worked?)
    }
}

/// A stream's access to host memory; `None` while a reservation conflicts. All threads lock in one
/// order, by address, so that they do not wait for each other in a circle.
fn access_host<'a>(
    host: &[(HostPart<'a>, AccessKind)],
    stream: &'a Stream,
) -> Result<Option<Vec<HostAccess<'a>>>, Error> {
    let mut wanted: Vec<_> = host.iter().map(|&(part, kind)| (part.memory, kind)).collect();
    // Writing sorts before reading, so that `dedup` keeps it where memory is listed twice.
    wanted.sort_unstable_by_key(|&(memory, kind)| (Arc::as_ptr(memory), std::cmp::Reverse(kind)));
    wanted.dedup_by_key(|(memory, _)| Arc::as_ptr(memory));
    let mut accesses = Vec::with_capacity(wanted.len());
    for (memory, kind) in wanted {
        match memory.try_access(stream, kind)? {
            Some(access) => accesses.push(access),
            None => return Ok(None),
        }
    }
    Ok(Some(accesses))
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("device", self.device()).field("stream", &self.stream).finish_non_exhaustive()
    }
}
