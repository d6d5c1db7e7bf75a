//! The simulated device itself.

use std::sync::Arc;
use std::time::Duration;

use aquifer_device::{DevicePtr, Driver, Result, Stream};
use aquifer_sim::{Fault, Lagging, SimConfig, SimDriver};

use super::{Controls, Mapped, Subject};

pub(super) fn open(config: &SimConfig) -> Subject {
    let driver = SimDriver::new(config.clone());
    Subject { driver: driver.clone(), controls: driver.clone(), simulator: Some(driver) }
}

pub(super) fn lagging(config: &SimConfig, lag: u64) -> (Subject, Arc<Lagging>) {
    let controls = SimDriver::new(config.clone());
    let lagging = Lagging::new(controls.clone(), lag);
    let driver: Arc<dyn Driver> = lagging.clone();
    (Subject { driver, controls: controls.clone(), simulator: Some(controls) }, lagging)
}

impl Controls for SimDriver {
    fn violations(&self) -> Vec<String> {
        SimDriver::violations(self).iter().map(ToString::to_string).collect()
    }

    fn inject(&self, fault: Fault) {
        SimDriver::inject(self, fault);
    }

    fn clear_faults(&self) {
        SimDriver::clear_faults(self);
    }

    fn calls_made(&self) -> u64 {
        SimDriver::calls_made(self)
    }

    fn now_ns(&self) -> u64 {
        SimDriver::now_ns(self)
    }

    fn advance(&self, time: Duration) {
        SimDriver::advance(self, time);
    }

    fn stall(&self, stream: &Stream, time: Duration) -> Result<()> {
        SimDriver::stall(self, stream.raw(), time)
    }

    fn live_objects(&self) -> Option<u64> {
        let live = SimDriver::live_objects(self);
        let counts = [live.streams, live.events, live.captures, live.graphs, live.modules, live.host];
        Some(counts.into_iter().sum::<usize>() as u64)
    }

    fn set_other_process_bytes(&self, bytes: u64) {
        SimDriver::set_other_process_bytes(self, bytes);
    }

    fn mapping_at(&self, ptr: DevicePtr) -> Option<Mapped> {
        let mapped = SimDriver::mapping_at(self, ptr)?;
        Some(Mapped { ptr: mapped.ptr, bytes: mapped.bytes, options: mapped.options, devices: mapped.devices })
    }
}
