//! The backing `Segments`: regions that are plain driver allocations.
//!
//! Growth accounts for its bytes under the lock, calls the driver without it, and then adds the
//! region.
//!
//! Release takes whole free regions out of the heap under the lock, so that no request is served
//! from them, and calls the driver without it. It puts back what could not be freed, as available
//! to each stream as it was. From when it is taken out, a segment is not counted as reserved
//! (invariant A2), because another thread may get its memory, and count it, before this one has the
//! lock again. The limit counts it until the driver has taken it back (`leaving`).

use aquifer_device::{DevicePtr, ErrorKind};

use crate::allocator::Allocator;
use crate::backing::growth::{Growth, segment_bytes};
use crate::backing::headroom::{ASKS, Room, buyable, room};
use crate::backing::limits::Refusal;
use crate::error::AllocError;
use crate::heap::{Block, BlockId, Region, State};
use crate::history::{Action, Subject};
use crate::pools::lookup::{heap_with_pool, numbers_of};
use crate::pools::table::{Private, Which};
use crate::state::guard::StateGuard;
use crate::state::shared::SharedState;
use crate::tags::Tag;
use crate::types::{PoolId, Request};

/// A segment out of the heap while the driver is asked to take it back.
struct Releasing {
    region: Region,
    /// Tag of the allocation that made it.
    tag: Tag,
    /// Who may have its one block, as [`crate::heap::Block`] says.
    owner: u32,
    after: u64,
}

/// A segment to be released.
struct Chosen {
    block: BlockId,
    addr: u64,
    /// Whether it was chosen although graphs of other libraries may use it.
    kept_for_graphs: bool,
}

impl Chosen {
    fn new(shared: &SharedState, id: BlockId) -> Chosen {
        let block = &shared.heap.blocks[id];
        let owner = shared.pools.owner_of(block.pool);
        let kept_for_graphs = owner.is_some_and(|private| private.keeps_for_graphs(block.pool));
        Chosen { block: id, addr: block.addr, kept_for_graphs }
    }
}

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
    let is_paged = allocator.state().shared().paged.is_some();
    let _awake = if is_paged { Some(allocator.gate()?.shared()) } else { None };
    if allocator.state().shared().is_asleep() {
        return Err(AllocError::Asleep);
    }
    if let Some(refusal) = begin_growing(allocator, bytes)? {
        return Ok(Growth::Refused(refusal));
    }
    let allocated = allocator.device().alloc(bytes);
    let mut guard = allocator.state().lock();
    guard.growing.end(bytes);
    match allocated {
        Ok(ptr) => {
            allocator.state().tell_witness(|witness| witness.managed(ptr.range(bytes)));
            let first = add_segment(&mut guard, request, ptr.0, bytes);
            Ok(Growth::Grown(guard.take(request, first)))
        }
        Err(error) if error.is_out_of_memory() => Ok(Growth::Refused(Refusal::Device)),
        Err(error) => Err(error.into()),
    }
}

/// Notes that so many bytes are about to be taken, or tells what refuses that.
fn begin_growing(allocator: &Allocator, bytes: u64) -> Result<Option<Refusal>, AllocError> {
    for _ in 0..ASKS {
        let room = room(allocator)?;
        let mut shared = allocator.state().shared();
        let (buyable, refusal) = buyable(allocator, &shared, &room);
        if bytes <= buyable {
            shared.growing.begin(bytes);
            return Ok(None);
        }
        if refusal != Refusal::Headroom || !room.is_uncertain(&shared) {
            return Ok(Some(refusal));
        }
        drop(shared);
        Room::wait_for_others();
    }
    Ok(Some(Refusal::Headroom))
}

/// Gives the segments that `choose` picks among the wholly free ones back to the device; tells how
/// many bytes.
///
/// The driver waits for the device before it frees a segment, so blocks that are not done may be
/// among them. While a stream captures, waiting would break that: none goes then.
pub(crate) fn release_where(
    allocator: &Allocator,
    choose: impl FnOnce(&SharedState) -> Vec<BlockId>,
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
        segments.extend(begin_release(&mut guard, chosen));
    }
    drop(guard);
    let mut released = 0;
    let mut segments = segments.into_iter();
    while let Some(segment) = segments.next() {
        let freed = allocator.device().free(DevicePtr(segment.region.addr));
        if let Err(error) = freed {
            let mut guard = allocator.state().lock();
            std::iter::once(segment).chain(segments).for_each(|segment| cancel_release(&mut guard, segment));
            // A capture that began meanwhile.
            return if error.kind == ErrorKind::Capture { Ok(released) } else { Err(error.into()) };
        }
        released += segment.region.bytes;
        segment_released(&mut allocator.state().shared(), &segment.region);
    }
    Ok(released)
}

impl SharedState {
    /// Wholly free segments of one pool of the heap that are not pinned.
    pub(crate) fn whole_segments_in(&self, pool: PoolId) -> impl Iterator<Item = BlockId> + '_ {
        let blocks = self.heap.free_blocks(pool).map(|key| key.block());
        blocks.filter(move |&id| is_whole_segment(self, &self.heap.blocks[id]))
    }
}

fn add_segment(guard: &mut StateGuard, request: &Request, addr: u64, bytes: u64) -> BlockId {
    guard.counters.num_device_alloc.add(1);
    count_segment(guard, request.pool, request.slot, request.tag, addr, bytes);
    guard.pools.note_region(request.pool);
    heap_with_pool(guard, request.pool).add_region(addr, bytes, request.slot, request.pool)
}

fn count_segment(guard: &mut StateGuard, pool: PoolId, slot: u32, tag: Tag, addr: u64, bytes: u64) {
    let kind = pool.kind();
    guard.reserved += bytes;
    guard.counters.segment.add(kind, 1);
    guard.counters.reserved_bytes.add(kind, bytes);
    guard.segments.insert(addr, tag);
    let pool = guard.pools.history_id(pool);
    let subject = Subject { addr, size: bytes, slot, tag, pool };
    guard.history.note(Action::SegmentAlloc, subject);
}

/// Takes a segment out of the heap. `None` if it is not wholly free any more, or if a graph may use
/// it by now.
fn begin_release(guard: &mut StateGuard, &Chosen { block: id, addr, kept_for_graphs }: &Chosen) -> Option<Releasing> {
    let block = &guard.heap.blocks[id];
    if block.state != State::Free || block.addr != addr || !is_whole_segment(guard, block) {
        return None;
    }
    let owner = guard.pools.owner_of(block.pool);
    let kept = |private: &Private| {
        private.keeps_for_our_graphs(block.pool) || (!kept_for_graphs && private.keeps_for_graphs(block.pool))
    };
    if owner.is_some_and(kept) {
        return None;
    }
    let (owner, after) = (block.owner, block.after);
    let region = guard.heap.remove_region(id);
    let kind = region.pool.kind();
    guard.reserved -= region.bytes;
    guard.leaving += region.bytes;
    guard.counters.segment.sub(kind, 1);
    guard.counters.reserved_bytes.sub(kind, region.bytes);
    let tag = guard.segments.remove(&region.addr).unwrap_or_default();
    let pool = guard.pools.history_id(region.pool);
    let subject = Subject { addr: region.addr, size: region.bytes, slot: region.stream, tag, pool };
    guard.history.note(Action::SegmentFree, subject);
    Some(Releasing { region, tag, owner, after })
}

/// The driver did not take a segment back.
fn cancel_release(guard: &mut StateGuard, Releasing { region, tag, owner, after }: Releasing) {
    guard.leaving -= region.bytes;
    count_segment(guard, region.pool, region.stream, tag, region.addr, region.bytes);
    heap_with_pool(guard, region.pool).restore_region(&region, owner, after);
}

/// Wholly free segments of some pools that are not pinned.
pub(crate) fn whole_segments(shared: &SharedState, which: Which) -> Vec<BlockId> {
    numbers_of(shared, which).flat_map(|pool| shared.whole_segments_in(pool)).collect()
}

/// Whether a free block is a whole segment that may go back to the device.
fn is_whole_segment(shared: &SharedState, block: &Block) -> bool {
    !block.is_split() && !shared.heap.region(block.region).is_paged() && !shared.pins.contains(block.addr)
}

/// Wholly free segments that no pool keeps: those of the default pools and of closed private
/// pools.
pub(crate) fn releasable(shared: &SharedState) -> Vec<BlockId> {
    whole_segments(shared, Which::Unpromised)
}

fn segment_released(shared: &mut SharedState, region: &Region) {
    shared.leaving -= region.bytes;
    shared.pools.forget_region(region.pool);
    shared.counters.num_device_free.add(1);
}
