//! Vector clocks over streams: the ticks that a stream is already ordered after.
//!
//! This is the clock of timelines, which count recorded events; a race detector below the driver
//! has its own, which counts operations and must not trust this one.

use crate::stream_map::StreamMap;

/// For each stream, up to which tick everything is known to come before.
///
/// An entry `(stream, n)` says: ordered after every tick of `stream` smaller than `n`. Absent means
/// 0. A clock is copied at each recorded event; copies share equal parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(StreamMap);

impl Clock {
    /// Ticks of `stream` smaller than the result come before.
    pub fn of(&self, stream: u32) -> u64 {
        self.0.get(stream)
    }

    /// Notes that every tick of `stream` smaller than `n` comes before.
    pub(crate) fn raise(&mut self, stream: u32, n: u64) {
        self.0.raise(stream, n);
    }

    /// Notes everything that `other` knows.
    pub(crate) fn merge(&mut self, other: &Clock) {
        self.0.join(&other.0);
    }
}
