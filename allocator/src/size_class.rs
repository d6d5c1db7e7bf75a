//! Size rules: rounding of requests, pools, segment sizes, splitting, and which block may serve
//! which request.
//!
//! This is pure arithmetic with PyTorch's constants and rules, so that reserved bytes can be
//! compared with PyTorch's. It neither divides nor allocates; everything that depends on options is
//! prepared once, in [`SizeClasses::new`].
//!
//! All sizes are bytes.

use crate::config::Config;

/// The size of the smallest block; the size of every block is a multiple of it.
pub const MIN_BLOCK: u64 = 512;
/// The largest rounded request that belongs to the small pool.
pub const SMALL_SIZE: u64 = 1 << 20;
/// The size of a segment of the small pool.
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// The smallest rounded request that gets a segment of its own; those between [`SMALL_SIZE`] and
/// this share segments of [`Config::large_segment_size`].
pub const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// The default of [`Config::large_segment_size`].
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// What the size of a segment for a request of at least [`MIN_LARGE_ALLOC`] is rounded up to.
pub const ROUND_LARGE: u64 = 2 << 20;
/// The first request size that is refused before anything is tried: 2^60 bytes.
pub const REQUEST_LIMIT: u64 = 1 << 60;

/// The pool that a request belongs to. Pools share no segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolKind {
    /// Rounded requests of at most [`SMALL_SIZE`].
    Small,
    /// All others.
    Large,
}

/// The size rules of one configuration.
///
/// Arguments called `rounded` are results of [`SizeClasses::round`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SizeClasses {
    large_segment: u64,
    /// `u64::MAX` if no block is oversize.
    max_split_size: u64,
    max_non_split_rounding: u64,
    /// The least rest for which a block is split, by [`PoolKind`].
    least_rest: [u64; 2],
    /// The requests from which on none is split, by [`PoolKind`].
    no_split_from: [u64; 2],
    /// Whether any entry of `roundup` is in force.
    rounds_up: bool,
    /// The binary logarithm of the divisions per interval; 0 where rounding up is off.
    roundup: [u8; 16],
}

impl Default for SizeClasses {
    fn default() -> SizeClasses {
        SizeClasses::new(&Config::default())
    }
}

impl SizeClasses {
    /// The same for memory that can be moved: every block is split, however little is left, and
    /// none is oversize.
    #[must_use]
    pub fn paged(self) -> SizeClasses {
        SizeClasses { least_rest: [MIN_BLOCK; 2], no_split_from: [u64::MAX; 2], max_split_size: u64::MAX, ..self }
    }

    /// The rules for a configuration that is [valid](Config::validate).
    pub fn new(config: &Config) -> SizeClasses {
        let roundup = config.roundup_power2_divisions.map(shift_of);
        let max_split_size = config.max_split_size.unwrap_or(u64::MAX);
        SizeClasses {
            large_segment: config.large_segment_size,
            max_split_size,
            least_rest: [MIN_BLOCK, SMALL_SIZE + 1],
            no_split_from: [u64::MAX, max_split_size],
            max_non_split_rounding: config.max_non_split_rounding.unwrap_or(config.large_segment_size),
            rounds_up: roundup != [0; 16],
            roundup,
        }
    }

    /// The size of the block that a request needs: a multiple of [`MIN_BLOCK`] that is at least the
    /// request and at least [`MIN_BLOCK`].
    ///
    /// The request must be smaller than [`REQUEST_LIMIT`]; see [`SizeClasses::round_checked`].
    #[inline]
    pub fn round(&self, requested: u64) -> u64 {
        debug_assert!(requested < REQUEST_LIMIT, "a request of {requested} bytes was not refused");
        if self.rounds_up { self.round_divided(requested) } else { round_to_block(requested) }
    }

    /// As [`SizeClasses::round`], or `None` for a request of at least [`REQUEST_LIMIT`].
    #[inline]
    pub fn round_checked(&self, requested: u64) -> Option<u64> {
        (requested < REQUEST_LIMIT).then(|| self.round(requested))
    }

    /// Rounding with `roundup_power2_divisions`.
    fn round_divided(&self, requested: u64) -> u64 {
        let log2 = requested.max(1).ilog2();
        let interval = log2.saturating_sub(SMALL_SIZE.ilog2()).min(15);
        let shift = u32::from(self.roundup[interval as usize]);
        if shift == 0 || requested <= MIN_BLOCK << shift {
            return round_to_block(requested);
        }
        // Steps between the powers of two around the request. As the request is larger than 512 <<
        // shift, a step is at least 512, so that the result is a whole number of blocks.
        let step = (1_u64 << log2) >> shift;
        (requested + (step - 1)) & !(step - 1)
    }

    /// The pool of a request.
    #[inline]
    pub fn pool(&self, rounded: u64) -> PoolKind {
        if rounded <= SMALL_SIZE { PoolKind::Small } else { PoolKind::Large }
    }

    /// The size of the segment that is taken from the device for a request that no cached block
    /// serves.
    #[inline]
    pub fn segment_bytes(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_SIZE {
            SMALL_SEGMENT
        } else if rounded < MIN_LARGE_ALLOC {
            self.large_segment
        } else {
            rounded.saturating_add(ROUND_LARGE - 1) & !(ROUND_LARGE - 1)
        }
    }

    /// Whether a block that serves a request is split, its rest staying free.
    ///
    /// In the small pool a rest of one smallest block is enough. In the large pool the rest must be
    /// larger than [`SMALL_SIZE`], and a request of at least `max_split_size` never splits.
    #[inline]
    pub fn should_split(&self, kind: PoolKind, block_bytes: u64, rounded: u64) -> bool {
        let rest = block_bytes.saturating_sub(rounded);
        // Looked up, because requests come from one pool and the other as they like: a branch would
        // be a guess.
        (rest >= self.least_rest[kind as usize]) & (rounded < self.no_split_from[kind as usize])
    }

    /// Whether a block or a request is oversize: at least `max_split_size`.
    #[inline]
    pub fn is_oversize(&self, bytes: u64) -> bool {
        bytes >= self.max_split_size
    }

    /// The size from which on blocks are oversize; `None` if there is none.
    pub fn max_split_size(&self) -> Option<u64> {
        (self.max_split_size != u64::MAX).then_some(self.max_split_size)
    }

    /// Whether a free block may serve a request. It must be large enough. An oversize block serves
    /// only oversize requests, and an oversize request takes only a block that is less than
    /// `max_non_split_rounding` larger.
    ///
    /// Blocks of ascending size that are large enough may serve up to some size and none beyond it,
    /// so the smallest one that is large enough decides for all.
    #[inline]
    pub fn fits(&self, block_bytes: u64, rounded: u64) -> bool {
        if block_bytes < rounded {
            return false;
        }
        if rounded < self.max_split_size {
            block_bytes < self.max_split_size
        } else {
            block_bytes - rounded < self.max_non_split_rounding
        }
    }
}

/// The next multiple of [`MIN_BLOCK`], at least one.
#[inline]
fn round_to_block(requested: u64) -> u64 {
    (requested.max(1) + (MIN_BLOCK - 1)) & !(MIN_BLOCK - 1)
}

/// The binary logarithm of a number of divisions; 0 if it rounds no request up.
fn shift_of(divisions: u64) -> u8 {
    // With so many divisions only requests that are refused anyway would be rounded up.
    let useless = !divisions.is_power_of_two() || divisions >= REQUEST_LIMIT / MIN_BLOCK;
    // A binary logarithm of a `u64` is at most 63.
    if useless { 0 } else { u8::try_from(divisions.ilog2()).unwrap_or(0) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn classes(options: &str) -> SizeClasses {
        SizeClasses::new(&Config::parse(options).unwrap())
    }

    #[test]
    fn rounding_without_divisions() {
        let classes = classes("");
        let vectors = [
            (0, 512),
            (1, 512),
            (512, 512),
            (513, 1024),
            (MIB, MIB),
            (MIB + 1, MIB + 512),
            (REQUEST_LIMIT - 1, REQUEST_LIMIT),
        ];
        for (requested, rounded) in vectors {
            assert_eq!(classes.round(requested), rounded, "{requested}");
        }
    }

    #[test]
    fn rounding_with_four_divisions() {
        let classes = classes("roundup_power2_divisions:4");
        let vectors = [
            (0, 512),
            // Up to 512 * 4 bytes the divisions have no effect.
            (1200, 1536),
            (2048, 2048),
            (2049, 2560),
            (120_000, 128 * KIB),
            (84 * MIB, 96 * MIB),
            (96 * MIB + 1, 112 * MIB),
            (128 * MIB, 128 * MIB),
            (REQUEST_LIMIT - 1, REQUEST_LIMIT),
        ];
        for (requested, rounded) in vectors {
            assert_eq!(classes.round(requested), rounded, "{requested}");
        }
    }

    #[test]
    fn rounding_by_interval() {
        let classes = classes("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]");
        let vectors = [
            (MIB + 1, MIB + 128 * KIB),
            (84 * MIB, 88 * MIB),
            (128 * MIB - 1, 128 * MIB),
            (400 * MIB, 512 * MIB),
            (300 * MIB, 384 * MIB),
            // One division is the same as none.
            (GIB + 1, GIB + 512),
            (100 * GIB + 1, 100 * GIB + 512),
        ];
        for (requested, rounded) in vectors {
            assert_eq!(classes.round(requested), rounded, "{requested}");
        }
    }

    #[test]
    fn the_last_interval_has_no_upper_end() {
        let classes = classes("roundup_power2_divisions:[32768:2]");
        assert_eq!(classes.round(33 * GIB), 48 * GIB);
        assert_eq!(classes.round(65 * GIB), 96 * GIB);
        assert_eq!(classes.round(1025 * GIB), 1536 * GIB);
    }

    #[test]
    fn too_many_divisions_round_to_blocks() {
        for shift in [50, 51, 52, 63] {
            let classes = classes(&format!("roundup_power2_divisions:{}", 1_u64 << shift));
            assert_eq!(classes.round(84 * MIB + 1), 84 * MIB + 512);
            assert_eq!(classes.round(REQUEST_LIMIT - 1), REQUEST_LIMIT);
        }
    }

    #[test]
    fn requests_from_the_limit_on_are_refused() {
        for options in ["", "roundup_power2_divisions:4"] {
            let classes = classes(options);
            assert_eq!(classes.round_checked(1), Some(512));
            assert_eq!(classes.round_checked(REQUEST_LIMIT - 1), Some(REQUEST_LIMIT));
            assert_eq!(classes.round_checked(REQUEST_LIMIT), None);
            assert_eq!(classes.round_checked(u64::MAX), None);
        }
    }

    #[test]
    fn pools_and_segments() {
        let default = classes("");
        let larger = classes("large_segment_size_mb:64");
        let vectors = [
            (512, PoolKind::Small, 2 * MIB, 2 * MIB),
            (MIB, PoolKind::Small, 2 * MIB, 2 * MIB),
            (MIB + 512, PoolKind::Large, 20 * MIB, 64 * MIB),
            (10 * MIB - 512, PoolKind::Large, 20 * MIB, 64 * MIB),
            (10 * MIB, PoolKind::Large, 10 * MIB, 10 * MIB),
            (10 * MIB + 512, PoolKind::Large, 12 * MIB, 12 * MIB),
            (129 * MIB + 512, PoolKind::Large, 130 * MIB, 130 * MIB),
        ];
        for (rounded, pool, segment, with_larger) in vectors {
            assert_eq!(default.pool(rounded), pool, "{rounded}");
            assert_eq!(default.segment_bytes(rounded), segment, "{rounded}");
            assert_eq!(larger.segment_bytes(rounded), with_larger, "{rounded}");
        }
    }

    #[test]
    fn splitting() {
        let default = classes("");
        assert!(default.should_split(PoolKind::Small, 1024, 512));
        assert!(!default.should_split(PoolKind::Small, 512, 512));
        assert!(!default.should_split(PoolKind::Large, 20 * MIB, 19 * MIB));
        assert!(default.should_split(PoolKind::Large, 20 * MIB, 19 * MIB - 512));
        assert!(!default.should_split(PoolKind::Large, MIB, 2 * MIB));

        let limited = classes("max_split_size_mb:40");
        assert!(limited.should_split(PoolKind::Large, 60 * MIB, 40 * MIB - 512));
        assert!(!limited.should_split(PoolKind::Large, 60 * MIB, 40 * MIB));
    }

    #[test]
    fn fitting_without_a_split_limit() {
        let classes = classes("");
        assert_eq!(classes.max_split_size(), None);
        assert!(!classes.is_oversize(REQUEST_LIMIT));
        assert!(classes.fits(512, 512));
        assert!(classes.fits(100 * GIB, 512));
        assert!(!classes.fits(512, 1024));
    }

    #[test]
    fn fitting_with_a_split_limit() {
        let default_rounding = classes("max_split_size_mb:40");
        assert_eq!(default_rounding.max_split_size(), Some(40 * MIB));
        assert!(default_rounding.is_oversize(40 * MIB));
        assert!(!default_rounding.is_oversize(40 * MIB - 512));
        // Oversize blocks are not for small requests.
        assert!(default_rounding.fits(40 * MIB - 512, 12 * MIB));
        assert!(!default_rounding.fits(40 * MIB, 12 * MIB));
        // Oversize requests take what is less than 20 MiB larger.
        assert!(default_rounding.fits(60 * MIB - 512, 40 * MIB));
        assert!(!default_rounding.fits(60 * MIB, 40 * MIB));

        let own_rounding = classes("max_split_size_mb:40,max_non_split_rounding_mb:30");
        assert!(own_rounding.fits(70 * MIB - 512, 40 * MIB));
        assert!(!own_rounding.fits(70 * MIB, 40 * MIB));

        // The default of the rounding follows the segment size.
        let follows = classes("large_segment_size_mb:30,max_split_size_mb:40");
        assert!(follows.fits(70 * MIB - 512, 40 * MIB));
        assert!(!follows.fits(70 * MIB, 40 * MIB));
    }

    /// Rounding by search, with divisions: the smallest multiple of the step that is not below the
    /// request.
    fn slow_round(requested: u64, divisions: &[u64; 16]) -> u64 {
        let in_blocks = requested.div_ceil(512).max(1) * 512;
        let mut interval = 0;
        while interval < 15 && requested >= MIB << (interval + 1) {
            interval += 1;
        }
        let d = divisions[interval];
        if d <= 1 || u128::from(requested) <= 512 * u128::from(d) {
            return in_blocks;
        }
        let mut power = 1;
        while power * 2 <= requested {
            power *= 2;
        }
        let step = power / d;
        (0..=d.min(1 << 12)).map(|k| power + k * step).find(|size| *size >= requested).unwrap()
    }

    fn requests() -> impl Strategy<Value = u64> {
        let near_powers = (0_u32..60, -3_i64..=3).prop_map(|(log2, off)| (1_u64 << log2).saturating_add_signed(off));
        prop_oneof![0..4096_u64, 0..64 * MIB, 0..REQUEST_LIMIT, near_powers]
            .prop_map(|requested| requested.min(REQUEST_LIMIT - 1))
    }

    fn all_divisions() -> impl Strategy<Value = [u64; 16]> {
        let one = prop_oneof![Just(0), (0_u32..12).prop_map(|log2| 1_u64 << log2)];
        prop::array::uniform16(one)
    }

    proptest! {
        #[test]
        fn rounding_is_the_slow_formula(requested in requests(), divisions in all_divisions()) {
            let config = Config { roundup_power2_divisions: divisions, ..Config::default() };
            prop_assert_eq!(SizeClasses::new(&config).round(requested), slow_round(requested, &divisions));
            let plain = SizeClasses::new(&Config::default()).round(requested);
            prop_assert_eq!(plain, slow_round(requested, &[0; 16]));
        }

        #[test]
        fn rounding_is_monotonic_and_whole_blocks(a in requests(), b in requests(), divisions in all_divisions()) {
            let classes = SizeClasses::new(&Config { roundup_power2_divisions: divisions, ..Config::default() });
            let (low, high) = (a.min(b), a.max(b));
            prop_assert!(classes.round(low) <= classes.round(high));
            for requested in [low, high] {
                let rounded = classes.round(requested);
                prop_assert!(rounded >= requested.max(MIN_BLOCK));
                prop_assert!(rounded <= requested.saturating_mul(2).max(MIN_BLOCK));
                prop_assert_eq!(rounded % MIN_BLOCK, 0);
                prop_assert!(classes.segment_bytes(rounded) >= rounded);
            }
        }

        #[test]
        fn blocks_that_fit_are_the_smallest_ones(
            rounded in 0..200 * MIB,
            sizes in prop::collection::vec(0..400 * MIB, 1..20),
            limit in prop::option::of(20..100_u64),
        ) {
            let config = Config { max_split_size: limit.map(|mib| mib * MIB), ..Config::default() };
            let classes = SizeClasses::new(&config);
            let mut sizes = sizes;
            sizes.sort_unstable();
            let smallest = sizes.iter().find(|bytes| **bytes >= rounded);
            let any = sizes.iter().any(|bytes| classes.fits(*bytes, rounded));
            prop_assert_eq!(any, smallest.is_some_and(|bytes| classes.fits(*bytes, rounded)));
        }
    }
}
