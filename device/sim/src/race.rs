//! The race detector: happens-before by vector clocks, checked in program order when work is
//! enqueued.
//!
//! Because only the order of calls counts, never virtual time, a race is found under every seed.
//! Every stream has a clock, the host has one (`known.rs`), and each byte of memory remembers its
//! last write and the reads since. An access must be ordered after the accesses it conflicts with:
//! their operation numbers must be within the clock of its stream, or known to the host. Work of
//! another device that reads memory of this one is noted here, with the clock that it has there.
//! Accesses are noted by address; where physical memory is mapped at several addresses, an access
//! at one of them is checked against those at all of them.
//!
//! Invariants: a cell's reads are pairwise unordered and all later than its write, so a cell holds
//! at most one read per stream; dropping a cell that the host knows complete changes no verdict;
//! `foreign` is set while a cell may hold an access of another device.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::AccessKind;

use crate::checks::Checks;
use crate::clock::{OpClock, StreamKey};
use crate::interval::IntervalMap;
use crate::known::Known;
use crate::violation::{BlockRef, OpRef, Violation, ViolationKind};
use crate::work::Touch;

/// Most violations that are kept until they are taken; more of them are only counted.
const KEPT_MAX: usize = 4096;

/// An operation at its place on its stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Epoch {
    pub(crate) stream: StreamKey,
    pub(crate) seq: u64,
    pub(crate) op: OpRef,
}

/// The accesses of a piece of memory with which later ones can conflict.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct LastAccesses {
    write: Option<Epoch>,
    reads: Vec<Epoch>,
}

impl LastAccesses {
    fn epochs(&self) -> impl Iterator<Item = &Epoch> {
        self.write.iter().chain(&self.reads)
    }
}

/// Two accesses that nothing orders.
#[derive(Debug)]
pub(crate) struct Conflict {
    pub(crate) kind: ViolationKind,
    pub(crate) first: Epoch,
    pub(crate) range: Range<u64>,
}

/// The last accesses of an address space.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    cells: IntervalMap<LastAccesses>,
    /// Cells left by the last sweep; the next one runs when there are twice as many.
    swept: usize,
}

impl Shadow {
    /// The earlier accesses of `range` that conflict with an access and that `ordered` does not
    /// place before it.
    pub(crate) fn conflicts(
        &self,
        range: Range<u64>,
        kind: AccessKind,
        ordered: impl Fn(&Epoch) -> bool,
    ) -> Vec<Conflict> {
        let mut conflicts = Vec::new();
        let mut meets = |kind, first: &Epoch, range: &Range<u64>| {
            if !ordered(first) {
                conflicts.push(Conflict { kind, first: *first, range: range.clone() });
            }
        };
        for (piece, cell) in self.cells.overlapping(range) {
            let on_write = if kind == AccessKind::Write { ViolationKind::WriteWrite } else { ViolationKind::WriteRead };
            cell.write.iter().for_each(|write| meets(on_write, write, &piece));
            if kind == AccessKind::Write {
                cell.reads.iter().for_each(|read| meets(ViolationKind::ReadWrite, read, &piece));
            }
        }
        conflicts
    }

    /// Notes an access and returns its [`Shadow::conflicts`].
    pub(crate) fn access(
        &mut self,
        range: Range<u64>,
        kind: AccessKind,
        epoch: Epoch,
        ordered: impl Fn(&Epoch) -> bool,
    ) -> Vec<Conflict> {
        let conflicts = self.conflicts(range.clone(), kind, &ordered);
        match kind {
            AccessKind::Write => self.cells.insert(range, LastAccesses { write: Some(epoch), reads: Vec::new() }),
            AccessKind::Read => self.cells.update(range, |_, held| {
                let mut cell = held.cloned().unwrap_or_default();
                cell.reads.retain(|read| !ordered(read));
                cell.reads.push(epoch);
                cell
            }),
        }
        conflicts
    }

    /// The accesses of `range` that `known` does not list as complete; with `writes_only`, only
    /// writes.
    pub(crate) fn pending(
        &self,
        range: Range<u64>,
        writes_only: bool,
        known: impl Fn(&Epoch) -> bool,
    ) -> Vec<(Epoch, Range<u64>)> {
        let mut found: Vec<(Epoch, Range<u64>)> = Vec::new();
        for (piece, cell) in self.cells.overlapping(range) {
            let reads = cell.reads.iter().filter(|_| !writes_only);
            for epoch in cell.write.iter().chain(reads).filter(|epoch| !known(epoch)) {
                if found.last().is_none_or(|(last, _)| last.op != epoch.op) {
                    found.push((*epoch, piece.clone()));
                }
            }
        }
        found
    }

    /// Whether no access of `range` is noted.
    pub(crate) fn is_untouched(&self, range: Range<u64>) -> bool {
        self.cells.overlapping(range).next().is_none()
    }

    /// Forgets the accesses of `range`.
    pub(crate) fn clear(&mut self, range: Range<u64>) {
        self.cells.remove(range);
    }

    /// Forgets cells that are known complete, once there are enough of them to pay for the sweep.
    fn sweep(&mut self, known: impl Fn(&Epoch) -> bool) {
        if self.cells.len() > 2 * self.swept + 256 {
            self.cells.retain(|cell| !cell.epochs().all(&known));
            self.swept = self.cells.len();
        }
    }
}

/// The host's knowledge, the accesses of memory, and the violations so far.
#[derive(Debug)]
pub(crate) struct Detector {
    /// Accesses by device address.
    pub(crate) device: Shadow,
    /// Device-side accesses of pinned memory, by host address.
    pub(crate) host: Shadow,
    /// The operations that the host knows complete.
    pub(crate) known: Known,
    /// The checks of how memory is used, unless they are off.
    pub(crate) checks: Option<Arc<Checks>>,
    /// Whether work of another device may be among the accesses.
    foreign: bool,
    violations: Vec<Violation>,
    /// Pairs of operations already reported, so that one missing edge is one report.
    reported: HashSet<(Option<OpKey>, OpKey)>,
    /// Violations found since the start.
    pub(crate) found: u64,
    /// How many of them were found when one last panicked, or when all were taken.
    raised: u64,
}

/// An operation among those of several devices: ordinal of another device, and number.
type OpKey = (Option<u32>, u64);

fn key(op: &OpRef) -> OpKey {
    (op.peer, op.number)
}

impl Detector {
    pub(crate) fn new(checks: Option<Arc<Checks>>) -> Self {
        Detector {
            device: Shadow::default(),
            host: Shadow::default(),
            known: Known::new(),
            checks,
            foreign: false,
            violations: Vec::new(),
            reported: HashSet::new(),
            found: 0,
            raised: 0,
        }
    }

    /// The device is lost: pending work never happens, so nothing can meet it in memory any more.
    pub(crate) fn end(&mut self) {
        self.known.end();
        self.device.cells.clear();
        self.host.cells.clear();
    }

    /// Forgets the accesses of this device's own work, once the host knows all of it complete:
    /// nothing can conflict with it any more. Work of other devices stays until it is known
    /// complete, too.
    pub(crate) fn forget_own(&mut self) {
        self.host.cells.clear();
        if self.foreign {
            let known = &self.known;
            self.device.cells.retain(|cell| cell.epochs().any(|epoch| !known.knows(epoch.stream, epoch.seq)));
            self.foreign = self.device.cells.len() > 0;
        } else {
            self.device.cells.clear();
        }
    }

    /// Drops the components that the host knows complete.
    pub(crate) fn prune(&self, clock: &mut OpClock) {
        clock.forget_unless(|stream, seq| !self.known.knows(stream, seq));
    }

    /// Checks and notes an access of `epoch`, whose stream is ordered after `clock`. The memory is
    /// also mapped at `aliases`. The access is not noted there, so that these can be unmapped
    /// before it is done.
    pub(crate) fn access(&mut self, touch: Touch, aliases: &[Range<u64>], epoch: Epoch, clock: &OpClock) {
        let Touch { space, range, kind } = touch;
        let known = &self.known;
        self.foreign |= epoch.stream.device != known.device;
        let ordered =
            |earlier: &Epoch| clock.get(earlier.stream) >= earlier.seq || known.knows(earlier.stream, earlier.seq);
        let shadow = match space {
            Space::Device => &mut self.device,
            Space::Host => &mut self.host,
        };
        let mut conflicts = shadow.access(range, kind, epoch, ordered);
        for alias in aliases {
            conflicts.extend(shadow.conflicts(alias.clone(), kind, ordered));
        }
        shadow.sweep(|epoch| known.knows(epoch.stream, epoch.seq));
        for conflict in conflicts {
            self.conflict(space, &conflict, epoch.op);
        }
    }

    /// Reports a conflict between work of two streams.
    pub(crate) fn conflict(&mut self, space: Space, conflict: &Conflict, second: OpRef) {
        let pool_free = second.operation == Some(aquifer_device::Operation::FreeAsync);
        let kind = if pool_free { ViolationKind::PendingWork } else { conflict.kind };
        self.report(Violation {
            kind,
            first: Some(conflict.first.op),
            second,
            range: conflict.range.clone(),
            missing: missing_edge(&conflict.first, &second),
            block: self.block_at(space, conflict.range.start),
        });
    }

    /// Reports work that the host does not know complete, in memory that `second` takes away or
    /// touches. Returns that work.
    pub(crate) fn check_known(
        &mut self,
        space: Space,
        range: Range<u64>,
        writes_only: bool,
        kind: ViolationKind,
        second: OpRef,
    ) -> Vec<Epoch> {
        let shadow = match space {
            Space::Device => &self.device,
            Space::Host => &self.host,
        };
        let pending = shadow.pending(range, writes_only, |epoch| self.known.knows(epoch.stream, epoch.seq));
        for (epoch, piece) in &pending {
            let (first, range, missing) = (Some(epoch.op), piece.clone(), host_has_not_waited(epoch, &second));
            let block = self.block_at(space, piece.start);
            self.report(Violation { kind, first, second, range, missing, block });
        }
        pending.into_iter().map(|(epoch, _)| epoch).collect()
    }

    /// The allocator's block at an address of the device.
    fn block_at(&self, space: Space, at: u64) -> Option<BlockRef> {
        self.checks.as_ref().filter(|_| space == Space::Device)?.block_at(at)
    }

    /// Notes a violation, once for each pair of operations.
    pub(crate) fn report(&mut self, violation: Violation) {
        if !self.reported.insert((violation.first.as_ref().map(key), key(&violation.second))) {
            return;
        }
        self.found += 1;
        if self.violations.len() < KEPT_MAX {
            let Violation { kind, second, .. } = &violation;
            tracing::warn!(%kind, %second, "the simulated device found a violation");
            self.violations.push(violation);
        }
    }

    /// The violations not taken yet, oldest first.
    pub(crate) fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Takes the violations.
    pub(crate) fn take(&mut self) -> Vec<Violation> {
        self.reported.clear();
        self.raised = self.found;
        std::mem::take(&mut self.violations)
    }

    /// Takes the oldest violation.
    pub(crate) fn take_first(&mut self) -> Option<Violation> {
        (!self.violations.is_empty()).then(|| self.violations.remove(0))
    }

    /// The violations that did not panic yet and were not taken, in words, now that one is to
    /// panic.
    pub(crate) fn raise(&mut self) -> Option<String> {
        let count = self.found - self.raised;
        let kept = usize::try_from(count).unwrap_or(usize::MAX).min(self.violations.len());
        self.raised = self.found;
        let first = self.violations[self.violations.len() - kept..].first()?;
        let more = if count > 1 { format!(" (and {} more)", count - 1) } else { String::new() };
        Some(format!("the simulated device found a violation: {first}{more}"))
    }
}

/// Which memory an access touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Device memory, by device address.
    Device,
    /// Pinned host memory, by host address.
    Host,
}

fn missing_edge(first: &Epoch, second: &OpRef) -> String {
    let (before, after) = (first.op.short(), second.short());
    match (first.op.stream, second.stream) {
        (Some(_), Some(_)) => {
            let (from, to) = (first.op.place(), second.place());
            format!("no event recorded on {from} after {before} was waited for by {to} before {after}")
        }
        _ => format!("nothing orders {after} after {before}"),
    }
}

/// The missing edge when the host acts on memory that work may still use.
pub(crate) fn host_has_not_waited(first: &Epoch, second: &OpRef) -> String {
    let (before, after) = (first.op.short(), second.short());
    match first.op.stream {
        Some(_) => {
            let from = first.op.place();
            format!("the host has not waited for {from}, or for an event recorded on it after {before}, before {after}")
        }
        None => format!("nothing orders {after} after {before}"),
    }
}
