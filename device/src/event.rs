//! Events as people use them: markers on a stream that others wait for, and that can measure time.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::context::Context;
use crate::driver::{Driver, RawEvent};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::stream::Stream;
use crate::timeline::Clock;

/// A CUDA event. Waiting for one also teaches the waiting stream's timeline what the event covers, so that ticks before
/// it need no event of their own.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (producer, consumer) = (device.create_stream()?, device.create_stream()?);
/// let tick = producer.tick();
/// let event = device.create_event(false)?;
/// event.record(&producer)?;
/// consumer.wait_event(&event)?;
/// assert!(consumer.is_ordered_after(&tick));
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Event {
    raw: RawEvent,
    context: Arc<Context>,
    latest: Mutex<Option<Record>>,
}

/// What the latest record of an event covers.
#[derive(Debug)]
struct Record {
    stream: u32,
    covers: u64,
    clock: Clock,
}

impl Event {
    pub(crate) fn new(context: Arc<Context>, timing: bool) -> Result<Event> {
        let raw = context.driver.create_event(timing)?;
        Ok(Event { raw, context, latest: Mutex::new(None) })
    }

    /// Records the event at the end of the stream's present work, replacing an earlier record.
    ///
    /// # Errors
    /// When the stream belongs to another device, and those of the driver. The event then keeps its earlier record.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        if stream.device_id() != self.context.device_id {
            return Err(DeviceError::new(Operation::Record, Code::INVALID_HANDLE)
                .with_detail("the event and the stream belong to different devices"));
        }
        let timeline = stream.timeline();
        let mut latest = self.latest.lock();
        let ((), covers, clock) = timeline.record_with(|| self.context.driver.record(self.raw, timeline.raw()))?;
        *latest = Some(Record { stream: timeline.id(), covers, clock });
        Ok(())
    }

    /// Whether the work before the latest record is done; true for an event never recorded.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn is_complete(&self) -> Result<bool> {
        self.context.driver.query_event(self.raw)
    }

    /// Waits on the host for the latest record.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn synchronize(&self) -> Result<()> {
        self.context.driver.synchronize_event(self.raw)
    }

    /// Milliseconds from this event to `end`. Both must be made for timing, recorded and complete.
    ///
    /// # Errors
    /// Those of the driver: not for timing or not recorded (`INVALID_HANDLE`), not complete (`NOT_READY`).
    pub fn elapsed_ms(&self, end: &Event) -> Result<f64> {
        self.context.driver.elapsed_ms(self.raw, end.raw)
    }

    pub(crate) fn make_wait(&self, stream: &Stream) -> Result<()> {
        stream.timeline().check_owner(Operation::Wait)?;
        let latest = self.latest.lock();
        self.context.driver.wait(stream.timeline().raw(), self.raw)?;
        if let Some(record) = &*latest
            && stream.device_id() == self.context.device_id
        {
            stream.timeline().absorb(record.stream, record.covers, &record.clock);
        }
        Ok(())
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Err(error) = self.context.driver.destroy_event(self.raw) {
            tracing::debug!(%error, "an event could not be destroyed");
        }
    }
}
