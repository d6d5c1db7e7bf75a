//! Time stamps for history: taken in a few nanoseconds, and converted to microseconds since 1970
//! when they are read.
//!
//! They are read from the processor's time stamp counter where it runs at a constant rate, else
//! from the operating system's monotonic clock. Times never go back, and those of one process are
//! as far apart as the events were. They differ from the wall clock by how far that was adjusted
//! since the first stamp, and by the error with which the counter's rate was measured then.

use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

/// A moment, as a value of the counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Stamp(u64);

/// The counter, and a moment whose wall-clock time is known.
struct Anchor {
    clock: quanta::Clock,
    stamp: u64,
    since_1970_us: u64,
}

static ANCHOR: LazyLock<Anchor> = LazyLock::new(|| {
    let clock = quanta::Clock::new();
    let stamp = clock.raw();
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Anchor { clock, stamp, since_1970_us: u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX) }
});

impl Stamp {
    #[inline]
    pub(crate) fn now() -> Stamp {
        Stamp(ANCHOR.clock.raw())
    }

    /// Microseconds since 1970.
    pub(crate) fn time_us(self) -> u64 {
        let since_anchor = ANCHOR.clock.delta_as_nanos(ANCHOR.stamp, self.0) / 1000;
        ANCHOR.since_1970_us.saturating_add(since_anchor)
    }
}

/// Measures the counter's rate, if that was not done yet: it takes a millisecond or so, which no
/// allocation should wait for.
pub(crate) fn prepare() {
    LazyLock::force(&ANCHOR);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn stamps_are_as_far_apart_as_the_events() {
        prepare();
        let (wall, clock) = (SystemTime::now().duration_since(UNIX_EPOCH).unwrap(), Instant::now());
        let first = Stamp::now();
        std::thread::sleep(Duration::from_millis(20));
        let second = Stamp::now();
        let passed = u64::try_from(clock.elapsed().as_micros()).unwrap();
        let between = second.time_us() - first.time_us();
        assert!(between >= 19_900 && between <= passed + passed / 100 + 100, "{between} of {passed}");
        assert!(u128::from(first.time_us()).abs_diff(wall.as_micros()) < 1_000_000);
    }
}
