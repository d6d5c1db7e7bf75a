//! The handle of an allocator: opening and closing one, what it consists of, its limit.

use std::any::Any;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use aquifer_device::fork::{self, Mutex};
use aquifer_device::internal::{on_loss, while_held};
use aquifer_device::{Device, DeviceError, Operation, Stream};

use crate::accounting::attribution::Outside;
use crate::allocation::WATCHED;
use crate::backing::choose::choose;
use crate::backing::paged::gate::Gate;
use crate::config::{Backing, Config, CrossStream, TagSource, listed, share};
use crate::core::Core;
use crate::error::{AllocError, WhySegments};
use crate::history::{History, HistoryOptions};
use crate::recovery::hooks::Hooks;
use crate::size_class::MIN_BLOCK;
use crate::sleep::wake_lock::has_access;
use crate::state::{AllocatorState, close_abandoned, slow};
use crate::tags::Tag;
use crate::types::Request;

/// The alignment that every allocation has, in bytes.
pub const ALIGNMENT: u64 = MIN_BLOCK;

/// The bytes in quarantine on a device that checks programs ([`Config::quarantine`]).
const QUARANTINE: u64 = 64 << 20;

/// The share of memory that is left free by default where it is the host's, as a divisor: half a GiB
/// of 8, 8 GiB of 128. What the system calls available is an estimate, too.
const HOST_SHARE: u64 = 16;

/// A caching, stream-ordered allocator for the memory of one device. Cloning gives another handle
/// of the same allocator.
///
/// An allocation is for one stream: work enqueued there from now on may use it. When its handle is
/// dropped, the stream's later allocations may reuse the memory at once, without waiting for the
/// device. To use it on other streams as well, see [`crate::Allocation::record_stream`], or use a
/// [`crate::Storage`] and [`crate::AccessGuard`]s.
///
/// ```
/// use aquifer::prelude::*;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let buffer = memory.alloc_bytes(100 << 20, &stream)?;
/// stream.fill(buffer.ptr(), 0, buffer.bytes())?;
/// drop(buffer); // legal at once: later work of the stream comes after the fill
/// assert_eq!(memory.memory_allocated(), 0);
/// assert_eq!(memory.memory_reserved(), 128 << 20); // what was bought ahead serves the next
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// Dropping the last handle waits for the device and gives back all memory that is not live. It
/// stays open while a [`crate::Growable`], [`crate::Exportable`] or [`crate::PinnedMapping`] lives.
/// Dropping a buffer makes no driver call, so where the last buffer outlives the allocator, memory
/// goes back at a later call: one that waits for the device or a stream of it, asks for its memory,
/// or creates or drops a stream, an event or an allocator, once the work that used the memory is
/// done; and when the last handle of the device is dropped.
#[derive(Clone)]
pub struct Allocator {
    // Closed before memory is given back.
    inner: Arc<Inner>,
    /// `None` if this only keeps the allocator open.
    _at_last: Option<Arc<AtLast>>,
}

/// Shared by the callers' handles, but not by those that only keep the allocator open
/// ([`Allocator::kept_open`]). Driver calls are allowed when the last of the former is dropped
/// (`open.rs`).
pub(crate) struct AtLast {
    pub(crate) device: Device,
    /// `None` once it is being dropped.
    pub(crate) inner: Option<Arc<Inner>>,
}

pub(crate) struct Inner {
    pub(crate) state: &'static AllocatorState,
    pub(crate) device: Device,
    config: Config,
    /// Bytes that may be held from the device; `u64::MAX` is no limit.
    pub(crate) limit: AtomicU64,
    /// The same by the share of what is free, as of the last time that the driver was asked.
    limit_of_free: AtomicU64,
    hooks: Arc<Hooks>,
    /// Who may change mappings.
    gate: Gate,
    /// Whether allocations carry tags at all.
    tagged: bool,
    /// [`WATCHED`] if the device has a witness that watches blocks, else 0.
    pub(crate) mark: u32,
    /// Why memory, or some of it, comes in segments.
    segments: OnceLock<WhySegments>,
    /// See [`Allocator::ready_stream`].
    ready_stream: OnceLock<Stream>,
    /// What was seen of the device's memory that no allocator holds.
    pub(crate) outside: Mutex<Outside>,
    /// See [`Allocator::services`].
    services: OnceLock<AssertUnwindSafe<Box<dyn Any + Send + Sync>>>,
}

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allocator").field("device", &self.inner.device.label()).finish_non_exhaustive()
    }
}

impl Inner {
    /// The tag that the thread's scopes give an allocation.
    #[inline]
    pub(crate) fn scope_tag(&self) -> Tag {
        if self.tagged { Tag::current() } else { Tag::default() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        // The last owner may be a buffer, whose drop makes no driver call.
        if let Some(stream) = self.ready_stream.take() {
            self.device.drop_later(Box::new(stream));
        }
        // Before the memory.
        drop(self.services.take());
        self.state.close();
    }
}

impl Allocator {
    /// Starts recording history, or changes how it is recorded. Snapshots contain it.
    ///
    /// Entries recorded before are kept, as far as there is room, unless `clear` is set.
    pub fn record_history(&self, options: HistoryOptions) {
        let mut guard = self.state().lock();
        if options.clear {
            guard.history.clear();
        }
        guard.history.record(options.entries, &options.skip);
    }

    /// Stops recording history and forgets all entries.
    pub fn stop_history(&self) {
        self.record_history(HistoryOptions::default());
    }

    /// The backing in use: [`crate::Config::backing`] where the device can map memory, else
    /// [`Backing::Segments`]. In the latter case a warning was logged, and
    /// [`Allocator::why_segments`] says why.
    ///
    /// ```
    /// use aquifer::memory::{Backing, WhySegments};
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:1GiB,vmm=off")?;
    /// let memory = Allocator::new(&device, "backing:paged")?;
    /// assert_eq!(memory.config().backing, Backing::Paged);
    /// assert_eq!(memory.backing(), Backing::Segments);
    /// assert_eq!(memory.why_segments(), Some(&WhySegments::DeviceCannot));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn backing(&self) -> Backing {
        let is_mapped = matches!(self.why_segments(), None | Some(WhySegments::NoAddresses(_)));
        if is_mapped { Backing::Paged } else { Backing::Segments }
    }

    /// The size in bytes of a granule, the unit in which physical memory is counted and mapped;
    /// `None` if memory comes in segments.
    pub fn granule_bytes(&self) -> Option<u64> {
        self.state().shared().granule()
    }

    /// As [`Allocator::new`], without the reserve.
    pub(crate) fn without_reserve(device: &Device, config: Config) -> Result<Allocator, AllocError> {
        config.validate()?;
        fork::check(Operation::MemoryInfo)?;
        // Memory of earlier ones, whose last buffers outlived them.
        close_abandoned();
        device.settle();
        let held =
            || all_states().iter().fold(0, |sum: u64, state| sum.saturating_add(state.shared().held_on(device).bytes));
        let before = held();
        let memory = device.memory_info()?;
        // What others took meanwhile must not count as growth later.
        // Asking a real GPU loads a library, which would make opening slower.
        let own = if device.info().is_virtual { device.memory_users().own } else { None };
        let outside = Outside::at_open(memory, before.min(held()), own);
        let limit = config.limit_bytes(memory.total, u64::MAX).unwrap_or(u64::MAX);
        let limit_of_free = config.limit_free_fraction.map_or(u64::MAX, |fraction| share(memory.free, fraction));
        let (paged, segments) =
            choose(device, &config)?.map_or_else(|why| (None, Some(why)), |paged| (Some(paged), None));
        let mut ignored = config.ignored(if paged.is_some() { Backing::Paged } else { Backing::Segments });
        if let Some(WhySegments::GranuleTooLarge { .. }) = segments {
            // The reason for segments says so already.
            ignored.retain(|option| option.key != "granule_mb");
        }
        if !ignored.is_empty() {
            tracing::warn!("options without effect: {}", listed(&ignored));
        }
        let crosses_streams = config.cross_stream != CrossStream::Off;
        let mut bits = 0;
        bits |= if config.tags == TagSource::Span { slow::SPANS } else { 0 };
        bits |= if config.no_cache { slow::NO_CACHE } else { 0 };
        let mut history = History::default();
        history.record(config.history as usize, &[]);
        let is_watched = device.witness().is_some_and(|witness| witness.watches_blocks());
        let quarantine = config.quarantine.unwrap_or(if is_watched { QUARANTINE } else { 0 });
        let core = Core::new(crosses_streams, quarantine, history, paged);
        let state = AllocatorState::open(device.for_memory(), core, bits);
        let hooks = Arc::new(Hooks::default());
        let tagged = config.tags != TagSource::Off;
        let inner = Inner {
            state,
            device: device.for_memory(),
            config,
            limit: limit.into(),
            limit_of_free: limit_of_free.into(),
            hooks,
            gate: Gate::default(),
            tagged,
            mark: if state.watches_blocks() { WATCHED } else { 0 },
            segments: segments.map_or_else(OnceLock::new, OnceLock::from),
            ready_stream: OnceLock::new(),
            outside: Mutex::new(outside),
            services: OnceLock::new(),
        };
        let inner = Arc::new(inner);
        register(&inner);
        Ok(Allocator::of_inner(inner))
    }

    /// The stream that memory which no work uses any more is allocated for ([`crate::raw`]).
    /// Nothing is enqueued on it but waits, so memory that it owns is unused as soon as what it
    /// waits for is done.
    pub(crate) fn ready_stream(&self) -> Result<&Stream, DeviceError> {
        if let Some(stream) = self.inner.ready_stream.get() {
            return Ok(stream);
        }
        let made = self.device().stream()?;
        Ok(self.inner.ready_stream.get_or_init(|| made))
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// A handle of the allocator that a live block of this state keeps open.
    pub(crate) fn of_keeper(state: &'static AllocatorState) -> Allocator {
        let inner = state.keeper().and_then(|keeper| keeper.downcast().ok());
        Allocator::keeping(inner.expect("a block keeps its allocator open"))
    }

    /// A handle that only keeps the allocator open.
    pub(crate) fn keeping(inner: Arc<Inner>) -> Allocator {
        Allocator { inner, _at_last: None }
    }

    /// A handle of an allocator that is open.
    pub(crate) fn of_inner(inner: Arc<Inner>) -> Allocator {
        inner.state.begin_handle();
        let at_last = AtLast { device: inner.device.clone(), inner: Some(inner.clone()) };
        Allocator { inner, _at_last: Some(Arc::new(at_last)) }
    }

    /// A handle that keeps the allocator open for something whose drop makes no driver call. If it
    /// is the last one, memory that is not live goes back like that of buffers which outlive the
    /// allocator.
    pub(crate) fn kept_open(&self) -> Allocator {
        Allocator::keeping(self.inner.clone())
    }

    /// What a crate above keeps with the allocator, as long as it is open: made at the first call.
    /// `None` if another crate does.
    #[doc(hidden)]
    pub fn services<T: Any + Send + Sync>(&self, make: impl FnOnce() -> T) -> Option<&T> {
        self.inner.services.get_or_init(|| AssertUnwindSafe(Box::new(make()))).downcast_ref()
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The configuration it was made with. The backing in use on this device may differ: see
    /// [`Allocator::backing`].
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// True if the device has a witness that watches blocks.
    #[inline]
    pub(crate) fn is_watched(&self) -> bool {
        self.inner.mark != 0
    }

    /// Why memory comes in segments (plain driver allocations), or some of it
    /// ([`WhySegments::NoAddresses`]); `None` if all of it is mapped.
    pub fn why_segments(&self) -> Option<&WhySegments> {
        self.inner.segments.get()
    }

    /// Notes why some memory comes in segments from now on, with a warning for the first time.
    pub(crate) fn note_segments(&self, why: WhySegments) {
        if self.inner.segments.set(why.clone()).is_ok() {
            tracing::warn!("some memory comes in segments and not in mapped granules: {why}");
        }
    }

    pub(crate) fn state(&self) -> &'static AllocatorState {
        self.inner.state
    }

    /// The gate for operations on mappings. Acquiring it waits for observers of mappings, so a
    /// thread that runs one is refused.
    pub(crate) fn gate(&self) -> Result<&Gate, AllocError> {
        fork::check(Operation::Map)?;
        if self.hooks().is_observing() { Err(AllocError::Observing) } else { Ok(&self.inner.gate) }
    }

    /// Refuses a stream of another device.
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<(), AllocError> {
        let (is, needed) = (stream.device_id(), self.inner.device.id());
        if is == needed { Ok(()) } else { Err(AllocError::wrong_device("stream", is, needed)) }
    }

    pub(crate) fn hooks(&self) -> &Arc<Hooks> {
        &self.inner.hooks
    }

    /// The limit on bytes held from the device, if there is one. With `limit_free_fraction`, it is
    /// as of the last time that memory was taken.
    pub fn limit(&self) -> Option<u64> {
        let Inner { limit, limit_of_free, .. } = &*self.inner;
        let limit = limit.load(Ordering::Relaxed).min(limit_of_free.load(Ordering::Relaxed));
        (limit != u64::MAX).then_some(limit)
    }

    /// Sets the limit to its share of the bytes that are free on the device or held from it, and
    /// returns it; `u64::MAX` if it is no share.
    pub(crate) fn limit_free(&self, bytes: u64) -> u64 {
        let limit = self.config().limit_free_fraction.map_or(u64::MAX, |fraction| share(bytes, fraction));
        // A limit that was set meanwhile stays.
        let set = |old| (old != u64::MAX).then_some(limit);
        let old = self.inner.limit_of_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
        if old.is_ok() { limit } else { u64::MAX }
    }

    /// Sets or removes the limit on bytes held from the device. Memory held already is kept. A lower
    /// limit ends the buying of memory that would only save driver calls.
    pub fn set_limit(&self, limit: Option<u64>) {
        let limit = limit.unwrap_or(u64::MAX);
        if limit < self.inner.limit.swap(limit, Ordering::Relaxed) {
            self.state().shared().forget_moves();
        }
        self.inner.limit_of_free.store(u64::MAX, Ordering::Relaxed);
    }

    /// Sets the limit to a share of the device's memory, in [0, 1]; 1 removes it. The share
    /// `bytes / total` allows `bytes`.
    ///
    /// # Errors
    /// When the fraction is out of range.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<(), AllocError> {
        let config = Config { per_process_memory_fraction: fraction, ..Config::default() };
        config.validate()?;
        let total = self.inner.device.info().total_bytes;
        self.set_limit(config.limit_bytes(total, total));
        Ok(())
    }

    /// Bytes that are left free on the device: [`Config::headroom`], or its default there.
    pub fn headroom(&self) -> u64 {
        let info = self.device().info();
        self.config().headroom.unwrap_or(if info.shares_host_memory { info.total_bytes / HOST_SHARE } else { 0 })
    }

    /// Bytes in live blocks now: PyTorch's `memory_allocated()`.
    pub fn memory_allocated(&self) -> u64 {
        self.inner.state.read(|shared| shared.counters.bytes.current_of_all())
    }

    /// Bytes held from the device now: PyTorch's `memory_reserved()`.
    pub fn memory_reserved(&self) -> u64 {
        self.inner.state.read(|shared| shared.reserved())
    }

    /// That memory has to be mapped for `what`, and why it is not.
    pub(crate) fn not_mapped(&self, what: &'static str) -> AllocError {
        // There is a reason wherever there is no mapped memory.
        let why = self.why_segments().cloned().unwrap_or(WhySegments::DeviceCannot);
        AllocError::NotMapped { what, why: Box::new(why) }
    }

    /// As [`Core::paged_granule_for`]. The stream may be unknown: not every request is
    /// for a block of one.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        self.state().shared().paged_granule_for(request)
    }
}

#[cfg(not(aquifer_shuttle))]
static OPEN: Mutex<Vec<Entered>> = Mutex::new(Vec::new());

// A scheduler's locks are bound to one execution.
#[cfg(aquifer_shuttle)]
shuttle::lazy_static! {
    static ref OPEN: Mutex<Vec<Entered>> = Mutex::new(Vec::new());
}

/// An allocator in that list.
struct Entered {
    inner: Weak<Inner>,
    state: &'static AllocatorState,
    device: u32,
}

/// Enters an allocator.
pub(crate) fn register(inner: &Arc<Inner>) {
    on_loss(note_lost);
    while_held(has_access);
    let mut open = OPEN.lock();
    // Buffers of a closed allocator may live as long as its state serves no other one.
    open.retain(|other| other.inner.strong_count() > 0 || !std::ptr::eq(other.state, inner.state));
    open.push(Entered { inner: Arc::downgrade(inner), state: inner.state, device: inner.device.id() });
    drop(open);
    if inner.device.lost().is_some() {
        note_lost(inner.device.id());
    }
}

/// Has allocations of a device that is lost leave the fast path, to be refused.
fn note_lost(device: u32) {
    for Entered { inner, state, device: its } in &*OPEN.lock() {
        if *its == device && inner.strong_count() > 0 {
            state.slow_reasons().fetch_or(slow::LOST, Ordering::Relaxed);
        }
    }
}

/// Handles of all open allocators, in the order in which they were made, or of those of a device
/// alone: a handle keeps its allocator open as long as it lives. The lock is not held when they are
/// dropped, as dropping the last handle of an allocator may call the driver.
pub(crate) fn all_open(device: Option<u32>) -> Vec<Allocator> {
    let open = OPEN.lock();
    let those = open.iter().filter(|entered| device.is_none_or(|device| entered.device == device));
    let those: Vec<_> = those.filter_map(|entered| entered.inner.upgrade()).collect();
    drop(open);
    those.into_iter().map(Allocator::of_inner).collect()
}

/// The states of all allocators, each once, closed ones included. Unlike their handles, these keep
/// none open.
pub(crate) fn all_states() -> Vec<&'static AllocatorState> {
    OPEN.lock().iter().map(|entered| entered.state).collect()
}
