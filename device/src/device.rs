//! The handle of a device.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;

use crate::fork::Mutex;

use crate::context::Context;
use crate::counted::CallCounts;
use crate::driver::{
    DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{DeviceError, ErrorKind, Operation, Result};
use crate::event::Event;
use crate::external::ExternalStream;
use crate::fork;
use crate::label::DeviceLabel;
use crate::release::{Effort, HostMemory, Object, Reservation};
use crate::sim::{CalledFrom, Checks};
use crate::stream::Stream;
use crate::streams::Streams;
use crate::timeline::{Owner, ReusableTimelines, StreamKind, Tick, Timeline};
use crate::unfinished;
use crate::waits::WaitMark;

/// One GPU, real or simulated: creates streams and events, and allocates plain driver memory. Cloning gives another handle of the same
/// device.
///
/// [`Device::open`] opens a device by name, [`Device::best`] the best one, [`Device::new`] wraps a driver. Memory for programs comes from
/// `aquifer-allocator`, which caches it; [`Device::alloc`] is a plain driver allocation.
///
/// ```
/// use aquifer_device::Device;
/// let device = Device::open("sim:24GiB")?;
/// assert_eq!(device.info().total_bytes, 24 << 30);
/// let ptr = device.alloc(1 << 30)?;
/// assert_eq!(device.memory_info()?.free, 23 << 30);
/// device.free(ptr)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Device(Arc<Inner>);

pub(crate) struct Inner {
    context: Arc<Context>,
    default_stream: Stream,
    /// The per-thread default stream of each thread that has used it.
    per_thread: Mutex<HashMap<ThreadId, ThreadStream>>,
    /// Timelines of streams that are gone.
    reusable: Arc<ReusableTimelines>,
    /// Its streams by the driver's handle, and those that it adopted.
    streams: Streams,
    /// Why [`Device::best`] chose the device.
    choice: OnceLock<String>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        self.context.releases.forget_uses();
    }
}

/// A thread's default stream, and a sign that the thread runs.
struct ThreadStream {
    stream: Stream,
    runs: Weak<()>,
}

impl ThreadStream {
    /// True if the thread has ended. Its timeline can serve another stream once no handle of this one is left.
    fn has_ended(&self) -> bool {
        self.runs.strong_count() == 0
    }
}

thread_local! {
    /// Dropped when the thread ends.
    static RUNS: Arc<()> = Arc::default();
}

/// Number of ended threads from which on events are recorded for them. Every blocking stream waits for such an event, so they are recorded
/// for several threads at a time.
const ENDED_THREADS: usize = 16;

/// Number of events and waits that timelines have cost so far, without events created by users.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TimelineCounts {
    /// Events recorded to cover ticks.
    pub events_recorded: u64,
    /// Waits inserted into streams to order them after ticks.
    pub waits_inserted: u64,
}

impl Device {
    /// Makes a new device driven by `driver`. A GPU that [`Device::open`] opened is another device, with streams of its own.
    pub fn new(driver: Arc<dyn Driver>) -> Device {
        unfinished::finish_all();
        Device::of_driver(driver)
    }

    /// As [`Device::new`], under a lock: runs no code of callers.
    pub(crate) fn of_driver(driver: Arc<dyn Driver>) -> Device {
        let context = Context::new(driver);
        let legacy = Timeline::new(context.clone(), RawStream::LEGACY, StreamKind::Legacy, None);
        let default_stream = Stream::new(context.clone(), legacy, None);
        Device(Arc::new(Inner {
            context,
            default_stream,
            per_thread: Mutex::default(),
            reusable: Arc::default(),
            streams: Streams::default(),
            choice: OnceLock::new(),
        }))
    }

    /// Notes why [`Device::best`] chose the device. The first reason stays.
    pub(crate) fn note_choice(&self, reason: String) {
        self.0.choice.get_or_init(|| reason);
    }

    /// Why [`Device::best`] chose this device; `None` if it never did.
    pub fn chosen_because(&self) -> Option<&str> {
        self.0.choice.get().map(String::as_str)
    }

    /// The state that the device shares with its streams.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// The first error that reported the device as lost, if any. It names the call that failed, its error code and, on a simulated device,
    /// the work at fault. That work was enqueued before the call, on any stream. Every later error of the device names this one. Makes no
    /// driver call.
    ///
    /// ```
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let ptr = device.alloc(1 << 20)?;
    /// device.default_stream().fill(ptr, 7, 2 << 20)?; // goes past the end, which nobody hears of yet
    /// assert_eq!(device.lost(), None);
    /// let first = device.synchronize().unwrap_err();
    /// assert!(first.to_string().contains("'memset #1' on the legacy stream"));
    /// assert_eq!(device.lost(), Some(first));
    /// let later = device.alloc(512).unwrap_err();
    /// assert!(later.to_string().ends_with("was lost before: cuCtxSynchronize reported CUDA_ERROR_ILLEGAL_ADDRESS"));
    /// # Ok::<(), aquifer_device::DeviceError>(())
    /// ```
    pub fn lost(&self) -> Option<DeviceError> {
        self.0.context.driver.lost().cloned()
    }

    /// The device's properties, which never change.
    pub fn info(&self) -> &DeviceInfo {
        self.0.context.driver.info()
    }

    /// The device's name for messages, such as `cuda:1 (NVIDIA H100)`.
    pub fn label(&self) -> DeviceLabel {
        DeviceLabel::from(self.info())
    }

    /// Identity of the device, unique in this process.
    #[inline]
    pub fn id(&self) -> u32 {
        self.0.context.device_id
    }

    /// Free and total memory in bytes. Memory that other processes use is not free.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        self.0.context.driver.memory_info()
    }

    /// The driver, for calls that have no method here. Calls through it are counted, too.
    pub fn driver(&self) -> &dyn Driver {
        &*self.0.context.driver
    }

    /// The checks of how memory is used, where the device is simulated and they are on. An allocator tells them of its
    /// blocks.
    #[doc(hidden)]
    pub fn checks(&self) -> Option<&Arc<Checks>> {
        self.0.context.checks.as_ref()
    }

    /// As [`Stream::called_from`].
    #[doc(hidden)]
    #[inline]
    pub fn called_from(&self, at: &'static Location<'static>) -> Option<CalledFrom> {
        self.0.context.called_from(at)
    }

    /// Panics if a simulated device found violations that were not taken yet: races, or misuse of memory. Takes them.
    /// For the end of tests; a real device finds none. Wait for the device first: a kernel that reads its ranges in
    /// part is checked when it runs.
    ///
    /// ```should_panic
    /// use aquifer_device::Device;
    /// let device = Device::open("sim:24GiB")?;
    /// let (one, two) = (device.stream()?, device.stream()?);
    /// let memory = device.alloc(1 << 20)?;
    /// one.fill(memory, 1, 1 << 20)?;
    /// two.fill(memory, 2, 1 << 20)?; // nothing orders it after the first
    /// device.assert_no_violations();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// If there are violations.
    #[track_caller]
    pub fn assert_no_violations(&self) {
        let violations: Vec<String> = std::iter::from_fn(|| self.driver().take_violation()).collect();
        assert!(violations.is_empty(), "{} found violations:\n{}", self.label(), violations.join("\n"));
    }

    /// How often each driver call was made.
    pub fn driver_calls(&self) -> CallCounts {
        self.0.context.driver.counts()
    }

    /// How many events and waits timelines have cost so far.
    pub fn timeline_counts(&self) -> TimelineCounts {
        TimelineCounts {
            events_recorded: self.0.context.events_recorded.load(Ordering::Relaxed),
            waits_inserted: self.0.context.waits_inserted.load(Ordering::Relaxed),
        }
    }

    /// The legacy default stream.
    pub fn default_stream(&self) -> &Stream {
        &self.0.default_stream
    }

    /// The default stream of the calling thread: one stream for each thread, as with CUDA's per-thread default stream.
    pub fn per_thread_stream(&self) -> Stream {
        let thread = std::thread::current().id();
        if let Some(known) = self.0.per_thread.lock().get(&thread) {
            return known.stream.clone();
        }
        self.close_streams_of_ended_threads();
        // Where the thread is ending already, it is as if it had.
        let runs = RUNS.try_with(Arc::downgrade).unwrap_or_default();
        let (context, owner) = (&self.0.context, Some(Owner::this_thread()));
        let new = || Timeline::new(context.clone(), RawStream::PER_THREAD, StreamKind::Blocking, owner);
        let timeline = self.0.reusable.reopen(RawStream::PER_THREAD, StreamKind::Blocking, owner).unwrap_or_else(new);
        let stream = Stream::new(context.clone(), timeline, None);
        self.0.per_thread.lock().insert(thread, ThreadStream { stream: stream.clone(), runs });
        stream
    }

    /// Records the last events of ended threads' default streams, if there are several, so that their numbers can serve other streams.
    /// Those that fail are tried again later.
    fn close_streams_of_ended_threads(&self) {
        let is_over = |ended: &ThreadStream| ended.has_ended() && ended.stream.is_last_handle();
        let mut threads = self.0.per_thread.lock();
        if threads.values().filter(|thread| is_over(thread)).count() < ENDED_THREADS {
            return;
        }
        let ended: Vec<_> = threads.extract_if(|_, thread| is_over(thread)).collect();
        drop(threads);
        for (id, ended) in ended {
            match ended.stream.timeline().close() {
                Ok(()) => self.0.reusable.add(ended.stream.timeline().clone()),
                Err(error) => {
                    tracing::debug!(%error, "an ended thread's last event could not be recorded yet");
                    self.0.per_thread.lock().insert(id, ended);
                }
            }
        }
    }

    /// Gives up captures of ended threads' default streams, which no call can end any more.
    fn give_up_captures_of_ended_threads(&self) {
        let captures = |ended: &ThreadStream| ended.has_ended().then(|| ended.stream.timeline().capture()).flatten();
        let captures: Vec<_> = self.0.per_thread.lock().values().filter_map(captures).collect();
        captures.iter().for_each(|capture| capture.give_up());
    }

    /// Creates a stream that does not synchronise with the legacy default stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn stream(&self) -> Result<Stream> {
        self.stream_with(StreamFlags { non_blocking: true, priority: 0 })
    }

    /// Creates a stream with the given flags.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn stream_with(&self, flags: StreamFlags) -> Result<Stream> {
        fork::check(Operation::CreateStream)?;
        let context = &self.0.context;
        let raw = context.driver.create_stream(flags)?;
        let kind = if flags.non_blocking { StreamKind::NonBlocking } else { StreamKind::Blocking };
        let new = || Timeline::new(context.clone(), raw, kind, None);
        let timeline = self.0.reusable.reopen(raw, kind, None).unwrap_or_else(new);
        let stream = Stream::new(context.clone(), timeline, Some(&self.0.reusable));
        self.0.streams.insert(&stream, None, None).into_iter().for_each(|external| self.note_destroyed(external));
        Ok(stream)
    }

    /// The device's [`Stream`] for a stream that another library owns, so that two libraries in one program share it: a stream created
    /// here, one adopted before, a default stream, or else the stream is adopted now. The device keeps it until
    /// [`Device::forget_stream`], or until the last handle of the device is dropped. Threads that ask for one handle at the same time get
    /// one stream. `cuda::stream` does the same for a stream of cudarc's.
    ///
    /// The driver is asked whether an adopted handle still names the same stream ([`Driver::stream_id`]). If it names a new one, because
    /// the owner destroyed the stream without forgetting it, the new one is adopted.
    ///
    /// ```
    /// use aquifer_device::{Device, Driver, StreamFlags};
    /// let device = Device::open("sim:24GiB")?;
    /// let theirs = device.driver().create_stream(StreamFlags::default())?; // what another library does
    /// // SAFETY: the stream lives until it is forgotten below.
    /// let stream = unsafe { device.stream_from_raw(theirs) }?;
    /// // SAFETY: as above.
    /// let same = unsafe { device.stream_from_raw(theirs) }?;
    /// assert_eq!(same.id(), stream.id());
    /// device.forget_stream(theirs)?;
    /// device.driver().destroy_stream(theirs)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// In a forked child.
    ///
    /// # Safety
    /// `raw` must be a live stream of this device. If it was not created here, it must stay live until it is forgotten or the device is
    /// closed.
    pub unsafe fn stream_from_raw(&self, raw: RawStream) -> Result<Stream> {
        fork::check(Operation::StreamId)?;
        // SAFETY: passed on to the caller.
        Ok(unsafe { self.find_or_adopt(raw, true) }.0)
    }

    /// Releases a stream that [`Device::stream_from_raw`] adopted, before its owner destroys it. Its ticks stay answerable; calls on handles
    /// of it fail from now on. Does nothing for other streams.
    ///
    /// # Errors
    /// As those of [`ExternalStream::release`]: the stream stays adopted while it captures.
    pub fn forget_stream(&self, raw: RawStream) -> Result<()> {
        fork::check(Operation::StreamId)?;
        let Some(mut external) = self.0.streams.take_kept(raw) else { return Ok(()) };
        let released = external.release();
        if external.stream().timeline().is_open() {
            self.0.streams.put_back(external);
        }
        released
    }

    /// Adopts a stream that another library owns until the result is released or dropped, so that ticks can be taken on it and waited for.
    /// A stream that was adopted before and released gets another number.
    ///
    /// If the device has the stream already, because it was created here, is a default stream, or is adopted, this returns that stream, and
    /// releasing the result does nothing. Where several libraries use one stream, use [`Device::stream_from_raw`].
    ///
    /// # Safety
    /// `raw` must be a live stream of this device until it is released.
    pub unsafe fn adopt_stream(&self, raw: RawStream) -> ExternalStream {
        // SAFETY: passed on to the caller.
        let (stream, external) = unsafe { self.find_or_adopt(raw, false) };
        external.unwrap_or_else(|| ExternalStream::of_device(stream))
    }

    /// The stream with a handle that the device knows, or else one that is adopted now: until it is forgotten if the device `keeps` it, or
    /// until the caller releases it.
    ///
    /// # Safety
    /// `raw` must be a live stream of this device until it is released.
    unsafe fn find_or_adopt(&self, raw: RawStream, keeps: bool) -> (Stream, Option<ExternalStream>) {
        if let Some(stream) = self.default_stream_of(raw).or_else(|| self.known(raw)) {
            return (stream, None);
        }
        let adopting = self.0.context.adopting.lock();
        // Another thread may have adopted it meanwhile.
        if let Some(stream) = self.known(raw) {
            return (stream, None);
        }
        let destroyed = self.0.streams.take_kept(raw);
        let context = &self.0.context;
        // SAFETY: passed on to the caller.
        unsafe { context.driver.adopt_stream(raw) };
        let (identity, kind) = (context.stream_identity(raw), StreamKind::of_unknown(raw));
        let timeline = self.0.reusable.reopen(raw, kind, None);
        let timeline = timeline.unwrap_or_else(|| Timeline::new(context.clone(), raw, kind, None));
        let stream = Stream::new(context.clone(), timeline, None);
        let external = ExternalStream::new(stream.clone());
        let (kept, given) = if keeps { (Some(external), None) } else { (None, Some(external)) };
        let replaced = self.0.streams.insert(&stream, identity, kept);
        drop(adopting);
        // After the lock, because giving up a capture runs code of callers.
        destroyed.into_iter().chain(replaced).for_each(|external| self.note_destroyed(external));
        (stream, given)
    }

    /// Lets the timeline of a stream that its owner destroyed without forgetting it serve a later one.
    fn note_destroyed(&self, external: ExternalStream) {
        let timeline = external.note_destroyed();
        if !timeline.is_capturing() {
            self.0.reusable.add(timeline);
        }
    }

    /// The stream with this handle that the device has already.
    fn known(&self, raw: RawStream) -> Option<Stream> {
        let (stream, identity) = self.0.streams.find(raw)?;
        identity.is_none_or(|identity| self.0.context.is_same_stream(raw, identity)).then_some(stream)
    }

    /// The default stream that a handle stands for.
    fn default_stream_of(&self, raw: RawStream) -> Option<Stream> {
        match raw {
            RawStream(0) | RawStream::LEGACY => Some(self.default_stream().clone()),
            RawStream::PER_THREAD => Some(self.per_thread_stream()),
            _ => None,
        }
    }

    /// Creates an event. [`Event::elapsed_ms`] needs events created with `timing`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn create_event(&self, timing: bool) -> Result<Event> {
        Event::new(self.0.context.clone(), timing)
    }

    /// A mark for all work enqueued on the device so far, even on streams unknown to this handle. It serves where the stream of some work
    /// is not known. It is passed once the host has waited for the whole device. No driver call.
    ///
    /// ```
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::default()));
    /// let mark = device.wait_mark();
    /// assert!(!mark.is_passed());
    /// device.synchronize()?;
    /// assert!(mark.is_passed());
    /// # Ok::<(), aquifer_device::DeviceError>(())
    /// ```
    #[doc(hidden)]
    pub fn wait_mark(&self) -> WaitMark {
        self.0.context.waits.mark()
    }

    /// Waits on the host until all work of the device is done. All ticks taken before on any of its streams are then known to be done.
    ///
    /// # Errors
    /// When a stream captures, and errors of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.0.context.synchronize()
    }

    /// Makes a plain driver allocation, which nothing caches. If the device lacks memory, everything left to be given back later is given
    /// back, which may wait for the device ([`Device::settle`]), and the allocation is tried again.
    ///
    /// # Errors
    /// Errors of the driver.
    #[track_caller]
    pub fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let _place = self.called_from(Location::caller());
        self.settle_unused();
        match self.0.context.driver.alloc(bytes) {
            Err(error) if error.kind == ErrorKind::OutOfMemory && self.0.context.releases.any() => {
                self.settle();
                self.0.context.driver.alloc(bytes)
            }
            allocated => allocated,
        }
    }

    /// Frees a plain driver allocation. The driver waits for the device first.
    ///
    /// # Errors
    /// When a stream captures, because waiting would break the capture; errors of the driver. The memory is still allocated then.
    #[track_caller]
    pub fn free(&self, ptr: DevicePtr) -> Result<()> {
        let _place = self.called_from(Location::caller());
        self.0.context.free(ptr)
    }

    /// Unmaps memory, as [`Driver::unmap`] does, which waits for no work. Refused while a stream captures: CUDA does not say whether
    /// unmapping breaks a capture.
    ///
    /// # Errors
    /// When a stream captures; errors of the driver. The memory is still mapped then.
    pub fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.0.context.unmap(ptr, bytes)
    }

    /// Leaves a plain driver allocation to the device, to be freed at the next [`Device::settle`], at a [`Device::alloc`] that lacks
    /// memory, or when the last handle of the device is dropped. Makes no driver call, so it can be used in destructors.
    pub fn free_later(&self, ptr: DevicePtr) {
        self.0.context.releases.add(Object::Allocation(ptr));
    }

    /// Leaves reserved addresses, and the memory mapped there, to the device, to be given back when memory of [`Device::free_later`] is.
    /// That waits for the device, unless nothing is mapped there. Makes no driver call.
    pub fn unreserve_later(&self, reservation: Reservation) {
        self.0.context.releases.add(Object::Reservation(reservation));
    }

    /// Leaves physical memory that is mapped nowhere to the device, to be released when memory of [`Device::free_later`] is freed. Makes no
    /// driver call.
    pub fn release_later(&self, physical: RawPhysical) {
        self.0.context.releases.add(Object::Physical(physical));
    }

    /// Leaves a module of kernels to the device, to be unloaded when memory of [`Device::free_later`] is freed. That waits for the device.
    /// Makes no driver call.
    pub fn unload_later(&self, module: RawModule) {
        self.0.context.releases.add(Object::Module(module));
    }

    /// Leaves page-locked memory of [`Driver::host_alloc`] to the device, to be freed once its last `uses` are known to be done: at the
    /// next [`Device::settle_host`], at the next [`Device::settle`], which waits for the device if need be, or when the last handle of the
    /// device is dropped. Makes no driver call.
    ///
    /// Like [`Driver::host_free`], this takes memory away, so only the owner may call it:
    ///
    /// ```compile_fail,E0133
    /// use aquifer_device::{Device, HostPtr};
    /// fn free(device: &Device, lent: &[u8]) {
    ///     device.host_free_later(HostPtr(lent.as_ptr().addr()), lent.len() as u64, Vec::new());
    /// }
    /// ```
    ///
    /// # Safety
    /// As for [`Driver::host_free`], but for work that was enqueued before a tick in `uses` was taken, on that tick's stream. The ticks are
    /// of this device, and one of its allocations starts at `ptr`, which nothing else frees.
    pub unsafe fn host_free_later(&self, ptr: HostPtr, bytes: u64, uses: Vec<Tick>) {
        // SAFETY: passed on to the caller.
        let memory = unsafe { HostMemory::new(ptr, bytes, None, Box::new(uses)) };
        self.0.context.releases.add(Object::Host(memory));
    }

    /// Leaves registered memory to the device, to be unregistered ([`Driver::host_unregister`]) when [`Device::host_free_later`] would free
    /// it. Then drops the `owner` of the memory, which must keep it readable and writable until then. Unregistering waits for the device,
    /// so [`Device::settle_host`] does it only when there are more than 64 MiB. If it never succeeds, as on a lost device, the owner is
    /// leaked, because the device may still write there. Makes no driver call.
    ///
    /// # Safety
    /// As for [`Driver::host_unregister`], but for work that was enqueued before a tick in `uses` was taken, on that tick's stream. The
    /// ticks are of this device, and memory registered with it starts at `ptr`, which nothing else unregisters.
    pub unsafe fn host_unregister_later(&self, ptr: HostPtr, bytes: u64, owner: Box<dyn Any + Send>, uses: Vec<Tick>) {
        // SAFETY: passed on to the caller.
        let memory = unsafe { HostMemory::new(ptr, bytes, Some(owner), Box::new(uses)) };
        self.0.context.releases.add(Object::Host(memory));
    }

    /// Asks the driver how far streams got, and gives back page-locked memory of [`Device::host_free_later`] whose uses are done, and
    /// registered memory if there is much of it. Does nothing while a stream captures. Returns how many bytes went back.
    #[doc(hidden)]
    pub fn settle_host(&self) -> u64 {
        self.0.context.settle(Effort::MuchAtATime)
    }

    /// As [`Device::settle_host`], for all such memory. Waits for the device if it may still use some of it.
    pub fn wait_and_settle_host(&self) -> u64 {
        self.0.context.settle(Effort::Waiting)
    }

    /// True if any of the device's streams captures. Calls that wait for the device would break the capture.
    pub fn is_capturing(&self) -> bool {
        self.0.context.is_capturing()
    }

    /// Gives back everything that was left to be given back later (`free_later` and the like). Waits for the device if it may still use
    /// some of it. The rest stays if a call fails, and is tried again later.
    pub fn settle(&self) {
        if fork::is_child() {
            return;
        }
        self.give_up_captures_of_ended_threads();
        unfinished::finish_all();
        self.0.context.settle(Effort::Waiting);
    }

    /// As [`Device::settle`], but only for things that are known not to be in use any more. Waits for nothing.
    #[doc(hidden)]
    pub fn settle_unused(&self) {
        self.0.context.settle(Effort::WithoutWaiting);
    }
}

#[cfg(all(feature = "cuda", target_pointer_width = "64"))]
impl Device {
    /// The device, unless its last handle is gone.
    pub(crate) fn upgrade(device: &Weak<Inner>) -> Option<Device> {
        device.upgrade().map(Device)
    }

    /// A reference that does not keep the device open.
    pub(crate) fn downgrade(&self) -> Weak<Inner> {
        Arc::downgrade(&self.0)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id()).field("name", &self.info().name).finish_non_exhaustive()
    }
}
