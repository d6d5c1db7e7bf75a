//! Reports of the simulator: the operation that broke a rule, the one before it, the memory, and
//! the remedy.

use std::fmt;
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;

use aquifer_device::{DevicePtr, Operation, RawStream};

/// The identity of a stream: a number that is never reused, unlike the handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StreamRef {
    /// Number of the stream on its device; 0 is the legacy default stream.
    pub id: u32,
    /// The handle that it has or had; [`RawStream::PER_THREAD`] for each thread's own default
    /// stream.
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
    /// The call that made it; `None` for the host's own access to pinned memory.
    pub operation: Option<Operation>,
    /// Name of the kernel, when it is one.
    pub kernel: Option<&'static str>,
    /// Its number among all operations of the device, in program order from 1.
    pub number: u64,
    /// The stream it was enqueued on; `None` for an action of the host.
    pub stream: Option<StreamRef>,
    /// Ordinal of the device whose operation it is; `None` for one of the device that reports it.
    pub peer: Option<u32>,
    /// The place in the program that it was called from, where the call knows it.
    pub at: Option<&'static Location<'static>>,
}

impl OpRef {
    /// The operation without its stream, such as `'memset #12'`.
    pub(crate) fn short(&self) -> String {
        let name = match self.operation {
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
        let kernel = self.kernel.map_or_else(String::new, |kernel| format!(" {kernel}"));
        format!("'{name}{kernel} #{}'", self.number)
    }

    /// The stream it was enqueued on, or the host.
    pub(crate) fn place(&self) -> String {
        let stream = self.stream.map_or_else(|| "the host".to_owned(), |stream| stream.to_string());
        self.peer.map_or_else(|| stream.clone(), |peer| format!("{stream} of sim:{peer}"))
    }
}

impl fmt::Display for OpRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stream {
            Some(_) => write!(f, "{} on {}", self.short(), self.place())?,
            None => write!(f, "{} by the host", self.short())?,
        }
        self.at.map_or(Ok(()), |at| write!(f, " (called at {})", line(at)))
    }
}

/// File and line of a place.
pub(crate) fn line(at: &Location<'_>) -> String {
    format!("{}:{}", at.file(), at.line())
}

/// A block of an allocator's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockRef {
    /// First address.
    pub ptr: DevicePtr,
    /// Bytes requested.
    pub bytes: u64,
    /// Name of the allocation.
    pub tag: Option<Arc<str>>,
    /// Where it was allocated.
    pub allocated: Option<&'static Location<'static>>,
    /// Its end, if it was dropped.
    pub dropped: Option<DropRef>,
}

impl fmt::Display for BlockRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the block of {} bytes at {}", self.bytes, self.ptr)?;
        self.tag.as_ref().map_or(Ok(()), |tag| write!(f, " (tag `{tag}`)"))?;
        self.allocated.map_or(Ok(()), |at| write!(f, ", allocated at {}", line(at)))?;
        self.dropped.as_ref().map_or(Ok(()), |dropped| write!(f, ", {dropped}"))
    }
}

/// The end of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DropRef {
    /// Where it was given back, unless a destructor did that.
    pub at: Option<&'static Location<'static>>,
    /// Name of the thread that gave it back.
    pub thread: Option<Arc<str>>,
    /// The last place that this thread enqueued work or allocated at before a destructor gave it
    /// back.
    pub after: Option<&'static Location<'static>>,
}

impl fmt::Display for DropRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("dropped")?;
        if let Some(at) = self.at {
            return write!(f, " at {}", line(at));
        }
        match &self.thread {
            Some(thread) => write!(f, " by thread `{thread}`")?,
            None => f.write_str(" by a thread without a name")?,
        }
        self.after.map_or(Ok(()), |after| write!(f, ", which came from {}", line(after)))
    }
}

/// The kind of rule that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ViolationKind {
    /// Two writes that nothing orders.
    #[error("two unordered writes")]
    WriteWrite,
    /// A write after a read that nothing orders before it.
    #[error("write not ordered after a read")]
    ReadWrite,
    /// A read after a write that nothing orders before it.
    #[error("read not ordered after a write")]
    WriteRead,
    /// The host touched pinned memory that a copy may still be using.
    #[error("host access to memory in flight")]
    HostAccess,
    /// Memory was unmapped, released or freed while work may still be using it.
    #[error("memory taken away from pending work")]
    PendingWork,
    /// Memory was touched after it was freed or unmapped, or after its block was dropped.
    #[error("use after free")]
    UseAfterFree,
    /// Memory of an allocator was touched beyond the requested bytes of a block.
    #[error("access beyond the bounds of a block")]
    OutOfBounds,
    /// Physical memory was touched that is mapped in two live blocks.
    #[error("two live blocks with the same physical memory")]
    Aliased,
    /// A kernel or a download read bytes that nothing had written.
    #[error("read of memory that was never written")]
    NeverWritten,
    /// Memory was touched that was never allocated, or past the end of an allocation.
    #[error("access outside any allocation")]
    NotAllocated,
    /// Mapped memory was touched before access to it was given.
    #[error("access to mapped memory without access rights")]
    NoAccess,
    /// A kernel touched memory that its launch did not declare.
    #[error("undeclared access")]
    Undeclared,
}

impl ViolationKind {
    /// True if the call that enqueues the work finds it: a wrong pointer or length.
    pub(crate) fn is_of_the_call(self) -> bool {
        use ViolationKind::{Aliased, NoAccess, NotAllocated, OutOfBounds, UseAfterFree};
        matches!(self, UseAfterFree | OutOfBounds | Aliased | NotAllocated | NoAccess)
    }
}

/// A broken rule: two operations that met in memory without the order they need, or one that must
/// not touch the memory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Violation {
    /// Which rule.
    pub kind: ViolationKind,
    /// The earlier operation in program order, when there is one.
    pub first: Option<OpRef>,
    /// The operation that broke the rule.
    pub second: OpRef,
    /// The addresses where they met: device addresses, or host addresses of pinned memory.
    pub range: Range<u64>,
    /// The order that is missing between the two, or the mistake, in words.
    pub missing: String,
    /// The allocator's block that the memory belongs to, where the allocator reported it to the
    /// device.
    pub block: Option<BlockRef>,
}

impl Violation {
    /// True if the memory of a live block was unmapped, as `Allocator::sleep` does.
    fn is_asleep(&self) -> bool {
        let is_unmapped = self.first.is_some_and(|first| first.operation == Some(Operation::Unmap));
        is_unmapped && self.block.as_ref().is_some_and(|block| block.dropped.is_none())
    }

    /// Advice.
    pub fn remedy(&self) -> String {
        use ViolationKind::{
            Aliased, HostAccess, NeverWritten, NoAccess, NotAllocated, OutOfBounds, PendingWork, ReadWrite, Undeclared,
            UseAfterFree, WriteRead, WriteWrite,
        };
        let text = match self.kind {
            WriteWrite | ReadWrite | WriteRead => match &self.first {
                Some(first) if first.stream.is_some() && self.second.stream.is_some() => {
                    let (a, b) = (first.place(), self.second.place());
                    return format!("between the two, call `b.wait_for(&a.tick())`, where `a` is {a} and `b` is {b}");
                }
                _ => "order the two",
            },
            HostAccess | PendingWork => match &self.first {
                Some(first) if first.stream.is_some() => {
                    let a = first.place();
                    return format!("before that, wait for the work: `a.tick().synchronize()`, where `a` is {a}");
                }
                _ => "wait for the work before that",
            },
            UseAfterFree if self.is_asleep() => {
                "the memory is away while its allocator sleeps: call `Allocator::wake` before the work is enqueued"
            }
            UseAfterFree if self.second.operation == Some(Operation::LaunchGraph) => {
                "keep all memory that a graph uses, or the pool that it is from, until its last launch"
            }
            UseAfterFree => {
                "drop the memory after the last call that uses it; work enqueued before the drop may still run"
            }
            OutOfBounds => "allocate more, or pass the length of the block: one range touches one block",
            Aliased => "this is an error of the allocator: report it",
            NeverWritten => {
                "write the memory first, for example with `Stream::fill` or `Allocator::alloc_bytes_zeroed`"
            }
            NotAllocated => "pass an address of live memory, and a length within it",
            NoAccess => "give access to the mapping first, with `Driver::set_access`",
            Undeclared => "declare the range in the launch's accesses",
        };
        text.to_owned()
    }
}

/// Several lines: the rule and the place, and below them, indented, the operations, what is
/// missing, the block, and the remedy.
impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        let bytes = end.saturating_sub(start);
        write!(f, "{} at {start:#x}..{end:#x} ({bytes} bytes)", self.kind)?;
        self.first.map_or(Ok(()), |first| write!(f, "\n  first: {first}"))?;
        let second = if self.first.is_some() { "second" } else { "by" };
        write!(f, "\n  {second}: {}\n  cause: {}", self.second, self.missing)?;
        self.block.as_ref().map_or(Ok(()), |block| write!(f, "\n  memory: {block}"))?;
        write!(f, "\n  remedy: {}", self.remedy())
    }
}
