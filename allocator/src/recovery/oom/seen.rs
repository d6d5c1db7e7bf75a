//! What a report reads of blocks, one after the other: the sums it shows, and the memory that stands in the way of its
//! request.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::accounting::unusable_share;
use crate::heap::{Heap, Passed, Region, State};
use crate::pools::table::Private;
use crate::recovery::oom::remedies::Holds;
use crate::recovery::oom::{Advice, LISTED, OomReport};
use crate::shell::core::{Core, Request};
use crate::tags::Tag;

/// Sums over the blocks passed so far.
pub(super) struct Seen {
    request: Request,
    /// True if a stream of the device captures, so that no memory goes back.
    captures: bool,
    holds: Holds,
    /// Free blocks of the request's pool: their number, their bytes, the bytes in those that are large enough, and the
    /// largest one's.
    pieces: usize,
    free: u64,
    usable: u64,
    largest: u64,
    reserved_by_private_pools: u64,
    /// Live bytes by tag.
    tags: HashMap<u32, u64>,
    /// The contiguous memory of the request's own private pool that is being passed, in bytes, and whether it is
    /// mapped.
    own_range: Option<(u64, bool)>,
}

/// The private pool that keeps the memory of a heap pool from others.
fn promised(core: &Core, pool: u16) -> Option<&Private> {
    core.pools.owner_of(pool).filter(|private| !private.is_released())
}

impl Seen {
    /// What there is outside of heaps. The request's owner has `own` bytes already, which it keeps.
    pub(super) fn new(core: &Core, request: &Request, own: u64) -> Seen {
        let captures = core.is_capturing();
        let mut holds = Holds { own, ..Holds::default() };
        if let Some(own) = promised(core, request.pool) {
            holds.own_pool_has_graphs = own.numbers().any(|number| own.keeps_for_graphs(number));
        }
        let mut tags = HashMap::new();
        if let Some(paged) = &core.paged {
            holds.loose += paged.spares.granules() * paged.granule;
            holds.addresses_apart = paged.apart_address_bytes();
            holds.captured.rest += if captures { paged.owned_bytes } else { 0 };
            for owned in paged.owned.values().filter(|owned| owned.size > 0) {
                *tags.entry(owned.tag.0).or_default() += owned.size;
            }
        }
        Seen {
            request: *request,
            captures,
            holds,
            pieces: 0,
            free: 0,
            usable: 0,
            largest: 0,
            reserved_by_private_pools: 0,
            tags,
            own_range: None,
        }
    }

    /// Adds a block, and with the first one of a region what depends on the region.
    pub(super) fn add(&mut self, core: &Core, heap: &Heap, passed: &Passed) {
        let (block, request) = (&passed.block, self.request);
        let owner = promised(core, block.pool);
        let is_own = |private: &Private| private.owns(request.pool);
        let is_of_another = owner.is_some_and(|private| !is_own(private));
        if passed.is_first {
            let pinned = pinned_in(core, heap.region(block.region));
            let sum = if is_of_another { &mut self.holds.pinned_in_pools } else { &mut self.holds.pinned };
            *sum += pinned;
        }
        if block.state.has_memory() {
            let bytes = if owner.is_some() { block.size } else { 0 };
            self.reserved_by_private_pools += bytes;
            let sum = if is_of_another { &mut self.holds.pools } else { &mut self.holds.own_pool };
            *sum += bytes;
        }
        self.note_range(core, heap, passed, owner.is_some_and(is_own));
        match (block.state, owner) {
            (State::Live, _) => {
                *self.tags.entry(block.tag).or_default() += block.size;
                self.holds.live_in_pools += if is_of_another { block.size } else { 0 };
            }
            (State::Free, None) => {
                let part = core.releasable_part(heap, block);
                self.holds.loose += part.bytes;
                self.holds.pinned_free += part.pinned;
            }
            (State::Free, Some(private)) if is_own(private) => {
                self.holds.own_pool_loose += core.releasable_part(heap, block).bytes;
            }
            _ => {}
        }
        if block.state == State::Free && block.pool == request.pool {
            self.pieces += 1;
            self.free += block.size;
            self.usable += if block.size >= request.size { block.size } else { 0 };
            self.largest = self.largest.max(block.size);
        }
        if self.captures && block.state.has_memory() {
            let part = core.releasable_part(heap, block);
            self.holds.captured.add(block.state, block.size, &part, owner.map(is_own));
        }
    }

    /// Notes contiguous memory of the request's own private pool that would serve it, once nothing there is live.
    fn note_range(&mut self, core: &Core, heap: &Heap, passed: &Passed, is_own: bool) {
        let (block, request) = (&passed.block, self.request);
        if passed.begins_range || passed.is_first || !block.state.has_memory() {
            self.end_range(core);
        }
        let is_near = is_own && block.pool == request.pool && heap.home == request.slot;
        if is_near && block.state.has_memory() {
            let (bytes, _) = self.own_range.unwrap_or_default();
            self.own_range = Some((bytes + block.size, heap.region(block.region).is_paged()));
            // The last range of all is not ended by another block.
            self.holds.own_pool_serves |= block.next.some().is_none() && self.range_fits(core);
        }
    }

    fn end_range(&mut self, core: &Core) {
        self.holds.own_pool_serves |= self.range_fits(core);
        self.own_range = None;
    }

    fn range_fits(&self, core: &Core) -> bool {
        self.own_range.is_some_and(|(bytes, is_paged)| match is_paged {
            true => bytes >= self.request.size,
            false => core.classes.fits(bytes, self.request.size),
        })
    }

    /// Advice that holds if the free bytes would suffice in one piece.
    pub(super) fn fragmented(&self) -> Advice {
        Advice::Fragmented { on_device: 0, cached: self.free, pieces: self.pieces, largest: self.largest }
    }

    /// Completes the report. Returns the memory that stands in the way of its request.
    pub(super) fn tell(self, report: &mut OomReport) -> Holds {
        report.reserved_by_private_pools = self.reserved_by_private_pools;
        (report.largest_free, report.free_in_pool) = (self.largest, self.free);
        report.unusable_index = unusable_share(self.free.into(), self.usable.into());
        report.kept_by_captures = self.holds.captured.cached();
        let mut tags: Vec<(u32, u64)> = self.tags.into_iter().collect();
        tags.sort_by_key(|&(tag, bytes)| (Reverse(bytes), tag));
        tags.truncate(LISTED);
        let named = tags.into_iter().map(|(tag, bytes)| (Tag(tag).name().map(|name| name.to_string()), bytes));
        report.largest_tags = named.collect();
        self.holds
    }
}

/// Bytes of a region that are pinned.
fn pinned_in(core: &Core, region: &Region) -> u64 {
    match &core.paged {
        Some(paged) if region.is_paged() => paged.pinned_bytes(&core.pins, region.addr..region.addr + region.bytes),
        _ if core.pins.contains(region.addr) => region.bytes,
        _ => 0,
    }
}
