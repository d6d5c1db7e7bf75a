//! A driver that counts the calls made to another one, and remembers the first answer that says that the device is
//! lost.
//!
//! Every device is driven through one of these, so tests can assert how many driver calls something costs, and errors
//! name the device and can say what it was lost by.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::capturing_streams::CapturingStreams;
use crate::copies::{Copy2d, CopyPart};
use crate::driver::{
    Attribute, CaptureStatus, DeviceInfo, DevicePtr, Driver, HostPtr, MemoryInfo, PoolUsage, RawEvent, RawGraph,
    RawModule, RawPhysical, RawStream, StreamFlags,
};
use crate::error::{DeviceError, Operation, Result};
use crate::fork;
use crate::label::DeviceLabel;
use crate::launch::{AccessKind, Launch};
use crate::lost::Lost;
use crate::physical::PhysicalOptions;
use crate::sim::Checks;
use crate::sync::atomic::{AtomicU64, Ordering};

/// How often each driver call was made. Its `Debug` names those that were made: `{cuMemCreate: 2, cuMemMap: 3}`.
#[derive(Clone, PartialEq, Eq)]
pub struct CallCounts(Vec<u64>);

impl CallCounts {
    /// Calls of one operation.
    pub fn of(&self, operation: Operation) -> u64 {
        self.0.get(operation as usize).copied().unwrap_or(0)
    }

    /// The operations that were called at all, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, u64)> + '_ {
        Operation::ALL.iter().map(|&operation| (operation, self.of(operation))).filter(|&(_, count)| count > 0)
    }

    /// Calls of all operations.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }

    /// Calls made since `earlier` was taken from the same device.
    #[must_use]
    pub fn since(&self, earlier: &CallCounts) -> CallCounts {
        CallCounts(self.0.iter().zip(&earlier.0).map(|(now, then)| now - then).collect())
    }
}

impl fmt::Debug for CallCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut calls = f.debug_map();
        for (operation, count) in self.iter() {
            calls.entry(&format_args!("{operation}"), &count);
        }
        calls.finish()
    }
}

/// Counts every call, failed ones included, and passes it on.
#[derive(Debug)]
pub(crate) struct Counted {
    inner: Arc<dyn Driver>,
    calls: Vec<AtomicU64>,
    lost: Lost,
    label: DeviceLabel,
}

impl Counted {
    pub(crate) fn new(inner: Arc<dyn Driver>) -> Self {
        let (calls, label) =
            (Operation::ALL.iter().map(|_| AtomicU64::new(0)).collect(), DeviceLabel::from(inner.info()));
        Counted { inner, calls, lost: Lost::default(), label }
    }

    pub(crate) fn counts(&self) -> CallCounts {
        CallCounts(self.calls.iter().map(|calls| calls.load(Ordering::Relaxed)).collect())
    }

    fn on(&self, operation: Operation) -> Result<&dyn Driver> {
        fork::check(operation).map_err(|error| error.of_device(&self.label))?;
        self.calls[operation as usize].fetch_add(1, Ordering::Relaxed);
        Ok(&*self.inner)
    }

    /// What a call was answered; errors name the device and, where it is lost, what it was lost by.
    #[inline]
    pub(crate) fn heard<T>(&self, answer: Result<T>) -> Result<T> {
        answer.map_err(|error| {
            let error = error.of_device(&self.label);
            if error.is_device_lost() { self.note_lost(error) } else { error }
        })
    }

    /// The same of a call in which a peer took part, which may be the one that is lost.
    fn heard_of_two<T>(&self, answer: Result<T>) -> Result<T> {
        answer.map_err(|error| {
            let error = error.of_device(&self.label);
            if error.is_device_lost() && self.is_lost() { self.note_lost(error) } else { error }
        })
    }

    /// The first error that said that the device is lost, if any did.
    pub(crate) fn lost(&self) -> Option<&DeviceError> {
        self.lost.first()
    }

    /// Takes an error for one of this device, which is lost.
    pub(crate) fn note_lost(&self, error: DeviceError) -> DeviceError {
        self.lost.note(error, self.inner.info())
    }

    /// Whether the device is lost. Asks the driver where nobody heard so yet; the call is not counted, for it is made
    /// only after one that failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost().is_some() || self.inner.memory_info().is_err_and(|error| error.is_device_lost())
    }
}

/// Methods that are counted under one operation and passed on unchanged.
macro_rules! pass_on {
    ($($operation:ident => $method:ident($($arg:ident: $type:ty),*) -> $result:ty;)*) => {$(
        fn $method(&self, $($arg: $type),*) -> Result<$result> {
            self.heard(self.on(Operation::$operation)?.$method($($arg),*))
        }
    )*};
}

impl Driver for Counted {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        self.inner.as_any()
    }

    fn capturing_streams(&self) -> Arc<CapturingStreams> {
        self.inner.capturing_streams()
    }

    unsafe fn adopt_stream(&self, stream: RawStream) {
        if fork::is_child() {
            return;
        }
        // SAFETY: the caller's promise about the stream is passed on unchanged.
        unsafe { self.inner.adopt_stream(stream) }
    }

    fn release_stream(&self, stream: RawStream) {
        if fork::is_child() {
            return;
        }
        self.inner.release_stream(stream);
    }

    pass_on! {
        MemoryInfo => memory_info() -> MemoryInfo;
        Attribute => attribute(attribute: Attribute) -> u64;
        Alloc => alloc(bytes: u64) -> DevicePtr;
        Free => free(ptr: DevicePtr) -> ();
        AllocAsync => alloc_async(bytes: u64, stream: RawStream) -> DevicePtr;
        FreeAsync => free_async(ptr: DevicePtr, stream: RawStream) -> ();
        Reserve => reserve(bytes: u64, alignment: u64) -> DevicePtr;
        Unreserve => unreserve(ptr: DevicePtr, bytes: u64) -> ();
        CreatePhysical => create_physical(bytes: u64, options: PhysicalOptions) -> RawPhysical;
        ReleasePhysical => release_physical(physical: RawPhysical) -> ();
        Map => map(ptr: DevicePtr, bytes: u64, physical: RawPhysical) -> ();
        Unmap => unmap(ptr: DevicePtr, bytes: u64) -> ();
        SetAccess => set_access(ptr: DevicePtr, bytes: u64, devices: &[u32]) -> ();
        HostAlloc => host_alloc(bytes: usize) -> HostPtr;
        CreateStream => create_stream(flags: StreamFlags) -> RawStream;
        DestroyStream => destroy_stream(stream: RawStream) -> ();
        SynchronizeStream => synchronize_stream(stream: RawStream) -> ();
        QueryStream => query_stream(stream: RawStream) -> bool;
        CreateEvent => create_event(timing: bool) -> RawEvent;
        DestroyEvent => destroy_event(event: RawEvent) -> ();
        Record => record(event: RawEvent, stream: RawStream) -> ();
        Wait => wait(stream: RawStream, event: RawEvent) -> ();
        QueryEvent => query_event(event: RawEvent) -> bool;
        SynchronizeEvent => synchronize_event(event: RawEvent) -> ();
        ElapsedTime => elapsed_ms(start: RawEvent, end: RawEvent) -> f64;
        Synchronize => synchronize() -> ();
        CopyOnDevice => copy_on_device(dst: DevicePtr, src: DevicePtr, bytes: u64, stream: RawStream) -> ();
        Memset => memset(ptr: DevicePtr, value: u8, bytes: u64, stream: RawStream) -> ();
        BeginCapture => begin_capture(stream: RawStream) -> ();
        EndCapture => end_capture(stream: RawStream) -> RawGraph;
        LaunchGraph => launch_graph(graph: RawGraph, stream: RawStream) -> ();
        DestroyGraph => destroy_graph(graph: RawGraph) -> ();
        LoadModule => load_module(ptx: &str) -> RawModule;
        UnloadModule => unload_module(module: RawModule) -> ();
        CaptureStatus => capture_status(stream: RawStream) -> CaptureStatus;
        StreamId => stream_id(stream: RawStream) -> Option<u64>;
        PoolUsage => pool_usage() -> PoolUsage;
        TrimPool => trim_pool(keep: u64) -> ();
        TrimGraphMemory => trim_graph_memory() -> ();
        CanAccessPeer => can_access_peer(peer: u32) -> bool;
    }

    fn host_access(&self, ptr: HostPtr, bytes: usize, kind: AccessKind) -> Result<()> {
        fork::check(Operation::CopyToHost)?;
        self.heard(self.inner.host_access(ptr, bytes, kind))
    }

    fn wait_peer(&self, stream: RawStream, peer: &dyn Driver, event: RawEvent) -> Result<()> {
        self.heard_of_two(self.on(Operation::Wait)?.wait_peer(stream, peer, event))
    }

    fn copy_peer(
        &self,
        dst: DevicePtr,
        peer: &dyn Driver,
        src: DevicePtr,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.heard_of_two(self.on(Operation::CopyPeer)?.copy_peer(dst, peer, src, bytes, stream))
    }

    unsafe fn copy_to_device(&self, dst: DevicePtr, src: *const u8, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about `src` is passed on unchanged.
        self.heard(unsafe { self.on(Operation::CopyToDevice)?.copy_to_device(dst, src, bytes, stream) })
    }

    unsafe fn copy_to_host(&self, dst: *mut u8, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about `dst` is passed on unchanged.
        self.heard(unsafe { self.on(Operation::CopyToHost)?.copy_to_host(dst, src, bytes, stream) })
    }

    unsafe fn host_register(&self, ptr: *mut u8, bytes: usize) -> Result<HostPtr> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        self.heard(unsafe { self.on(Operation::HostRegister)?.host_register(ptr, bytes) })
    }

    unsafe fn host_free(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        self.heard(unsafe { self.on(Operation::HostFree)?.host_free(ptr) })
    }

    unsafe fn host_unregister(&self, ptr: HostPtr) -> Result<()> {
        // SAFETY: the caller's promise about the memory is passed on unchanged.
        self.heard(unsafe { self.on(Operation::HostUnregister)?.host_unregister(ptr) })
    }

    unsafe fn copy_2d(&self, copy: &Copy2d, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about host memory is passed on unchanged.
        self.heard(unsafe { self.on(Operation::Copy2d)?.copy_2d(copy, stream) })
    }

    unsafe fn copy_batch(&self, copies: &[CopyPart], stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about host memory is passed on unchanged.
        self.heard(unsafe { self.on(Operation::CopyBatch)?.copy_batch(copies, stream) })
    }

    unsafe fn launch(&self, launch: &Launch, stream: RawStream) -> Result<()> {
        // SAFETY: the caller's promise about the kernel is passed on unchanged.
        self.heard(unsafe { self.on(Operation::Launch)?.launch(launch, stream) })
    }

    fn checks(&self) -> Option<Arc<Checks>> {
        self.inner.checks()
    }

    fn take_violation(&self) -> Option<String> {
        self.inner.take_violation()
    }
}
