//! The simulator's source of chance: SplitMix64, so that one seed is one run on every platform.

/// A deterministic stream of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    /// The stream of `seed`; `purpose` separates streams that must not disturb each other.
    pub(crate) fn new(seed: u64, purpose: u64) -> Self {
        let mut rng = Rng(seed ^ purpose.wrapping_mul(0xd6e8_feb8_6659_fd93));
        rng.next();
        rng
    }

    /// 64 evenly distributed bits.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 when `bound` is 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The bias of a remainder is below 2^-40 for the bounds used here.
        self.next().checked_rem(bound).unwrap_or(0)
    }

    /// True in the fraction `rate` of all calls.
    pub(crate) fn chance(&mut self, rate: f64) -> bool {
        // 53 bits make every representable fraction of a double in [0, 1).
        ((self.next() >> 11) as f64) < rate * (1u64 << 53) as f64
    }
}
