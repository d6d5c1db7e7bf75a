//! Events: a record is a moment in virtual time and a copy of the clock that its stream had then.
//!
//! Invariant: a wait takes the record that the event has at the call; recording again changes no
//! earlier wait.

use std::sync::Arc;

use super::clock::Clock;
use super::machine::Machine;
use super::objects::{Event, Record};
use super::refused::{Answer, Refused};
use crate::driver::{RawEvent, RawStream};
use crate::error::Code;

impl Machine {
    pub(super) fn create_event(&mut self, timing: bool) -> RawEvent {
        RawEvent(self.events.insert(Event { timing, record: Record::Never }))
    }

    pub(super) fn destroy_event(&mut self, event: RawEvent) -> Answer<()> {
        self.events.remove(event.0).map(|_| ()).ok_or_else(|| Refused::handle("event", event.0))
    }

    pub(super) fn event(&self, event: RawEvent) -> Answer<&Event> {
        self.events.get(event.0).ok_or_else(|| Refused::handle("event", event.0))
    }

    pub(super) fn record(&mut self, event: RawEvent, stream: RawStream) -> Answer<()> {
        self.event(event)?;
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        let record = if let Some(member) = &self.streams.get(id)?.capture {
            Record::Captured { capture: member.capture, clock: Arc::new(member.clock.clone()) }
        } else {
            self.streams.arrive(id);
            let now = self.now;
            let stream = self.streams.get(id)?;
            self.detector.prune(&mut stream.clock);
            Record::Work { at: stream.tail.max(now), clock: Arc::new(stream.clock.clone()) }
        };
        if let Some(event) = self.events.get_mut(event.0) {
            event.record = record;
        }
        Ok(())
    }

    pub(super) fn wait(&mut self, stream: RawStream, event: RawEvent) -> Answer<()> {
        let record = self.event(event)?.record.clone();
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        match record {
            Record::Captured { capture, clock } => self.wait_captured(id, capture, &clock),
            Record::Never | Record::Work { .. } if self.streams.get(id)?.capture.is_some() => {
                self.invalidate_capture_of(id);
                let detail = format!("stream {:#x} captures, event {:#x} was recorded outside", stream.0, event.0);
                Err(Refused::new(Code::CAPTURE_ISOLATION, detail))
            }
            Record::Never => Ok(()),
            Record::Work { at, clock } => {
                self.streams.arrive(id);
                let stream = self.streams.get(id)?;
                stream.clock.join(&clock);
                stream.tail = stream.tail.max(at);
                let tail = stream.tail;
                self.horizon = self.horizon.max(tail);
                Ok(())
            }
        }
    }

    /// When the event's latest record is reached, with what the host knows then. `None` if there is
    /// no record.
    fn reached(&self, event: RawEvent) -> Answer<Option<(u64, Arc<Clock>)>> {
        match &self.event(event)?.record {
            Record::Never => Ok(None),
            Record::Work { at, clock } => Ok(Some((*at, Arc::clone(clock)))),
            Record::Captured { .. } => {
                let detail = format!("event {:#x} was recorded in a capture and never completes", event.0);
                Err(Refused::new(Code::CAPTURED_EVENT, detail))
            }
        }
    }

    pub(super) fn query_event(&mut self, event: RawEvent) -> Answer<bool> {
        let Some((at, clock)) = self.reached(event)? else { return Ok(true) };
        if at > self.now {
            return Ok(false);
        }
        self.detector.known.learn(&clock);
        Ok(true)
    }

    pub(super) fn synchronize_event(&mut self, event: RawEvent) -> Answer<()> {
        let Some((at, clock)) = self.reached(event)? else { return Ok(()) };
        self.wait_until(at)?;
        self.detector.known.learn(&clock);
        Ok(())
    }

    pub(super) fn elapsed_ms(&mut self, start: RawEvent, end: RawEvent) -> Answer<f64> {
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([start, end]) {
            let timing = self.event(event)?.timing;
            let (true, Some((at, _))) = (timing, self.reached(event)?) else {
                let why = if timing { "was never recorded" } else { "was created without timing" };
                return Err(Refused::new(Code::INVALID_HANDLE, format!("event {:#x} {why}", event.0)));
            };
            *time = at;
        }
        if times[0].max(times[1]) > self.now {
            return Err(Refused::new(Code::NOT_READY, "an event's latest record is not complete"));
        }
        let [from, to] = times.map(|time| time as f64);
        Ok((to - from) / 1e6)
    }
}
