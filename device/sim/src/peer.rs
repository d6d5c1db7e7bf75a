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
//!   there already: the work that wrote them is waited for. It occupies the link to the host, like
//!   a copy from there. The race detector of the device that the source is on notes that it was
//!   read, so that work there that should have waited for the copy is found.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use aquifer_device::{
    AccessKind, Code, DeviceError, DeviceLabel, DevicePtr, Driver, Operation, RawEvent, RawStream, Result,
};

use crate::SimDriver;
use crate::address::Illegal;
use crate::calls::range;
use crate::checks::Unwritten;
use crate::clock::OpClock;
use crate::known::Peers;
use crate::machine::Machine;
use crate::memory::Content;
use crate::race::{Epoch, Space};
use crate::refused::{Answer, Refused};
use crate::violation::OpRef;
use crate::work::{Body, Touch, explain};

/// A record that another device has reached: the clock of it, and the devices whose work the clock
/// may name.
struct Reached {
    clock: Arc<OpClock>,
    peers: Peers,
}

/// A copy that was enqueued, as reported to the source's device.
struct Enqueued {
    epoch: Epoch,
    clock: OpClock,
    peers: Peers,
}

/// The contents of a source and the bytes of it that were never written, or why it must not be
/// touched.
type SourceContents = std::result::Result<(Arc<[Content]>, Arc<Unwritten>), Illegal>;

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
    pub(crate) fn wait_for_event_of(&self, peer: &dyn Driver, stream: RawStream, event: RawEvent) -> Result<()> {
        let operation = Operation::Wait;
        let peer = Self::simulated(operation, peer)?;
        if ptr::eq(self, peer) {
            return self.wait(stream, event);
        }
        self.call(operation, |machine| can_wait_for_peer(machine, stream).map(|_| ()))?;
        match peer.step_on_peer(operation, |machine| reach(machine, event))? {
            Some(reached) => self.step(operation, |machine| wait_for_peer(machine, stream, reached)),
            None => Ok(()),
        }
    }

    /// [`Driver::copy_peer`].
    pub(crate) fn copy_from(
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
            return self.call(operation, |machine| machine.copy_within(operation, dst, src, bytes, stream));
        }
        let (to, from) = self.call(operation, |machine| {
            machine.streams.find(stream)?;
            if bytes == 0 { Ok((0..0, 0..0)) } else { Ok((range(dst, bytes)?, range(src, bytes)?)) }
        })?;
        if bytes == 0 {
            return Ok(());
        }
        let source = peer.step_on_peer(operation, |machine| Ok(take_for_peer(machine, from.clone())))?;
        let (contents, unwritten, illegal) = match source {
            Ok((contents, unwritten)) => (Ok(contents), unwritten, None),
            Err(illegal) => {
                let why = format!("on the peer, {}: {}", DeviceLabel::from(&peer.info), explain(&illegal));
                (Err(why.into()), Arc::default(), Some(illegal))
            }
        };
        let copy = self.step(operation, |machine| copy_from_peer(machine, stream, to, contents, unwritten))?;
        // Lost meanwhile: nothing more happens there, so there is nothing to find.
        let _ = peer.step_on_peer(operation, |machine| {
            read_by_peer(machine, from, copy, illegal);
            Ok(())
        });
        Ok(())
    }
}

/// Checks that a stream may wait for work outside of any capture, and finds it.
fn can_wait_for_peer(machine: &mut Machine, stream: RawStream) -> Answer<u32> {
    machine.check_lost()?;
    let id = machine.streams.find(stream)?;
    machine.forbid_outside_event(id)?;
    Ok(id)
}

/// Runs until the event's latest record is reached. `None` if there is no record.
fn reach(machine: &mut Machine, event: RawEvent) -> Answer<Option<Reached>> {
    let Some((at, clock)) = machine.reached(event)? else { return Ok(None) };
    machine.wait_until(at)?;
    Ok(Some(Reached { clock, peers: machine.detector.known.all() }))
}

/// Orders later work of the stream after a record that another device reached.
fn wait_for_peer(machine: &mut Machine, stream: RawStream, reached: Reached) -> Answer<()> {
    let id = can_wait_for_peer(machine, stream)?;
    machine.detector.known.meet(reached.peers);
    machine.streams.arrive(id);
    machine.streams.get(id)?.clock.join(&reached.clock);
    Ok(())
}

/// The contents of a range now.
fn take_for_peer(machine: &Machine, from: Range<u64>) -> SourceContents {
    machine.address.check(from.clone())?;
    let pieces = machine.address.pieces(from.clone())?;
    let unwritten = machine.checks().map(|checks| checks.unwritten_from(&from)).unwrap_or_default();
    Ok((machine.memory.contents(&pieces).into(), unwritten.into()))
}

/// Enqueues a copy of contents taken from a peer.
fn copy_from_peer(
    machine: &mut Machine,
    stream: RawStream,
    to: Range<u64>,
    contents: Result<Arc<[Content]>, Arc<str>>,
    unwritten: Arc<Unwritten>,
) -> Answer<Enqueued> {
    machine.check_lost()?;
    let id = machine.streams.find(stream)?;
    let captured = || Refused::new(Code::CAPTURE_UNSUPPORTED, "copies between devices cannot be captured");
    let submitted = machine.submit(id, Body::FromPeer { to, contents, unwritten })?.ok_or_else(captured)?;
    let (key, ordinal) = (machine.streams.key(id), machine.ordinal);
    let clock = machine.streams.get(id)?.clock.clone();
    let op = OpRef { peer: Some(ordinal), ..submitted.op };
    Ok(Enqueued { epoch: Epoch { stream: key, seq: clock.get(key), op }, clock, peers: machine.detector.known.all() })
}

/// Notes that a peer's copy reads a range; `illegal` if it was found that it must not.
fn read_by_peer(machine: &mut Machine, from: Range<u64>, copy: Enqueued, illegal: Option<Illegal>) {
    let Enqueued { epoch, clock, peers } = copy;
    machine.detector.known.meet(peers);
    // Asked again: another thread may have taken the memory away since.
    match illegal.map_or_else(|| machine.address.check(from.clone()), Err) {
        Ok(()) => {
            let touch = Touch { space: Space::Device, range: from, kind: AccessKind::Read };
            machine.check_blocks(epoch.op, std::slice::from_ref(&touch));
            let aliases = touch.aliases(&machine.physicals, &machine.address.mappings);
            machine.detector.access(touch, &aliases, epoch, &clock);
        }
        Err(illegal) => {
            machine.detector.report(illegal.violation(epoch.op, &from));
        }
    }
}
