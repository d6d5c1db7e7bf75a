//! The streams and the memory of programs with a known answer.

use aquifer_device::{
    AccessKind, AccessRange, DevicePtr, HostPtr, Launch, PhysicalOptions, RawPhysical, RawStream, StreamFlags,
};
use aquifer_oracle::RaceKind;

use crate::both::Both;

pub(crate) const LEGACY: RawStream = RawStream::LEGACY;
pub(crate) const MINE: RawStream = RawStream::PER_THREAD;
pub(crate) const BYTES: u64 = 256;
pub(crate) const GRANULE: u64 = 2 << 20;

/// A device with two blocking and two non-blocking streams, memory, and pinned memory.
pub(crate) struct Bench {
    pub(crate) both: Both,
    pub(crate) blocking: [RawStream; 2],
    pub(crate) free: [RawStream; 2],
    pub(crate) memory: DevicePtr,
    pub(crate) other: DevicePtr,
    pub(crate) host: HostPtr,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let both = Both::new(1);
        let stream = |non_blocking| both.create_stream(StreamFlags { non_blocking, priority: 0 }).unwrap();
        Bench {
            blocking: [stream(false), stream(false)],
            free: [stream(true), stream(true)],
            memory: both.alloc(BYTES).unwrap(),
            other: both.alloc(BYTES).unwrap(),
            host: both.host_alloc(usize::try_from(BYTES).unwrap()).unwrap(),
            both,
        }
    }

    pub(crate) fn write(&self, stream: RawStream) {
        self.fill(self.memory, stream);
    }

    pub(crate) fn fill(&self, ptr: DevicePtr, stream: RawStream) {
        self.both.memset(ptr, 1, BYTES, stream).unwrap();
    }

    pub(crate) fn read(&self, stream: RawStream) {
        self.kernel(&[(self.memory, AccessKind::Read)], stream);
    }

    pub(crate) fn kernel(&self, touched: &[(DevicePtr, AccessKind)], stream: RawStream) {
        let accesses = touched.iter().map(|&(ptr, kind)| AccessRange { ptr, bytes: BYTES, kind }).collect();
        // SAFETY: the kernel has no code.
        unsafe { self.both.launch(&Launch { name: "k", accesses, ..Launch::default() }, stream) }.unwrap();
    }

    /// Copies `bytes` bytes of the memory to pinned memory.
    pub(crate) fn download(&self, bytes: usize, stream: RawStream) {
        // SAFETY: the host memory lives as long as the bench, and only the simulator touches it.
        unsafe { self.both.copy_to_host(self.host.as_ptr(), self.memory, bytes, stream) }.unwrap();
    }

    pub(crate) fn upload(&self, stream: RawStream) {
        let bytes = usize::try_from(BYTES).unwrap();
        // SAFETY: the host memory lives as long as the bench, and only the simulator touches it.
        unsafe { self.both.copy_to_device(self.memory, self.host.as_ptr(), bytes, stream) }.unwrap();
    }

    /// Orders later work of `second` after the work of `first` until now.
    pub(crate) fn order(&self, first: RawStream, second: RawStream) {
        let event = self.both.create_event(false).unwrap();
        self.both.record(event, first).unwrap();
        self.both.wait(second, event).unwrap();
        self.both.destroy_event(event).unwrap();
    }

    pub(crate) fn host_access(&self, kind: AccessKind) {
        self.both.host_access(self.host, usize::try_from(BYTES).unwrap(), kind).unwrap();
    }

    /// A range of addresses.
    pub(crate) fn addresses(&self) -> DevicePtr {
        self.both.reserve(GRANULE, 0).unwrap()
    }

    pub(crate) fn physical(&self) -> RawPhysical {
        self.both.create_physical(GRANULE, PhysicalOptions::default()).unwrap()
    }

    pub(crate) fn map(&self, at: DevicePtr, physical: RawPhysical) {
        self.both.map(at, GRANULE, physical).unwrap();
        self.both.set_access(at, GRANULE, &[0]).unwrap();
    }

    #[track_caller]
    pub(crate) fn races(self, kind: RaceKind) {
        self.both.assert_found(&[kind]);
    }

    #[track_caller]
    pub(crate) fn races_nowhere(self) {
        self.both.assert_found(&[]);
    }
}
