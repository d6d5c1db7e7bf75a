//! Helpers of tests.

use std::time::Duration;

use super::Transfer;

/// The number of looks, a millisecond apart.
const LOOKS: u32 = 5000;

/// Asserts that no pinned memory is in use except for the staging ring's. A thread that
/// extends the ring has memory for a moment that the ring does not count yet.
pub(crate) fn assert_unused(transfer: &Transfer) {
    let in_use = || {
        transfer.pinned().empty_cache().unwrap();
        let ring = transfer.staging_stats();
        transfer.pinned().stats().active_bytes.current.abs_diff(ring.chunks * ring.chunk_bytes)
    };
    for _ in 0..LOOKS {
        if in_use() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{} bytes of pinned memory are in use", in_use());
}
