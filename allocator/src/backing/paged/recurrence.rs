//! Recurrence: whether a program returns to a point at which memory moved before.
//!
//! A program that repeats its steps exactly asks for the same number of bytes while the same number of bytes is in use, again and again;
//! one whose sizes vary does so only in parts. So a *point* of the program is identified by these two numbers, and the points at which
//! memory had to move are remembered. They are read and written only when memory has to move, under all locks. A bounded number is kept;
//! the oldest are dropped first.

use std::collections::VecDeque;

/// Number of points that are remembered: enough for some iterations of a large program.
const KEPT: usize = 512;

/// The points of a program at which memory had to move lately.
#[derive(Debug, Default)]
pub(crate) struct Recurrence {
    points: VecDeque<Point>,
}

/// A point of a program: a request for which memory has to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    /// Requested bytes, rounded up to the block's size.
    pub(crate) requested: u64,
    /// Bytes in use, including those of the request.
    pub(crate) in_use: u64,
}

impl Recurrence {
    /// True if memory moved at this point before.
    pub(crate) fn is_known(&self, point: Point) -> bool {
        self.points.contains(&point)
    }

    /// Notes that memory moves at a point.
    pub(crate) fn note(&mut self, point: Point) {
        if self.is_known(point) {
            return;
        }
        if self.points.len() == KEPT {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_recurs_until_it_is_forgotten() {
        let mut recurrence = Recurrence::default();
        let points = [(100, 1000), (100, 1001), (101, 1000)].map(|(requested, in_use)| Point { requested, in_use });
        assert!(points.iter().all(|&point| !recurrence.is_known(point)));
        points.iter().for_each(|&point| recurrence.note(point));
        points.iter().for_each(|&point| recurrence.note(point));
        assert!(points.iter().all(|&point| recurrence.is_known(point)) && recurrence.points.len() == 3);
        (0..KEPT as u64).for_each(|in_use| recurrence.note(Point { requested: 1, in_use }));
        assert!(points.iter().all(|&point| !recurrence.is_known(point)), "the oldest are forgotten");
        assert_eq!(recurrence.points.len(), KEPT);
    }
}
