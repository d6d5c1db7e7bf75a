//! Memory over time, in few points.

/// There are at most so many points.
const POINTS: usize = 512;

/// Bytes reserved and allocated over the whole time. A point has its time in seconds, and the most
/// since the point before.
#[derive(Debug, Default)]
pub(super) struct Trend(Vec<(f64, [u64; 2])>);

impl Trend {
    /// Adds bytes reserved and allocated.
    pub(super) fn add(&mut self, seconds: f64, reading: [u64; 2]) {
        if self.0.len() >= POINTS {
            let most = |one: (f64, [u64; 2]), other: (f64, [u64; 2])| {
                (other.0, [0, 1].map(|which| one.1[which].max(other.1[which])))
            };
            self.0 = self.0.chunks(2).filter_map(|pair| pair.iter().copied().reduce(most)).collect();
        }
        self.0.push((seconds, reading));
    }

    /// The most bytes of all times.
    pub(super) fn most(&self) -> u64 {
        self.0.iter().flat_map(|(_, bytes)| bytes).copied().max().unwrap_or(0)
    }

    /// The points of one of the two lines.
    #[expect(clippy::cast_precision_loss, reason = "points of a chart")]
    pub(super) fn line(&self, which: usize) -> Vec<(f64, f64)> {
        self.0.iter().map(|(at, bytes)| (*at, bytes[which] as f64)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trend_keeps_every_peak_in_few_points() {
        let mut trend = Trend::default();
        for number in 0..100_000_u32 {
            let reserved = if number == 77_777 { 9 } else { u64::from(number % 3) };
            trend.add(number.into(), [reserved, u64::from(number % 2)]);
            assert!(trend.0.len() <= POINTS);
        }
        assert!(trend.0.len() >= POINTS / 2 && trend.0.is_sorted_by_key(|(at, _)| *at));
        assert_eq!((trend.0.iter().filter(|(_, point)| point[0] == 9).count(), trend.most()), (1, 9));
    }
}
