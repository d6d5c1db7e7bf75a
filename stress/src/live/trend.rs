//! Memory over time, in few points.

/// There are at most twice as many points.
const POINTS: usize = 256;

/// Bytes reserved and allocated over the whole time: the most in each of equal times.
#[derive(Debug, Default)]
pub(super) struct Trend {
    points: Vec<[u64; 2]>,
    /// Readings of a point, as a power of two.
    doublings: u32,
    /// Readings of the last point.
    last: u64,
}

impl Trend {
    /// Adds bytes reserved and allocated.
    pub(super) fn add(&mut self, reading: [u64; 2]) {
        let is_full = self.last == 1 << self.doublings;
        match self.points.last_mut() {
            Some(point) if !is_full => {
                *point = most(*point, reading);
                self.last += 1;
            }
            _ => {
                if self.points.len() >= 2 * POINTS {
                    self.points = self.points.chunks(2).map(|pair| pair.iter().copied().fold([0; 2], most)).collect();
                    self.doublings += 1;
                }
                self.points.push(reading);
                self.last = 1;
            }
        }
    }

    /// The most bytes of all times.
    pub(super) fn most(&self) -> u64 {
        self.points.iter().flatten().copied().max().unwrap_or(0)
    }

    /// The points of one of the two lines.
    #[expect(clippy::cast_precision_loss, reason = "points of a chart")]
    pub(super) fn line(&self, which: usize) -> Vec<(f64, f64)> {
        self.points.iter().enumerate().map(|(at, point)| (at as f64, point[which] as f64)).collect()
    }
}

fn most(one: [u64; 2], other: [u64; 2]) -> [u64; 2] {
    [one[0].max(other[0]), one[1].max(other[1])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trend_keeps_every_peak_in_few_points() {
        let mut trend = Trend::default();
        for number in 0..100_000_u64 {
            trend.add([if number == 77_777 { 9 } else { number % 3 }, number % 2]);
            assert!(trend.points.len() <= 2 * POINTS);
        }
        assert!(trend.points.len() > POINTS / 2);
        assert_eq!(trend.points.iter().filter(|point| point[0] == 9).count(), 1);
        assert!(trend.points.iter().all(|point| point[0] >= 2 && point[1] == 1));
    }
}
