//! When work runs in virtual time.
//!
//! A piece of work is scheduled when it is enqueued: it starts once its stream gets there and its
//! engine is free, after a start delay, and takes as long as on the card. Delays and durations
//! vary with the seed, with occasional long stalls, so that seeds explore the orders that CUDA
//! allows. As all dependencies of work are enqueued before it, its time is known at once and
//! nothing can wait for ever.
//!
//! Invariant: work takes at least a nanosecond, so work that depends on other work finishes
//! strictly later.

use std::collections::VecDeque;

use crate::preset::Card;
use crate::rng::Rng;

/// The part of the device that does a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Copies from the host or a peer, one at a time.
    ToDevice,
    /// Copies to the host, one at a time.
    ToHost,
    /// Kernels, fills and copies within the device; those of different streams overlap.
    Compute,
    /// Nothing: bookkeeping that takes place as the stream gets there.
    None,
}

/// The cost of a piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost {
    pub(crate) unit: Unit,
    pub(crate) bytes: u64,
    pub(crate) operations: u64,
    /// The least time that it takes.
    pub(crate) busy_ns: u64,
}

/// For how long each part of a simulated device was booked, in virtual ns since the start.
///
/// Work is booked when it is enqueued, for the whole time from its start to its end, start delay
/// included: once all work is done, these are the times that the parts were busy. The rest of the
/// time that passed, a part was idle.
///
/// ```
/// use aquifer::Device;
/// use aquifer::device::sim::{SimConfig, SimDriver};
/// let driver = SimDriver::new(SimConfig::parse("h100,link=25,jitter=off")?);
/// let device = Device::new(driver.clone());
/// let (stream, memory) = (device.stream()?, device.alloc(25_000_000)?);
/// stream.upload_blocking(memory, &vec![1; 25_000_000])?;
/// let engines = driver.engines();
/// assert_eq!(engines.to_device_busy_ns, 1_500 + 1_000_000); // a millisecond after a start delay
/// assert!(engines.to_device_busy_ns < driver.now_ns() && engines.to_host_busy_ns == 0);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineTimes {
    /// The copy engine that copies to the device, from the host or a peer: one piece of work at a
    /// time.
    pub to_device_busy_ns: u64,
    /// The copy engine that copies to the host: one piece of work at a time.
    pub to_host_busy_ns: u64,
    /// Kernels, fills and copies within the device, added up. Those of different streams overlap,
    /// so this may be more than the time that passed.
    pub compute_busy_ns: u64,
}

/// The periods in which one copy engine is busy, in order.
#[derive(Debug, Default)]
struct Calendar(VecDeque<(u64, u64)>);

impl Calendar {
    /// Books `duration` at the first gap from `ready` on and returns its start.
    fn book(&mut self, now: u64, ready: u64, duration: u64) -> u64 {
        while self.0.front().is_some_and(|&(_, end)| end <= now) {
            self.0.pop_front();
        }
        let mut start = ready;
        let mut index = self.0.partition_point(|&(_, end)| end <= ready);
        while let Some(&(busy, until)) = self.0.get(index) {
            if start.saturating_add(duration) <= busy {
                break;
            }
            start = start.max(until);
            index += 1;
        }
        self.0.insert(index, (start, start.saturating_add(duration)));
        start
    }
}

/// Schedules work.
#[derive(Debug)]
pub(crate) struct Engine {
    card: Card,
    jitter: bool,
    rng: Rng,
    to_device: Calendar,
    to_host: Calendar,
    pub(crate) times: EngineTimes,
}

impl Engine {
    pub(crate) fn new(card: Card, seed: u64, jitter: bool) -> Self {
        let rng = Rng::new(seed, 1);
        let (to_device, to_host) = (Calendar::default(), Calendar::default());
        Engine { card, jitter, rng, to_device, to_host, times: EngineTimes::default() }
    }

    pub(crate) fn card(&self) -> Card {
        self.card
    }

    /// When work that is ready at `ready` finishes, in virtual ns.
    pub(crate) fn schedule(&mut self, now: u64, ready: u64, cost: Cost) -> u64 {
        let link_ns = cost.bytes / self.card.link_gb_s;
        let (delay, base) = match cost.unit {
            Unit::None => return ready.saturating_add(1),
            Unit::ToDevice | Unit::ToHost => (1_500, link_ns),
            Unit::Compute => (1_000, self.compute_ns(cost)),
        };
        let duration = self.vary(delay).saturating_add(self.vary(base)).max(1);
        let duration = duration.saturating_add(self.stall());
        let times = &mut self.times;
        let (start, busy) = match cost.unit {
            Unit::ToDevice => (self.to_device.book(now, ready, duration), &mut times.to_device_busy_ns),
            Unit::ToHost => (self.to_host.book(now, ready, duration), &mut times.to_host_busy_ns),
            Unit::Compute | Unit::None => (ready, &mut times.compute_busy_ns),
        };
        *busy = busy.saturating_add(duration);
        start.saturating_add(duration)
    }

    fn compute_ns(&self, cost: Cost) -> u64 {
        (cost.bytes / self.card.memory_gb_s).max(cost.operations / self.card.gflops).max(cost.busy_ns)
    }

    /// A number that decides between work that finishes at the same time.
    pub(crate) fn lot(&mut self) -> u64 {
        self.rng.next()
    }

    /// Lengthens a duration by up to a half, and a start delay to up to eight times.
    fn vary(&mut self, base_ns: u64) -> u64 {
        if !self.jitter {
            return base_ns;
        }
        let most = if base_ns < 2_000 { base_ns * 7 } else { base_ns / 2 };
        base_ns.saturating_add(self.rng.below(most))
    }

    /// Every 32nd piece of work stalls, for up to 200 µs.
    fn stall(&mut self) -> u64 {
        if self.jitter && self.rng.below(32) == 0 { self.rng.below(200_000) } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_calendar_fills_gaps_and_never_overlaps() {
        let mut calendar = Calendar::default();
        assert_eq!(calendar.book(0, 100, 50), 100);
        assert_eq!(calendar.book(0, 0, 100), 0);
        assert_eq!(calendar.book(0, 20, 10), 150);
        assert_eq!(calendar.book(0, 155, 20), 160);
        assert_eq!(calendar.book(200, 10, 5), 10);
    }

    #[test]
    fn without_jitter_work_takes_the_times_of_the_card() {
        let mut engine = Engine::new(crate::Preset::H100.card(), 0, false);
        let cost = Cost { unit: Unit::ToDevice, bytes: 53_000_000, operations: 0, busy_ns: 0 };
        assert_eq!(engine.schedule(0, 0, cost), 1_001_500);
        let half = Cost { unit: Unit::ToHost, bytes: 26_500_000, ..cost };
        assert_eq!(engine.schedule(0, 700, half), 502_200);
        let kernel = Cost { unit: Unit::Compute, busy_ns: 7_000, ..cost };
        engine.schedule(0, 0, Cost { bytes: 0, ..kernel });
        engine.schedule(0, 0, Cost { unit: Unit::None, ..kernel });
        let EngineTimes { to_device_busy_ns, to_host_busy_ns, compute_busy_ns } = engine.times;
        assert_eq!((to_device_busy_ns, to_host_busy_ns, compute_busy_ns), (1_001_500, 501_500, 8_000));
    }
}
