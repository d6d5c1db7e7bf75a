//! An allocator whose driver calls are observed, on a device that may lag.
//!
//! Observation takes time, so fast operations are not timed here: a program is replayed once for
//! its times and once to be observed, on separate devices. Only requests that call a real driver
//! are timed here, because they are slow. A simulated device may lag ([`Lagging`]), which also
//! checks that memory is not released before the device is done with it, and its driver calls have
//! a modelled time.

use std::time::Instant;

use aquifer::Device;
use aquifer::memory::{Allocation, MemoryStats};
use aquifer_device::sim::Lagging;
use aquifer_device::{CallCounts, Operation, TimelineCounts};

use crate::cli::ConfigArg;
use crate::exit::Failure;
use crate::session::{Lagged, Session};
use crate::subject::{Aquifer, Refused, Subject};

/// Calls that take, map or move memory.
const TAKING: [Operation; 5] =
    [Operation::Alloc, Operation::AllocAsync, Operation::CreatePhysical, Operation::Map, Operation::SetAccess];

/// The costs of a pass through a program.
#[derive(Debug, Clone)]
#[non_exhaustive]
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
}

/// Time of a pass, in ns.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub struct Spent {
    /// In all.
    pub total_ns: u64,
    /// The most within one request for memory.
    pub worst_alloc_ns: u64,
}

/// An allocator under observation.
#[derive(Debug)]
pub struct Observed {
    subject: Aquifer,
    device: Device,
    /// Its simulator, if it is a simulated one.
    simulated: Option<Lagged>,
    allocs: u64,
    driver_allocs: u64,
    worst_alloc_ns: u64,
    measured: Spent,
}

/// The counters at the start of a pass.
#[derive(Debug)]
pub struct Start {
    calls: CallCounts,
    time_ns: u64,
    stalls: u64,
    timeline: TimelineCounts,
}

impl Observed {
    /// An allocator on a new device, with `streams` streams. A simulated device lags by `lag`
    /// events.
    ///
    /// # Errors
    /// Those of the allocator and the driver; a real device cannot be made to lag.
    pub fn new(session: &Session, config: &ConfigArg, streams: usize, lag: u64) -> Result<Observed, Failure> {
        let simulated = session.open_lagging(lag)?;
        let device = simulated.as_ref().map_or_else(|| session.open(), |simulated| Ok(simulated.device.clone()))?;
        let subject = Aquifer::new(session, &device, config, streams)?;
        let measured = Spent::default();
        Ok(Observed { subject, device, simulated, allocs: 0, driver_allocs: 0, worst_alloc_ns: 0, measured })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The allocator's statistics.
    pub fn stats(&self) -> MemoryStats {
        self.subject.allocator().stats()
    }

    /// Begins a pass.
    pub fn begin(&mut self) -> Start {
        (self.allocs, self.driver_allocs, self.worst_alloc_ns) = (0, 0, 0);
        self.measured = Spent::default();
        Start {
            calls: self.device.driver_calls(),
            time_ns: self.time_ns(),
            stalls: self.stalls(),
            timeline: self.device.timeline_counts(),
        }
    }

    /// Ends the pass that began at `start`.
    pub fn end(&self, start: &Start) -> Costs {
        let mut timeline = self.device.timeline_counts();
        timeline.events_recorded -= start.timeline.events_recorded;
        timeline.waits_inserted -= start.timeline.waits_inserted;
        Costs {
            calls: self.device.driver_calls().since(&start.calls),
            allocs: self.allocs,
            driver_allocs: self.driver_allocs,
            modelled: self
                .simulated
                .as_ref()
                .map(|_| Spent { total_ns: self.time_ns() - start.time_ns, worst_alloc_ns: self.worst_alloc_ns }),
            measured: self.simulated.is_none().then_some(self.measured),
            stalls: self.stalls() - start.stalls,
            timeline,
        }
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

impl Subject for Observed {
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Allocation, Refused> {
        let (taken, time) = (self.taken(), self.time_ns());
        let begun = Instant::now();
        let allocated = self.subject.alloc(bytes, stream);
        let elapsed = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.allocs += 1;
        if self.taken() > taken {
            self.driver_allocs += 1;
            self.measured.total_ns += elapsed;
            self.measured.worst_alloc_ns = self.measured.worst_alloc_ns.max(elapsed);
        }
        self.worst_alloc_ns = self.worst_alloc_ns.max(self.time_ns() - time);
        let allocation = allocated?;
        if let Some(lag) = self.lag() {
            lag.allocated(allocation.ptr(), allocation.bytes());
        }
        Ok(allocation)
    }

    fn free(&mut self, handle: Allocation) {
        if let Some(lag) = self.lag() {
            lag.freed(handle.ptr());
        }
        self.subject.free(handle);
    }

    fn record_stream(&mut self, handle: &mut Allocation, stream: u16) -> Result<(), Refused> {
        if let Some(lag) = self.lag() {
            lag.used(handle.ptr());
        }
        self.subject.record_stream(handle, stream)
    }

    fn begin_event(&mut self) {
        if let Some(lag) = self.lag() {
            lag.advance();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;

    fn observed(lag: u64) -> Observed {
        let global = Global { device: Some("sim:1GiB".parse().unwrap()), ..Global::default() };
        let config = "backing:segments".parse().unwrap();
        Observed::new(&Session::new(&global).unwrap(), &config, 2, lag).unwrap()
    }

    #[test]
    fn a_pass_has_its_costs() {
        let mut observed = observed(3);
        let start = observed.begin();
        let mut block = observed.alloc(8 << 20, 0).unwrap();
        observed.record_stream(&mut block, 1).unwrap();
        observed.free(block);
        let first = observed.end(&start);
        assert_eq!((first.allocs, first.driver_allocs, first.calls.of(Operation::Alloc)), (1, 1, 1));
        let modelled = first.modelled.unwrap();
        assert!(modelled.worst_alloc_ns >= 66_000 && modelled.total_ns >= modelled.worst_alloc_ns, "{modelled:?}");
        let start = observed.begin();
        let small = observed.alloc(512, 0).unwrap();
        let other = observed.alloc(512, 0).unwrap();
        let second = observed.end(&start);
        assert_eq!((second.allocs, second.driver_allocs, second.stalls), (2, 1, 0));
        [small, other].into_iter().for_each(|block| observed.free(block));
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
