//! The copies that use a piece of host memory: ticks, turns and claims, as [`aquifer_allocator::Turn`] and
//! [`aquifer_allocator::Claim`] are for device memory.
//!
//! Invariants:
//! * a copy into the memory comes after all copies noted before it; a copy out of it after the last one into it;
//! * whoever enqueues a copy holds the memory's turn, which notes the stream's tick when it ends, whether the copy was enqueued
//!   or not: the call may return with an error after the driver took the copy;
//! * what is claimed is not used by others in a way that conflicts;
//! * memory is lent to a stream while its whole buffer is borrowed, and a use that conflicts needs a borrow that conflicts. So by then all is
//!   enqueued, and the stream's tick of that moment covers it.

use std::sync::Arc;

use aquifer_device::{AccessKind, RequestError, Stream, Tick};

use super::memory::PinnedMemory;
use crate::capture;
use crate::error::TransferError;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What copies use some memory.
#[derive(Debug, Default)]
pub(super) struct Uses {
    noted: Mutex<Noted>,
    /// Told when a claim ends.
    unclaimed: Condvar,
}

#[derive(Debug, Default)]
struct Noted {
    /// The last copy into it; those before it came before it.
    written: Option<Tick>,
    /// The last copy out of it on each stream, since then.
    read: Vec<Tick>,
    claimed_to_read: u32,
    claimed_to_write: bool,
    /// Streams on which others enqueue copies by themselves: several that read, or one that writes.
    lent: Vec<(Stream, AccessKind)>,
}

impl Uses {
    /// The copies that must be done before one that does this with the memory, or before the host does. Waits for claims that
    /// conflict to end.
    pub(super) fn before(&self, kind: AccessKind) -> Vec<Tick> {
        let mut noted = self.lock_unclaimed(kind);
        noted.note_lent(kind);
        noted.forget_done();
        noted.before(kind).cloned().collect()
    }

    /// All copies that use the memory, for who is the last to know of it.
    pub(super) fn take(&mut self) -> Vec<Tick> {
        let noted = self.noted.get_mut();
        noted.note_lent(AccessKind::Write);
        let mut ticks = std::mem::take(&mut noted.read);
        ticks.extend(noted.written.take());
        ticks
    }

    /// Whether nothing uses the memory, nor is going to. Asks the driver about copies that are not known to be done.
    pub(super) fn are_over(&self) -> Result<bool, TransferError> {
        let ticks: Vec<Tick> = {
            let mut noted = self.noted.lock();
            if noted.claimed_to_read > 0 || noted.claimed_to_write {
                return Ok(false);
            }
            noted.note_lent(AccessKind::Read);
            noted.forget_done();
            let lent = noted.lent.iter().map(|(stream, _)| stream.tick());
            noted.before(AccessKind::Write).cloned().chain(lent).collect()
        };
        for tick in ticks {
            if !tick.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn lock_unclaimed(&self, kind: AccessKind) -> MutexGuard<'_, Noted> {
        let mut noted = self.noted.lock();
        while noted.is_claimed_against(kind) {
            noted = self.unclaimed.wait(noted);
        }
        noted
    }
}

impl Noted {
    fn before(&self, kind: AccessKind) -> impl Iterator<Item = &Tick> {
        let readers = if kind == AccessKind::Write { self.read.as_slice() } else { &[] };
        self.written.iter().chain(readers)
    }

    fn is_claimed_against(&self, kind: AccessKind) -> bool {
        self.claimed_to_write || (kind == AccessKind::Write && self.claimed_to_read > 0)
    }

    fn note(&mut self, stream: &Stream, kind: AccessKind) {
        if kind == AccessKind::Write {
            self.read.clear();
            self.written = Some(stream.tick());
        } else {
            self.read.retain(|tick| tick.timeline().id() != stream.id() && !is_known_done(tick));
            self.read.push(stream.tick());
        }
    }

    /// Notes the copies of streams to which the memory is lent that must come before such a use. Those that conflict
    /// are enqueued by now.
    fn note_lent(&mut self, kind: AccessKind) {
        let conflicts = |lent: &mut (Stream, AccessKind)| kind == AccessKind::Write || lent.1 == AccessKind::Write;
        let lent: Vec<_> = self.lent.extract_if(.., conflicts).collect();
        lent.iter().for_each(|(stream, kind)| self.note(stream, *kind));
    }

    fn forget_done(&mut self) {
        self.written.take_if(|tick| is_known_done(tick));
        self.read.retain(|tick| !is_known_done(tick));
    }
}

fn is_known_done(tick: &Tick) -> bool {
    tick.timeline().is_known_done(tick.n())
}

/// A stream's turn with host memory: what is enqueued on the stream while it is held comes after the copies that must come before.
/// Hold it for the time it takes to enqueue.
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub(crate) struct HostTurn<'a> {
    stream: &'a Stream,
    kind: AccessKind,
    noted: MutexGuard<'a, Noted>,
}

impl Drop for HostTurn<'_> {
    fn drop(&mut self) {
        self.noted.note(self.stream, self.kind);
    }
}

impl PinnedMemory {
    /// The memory's turn: orders what `stream` does from now on after the copies that must come before one that does `kind` with
    /// the memory (it reads in an upload, and writes in a download). While the turn is held nobody else gets one.
    ///
    /// The tick that is noted when the turn ends is one that no event covers yet. Whoever enqueued covers it after that
    /// ([`Tick::cover`]), so that it is known to be done without more events; the pool covers it only when it needs the memory.
    ///
    /// Waits for claims that conflict to end.
    ///
    /// # Errors
    /// When the stream is another device's, or captures: a graph could run when the memory is somebody else's; errors of the driver.
    pub(crate) fn turn<'a>(&'a self, stream: &'a Stream, kind: AccessKind) -> Result<HostTurn<'a>, TransferError> {
        loop {
            if let Some(turn) = self.try_turn(stream, kind)? {
                return Ok(turn);
            }
            self.wait_unclaimed(kind);
        }
    }

    /// The same, or `None` while a claim holds that conflicts. For who has turns with device memory: the threads that end the claim may need
    /// one of them.
    ///
    /// # Errors
    /// As [`PinnedMemory::turn`].
    pub(crate) fn try_turn<'a>(
        &'a self,
        stream: &'a Stream,
        kind: AccessKind,
    ) -> Result<Option<HostTurn<'a>>, TransferError> {
        if stream.device_id() != self.device_id() {
            return Err(RequestError::wrong_device("page-locked memory", self.device_id(), stream.device_id()).into());
        }
        capture::refuse(
            stream,
            "a graph may run when this page-locked memory is somebody else's; copy outside of the capture",
        )?;
        let mut noted = self.uses().noted.lock();
        if noted.is_claimed_against(kind) {
            return Ok(None);
        }
        noted.note_lent(kind);
        for tick in noted.before(kind) {
            stream.wait_for(tick)?;
        }
        Ok(Some(HostTurn { stream, kind, noted }))
    }

    /// Lends the memory to a stream on which the caller has copies enqueued that the pool does not know: they come
    /// after the copies that must come before, and later uses that conflict come after what is enqueued on the stream
    /// by then. The caller's buffer is borrowed as `kind` says, until the copies are enqueued.
    ///
    /// # Errors
    /// As [`PinnedMemory::turn`].
    pub(super) fn lend(&self, stream: &Stream, kind: AccessKind) -> Result<(), TransferError> {
        let mut turn = self.turn(stream, kind)?;
        let lent = &mut turn.noted.lent;
        if !lent.iter().any(|(known, _)| known.id() == stream.id()) {
            lent.push((stream.clone(), kind));
        }
        Ok(())
    }

    /// Waits until no claim holds that conflicts with such a use. Another part of the memory may be claimed again right after.
    pub(crate) fn wait_unclaimed(&self, kind: AccessKind) {
        drop(self.uses().lock_unclaimed(kind));
    }

    /// Claims the memory for threads that read or write it, once the copies given beside it are done.
    pub(crate) fn claim(self: &Arc<Self>, kind: AccessKind) -> (HostClaim, Vec<Tick>) {
        let mut noted = self.uses().lock_unclaimed(kind);
        noted.forget_done();
        noted.note_lent(kind);
        let before = noted.before(kind).cloned().collect();
        match kind {
            AccessKind::Read => noted.claimed_to_read += 1,
            AccessKind::Write => noted.claimed_to_write = true,
        }
        (HostClaim { memory: self.clone(), kind }, before)
    }
}

/// Host memory claimed for threads that read it, or write it. Until it is dropped, turns, other claims and uses by the caller that
/// conflict wait. It keeps the memory alive.
#[derive(Debug)]
#[must_use = "the claim ends when it is dropped"]
pub(crate) struct HostClaim {
    memory: Arc<PinnedMemory>,
    kind: AccessKind,
}

impl HostClaim {
    pub(crate) fn memory(&self) -> &Arc<PinnedMemory> {
        &self.memory
    }
}

impl Drop for HostClaim {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return;
        }
        let uses = self.memory.uses();
        let mut noted = uses.noted.lock();
        match self.kind {
            AccessKind::Read => noted.claimed_to_read -= 1,
            AccessKind::Write => noted.claimed_to_write = false,
        }
        uses.unclaimed.notify_all();
    }
}
