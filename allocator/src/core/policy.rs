//! The policy of mapped memory: what is bought, moved or asked for a request that no free block
//! serves. Pure functions of facts.
//!
//! Memory is worth time only when it is scarce:
//! * **Scarce or not**: there is room while the device and the limit can give an eighth of the peak
//!   of use. What the device has left counts as enough until it is known.
//! * **Slots**: where there is room, memory is bought and moved in aligned slots, which one frame
//!   fills, and for large blocks in frames of several: a frame costs about the same driver time at
//!   any size. Where memory is scarce, it comes in granules.
//! * **Rent or buy**: memory is bought rather than moved until the peak of use, a share of it, and a
//!   *credit* are held. Moving is rent: each frame that moves while there is room raises the credit,
//!   so what moves again and again is bought in the end. Giving memory back clears it.
//! * **Waiting**: no stream and no host waits to save memory, only before a request is refused
//!   (`recovery/ladder.rs`). With `cross_stream:wait`, streams wait for each other earlier.
//! * **Questions**: the device is asked how far it got where that may save buying. Events that make
//!   such answers better are recorded ahead of need, at most one for 100 allocations.
//! * **Ahead of need**, where there is room, a small share of what is held is taken with each
//!   purchase or move.
//!
//! The *peak of use* is the most bytes that were live, or that no stream could use yet although
//! they were free, at one time. Figures: docs/notes/2026-11-30-rent-or-buy.md.

/// What memory is worth in driver time: a point between holding little and making few calls.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Memory is bought rather than moved until the peak of use, that peak divided by this, and the
    /// credit are held.
    buy_share: u64,
    /// Memory is taken ahead of need until as much more is held, with this share.
    ahead_share: u64,
    /// Bytes of slots: the least and the most.
    slot: (u64, u64),
    /// Slots of the largest frames.
    slots_of_frame: u64,
    /// The credit once as much memory moved as the peak of use has: that peak divided by this. `None`
    /// for no credit.
    credit_share: Option<u64>,
}

impl Weights {
    /// Few driver calls.
    pub(crate) const TIME: &Weights = &Weights {
        buy_share: 48,
        ahead_share: 32,
        slot: (32 << 20, 64 << 20),
        slots_of_frame: 4,
        credit_share: Some(24),
    };
    /// Little memory: for those who share a device.
    pub(crate) const MEMORY: &Weights =
        &Weights { buy_share: 96, ahead_share: 48, slot: (0, 16 << 20), slots_of_frame: 1, credit_share: None };

    /// Bytes of the largest slots.
    pub(crate) fn slot_most(&self) -> u64 {
        self.slot.1
    }
}

/// There is room while the device and the limit can give the peak of use divided by this.
const ROOM_SHARE: u64 = 8;
/// Slots have the peak of use divided by this.
pub(crate) const SLOT_SHARE: u64 = 256;
/// Slots have at most what is left divided by this.
const SLOT_LEFT_SHARE: u64 = 768;
/// Frames fill several slots while this many times the peak of use is left.
const LARGE_FRAMES_LEFT: u64 = 2;
/// The credit is at most what is left divided by this.
const CREDIT_LEFT_SHARE: u64 = 4;
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
    pub(crate) weights: &'static Weights,
    /// The peak of use, this request included.
    pub(crate) peak: u64,
    /// Bytes held from the device, and those that threads are taking just now.
    pub(crate) held: u64,
    /// Bytes that the device and the limit can still give, as far as that is known.
    pub(crate) left: u64,
    /// Frames that moved while there was room, since memory last went back.
    pub(crate) moves: u64,
}

impl Facts {
    /// True unless memory is scarce.
    pub(crate) fn has_room(&self) -> bool {
        self.left >= self.peak / ROOM_SHARE
    }

    /// True if `more` bytes are bought although free memory might move.
    pub(crate) fn buys_rather_than_moves(&self, more: u64) -> bool {
        more <= self.left && self.has_room() && self.is_within(more, self.weights.buy_share)
    }

    /// Bytes to take beyond a need of `more`.
    pub(crate) fn ahead(&self, more: u64) -> u64 {
        if self.has_room() && self.is_within(more, self.weights.ahead_share) { self.held / AHEAD_SHARE } else { 0 }
    }

    /// Bytes of the slots that a block is given memory in, and of the largest frames that are made
    /// for it: powers of two. Slots have at most `most` bytes, unless a granule has more. `given` is
    /// the configuration's size of both, if it has one.
    pub(crate) fn slot_and_frame(&self, block: u64, most: u64, granule: u64, given: Option<u64>) -> (u64, u64) {
        let power = |bytes: u64| 1 << bytes.max(granule).ilog2();
        let slot = power(given.unwrap_or_else(|| self.usual_slot().min(most).min(self.left / SLOT_LEFT_SHARE)));
        // Whole slots are no reason to refuse a request.
        if !self.has_room() || self.left < block.saturating_add(2 * slot) {
            return (granule, granule);
        }
        let several = given.is_none() && self.left / LARGE_FRAMES_LEFT >= self.peak;
        let frame = if several { power(block.min(slot * self.weights.slots_of_frame)) } else { slot };
        (slot, frame.max(slot))
    }

    fn usual_slot(&self) -> u64 {
        let (least, most) = self.weights.slot;
        (self.peak / SLOT_SHARE).clamp(least, most)
    }

    /// True if no more than the peak of use, a share of it, and the credit would be held.
    fn is_within(&self, more: u64, share: u64) -> bool {
        self.held.saturating_add(more) <= self.peak.saturating_add(self.peak / share).saturating_add(self.credit())
    }

    /// Bytes that are bought in addition because as many moved: with m for the memory that moved,
    /// relative to the peak, the peak times the lesser of m³ and m, divided by `credit_share`. A frame
    /// counts as a slot, whatever its size, as it costs the same.
    fn credit(&self) -> u64 {
        let Some(share) = self.weights.credit_share else { return 0 };
        let (peak, moved) = (self.peak.max(1), self.moves.saturating_mul(self.usual_slot()));
        // In 1024ths, as bytes would overflow.
        let relative = (u128::from(moved.min(peak)) << 10) / u128::from(peak);
        let credit = (u128::from(moved) * relative * relative / u128::from(share)) >> 20;
        u64::try_from(credit).unwrap_or(u64::MAX).min(self.left / CREDIT_LEFT_SHARE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    const GRANULE: u64 = 2 * MIB;
    /// A program whose peak is 9600 MiB, all of it held.
    const ROOM: Facts = Facts { weights: Weights::TIME, peak: 9600 * MIB, held: 9600 * MIB, left: u64::MAX, moves: 0 };

    #[test]
    fn memory_is_bought_up_to_a_bound_unless_little_is_left() {
        assert!(ROOM.buys_rather_than_moves(200 * MIB) && !ROOM.buys_rather_than_moves(202 * MIB));
        assert!(!Facts { left: 1199 * MIB, ..ROOM }.buys_rather_than_moves(2 * MIB));
        let empty = Facts { peak: 96 * MIB, held: 0, left: 94 * MIB, ..ROOM };
        assert!(empty.buys_rather_than_moves(94 * MIB) && !empty.buys_rather_than_moves(96 * MIB));
        assert!(!Facts { weights: Weights::MEMORY, ..ROOM }.buys_rather_than_moves(102 * MIB));
    }

    #[test]
    fn what_moves_again_and_again_is_bought() {
        // Slots have 37.5 MiB, so as much memory moved as the peak with 256 of them.
        let credit = |facts: Facts| facts.credit() / MIB;
        assert_eq!([0, 64, 256, 512].map(|moves| credit(Facts { moves, ..ROOM })), [0, 6, 400, 800]);
        let moved = Facts { moves: 512, ..ROOM };
        assert!(moved.buys_rather_than_moves(1000 * MIB) && !moved.buys_rather_than_moves(1002 * MIB));
        assert_eq!(credit(Facts { left: 2400 * MIB, ..moved }), 600, "a share of what is left");
        assert_eq!(credit(Facts { weights: Weights::MEMORY, ..moved }), 0);
        let _no_overflow = Facts { moves: u64::MAX, peak: u64::MAX, ..ROOM }.credit();
    }

    #[test]
    fn slots_and_frames_are_large_where_there_is_room() {
        let sizes = |facts: Facts, block: u64, most: u64, given: Option<u64>| {
            let (slot, frame) = facts.slot_and_frame(block * MIB, most * MIB, GRANULE, given.map(|mib| mib * MIB));
            (slot / MIB, frame / MIB)
        };
        assert_eq!(sizes(ROOM, 100, 100, None), (32, 64));
        assert_eq!(sizes(ROOM, 1000, 1000, None), (32, 128));
        assert_eq!(sizes(Facts { peak: 64 * GIB, ..ROOM }, 1000, 1000, None), (64, 256));
        assert_eq!(sizes(Facts { left: 15 * GIB, ..ROOM }, 1000, 1000, None), (16, 16), "by what is left");
        assert_eq!(sizes(ROOM, 1, 7, None), (4, 4), "of a small pool");
        assert_eq!(sizes(ROOM, 100, 100, Some(8)), (8, 8), "as configured");
        assert_eq!(sizes(Facts { left: GIB, ..ROOM }, 100, 100, Some(8)), (2, 2), "little is left");
        assert_eq!(sizes(Facts { left: 2 * GIB, ..ROOM }, 2047, 100, None), (2, 2), "whole slots may not fit");
        assert_eq!(sizes(Facts { weights: Weights::MEMORY, ..ROOM }, 1000, 1000, None), (16, 16));
    }

    proptest! {
        #[test]
        fn more_memory_is_never_less_scarce(
            peak: u64, held: u64, left: u64, moves: u64, one: u64, other: u64, block: u64, granule in 21..40_u32,
        ) {
            let (facts, granule) = (Facts { weights: Weights::TIME, peak, held, left, moves }, 1 << granule);
            let (less, more) = (one.min(other), one.max(other));
            prop_assert!(facts.buys_rather_than_moves(less) || !facts.buys_rather_than_moves(more));
            prop_assert!(facts.ahead(less) >= facts.ahead(more));
            prop_assert!(!facts.buys_rather_than_moves(less) || facts.has_room(), "buying leaves room");
            let (slot, frame) = facts.slot_and_frame(block, more, granule, None);
            prop_assert!(slot.is_power_of_two() && frame.is_power_of_two() && granule <= slot && slot <= frame);
            prop_assert!(facts.slot_and_frame(block, less, granule, None).0 <= slot);
            prop_assert!(slot == granule || slot <= left, "whole slots fit");
        }
    }
}
