//! Calls in which two devices take part: waiting for another one's event, and copying from its
//! memory.
//!
//! Each device has a virtual clock of its own, and never two are locked at once: such a call is a
//! series of steps, each on one device.
//!
//! * A *wait* lets the other device run until it reaches the event, which is one of the schedules
//!   that CUDA allows, and takes the event's clock over. It costs the waiting stream no virtual
//!   time.
//! * A *copy* takes the source's bytes when it is enqueued, which in a program without races are
//!   there already: whatever wrote them is waited for. It occupies the link to the host, like a
//!   copy from there. The race detector of the device that the source is on notes that it was read,
//!   so that work there that should have waited for the copy is found.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use super::SimDriver;
use super::address::Illegal;
use super::calls::range;
use super::checks::Unwritten;
use super::clock::Clock;
use super::known::Peers;
use super::machine::Machine;
use super::memory::Content;
use super::objects::Record;
use super::race::{Epoch, Space};
use super::refused::{Answer, Refused};
use super::violation::OpRef;
use super::work::{Body, Touch, explain};
use crate::driver::{DevicePtr, Driver, RawEvent, RawStream};
use crate::error::{Code, DeviceError, Operation, Result};
use crate::label::DeviceLabel;
use crate::launch::AccessKind;

/// What a device tells another one of an event: what came before its record, and whose work that
/// may name.
struct Reached {
    clock: Arc<Clock>,
    peers: Peers,
}

/// A copy that was enqueued, as reported to the source's device.
struct Enqueued {
    epoch: Epoch,
    clock: Clock,
    peers: Peers,
}

/// What was in a source, and which of it was never written; or why it must not be touched.
type Source = std::result::Result<(Arc<[Content]>, Arc<Unwritten>), Illegal>;

impl SimDriver {
    /// The simulated device behind a driver.
    fn simulated(operation: Operation, peer: &dyn Driver) -> Result<&SimDriver> {
        peer.as_any().and_then(|driver| driver.downcast_ref()).ok_or_else(|| {
            DeviceError::new(operation, Code::INVALID_VALUE).with_detail(
                "the peer is not a simulated device; devices of two kinds share nothing: go through the host",
            )
        })
    }

    /// Makes a step on the peer.
    fn step_on_peer<T>(&self, operation: Operation, step: impl FnOnce(&mut Machine) -> Answer<T>) -> Result<T> {
        let step = |machine: &mut Machine| machine.check_lost().and_then(|()| step(machine));
        self.step(operation, step).map_err(|error| {
            let label = DeviceLabel::from(&self.info);
            let detail = error.detail.as_deref().unwrap_or_default();
            let detail = format!("on the peer, {label}: {detail}");
            error.with_detail(detail)
        })
    }

    /// [`Driver::wait_peer`].
    pub(super) fn wait_for_event_of(&self, peer: &dyn Driver, stream: RawStream, event: RawEvent) -> Result<()> {
        let operation = Operation::Wait;
        let peer = Self::simulated(operation, peer)?;
        if ptr::eq(self, peer) {
            return self.wait(stream, event);
        }
        self.call(operation, 0, |machine| machine.can_wait_for_peer(stream).map(|_| ()))?;
        match peer.step_on_peer(operation, |machine| machine.reach(event))? {
            Some(reached) => self.step(operation, |machine| machine.wait_for_peer(stream, reached)),
            None => Ok(()),
        }
    }

    /// [`Driver::copy_peer`].
    pub(super) fn copy_from(
        &self,
        peer: &dyn Driver,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        let operation = Operation::CopyPeer;
        let peer = Self::simulated(operation, peer)?;
        if ptr::eq(self, peer) {
            return self.call(operation, 0, |machine| machine.copy_on_device(operation, dst, src, bytes, stream));
        }
        let (to, from) = self.call(operation, 0, |machine| {
            machine.streams.find(stream)?;
            if bytes == 0 { Ok((0..0, 0..0)) } else { Ok((range(dst, bytes)?, range(src, bytes)?)) }
        })?;
        if bytes == 0 {
            return Ok(());
        }
        let source = peer.step_on_peer(operation, |machine| Ok(machine.take_for_peer(from.clone())))?;
        let (contents, unwritten, illegal) = match source {
            Ok((contents, unwritten)) => (Ok(contents), unwritten, None),
            Err(illegal) => {
                let why = format!("on the peer, {}: {}", DeviceLabel::from(&peer.info), explain(&illegal));
                (Err(why.into()), Arc::default(), Some(illegal))
            }
        };
        let copy = self.step(operation, |machine| machine.copy_from_peer(stream, to, contents, unwritten))?;
        // Lost meanwhile: nothing more happens there, so there is nothing to find.
        let _ = peer.step_on_peer(operation, |machine| {
            machine.read_by_peer(from, copy, illegal);
            Ok(())
        });
        Ok(())
    }
}

impl Machine {
    /// Checks that a stream may wait for what no capture of this device holds, and finds it.
    fn can_wait_for_peer(&mut self, stream: RawStream) -> Answer<u32> {
        self.check_lost()?;
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        if self.streams.get(id)?.capture.is_some() {
            self.invalidate_capture_of(id);
            let detail = format!("stream {:#x} captures; it cannot wait for an event of another device", stream.0);
            return Err(Refused::new(Code::CAPTURE_ISOLATION, detail));
        }
        Ok(id)
    }

    /// Runs until the event's latest record is reached. `None` if there is no record.
    fn reach(&mut self, event: RawEvent) -> Answer<Option<Reached>> {
        let (at, clock) = match &self.event(event)?.record {
            Record::Never => return Ok(None),
            Record::Work { at, clock } => (*at, Arc::clone(clock)),
            Record::Captured { .. } => {
                let detail =
                    format!("event {:#x} was recorded in a capture, which another device cannot join", event.0);
                return Err(Refused::new(Code::CAPTURED_EVENT, detail));
            }
        };
        self.wait_until(at)?;
        Ok(Some(Reached { clock, peers: self.detector.known.all() }))
    }

    /// Orders later work of the stream after what another device reached.
    fn wait_for_peer(&mut self, stream: RawStream, reached: Reached) -> Answer<()> {
        let id = self.can_wait_for_peer(stream)?;
        self.detector.known.meet(reached.peers);
        self.streams.arrive(id);
        self.streams.get(id)?.clock.join(&reached.clock);
        Ok(())
    }

    /// What is in a range now.
    fn take_for_peer(&self, from: Range<u64>) -> Source {
        self.address.check(from.clone())?;
        let pieces = self.address.pieces(from.clone())?;
        let unwritten = self.checks().map(|checks| checks.unwritten_from(&from)).unwrap_or_default();
        Ok((self.memory.contents(&pieces).into(), unwritten.into()))
    }

    /// Enqueues a copy of what was taken from a peer.
    fn copy_from_peer(
        &mut self,
        stream: RawStream,
        to: Range<u64>,
        contents: Result<Arc<[Content]>, Arc<str>>,
        unwritten: Arc<Unwritten>,
    ) -> Answer<Enqueued> {
        self.check_lost()?;
        let id = self.streams.find(stream)?;
        let captured = || Refused::new(Code::CAPTURE_UNSUPPORTED, "copies between devices cannot be captured");
        let submitted = self.submit(id, Body::FromPeer { to, contents, unwritten })?.ok_or_else(captured)?;
        let (key, ordinal) = (self.streams.key(id), self.ordinal);
        let clock = self.streams.get(id)?.clock.clone();
        let op = OpRef { peer: Some(ordinal), ..submitted.op };
        Ok(Enqueued { epoch: Epoch { stream: key, seq: clock.get(key), op }, clock, peers: self.detector.known.all() })
    }

    /// Notes that a peer's copy reads a range; `illegal` if it was found that it must not.
    fn read_by_peer(&mut self, from: Range<u64>, copy: Enqueued, illegal: Option<Illegal>) {
        let Enqueued { epoch, clock, peers } = copy;
        self.detector.known.meet(peers);
        // Asked again: another thread may have taken the memory away since.
        match illegal.map_or_else(|| self.address.check(from.clone()), Err) {
            Ok(()) => {
                let touch = Touch { space: Space::Device, range: from.clone(), kind: AccessKind::Read };
                self.check_blocks(epoch.op, &[touch]);
                self.detector.access(Space::Device, from, AccessKind::Read, epoch, &clock);
            }
            Err(illegal) => {
                self.detector.report(illegal.violation(epoch.op, &from));
            }
        }
    }
}
