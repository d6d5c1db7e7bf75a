//! Pieces of work: the ranges that they touch, their costs, and their effects.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::{AccessKind, Code, DeviceError, DevicePtr, KernelMemory, Launch, Operation, Result};

use crate::address::{AddressSpace, Illegal};
use crate::checks::{Origin, Unwritten};
use crate::engine::{Cost, Unit};
use crate::host::HostBlock;
use crate::interval::IntervalMap;
use crate::mappings::Mappings;
use crate::memory::{Content, Memory};
use crate::objects::PhysicalTable;
use crate::race::Space;
use crate::violation::{OpRef, Violation, ViolationKind};

/// A part of a pinned block.
#[derive(Clone, Debug)]
pub(crate) struct HostPart {
    pub(crate) block: Arc<HostBlock>,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// One end of a copy.
#[derive(Clone, Debug)]
pub(crate) enum End {
    Device(Range<u64>),
    Host(HostPart),
}

impl End {
    pub(crate) fn is_host(&self) -> bool {
        matches!(self, End::Host(_))
    }

    /// Its addresses, on the host or the device.
    pub(crate) fn range(&self) -> Range<u64> {
        match self {
            End::Device(range) => range.clone(),
            End::Host(part) => part.block.range(part.offset, part.bytes),
        }
    }

    fn touch(&self, kind: AccessKind) -> Touch {
        let space = if self.is_host() { Space::Host } else { Space::Device };
        Touch { space, range: self.range(), kind }
    }
}

/// One copy; many can be one piece of work.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) to: End,
    pub(crate) from: End,
}

impl Part {
    fn run(&self, memory: &mut Memory, address: &AddressSpace) -> std::result::Result<(), Broken> {
        match (&self.to, &self.from) {
            (End::Device(to), End::Device(from)) => {
                memory.copy(&address.pieces(to.clone())?, &address.pieces(from.clone())?);
            }
            (End::Device(to), End::Host(from)) => {
                let pieces = address.pieces(to.clone())?;
                let mut bytes = vec![0; from.bytes];
                from.block.read(from.offset, &mut bytes);
                memory.write(&pieces, &bytes);
            }
            (End::Host(to), End::Device(from)) => {
                let mut bytes = vec![0; to.bytes];
                memory.read(&address.pieces(from.clone())?, &mut bytes);
                to.block.write(to.offset, &bytes);
            }
            // Refused when it is asked for.
            (End::Host(_), End::Host(_)) => {}
        }
        Ok(())
    }
}

/// The effect of a piece of work.
#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// Fills memory.
    Memset { to: Range<u64>, value: u8 },
    /// Copies one range, rows, or many ranges.
    Copy { operation: Operation, parts: Arc<[Part]> },
    /// Copies bytes that were taken from pageable memory.
    FromTaken { to: Range<u64>, bytes: Arc<[u8]> },
    /// Copies contents of a peer's memory, or fails with the reason why the source was not there.
    FromPeer { to: Range<u64>, contents: std::result::Result<Arc<[Content]>, Arc<str>>, unwritten: Arc<Unwritten> },
    /// Copies to pageable memory; the waiting host takes the bytes itself.
    ToWaiting { from: Range<u64> },
    /// Runs a kernel.
    Kernel(Arc<Launch>),
    /// Starts the life of pool memory on the stream.
    PoolAlloc { memory: Range<u64> },
    /// Ends the life of pool memory.
    PoolFree { memory: Range<u64> },
    /// Touches memory that is not there, as was reported.
    Fault { violation: Arc<str> },
}

/// An access of a piece of work.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    pub(crate) space: Space,
    pub(crate) range: Range<u64>,
    pub(crate) kind: AccessKind,
}

impl Touch {
    fn device(range: &Range<u64>, kind: AccessKind) -> Touch {
        Touch { space: Space::Device, range: range.clone(), kind }
    }

    /// The other addresses of the physical memory that it touches.
    pub(crate) fn aliases(&self, physicals: &PhysicalTable, mappings: &Mappings) -> Vec<Range<u64>> {
        if self.space == Space::Device { physicals.aliases(mappings, &self.range) } else { Vec::new() }
    }
}

impl Body {
    /// One copy.
    pub(crate) fn copy(operation: Operation, to: End, from: End) -> Body {
        Body::Copy { operation, parts: [Part { to, from }].into() }
    }

    /// The call that makes such work.
    pub(crate) fn operation(&self) -> Operation {
        match self {
            Body::Memset { .. } => Operation::Memset,
            Body::Copy { operation, .. } => *operation,
            Body::FromTaken { .. } => Operation::CopyToDevice,
            Body::FromPeer { .. } => Operation::CopyPeer,
            Body::ToWaiting { .. } => Operation::CopyToHost,
            Body::Kernel(_) | Body::Fault { .. } => Operation::Launch,
            Body::PoolAlloc { .. } => Operation::AllocAsync,
            Body::PoolFree { .. } => Operation::FreeAsync,
        }
    }

    /// The kernel's name, when it is one.
    pub(crate) fn kernel(&self) -> Option<&'static str> {
        match self {
            Body::Kernel(launch) => Some(launch.name),
            _ => None,
        }
    }

    /// Everything it touches. No range is empty.
    pub(crate) fn touches(&self) -> Vec<Touch> {
        use AccessKind::{Read, Write};
        match self {
            Body::Memset { to: memory, .. }
            | Body::FromTaken { to: memory, .. }
            | Body::FromPeer { to: memory, .. }
            | Body::PoolAlloc { memory }
            | Body::PoolFree { memory } => vec![Touch::device(memory, Write)],
            Body::Copy { parts, .. } => {
                parts.iter().flat_map(|part| [part.from.touch(Read), part.to.touch(Write)]).collect()
            }
            Body::ToWaiting { from } => vec![Touch::device(from, Read)],
            Body::Kernel(launch) => {
                let accesses = launch.accesses.iter().filter(|access| access.bytes > 0);
                accesses.map(|access| Touch::device(&access.ptr.range(access.bytes), access.kind)).collect()
            }
            Body::Fault { .. } => Vec::new(),
        }
    }

    /// The pinned memory it uses.
    pub(crate) fn host_parts(&self) -> Vec<&HostPart> {
        match self {
            Body::Copy { parts, .. } => {
                let ends = parts.iter().flat_map(|part| [&part.to, &part.from]);
                ends.filter_map(|end| if let End::Host(part) = end { Some(part) } else { None }).collect()
            }
            _ => Vec::new(),
        }
    }

    /// Its cost on the device.
    pub(crate) fn cost(&self) -> Cost {
        let length = |range: &Range<u64>| range.end - range.start;
        let (unit, bytes, operations) = match self {
            Body::Memset { to, .. } => (Unit::Compute, length(to), 0),
            Body::FromTaken { to, .. } | Body::FromPeer { to, .. } => (Unit::ToDevice, length(to), 0),
            Body::ToWaiting { from } => (Unit::ToHost, length(from), 0),
            Body::Copy { parts, .. } => {
                let bytes = parts.iter().fold(0u64, |sum, part| sum.saturating_add(length(&part.to.range())));
                let to_host = parts.iter().any(|part| part.to.is_host());
                let from_host = parts.iter().any(|part| part.from.is_host());
                match (from_host, to_host) {
                    (true, _) => (Unit::ToDevice, bytes, 0),
                    (false, true) => (Unit::ToHost, bytes, 0),
                    (false, false) => (Unit::Compute, bytes.saturating_mul(2), 0),
                }
            }
            Body::Kernel(launch) => {
                let bytes = launch.accesses.iter().fold(0u64, |sum, access| sum.saturating_add(access.bytes));
                (Unit::Compute, bytes, launch.operations)
            }
            Body::Fault { .. } => (Unit::Compute, 0, 0),
            Body::PoolAlloc { .. } | Body::PoolFree { .. } => (Unit::None, 0, 0),
        };
        let busy_ns = if let Body::Kernel(launch) = self { launch.busy_ns } else { 0 };
        Cost { unit, bytes, operations, busy_ns }
    }

    /// Does the work. The caller handles pool frees. Also returns the first piece of the unwritten
    /// memory that a kernel read.
    pub(crate) fn run(
        &self,
        memory: &mut Memory,
        address: &AddressSpace,
        unwritten: &Unwritten,
    ) -> (std::result::Result<(), Broken>, Option<UnwrittenPiece>) {
        let Body::Kernel(launch) = self else { return (self.run_plain(memory, address), None) };
        let mut left = IntervalMap::new();
        unwritten.iter().for_each(|(piece, origin)| left.insert(piece.clone(), *origin));
        let (read, undeclared) = (Cell::default(), Cell::default());
        let mut view = View { memory, address, launch, unwritten: left, read, undeclared };
        let ran = run_kernel(&mut view);
        let read = view.read.get().map(|(start, end, origin)| (start..end, origin));
        (ran, read)
    }

    /// Does work that is no kernel.
    fn run_plain(&self, memory: &mut Memory, address: &AddressSpace) -> std::result::Result<(), Broken> {
        match self {
            Body::Memset { to, value } => memory.fill(&address.pieces(to.clone())?, *value),
            Body::FromTaken { to, bytes } => memory.write(&address.pieces(to.clone())?, bytes),
            Body::FromPeer { to, contents, .. } => {
                let gone = |why: &Arc<str>| Broken::illegal(Cause::Other(Arc::clone(why)));
                let contents = contents.as_ref().map_err(gone)?;
                memory.put(&address.pieces(to.clone())?, contents);
            }
            Body::Copy { parts, .. } => return parts.iter().try_for_each(|part| part.run(memory, address)),
            Body::Fault { violation } => return Err(Broken::illegal(Cause::Reported(Arc::clone(violation)))),
            Body::Kernel(_) | Body::ToWaiting { .. } | Body::PoolAlloc { .. } | Body::PoolFree { .. } => {}
        }
        Ok(())
    }
}

/// Unwritten memory, and where it was allocated.
type UnwrittenPiece = (Range<u64>, Origin);

/// Work that failed on the device, which is lost by that.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) code: Code,
    pub(crate) cause: Cause,
}

/// Why work failed.
#[derive(Debug)]
pub(crate) enum Cause {
    /// The violation found when it was enqueued, with the work's name.
    Reported(Arc<str>),
    /// A kernel touched this, which its launch did not declare.
    Undeclared(Range<u64>),
    /// Anything else, without the work's name.
    Other(Arc<str>),
}

impl Broken {
    fn illegal(cause: Cause) -> Self {
        Broken { code: Code::ILLEGAL_ADDRESS, cause }
    }
}

impl From<Illegal> for Broken {
    fn from(illegal: Illegal) -> Self {
        Broken::illegal(Cause::Other(explain(&illegal).into()))
    }
}

fn run_kernel(view: &mut View<'_>) -> std::result::Result<(), Broken> {
    let launch = view.launch;
    for access in launch.accesses.iter().filter(|access| access.bytes > 0) {
        view.address.pieces(access.ptr.range(access.bytes))?;
    }
    let Some(host) = &launch.host else { return Ok(()) };
    let outcome = host(view, &launch.args);
    if let Some((start, end)) = view.undeclared.get() {
        return Err(Broken::illegal(Cause::Undeclared(start..end)));
    }
    outcome.map_err(|error| {
        let code = if error.is_device_lost() { error.code } else { Code::LAUNCH_FAILED };
        Broken { code, cause: Cause::Other(format!("it ended with an error: {error}").into()) }
    })
}

/// Device memory as a kernel sees it: only the ranges that its launch declared.
struct View<'a> {
    memory: &'a mut Memory,
    address: &'a AddressSpace,
    launch: &'a Launch,
    /// Bytes that were never written when the kernel was enqueued, and that it has not written yet.
    unwritten: IntervalMap<Origin>,
    /// The first of it that the kernel read.
    read: Cell<Option<(u64, u64, Origin)>>,
    /// The first undeclared access, kept even if the kernel ignores the error.
    undeclared: Cell<Option<(u64, u64)>>,
}

impl View<'_> {
    fn check(&self, ptr: DevicePtr, bytes: usize, write: bool) -> Result<Range<u64>> {
        let error = |what: &str| {
            let detail = format!("kernel {} {what} {bytes} bytes at {ptr}", self.launch.name);
            DeviceError::new(Operation::Launch, Code::ILLEGAL_ADDRESS).with_detail(detail)
        };
        let end = ptr.0.checked_add(bytes as u64).ok_or_else(|| error("went past the last address with"))?;
        let mut at = ptr.0;
        // Each step goes to the farthest end of the declared ranges that hold `at`, so it ends.
        while at < end {
            let holding = self.launch.accesses.iter().filter(|access| {
                (!write || access.kind == AccessKind::Write) && access.ptr.0 <= at && at - access.ptr.0 < access.bytes
            });
            match holding.map(|access| access.ptr.0.saturating_add(access.bytes)).max() {
                Some(next) => at = next,
                None => {
                    self.undeclared.set(self.undeclared.get().or(Some((at, end))));
                    return Err(error(if write { "did not declare writing" } else { "did not declare reading" }));
                }
            }
        }
        Ok(ptr.0..end)
    }
}

impl KernelMemory for View<'_> {
    fn read(&self, from: DevicePtr, into: &mut [u8]) -> Result<()> {
        let range = self.check(from, into.len(), false)?;
        if self.read.get().is_none()
            && let Some((piece, &origin)) = self.unwritten.overlapping(range.clone()).next()
        {
            self.read.set(Some((piece.start, piece.end, origin)));
        }
        let pieces = self.address.pieces(range).map_err(illegal)?;
        self.memory.read(&pieces, into);
        Ok(())
    }

    fn write(&mut self, to: DevicePtr, bytes: &[u8]) -> Result<()> {
        let range = self.check(to, bytes.len(), true)?;
        self.unwritten.remove(range.clone());
        let pieces = self.address.pieces(range).map_err(illegal)?;
        self.memory.write(&pieces, bytes);
        Ok(())
    }
}

fn illegal(illegal: Illegal) -> DeviceError {
    let detail = format!("{} at {:#x}", illegal.kind, illegal.at);
    DeviceError::new(Operation::Launch, Code::ILLEGAL_ADDRESS).with_detail(detail)
}

impl Illegal {
    /// The violation of `op`, which touches a range that holds this.
    pub(crate) fn violation(&self, op: OpRef, range: &Range<u64>) -> Violation {
        let range = self.at.max(range.start)..range.end;
        Violation { kind: self.kind, first: self.gone, second: op, range, missing: explain(self), block: None }
    }
}

/// Why a range must not be touched, in words.
pub(crate) fn explain(illegal: &Illegal) -> String {
    match (illegal.kind, illegal.gone) {
        (_, Some(gone)) => format!("{:#x} was taken away by {gone}", illegal.at),
        (ViolationKind::NoAccess, None) => format!("no access to the mapping at {:#x} was given yet", illegal.at),
        (_, None) => format!("nothing is allocated at {:#x}", illegal.at),
    }
}
