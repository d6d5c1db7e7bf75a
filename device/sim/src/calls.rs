//! Calls about streams, events, copies, kernels and pinned memory: their checks, and the work
//! that they enqueue or wait for.
//!
//! A record of an event is a moment in virtual time and a copy of the clock that its stream had
//! then. A wait takes the record that the event has at the call; recording again changes no earlier
//! wait.

use std::sync::Arc;

use aquifer_device::internal::first_overlap;
use aquifer_device::{
    AccessKind, Attribute, Code, Copy2d, CopyEnd, CopyPart, DevicePtr, HostPtr, Launch, Operation, RawEvent, RawModule,
    RawStream, StreamFlags,
};

use crate::clock::OpClock;
use crate::machine::Machine;
use crate::module::Module;
use crate::objects::{EventRecord, EventState};
use crate::queue::LEGACY;
use crate::race::Space;
use crate::refused::{Answer, Refused};
use crate::violation::{OpRef, ViolationKind};
use crate::work::{Body, End, HostPart, Part, explain};

/// Rate at which the host stages pageable memory: the order of magnitude of one core.
const STAGING_BYTES_PER_NS: u64 = 10;

/// Most threads of a block, on every card that can be simulated.
const BLOCK_THREADS_MAX: u64 = 1024;

/// Most dynamic shared memory of a block in bytes: that of the largest card.
const SHARED_BYTES_MAX: u32 = 227 << 10;

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: Code = Code(500);

/// The end of a range of device addresses.
pub(crate) fn range(ptr: DevicePtr, bytes: u64) -> Answer<std::ops::Range<u64>> {
    match ptr.0.checked_add(bytes) {
        Some(end) if ptr.0 != 0 => Ok(ptr.0..end),
        _ => Err(Refused::value(format!("{bytes} bytes at {ptr} are no range of device memory"))),
    }
}

impl Machine {
    pub(crate) fn attribute(&mut self, attribute: Attribute) -> Answer<u64> {
        let card = self.engine.card();
        Ok(match attribute {
            Attribute::ComputeCapabilityMajor => card.capability.0.into(),
            Attribute::ComputeCapabilityMinor => card.capability.1.into(),
            Attribute::MultiprocessorCount => card.multiprocessors,
            Attribute::AsyncEngineCount => card.copy_engines,
            Attribute::VirtualMemoryManagement => self.vmm.into(),
            Attribute::MemoryPools | Attribute::BatchedCopies => 1,
            Attribute::GpuDirectRdmaWithVmm => self.can_rdma().into(),
            Attribute::PosixFdHandles => self.export.into(),
        })
    }

    pub(crate) fn create_stream(&mut self, flags: StreamFlags) -> Answer<RawStream> {
        Ok(self.streams.create(!flags.non_blocking))
    }

    pub(crate) fn stream_id(&mut self, stream: RawStream) -> Answer<Option<u64>> {
        self.streams.find(stream).map(|id| Some(id.into()))
    }

    pub(crate) fn destroy_stream(&mut self, stream: RawStream) -> Answer<()> {
        let destroyed = self.streams.destroy(stream)?;
        if let Some(member) = &destroyed.capture {
            self.leave_capture(destroyed.name.id, member);
        }
        Ok(())
    }

    /// Delays the stream's later work by `ns`.
    pub(crate) fn stall(&mut self, stream: RawStream, ns: u64) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let now = self.now;
        self.streams.arrive(id);
        let stream = self.streams.get(id)?;
        stream.tail = stream.tail.max(now).saturating_add(ns);
        self.horizon = self.horizon.max(stream.tail);
        Ok(())
    }

    pub(crate) fn synchronize_stream(&mut self, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        self.forbid_wait(id)?;
        let tail = self.streams.get(id)?.tail;
        self.wait_until(tail)?;
        self.detector.known.learn(&self.streams.get(id)?.clock);
        Ok(())
    }

    pub(crate) fn query_stream(&mut self, stream: RawStream) -> Answer<bool> {
        let id = self.streams.find(stream)?;
        self.forbid_wait(id)?;
        let stream = self.streams.get(id)?;
        if stream.tail > self.now {
            return Ok(false);
        }
        self.detector.known.learn(&stream.clock);
        Ok(true)
    }

    pub(crate) fn synchronize(&mut self) -> Answer<()> {
        self.forbid_device_wait()?;
        self.wait_for_all()
    }

    /// The pinned memory that holds all of a host range.
    pub(crate) fn page_locked(&self, address: usize, bytes: usize) -> Option<HostPart> {
        let (block, offset) = self.host.find(address, bytes)?;
        Some(HostPart { block: Arc::clone(block), offset, bytes })
    }

    /// Copies to the device. `take` reads the bytes when the memory is pageable.
    pub(crate) fn copy_to_device(
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
    pub(crate) fn copy_to_host(
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

    pub(crate) fn copy_on_device(
        &mut self,
        dst: DevicePtr,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Answer<()> {
        self.copy_within(Operation::CopyOnDevice, dst, src, bytes, stream)
    }

    /// Copies within the device, as part of `operation`.
    pub(crate) fn copy_within(
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

    pub(crate) fn memset(&mut self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let to = range(ptr, bytes)?;
        self.submit(id, Body::Memset { to, value }).map(|_| ())
    }

    pub(crate) fn launch(&mut self, launch: &Launch, stream: RawStream) -> Answer<()> {
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

    pub(crate) fn load_module(&mut self, ptx: &str) -> Answer<RawModule> {
        Module::parse(ptx, self.engine.card().capability).map(|module| RawModule(self.modules.insert(module)))
    }

    pub(crate) fn unload_module(&mut self, module: RawModule) -> Answer<()> {
        self.modules.remove(module.0).map(|_| ()).ok_or_else(|| Refused::handle("module", module.0))
    }

    /// Refuses a kernel that its module does not have.
    pub(crate) fn find_kernel(&self, launch: &Launch) -> Answer<()> {
        let Some(raw) = launch.module else { return Ok(()) };
        let module = self.modules.get(raw.0).ok_or_else(|| Refused::handle("module", raw.0))?;
        if module.has(launch.name) {
            return Ok(());
        }
        Err(Refused::new(NOT_FOUND, format!("the module has no kernel {}", launch.name)))
    }

    pub(crate) fn host_free(&mut self, ptr: HostPtr) -> Answer<()> {
        let range = self.host.allocated(ptr.0)?;
        let op = self.op_ref(None, Operation::HostFree, None);
        self.detector.check_known(Space::Host, range.clone(), false, ViolationKind::PendingWork, op);
        self.checks().inspect(|checks| checks.host_removed(range.clone()));
        self.detector.host.clear(range);
        self.host.free(ptr.0, op);
        Ok(())
    }

    /// Waits for work that uses the memory, which the caller may free afterwards.
    pub(crate) fn host_unregister(&mut self, ptr: HostPtr) -> Answer<()> {
        self.refuse_device_wait()?;
        let range = self.host.registered(ptr.0)?;
        let op = self.op_ref(None, Operation::HostUnregister, None);
        self.detector.check_known(Space::Host, range.clone(), false, ViolationKind::PendingWork, op);
        let waited = self.wait_for_all();
        self.checks().inspect(|checks| checks.host_removed(range.clone()));
        self.detector.host.clear(range);
        self.host.free(ptr.0, op);
        waited
    }

    /// The host touches pinned memory. Other memory has no entries, so nothing is found there.
    pub(crate) fn host_access(&mut self, ptr: HostPtr, bytes: usize, kind: AccessKind) {
        let start = ptr.0 as u64;
        let op = OpRef { operation: None, ..self.op_ref(None, Operation::HostAlloc, None) };
        let writes_only = kind == AccessKind::Read;
        let range = start..start.saturating_add(bytes as u64);
        if !range.is_empty() {
            self.detector.check_known(Space::Host, range, writes_only, ViolationKind::HostAccess, op);
        }
    }

    pub(crate) fn create_event(&mut self, timing: bool) -> Answer<RawEvent> {
        Ok(RawEvent(self.events.insert(EventState { timing, record: EventRecord::Never })))
    }

    pub(crate) fn destroy_event(&mut self, event: RawEvent) -> Answer<()> {
        self.events.remove(event.0).map(|_| ()).ok_or_else(|| Refused::handle("event", event.0))
    }

    pub(crate) fn event(&self, event: RawEvent) -> Answer<&EventState> {
        self.events.get(event.0).ok_or_else(|| Refused::handle("event", event.0))
    }

    pub(crate) fn record(&mut self, event: RawEvent, stream: RawStream) -> Answer<()> {
        self.event(event)?;
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        let record = if let Some(member) = &self.streams.get(id)?.capture {
            EventRecord::Captured { capture: member.capture, clock: Arc::new(member.clock.clone()) }
        } else {
            self.streams.arrive(id);
            let (at, clock) = self.end_of(id)?;
            EventRecord::Work { at, clock }
        };
        if let Some(event) = self.events.get_mut(event.0) {
            event.record = record;
        }
        Ok(())
    }

    pub(crate) fn wait(&mut self, stream: RawStream, event: RawEvent) -> Answer<()> {
        let record = self.event(event)?.record.clone();
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        match record {
            EventRecord::Captured { capture, clock } => self.wait_captured(id, capture, &clock),
            EventRecord::Never => self.forbid_outside_event(id),
            EventRecord::Work { at, clock } => {
                self.forbid_outside_event(id)?;
                self.order_after(id, at, &clock)
            }
        }
    }

    /// When the work enqueued on the stream so far is done, and its clock.
    pub(crate) fn end_of(&mut self, id: u32) -> Answer<(u64, Arc<OpClock>)> {
        let now = self.now;
        let stream = self.streams.get(id)?;
        self.detector.prune(&mut stream.clock);
        Ok((stream.tail.max(now), Arc::new(stream.clock.clone())))
    }

    /// Orders later work of the stream after work that is done at `at`.
    pub(crate) fn order_after(&mut self, id: u32, at: u64, clock: &OpClock) -> Answer<()> {
        self.streams.arrive(id);
        let stream = self.streams.get(id)?;
        stream.clock.join(clock);
        stream.tail = stream.tail.max(at);
        self.horizon = self.horizon.max(stream.tail);
        Ok(())
    }

    /// When the event's latest record is reached, and the clock that the host learns then. `None`
    /// if there is no record.
    pub(crate) fn reached(&self, event: RawEvent) -> Answer<Option<(u64, Arc<OpClock>)>> {
        match &self.event(event)?.record {
            EventRecord::Never => Ok(None),
            EventRecord::Work { at, clock } => Ok(Some((*at, Arc::clone(clock)))),
            EventRecord::Captured { .. } => {
                let detail = format!("event {:#x} was recorded in a capture and never completes", event.0);
                Err(Refused::new(Code::CAPTURED_EVENT, detail))
            }
        }
    }

    pub(crate) fn query_event(&mut self, event: RawEvent) -> Answer<bool> {
        let Some((at, clock)) = self.reached(event)? else { return Ok(true) };
        if at > self.now {
            return Ok(false);
        }
        self.detector.known.learn(&clock);
        Ok(true)
    }

    pub(crate) fn synchronize_event(&mut self, event: RawEvent) -> Answer<()> {
        let Some((at, clock)) = self.reached(event)? else { return Ok(()) };
        self.wait_until(at)?;
        self.detector.known.learn(&clock);
        Ok(())
    }

    pub(crate) fn elapsed_ms(&mut self, start: RawEvent, end: RawEvent) -> Answer<f64> {
        let mut times = [0; 2];
        let mut reached = Vec::with_capacity(2);
        for (time, event) in times.iter_mut().zip([start, end]) {
            let timing = self.event(event)?.timing;
            let (true, Some((at, clock))) = (timing, self.reached(event)?) else {
                let why = if timing { "was never recorded" } else { "was created without timing" };
                return Err(Refused::new(Code::INVALID_HANDLE, format!("event {:#x} {why}", event.0)));
            };
            *time = at;
            reached.push(clock);
        }
        if times[0].max(times[1]) > self.now {
            return Err(Refused::new(Code::NOT_READY, "an event's latest record is not complete"));
        }
        reached.iter().for_each(|clock| self.detector.known.learn(clock));
        let [from, to] = times.map(|time| time as f64);
        Ok((to - from) / 1e6)
    }

    pub(crate) fn copy_2d(&mut self, copy: &Copy2d, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let Copy2d { dst_pitch, src_pitch, width, height, .. } = *copy;
        if dst_pitch < width || src_pitch < width {
            return Err(Refused::value(format!("rows of {width} bytes at pitches of {dst_pitch} and {src_pitch}")));
        }
        if width == 0 || height == 0 {
            return Ok(());
        }
        let too_long = || Refused::value(format!("{height} rows of {width} bytes are more than the device holds"));
        // At least one end is on the device, so rows that do not overlap there hold no more than
        // the device does.
        width.checked_mul(height).filter(|&bytes| bytes <= self.memory.total()).ok_or_else(too_long)?;
        let rows = copy.rows().ok_or_else(too_long)?;
        self.submit_parts(id, Operation::Copy2d, &rows)
    }

    pub(crate) fn copy_batch(&mut self, copies: &[CopyPart], stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        if id == LEGACY {
            return Err(Refused::new(Code::NOT_SUPPORTED, "there are no batches on the legacy default stream"));
        }
        self.forbid_capture(id, || Refused::new(Code::CAPTURE_UNSUPPORTED, "copies in a batch cannot be captured"))?;
        self.submit_parts(id, Operation::CopyBatch, copies)
    }

    fn submit_parts(&mut self, id: u32, operation: Operation, copies: &[CopyPart]) -> Answer<()> {
        let copies = copies.iter().filter(|copy| copy.bytes > 0);
        let parts = copies.clone().map(|copy| self.part(copy)).collect::<Answer<Arc<[_]>>>()?;
        if let Some(at) = first_overlap(copies.flat_map(CopyPart::touched).collect()) {
            return Err(Refused::value(format!("a copy writes bytes that another one touches, at {at:#x}")));
        }
        if parts.is_empty() { Ok(()) } else { self.submit(id, Body::Copy { operation, parts }).map(|_| ()) }
    }

    fn part(&self, &CopyPart { dst, src, bytes }: &CopyPart) -> Answer<Part> {
        if matches!((dst, src), (CopyEnd::Host(_), CopyEnd::Host(_))) {
            return Err(Refused::value("both ends of a copy are on the host"));
        }
        Ok(Part { to: self.end(dst, bytes)?, from: self.end(src, bytes)? })
    }

    fn end(&self, place: CopyEnd, bytes: u64) -> Answer<End> {
        match place {
            CopyEnd::Device(ptr) => range(ptr, bytes).map(End::Device),
            CopyEnd::Host(ptr) => {
                let part = usize::try_from(bytes).ok().and_then(|bytes| self.page_locked(ptr.0, bytes));
                let detail = || format!("{bytes} bytes at {:#x} are not pinned memory of this device", ptr.0);
                part.map(End::Host).ok_or_else(|| Refused::value(detail()))
            }
        }
    }
}
