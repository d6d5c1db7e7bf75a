//! The policy of mapped memory: what is bought, moved or asked for a request that no free block
//! serves. Pure functions of facts.
//!
//! Memory is worth time only when it is scarce:
//! * **Scarce or not**: memory is scarce if the device, or the limit, has little left, or if more
//!   than the peak of use and a margin would be held. Otherwise there is room. What the device has
//!   left counts as enough until it is known.
//! * **Frames** that are made are large where there is room, but for small blocks and programs, and
//!   single granules where memory is scarce. A large one is broken only for what no whole frame
//!   serves.
//! * **Moving**: where there is room, memory is bought rather than moved until the peak of use and
//!   a smaller margin is held. Beyond that, free memory that the device is done with moves, then
//!   memory that the request's own stream may use again at once; the rest is bought.
//! * **Waiting**: no stream and no host waits to save memory, only before a request is refused
//!   (`recovery/ladder.rs`). With `cross_stream:wait`, streams wait for each other earlier.
//! * **Questions**: the device is asked how far it got where that may save buying. Events that make
//!   such answers better are recorded ahead of need, at most one for 100 allocations.
//! * **Ahead of need**, where there is room, a small share of what is held is taken with each
//!   purchase or move.
//!
//! The *peak of use* is the most bytes that were live, or that no stream could use yet although
//! they were free, at one time. Figures: docs/notes/2026-11-28-policy.md.

/// Memory is scarce if the device and the limit can give less than the peak of use divided by this.
const LEFT_SHARE: u64 = 8;
/// Memory is scarce if more would be held than the peak of use, and that peak divided by this.
const OVER_SHARE: u64 = 48;
/// Memory is bought rather than moved until the peak of use, and that peak divided by this, is
/// held.
const BUY_SHARE: u64 = 96;
/// Bytes of frames where there is room,
const FRAME: u64 = 16 << 20;
/// or the peak of use divided by this, if that is less.
pub(crate) const FRAME_SHARE: u64 = 256;
/// Bytes held, divided by this, are taken ahead of need.
const AHEAD_SHARE: u64 = 256;
/// Bytes that a stream frees between two events that are recorded ahead of need: bytes held,
/// divided by this.
pub(crate) const EVENT_SHARE: u64 = 64;
/// Allocations for each such event. Counting frees, that is one event for 200 operations.
pub(crate) const EVENT_SPACING: u64 = 100;
/// Such events that are recorded before that many allocations were made.
pub(crate) const EVENTS_AT_START: u64 = 32;

/// What is known when a request needs memory that no free block has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    /// The peak of use, this request included.
    pub(crate) peak: u64,
    /// Bytes held from the device, and those that threads are taking just now.
    pub(crate) held: u64,
    /// Bytes that the device and the limit can still give, as far as that is known.
    pub(crate) left: u64,
}

impl Facts {
    /// True if memory is scarce when `more` bytes are taken from the device.
    pub(crate) fn is_scarce(&self, more: u64) -> bool {
        self.little_is_left() || self.exceeds(more, OVER_SHARE)
    }

    /// True if `more` bytes are bought although free memory might move.
    pub(crate) fn buys_rather_than_moves(&self, more: u64) -> bool {
        more <= self.left && !self.little_is_left() && !self.exceeds(more, BUY_SHARE)
    }

    /// Bytes of the largest frames that are made for a block when `more` bytes are taken. They are
    /// at most half as large as the block: then it has a whole frame, which may move once the block
    /// is free, wherever it begins. `given` is the configuration's size of frames, if it has one.
    pub(crate) fn frame(&self, block: u64, more: u64, granule: u64, given: Option<u64>) -> u64 {
        if self.is_scarce(more) {
            return granule;
        }
        let frame = given.unwrap_or_else(|| FRAME.min(self.peak / FRAME_SHARE).min(block / 2)).max(granule);
        1 << frame.ilog2()
    }

    /// Bytes to take beyond a need of `more`.
    pub(crate) fn ahead(&self, more: u64) -> u64 {
        if self.is_scarce(more) { 0 } else { self.held / AHEAD_SHARE }
    }

    fn little_is_left(&self) -> bool {
        self.left < self.peak / LEFT_SHARE
    }

    /// True if more than the peak of use and a share of it would be held.
    fn exceeds(&self, more: u64, share: u64) -> bool {
        self.held.saturating_add(more) > self.peak.saturating_add(self.peak / share)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const GRANULE: u64 = 2 * MIB;
    /// A program whose peak is 9600 MiB, all of it held.
    const ROOM: Facts = Facts { peak: 9600 * MIB, held: 9600 * MIB, left: u64::MAX };

    #[test]
    fn memory_is_scarce_over_the_peak_and_where_little_is_left() {
        assert!(!ROOM.is_scarce(200 * MIB) && ROOM.is_scarce(202 * MIB));
        assert!(Facts { left: 1199 * MIB, ..ROOM }.is_scarce(0));
        assert!(!Facts { left: 1200 * MIB, ..ROOM }.is_scarce(0));
    }

    #[test]
    fn memory_is_bought_up_to_a_bound_unless_little_is_left() {
        assert!(ROOM.buys_rather_than_moves(100 * MIB) && !ROOM.buys_rather_than_moves(102 * MIB));
        assert!(!Facts { left: 1199 * MIB, ..ROOM }.buys_rather_than_moves(2 * MIB));
        let empty = Facts { peak: 96 * MIB, held: 0, left: 94 * MIB };
        assert!(empty.buys_rather_than_moves(94 * MIB) && !empty.buys_rather_than_moves(96 * MIB));
    }

    #[test]
    fn frames_are_large_where_there_is_room() {
        let block = 100 * MIB;
        assert_eq!(ROOM.frame(block, 0, GRANULE, None), 16 * MIB);
        assert_eq!(ROOM.frame(block, 0, 64 * MIB, None), 64 * MIB, "no less than a granule");
        assert_eq!(ROOM.frame(block, 0, GRANULE, Some(64 * MIB)), 64 * MIB);
        assert_eq!(ROOM.frame(block, 300 * MIB, GRANULE, Some(64 * MIB)), GRANULE);
        assert_eq!(ROOM.frame(15 * MIB, 0, GRANULE, None), 4 * MIB);
        let small = Facts { peak: 1500 * MIB, held: 0, left: u64::MAX };
        assert_eq!(small.frame(block, 0, GRANULE, None), 4 * MIB);
        assert_eq!(Facts { peak: 1, ..small }.frame(block, 0, GRANULE, None), GRANULE);
    }

    proptest! {
        #[test]
        fn more_memory_is_never_less_scarce(
            peak: u64, held: u64, left: u64, one: u64, other: u64, block: u64, granule in 21..40_u32,
        ) {
            let (facts, granule) = (Facts { peak, held, left }, 1 << granule);
            let (less, more) = (one.min(other), one.max(other));
            prop_assert!(facts.is_scarce(more) || !facts.is_scarce(less));
            prop_assert!(facts.buys_rather_than_moves(less) || !facts.buys_rather_than_moves(more));
            prop_assert!(!facts.is_scarce(less) || facts.ahead(less) == 0);
            prop_assert!(!facts.buys_rather_than_moves(less) || !facts.is_scarce(less), "buying leaves room");
            let frame = facts.frame(block, less, granule, None);
            prop_assert!(frame.is_power_of_two() && frame >= granule);
            prop_assert!(facts.frame(block, more, granule, None) <= frame);
        }
    }
}
