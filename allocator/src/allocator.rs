//! The handle of an allocator: allocation, limits, release.

use std::any::Any;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use aquifer_device::fork::Mutex;
use aquifer_device::{Device, DevicePtr, Operation, Stream, fork};

use crate::accounting::counters::Hot;
use crate::allocation::{Allocation, CHECKED};
use crate::backing::paged::{Gate, record_milestone};
use crate::backing::{self, WhySegments};
use crate::config::{Backing, Config, CrossStream, TagSource, listed};
use crate::error::AllocError;
use crate::heap::BlockId;
use crate::history::History;
use crate::open::register;
use crate::pools::capture::refuse_capture;
use crate::recovery::hooks::Hooks;
use crate::shell::arena::Arena;
use crate::shell::core::{Core, Granted, Request};
use crate::shell::{Shell, close_abandoned, leave_services, special};
use crate::size_class::{MIN_BLOCK, REQUEST_LIMIT, SizeClasses};
use crate::tags::Tag;

/// The alignment that every allocation has, in bytes.
pub const ALIGNMENT: u64 = MIN_BLOCK;
/// The largest alignment that can be asked for, in bytes.
const ALIGNMENT_MAX: u64 = 2 << 20;

/// A caching, stream-ordered allocator for the memory of one device. Cloning gives another handle of the same allocator.
///
/// An allocation is for one stream: work enqueued there from now on may use it. When its handle is dropped, the stream's later
/// allocations may reuse the memory at once, without waiting for the device. To use it on other streams as well, see
/// [`Allocation::record_stream`], or use a [`crate::Buffer`] and [`crate::Turn`]s.
///
/// ```
/// use aquifer_allocator::{Allocator, Config};
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::parse("24GiB")?));
/// let allocator = Allocator::new(&device, Config::default())?;
/// let stream = device.stream()?;
/// let buffer = allocator.alloc_bytes(100 << 20, &stream)?;
/// stream.fill(buffer.ptr(), 0, buffer.bytes())?;
/// drop(buffer); // legal at once: later work of the stream comes after the fill
/// assert_eq!(allocator.memory_allocated(), 0);
/// assert_eq!(allocator.memory_reserved(), 100 << 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Dropping the last handle waits for the device and gives back the memory that nobody holds. It stays
/// open while a [`crate::Growable`], [`crate::Exportable`] or [`crate::PinnedMapping`] lives. Memory of buffers that outlive the
/// allocator goes back later: when an allocator is made or dropped, or with [`Device::settle`]. Dropping a buffer makes no driver call.
#[derive(Clone)]
pub struct Allocator {
    // Closed before memory is given back.
    inner: Arc<Inner>,
    /// `None` if this only keeps the allocator open.
    _at_last: Option<Arc<AtLast>>,
}

/// Shared by the handles that people hold, but not by those that only keep the allocator open ([`Allocator::kept_open`]): when the last
/// of the former is dropped, driver calls are allowed.
struct AtLast {
    device: Device,
    inner: Weak<Inner>,
}

impl Drop for AtLast {
    fn drop(&mut self) {
        // Buffers may keep it open.
        if self.inner.strong_count() == 0 {
            self.device.settle();
            close_abandoned();
        }
    }
}

pub(crate) struct Inner {
    shell: &'static Shell,
    device: Device,
    config: Config,
    classes: SizeClasses,
    /// Bytes that may be held from the device; `u64::MAX` is no limit.
    limit: AtomicU64,
    hooks: Arc<Hooks>,
    /// Who may change mappings.
    gate: Gate,
    /// Whether allocations carry tags at all.
    tagged: bool,
    /// [`CHECKED`] if the device is a simulated one that checks how work uses blocks, else 0.
    mark: u32,
    /// Why memory comes in segments, whose free pieces are counted; `None` if it is mapped.
    segments: Option<WhySegments>,
    /// What other crates keep for the allocator's buffers, one of each type.
    services: Mutex<Vec<Service>>,
}

/// See [`Allocator::service`].
pub(crate) type Service = Arc<dyn Any + Send + Sync>;

impl fmt::Debug for Allocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut this = f.debug_struct("Allocator");
        this.field("device", &self.inner.device.label())
            .field("config", &self.inner.config.to_string())
            .finish_non_exhaustive()
    }
}

impl Inner {
    /// The tag that the thread's scopes give an allocation.
    #[inline]
    fn scope_tag(&self) -> Tag {
        if self.tagged { Tag::current() } else { Tag::default() }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        leave_services(std::mem::take(self.services.get_mut()));
        self.shell.close();
    }
}

impl Allocator {
    /// An allocator for `device`, configured by a [`Config`], or by options as text, such as `"limit_mb:4096"`. The
    /// rest of the process does not share it; [`crate::DeviceAllocator::allocator`] gives one that it does.
    ///
    /// # Errors
    /// When the configuration contradicts itself, or the driver cannot tell the device's memory.
    pub fn new(
        device: &Device,
        config: impl TryInto<Config, Error: Into<AllocError>>,
    ) -> Result<Allocator, AllocError> {
        Allocator::configured(device, config.try_into().map_err(Into::into)?)
    }

    fn configured(device: &Device, config: Config) -> Result<Allocator, AllocError> {
        config.validate()?;
        fork::check(Operation::MemoryInfo)?;
        // Memory of earlier ones, whose last buffers outlived them.
        close_abandoned();
        device.settle();
        let memory = device.memory_info()?;
        let limit = config.limit_bytes(memory.total, memory.free).unwrap_or(u64::MAX);
        let (paged, segments) =
            backing::choose(device, &config)?.map_or_else(|why| (None, Some(why)), |paged| (Some(paged), None));
        let mut ignored = config.ignored(if paged.is_some() { Backing::Paged } else { Backing::Segments });
        if let Some(WhySegments::GranuleTooLarge { .. }) = segments {
            // That was told with the reason for segments.
            ignored.retain(|option| option.key != "granule_mb");
        }
        if !ignored.is_empty() {
            tracing::warn!("options without effect: {}", listed(&ignored));
        }
        let classes = SizeClasses::new(&config);
        let classes = if paged.is_some() { classes.paged() } else { classes };
        let crosses_streams = config.cross_stream != CrossStream::Off;
        let mut bits = 0;
        bits |= if config.tags == TagSource::Span { special::SPANS } else { 0 };
        bits |= if config.no_cache { special::NO_CACHE } else { 0 };
        let core = Core {
            device: Some(device.clone()),
            classes: classes.clone(),
            crosses_streams,
            collects_garbage: config.garbage_collection_threshold > 0.0,
            paged,
            ..Core::default()
        };
        let mut history = History::default();
        history.record(config.history as usize, &[]);
        let shell = Shell::open(core, history, bits);
        let hooks = Arc::new(Hooks::default());
        let tagged = config.tags != TagSource::Off;
        let inner = Inner {
            shell,
            device: device.clone(),
            config,
            classes,
            limit: limit.into(),
            hooks,
            gate: Gate::default(),
            tagged,
            mark: if device.checks().is_some() { CHECKED } else { 0 },
            segments,
            services: Mutex::default(),
        };
        let inner = Arc::new(inner);
        register(&inner);
        Ok(Allocator::of_inner(inner))
    }

    /// What another crate keeps for the allocator's buffers, one of each type: made at the first call, and dropped once the
    /// allocator is closed and driver calls are allowed. It must not hold the allocator.
    pub(crate) fn service<S: Any + Send + Sync, E>(&self, make: impl FnOnce() -> Result<S, E>) -> Result<Arc<S>, E> {
        let find = |services: &[Service]| services.iter().find_map(|service| service.clone().downcast().ok());
        if let Some(service) = find(&self.inner.services.lock()) {
            return Ok(service);
        }
        // Without the lock, as this may call the driver. If two threads come here, the first one's is taken.
        let made = Arc::new(make()?);
        let mut services = self.inner.services.lock();
        if let Some(service) = find(&services) {
            drop(services);
            return Ok(service);
        }
        services.push(made.clone());
        Ok(made)
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// A handle of an allocator that is open.
    pub(crate) fn of_inner(inner: Arc<Inner>) -> Allocator {
        let at_last = AtLast { device: inner.device.clone(), inner: Arc::downgrade(&inner) };
        Allocator { inner, _at_last: Some(Arc::new(at_last)) }
    }

    /// A handle that keeps the allocator open for something whose drop makes no driver call. If it is the last one, memory that nobody
    /// holds goes back as that of buffers which outlive the allocator.
    pub(crate) fn kept_open(&self) -> Allocator {
        Allocator { inner: self.inner.clone(), _at_last: None }
    }

    /// Allocates `bytes` for work on `stream`, aligned to [`ALIGNMENT`]. The memory is uninitialised. A request of zero bytes gives a handle
    /// with a null pointer and no memory.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], with a report, after everything was tried; [`AllocError::TooLarge`] from 2^60 bytes on;
    /// a stream of another device, or one that captures while the thread is not routed to a private pool
    /// ([`Allocator::capture`]); a failing driver.
    #[track_caller]
    #[inline]
    pub fn alloc_bytes(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        // The handle is put together here, from registers, whichever way its words came. If a callee wrote it, the caller would copy it
        // with wider loads than it was written with, which stall until the stores are through: longer than all else takes.
        let at = Location::caller();
        let Granted { arena, block, addr } = match self.grant_cached(bytes, stream, at, false) {
            Ok(granted) => granted,
            Err(searched) => self.grant_the_long_way(bytes, stream, searched, at)?,
        };
        Ok(Allocation::new((arena, block), stream.id() | self.inner.mark, DevicePtr(addr), bytes))
    }

    /// A free block that the stream may reuse at once, to be given out by its address alone if it is `raw`. If there is
    /// none, whether it was searched for.
    #[inline]
    pub(crate) fn grant_cached(
        &self,
        bytes: u64,
        stream: &Stream,
        at: &'static Location<'static>,
        raw: bool,
    ) -> Result<Granted, bool> {
        let arena = self.inner.shell.arenas.get(stream.id()).ok_or(false)?;
        let (block, addr) = self.take_cached(arena, bytes, stream, at, raw);
        if block == BlockId::NONE { Err(addr != 0) } else { Ok(Granted { arena, block, addr }) }
    }

    /// Takes a free block that the stream may reuse at once: its number and address. If there is none,
    /// [`BlockId::NONE`] and whether it was searched for. One function serves both kinds: what it calls is compiled
    /// into it only where it has no other caller.
    #[inline(never)]
    fn take_cached(
        &self,
        own: &'static Arena,
        bytes: u64,
        stream: &Stream,
        at: &'static Location<'static>,
        raw: bool,
    ) -> (BlockId, u64) {
        let inner = &*self.inner;
        let special = inner.shell.special().load(Ordering::Relaxed) != 0;
        if bytes == 0
            || bytes >= REQUEST_LIMIT
            || stream.timeline().device_id_unless_capturing() != inner.device.id()
            || special
        {
            return (BlockId::NONE, 0);
        }
        let Some(mut arena) = own.enter() else { return (BlockId::NONE, 0) };
        let size = inner.classes.round(bytes);
        let pool = inner.classes.pool(size) as u16;
        let request =
            Request { requested: bytes, size, pool, slot: stream.id(), tag: inner.scope_tag(), is_regular: true };
        let granted = arena.take_own_hot(&request);
        let milestone_is_due = arena.is_milestone_due();
        if raw && let Some(granted) = &granted {
            own.add_raw(granted.addr, granted.block);
        }
        drop(arena);
        if milestone_is_due {
            record_milestone(stream);
        }
        let Some(granted) = granted else { return (BlockId::NONE, 1) };
        if inner.mark != 0 {
            own.tell_of_block(granted.block, DevicePtr(granted.addr), bytes, at);
        }
        (granted.block, granted.addr)
    }

    /// Grants a block where the fast path does not apply: zero bytes, a stream's first allocation, a request that no free block serves,
    /// anything special.
    #[cold]
    #[inline(never)]
    pub(crate) fn grant_the_long_way(
        &self,
        bytes: u64,
        stream: &Stream,
        searched: bool,
        at: &'static Location<'static>,
    ) -> Result<Granted, AllocError> {
        fork::check(Operation::Alloc)?;
        let inner = &*self.inner;
        if bytes == 0 || bytes >= REQUEST_LIMIT || stream.device_id() != inner.device.id() {
            return Ok(Granted { arena: self.arena_for_zero(bytes, stream)?, block: BlockId::NONE, addr: 0 });
        }
        let granted = self.grant_rounded(bytes, inner.classes.round(bytes), stream, searched)?;
        granted.arena.tell_of_block(granted.block, DevicePtr(granted.addr), bytes, at);
        Ok(granted)
    }

    /// Grants a block of `size` bytes, a result of rounding, for a request of `bytes` that was looked at, and perhaps
    /// searched for in vain.
    fn grant_rounded(&self, bytes: u64, size: u64, stream: &Stream, searched: bool) -> Result<Granted, AllocError> {
        let inner = &*self.inner;
        let shell = inner.shell;
        if shell.special().load(Ordering::Relaxed) != 0 {
            return self.alloc_specially(bytes, size, stream);
        }
        refuse_capture(stream)?;
        let pool = inner.classes.pool(size) as u16;
        let is_regular = size == inner.classes.round(bytes);
        let request = Request { requested: bytes, size, pool, slot: stream.id(), tag: inner.scope_tag(), is_regular };
        let hopeless = searched && !shell.arenas.get(stream.id()).is_some_and(Arena::has_remote_frees);
        let granted = if hopeless { None } else { shell.enter(stream).take_own(&request) };
        granted.map_or_else(|| self.climb(&request), Ok)
    }

    /// The arena of a request of zero bytes; refuses what is too large, or for a stream of another device.
    #[cold]
    fn arena_for_zero(&self, bytes: u64, stream: &Stream) -> Result<&'static Arena, AllocError> {
        if stream.device_id() != self.inner.device.id() {
            return Err(AllocError::wrong_device("stream", stream.device_id(), self.inner.device.id()));
        }
        if bytes >= REQUEST_LIMIT {
            return Err(AllocError::TooLarge { requested: bytes });
        }
        Ok(self.inner.shell.enter(stream).arena)
    }

    /// Allocates while the allocator sleeps, blocks wait, threads are routed to private pools, tags come from spans, or nothing is cached.
    #[cold]
    fn alloc_specially(&self, bytes: u64, size: u64, stream: &Stream) -> Result<Granted, AllocError> {
        fork::check(Operation::Alloc)?;
        let shell = self.inner.shell;
        if shell.has_left() {
            // Taking the locks applies what was left.
            drop(shell.part(None));
        }
        let special = shell.special().load(Ordering::Relaxed);
        if special & special::ASLEEP != 0 {
            return Err(AllocError::Asleep);
        }
        let waits = special & special::WAITING != 0;
        let asked = waits && shell.core().waiting.is_to_be_asked_for();
        if asked {
            self.poll_waiting()?;
        }
        let tag = if special & special::SPANS != 0 { Tag::of_span() } else { self.inner.scope_tag() };
        let kind = self.inner.classes.pool(size);
        loop {
            let private = if special & special::ROUTED != 0 { self.route_and_note(stream) } else { None };
            let private = private.map(|numbers| numbers[kind as usize]);
            if private.is_none() {
                refuse_capture(stream)?;
            }
            let pool = private.unwrap_or(kind as u16);
            let request = Request { requested: bytes, size, pool, slot: stream.id(), tag, is_regular: false };
            let granted = self.serve_specially(&request, stream, special, waits && !asked)?;
            if private.is_none() || !self.came_from_a_graph(pool, stream) {
                return Ok(granted);
            }
            // Nobody has used it.
            granted.arena.free(granted.block, None, bytes);
        }
    }

    /// Serves a request that was routed; `asks` whether blocks that wait are asked about if there is nothing for it.
    fn serve_specially(
        &self,
        request: &Request,
        stream: &Stream,
        special: u32,
        asks: bool,
    ) -> Result<Granted, AllocError> {
        let shell = self.inner.shell;
        let mut arena = shell.enter(stream);
        // Private pools keep their memory also without a cache.
        let caches = special & special::NO_CACHE == 0 || request.pool >= 2;
        let granted = if caches { arena.take_own(request) } else { None };
        drop(arena);
        if special & special::NO_CACHE != 0 {
            self.release_where(|whole| whole.releasable())?;
        }
        if granted.is_none() && asks {
            self.poll_waiting()?;
            if let Some(granted) = shell.enter(stream).take_own(request) {
                return Ok(granted);
            }
        }
        match granted {
            Some(granted) => Ok(granted),
            None => self.climb(request),
        }
    }

    /// Allocates with a larger alignment: a power of two up to 2 MiB. The block is larger than the request by the alignment less 512 bytes.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`], and an invalid alignment.
    #[track_caller]
    #[inline]
    pub fn alloc_aligned(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
            return Err(AllocError::InvalidAlignment { alignment });
        }
        let padded = bytes.saturating_add(alignment.saturating_sub(ALIGNMENT));
        if alignment <= ALIGNMENT
            || bytes == 0
            || padded >= REQUEST_LIMIT
            || stream.device_id() != self.inner.device.id()
        {
            return self.alloc_bytes(bytes, stream);
        }
        let Granted { arena, block, addr } =
            self.grant_rounded(bytes, self.inner.classes.round(padded), stream, false)?;
        let ptr = DevicePtr(addr.next_multiple_of(alignment));
        arena.tell_of_block(block, ptr, bytes, Location::caller());
        Ok(Allocation::new((arena, block), stream.id() | self.inner.mark, ptr, bytes))
    }

    /// Allocates memory and enqueues a fill with zeros on `stream`.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`]; a failing fill gives the memory back.
    #[track_caller]
    pub fn alloc_bytes_zeroed(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        if bytes == 0 {
            return self.alloc_bytes(bytes, stream);
        }
        let _awake = self.keep_awake()?;
        let allocation = self.alloc_bytes(bytes, stream)?;
        stream.fill(allocation.ptr(), 0, bytes)?;
        Ok(allocation)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The configuration it was made with. The backing in use on this device may differ: see [`Allocator::backing`].
    pub fn config(&self) -> &Config {
        &self.inner.config
    }

    /// True if the device is a simulated one that checks how work uses blocks.
    #[inline]
    pub(crate) fn is_checked(&self) -> bool {
        self.inner.mark != 0
    }

    pub(crate) fn classes(&self) -> &SizeClasses {
        &self.inner.classes
    }

    /// Why memory comes in segments (plain driver allocations); `None` if it is mapped.
    pub fn why_segments(&self) -> Option<&WhySegments> {
        self.inner.segments.as_ref()
    }

    pub(crate) fn counts_pieces(&self) -> bool {
        self.inner.segments.is_some()
    }

    pub(crate) fn shell(&self) -> &'static Shell {
        self.inner.shell
    }

    /// Whoever passes it waits for observers of mappings, so a thread that is within one is refused.
    pub(crate) fn gate(&self) -> Result<&Gate, AllocError> {
        fork::check(Operation::Map)?;
        if self.hooks().is_observing() { Err(AllocError::Observing) } else { Ok(&self.inner.gate) }
    }

    pub(crate) fn hooks(&self) -> &Arc<Hooks> {
        &self.inner.hooks
    }

    /// The limit on bytes held from the device, if there is one.
    pub fn limit(&self) -> Option<u64> {
        let limit = self.inner.limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// Sets or removes the limit on bytes held from the device. Memory held already is kept.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.inner.limit.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Sets the limit to a share of the device's memory, in [0, 1]; 1 removes it.
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

    /// Bytes in live blocks now: PyTorch's `memory_allocated()`.
    pub fn memory_allocated(&self) -> u64 {
        self.inner.shell.apply_queued_frees();
        self.inner.shell.read(Hot::Bytes).all.current
    }

    /// Bytes held from the device now: PyTorch's `memory_reserved()`.
    pub fn memory_reserved(&self) -> u64 {
        self.inner.shell.counters.reserved_bytes.read().all.current
    }

    /// As [`Core::paged_granule_for`]. The stream may have no arena: not every request is for a block of one.
    pub(crate) fn paged_granule_for(&self, request: &Request) -> Option<u64> {
        self.shell().core().paged_granule_for(request)
    }
}
