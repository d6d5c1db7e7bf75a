//! What a report reads of blocks, one after the other: the sums it shows, and the memory that
//! stands in the way of its request.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::accounting::fragmentation::releasable_part;
use crate::core::Core;
use crate::core::heap::{Passed, Region, State};
use crate::core::pools::Private;
use crate::recovery::oom::advice::Held;
use crate::recovery::oom::report::{LISTED, OomReport};
use crate::tags::Tag;
use crate::types::{PoolId, Request};

/// Sums over the blocks passed so far.
pub(super) struct Seen {
    request: Request,
    /// True if a stream of the device captures, so that no memory goes back.
    captures: bool,
    held: Held,
    /// Free blocks of the request's pool: their number, their bytes, and the largest one's.
    pieces: usize,
    free: u64,
    largest: u64,
    unused_in_part: u64,
    kept_by_captures: u64,
    reserved_by_private_pools: u64,
    /// Live bytes by tag.
    tags: HashMap<u32, u64>,
}

/// The private pool that keeps the memory of a heap pool from others.
fn promised(core: &Core, pool: PoolId) -> Option<&Private> {
    core.pools.owner_of(pool).filter(|private| !private.is_released())
}

impl Seen {
    /// What there is outside of heaps. The request's owner has `own` bytes already, which it keeps.
    pub(super) fn new(core: &Core, request: &Request, own: u64) -> Seen {
        let captures = core.streams.any_captures();
        let mut held = Held { own, captures, ..Held::default() };
        held.own_pool_has_graphs = promised(core, request.pool)
            .is_some_and(|private| private.numbers().any(|number| private.keeps_for_graphs(number)));
        held.capturing.extend(
            core.waiting_bytes()
                .iter()
                .map(|&(stream, _)| stream)
                .filter(|&stream| core.streams.captures(stream))
                .map(u32::from),
        );
        let mut tags = HashMap::new();
        if let Some(paged) = core.paged() {
            held.cached += paged.spares.granules() * paged.granule;
            held.dedicated_addresses = paged.dedicated_address_bytes();
            for owned in paged.owned.values().filter(|owned| owned.size > 0) {
                *tags.entry(owned.tag.0).or_default() += owned.size;
            }
        }
        Seen {
            request: *request,
            captures,
            held,
            pieces: 0,
            free: 0,
            largest: 0,
            unused_in_part: 0,
            kept_by_captures: 0,
            reserved_by_private_pools: 0,
            tags,
        }
    }

    /// Adds a block, and with the first one of a region what depends on the region.
    pub(super) fn add(&mut self, core: &Core, passed: &Passed) {
        let (block, request) = (&passed.block, self.request);
        let owner = promised(core, block.pool);
        let is_of_another = owner.is_some_and(|private| !private.owns(request.pool));
        if passed.is_first {
            self.held.pinned += pinned_in(core, core.heap().region(block.region));
        }
        if owner.is_some() && block.state.has_memory() {
            self.reserved_by_private_pools += block.size;
            let sum = if is_of_another { &mut self.held.pools } else { &mut self.held.own_pool };
            *sum += block.size;
        }
        if block.state == State::Live {
            *self.tags.entry(block.tag).or_default() += block.size;
            self.held.live_in_pools += if is_of_another { block.size } else { 0 };
        }
        if matches!(block.state, State::Free | State::Waiting) && owner.is_none() {
            let part = releasable_part(core, block);
            self.kept_by_captures += if self.captures { part.bytes } else { 0 };
            if block.state == State::Free {
                self.held.cached += part.bytes;
                self.unused_in_part += block.size.saturating_sub(part.bytes + part.pinned);
            }
        }
        if block.state == State::Free && block.pool == request.pool {
            self.pieces += 1;
            self.free += block.size;
            self.largest = self.largest.max(block.size);
        }
    }

    /// Completes the report. Returns the memory that stands in the way of its request.
    pub(super) fn tell(self, report: &mut OomReport) -> Held {
        report.reserved_by_private_pools = self.reserved_by_private_pools;
        report.held_by_pool = if report.pool.is_some() { self.held.own_pool } else { 0 };
        (report.largest_free, report.free_in_pool, report.pieces) = (self.largest, self.free, self.pieces);
        (report.unused_in_part, report.kept_by_captures) = (self.unused_in_part, self.kept_by_captures);
        let mut tags: Vec<(u32, u64)> = self.tags.into_iter().collect();
        tags.sort_by_key(|&(tag, bytes)| (Reverse(bytes), tag));
        tags.truncate(LISTED);
        let named = tags.into_iter().map(|(tag, bytes)| (Tag(tag).name().map(|name| name.to_string()), bytes));
        report.largest_tags = named.collect();
        self.held
    }
}

/// Bytes of a region that are pinned.
fn pinned_in(core: &Core, region: &Region) -> u64 {
    match core.paged() {
        Some(paged) if region.is_paged() => paged.pinned_bytes(&core.pins, region.addr..region.addr + region.bytes),
        _ if core.pins.contains(region.addr) => region.bytes,
        _ => 0,
    }
}
