//! Events: markers on a stream that other streams wait for, and that can measure time.

use std::fmt;
use std::sync::Arc;

use crate::context::Context;
use crate::driver::{Driver, RawEvent};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::label::DeviceMismatch;
use crate::release::Object;
use crate::stream::Stream;
use crate::sync::Mutex;
use crate::timeline::{Recording, Timeline};

/// A CUDA event, for ordering streams explicitly and for measuring time. ([`Stream::wait_for`]
/// orders streams by ticks instead.) When a stream waits for an event, its timeline also learns
/// which ticks the event covers, so that these need no event of their own.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let (producer, consumer) = (device.stream()?, device.stream()?);
/// let tick = producer.tick();
/// let event = device.create_event(false)?;
/// event.record(&producer)?;
/// consumer.wait_event(&event)?;
/// assert!(consumer.is_ordered_after(&tick));
/// # Ok::<(), aquifer::Error>(())
/// ```
pub struct Event {
    raw: RawEvent,
    context: Arc<Context>,
    latest: Mutex<Option<Record>>,
}

/// The ticks that the latest record of an event covers.
#[derive(Debug)]
struct Record {
    timeline: Arc<Timeline>,
    recording: Recording,
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("raw", &self.raw).finish_non_exhaustive()
    }
}

impl Event {
    pub(crate) fn new(context: Arc<Context>, timing: bool) -> Result<Event> {
        let raw = context.driver.create_event(timing)?;
        Ok(Event { raw, context, latest: Mutex::new(None) })
    }

    /// Records the event behind the work enqueued on the stream until now, replacing an earlier
    /// record.
    ///
    /// # Errors
    /// When the stream belongs to another device, or captures unannounced
    /// ([`Stream::announce_capture`]); errors of the driver. The event then keeps its earlier
    /// record.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.check_device(stream.device_id(), Operation::Record)?;
        let timeline = stream.timeline();
        let raw = stream.usable(Operation::Record)?;
        let mut latest = self.latest.lock();
        let recording = timeline.record_with(|| self.context.driver.record(self.raw, raw))?;
        *latest = Some(Record { timeline: timeline.clone(), recording });
        Ok(())
    }

    fn check_device(&self, device: u32, operation: Operation) -> Result<()> {
        if device == self.context.device_id {
            return Ok(());
        }
        let devices = DeviceMismatch::between(device, self.context.device_id);
        Err(DeviceError::refused(operation, Code::INVALID_HANDLE)
            .with_detail(format!("the stream or event that this event is used with belongs to {devices}")))
    }

    /// True if the work before the latest record is done, or if the event was never recorded.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_complete(&self) -> Result<bool> {
        self.context.driver.query_event(self.raw)
    }

    /// Waits on the host until the work before the latest record is done.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.context.driver.synchronize_event(self.raw)?;
        self.context.settle_left();
        Ok(())
    }

    /// Milliseconds from this event to `end`. Both must be created with timing, recorded and
    /// complete.
    ///
    /// # Errors
    /// When the events belong to different devices; errors of the driver, among them
    /// `INVALID_HANDLE` for an event without timing or never recorded, and `NOT_READY` for one that
    /// is not complete.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f64> {
        self.check_device(end.context.device_id, Operation::ElapsedTime)?;
        self.context.driver.elapsed_ms(self.raw, end.raw)
    }

    pub(crate) fn make_wait(&self, stream: &Stream) -> Result<()> {
        let timeline = stream.timeline();
        let raw = stream.usable(Operation::Wait)?;
        let latest = self.latest.lock();
        let wait = || stream.context().wait(raw, &self.context, self.raw);
        match &*latest {
            Some(Record { recording: Recording { capture: Some(_), .. }, .. })
                if stream.device_id() != self.context.device_id =>
            {
                Err(DeviceError::refused(Operation::Wait, Code::CAPTURED_EVENT)
                    .with_detail("the event was recorded in a capture, which streams of other devices cannot join"))
            }
            Some(Record { timeline: recorded, recording: Recording { capture: Some(scope), covers, clock } }) => {
                timeline.join_capture(scope, (recorded, *covers, clock), stream.keep_alive(), wait)
            }
            Some(Record { timeline: recorded, recording }) => {
                wait()?;
                timeline.absorb(recorded, recording.covers, &recording.clock);
                Ok(())
            }
            None => wait(),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.releases.release(Object::Event(self.raw));
    }
}
