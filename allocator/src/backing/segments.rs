//! The backing `Segments`: regions that are plain driver allocations.
//!
//! Growth accounts for its bytes under the lock, calls the driver without it, and then adds the
//! region.
//!
//! Release takes whole free regions out of the heap under the lock, so that no request is served
//! from them, and calls the driver without it. It puts back what could not be freed, as available
//! to each stream as it was. From when it is taken out, a segment is not counted as reserved
//! (invariant A2), because another thread may get its memory, and count it, before this one has the
//! lock again. The limit counts it until the driver has taken it back (`being_released`).

use std::time::Duration;

use aquifer_device::{DevicePtr, ErrorKind, executor};

use crate::allocator::Allocator;
use crate::backing::growth::{Growth, buyable, room, segment_bytes};
use crate::core::Core;
use crate::core::limits::Refusal;
use crate::core::segments::Chosen;
use crate::error::AllocError;
use crate::types::{BlockId, Request};

/// How often the driver is asked again while others take memory, and how long after each time:
/// about as long as a driver call takes.
const ASKS: u32 = 64;
const BETWEEN_ASKS: Duration = Duration::from_micros(50);
/// The most segments that are taken out of the heap while the lock is held without a break.
const BATCH: usize = if cfg!(debug_assertions) { 2 } else { 32 };

/// Takes a segment for the request from the device and serves the request from it.
pub(crate) fn grow_segment(allocator: &Allocator, request: &Request) -> Result<Growth, AllocError> {
    grow_segment_of(allocator, request, segment_bytes(allocator, request.size))
}

/// The same, with a segment of so many bytes.
pub(crate) fn grow_segment_of(allocator: &Allocator, request: &Request, bytes: u64) -> Result<Growth, AllocError> {
    // Where memory is mapped, too, a pool may have segments. The allocator falls asleep before
    // this, and refuses it, or after it.
    let is_paged = allocator.state().shared().granule().is_some();
    let _awake = if is_paged { Some(allocator.gate()?.shared()) } else { None };
    let shared = allocator.state().shared();
    if shared.is_asleep() {
        return Err(AllocError::Asleep);
    }
    // Peers that have access to all mapped memory have none to a segment.
    let is_for_peers = shared.paged().access.len() > 1;
    if is_for_peers && shared.paged_granule_for(request).is_some() {
        return Ok(Err(Refusal::Addresses));
    }
    drop(shared);
    if let Some(refusal) = begin_growing(allocator, bytes)? {
        return Ok(Err(refusal));
    }
    let allocated = allocator.device().alloc(bytes);
    let mut guard = allocator.state().lock();
    guard.end_growing(bytes);
    match allocated {
        Ok(ptr) => {
            allocator.state().tell_witness(|witness| witness.managed(ptr.range(bytes)));
            let first = guard.add_segment(request, ptr.0, bytes);
            Ok(Ok(guard.take(request, first)))
        }
        Err(error) if error.is_out_of_memory() => Ok(Err(Refusal::Device)),
        Err(error) => Err(error.into()),
    }
}

/// Notes that so many bytes are about to be taken, or tells what refuses that.
fn begin_growing(allocator: &Allocator, bytes: u64) -> Result<Option<Refusal>, AllocError> {
    let mut asks = 0..ASKS;
    loop {
        let room = room(allocator)?;
        let mut shared = allocator.state().shared();
        let (buyable, refusal) = buyable(allocator, &shared, &room);
        if bytes <= buyable {
            shared.begin_growing(bytes);
            return Ok(None);
        }
        if !room.is_uncertain(&shared, refusal) || asks.next().is_none() {
            return Ok(Some(refusal));
        }
        drop(shared);
        executor::pause(BETWEEN_ASKS);
    }
}

/// Gives the segments that `choose` picks among the wholly free ones back to the device; tells how
/// many bytes.
///
/// The driver waits for the device before it frees a segment, so blocks that are not done may be
/// among them. While a stream captures, waiting would break that: none goes then.
pub(crate) fn release_where(
    allocator: &Allocator,
    choose: impl FnOnce(&Core) -> Vec<BlockId>,
) -> Result<u64, AllocError> {
    if allocator.device().still_captures() {
        return Ok(0);
    }
    let mut guard = allocator.state().lock();
    let chosen = choose(&guard);
    let chosen: Vec<Chosen> = chosen.into_iter().map(|id| Chosen::new(&guard, id)).collect();
    let mut segments = Vec::with_capacity(chosen.len());
    for (at, chosen) in chosen.iter().enumerate() {
        if at > 0 && at.is_multiple_of(BATCH) {
            drop(guard);
            guard = allocator.state().lock();
        }
        segments.extend(guard.begin_release(chosen));
    }
    drop(guard);
    let mut released = 0;
    let mut segments = segments.into_iter();
    while let Some(segment) = segments.next() {
        let freed = allocator.device().free(DevicePtr(segment.region.addr));
        if let Err(error) = freed {
            let mut guard = allocator.state().lock();
            std::iter::once(segment).chain(segments).for_each(|segment| guard.cancel_release(segment));
            // A capture that began meanwhile.
            return if error.kind == ErrorKind::Capture { Ok(released) } else { Err(error.into()) };
        }
        released += segment.region.bytes;
        allocator.state().shared().segment_released(&segment.region);
    }
    Ok(released)
}
