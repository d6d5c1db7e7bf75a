//! The handle of a stream.

use std::fmt;
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use crate::capture::{self, AnnouncedCapture, Capture, StreamHandle};
use crate::context::{Context, Waited};
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{DevicePtr, Driver, HostPtr, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::event::Event;
use crate::fork;
use crate::launch::{AccessRange, Launch};
use crate::launches::Launches;
use crate::timeline::{CapturesHeldOff, ExpectedWork, ReusableTimelines, Tick, Timeline};
use crate::unfinished;
use crate::witness::CalledFrom;

/// A queue of work on one device, which runs in the order in which it was enqueued. Cloning gives
/// another handle of the same stream.
///
/// Different streams are independent until one is ordered after the other: [`Stream::tick`] stands
/// for all work enqueued so far, and [`Stream::wait_for`] orders later work after a tick.
///
/// A per-thread default stream ([`crate::Device::per_thread_stream`]) accepts work, event records
/// and waits from its own thread only, and returns an error to other threads; its ticks can be used
/// by every thread. Once the thread has ended and its work is done, the stream's number goes to
/// another stream, as that of a destroyed stream does.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let stream = device.stream()?;
/// let ptr = device.alloc(1 << 20)?;
/// stream.fill(ptr, 7, 1 << 20)?;
/// let mut bytes = [0; 4];
/// stream.download_blocking(&mut bytes, ptr)?;
/// assert_eq!(bytes, [7; 4]);
/// device.free(ptr)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

/// A reference to a stream that does not keep it alive.
pub(crate) struct WeakStream(Weak<StreamInner>);

impl fmt::Debug for WeakStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WeakStream").field(&self.upgrade()).finish()
    }
}

impl WeakStream {
    /// The stream, unless its last handle is gone.
    pub(crate) fn upgrade(&self) -> Option<Stream> {
        self.0.upgrade().map(Stream)
    }

    /// True unless its last handle is gone.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() > 0
    }
}

struct StreamInner {
    timeline: Arc<Timeline>,
    context: Arc<Context>,
    /// The list that the timeline goes to with the last handle, if it can serve a later stream.
    reusable: Option<Weak<ReusableTimelines>>,
    /// True if another library owns the stream. Otherwise it is destroyed with its last handle.
    is_adopted: bool,
}

impl Stream {
    /// A stream. If another library owns it, it `is_adopted`.
    pub(crate) fn new(
        context: Arc<Context>,
        timeline: Arc<Timeline>,
        reusable: Option<&Arc<ReusableTimelines>>,
        is_adopted: bool,
    ) -> Stream {
        Stream(Arc::new(StreamInner { timeline, context, reusable: reusable.map(Arc::downgrade), is_adopted }))
    }

    /// A reference that does not keep the stream alive.
    pub(crate) fn downgrade(&self) -> WeakStream {
        WeakStream(Arc::downgrade(&self.0))
    }

    /// True if there is no other handle of the stream.
    pub(crate) fn is_last_handle(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// A handle for a capture that the stream becomes part of.
    pub(crate) fn keep_alive(&self) -> StreamHandle {
        self.0.clone()
    }

    /// The stream's timeline, which outlives it.
    #[inline]
    #[doc(hidden)]
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.0.timeline
    }

    /// The number by which this library identifies the stream, dense per device. A new stream may
    /// get the number of one whose work is done and that was destroyed, or whose thread has ended.
    #[inline]
    pub fn id(&self) -> u32 {
        self.0.timeline.id()
    }

    /// Identity of the device, unique in this process.
    #[inline]
    pub fn device_id(&self) -> u32 {
        self.0.context.device_id
    }

    /// The driver's handle.
    pub fn raw(&self) -> RawStream {
        self.0.timeline.raw()
    }

    /// The state that it shares with the other streams of its device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0.context
    }

    /// The driver of its device, for calls that have no method here.
    pub fn driver(&self) -> &dyn Driver {
        &*self.0.context.driver
    }

    /// As [`Device::complete`].
    #[doc(hidden)]
    pub fn complete<T>(&self, answer: Result<T>) -> Result<T> {
        self.0.context.driver.complete(answer)
    }

    /// Names the caller's place in the program as the one that calls come from, until the result is
    /// dropped.
    #[track_caller]
    #[inline]
    fn called_here(&self) -> Option<CalledFrom> {
        self.0.context.called_from(Location::caller())
    }

    /// Names a place in the program as the one that calls come from, as far as nothing names
    /// another one already. For code that enqueues work for its own caller.
    #[doc(hidden)]
    #[inline]
    pub fn called_from(&self, at: &'static Location<'static>) -> Option<CalledFrom> {
        self.0.context.called_from(at)
    }

    /// The handle for a driver call of this thread. Ends captures that were dropped.
    #[doc(hidden)]
    #[inline]
    pub fn usable(&self, operation: Operation) -> Result<RawStream> {
        self.0.timeline.end_abandoned_captures(operation)?;
        self.0.timeline.usable(operation)
    }

    /// Ends captures that were dropped before they ended ([`Capture`]): their graphs cannot be
    /// launched, so work that is enqueued there would be lost. Does nothing to other captures. Call
    /// it without a lock: things that the graphs kept are dropped.
    ///
    /// # Errors
    /// When the stream is part of such a capture, and it cannot be ended now.
    #[doc(hidden)]
    #[inline]
    pub fn end_abandoned_captures(&self) -> Result<()> {
        self.0.timeline.end_abandoned_captures(Operation::EndCapture)
    }

    /// The tick that stands for all work enqueued on the stream so far. No driver call.
    pub fn tick(&self) -> Tick {
        self.0.timeline.tick()
    }

    /// True if later work of this stream is known to come after the tick. No driver call.
    pub fn is_ordered_after(&self, tick: &Tick) -> bool {
        self.0.timeline.is_ordered_after(&tick.timeline, tick.n)
    }

    /// Orders later work of this stream after the tick. The host does not wait. This costs at most
    /// one event and one wait, and nothing if the work is known to be ordered already. The tick may
    /// be of another device of the same kind.
    ///
    /// # Errors
    /// When the tick is of a device of another kind, or a capture is in progress; when the tick's
    /// stream is gone without a last event (see [`Tick::cover`]), until the host has waited for its
    /// device ([`Tick::synchronize`], [`crate::Device::synchronize`]); errors of the driver.
    pub fn wait_for(&self, tick: &Tick) -> Result<()> {
        self.0.timeline.end_abandoned_captures(Operation::Wait)?;
        self.0.timeline.wait_for(&tick.timeline, tick.n)
    }

    /// Orders later work of this stream after the event's latest record. If the event was recorded
    /// in a capture, the stream joins the capture; otherwise the event may be of another device of
    /// the same kind.
    ///
    /// # Errors
    /// When the event is of a device of another kind, or was recorded in a capture on another
    /// device; errors of the driver.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        event.make_wait(self)
    }

    /// Waits on the host until all work of the stream is done, including work that threads have yet
    /// to enqueue for it ([`Stream::expect_work`]), unless this thread has access to memory, for
    /// which they may wait. Its ticks taken before are then known to be done.
    ///
    /// # Errors
    /// Errors of the driver.
    #[track_caller]
    pub fn synchronize(&self) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::SynchronizeStream)?;
        let elsewhere = self.0.timeline.wait_for_expected();
        let reached = self.0.timeline.begin_wait();
        self.0.context.driver.synchronize_stream(raw)?;
        self.0.timeline.mark_done(reached);
        elsewhere.iter().try_for_each(Tick::synchronize)?;
        self.0.context.settle_left();
        Ok(())
    }

    /// True if all work of the stream is done.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_idle(&self) -> Result<bool> {
        let raw = self.usable(Operation::QueryStream)?;
        Ok(self.0.timeline.expects_nothing() && self.0.context.driver.query_stream(raw)?)
    }

    /// Makes known that threads will enqueue work for this stream, such as the copies of an upload.
    /// Until the result is dropped, calls that wait on the host for the stream or the device wait
    /// for that, too, except on the threads that enqueue such work, and on threads with access to
    /// memory, for which those may wait. Captures do not wait: work that finds the stream capturing
    /// goes to another one, and leaves its tick ([`ExpectedWork::tick`]).
    #[doc(hidden)]
    pub fn expect_work(&self) -> ExpectedWork {
        self.0.timeline.expect_work()
    }

    /// Enqueues a fill: sets each of `bytes` bytes at `ptr` to `value`.
    ///
    /// # Errors
    /// Errors of the driver.
    #[track_caller]
    pub fn fill(&self, ptr: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let _place = self.called_here();
        self.0.context.driver.memset(ptr, value, bytes, self.usable(Operation::Memset)?)
    }

    /// Enqueues a copy of `bytes` bytes within the device. Ranges that overlap are refused.
    ///
    /// # Errors
    /// Errors of the driver.
    #[track_caller]
    pub fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let _place = self.called_here();
        self.0.context.driver.copy_on_device(dst, src, bytes, self.usable(Operation::CopyOnDevice)?)
    }

    /// Enqueues a copy of `bytes` bytes from pinned host memory. Other host memory is read
    /// before this returns.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// `src..src + bytes` must be readable, and stay readable and unwritten until the copy is done,
    /// as [`Driver::copy_to_device`] specifies.
    #[track_caller]
    pub unsafe fn upload(&self, dst: DevicePtr, src: HostPtr, bytes: usize) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::CopyToDevice)?;
        // SAFETY: passed on to the caller.
        unsafe { self.0.context.driver.copy_to_device(dst, src.as_ptr(), bytes, raw) }
    }

    /// Enqueues a copy of `bytes` bytes to pinned host memory. Other host memory holds the
    /// bytes when this returns.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// `dst..dst + bytes` must be writable, and stay writable and untouched until the copy is done,
    /// as [`Driver::copy_to_host`] specifies.
    #[track_caller]
    pub unsafe fn download(&self, dst: HostPtr, src: DevicePtr, bytes: usize) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::CopyToHost)?;
        // SAFETY: passed on to the caller.
        unsafe { self.0.context.driver.copy_to_host(dst.as_ptr(), src, bytes, raw) }
    }

    /// Enqueues a copy of rows.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// As [`Driver::copy_2d`].
    #[track_caller]
    pub unsafe fn copy_2d(&self, copy: &Copy2d) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::Copy2d)?;
        // SAFETY: passed on to the caller.
        unsafe { self.0.context.driver.copy_2d(copy, raw) }
    }

    /// Whether [`Stream::copy_batch`] serves it: not if it is the legacy default stream.
    pub fn takes_batches(&self) -> bool {
        !self.raw().is_legacy()
    }

    /// Enqueues many copies with one driver call, on devices that support it
    /// ([`crate::Attribute::BatchedCopies`]).
    ///
    /// # Errors
    /// The legacy default stream, for which drivers have no such call ([`Stream::takes_batches`]);
    /// errors of the driver.
    ///
    /// # Safety
    /// As [`Driver::copy_batch`].
    #[track_caller]
    pub unsafe fn copy_batch(&self, copies: &[CopyPart]) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::CopyBatch)?;
        // SAFETY: passed on to the caller.
        unsafe { self.0.context.driver.copy_batch(copies, raw) }
    }

    /// Copies from host memory and waits until the bytes are on the device.
    ///
    /// Returns only once nothing reads the memory any more. So it also waits after an error, and
    /// for the end of a capture that another library begins meanwhile and that forbids waiting for
    /// the stream. It does not wait for a lost device.
    ///
    /// # Errors
    /// When the stream captures, and errors of the driver.
    #[track_caller]
    pub fn upload_blocking(&self, dst: DevicePtr, src: &[u8]) -> Result<()> {
        let _place = self.called_here();
        let driver = &self.0.context.driver;
        // SAFETY: `src` is readable, and borrowed until `run_and_wait` returns, after which nothing
        // reads it.
        let copy = |raw| unsafe { driver.copy_to_device(dst, src.as_ptr(), src.len(), raw) };
        self.0.timeline.run_and_wait(Operation::CopyToDevice, copy)
    }

    /// Copies to host memory and waits until the bytes are there.
    ///
    /// Returns only once nothing writes the memory any more, as [`Stream::upload_blocking`] does.
    ///
    /// # Errors
    /// When the stream captures, and errors of the driver.
    #[track_caller]
    pub fn download_blocking(&self, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        let _place = self.called_here();
        let driver = &self.0.context.driver;
        let (to, bytes) = (dst.as_mut_ptr(), dst.len());
        // SAFETY: `dst` is writable, and exclusively borrowed until `run_and_wait` returns, after
        // which nothing writes it.
        let copy = |raw| unsafe { driver.copy_to_host(to, src, bytes, raw) };
        self.0.timeline.run_and_wait(Operation::CopyToHost, copy)
    }

    /// Copies `bytes` bytes within the device and waits until that is done.
    ///
    /// Returns only once nothing reads or writes the memory any more, as
    /// [`Stream::upload_blocking`] does.
    ///
    /// # Errors
    /// When the stream captures, and errors of the driver.
    #[track_caller]
    pub fn copy_blocking(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        let _place = self.called_here();
        let copy = |raw| self.0.context.driver.copy_on_device(dst, src, bytes, raw);
        self.0.timeline.run_and_wait(Operation::CopyOnDevice, copy)
    }

    /// Enqueues a kernel.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// The kernel must touch exactly the ranges that the launch declares, and the launch must give
    /// it the arguments that it expects.
    #[track_caller]
    pub unsafe fn launch(&self, launch: &Launch) -> Result<()> {
        let _place = self.called_here();
        let raw = self.usable(Operation::Launch)?;
        // SAFETY: passed on to the caller.
        unsafe { self.0.context.driver.launch(launch, raw) }
    }

    /// Enqueues work that takes its modelled time, touches the given ranges and computes nothing: a
    /// stand-in for a kernel on a virtual device ([`is_virtual`](crate::DeviceInfo::is_virtual)).
    ///
    /// # Errors
    /// Errors of the driver; not supported on real hardware.
    #[track_caller]
    pub fn touch(&self, name: &'static str, accesses: &[AccessRange]) -> Result<()> {
        let _place = self.called_here();
        if !self.0.context.driver.info().is_virtual {
            return Err(DeviceError::refused(Operation::Launch, Code::NOT_SUPPORTED)
                .with_detail("`touch` runs no kernel, so it exists on virtual devices only"));
        }
        let launch = Launch { name, accesses: accesses.to_vec(), ..Launch::default() };
        let raw = self.usable(Operation::Launch)?;
        // SAFETY: the launch has no body and no arguments; a virtual device only checks and times
        // its ranges.
        unsafe { self.0.context.driver.launch(&launch, raw) }
    }

    /// Starts capturing the stream's work into a graph.
    ///
    /// A graph uses fixed addresses, and nothing tracks those uses: keep every buffer that it
    /// touches alive for as long as you may launch it. An allocator gives a capturing stream only
    /// memory of a private pool (`Allocator::capture`), and a launch needs an access guard on the
    /// buffers that the graph uses (`AccessGuard`).
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn begin_capture(&self) -> Result<Capture> {
        Capture::begin(self.clone())
    }

    /// As [`Stream::begin_capture`], where another library makes the driver call, as cudarc's
    /// `CudaStream::begin_capture` does. [`Capture::end_with`] ends it; launches are then known
    /// here.
    ///
    /// # Errors
    /// Errors of `begin`; a stream that captures already.
    pub fn begin_capture_with(&self, begin: impl FnOnce() -> Result<()>) -> Result<Capture> {
        Capture::begin_with(self.clone(), begin)
    }

    /// Makes a capture known that another library, such as cudarc, began on this stream: it counts
    /// as capturing until the result is dropped. Drop it once the capture has ended.
    ///
    /// # Errors
    /// When the stream does not capture, or its capture is known already; errors of the driver.
    pub fn announce_capture(&self) -> Result<AnnouncedCapture> {
        AnnouncedCapture::announce(self)
    }

    /// Asks the driver whether the stream captures, for an adapter to a library that announces no
    /// captures, or not their ends. Registers such a capture, and ends the record of one that is
    /// over. Returns the launches of the graph. The driver tells when the graph is gone, with its
    /// clones, its executables and all their launches. What the launches keep is dropped at the next
    /// [`crate::Device::settle`] or slow path of an allocator.
    ///
    /// # Errors
    /// On a driver before CUDA 11.3, if the stream captures; errors of the driver.
    #[doc(hidden)]
    pub fn follow_capture(&self) -> Result<Option<Arc<Launches>>> {
        capture::follow(self)
    }

    /// As [`Stream::follow_capture`], for a capture that `begin` begins now.
    #[doc(hidden)]
    pub fn begin_followed_capture(&self, begin: impl FnOnce() -> Result<()>) -> Result<()> {
        capture::follow(self)?;
        capture::begin_followed(self, false, begin).map(drop)
    }

    /// Makes known that `body` captures a body of a conditional node, IF or SWITCH, which was just
    /// put behind what this stream captured. It counts as work of this stream, and bodies share
    /// memory. Drop the result when its capture has ended, before the next body and work behind the
    /// node.
    ///
    /// # Errors
    /// As [`Stream::announce_capture`]; when this stream does not capture, or devices differ.
    pub fn announce_body(&self, body: &Stream) -> Result<AnnouncedCapture> {
        AnnouncedCapture::announce_body(self, body)
    }

    /// If the capture of an announced body began on this stream, the stream with the outermost
    /// node. Streams that a body forked stand for themselves. No driver call.
    pub fn body_of(&self) -> Option<Stream> {
        let scope = self.0.timeline.capture_if_any()?;
        let ((_, with_node), _) = scope.around().filter(|_| scope.began_on(&self.0.timeline))?;
        let with_node = Stream(with_node.downcast().ok()?);
        with_node.body_of().or(Some(with_node))
    }

    /// The launches of the graph that the stream is known to be captured into. No driver call.
    pub fn launches_of_capture(&self) -> Option<Arc<Launches>> {
        self.0.timeline.launches_of_capture()
    }

    /// True if the stream is known to capture, or to have joined a capture.
    pub fn is_capturing(&self) -> bool {
        self.0.timeline.is_capturing()
    }

    /// Keeps captures from beginning on this stream, and the stream from joining one, while the
    /// result lives; on the legacy stream also captures of blocking streams, which forbid its calls.
    /// `None` if one has begun. Ends captures that were dropped.
    ///
    /// This is for threads that enqueue work on a stream whose owner may capture it at any time,
    /// such as work that uses memory which is another owner's when a graph is launched. Threads
    /// that begin a capture meanwhile wait. So hold captures off only while enqueuing, and neither
    /// wait for other threads nor begin a capture on the same thread meanwhile. Captures that other
    /// libraries begin are not held off.
    ///
    /// ```
    /// let device = aquifer::open("sim:24GiB")?;
    /// let stream = device.stream()?;
    /// let held_off = stream.hold_off_captures().expect("it does not capture");
    /// // Enqueue work on the stream.
    /// drop(held_off);
    /// let capture = stream.begin_capture()?;
    /// assert!(stream.hold_off_captures().is_none());
    /// # drop(capture.end()?);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn hold_off_captures(&self) -> Option<CapturesHeldOff<'_>> {
        self.end_abandoned_captures().ok()?;
        self.0.timeline.hold_off_captures()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", &self.device_id()).field("id", &self.id()).finish_non_exhaustive()
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        let Some(reusable) = self.reusable.as_ref().filter(|_| !fork::is_child()) else { return };
        let has_ended = if self.is_adopted { self.timeline.has_ended() } else { self.timeline.destroy() };
        if has_ended && let Some(reusable) = reusable.upgrade() {
            reusable.add(self.timeline.clone());
        }
        if !self.is_adopted {
            self.context.settle_left();
            // Else the last handle of the device does that.
            if self.context.handles.load(Ordering::Acquire) == 0 {
                unfinished::drop_left_of(self.context.device_id);
            }
        }
    }
}
