//! Numbers that look random and are the same in every run and on every machine.

/// The generator `SplitMix64`.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// A number below `bound`, which must not be 0 (then 0).
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A size from `least` to `most` whose logarithm is uniform.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "sizes are far below 2^52"
    )]
    pub fn size(&mut self, least: u64, most: u64) -> u64 {
        let (ratio, fraction) = (most as f64 / least as f64, (self.bits() >> 11) as f64 / (1_u64 << 53) as f64);
        (least as f64 * ratio.powf(fraction)) as u64
    }
}

/// Numbers that depend on the seed alone.
pub fn numbers(seed: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1), |&x| {
        let x = x ^ (x << 13);
        let x = x ^ (x >> 7);
        Some(x ^ (x << 17))
    })
}

/// Draws numbers from 0 up to an end.
pub fn draws(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |end| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % end
    }
}

/// Bytes that differ from place to place.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    numbers(seed).skip(1).map(|number| number.to_le_bytes()[3]).take(len).collect()
}
