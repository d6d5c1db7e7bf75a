//! An allocator whose driver calls are observed, on a device that may lag.
//!
//! Observation takes time, so fast operations are not timed here: a program is replayed once for
//! its times and once to be observed, on separate devices. Only requests that call a real driver
//! are timed here, because they are slow. A simulated device may lag ([`Lagging`]), which also
//! checks that memory is not released before the device is done with it, and its driver calls have
//! a modelled time.

use std::sync::Arc;
use std::time::Instant;

use aquifer::device::sim::{SimConfig, SimDriver};
use aquifer::memory::MemoryStats;
use aquifer::{Device, Error};
use aquifer_device::{CallCounts, Operation, TimelineCounts};
use aquifer_sim::Lagging;

use crate::map::Map;
use crate::subject::{Aquifer, Measured, Refusal, Refused, Subject};

/// Calls that take, map or move memory.
const TAKING: [Operation; 5] =
    [Operation::Alloc, Operation::AllocAsync, Operation::CreatePhysical, Operation::Map, Operation::SetAccess];

/// The costs of a pass through a program.
#[derive(Debug, Clone)]
pub struct Costs {
    /// Calls of the driver.
    pub calls: CallCounts,
    /// Requests for memory.
    pub allocs: u64,
    /// Requests during which the driver was asked to allocate, create, map or make accessible.
    pub driver_allocs: u64,
    /// Modelled time in driver calls; `None` on a real device.
    pub modelled: Option<Spent>,
    /// Host time of `driver_allocs`; `None` on a simulated device, where it is meaningless.
    pub measured: Option<Spent>,
    /// Waits of the host for a device that lagged.
    pub stalls: u64,
    /// Events recorded and waits inserted to order streams.
    pub timeline: TimelineCounts,
    /// The most bytes that were held from the device, and that were allocated.
    pub peaks: (u64, u64),
}

/// Time of a pass, in ns.
#[derive(Debug, Clone, Copy, Default)]
pub struct Spent {
    /// In all.
    pub total_ns: u64,
    /// The most within one request for memory.
    pub worst_alloc_ns: u64,
}

/// A simulated device that lags.
#[derive(Debug)]
pub struct Lagged {
    /// The device.
    pub device: Device,
    /// Its lag.
    pub lag: Arc<Lagging>,
    /// Its simulator.
    pub driver: Arc<SimDriver>,
}

impl Lagged {
    /// A device that lags behind by `lag` events.
    pub fn new(sim: SimConfig, lag: u64) -> Lagged {
        let driver = SimDriver::new(sim);
        let lag = Lagging::new(driver.clone(), lag);
        Lagged { device: Device::new(lag.clone()), lag, driver }
    }
}

/// An allocator under observation.
#[derive(Debug)]
pub struct Observed<S = Aquifer> {
    subject: S,
    device: Device,
    /// Its simulator, if it is a simulated one.
    simulated: Option<Lagged>,
    requests: Requests,
    /// Events that have begun.
    events: u64,
    first_refusal: Option<Result<FirstRefusal, Error>>,
}

/// A refusal, and the memory at that time.
#[derive(Debug, Clone)]
pub struct FirstRefusal {
    /// The number of the refused event, from 1, over all passes.
    pub event: u64,
    /// The request, and the allocator's report.
    pub refusal: Refusal,
    /// What lay where.
    pub map: Map,
}

/// The requests of a pass.
#[derive(Debug, Default)]
struct Requests {
    allocs: u64,
    driver_allocs: u64,
    worst_modelled_ns: u64,
    measured: Spent,
}

impl<S: Measured> Observed<S> {
    /// An allocator, its device, and the same device as a simulated one that may lag, if it is one.
    pub fn new(subject: S, device: Device, simulated: Option<Lagged>) -> Observed<S> {
        let (requests, events, first_refusal) = (Requests::default(), 0, None);
        Observed { subject, device, simulated, requests, events, first_refusal }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The allocator's statistics. Their peaks are those of the last pass.
    pub fn stats(&self) -> MemoryStats {
        self.subject.stats()
    }

    /// The bytes held from the device now, and those allocated.
    pub fn held(&self) -> (u64, u64) {
        self.subject.held()
    }

    /// What lies where now.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn map(&self) -> Result<Map, Error> {
        self.subject.map()
    }

    /// The first request that was refused. A second call returns none.
    ///
    /// # Errors
    /// When the memory at that time could not be looked at.
    pub fn take_first_refusal(&mut self) -> Result<Option<FirstRefusal>, Error> {
        self.first_refusal.take().transpose()
    }

    /// Runs a pass. Returns its result and its costs.
    ///
    /// # Errors
    /// Those of the pass.
    pub fn pass<T, E>(&mut self, run: impl FnOnce(&mut Observed<S>) -> Result<T, E>) -> Result<(T, Costs), E> {
        let (calls, before) = (self.device.driver_calls(), self.device.timeline_counts());
        let (time_ns, stalls) = (self.time_ns(), self.stalls());
        self.requests = Requests::default();
        self.subject.reset_peaks();
        let result = run(self)?;
        let MemoryStats { reserved_bytes, allocated_bytes, .. } = self.subject.stats();
        let Requests { allocs, driver_allocs, worst_modelled_ns, measured } = self.requests;
        let modelled = Spent { total_ns: self.time_ns() - time_ns, worst_alloc_ns: worst_modelled_ns };
        let mut timeline = self.device.timeline_counts();
        timeline.events_recorded -= before.events_recorded;
        timeline.waits_inserted -= before.waits_inserted;
        let costs = Costs {
            calls: self.device.driver_calls().since(&calls),
            allocs,
            driver_allocs,
            modelled: self.simulated.is_some().then_some(modelled),
            measured: self.simulated.is_none().then_some(measured),
            stalls: self.stalls() - stalls,
            timeline,
            peaks: (reserved_bytes.all.peak, allocated_bytes.all.peak),
        };
        Ok((result, costs))
    }

    fn time_ns(&self) -> u64 {
        self.simulated.as_ref().map_or(0, |simulated| simulated.driver.time_in_calls_ns())
    }

    fn stalls(&self) -> u64 {
        self.simulated.as_ref().map_or(0, |simulated| simulated.lag.stalls())
    }

    fn taken(&self) -> u64 {
        let calls = self.device.driver_calls();
        TAKING.iter().map(|&operation| calls.of(operation)).sum()
    }

    fn lag(&self) -> Option<&Lagging> {
        self.simulated.as_ref().map(|simulated| &*simulated.lag)
    }
}

impl<S: Measured> Subject for Observed<S> {
    type Handle = S::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<S::Handle, Refused> {
        let (taken, time) = (self.taken(), self.time_ns());
        let begun = Instant::now();
        let allocated = self.subject.alloc(bytes, stream);
        let elapsed = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let modelled = self.time_ns() - time;
        let asked_driver = self.taken() > taken;
        let requests = &mut self.requests;
        requests.allocs += 1;
        if asked_driver {
            requests.driver_allocs += 1;
            requests.measured.total_ns += elapsed;
            requests.measured.worst_alloc_ns = requests.measured.worst_alloc_ns.max(elapsed);
        }
        requests.worst_modelled_ns = requests.worst_modelled_ns.max(modelled);
        let allocation = allocated?;
        if let Some(lag) = self.lag() {
            let (ptr, bytes) = self.subject.place(&allocation);
            lag.allocated(ptr, bytes);
        }
        Ok(allocation)
    }

    fn free(&mut self, handle: S::Handle) {
        if let Some(lag) = self.lag() {
            lag.freed(self.subject.place(&handle).0);
        }
        self.subject.free(handle);
    }

    fn record_stream(&mut self, handle: &mut S::Handle, stream: u16) -> Result<(), Refused> {
        if let Some(lag) = self.lag() {
            lag.used(self.subject.place(handle).0);
        }
        self.subject.record_stream(handle, stream)
    }

    fn refused(&mut self, refusal: Refusal) {
        if self.first_refusal.is_none() {
            let event = self.events;
            self.first_refusal = Some(self.map().map(|map| FirstRefusal { event, refusal, map }));
        }
    }

    fn begin_event(&mut self) {
        self.events += 1;
        if let Some(lag) = self.lag() {
            lag.advance();
        }
    }
}

#[cfg(test)]
mod tests {
    use aquifer::Allocator;
    use aquifer::memory::Config;

    use super::*;

    fn observed(lag: u64) -> Observed {
        let lagged = Lagged::new(SimConfig::new(1 << 30), lag);
        let device = lagged.device.clone();
        let config: Config = "backing:segments,quarantine_mb:0".parse().unwrap();
        let allocator = Allocator::new(&device, config).unwrap();
        Observed::new(Aquifer::new(allocator, 2, None).unwrap(), device, Some(lagged))
    }

    #[test]
    fn a_pass_has_its_costs() {
        let mut observed = observed(3);
        let first = observed.pass(|observed| {
            let mut block = observed.alloc(8 << 20, 0).unwrap();
            observed.record_stream(&mut block, 1).unwrap();
            observed.free(block);
            Ok::<_, Error>(())
        });
        let ((), first) = first.unwrap();
        assert_eq!((first.allocs, first.driver_allocs, first.calls.of(Operation::Alloc)), (1, 1, 1));
        let modelled = first.modelled.unwrap();
        assert!(modelled.worst_alloc_ns >= 66_000 && modelled.total_ns >= modelled.worst_alloc_ns, "{modelled:?}");
        let blocks = observed.pass(|observed| Ok::<_, Error>([(); 2].map(|()| observed.alloc(512, 0).unwrap())));
        let (blocks, second) = blocks.unwrap();
        assert_eq!((second.allocs, second.driver_allocs, second.stalls), (2, 1, 0));
        blocks.into_iter().for_each(|block| observed.free(block));
    }

    #[test]
    fn memory_that_is_released_too_early_is_reported() {
        let mut observed = observed(100);
        observed.begin_event();
        let block = observed.alloc(2 << 20, 0).unwrap();
        let device = observed.device().clone();
        assert_eq!(device.driver().take_violation(), None);
        device.driver().free(block.ptr()).unwrap();
        let found = device.driver().take_violation().unwrap();
        assert!(found.contains("cuMemFree at event 1") && found.contains("which are live"), "{found}");
    }
}
