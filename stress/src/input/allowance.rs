//! How much memory an input may take for what was read of it.

use super::error::Reason;
use super::gzip::Stored;

/// Memory for any input.
const FOR_ANY: usize = 32 << 20;
/// Memory for each byte that is stored. A snapshot takes some 400 bytes for an entry of its history, which is stored in at least ten.
/// Compressed data that was made to could take a hundred times as much.
const FOR_A_STORED_BYTE: usize = 512;
/// Memory for each byte of the content. A snapshot takes 3 to 6; data that was made to takes 100.
const FOR_A_BYTE: usize = 32;

/// Refuses to take more memory than a snapshot would of which `content` bytes were read, and of the file what `stored` tells.
pub(super) fn check(taken: usize, content: u64, stored: &Stored) -> Result<(), Reason> {
    let allowed = |bytes: u64, each: usize| usize::try_from(bytes).unwrap_or(usize::MAX).saturating_mul(each);
    let most = allowed(stored.bytes(), FOR_A_STORED_BYTE).min(allowed(content, FOR_A_BYTE)).saturating_add(FOR_ANY);
    if taken > most { Err(Reason::TooDense { stored: stored.bytes() }) } else { Ok(()) }
}
