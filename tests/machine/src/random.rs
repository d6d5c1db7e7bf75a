//! Numbers that look random and are the same in every run and on every machine.

pub use aquifer_trace::Random;

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
