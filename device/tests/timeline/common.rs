//! A device with its simulator at hand.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::sim::{Fault, SimConfig, SimDriver};
use aquifer_device::{Code, Device, DevicePtr, ErrorKind, Operation, Result, Stream};

pub(crate) const MIB: u64 = 1 << 20;
/// Longer than any work in these tests.
pub(crate) const LONG: Duration = Duration::from_secs(1);

pub(crate) struct Bench {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) device: Device,
    /// Memory that everybody fills.
    pub(crate) ptr: DevicePtr,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        Bench::seeded(1)
    }

    pub(crate) fn seeded(seed: u64) -> Bench {
        let sim = SimDriver::new(SimConfig::new(1 << 30).seed(seed));
        let device = Device::new(sim.clone());
        let ptr = device.alloc(MIB).unwrap();
        Bench { sim, device, ptr }
    }

    pub(crate) fn stream(&self) -> Stream {
        self.device.create_stream().unwrap()
    }

    /// Writes the shared memory on a stream.
    pub(crate) fn fill(&self, stream: &Stream) {
        stream.fill(self.ptr, 1, MIB).unwrap();
    }

    /// Keeps the work enqueued next on a stream pending until time is made to pass.
    pub(crate) fn stall(&self, stream: &Stream) {
        self.sim.stall(stream.raw(), LONG).unwrap();
    }

    pub(crate) fn pass(&self) {
        self.sim.advance(LONG * 10);
    }

    /// Events recorded and waits inserted so far.
    pub(crate) fn cost(&self) -> (u64, u64) {
        let counts = self.device.timeline_counts();
        (counts.events_recorded, counts.waits_inserted)
    }

    pub(crate) fn calls(&self, operation: Operation) -> u64 {
        self.device.driver_calls().of(operation)
    }

    /// Lets the next call of `operation` fail once.
    pub(crate) fn fail_next(&self, operation: Operation) {
        self.sim.inject(Fault::Nth { operation: Some(operation), nth: 1, code: Code(999) });
    }

    pub(crate) fn assert_no_race(&self) {
        assert_eq!(self.sim.violations(), []);
    }
}

pub(crate) fn kind<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind
}
