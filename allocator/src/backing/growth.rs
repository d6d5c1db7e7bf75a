//! How much a request takes from the device, and how an attempt to take it ended.

use crate::allocator::Allocator;
use crate::core::Core;
use crate::core::limits::Refusal;
use crate::size_class;
use crate::types::{Granted, Request};

/// How an attempt to grow ended.
pub(crate) enum Growth {
    /// The request was served.
    Grown(Granted),
    /// The device, or a limit, does not have that much.
    Refused(Refusal),
}

/// Size of the segment for a request: its own size without caching, where nothing is shared.
pub(crate) fn segment_bytes(allocator: &Allocator, size: u64) -> u64 {
    if allocator.config().no_cache { size } else { size_class::segment_bytes(size) }
}

/// Bytes that the device must give for a request that nothing cached helps to serve.
pub(crate) fn growth_bytes(allocator: &Allocator, core: &Core, request: &Request) -> u64 {
    match core.paged_granule_for(request) {
        Some(granule) => request.size.next_multiple_of(granule),
        None => segment_bytes(allocator, request.size),
    }
}
