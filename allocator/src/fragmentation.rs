//! Measures of fragmentation.

/// The share of free memory that a request of `size` bytes cannot use: 0 when every free block would serve it, 1 when none
/// would or nothing is free.
///
/// Source: the *unusable free space index*, M. Gorman and A. Whitcroft, "The What, The Why and the Where To of
/// Anti-Fragmentation", Ottawa Linux Symposium 2006; here for any size instead of powers of two.
#[expect(clippy::cast_precision_loss, reason = "a ratio")]
pub fn unusable_index(free_blocks: impl Iterator<Item = u64>, size: u64) -> f64 {
    let (free, usable) = free_blocks
        .fold((0, 0), |(free, usable), block| (free + block, usable + if block >= size { block } else { 0 }));
    if free == 0 { 1.0 } else { (free - usable) as f64 / free as f64 }
}
