//! The CUDA driver on the first real GPU, of which every test gets a ration of memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer_device::cuda::CudaDriver;
use aquifer_device::sim::{Fault, SimConfig};
use aquifer_device::{DevicePtr, Result, Stream};

use super::{Controls, Mapped, Subject};
use aquifer_standin::Rationed;

/// Memory that keeps a stream busy by being filled, in bytes.
const BUSY_BYTES: u64 = 256 << 20;
/// How long a GPU takes at least to fill it: at 5 TB/s.
const BUSY: Duration = Duration::from_micros(50);

pub(super) fn open(config: &SimConfig) -> Subject {
    let gpu = CudaDriver::open(0).unwrap_or_else(|error| panic!("{error}"));
    let driver = Arc::new(Rationed::new(gpu, config));
    let controls = OnHardware { driver: driver.clone(), start: Instant::now() };
    Subject { driver, controls: Arc::new(controls) }
}

#[derive(Debug)]
struct OnHardware {
    driver: Arc<Rationed>,
    start: Instant,
}

impl Controls for OnHardware {
    /// A GPU does not tell.
    fn violations(&self) -> Vec<String> {
        Vec::new()
    }

    fn inject(&self, fault: Fault) {
        self.driver.inject(fault);
    }

    fn clear_faults(&self) {
        self.driver.clear_faults();
    }

    fn calls_made(&self) -> u64 {
        self.driver.calls_made()
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn advance(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Fills memory that nobody else uses, again and again.
    fn stall(&self, stream: &Stream, time: Duration) -> Result<()> {
        let gpu = self.driver.below();
        let busy = gpu.alloc_async(BUSY_BYTES, stream.raw())?;
        let rounds = time.as_nanos().div_ceil(BUSY.as_nanos());
        let filled = (0..rounds).try_for_each(|_| gpu.memset(busy, 0, BUSY_BYTES, stream.raw()));
        filled.and(gpu.free_async(busy, stream.raw()))
    }

    fn set_other_process_bytes(&self, bytes: u64) {
        self.driver.set_other_process_bytes(bytes);
    }

    fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        let (ptr, mapped) = self.driver.mapping_at(ptr)?;
        Some(Mapped { ptr, bytes: mapped.bytes, options: mapped.options, devices: mapped.devices })
    }
}
