//! Shorthands for programs on the simulated device.

use std::sync::Arc;

use aquifer_device::{
    AccessKind, AccessRange, Code, Device, DeviceError, DevicePtr, Driver, ErrorKind, HostKernel, HostPtr, KernelArg,
    Launch, Operation, PhysicalOptions, RawEvent, RawPhysical, RawStream, Result, Stream, StreamFlags,
};
use aquifer_sim::{SimConfig, SimDriver};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GRANULE: u64 = 2 * MIB;

/// A device with 1 GiB.
pub(crate) fn device(seed: u64) -> Arc<SimDriver> {
    SimDriver::new(SimConfig::new(1 << 30).seed(seed))
}

/// The same, without checks of how memory is used: addresses are free as soon as they are given
/// back.
pub(crate) fn unchecked() -> Arc<SimDriver> {
    SimDriver::new(SimConfig::new(1 << 30).checks(false))
}

pub(crate) fn code<T: std::fmt::Debug>(result: Result<T>) -> Code {
    result.map_err(|error: DeviceError| error.code).unwrap_err()
}

pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}

/// A device with 1 GiB.
pub(crate) struct Bench {
    pub(crate) driver: Arc<SimDriver>,
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    /// 1 MiB of memory.
    pub(crate) ptr: DevicePtr,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let driver = device(1);
        let device = Device::new(driver.clone());
        let (stream, ptr) = (device.stream().unwrap(), device.alloc(MIB).unwrap());
        Bench { driver, device, stream, ptr }
    }

    /// A stream of another library.
    pub(crate) fn theirs(&self) -> RawStream {
        self.driver.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap()
    }

    /// Fills the memory.
    pub(crate) fn fill(&self, stream: &Stream) {
        stream.fill(self.ptr, 1, MIB).unwrap();
    }

    pub(crate) fn calls(&self, operation: Operation) -> u64 {
        self.device.driver_calls().of(operation)
    }

    pub(crate) fn assert_no_violation(&self) {
        assert_eq!(self.driver.take_violations(), []);
    }
}

/// Shorthands for calls that tests make often.
pub(crate) trait Short: Driver {
    fn stream(&self) -> RawStream {
        self.create_stream(StreamFlags { non_blocking: true, priority: 0 }).unwrap()
    }

    fn blocking_stream(&self) -> RawStream {
        self.create_stream(StreamFlags::default()).unwrap()
    }

    fn event(&self) -> RawEvent {
        self.create_event(false).unwrap()
    }

    /// Records a new event on `from` and makes `to` wait for it.
    fn order(&self, from: RawStream, to: RawStream) {
        let event = self.event();
        self.record(event, from).unwrap();
        self.wait(to, event).unwrap();
        self.destroy_event(event).unwrap();
    }

    /// One granule, mapped and accessible.
    fn mapped(&self) -> (DevicePtr, RawPhysical) {
        let (ptr, physical) =
            (self.reserve(GRANULE, 0).unwrap(), self.create_physical(GRANULE, PhysicalOptions::default()).unwrap());
        self.map(ptr, GRANULE, physical).unwrap();
        self.set_access(ptr, GRANULE, &[self.info().ordinal]).unwrap();
        (ptr, physical)
    }

    /// Copies from pinned memory.
    fn upload(&self, dst: DevicePtr, src: HostPtr, bytes: usize, stream: RawStream) {
        // SAFETY: pinned memory of the simulator stays valid until its copies ran; tests leave
        // its bytes alone.
        unsafe { self.copy_to_device(dst, src.as_ptr(), bytes, stream) }.unwrap();
    }

    /// Copies to pinned memory.
    fn download(&self, dst: HostPtr, src: DevicePtr, bytes: usize, stream: RawStream) {
        // SAFETY: as for `upload`.
        unsafe { self.copy_to_host(dst.as_ptr(), src, bytes, stream) }.unwrap();
    }

    /// Copies from pageable memory.
    fn put(&self, dst: DevicePtr, bytes: &[u8], stream: RawStream) -> Result<()> {
        // SAFETY: the slice is readable, and pageable, so it is taken before the call returns.
        unsafe { self.copy_to_device(dst, bytes.as_ptr(), bytes.len(), stream) }
    }

    /// Copies to pageable memory and returns it.
    fn get(&self, src: DevicePtr, bytes: usize, stream: RawStream) -> Result<Vec<u8>> {
        let mut taken = vec![0; bytes];
        // SAFETY: the vector is writable, and pageable, so the copy is done when the call returns.
        unsafe { self.copy_to_host(taken.as_mut_ptr(), src, bytes, stream) }?;
        Ok(taken)
    }

    /// A kernel over the given ranges.
    fn kernel(
        &self,
        name: &'static str,
        accesses: &[(DevicePtr, u64, AccessKind)],
        host: Option<HostKernel>,
        stream: RawStream,
    ) -> Result<()> {
        let accesses = accesses.iter().map(|&(ptr, bytes, kind)| AccessRange { ptr, bytes, kind }).collect();
        let launch =
            Launch { name, block: [32, 1, 1], args: vec![KernelArg::U32(1)], accesses, host, ..Launch::default() };
        // SAFETY: the kernels of the tests keep to their declarations, or test the case that
        // they do not.
        unsafe { self.launch(&launch, stream) }
    }
}

impl<D: Driver + ?Sized> Short for D {}
