//! Vector clocks.
//!
//! A *line* is a sequence of operations that are ordered among themselves: the work of a stream, or
//! of a captured stream within a graph. An operation is a line and a number; numbers are unique and
//! grow in the order of the calls. A clock tells which operations happened before something: for
//! each line those up to a number.

use std::collections::BTreeMap;

/// The number of a line.
pub(crate) type Line = u32;

/// For each line, the number up to which its operations happened before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The number for lines that are not listed, and the least for those that are.
    floor: u64,
    lines: BTreeMap<Line, u64>,
}

impl Clock {
    /// The clock of something that all operations up to `number` happened before.
    pub(crate) fn all(number: u64) -> Clock {
        Clock { floor: number, lines: BTreeMap::new() }
    }

    /// The number up to which operations of `line` happened before.
    pub(crate) fn until(&self, line: Line) -> u64 {
        self.lines.get(&line).copied().unwrap_or_default().max(self.floor)
    }

    /// Whether the operation `number` of `line` happened before.
    pub(crate) fn covers(&self, line: Line, number: u64) -> bool {
        self.until(line) >= number
    }

    /// Adds the operations of `line` up to `number`.
    pub(crate) fn advance(&mut self, line: Line, number: u64) {
        if !self.covers(line, number) {
            self.lines.insert(line, number);
        }
    }

    /// Adds all that happened before `other`.
    pub(crate) fn join(&mut self, other: &Clock) {
        if other.floor > self.floor {
            self.floor = other.floor;
            self.lines.retain(|_, number| *number > other.floor);
        }
        for (line, number) in other.lines() {
            self.advance(line, number);
        }
    }

    /// The lines that are listed, with their numbers.
    pub(crate) fn lines(&self) -> impl Iterator<Item = (Line, u64)> {
        self.lines.iter().map(|(&line, &number)| (line, number))
    }

    /// Drops what `known` holds too.
    pub(crate) fn prune(&mut self, known: &Clock) {
        self.lines.retain(|&line, number| !known.covers(line, *number));
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
        one.join(&Clock::all(4));
        assert!(one.covers(0, 5) && one.covers(1, 4) && one.covers(2, 4) && !one.covers(1, 5));
        assert!(one.lines().eq([(0, 5)]));
    }

    #[test]
    fn known_operations_leave_a_clock() {
        let mut clock = Clock::default();
        clock.advance(0, 5);
        clock.advance(1, 9);
        clock.prune(&Clock::all(5));
        assert!(clock.lines().eq([(1, 9)]));
    }
}
