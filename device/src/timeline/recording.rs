//! The events of a timeline: recording, querying and recycling them (T1 to T3).

use std::sync::Arc;

use super::{Owner, Recorded, Recording, Timeline, TimelineState};
use crate::context::{PooledEvent, Waited};
use crate::driver::RawStream;
use crate::error::{Code, DeviceError, Operation, Result};
use crate::release::Object;
use crate::sync::atomic::Ordering;

/// Number of events on one timeline from which on the driver is asked about them as more are
/// recorded.
const MANY: usize = 64;

/// The driver is asked about events of copies after so many of them.
const COPIES_A_QUESTION: u64 = 16;

impl Timeline {
    /// Raises the counter, calls `record` to record an event, and returns the ticks that the event
    /// covers and the clock that it carries (T1, T2).
    pub(crate) fn record_with(&self, record: impl FnOnce() -> Result<()>) -> Result<Recording> {
        let state = self.state.lock();
        // An event recorded in an unannounced capture would seem to cover work enqueued before.
        self.refuse_unannounced(&state)?;
        let _held_off = self.protect_captures(self.raw(), Operation::Record)?;
        let covers = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        let clock = if state.capture.is_some() { &state.capture_clock } else { &state.clock };
        record().map(|()| Recording { covers, clock: clock.clone(), capture: state.capture.clone() })
    }

    /// Records the last event of an adopted stream that is released, by which all its ticks can
    /// still be asked about, and closes the timeline, also if the driver refuses. A stream that
    /// captures stays open, unless `even_capturing`.
    pub(crate) fn close_released(&self, even_capturing: bool, no_more_work: bool) -> Result<()> {
        let mut state = self.state.lock();
        if state.capture.is_some() && !even_capturing {
            return Err(DeviceError::in_capture(
                Operation::CaptureStatus,
                "an adopted stream cannot be released while it captures: end the capture first",
            )
            .of_request("the stream was not released"));
        }
        let last = self.record(&mut state);
        state.closed = true;
        self.owner.close();
        if no_more_work && last.is_ok() {
            state.destroyed = true;
            cover_later_ticks(&mut state);
        }
        last.map(drop)
    }

    /// True if the timeline is closed and no work comes any more: it can serve a later stream once
    /// its ticks are known done.
    pub(crate) fn has_ended(&self) -> bool {
        let state = self.state.lock();
        state.destroyed && state.capture.is_none()
    }

    /// Records the last event of a stream on which no work is enqueued any more, so that it covers
    /// ticks taken later, too, and closes the timeline. The timeline stays open if the event cannot
    /// be recorded now. Any thread may call it.
    pub(crate) fn close(&self) -> Result<()> {
        let mut state = self.state.lock();
        self.record(&mut state)?;
        (state.closed, state.destroyed) = (true, true);
        self.owner.close();
        cover_later_ticks(&mut state);
        Ok(())
    }

    /// Destroys the stream after its last event, which keeps all its ticks answerable (T4). Returns
    /// false if the event cannot be recorded. The ticks are then known to be done once the host has
    /// waited for the device.
    pub(crate) fn destroy(&self) -> bool {
        let closed = self.close();
        if let Err(error) = &closed {
            tracing::debug!(%error, "a stream's last event could not be recorded");
            self.close_without_event();
        }
        self.context.releases.release(Object::Stream(self.raw()));
        closed.is_ok()
    }

    /// Closes the timeline of a stream that is gone without a last event.
    pub(crate) fn close_without_event(&self) {
        let mut state = self.state.lock();
        (state.closed, state.destroyed) = (true, true);
        self.owner.close();
    }

    /// Makes the timeline serve a new stream from now on, if all work of the earlier stream, which
    /// is gone, is done; returns whether it does. Ticks count on, so that those of the earlier
    /// stream stay done, and those of the new stream are not done.
    pub(super) fn reopen(&self, raw: RawStream, owner: Option<Owner>) -> Result<bool> {
        let mut state = self.state.lock();
        self.poll(&mut state)?;
        if !state.closed || !self.is_known_done(self.now()) {
            return Ok(false);
        }
        self.count.fetch_add(1, Ordering::AcqRel);
        self.raw.store(raw.0, Ordering::Relaxed);
        self.owner.set(owner);
        // Guards of the earlier stream may still end.
        *state = TimelineState { expected: std::mem::take(&mut state.expected), ..TimelineState::default() };
        Ok(true)
    }

    /// Returns the oldest event that covers tick `n`; records one if there is none.
    pub(super) fn covering(&self, state: &mut TimelineState, n: u64) -> Result<Recorded> {
        let first = state.events.partition_point(|recorded| recorded.covers <= n);
        match state.events.get(first) {
            Some(recorded) => Ok(recorded.clone()),
            None => self.record(state),
        }
    }

    /// As [`Timeline::cover`], for the tick after a copy, of which a program makes many: asks the
    /// driver about earlier ones from time to time. While there are many events that are not known
    /// to be complete, the newest is recorded once more, so that it covers the tick, too.
    ///
    /// # Errors
    /// As [`Timeline::cover`].
    pub fn cover_copy(&self, n: u64) -> Result<()> {
        self.cover_by(n, |state| {
            if n.is_multiple_of(COPIES_A_QUESTION) {
                self.ask_about_half(state)?;
            }
            // Threads that wait for an event have a reference, which they take under the lock.
            let is_free = state.events.back().is_some_and(|newest| Arc::strong_count(&newest.event) == 1);
            let newest = if is_free && state.events.len() >= MANY { state.events.pop_back() } else { None };
            let recorded = self.record_by(state, newest.as_ref().map(|newest| newest.event.clone()));
            if recorded.is_err() {
                // It covers what it did before.
                state.events.extend(newest);
            }
            recorded.map(drop)
        })
    }

    pub(super) fn record(&self, state: &mut TimelineState) -> Result<Recorded> {
        let recorded = self.record_by(state, None)?;
        self.keep_few(state);
        Ok(recorded)
    }

    /// Records an event: this one, if it is given, or one that is idle.
    fn record_by(&self, state: &mut TimelineState, event: Option<Arc<PooledEvent>>) -> Result<Recorded> {
        if state.closed {
            let detail = "the stream was destroyed or released and its last event could not be recorded; once the \
                host has waited for the device (`Tick::synchronize`, `Device::synchronize`) its work is known to be \
                done";
            return Err(self.closed_error(Operation::Record, detail));
        }
        if state.capture.is_some() {
            return Err(DeviceError::in_capture(
                Operation::Record,
                "work of a capturing stream orders nothing outside of its graph: a stream takes part in it once it has \
                 waited for an event of the capturing stream (`Event::record`, `Stream::wait_event`, or a \
                 library's join of streams); otherwise use a stream that does not capture, or wait until the capture \
                 has ended",
            ));
        }
        self.refuse_unannounced(state)?;
        let on = if self.is_foreign() { RawStream::LEGACY } else { self.raw() };
        let _held_off = self.protect_captures(on, Operation::Record)?;
        let covers = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        let event = self.context.record(on, event)?;
        let recorded = Recorded { covers, clock: state.clock.clone(), event };
        state.events.push_back(recorded.clone());
        Ok(recorded)
    }

    /// The error for a stream that is gone. Streams of a lost device are destroyed without a last
    /// event.
    pub(super) fn closed_error(&self, operation: Operation, detail: &str) -> DeviceError {
        let driver = &self.context.driver;
        match driver.lost() {
            Some(lost) => driver.note_lost(DeviceError::refused(operation, lost.code)),
            None => DeviceError::refused(operation, Code::INVALID_HANDLE).with_detail(detail),
        }
    }

    pub(super) fn poll(&self, state: &mut TimelineState) -> Result<()> {
        while let Some(oldest) = state.events.front() {
            if oldest.covers <= self.frontier() {
                oldest.event.note_complete();
            } else if !oldest.event.query()? {
                break;
            }
            self.mark_done(oldest.covers);
            state.events.pop_front();
            if state.events.len() >= MANY {
                self.ask_about_half(state)?;
            }
        }
        Ok(())
    }

    /// Asks about events whenever their number reaches a power of two, so that they do not pile up
    /// on a stream that others wait for and that no thread asks about. That is one query for dozens
    /// of events, and fewer while the device lags behind.
    fn keep_few(&self, state: &mut TimelineState) {
        let count = state.events.len();
        if count >= MANY
            && count.is_power_of_two()
            && let Err(error) = self.ask_about_half(state)
        {
            tracing::debug!(%error, "events of a stream could not be asked about, and stay");
        }
    }

    /// Asks the driver about the middle one of the events, and recycles all up to it if it is
    /// complete. So one query for each progress event shows roughly how far a stream got, and they
    /// do not pile up if nothing else asks. The last event, just recorded, says nothing yet.
    pub(super) fn ask_about_half(&self, state: &mut TimelineState) -> Result<()> {
        let Some(half) = state.events.len().checked_sub(2).map(|others| others / 2) else { return Ok(()) };
        let newest = &state.events[half];
        if newest.event.query()? {
            self.mark_done(newest.covers);
            state.events.drain(..=half).for_each(|older| older.event.note_complete());
        }
        Ok(())
    }
}

/// Makes the last event of a stream without further work cover ticks that are taken later, too.
/// These show the present count, which is not raised any more.
fn cover_later_ticks(state: &mut TimelineState) {
    if let Some(last) = state.events.back_mut() {
        last.covers += 1;
    }
}
