//! What the race detector reports: two operations, where they met, and what should have ordered them.

use std::fmt;
use std::ops::Range;

use crate::driver::RawStream;
use crate::error::Operation;

/// A stream as the simulator tells it apart: by a number that never comes back, unlike the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StreamRef {
    /// Number of the stream on its device; 0 is the legacy default stream.
    pub id: u32,
    /// The handle that it has or had; [`RawStream::PER_THREAD`] for each thread's own default stream.
    pub handle: RawStream,
}

impl fmt::Display for StreamRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.handle {
            RawStream::LEGACY => f.write_str("the legacy stream"),
            RawStream::PER_THREAD => write!(f, "per-thread stream {}", self.id),
            RawStream(handle) => write!(f, "stream {} (handle {handle:#x})", self.id),
        }
    }
}

/// One operation: a piece of work on a stream, or something that the host did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct OpRef {
    /// The call that made it; `None` for the host's own access to page-locked memory.
    pub operation: Option<Operation>,
    /// Name of the kernel, when it is one.
    pub kernel: Option<&'static str>,
    /// Its number among all operations of the device, in program order from 1.
    pub number: u64,
    /// The stream it was enqueued on; `None` for what the host did.
    pub stream: Option<StreamRef>,
    /// Ordinal of the device whose operation it is; `None` for one of the device that reports it.
    pub peer: Option<u32>,
}

impl OpRef {
    /// The operation without its stream, such as `'memset #12'`.
    pub(super) fn short(&self) -> Short<'_> {
        Short(self)
    }

    /// The stream it was enqueued on, or the host.
    pub(super) fn place(&self) -> Place<'_> {
        Place(self)
    }
}

/// Where an operation took place.
pub(super) struct Place<'a>(&'a OpRef);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.stream {
            Some(stream) => write!(f, "{stream}")?,
            None => f.write_str("the host")?,
        }
        self.0.peer.map_or(Ok(()), |peer| write!(f, " of sim:{peer}"))
    }
}

/// An operation without its stream.
pub(super) struct Short<'a>(&'a OpRef);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.0.operation {
            None => "host access",
            Some(Operation::Memset) => "memset",
            Some(Operation::CopyToDevice) => "copy to device",
            Some(Operation::CopyToHost) => "copy to host",
            Some(Operation::CopyOnDevice) => "copy on device",
            Some(Operation::CopyPeer) => "copy from a peer",
            Some(Operation::Launch) => "kernel",
            Some(Operation::AllocAsync) => "pool allocation",
            Some(Operation::FreeAsync) => "pool free",
            Some(other) => other.name(),
        };
        write!(f, "'{name}")?;
        if let Some(kernel) = self.0.kernel {
            write!(f, " {kernel}")?;
        }
        write!(f, " #{}'", self.0.number)
    }
}

impl fmt::Display for OpRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stream {
            Some(_) => write!(f, "{} on {}", self.short(), self.place()),
            None => write!(f, "{} by the host", self.short()),
        }
    }
}

/// What kind of rule was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Two writes that nothing orders.
    WriteWrite,
    /// A write after a read that nothing orders before it.
    ReadWrite,
    /// A read after a write that nothing orders before it.
    WriteRead,
    /// The host touched page-locked memory that a copy may still be using.
    HostAccess,
    /// Memory was unmapped, released or freed while work may still be using it.
    PendingWork,
    /// Memory was touched after it was freed or unmapped.
    UseAfterFree,
    /// Memory was touched that was never allocated, or past the end of an allocation.
    NotAllocated,
    /// Mapped memory was touched before access to it was given.
    NoAccess,
    /// A kernel touched memory that its launch did not declare.
    Undeclared,
}

impl fmt::Display for ViolationKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ViolationKind::WriteWrite => "two unordered writes",
            ViolationKind::ReadWrite => "write not ordered after a read",
            ViolationKind::WriteRead => "read not ordered after a write",
            ViolationKind::HostAccess => "host access to memory in flight",
            ViolationKind::PendingWork => "memory taken away from pending work",
            ViolationKind::UseAfterFree => "use after free",
            ViolationKind::NotAllocated => "access outside any allocation",
            ViolationKind::NoAccess => "access to mapped memory without access rights",
            ViolationKind::Undeclared => "undeclared access",
        })
    }
}

/// A broken rule: two operations that met in memory without the order they need.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// Which rule.
    pub kind: ViolationKind,
    /// The earlier operation in program order, when there is one.
    pub first: Option<OpRef>,
    /// The operation that broke the rule.
    pub second: OpRef,
    /// The addresses where they met: device addresses, or host addresses of page-locked memory.
    pub range: Range<u64>,
    /// What was missing between the two, in words.
    pub missing: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{}: ", self.kind)?;
        if let Some(first) = self.first {
            write!(f, "{first} and ")?;
        }
        write!(f, "{} at {start:#x}..{end:#x} ({} bytes): {}", self.second, end.saturating_sub(start), self.missing)
    }
}
