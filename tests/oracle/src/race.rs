//! What the oracle reports.

use std::fmt;
use std::ops::Range;

use aquifer_device::RawStream;

use crate::clock::Line;

/// An operation, as reports name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Op {
    pub(crate) line: Line,
    pub(crate) number: u64,
    /// The call that made it.
    pub call: &'static str,
    /// The stream it was enqueued on; `None` for the host.
    pub stream: Option<RawStream>,
    /// The place of the call that made it: see [`Oracle::at`](crate::Oracle::at).
    pub place: u64,
    /// For a node of a graph, the place of the launch.
    pub launch: Option<u64>,
}

impl Op {
    /// An operation of the caller's own, for reports beside those of the oracle.
    pub fn new(call: &'static str, stream: Option<RawStream>, place: u64) -> Op {
        Op { line: 0, number: 0, call, stream, place, launch: None }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.call)?;
        match self.stream {
            None => f.write_str(" by the host"),
            Some(stream) if stream.is_legacy() => f.write_str(" on the legacy stream"),
            Some(RawStream::PER_THREAD) => write!(f, " on a per-thread stream (line {})", self.line),
            Some(RawStream(handle)) => write!(f, " on stream {handle:#x} (line {})", self.line),
        }
    }
}

/// The kind of a race.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum RaceKind {
    /// Work touches memory that other work touches, at least one of the two writes, and nothing
    /// orders them.
    Work,
    /// The host touches pinned memory that work may still be using.
    Host,
    /// Memory is taken away while work may still be using it.
    Removal,
}

impl fmt::Display for RaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RaceKind::Work => "unordered work",
            RaceKind::Host => "host access to memory in flight",
            RaceKind::Removal => "memory taken away from pending work",
        })
    }
}

/// Two operations that nothing orders, and that need an order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Race {
    /// Which kind.
    pub kind: RaceKind,
    /// The earlier operation.
    pub first: Op,
    /// The operation that comes too early.
    pub second: Op,
    /// The addresses where they meet, as the second one names them.
    pub range: Range<u64>,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{}: {} and {} at {start:#x}..{end:#x}", self.kind, self.first, self.second)
    }
}
