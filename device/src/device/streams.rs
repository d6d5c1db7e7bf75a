//! The streams of a device: default streams, created ones, and those of other libraries.

use super::Device;
use crate::driver::{Driver, RawStream, StreamFlags};
use crate::error::{Operation, Result};
use crate::external::ExternalStream;
use crate::fork;
use crate::stream::Stream;
use crate::thread_end::RunningThread;
use crate::timeline::{Owner, StreamKind, Timeline};

/// A thread's default stream.
pub(super) struct ThreadStream {
    stream: Stream,
    thread: RunningThread,
}

/// Number of ended threads from which on events are recorded for them. Every blocking stream waits
/// for such an event, so they are recorded for several threads at a time.
const ENDED_THREADS: usize = 16;

impl Device {
    /// The legacy default stream.
    pub fn default_stream(&self) -> &Stream {
        &self.0.default_stream
    }

    /// The default stream of the calling thread: one stream for each thread, as with CUDA's
    /// per-thread default stream.
    pub fn per_thread_stream(&self) -> Stream {
        let thread = std::thread::current().id();
        if let Some(known) = self.0.per_thread.lock().get(&thread) {
            return known.stream.clone();
        }
        self.close_streams_of_ended_threads();
        let (context, owner) = (&self.0.context, Some(Owner::this_thread()));
        let new = || Timeline::new(context.clone(), RawStream::PER_THREAD, StreamKind::Blocking, owner);
        let timeline = self.0.reusable.reopen(RawStream::PER_THREAD, StreamKind::Blocking, owner).unwrap_or_else(new);
        let stream = Stream::new(context.clone(), timeline, None, false);
        self.0
            .per_thread
            .lock()
            .insert(thread, ThreadStream { stream: stream.clone(), thread: RunningThread::current() });
        stream
    }

    /// Records the last events of ended threads' default streams, if there are several, so that
    /// their numbers can serve other streams. Those that fail are tried again later.
    fn close_streams_of_ended_threads(&self) {
        let is_over = |ended: &ThreadStream| ended.thread.has_ended() && ended.stream.is_last_handle();
        let mut threads = self.0.per_thread.lock();
        if threads.values().filter(|thread| is_over(thread)).count() < ENDED_THREADS {
            return;
        }
        let mut ended: Vec<_> = threads.extract_if(|_, thread| is_over(thread)).collect();
        drop(threads);
        // In an order that no hash decides.
        ended.sort_unstable_by_key(|(_, ended)| ended.stream.id());
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
    pub(super) fn give_up_captures_of_ended_threads(&self) {
        let captures = |ended: &ThreadStream| {
            ended.thread.has_ended().then(|| Some((ended.stream.id(), ended.stream.timeline().capture()?))).flatten()
        };
        let mut captures: Vec<_> = self.0.per_thread.lock().values().filter_map(captures).collect();
        captures.sort_unstable_by_key(|(stream, _)| *stream);
        captures.iter().for_each(|(_, capture)| capture.give_up());
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
        self.give_back_left();
        let context = &self.0.context;
        let raw = context.driver.create_stream(flags)?;
        let kind = if flags.non_blocking { StreamKind::NonBlocking } else { StreamKind::Blocking };
        let new = || Timeline::new(context.clone(), raw, kind, None);
        let timeline = self.0.reusable.reopen(raw, kind, None).unwrap_or_else(new);
        let stream = Stream::new(context.clone(), timeline, Some(&self.0.reusable), false);
        self.0.streams.insert(&stream, None, None).into_iter().for_each(ExternalStream::note_destroyed);
        Ok(stream)
    }

    /// The device's [`Stream`] for a stream that another library owns, so that two libraries in one
    /// program share it: a stream created here, one adopted before, a default stream, or else the
    /// stream is adopted now. The device keeps it until [`Device::forget_stream`], or until the
    /// last handle of the device is dropped. Threads that ask for one handle at the same time get
    /// one stream. `cuda::stream` does the same for a stream of cudarc's.
    ///
    /// The driver is asked whether an adopted handle still names the same stream
    /// ([`Driver::stream_id`]). If it names a new one, because the owner destroyed the stream
    /// without forgetting it, the new one is adopted.
    ///
    /// ```
    /// use aquifer::device::StreamFlags;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let theirs = device.driver().create_stream(StreamFlags::default())?; // by another library
    /// // SAFETY: the stream lives until it is forgotten below.
    /// let stream = unsafe { device.stream_from_raw(theirs) }?;
    /// // SAFETY: as above.
    /// let same = unsafe { device.stream_from_raw(theirs) }?;
    /// assert_eq!(same.id(), stream.id());
    /// device.forget_stream(theirs)?;
    /// device.driver().destroy_stream(theirs)?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// In a forked child.
    ///
    /// # Safety
    /// `raw` must be a live stream of this device. If it was not created here, it must stay live
    /// until it is forgotten or the device is closed. Once it is forgotten, its owner must not
    /// enqueue work on it that uses memory of this device's allocators, unless it is adopted again.
    pub unsafe fn stream_from_raw(&self, raw: RawStream) -> Result<Stream> {
        fork::check(Operation::StreamId)?;
        // SAFETY: passed on to the caller.
        Ok(unsafe { self.find_or_adopt(raw, true) }.0)
    }

    /// Releases a stream that [`Device::stream_from_raw`] adopted, before its owner destroys it.
    /// Its ticks stay answerable; calls on handles of it fail from now on. Does nothing for other
    /// streams. Once the last handle is gone and its work is done, its number goes to a later
    /// stream.
    ///
    /// # Errors
    /// As those of [`ExternalStream::release`]: the stream stays adopted while it captures.
    pub fn forget_stream(&self, raw: RawStream) -> Result<()> {
        fork::check(Operation::StreamId)?;
        let Some(mut external) = self.0.streams.take_kept(raw) else { return Ok(()) };
        let released = external.end(true);
        if external.stream().timeline().is_open() {
            self.0.streams.put_back(external);
        }
        released
    }

    /// Adopts a stream that another library owns until the result is released or dropped, so that
    /// ticks can be taken on it and waited for. A stream that was adopted before and released gets
    /// another number.
    ///
    /// If the device has the stream already, because it was created here, is a default stream, or
    /// is adopted, this returns that stream, and releasing the result does nothing. Where several
    /// libraries use one stream, use [`Device::stream_from_raw`].
    ///
    /// # Safety
    /// `raw` must be a live stream of this device until it is released.
    pub unsafe fn adopt_stream(&self, raw: RawStream) -> ExternalStream {
        // SAFETY: passed on to the caller.
        let (stream, external) = unsafe { self.find_or_adopt(raw, false) };
        external.unwrap_or_else(|| ExternalStream::of_device(stream))
    }

    /// The stream with a handle that the device knows, or else one that is adopted now: until it is
    /// forgotten if the device `keeps` it, or until the caller releases it.
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
        let stream = Stream::new(context.clone(), timeline, Some(&self.0.reusable), true);
        let external = ExternalStream::new(stream.clone());
        let (kept, given) = if keeps { (Some(external), None) } else { (None, Some(external)) };
        let replaced = self.0.streams.insert(&stream, identity, kept);
        drop(adopting);
        // After the lock, because giving up a capture runs code of callers.
        destroyed.into_iter().chain(replaced).for_each(ExternalStream::note_destroyed);
        (stream, given)
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
}
