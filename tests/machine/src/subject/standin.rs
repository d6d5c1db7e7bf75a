//! The CUDA driver, on a simulated device behind CUDA's C ABI.

use std::sync::{Arc, Weak};
use std::time::Duration;

use aquifer_cuda::CudaDriver;
use aquifer_device::{DeviceError, DevicePtr, HandleKind, Operation, PhysicalOptions, Result, Stream};
use aquifer_sim::{Fault, SimConfig};
use aquifer_standin::{Number, StandinDevice};
use parking_lot::Mutex;

use super::{Controls, Mapped, Subject};

/// Devices that are removed when neither a driver nor a test has them any more.
static DEVICES: Mutex<Vec<(Weak<CudaDriver>, Arc<StandinDevice>)>> = Mutex::new(Vec::new());

pub(super) fn open(config: &SimConfig) -> Subject {
    // A driver that is being dropped still holds its context.
    let is_gone = |(driver, device): &mut (Weak<CudaDriver>, Arc<StandinDevice>)| {
        driver.strong_count() == 0 && Arc::strong_count(device) == 1 && device.number(Number::Retained) == 0
    };
    let gone: Vec<_> = DEVICES.lock().extract_if(.., is_gone).collect();
    drop(gone);
    let standin = aquifer_standin::load().unwrap_or_else(|error| panic!("{error}"));
    let device = standin.add_device(&config.to_string()).unwrap_or_else(|error| panic!("{error}"));
    let device = Arc::new(device);
    let driver = CudaDriver::open(device.ordinal()).unwrap_or_else(|error| panic!("{error}"));
    DEVICES.lock().push((Arc::downgrade(&driver), device.clone()));
    Subject { driver, controls: Arc::new(OnStandin(device)), simulator: None }
}

#[derive(Debug)]
struct OnStandin(Arc<StandinDevice>);

impl Controls for OnStandin {
    fn violations(&self) -> Vec<String> {
        self.0.violations()
    }

    fn inject(&self, fault: Fault) {
        self.0.inject(&fault.to_string()).unwrap_or_else(|error| panic!("{error}"));
    }

    fn clear_faults(&self) {
        self.0.clear_faults();
    }

    fn calls_made(&self) -> u64 {
        self.0.number(Number::CallsMade)
    }

    fn now_ns(&self) -> u64 {
        self.0.number(Number::NowNs)
    }

    fn advance(&self, time: Duration) {
        self.0.advance(time);
    }

    fn stall(&self, stream: &Stream, time: Duration) -> Result<()> {
        let refused = |refused: aquifer_standin::Refused| DeviceError::new(Operation::QueryStream, refused.code);
        self.0.stall(stream.raw().0, time).map_err(refused)
    }

    fn live_objects(&self) -> Option<u64> {
        Some(self.0.number(Number::LiveObjects))
    }

    fn set_other_process_bytes(&self, bytes: u64) {
        self.0.set_other_process_bytes(bytes);
    }

    fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        let mapped = self.0.mapping_at(ptr.0)?;
        let options = PhysicalOptions::default().rdma(mapped.rdma);
        let options = if mapped.exportable { options.exportable(HandleKind::PosixFd) } else { options };
        let devices = (0..u64::BITS).filter(|ordinal| mapped.devices >> ordinal & 1 == 1).collect();
        Some(Mapped { ptr: DevicePtr(mapped.ptr), bytes: mapped.bytes, options, devices })
    }
}
