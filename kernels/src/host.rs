//! Host implementations work on pieces of device memory: what they have in common.

use aquifer_device::Result;

/// Bytes, or elements, that are worked on at a time. A multiple of 8.
pub(crate) const CHUNK: usize = 1 << 16;

/// Calls `work` with the start and the length of each piece of `total`, in order.
pub(crate) fn chunks(total: u64, chunk: usize, mut work: impl FnMut(u64, usize) -> Result<()>) -> Result<()> {
    let mut at = 0;
    while at < total {
        let len = usize::try_from(total - at).unwrap_or(usize::MAX).min(chunk);
        work(at, len)?;
        at += len as u64;
    }
    Ok(())
}
