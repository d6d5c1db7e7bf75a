//! The handle of a device.

mod release;
mod streams;

use std::collections::HashMap;
use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;

use streams::ThreadStream;

use crate::context::Context;
use crate::counted::CallCounts;
use crate::driver::{DeviceInfo, DevicePtr, Driver, MemoryInfo, MemoryUsers, RawStream};
use crate::error::{DeviceError, ErrorKind, Operation, Result};
use crate::event::Event;
use crate::fork::{self, Mutex};
use crate::label::DeviceLabel;
use crate::stream::Stream;
use crate::stream_table::StreamTable;
use crate::timeline::{ReusableTimelines, StreamKind, Timeline};
use crate::unfinished;
use crate::waits::WaitMark;
use crate::witness::{CalledFrom, Witness};

/// One GPU, real or simulated: creates streams and events, and allocates plain driver memory.
/// Cloning gives another handle of the same device.
///
/// The crate `aquifer` opens devices by name; [`Device::new`] wraps a driver. Memory for programs
/// comes from `aquifer-allocator`, which caches it; [`Device::alloc`]
/// is a plain driver allocation.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// assert_eq!(device.info().total_bytes, 24 << 30);
/// let ptr = device.alloc(1 << 30)?;
/// assert_eq!(device.memory_info()?.free, 23 << 30);
/// device.free(ptr)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Device(Arc<DeviceInner>, Held);

/// Who has a handle of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    ByCaller,
    /// Memory, or what is kept for it.
    ByMemory,
}

impl Clone for Device {
    fn clone(&self) -> Device {
        Device::of_inner(self.0.clone())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let context = &self.0.context;
        if self.1 == Held::ByCaller && context.handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            unfinished::drop_left_of(context.device_id);
        }
    }
}

pub(crate) struct DeviceInner {
    context: Arc<Context>,
    default_stream: Stream,
    /// The per-thread default stream of each thread that has used it.
    per_thread: Mutex<HashMap<ThreadId, ThreadStream>>,
    /// Timelines of streams that are gone.
    reusable: Arc<ReusableTimelines>,
    /// Its streams by the driver's handle, and those that it adopted.
    streams: StreamTable,
    /// Why the program chose the device.
    choice: OnceLock<String>,
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        if fork::is_child() {
            return;
        }
        // If streams still use the context, the rest goes with the last of them.
        self.context.settle_left();
        self.context.releases.forget_uses();
    }
}

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
    /// Makes a new device driven by `driver`. A device that another call made for the same GPU is
    /// another one, with streams of its own.
    pub fn new(driver: Arc<dyn Driver>) -> Device {
        unfinished::finish_all();
        Device::of_driver(driver)
    }

    /// As [`Device::new`], under a lock: runs no code of callers.
    #[doc(hidden)]
    pub fn of_driver(driver: Arc<dyn Driver>) -> Device {
        let context = Context::new(driver);
        let legacy = Timeline::new(context.clone(), RawStream::LEGACY, StreamKind::Legacy, None);
        let default_stream = Stream::new(context.clone(), legacy, None, false);
        let inner = DeviceInner {
            context,
            default_stream,
            per_thread: Mutex::default(),
            reusable: Arc::default(),
            streams: StreamTable::default(),
            choice: OnceLock::new(),
        };
        Device::of_inner(Arc::new(inner))
    }

    fn of_inner(inner: Arc<DeviceInner>) -> Device {
        inner.context.handles.fetch_add(1, Ordering::AcqRel);
        Device(inner, Held::ByCaller)
    }

    /// A handle for memory, and for what is kept for it. The device gives such things back with its
    /// last handle of a caller.
    #[doc(hidden)]
    pub fn for_memory(&self) -> Device {
        Device(self.0.clone(), Held::ByMemory)
    }

    /// Notes why the program chose the device. The first reason stays.
    pub fn note_choice(&self, reason: String) {
        self.0.choice.get_or_init(|| reason);
    }

    /// Why the program chose this device, if that was noted.
    pub fn chosen_because(&self) -> Option<&str> {
        self.0.choice.get().map(String::as_str)
    }

    /// The state that the device shares with its streams.
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    /// The first error that reported the device as lost, if any. It names the call that failed, its
    /// error code and, on a simulated device, the work at fault. That work was enqueued before the
    /// call, on any stream. Every later error of the device names this one. Makes no driver call.
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB")?;
    /// let ptr = device.alloc(1 << 20)?;
    /// device.default_stream().fill(ptr, 7, 2 << 20)?; // goes past the end, which no call reports yet
    /// assert_eq!(device.lost(), None);
    /// let first = device.synchronize().unwrap_err();
    /// assert!(first.to_string().contains("'memset #1' on the legacy stream"));
    /// assert_eq!(device.lost(), Some(first));
    /// let later = device.alloc(512).unwrap_err();
    /// assert!(later.to_string().ends_with("was lost before: cuCtxSynchronize reported CUDA_ERROR_ILLEGAL_ADDRESS"));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn lost(&self) -> Option<DeviceError> {
        self.0.context.driver.lost().cloned()
    }

    /// Refuses a request that needs no driver call if the device is lost.
    #[doc(hidden)]
    pub fn refuse_if_lost(&self, operation: Operation) -> Result<()> {
        let driver = &self.0.context.driver;
        driver.lost().map_or(Ok(()), |first| driver.complete(Err(DeviceError::refused(operation, first.code))))
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
        self.give_back_left();
        self.0.context.driver.memory_info()
    }

    /// The holders of the device's memory. Unknown parts are `None`.
    ///
    /// A GPU's driver is asked through NVML, where the feature `nvml` is on. The first call loads
    /// that library. Nothing is known where it is missing or lists no ids of this process's
    /// namespace (containers), and about parts of a GPU (MIG).
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB,other=2GiB")?;
    /// device.alloc(1 << 30)?;
    /// let users = device.memory_users();
    /// assert_eq!((users.own, users.others[0].bytes), (Some(1 << 30), 2 << 30));
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn memory_users(&self) -> MemoryUsers {
        self.give_back_left();
        self.0.context.driver.memory_users()
    }

    /// Completes the result of a call that was made beside [`Device::driver`]: an error names the
    /// device and, if it is lost, the error by which it was lost.
    #[doc(hidden)]
    pub fn complete<T>(&self, answer: Result<T>) -> Result<T> {
        self.0.context.driver.complete(answer)
    }

    /// The driver, for calls that have no method here. Calls through it are counted, too.
    pub fn driver(&self) -> &dyn Driver {
        &*self.0.context.driver
    }

    /// The driver's witness, to which an allocator reports its blocks.
    pub fn witness(&self) -> Option<&Arc<dyn Witness>> {
        self.0.context.witness.as_ref()
    }

    /// As [`Stream::called_from`].
    #[doc(hidden)]
    #[inline]
    pub fn called_from(&self, at: &'static Location<'static>) -> Option<CalledFrom> {
        self.0.context.called_from(at)
    }

    /// Panics if the driver found violations that were not taken yet, as a simulated one does:
    /// races, or misuse of memory. Takes them. For the end of tests; a real device finds none. Wait
    /// for the device first: a kernel that reads its ranges in part is checked when it runs.
    ///
    /// ```should_panic
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (one, two) = (device.stream()?, device.stream()?);
    /// let memory = device.alloc(1 << 20)?;
    /// one.fill(memory, 1, 1 << 20)?;
    /// two.fill(memory, 2, 1 << 20)?; // nothing orders it after the first
    /// device.assert_no_violations();
    /// # Ok::<(), aquifer::Error>(())
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

    /// Creates an event. [`Event::elapsed_ms`] needs events created with `timing`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn create_event(&self, timing: bool) -> Result<Event> {
        self.give_back_left();
        Event::new(self.0.context.clone(), timing)
    }

    /// A mark for all work enqueued on the device so far, even on streams unknown to this handle.
    /// It serves where the stream of some work is not known. It is passed once the host has waited
    /// for the whole device. No driver call.
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB")?;
    /// let mark = device.wait_mark();
    /// assert!(!mark.is_passed());
    /// device.synchronize()?;
    /// assert!(mark.is_passed());
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[doc(hidden)]
    pub fn wait_mark(&self) -> WaitMark {
        self.0.context.waits.mark()
    }

    /// Waits on the host until all work of the device is done, including work that threads have yet
    /// to enqueue, such as that of uploads ([`Stream::expect_work`]), unless this thread has access
    /// to memory, for which they may wait. All ticks taken before on any of its streams are then
    /// known to be done, and memory that outlived its allocator goes back.
    ///
    /// # Errors
    /// When a stream captures, and errors of the driver.
    pub fn synchronize(&self) -> Result<()> {
        fork::check(Operation::Synchronize)?;
        self.0.context.wait_expected();
        self.synchronize_enqueued()
    }

    /// As [`Device::synchronize`], for work that is enqueued already: for callers that hold what
    /// the threads which enqueue more may wait for.
    ///
    /// # Errors
    /// As [`Device::synchronize`].
    #[doc(hidden)]
    pub fn synchronize_enqueued(&self) -> Result<()> {
        unfinished::drop_left_of(self.id());
        self.0.context.synchronize_and_settle()
    }

    /// Makes a plain driver allocation, which nothing caches. If the device lacks memory,
    /// everything left to be given back later is given back, which may wait for the device
    /// ([`Device::settle`]), and the allocation is tried again.
    ///
    /// # Errors
    /// Errors of the driver.
    #[track_caller]
    pub fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        let _place = self.called_from(Location::caller());
        unfinished::drop_left_of(self.id());
        self.settle_unused();
        match self.0.context.driver.alloc(bytes) {
            Err(error) if error.kind == ErrorKind::OutOfMemory && self.0.context.releases.may_give_back() => {
                self.settle();
                self.0.context.driver.alloc(bytes)
            }
            allocated => allocated,
        }
    }

    /// Frees a plain driver allocation. The driver waits for the device first.
    ///
    /// # Errors
    /// When a stream captures, because waiting would break the capture; errors of the driver. The
    /// memory is still allocated then.
    #[track_caller]
    pub fn free(&self, ptr: DevicePtr) -> Result<()> {
        let _place = self.called_from(Location::caller());
        self.give_back_left();
        self.0.context.free(ptr)
    }

    /// Unmaps memory, as [`Driver::unmap`] does, which waits for no work. Refused while a stream
    /// captures: CUDA does not say whether unmapping breaks a capture.
    ///
    /// # Errors
    /// When a stream captures; errors of the driver. The memory is still mapped then.
    pub fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.0.context.unmap(ptr, bytes)
    }

    /// True if any of the device's streams captures. Calls that wait for the device would break the
    /// capture.
    pub fn is_capturing(&self) -> bool {
        self.0.context.is_capturing()
    }

    /// As [`Device::is_capturing`], once captures that were dropped before they ended are over, if
    /// they can be ended. Call it without a lock: things that their graphs kept are dropped.
    #[doc(hidden)]
    pub fn still_captures(&self) -> bool {
        self.is_capturing() && {
            unfinished::end_captures(&self.0.context.capturing);
            self.is_capturing()
        }
    }
}

/// A reference to a device that does not keep it open.
#[derive(Default)]
pub struct WeakDevice(Weak<DeviceInner>);

impl WeakDevice {
    /// The reference to a device.
    pub fn new(device: &Device) -> WeakDevice {
        WeakDevice(Arc::downgrade(&device.0))
    }

    /// The device, unless its last handle is gone.
    pub fn upgrade(&self) -> Option<Device> {
        self.0.upgrade().map(Device::of_inner)
    }
}

impl fmt::Debug for WeakDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeakDevice").field(&self.upgrade()).finish()
    }
}

/// Its label, as errors name it.
impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.label().fmt(f)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.id()).field("name", &self.info().name).finish_non_exhaustive()
    }
}
