//! Size classes: eight for each doubling, so that a block is less than an eighth, or less than 512
//! bytes, larger than the request.
//!
//! Up to 4 KiB classes are multiples of 512 bytes. Those from 32 KiB on are whole pages, those from
//! 16 MiB on multiples of 2 MiB.

/// The smallest block, and the unit of all blocks, in bytes.
pub(super) const UNIT: u64 = 512;
/// A page in bytes: the alignment of slabs, and of blocks of at least [`PAGED`] bytes.
pub(super) const PAGE: u64 = 4096;
/// Classes from this many bytes on are multiples of a page.
pub(super) const PAGED: u64 = 8 * PAGE;
/// The unit of slabs in bytes, where the limit allows it.
pub(super) const SLAB: u64 = 2 << 20;

/// The smallest class of at least `bytes` bytes; `None` when it cannot be addressed.
pub(super) fn round_up(bytes: u64) -> Option<u64> {
    bytes.max(1).checked_next_multiple_of(step(bytes)).filter(|&class| isize::try_from(class).is_ok())
}

/// The distance between the classes around `bytes`.
fn step(bytes: u64) -> u64 {
    let doubling = bytes.saturating_sub(1).max(PAGE).ilog2();
    (1 << doubling) / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_wastes_less_than_an_eighth() {
        let sizes =
            (1..100_000).chain((17..46).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1, (3 << bit) / 2 + 1]));
        for bytes in sizes {
            let class = round_up(bytes).unwrap();
            assert_eq!((round_up(class), class % UNIT), (Some(class), 0), "{bytes}");
            assert!(class >= bytes && class - bytes < UNIT.max(bytes / 8 + 1), "{bytes} in {class}");
            assert!(class < PAGED || class.is_multiple_of(PAGE), "{class}");
            assert!(class < 16 << 20 || class.is_multiple_of(SLAB), "{class}");
        }
    }

    #[test]
    fn classes_of_sizes_that_powers_of_two_double() {
        assert_eq!(round_up(129 * (1 << 20) + (1 << 19)), Some(144 << 20));
        assert_eq!(round_up(10 * 1024 * 4), Some(40_960));
        assert_eq!(round_up(80_000_000), Some(80 << 20));
        assert_eq!(round_up(5_000_000_000), Some(5 << 30));
        assert_eq!(round_up(0), Some(UNIT));
        assert_eq!(round_up(u64::MAX), None);
    }
}
