//! Garbage collection by age: once much of the limit is in use, segments that have not been used
//! for long are released.
//!
//! As in PyTorch, `garbage_collection_threshold` is a share of the limit. Without a limit it is a
//! share of the device's memory, unlike in PyTorch. Only whole, free segments of the large pool are
//! collected. A round releases every segment that is at least as old as the average, rather than
//! stopping at the target, so that rounds are rare.

use crate::allocator::Allocator;
use crate::backing::segments::release_where;
use crate::config::share;
use crate::error::AllocError;
use crate::request::Place;
use crate::state::guard::StateGuard;

const LARGE_POOL: u16 = 1;

/// Releases old segments if the threshold is set and passed.
pub(crate) fn collect_garbage(allocator: &Allocator) -> Result<(), AllocError> {
    let threshold = allocator.config().garbage_collection_threshold;
    if threshold <= 0.0 {
        return Ok(());
    }
    let limit = allocator.limit().unwrap_or(allocator.device().info().total_bytes);
    let threshold_bytes = share(limit, threshold);
    let reserved = allocator.state().shared().reserved;
    let mut target = reserved.saturating_sub(threshold_bytes);
    while target > 0 {
        let released = release_where(allocator, aged)?;
        if released == 0 {
            break;
        }
        target = target.saturating_sub(released);
    }
    Ok(())
}

/// Whole free segments of the large pool that are at least as old as their average.
///
/// Age is counted in searches, by each arena for itself. Here, and when a stream first allocates,
/// all arenas catch up with the busiest one, so that segments of idle streams grow old, too.
fn aged(guard: &mut StateGuard) -> Vec<Place> {
    guard.lock_all();
    guard.synchronize_searches();
    let searches = guard.heaps().map(|heap| heap.pools[LARGE_POOL].searches).max().unwrap_or(0);
    let age = |place: &Place| searches.saturating_sub(guard.region(*place).age_base);
    let segments: Vec<Place> = guard.heaps().flat_map(|heap| guard.whole_segments_in(heap, LARGE_POOL)).collect();
    let total: u128 = segments.iter().map(|place| u128::from(age(place))).sum();
    // An average that was cut off would let segments go that are younger than it.
    let count = segments.len() as u128;
    segments.into_iter().filter(|place| u128::from(age(place)) * count >= total).collect()
}
