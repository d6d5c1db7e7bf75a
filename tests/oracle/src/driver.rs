//! The driver that passes each call on to another one, and then to the oracle.

use std::any::Any;
use std::sync::Arc;
use std::thread;

use aquifer_device::{
    AccessKind, Attribute, CaptureStatus, CapturingStreams, Code, Copy2d, CopyEnd, CopyPart, DeviceError, DeviceInfo,
    DevicePtr, Driver, HostPtr, Launch, MemoryInfo, MemoryUsers, Operation, PhysicalOptions, PoolUsage, RawEvent,
    RawGraph, RawModule, RawPhysical, RawStream, Result, StreamFlags, Witness, forward_calls,
};
use parking_lot::Mutex;

use crate::judge::{Call, Oracle};
use crate::memory::Touch;
use crate::race::Race;

/// A driver in front of another one, whose calls an [`Oracle`] judges. Calls that fail are taken to
/// have done nothing, unless the device is lost.
///
/// It makes one call at a time, so that the oracle meets calls in the order in which the device
/// does: a thread that waits for the device keeps the others waiting.
#[derive(Debug)]
pub struct Judged {
    below: Arc<dyn Driver>,
    judge: Mutex<Judge>,
}

#[derive(Debug, Default)]
struct Judge {
    oracle: Oracle,
    races: Vec<Race>,
}

impl Judge {
    /// How many races are kept.
    const RACES_MAX: usize = 4096;

    fn take(&mut self, call: Call) {
        let found = self.oracle.take(thread::current().id(), call);
        let room = Judge::RACES_MAX.saturating_sub(self.races.len());
        self.races.extend(found.into_iter().take(room));
    }

    /// The pending work of a lost device never happens, so nothing can meet it any more.
    fn note_failure(&mut self, error: &DeviceError) {
        if error.is_device_lost() {
            self.take(Call::DeviceComplete);
        }
    }
}

impl Judged {
    /// Judges the calls that are made through the driver returned. `driver` must be unused.
    pub fn new(driver: Arc<dyn Driver>) -> Arc<Judged> {
        Arc::new(Judged { below: driver, judge: Mutex::default() })
    }

    /// The races found, oldest first. At most 4096 are kept.
    pub fn races(&self) -> Vec<Race> {
        self.judge.lock().races.clone()
    }

    /// The oracle as it is now, to ask what further calls would do.
    pub fn oracle(&self) -> Oracle {
        self.judge.lock().oracle.clone()
    }

    /// Orders what `later` captures after what `earlier` has captured, and makes it a part of that
    /// capture. For bodies of conditional nodes, whose captures begin and end by calls that the
    /// trait does not have. All bodies count as run, one after the other.
    pub fn order_captured(&self, earlier: RawStream, later: RawStream) {
        let (mut judge, event) = (self.judge.lock(), RawEvent(u64::MAX));
        judge.take(Call::Record { event, stream: earlier });
        judge.take(Call::Wait { stream: later, event });
    }

    fn below(&self) -> &dyn Driver {
        &*self.below
    }

    /// Makes a call that changes neither order nor memory.
    fn call<T>(&self, _: Operation, make: impl FnOnce(&dyn Driver) -> Result<T>) -> Result<T> {
        make(self.below()).inspect_err(|error| self.judge.lock().note_failure(error))
    }

    /// Makes a call. If it succeeds, the oracle takes what `describe` makes of its answer.
    fn judge<T>(
        &self,
        make: impl FnOnce(&dyn Driver) -> Result<T>,
        describe: impl FnOnce(&T) -> Option<Call>,
    ) -> Result<T> {
        let mut judge = self.judge.lock();
        let answer = make(self.below()).inspect_err(|error| judge.note_failure(error))?;
        describe(&answer).into_iter().for_each(|call| judge.take(call));
        Ok(answer)
    }

    /// Enqueues work. Copies and fills of no bytes enqueue nothing. `touches` is asked once the
    /// driver has checked the arguments.
    fn enqueue(
        &self,
        operation: Operation,
        stream: RawStream,
        touches: impl FnOnce() -> Vec<Touch>,
        make: impl FnOnce(&dyn Driver) -> Result<()>,
    ) -> Result<()> {
        self.judge(make, |()| {
            let touches = touches();
            let is_work = operation == Operation::Launch || touches.iter().any(|touch| touch.bytes > 0);
            is_work.then(|| Call::Work { call: operation.name(), stream, touches })
        })
    }
}

fn read(at: CopyEnd, bytes: u64) -> Touch {
    Touch { at, bytes, kind: AccessKind::Read }
}

fn write(at: CopyEnd, bytes: u64) -> Touch {
    Touch { at, bytes, kind: AccessKind::Write }
}

/// The place of the first byte at a host address.
fn host(ptr: *const u8) -> CopyEnd {
    CopyEnd::Host(HostPtr(ptr.addr()))
}

/// The ranges of the rows at one end of a copy, or one range if they lie side by side.
fn rows(first: CopyEnd, pitch: u64, copy: &Copy2d, touch: fn(CopyEnd, u64) -> Touch) -> Vec<Touch> {
    if pitch == copy.width {
        return vec![touch(first, copy.width.saturating_mul(copy.height))];
    }
    let row = |row: u64| match first {
        CopyEnd::Device(ptr) => CopyEnd::Device(ptr.offset(row.saturating_mul(pitch))),
        CopyEnd::Host(HostPtr(ptr)) => {
            let further = usize::try_from(row.saturating_mul(pitch)).unwrap_or(usize::MAX);
            CopyEnd::Host(HostPtr(ptr.saturating_add(further)))
        }
    };
    let height = if copy.width == 0 { 0 } else { copy.height };
    (0..height).map(|at| touch(row(at), copy.width)).collect()
}

impl Driver for Judged {
    forward_calls! {
        info as_any capturing_streams memory_info memory_users attribute reserve unreserve set_access adopt_stream
        release_stream create_event load_module unload_module capture_status stream_id pool_usage trim_pool
        trim_graph_memory can_access_peer witness take_violation
    }

    fn alloc(&self, bytes: u64) -> Result<DevicePtr> {
        self.judge(|below| below.alloc(bytes), |&ptr| Some(Call::Alloc { ptr, bytes }))
    }

    fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.judge(|below| below.free(ptr), |()| Some(Call::Free { ptr }))
    }

    fn alloc_async(&self, bytes: u64, stream: RawStream) -> Result<DevicePtr> {
        self.judge(|below| below.alloc_async(bytes, stream), |&ptr| Some(Call::AllocAsync { ptr, bytes, stream }))
    }

    fn free_async(&self, ptr: DevicePtr, stream: RawStream) -> Result<()> {
        self.judge(|below| below.free_async(ptr, stream), |()| Some(Call::FreeAsync { ptr, stream }))
    }

    fn create_physical(&self, bytes: u64, options: PhysicalOptions) -> Result<RawPhysical> {
        self.judge(|below| below.create_physical(bytes, options), |&physical| Some(Call::CreatePhysical { physical }))
    }

    fn release_physical(&self, physical: RawPhysical) -> Result<()> {
        self.judge(|below| below.release_physical(physical), |()| Some(Call::ReleasePhysical { physical }))
    }

    fn map(&self, ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> Result<()> {
        self.judge(|below| below.map(ptr, bytes, physical), |()| Some(Call::Map { ptr, bytes, physical }))
    }

    fn unmap(&self, ptr: DevicePtr, bytes: u64) -> Result<()> {
        self.judge(|below| below.unmap(ptr, bytes), |()| Some(Call::Unmap { ptr, bytes }))
    }

    fn host_alloc(&self, bytes: usize) -> Result<HostPtr> {
        self.judge(|below| below.host_alloc(bytes), |&ptr| Some(Call::PageLock { ptr, bytes }))
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise is passed on unchanged.
        self.judge(|below| unsafe { below.host_free(ptr) }, |()| Some(Call::HostFree { ptr }))
    }

    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
        let describe = |(): &()| Some(Call::HostAccess { ptr, bytes, kind });
        self.judge(|below| below.host_access(ptr, bytes, kind), describe)
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: the caller's promise is passed on unchanged.
        let make = |below: &dyn Driver| unsafe { below.host_register(ptr, bytes) };
        self.judge(make, |_| Some(Call::PageLock { ptr: HostPtr(ptr.addr()), bytes }))
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise is passed on unchanged.
        self.judge(|below| unsafe { below.host_unregister(ptr) }, |()| Some(Call::HostUnregister { ptr }))
    }

    fn create_stream(&self, flags: StreamFlags) -> Result<RawStream> {
        let describe = |&stream: &RawStream| Some(Call::CreateStream { stream, non_blocking: flags.non_blocking });
        self.judge(|below| below.create_stream(flags), describe)
    }

    fn destroy_stream(&self, stream: RawStream) -> Result<()> {
        self.judge(|below| below.destroy_stream(stream), |()| Some(Call::DestroyStream { stream }))
    }

    fn synchronize_stream(&self, stream: RawStream) -> Result<()> {
        self.judge(|below| below.synchronize_stream(stream), |()| Some(Call::StreamComplete { stream }))
    }

    fn query_stream(&self, stream: RawStream) -> Result<bool> {
        self.judge(|below| below.query_stream(stream), |done| done.then_some(Call::StreamComplete { stream }))
    }

    fn destroy_event(&self, event: RawEvent) -> Result<()> {
        self.judge(|below| below.destroy_event(event), |()| Some(Call::DestroyEvent { event }))
    }

    fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
        self.judge(|below| below.record(event, stream), |()| Some(Call::Record { event, stream }))
    }

    fn wait(&self, stream: RawStream, event: RawEvent) -> Result<()> {
        self.judge(|below| below.wait(stream, event), |()| Some(Call::Wait { stream, event }))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.judge(|below| below.wait_peer(stream, peer, event), |()| Some(Call::WaitPeer { stream }))
    }

    fn query_event(&self, event: RawEvent) -> Result<bool> {
        self.judge(|below| below.query_event(event), |done| done.then_some(Call::EventComplete { event }))
    }

    fn synchronize_event(&self, event: RawEvent) -> Result<()> {
        self.judge(|below| below.synchronize_event(event), |()| Some(Call::EventComplete { event }))
    }

    /// Succeeds only if both events are complete.
    fn elapsed_ms(&self, start: RawEvent, end: RawEvent) -> Result<f64> {
        let mut judge = self.judge.lock();
        let elapsed = self.below.elapsed_ms(start, end).inspect_err(|error| judge.note_failure(error))?;
        [start, end].into_iter().for_each(|event| judge.take(Call::EventComplete { event }));
        Ok(elapsed)
    }

    fn synchronize(&self) -> Result<()> {
        self.judge(|below| below.synchronize(), |()| Some(Call::DeviceComplete))
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        let touches = || vec![read(host(src), bytes as u64), write(CopyEnd::Device(dst), bytes as u64)];
        self.enqueue(Operation::CopyToDevice, stream, touches, |below| {
            // SAFETY: the caller's promise is passed on unchanged.
            unsafe { below.copy_to_device(dst, src, bytes, stream) }
        })
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        let touches = || vec![read(CopyEnd::Device(src), bytes as u64), write(host(dst), bytes as u64)];
        self.enqueue(Operation::CopyToHost, stream, touches, |below| {
            // SAFETY: the caller's promise is passed on unchanged.
            unsafe { below.copy_to_host(dst, src, bytes, stream) }
        })
    }

    fn copy_on_device(&self, dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> Result<()> {
        let touches = || vec![read(CopyEnd::Device(src), bytes), write(CopyEnd::Device(dst), bytes)];
        self.enqueue(Operation::CopyOnDevice, stream, touches, |below| below.copy_on_device(dst, src, bytes, stream))
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        let touches = || vec![write(CopyEnd::Device(dst), bytes)];
        self.enqueue(Operation::CopyPeer, stream, touches, |below| below.copy_peer(dst, peer, src, bytes, stream))
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        let touches = || {
            let mut touches = rows(copy.src, copy.src_pitch, copy, read);
            touches.extend(rows(copy.dst, copy.dst_pitch, copy, write));
            touches
        };
        self.enqueue(Operation::Copy2d, stream, touches, |below| {
            // SAFETY: the caller's promise is passed on unchanged.
            unsafe { below.copy_2d(copy, stream) }
        })
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        let both = |part: &CopyPart| [read(part.src, part.bytes), write(part.dst, part.bytes)];
        let touches = || copies.iter().flat_map(both).collect();
        self.enqueue(Operation::CopyBatch, stream, touches, |below| {
            // SAFETY: the caller's promise is passed on unchanged.
            unsafe { below.copy_batch(copies, stream) }
        })
    }

    fn memset(&self, ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> Result<()> {
        let touches = || vec![write(CopyEnd::Device(ptr), bytes)];
        self.enqueue(Operation::Memset, stream, touches, |below| below.memset(ptr, value, bytes, stream))
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        let touch = |access: &aquifer_device::AccessRange| Touch {
            at: CopyEnd::Device(access.ptr),
            bytes: access.bytes,
            kind: access.kind,
        };
        self.enqueue(
            Operation::Launch,
            stream,
            || launch.accesses.iter().map(touch).collect(),
            |below| {
                // SAFETY: the caller's promise is passed on unchanged.
                unsafe { below.launch(launch, stream) }
            },
        )
    }

    fn begin_capture(&self, stream: RawStream) -> Result<()> {
        self.judge(|below| below.begin_capture(stream), |()| Some(Call::BeginCapture { stream }))
    }

    /// A capture that was broken, or that a stream did not join back to, is over when this fails.
    fn end_capture(&self, stream: RawStream) -> Result<RawGraph> {
        let mut judge = self.judge.lock();
        let ended = self.below.end_capture(stream);
        let is_over = |error: &DeviceError| matches!(error.code, Code::CAPTURE_INVALIDATED | Code::CAPTURE_UNJOINED);
        ended.as_ref().err().into_iter().for_each(|error| judge.note_failure(error));
        if ended.as_ref().err().is_none_or(is_over) {
            judge.take(Call::EndCapture { stream, graph: ended.as_ref().ok().copied() });
        }
        ended
    }

    fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<()> {
        self.judge(|below| below.launch_graph(graph, stream), |()| Some(Call::LaunchGraph { graph, stream }))
    }

    fn destroy_graph(&self, graph: RawGraph) -> Result<()> {
        self.judge(|below| below.destroy_graph(graph), |()| Some(Call::DestroyGraph { graph }))
    }
}
