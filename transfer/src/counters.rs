//! Counters of transfers, and the overlap of transfers with other work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Direction {
    /// From the host to the device.
    Upload,
    /// From the device to the host.
    Download,
    /// Within a device, or between devices.
    OnDevice,
}

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Traffic {
    /// Transfers; of a [`crate::Batch`], each copy that was added.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The counters of a [`crate::Transfer`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Counters {
    /// From the host to the device.
    pub uploads: Traffic,
    /// From the device to the host.
    pub downloads: Traffic,
    /// Within the device, or from other devices; but a copy by way of the host counts as a download
    /// there and an upload here.
    pub on_device: Traffic,
    /// The number of waits of threads for the device, in calls that document it.
    pub synchronisations: u64,
    /// The time of these waits for transfers.
    pub time_waited: Duration,
    /// The time from the call that began a transfer to the end of its wait or await, summed over
    /// the transfers that were waited for or awaited.
    pub time_in_flight: Duration,
}

impl Counters {
    /// The share of the transfers' time in flight during which no thread was blocked on them: 1 −
    /// waited / in flight. Counts transfers that were waited for, complete before or not, and
    /// awaited ones, which block no thread; not those that were dropped or chained to a stream.
    /// `None` before the first one. In time of the host's clock, on virtual devices too.
    pub fn overlap(&self) -> Option<f64> {
        let flight = self.time_in_flight.as_secs_f64();
        (flight > 0.0).then(|| (1.0 - self.time_waited.as_secs_f64() / flight).clamp(0.0, 1.0))
    }
}

/// The counters, shared by threads.
#[derive(Debug, Default)]
pub(crate) struct AtomicCounters {
    /// By direction.
    copies: [AtomicU64; 3],
    bytes: [AtomicU64; 3],
    synchronisations: AtomicU64,
    waited_ns: AtomicU64,
    flight_ns: AtomicU64,
}

impl AtomicCounters {
    pub(crate) fn count(&self, direction: Direction, bytes: u64) {
        self.count_all(direction, 1, bytes);
    }

    /// Several copies, of `bytes` bytes in total.
    pub(crate) fn count_all(&self, direction: Direction, copies: u64, bytes: u64) {
        let place = direction as usize;
        self.copies[place].fetch_add(copies, Ordering::Relaxed);
        self.bytes[place].fetch_add(bytes, Ordering::Relaxed);
    }

    /// A thread waits in `wait` for a transfer that began at `started`.
    pub(crate) fn waiting<R>(&self, started: Instant, wait: impl FnOnce() -> R) -> R {
        let from = Instant::now();
        let result = wait();
        self.waits();
        self.waited_ns.fetch_add(nanoseconds(from.elapsed()), Ordering::Relaxed);
        self.flew(started);
        result
    }

    /// A thread waits for work that is no transfer of its caller's.
    pub(crate) fn waits(&self) {
        self.synchronisations.fetch_add(1, Ordering::Relaxed);
    }

    /// A transfer that began at `started` is known to be done now.
    pub(crate) fn flew(&self, started: Instant) {
        self.flight_ns.fetch_add(nanoseconds(started.elapsed()), Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Counters {
        let traffic = |direction: Direction| Traffic {
            copies: self.copies[direction as usize].load(Ordering::Relaxed),
            bytes: self.bytes[direction as usize].load(Ordering::Relaxed),
        };
        Counters {
            uploads: traffic(Direction::Upload),
            downloads: traffic(Direction::Download),
            on_device: traffic(Direction::OnDevice),
            synchronisations: self.synchronisations.load(Ordering::Relaxed),
            time_waited: Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed)),
            time_in_flight: Duration::from_nanos(self.flight_ns.load(Ordering::Relaxed)),
        }
    }
}

pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlap_is_the_share_of_time_without_waiting() {
        assert_eq!(Counters::default().overlap(), None);
        let ms = Duration::from_millis;
        let counters = Counters { time_waited: ms(25), time_in_flight: ms(100), ..Counters::default() };
        assert!((counters.overlap().unwrap_or(0.0) - 0.75).abs() < 1e-9);
    }

    #[test]
    fn counts_are_read() {
        let counters = AtomicCounters::default();
        counters.count(Direction::Download, 7);
        counters.waiting(Instant::now(), || {});
        counters.waits();
        let counters = counters.read();
        assert_eq!(counters.downloads, Traffic { copies: 1, bytes: 7 });
        assert_eq!((counters.uploads, counters.synchronisations), (Traffic::default(), 2));
        assert!(counters.time_in_flight >= counters.time_waited);
    }
}
