//! What a report reads of blocks, one after the other: the sums it shows, and the memory that
//! stands in the way of its request. What it advises follows from that.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::accounting::attribution::Attribution;
use crate::accounting::fragmentation::releasable_part;
use crate::core::Core;
use crate::core::heap::{Passed, Region, State};
use crate::core::limits::Refusal;
use crate::core::pools::Private;
use crate::recovery::oom::advice::Advice;
use crate::recovery::oom::report::{LISTED, OomReport};
use crate::tags::Tag;
use crate::types::{PoolId, Request};

/// Memory that stands in the way of a request, in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Held {
    /// Unused memory that could go back to the device, outside of private pools.
    pub(super) cached: u64,
    /// Pinned memory, in use or not.
    pub(super) pinned: u64,
    /// All memory of private pools that do not serve the request,
    pub(super) pools: u64,
    /// and the part of it in live blocks.
    pub(super) live_in_pools: u64,
    /// All memory of the request's own private pool.
    pub(super) own_pool: u64,
    /// True if that pool keeps memory for graphs.
    pub(super) own_pool_has_graphs: bool,
    /// Memory that the request's owner has and keeps as it grows.
    pub(super) own: u64,
    /// Addresses that are reserved outside of heaps.
    pub(super) dedicated_addresses: u64,
    /// True if a stream of the device captures.
    pub(super) captures: bool,
    /// The streams among those that still use freed memory that capture: whether they are done
    /// cannot be learned before the capture has ended.
    pub(super) capturing: Vec<u32>,
}

/// Sums over the blocks passed so far.
#[derive(Default)]
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
    /// Live bytes by tag, of all memory or of the request's pool.
    tags: HashMap<u32, u64>,
    only_own_pool: bool,
}

/// The private pool that keeps the memory of a heap pool from others.
fn promised(core: &Core, pool: PoolId) -> Option<&Private> {
    core.pools.owner_of(pool).filter(|private| !private.is_released())
}

impl Seen {
    /// What there is outside of heaps.
    pub(super) fn new(core: &Core, request: &Request, own: u64, only_own_pool: bool) -> Seen {
        let captures = core.streams.any_captures();
        let mut held = Held { own, captures, ..Held::default() };
        held.own_pool_has_graphs = promised(core, request.pool)
            .is_some_and(|private| private.numbers().any(|number| private.keeps_for_graphs(number)));
        let waited_for = core.waiting_bytes().into_iter().map(|(stream, _)| stream);
        held.capturing = waited_for.filter(|&stream| core.streams.captures(stream)).map(u32::from).collect();
        let mut tags = HashMap::new();
        let paged = core.paged();
        held.cached += paged.spares.granules() * paged.granule;
        held.dedicated_addresses = paged.dedicated_address_bytes();
        for owned in paged.owned.values().filter(|owned| owned.size > 0 && !only_own_pool) {
            *tags.entry(owned.tag.0).or_default() += owned.size;
        }
        Seen { request: *request, captures, held, tags, only_own_pool, ..Seen::default() }
    }

    /// Adds a block, and with the first one of a region what depends on the region.
    pub(super) fn add(&mut self, core: &Core, passed: &Passed) {
        let (block, request) = (&passed.block, self.request);
        let owner = promised(core, block.pool);
        let is_of_another = owner.is_some_and(|private| !private.owns(request.pool));
        if passed.is_first {
            self.held.pinned += pinned_in(core, core.heap().region(block.region));
        }
        if block.state.has_memory() && promised(core, core.heap().region(block.region).pool).is_some() {
            self.reserved_by_private_pools += block.size;
        }
        if owner.is_some() && block.state.has_memory() {
            let sum = if is_of_another { &mut self.held.pools } else { &mut self.held.own_pool };
            *sum += block.size;
        }
        if block.state == State::Live {
            if !self.only_own_pool || owner.is_some_and(|private| private.owns(request.pool)) {
                *self.tags.entry(block.tag).or_default() += block.size;
            }
            self.held.live_in_pools += if is_of_another { block.size } else { 0 };
        }
        if (block.state.is_free() || block.state == State::Waiting) && owner.is_none() {
            let part = releasable_part(core, block);
            self.kept_by_captures += if self.captures { part.bytes } else { 0 };
            if block.state.is_free() {
                self.held.cached += part.bytes;
                self.unused_in_part += block.size.saturating_sub(part.bytes + part.pinned);
            }
        }
        if block.state.is_free() && block.pool == request.pool {
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
    if region.is_paged() {
        return core.paged().pinned_bytes(&core.pins, region.addr..region.addr + region.bytes);
    }
    if core.pins.contains(region.addr) { region.bytes } else { 0 }
}

impl OomReport {
    /// Bytes that this allocator may hold at most, by its limit and by what the device has.
    fn allowed(&self) -> u64 {
        let on_device = self
            .memory
            .map_or(u64::MAX, |memory| memory.free.saturating_add(self.reserved).saturating_sub(self.headroom));
        self.limit.map_or(on_device, |limit| limit.min(on_device))
    }

    /// Bytes in use on the device that this allocator does not hold.
    fn held_by_others(&self) -> u64 {
        self.attribution.as_ref().map_or(0, Attribution::held_by_others)
    }

    /// Notes how much is lacking, given what is held and what the request takes.
    pub(super) fn note_lacking(&mut self) {
        let takes = self.reserved.saturating_add(self.from_device);
        self.lacking_below_limit = self.limit.map_or(0, |limit| takes.saturating_sub(limit));
        self.lacking_on_device =
            self.memory.map_or(0, |memory| self.from_device.saturating_add(self.headroom).saturating_sub(memory.free));
    }

    /// Adds what helps, most helpful first: what there is to be had without a loss, then options,
    /// then what others lose. `from_blocks` comes from a look at free blocks that the request may
    /// not have. `fail_fast` tells whether the limit refuses at once
    /// (`throw_on_cudamalloc_oom`), before anything goes back.
    pub(super) fn advise(&mut self, from_blocks: Vec<Advice>, held: &Held, fail_fast: bool) {
        let mut advice = Vec::new();
        if self.refusal == Some(Refusal::PoolLimit) {
            let to = self.claimed_in_pool.saturating_add(self.requested);
            self.advice = vec![Advice::RaisePoolLimit { pool: self.pool.unwrap_or_default(), to }];
            let least = to.saturating_sub(self.pool_limit.unwrap_or(0));
            self.advice.extend((self.claimed_in_pool >= least).then(|| self.free_more(least)));
            return;
        }
        if self.memory.is_some_and(|memory| self.growth.saturating_add(held.own) > memory.total) {
            self.advise_larger_device(&mut advice);
        } else {
            advice = from_blocks;
            self.advise_on_memory(&mut advice, held, fail_fast);
        }
        if self.refusal == Some(Refusal::Addresses) && held.dedicated_addresses >= self.growth {
            advice.push(Advice::FreeAddresses { held: held.dedicated_addresses });
        }
        if advice.is_empty() {
            advice.push(Advice::Retry);
        }
        self.advice = advice;
    }

    /// A device that has room for the request beside what is live here and what others hold, under
    /// the same options.
    fn advise_larger_device(&self, advice: &mut Vec<Advice>) {
        let ours = self.allocated.saturating_add(self.growth);
        let others = self.held_by_others();
        advice.push(Advice::LargerDevice { bytes: ours.saturating_add(others).saturating_add(self.headroom) });
        if self.limit.is_some_and(|limit| limit < ours) {
            advice.push(Advice::RaiseLimit { to: ours });
        }
    }

    fn advise_on_memory(&self, advice: &mut Vec<Advice>, held: &Held, fail_fast: bool) {
        let is_lacking = self.lacking_below_limit > 0 || self.lacking_on_device > 0 || self.memory.is_none();
        if !is_lacking {
            let free = self.memory.map_or(0, |memory| memory.free);
            let is_refused = self.refusal == Some(Refusal::Device) && self.from_device > 0 && self.memory.is_some();
            advice.extend(is_refused.then_some(Advice::DriverRefuses { asked: self.from_device, free }));
            return;
        }
        let waits = self.waiting.iter().filter(|(stream, _)| !held.capturing.contains(stream));
        advice.extend(waits.map(|&(stream_id, bytes)| Advice::WaitFor { stream_id, bytes }));
        let live = self.allocated.saturating_sub(held.live_in_pools).saturating_sub(held.own);
        let stays_cached = fail_fast && self.lacking_below_limit > 0;
        let own_pool = match held.own_pool_has_graphs {
            true => Advice::DropGraphs { held: held.own_pool },
            false => Advice::EmptyPool { held: held.own_pool },
        };
        let takes = self.reserved.saturating_add(self.from_device);
        let needs_device = self.lacking_on_device > 0;
        // What is lacking if all unused memory, wherever it is, came to the request in one piece.
        let beside = self.allocated.saturating_add(self.requested).saturating_add(self.padding);
        let least = beside.saturating_sub(self.allowed()).min(live);
        let others = self.held_by_others();
        let all = [
            (stays_cached && held.cached + live > 0, Advice::EmptyCache { cached: held.cached }),
            (held.captures, Advice::AfterCapture { cached: self.kept_by_captures }),
            // Otherwise it gave back what it could.
            (held.own_pool > 0 && (held.own_pool_has_graphs || stays_cached || held.captures), own_pool),
            (self.lacking_below_limit > 0, Advice::RaiseLimit { to: takes }),
            (needs_device && self.headroom > 0, self.lower_headroom()),
            (held.pinned > 0, Advice::EndPins { held: held.pinned }),
            (held.pools > 0, Advice::ReleasePools { held: held.pools }),
            (live > 0, self.free_more(least)),
            (needs_device && others > 0, Advice::OthersHold { held: others }),
        ];
        advice.extend(all.into_iter().filter(|(helps, _)| *helps).map(|(_, advice)| advice));
    }

    fn lower_headroom(&self) -> Advice {
        Advice::LowerHeadroom { to: self.headroom.saturating_sub(self.lacking_on_device) }
    }

    fn free_more(&self, least: u64) -> Advice {
        let largest = self.largest_tags.first();
        let largest = largest.and_then(|(tag, bytes)| Some((tag.clone()?, *bytes)));
        Advice::FreeMore { least, largest }
    }
}
