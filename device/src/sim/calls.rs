//! Calls about streams, copies, kernels and page-locked memory: what they check, enqueue and wait
//! for.

use std::sync::Arc;

use super::machine::Machine;
use super::module::Module;
use super::race::Space;
use super::refused::{Answer, Refused};
use super::violation::{OpRef, ViolationKind};
use super::work::{Body, End, HostPart, explain};
use crate::driver::{DevicePtr, HostPtr, RawModule, RawStream, StreamFlags};
use crate::error::{Code, Operation};
use crate::launch::{AccessKind, Launch};

/// Host memory copies at about this rate when pageable memory is staged; order of magnitude of one
/// core.
const STAGING_BYTES_PER_NS: u64 = 10;

/// Most threads of a block, on every card that can be simulated.
const BLOCK_THREADS_MAX: u64 = 1024;

/// Most dynamic shared memory of a block in bytes: that of the largest card.
const SHARED_BYTES_MAX: u32 = 227 << 10;

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: Code = Code(500);

/// The end of a range of device addresses.
pub(super) fn range(ptr: DevicePtr, bytes: u64) -> Answer<std::ops::Range<u64>> {
    match ptr.0.checked_add(bytes) {
        Some(end) if ptr.0 != 0 => Ok(ptr.0..end),
        _ => Err(Refused::value(format!("{bytes} bytes at {ptr} are no range of device memory"))),
    }
}

impl Machine {
    pub(super) fn create_stream(&mut self, flags: StreamFlags) -> RawStream {
        self.streams.create(!flags.non_blocking)
    }

    pub(super) fn destroy_stream(&mut self, stream: RawStream) -> Answer<()> {
        let destroyed = self.streams.destroy(stream)?;
        if let Some(member) = &destroyed.capture {
            self.leave_capture(destroyed.name.id, member);
        }
        Ok(())
    }

    /// Delays the stream's later work by `ns`.
    pub(super) fn stall(&mut self, stream: RawStream, ns: u64) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let now = self.now;
        self.streams.arrive(id);
        let stream = self.streams.get(id)?;
        stream.tail = stream.tail.max(now).saturating_add(ns);
        self.horizon = self.horizon.max(stream.tail);
        Ok(())
    }

    pub(super) fn synchronize_stream(&mut self, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        self.capture_forbids_wait(id)?;
        let tail = self.streams.get(id)?.tail;
        self.wait_until(tail)?;
        self.detector.known.learn(&self.streams.get(id)?.clock);
        Ok(())
    }

    pub(super) fn query_stream(&mut self, stream: RawStream) -> Answer<bool> {
        let id = self.streams.find(stream)?;
        self.capture_forbids_wait(id)?;
        let stream = self.streams.get(id)?;
        if stream.tail > self.now {
            return Ok(false);
        }
        self.detector.known.learn(&stream.clock);
        Ok(true)
    }

    pub(super) fn synchronize(&mut self) -> Answer<()> {
        self.capture_forbids_device_wait()?;
        self.wait_for_all()
    }

    /// The page-locked memory that holds all of a host range.
    pub(super) fn page_locked(&self, address: usize, bytes: usize) -> Option<HostPart> {
        let (block, offset) = self.host.find(address, bytes)?;
        Some(HostPart { block: Arc::clone(block), offset, bytes })
    }

    /// Copies to the device. `take` reads the bytes when the memory is pageable.
    pub(super) fn copy_to_device(
        &mut self,
        dst: DevicePtr,
        address: usize,
        bytes: usize,
        stream: RawStream,
        take: impl FnOnce() -> Vec<u8>,
    ) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = range(dst, bytes as u64)?;
        if address == 0 {
            return Err(Refused::value("the source is null"));
        }
        if let Some(from) = self.page_locked(address, bytes) {
            let body = Body::copy(Operation::CopyToDevice, End::Device(to), End::Host(from));
            return self.submit(id, body).map(|_| ());
        }
        if self.streams.get(id)?.capture.is_none() {
            self.spend(bytes as u64 / STAGING_BYTES_PER_NS);
        }
        self.submit(id, Body::FromTaken { to, bytes: take().into() }).map(|_| ())
    }

    /// Copies to the host. `give` stores the bytes when the memory is pageable.
    pub(super) fn copy_to_host(
        &mut self,
        address: usize,
        src: DevicePtr,
        bytes: usize,
        stream: RawStream,
        give: impl FnOnce(&[u8]),
    ) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let from = range(src, bytes as u64)?;
        if address == 0 {
            return Err(Refused::value("the destination is null"));
        }
        if let Some(to) = self.page_locked(address, bytes) {
            let body = Body::copy(Operation::CopyToHost, End::Host(to), End::Device(from));
            return self.submit(id, body).map(|_| ());
        }
        let Some(submitted) = self.submit(id, Body::ToWaiting { from: from.clone() })? else { return Ok(()) };
        self.wait_until(submitted.finish)?;
        self.detector.known.learn(&self.streams.get(id)?.clock);
        let pieces = match self.address.pieces(from) {
            Ok(pieces) => pieces,
            Err(illegal) => {
                let why = format!("{}: {}", submitted.op, explain(&illegal));
                return Err(self.lose(Code::ILLEGAL_ADDRESS, &why));
            }
        };
        let mut taken = vec![0; bytes];
        self.memory.read(&pieces, &mut taken);
        give(&taken);
        Ok(())
    }

    /// Copies within the device, as `operation` asked for.
    pub(super) fn copy_on_device(
        &mut self,
        operation: Operation,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (range(dst, bytes)?, range(src, bytes)?);
        if to.start < from.end && from.start < to.end {
            return Err(Refused::value(format!("{bytes} bytes at {dst} and at {src} overlap")));
        }
        let body = Body::copy(operation, End::Device(to), End::Device(from));
        self.submit(id, body).map(|_| ())
    }

    pub(super) fn memset(&mut self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = range(ptr, bytes)?;
        self.submit(id, Body::Memset { to, value }).map(|_| ())
    }

    pub(super) fn launch(&mut self, launch: &Launch, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let threads = launch.block.iter().fold(1, |product: u64, &extent| product.saturating_mul(extent.into()));
        if launch.grid.contains(&0) || threads == 0 || threads > BLOCK_THREADS_MAX {
            let Launch { grid, block, .. } = launch;
            return Err(Refused::value(format!("grid {grid:?} of blocks {block:?} cannot be launched")));
        }
        if launch.shared_bytes > SHARED_BYTES_MAX {
            return Err(Refused::value(format!("{} bytes of shared memory asked for", launch.shared_bytes)));
        }
        self.find_kernel(launch)?;
        for access in launch.accesses.iter().filter(|access| access.bytes > 0) {
            range(access.ptr, access.bytes)?;
        }
        self.submit(id, Body::Kernel(Arc::new(launch.clone()))).map(|_| ())
    }

    pub(super) fn load_module(&mut self, ptx: &str, capability: (u64, u64)) -> Answer<RawModule> {
        Module::parse(ptx, capability).map(|module| RawModule(self.modules.insert(module)))
    }

    pub(super) fn unload_module(&mut self, module: RawModule) -> Answer<()> {
        self.modules.remove(module.0).map(|_| ()).ok_or_else(|| Refused::handle("module", module.0))
    }

    /// Refuses a kernel that its module does not have.
    pub(super) fn find_kernel(&self, launch: &Launch) -> Answer<()> {
        let Some(raw) = launch.module else { return Ok(()) };
        let module = self.modules.get(raw.0).ok_or_else(|| Refused::handle("module", raw.0))?;
        if module.has(launch.name) {
            return Ok(());
        }
        Err(Refused::new(NOT_FOUND, format!("the module has no kernel {}", launch.name)))
    }

    pub(super) fn host_free(&mut self, ptr: HostPtr) -> Answer<()> {
        let range = self.host.allocated(ptr.0)?;
        let op = self.op_ref(None, Operation::HostFree, None);
        self.detector.check_known(Space::Host, range.clone(), false, ViolationKind::PendingWork, op);
        self.checks().inspect(|checks| checks.host_removed(range.clone()));
        self.detector.host.clear(range);
        self.host.free(ptr.0, op);
        Ok(())
    }

    /// Work that uses the memory is waited for: the memory is the caller's, and may be gone after
    /// this.
    pub(super) fn host_unregister(&mut self, ptr: HostPtr) -> Answer<()> {
        self.refuse_device_wait()?;
        let range = self.host.registered(ptr.0)?;
        let op = self.op_ref(None, Operation::HostUnregister, None);
        self.detector.check_known(Space::Host, range.clone(), false, ViolationKind::PendingWork, op);
        let waited = self.wait_until(self.horizon);
        self.checks().inspect(|checks| checks.host_removed(range.clone()));
        self.detector.host.clear(range);
        self.host.free(ptr.0, op);
        waited
    }

    /// The host touches page-locked memory. Other memory has no entries, so nothing is found there.
    pub(super) fn host_access(&mut self, ptr: HostPtr, bytes: usize, kind: AccessKind) {
        let start = ptr.0 as u64;
        let op = OpRef { operation: None, ..self.op_ref(None, Operation::HostAlloc, None) };
        let writes_only = kind == AccessKind::Read;
        let range = start..start.saturating_add(bytes as u64);
        if !range.is_empty() {
            self.detector.check_known(Space::Host, range, writes_only, ViolationKind::HostAccess, op);
        }
    }
}
