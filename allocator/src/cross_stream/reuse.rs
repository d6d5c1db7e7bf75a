//! Reuse of memory away from home without the ladder, under the lock of one arena at a time.
//!
//! A stream that works in borrowed memory has foreign free blocks in other arenas, of which its own
//! arena remembers a few (`state/arena/lenders.rs`). A request that no block at home serves looks
//! there:
//!
//! 1. for the best of the stream's foreign free blocks, which it may reuse at once;
//! 2. for the best block of these arenas' home streams, after blocks that are done went home. Ticks
//!    that might give a better choice are asked about first, as the ladder does.
//!
//! So it does not need the lock of the shared state. The ladder decides whether a stream that
//! borrows often gets more memory of its own, and looks into all other arenas.

use std::sync::Arc;

use aquifer_device::Stream;
use aquifer_device::internal::Timeline;

use crate::allocator::Allocator;
use crate::cross_stream::progress::{Pending, poll};
use crate::error::AllocError;
use crate::request::Request;
use crate::state::arena::{Arena, Granted};
use crate::sync::atomic::Ordering;

/// Serves a request from the arenas that lent memory to its stream.
#[cold]
pub(crate) fn reuse_borrowed(
    allocator: &Allocator,
    request: &Request,
    stream: &Stream,
) -> Result<Option<Granted>, AllocError> {
    let Some(own) = allocator.state().arenas.get(request.slot) else { return Ok(None) };
    if own.has_remote_frees()
        && let Some(granted) = own.enter().and_then(|mut home| home.take_own(request))
    {
        return Ok(Some(granted));
    }
    if let Some(granted) = take_foreign(own, request) {
        own.lenders.count();
        return Ok(Some(granted));
    }
    let mut found = Found::default();
    if let Some(granted) = look_around(own, request, &mut found) {
        return Ok(Some(granted));
    }
    if found.lender.is_some() || !found.unknown.is_empty() {
        stream.timeline().refuse_unannounced_capture()?;
    }
    if !found.unknown.is_empty() {
        poll(&found.unknown)?;
        found = Found::default();
        if let Some(granted) = look_around(own, request, &mut found) {
            return Ok(Some(granted));
        }
    }
    let granted = found.lender.and_then(|lender| borrow_done(lender, request, stream.timeline()));
    if granted.is_some() {
        own.lenders.count();
        allocator.state().counters.cross_stream_reuses.add_from_any_thread(1);
    }
    Ok(granted)
}

/// Takes the best of the stream's foreign free blocks.
fn take_foreign(own: &'static Arena, request: &Request) -> Option<Granted> {
    let places = own.lenders.with_foreign(request.pool);
    let enter = |place| own.state.arenas.get(own.lenders.at(place))?.enter();
    let mut best: Option<(u64, &'static Arena)> = None;
    for place in places {
        let Some(mut locked) = enter(place) else { continue };
        if places.is_single()
            && let Some(granted) = locked.take_foreign(request)
        {
            return Some(granted);
        }
        let Some(index) = locked.foreign_of(request) else {
            own.lenders.forget(place, request.pool);
            continue;
        };
        let size = index.best_fit(request.size).map(|key| key.size());
        if let Some(size) = size
            && best.is_none_or(|(best, _)| size < best)
        {
            best = Some((size, locked.arena));
        }
    }
    best?.1.enter()?.take_foreign(request)
}

/// What the arenas have for a request.
#[derive(Default)]
struct Found {
    /// The arena with the best block of its home stream, and the block's size.
    lender: Option<&'static Arena>,
    size: u64,
    /// Ticks that are not known to be done, of blocks that might serve better.
    unknown: Pending,
}

/// Has blocks that are done go home, in the stream's own arena and in those that lent to it. Serves
/// the request from its own arena, or finds the best block of the others.
fn look_around(own: &'static Arena, request: &Request, found: &mut Found) -> Option<Granted> {
    let mut home = own.enter()?;
    if home.send_home(request.slot, &mut found.unknown)
        && let Some(granted) = home.take_own(request)
    {
        return Some(granted);
    }
    if home.borrows_often() && !home.keeps_borrowing {
        found.unknown.clear();
        return None;
    }
    drop(home);
    for arena in own.lenders.iter().filter_map(|slot| own.state.arenas.get(slot)) {
        let Some(mut locked) = arena.enter() else { continue };
        locked.coalesce_deferred();
        locked.send_home(request.slot, &mut found.unknown);
        let Some(best) = locked.best_to_lend(request) else { continue };
        if !locked.is_known_done(best.block(), &mut found.unknown) {
            continue;
        }
        if found.lender.is_none() || best.size() < found.size {
            (found.lender, found.size) = (Some(arena), best.size());
        }
    }
    None
}

/// Takes the best block of a lender, if it is known done.
fn borrow_done(lender: &'static Arena, request: &Request, borrower: &Arc<Timeline>) -> Option<Granted> {
    let mut locked = lender.enter()?;
    let block = locked.best_to_lend(request)?.block();
    if !locked.is_known_done(block, &mut Vec::new()) {
        return None;
    }
    locked.know(borrower);
    lender.has_lent.store(true, Ordering::Relaxed);
    Some(locked.take(request, block))
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;
    use crate::size_class::PoolKind;
    use crate::tags::Tag;

    const MIB: u64 = 1 << 20;

    fn allocator(config: &str) -> (Allocator, [Stream; 2]) {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, config.parse::<Config>().unwrap()).unwrap();
        let streams = [(); 2].map(|()| device.stream().unwrap());
        (allocator, streams)
    }

    /// The stream in whose arena such a request is served.
    fn reused(allocator: &Allocator, bytes: u64, stream: &Stream) -> Option<u32> {
        let pool = PoolKind::of(bytes) as u16;
        let (slot, tag) = (stream.id(), Tag::default());
        let request = Request { requested: bytes, size: bytes, pool, slot, tag, is_regular: true };
        let granted = reuse_borrowed(allocator, &request, stream).unwrap()?;
        granted.arena.free(granted.block, None, bytes);
        Some(granted.arena.slot)
    }

    #[test]
    fn borrowed_memory_that_was_freed_serves_its_borrower_without_the_ladder() {
        let (allocator, [lender, borrower]) = allocator("");
        let kept = allocator.alloc_bytes(8 * MIB, &lender).unwrap();
        drop(allocator.alloc_bytes(32 * MIB, &lender).unwrap());
        assert_eq!(reused(&allocator, 4 * MIB, &borrower), None, "it has borrowed nothing yet");
        drop(allocator.alloc_bytes(32 * MIB, &borrower).unwrap());
        let (calls, reuses) = (allocator.device().driver_calls().total(), allocator.stats().cross_stream_reuses);
        assert_eq!(reused(&allocator, 4 * MIB, &borrower), Some(lender.id()));
        assert_eq!(reused(&allocator, 32 * MIB, &borrower), Some(lender.id()));
        assert_eq!(reused(&allocator, MIB / 2, &borrower), None, "another pool");
        let after = (allocator.device().driver_calls().total(), allocator.stats().cross_stream_reuses);
        assert_eq!(after, (calls, reuses), "its own memory needs no question, and is no loan");
        let _all = allocator.alloc_bytes(32 * MIB, &borrower).unwrap();
        drop(kept);
        assert_eq!(reused(&allocator, 8 * MIB, &borrower), Some(lender.id()), "the device is asked, and is done");
        assert_eq!(allocator.stats().cross_stream_reuses, reuses + 1);
    }

    #[test]
    fn memory_comes_home_to_the_stream_that_lent_it() {
        let (allocator, [lender, borrower]) = allocator("");
        drop(allocator.alloc_bytes(32 * MIB, &lender).unwrap());
        drop(allocator.alloc_bytes(32 * MIB, &borrower).unwrap());
        let reserved = allocator.memory_reserved();
        assert_eq!(reused(&allocator, 32 * MIB, &lender), Some(lender.id()));
        assert_eq!(allocator.memory_reserved(), reserved);
    }

    #[test]
    fn segments_and_streams_that_do_not_share_leave_all_to_the_ladder() {
        for config in ["backing:segments", "cross_stream:off"] {
            let (allocator, [lender, borrower]) = allocator(config);
            drop(allocator.alloc_bytes(32 * MIB, &lender).unwrap());
            drop(allocator.alloc_bytes(32 * MIB, &borrower).unwrap());
            assert_eq!(reused(&allocator, 64 * MIB, &borrower), None, "{config}");
        }
    }
}
