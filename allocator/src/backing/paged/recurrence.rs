//! Recurrence: whether a program returns to points at which memory moved before.
//!
//! A program that repeats its steps exactly asks for the same number of bytes while the same number
//! of bytes is in use, again and again; one whose sizes vary does so only in parts. So a *point* of
//! the program is identified by these two numbers, and the points at which memory had to move are
//! remembered. A program *recurs* if many of its latest points were known: one point may be met
//! again by chance. Points are read and written only when memory has to move, under the shared
//! state's lock. A bounded number is kept; the oldest are dropped first.

use std::collections::VecDeque;

/// Number of points that are remembered: enough for some iterations of a large program.
const KEPT: usize = 512;

/// A program recurs if at least one in so many of its latest points, the present one included, was
/// known. In the first repetition of a program, memory still moves at some points for the first
/// time.
const ONE_IN: u32 = 3;

/// The points of a program at which memory had to move lately.
#[derive(Debug, Default)]
pub(crate) struct Recurrence {
    points: VecDeque<Point>,
    /// A bit for each of the latest 32 points of a settled program, the latest lowest: whether it
    /// was known.
    known: u32,
    /// Number of these points, up to 32.
    latest: u32,
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
    /// True if memory moved at this point before, and if points recur often.
    pub(crate) fn recurs_at(&self, point: Point) -> bool {
        self.is_known(point) && (self.known.count_ones() + 1) * ONE_IN > self.latest
    }

    /// True if memory moved in the program since it does not grow any more.
    pub(crate) fn has_settled(&self) -> bool {
        self.latest > 0
    }

    /// True if all of the latest points were known: the program does nothing new.
    pub(crate) fn repeats(&self) -> bool {
        self.known == u32::MAX
    }

    /// Notes that memory moves at a point. The program is `settled` if it does not grow any more:
    /// only then are points expected to recur.
    pub(crate) fn note(&mut self, point: Point, settled: bool) {
        let is_known = self.is_known(point);
        if settled {
            self.known = self.known << 1 | u32::from(is_known);
            self.latest = (self.latest + 1).min(u32::BITS);
        }
        if is_known {
            return;
        }
        if self.points.len() == KEPT {
            self.points.pop_front();
        }
        self.points.push_back(point);
    }

    fn is_known(&self, point: Point) -> bool {
        self.points.contains(&point)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(in_use: u64) -> Point {
        Point { requested: 1, in_use }
    }

    #[test]
    fn a_point_recurs_until_it_is_forgotten() {
        let mut recurrence = Recurrence::default();
        let points = [(100, 1000), (100, 1001), (101, 1000)].map(|(requested, in_use)| Point { requested, in_use });
        assert!(points.iter().all(|&point| !recurrence.recurs_at(point)));
        points.iter().for_each(|&point| recurrence.note(point, false));
        points.iter().for_each(|&point| recurrence.note(point, false));
        assert!(points.iter().all(|&point| recurrence.recurs_at(point)) && recurrence.points.len() == 3);
        (0..KEPT as u64).for_each(|in_use| recurrence.note(point(in_use), false));
        assert!(points.iter().all(|&point| !recurrence.recurs_at(point)), "the oldest are forgotten");
        assert_eq!(recurrence.points.len(), KEPT);
    }

    #[test]
    fn a_point_that_is_met_again_by_chance_does_not_recur() {
        let mut recurrence = Recurrence::default();
        recurrence.note(point(0), false);
        (1..=2).for_each(|in_use| recurrence.note(point(in_use), true));
        assert!(recurrence.recurs_at(point(0)), "one of three");
        (3..40).for_each(|in_use| recurrence.note(point(in_use), true));
        assert!(!recurrence.recurs_at(point(0)), "one of 33");
        (0..10).for_each(|in_use| recurrence.note(point(in_use), true));
        assert!(recurrence.recurs_at(point(0)) && !recurrence.repeats(), "11 of 33");
        (0..32).for_each(|in_use| recurrence.note(point(in_use), true));
        assert!(recurrence.recurs_at(point(0)) && recurrence.repeats());
        recurrence.note(point(40), true);
        assert!(recurrence.recurs_at(point(0)) && !recurrence.repeats());
    }
}
