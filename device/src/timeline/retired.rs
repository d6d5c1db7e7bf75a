//! Retired timelines: those of streams that are gone. Each serves a later stream.
//!
//! Allocators and clocks keep something for each stream number. In a program that makes a stream for each of its requests, they would keep
//! more and more. So a number stands for one stream after another. All work of the earlier stream is known to be done when the next one
//! begins, and ticks count on from there, as if one stream had gone on after the host waited for it. Everything that was noted about the
//! number stays true.
//!
//! When a thread ends, no driver call is made with its default stream any more, because the driver's state for the thread may be gone. An
//! event on the legacy stream later shows that its work is done. Every blocking stream waits for such an event, so events are recorded for
//! several ended threads at a time, when another thread asks for its stream.
//!
//! A stream whose last event cannot be recorded now is destroyed later, because its ticks could not be asked about without it. Until then
//! its timeline stays open, so that an event can be recorded whenever somebody asks. A stream that captures is destroyed after the capture,
//! because the CUDA documentation does not specify the fate of a capture whose stream is destroyed.
//!
//! A stream that its owner lent and got back may be adopted again, by a program that does so for each of its calls. It goes on with the
//! number that it had: later work of the stream comes after all that it did meanwhile. The driver's own number tells that it is the same
//! stream. If its handle now names another stream, it was destroyed, and its number goes to a later stream once the host has waited
//! for the device: no event covers what it did after its release.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::fork::Mutex;

use super::{Owner, StreamKind, Timeline};
use crate::driver::RawStream;
use crate::error::ErrorKind;
use crate::orphans::Orphan;

/// How many timelines are asked whether their work is done before a new one is made.
const LOOKS: usize = 2;

/// Number of ended threads from which on events are recorded for them, and the most that get one at a time.
const ENDED: usize = 16;

/// The timelines of a device's streams that are gone. Its locks are leaves.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    /// Timelines whose last event was recorded, by kind of stream. The one whose work was not asked about for longest comes first.
    closed: Mutex<HashMap<StreamKind, VecDeque<Arc<Timeline>>>>,
    /// Timelines of ended threads' default streams, whose last events are still to be recorded.
    ended: Mutex<VecDeque<Arc<Timeline>>>,
    /// Timelines of streams that nobody uses any more, and that are destroyed once their last events can be recorded.
    undestroyed: Mutex<Vec<Arc<Timeline>>>,
    /// Streams that were adopted and released, by the driver's handle.
    released: Mutex<HashMap<u64, Released>>,
}

/// A stream that its owner has back.
#[derive(Debug)]
struct Released {
    /// The driver's number of the stream, which no other stream gets.
    identity: u64,
    timeline: Arc<Timeline>,
}

impl Retired {
    /// Destroys a stream that nobody uses any more, after its last event, which keeps all its ticks answerable (T4). Later, if that event
    /// cannot be recorded now, or the stream is part of a capture. On a lost device, in a capture that was not announced, or if somebody else
    /// destroyed it, it goes without one.
    pub(crate) fn destroy(&self, timeline: Arc<Timeline>) {
        if timeline.is_capturing() {
            return self.undestroyed.lock().push(timeline);
        }
        let Err(error) = timeline.close() else {
            timeline.destroy_on_driver();
            return self.keep(timeline);
        };
        tracing::debug!(%error, "a stream's last event could not be recorded");
        if matches!(error.kind, ErrorKind::Capture | ErrorKind::DeviceLost | ErrorKind::InvalidUse) {
            timeline.close_without_event();
            timeline.destroy_on_driver();
        } else {
            self.undestroyed.lock().push(timeline);
        }
    }

    /// Tries again to destroy streams whose last events could not be recorded.
    pub(crate) fn destroy_left(&self) {
        let left = std::mem::take(&mut *self.undestroyed.lock());
        left.into_iter().for_each(|timeline| self.destroy(timeline));
    }

    /// Destroys the streams of a device that is gone, if need be without their last events. Those that are part of a capture stay.
    pub(crate) fn destroy_at_last(&self) {
        self.destroy_left();
        let left: Vec<_> = self.undestroyed.lock().extract_if(.., |timeline| !timeline.is_capturing()).collect();
        for timeline in left {
            timeline.close_without_event();
            timeline.destroy_on_driver();
        }
    }

    /// True if a stream is still to be destroyed.
    pub(crate) fn has_undestroyed(&self) -> bool {
        !self.undestroyed.lock().is_empty()
    }

    /// Keeps the timeline of a stream that is gone.
    pub(crate) fn keep(&self, timeline: Arc<Timeline>) {
        self.closed.lock().entry(timeline.kind).or_default().push_back(timeline);
    }

    /// Keeps the timeline of an ended thread's default stream. Makes no driver call.
    pub(crate) fn keep_ended(&self, timeline: Arc<Timeline>) {
        self.ended.lock().push_back(timeline);
    }

    /// Records the last events of ended threads' default streams, if there are several. Those that fail are tried again later.
    pub(crate) fn close_ended(&self) {
        for timeline in self.take_ended() {
            match timeline.close() {
                Ok(()) => self.keep(timeline),
                Err(error) => {
                    tracing::debug!(%error, "an ended thread's last event could not be recorded yet");
                    self.keep_ended(timeline);
                }
            }
        }
    }

    fn take_ended(&self) -> Vec<Arc<Timeline>> {
        let mut ended = self.ended.lock();
        if ended.len() < ENDED { Vec::new() } else { ended.drain(..ENDED).collect() }
    }

    /// A retired timeline for a new stream of this kind, if the work of an earlier one is done. With `owner`, only that thread can use the
    /// new stream.
    pub(crate) fn reopen(&self, raw: RawStream, kind: StreamKind, owner: Option<Owner>) -> Option<Arc<Timeline>> {
        for _ in 0..LOOKS {
            let timeline = self.take(kind)?;
            // A timeline that cannot be asked now may be asked later.
            if timeline.reopen(raw, owner).unwrap_or(false) {
                return Some(timeline);
            }
            self.keep(timeline);
        }
        None
    }

    /// Keeps the timeline of an adopted stream that was released.
    pub(crate) fn keep_released(&self, identity: u64, timeline: Arc<Timeline>) {
        self.released.lock().insert(timeline.raw().0, Released { identity, timeline });
    }

    /// The timeline of a stream with this handle that was released, if it is the same stream.
    pub(crate) fn readopt(&self, raw: RawStream, identity: u64) -> Option<Arc<Timeline>> {
        let released = self.released.lock().remove(&raw.0)?;
        if released.identity == identity {
            released.timeline.readopt();
            return Some(released.timeline);
        }
        released.timeline.note_destroyed();
        self.keep(released.timeline);
        None
    }

    fn take(&self, kind: StreamKind) -> Option<Arc<Timeline>> {
        self.closed.lock().get_mut(&kind)?.pop_front()
    }
}

impl Timeline {
    fn destroy_on_driver(&self) {
        self.context.orphans.give_back(Orphan::Stream(self.raw()));
    }
}

#[cfg(test)]
mod tests {
    use crate::driver::Driver;
    use crate::sim::{Fault, SimConfig, SimDriver};
    use crate::{Code, Device, ErrorKind, Operation};

    #[test]
    fn a_stream_that_could_not_be_destroyed_goes_with_its_device() {
        let driver = SimDriver::new(SimConfig::default());
        let device = Device::new(driver.clone());
        let stream = device.stream().unwrap();
        let (raw, tick) = (stream.raw(), stream.tick());
        driver.inject(Fault::Nth { operation: Some(Operation::Record), nth: 1, code: Code(999) });
        drop(stream);
        driver.query_stream(raw).expect("its last event could not be recorded");
        drop(device);
        assert_eq!(driver.query_stream(raw).unwrap_err().kind, ErrorKind::InvalidUse);
        driver.advance(std::time::Duration::from_secs(1));
        assert!(tick.is_done().unwrap());
    }
}
