//! Vector clocks.
//!
//! A *line* is a sequence of operations that are ordered among themselves: the work of a stream, or
//! of a captured stream within a graph. An operation is a line and a number; numbers grow along
//! each line. A clock holds, for each line, the number up to which operations happened before.

use std::collections::BTreeMap;

/// The number of a line.
pub(crate) type Line = u32;

/// For each line, the number up to which its operations happened before. 0 where there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(BTreeMap<Line, u64>);

impl Clock {
    /// Whether the operation `number` of `line` happened before.
    pub(crate) fn covers(&self, line: Line, number: u64) -> bool {
        self.until(line) >= number
    }

    /// Adds the operations of `line` up to `number`.
    pub(crate) fn advance(&mut self, line: Line, number: u64) {
        let until = self.0.entry(line).or_default();
        *until = number.max(*until);
    }

    /// Adds all that happened before `other`.
    pub(crate) fn join(&mut self, other: &Clock) {
        for (&line, &number) in &other.0 {
            self.advance(line, number);
        }
    }

    /// The number up to which operations of `line` happened before.
    pub(crate) fn until(&self, line: Line) -> u64 {
        self.0.get(&line).copied().unwrap_or_default()
    }

    /// The lines and their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Line, u64)> {
        self.0.iter().map(|(&line, &number)| (line, number))
    }
}

/// The operations that the host knows to be complete. They happened before everything that the host
/// does or enqueues from now on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    /// All operations up to this number, whatever their line.
    floor: u64,
    clock: Clock,
}

impl Known {
    pub(crate) fn covers(&self, line: Line, number: u64) -> bool {
        number <= self.floor || self.clock.covers(line, number)
    }

    /// Learns that what happened before `clock` is complete.
    pub(crate) fn learn(&mut self, clock: &Clock) {
        self.clock.join(clock);
    }

    /// Learns that all operations up to `number` are complete.
    pub(crate) fn learn_all(&mut self, number: u64) {
        *self = Known { floor: number, clock: Clock::default() };
    }

    /// Drops from `clock` what is known anyway.
    pub(crate) fn prune(&self, clock: &mut Clock) {
        clock.0.retain(|&line, number| !self.covers(line, *number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_holds_what_either_clock_holds() {
        let (mut one, mut two) = (Clock::default(), Clock::default());
        one.advance(0, 5);
        one.advance(1, 2);
        two.advance(1, 3);
        one.join(&two);
        assert!(one.covers(0, 5) && one.covers(1, 3) && !one.covers(1, 4) && !one.covers(2, 1));
    }

    #[test]
    fn known_operations_leave_a_clock() {
        let (mut known, mut clock) = (Known::default(), Clock::default());
        clock.advance(0, 5);
        clock.advance(1, 9);
        known.learn_all(5);
        known.prune(&mut clock);
        assert!(known.covers(7, 5) && !known.covers(1, 9) && clock.iter().eq([(1, 9)]));
    }
}
