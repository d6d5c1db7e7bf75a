//! The out-of-memory report: the request, the memory at that time (`seen.rs`), and what helps (`advice.rs`).

mod advice;
mod seen;

use std::fmt;

use aquifer_device::MemoryInfo;

use crate::accounting::counters::Hot;
use crate::allocator::Allocator;
use crate::backing::headroom::Refusal;
use crate::error::AllocError;
use crate::format::{Bytes, Exactly};
use crate::history::{Action, Subject};
use crate::recovery::reclaim::Reclaimed;
use crate::shell::core::{Core, Request};

pub use advice::Advice;
use seen::Seen;

/// How many tags and reclaimers a report lists.
const LISTED: usize = 5;

/// The attempts of the ladder before it gave up.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    pub(crate) refusal: Option<Refusal>,
    pub(crate) released: u64,
    pub(crate) reclaimers: Vec<Reclaimed>,
    /// Bytes that the request is to get although its stream might borrow; 0 if it borrows.
    pub(crate) instead_of_borrowing: u64,
    /// True if the request is for memory apart from heaps.
    pub(crate) apart: bool,
    /// Bytes that the owner of such memory has already and keeps.
    pub(crate) own: u64,
}

/// Why a request could not be served. All sizes are bytes.
///
/// Locks are held for some blocks at a time. While other threads allocate, each block counts as it was at some moment
/// after the last attempt to serve the request, and the sums may be of slightly different moments.
///
/// Its `Display` reads like PyTorch's message and then explains.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OomReport {
    /// Ordinal of the device.
    pub device: u32,
    /// Human-readable name of the device, such as `Simulated H100 80GB`.
    pub device_name: String,
    /// Requested bytes.
    pub requested: u64,
    /// Bytes that the request takes in addition for its alignment ([`Allocator::alloc_aligned`]).
    pub padding: u64,
    /// True if its memory is mapped in granules, to which free ones move from elsewhere; false if it comes in segments.
    pub is_mapped: bool,
    /// Bytes that it takes from the device if no free memory of the allocator helps: a segment, or whole granules.
    pub growth: u64,
    /// The part of them that the device would have had to provide, because no free memory of the allocator could be moved there.
    pub from_device: u64,
    /// Bytes by which the memory held would then have exceeded the limit.
    pub lacking_below_limit: u64,
    /// Bytes that the device then lacked, headroom included.
    pub lacking_on_device: u64,
    /// The stream that the request was for, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream_id: u32,
    /// The private pool that the request was for.
    pub pool: Option<(u64, u64)>,
    /// The reason why the last attempt to take memory from the device was refused.
    pub refusal: Option<Refusal>,
    /// The limit on reserved bytes, if there is one.
    pub limit: Option<u64>,
    /// Bytes to be left free on the device.
    pub headroom: u64,
    /// Free and total bytes of the device, if the driver reported them.
    pub memory: Option<MemoryInfo>,
    /// Bytes in live blocks, rounding included.
    pub allocated: u64,
    /// Bytes requested for live blocks.
    pub requested_live: u64,
    /// Bytes of physical memory held from the device.
    pub reserved: u64,
    /// Bytes of it that no block uses but that cannot go elsewhere, because other memory uses the rest of their frame,
    /// or segment.
    pub unused_in_part: u64,
    /// The part of them that private pools keep from others: those that are open, or that graphs use.
    pub reserved_by_private_pools: u64,
    /// Bytes of the largest free block of the request's pool, whichever stream owns it.
    pub largest_free: u64,
    /// Free bytes of the request's pool, less what only captures of a private pool may have because a graph uses it.
    pub free_in_pool: u64,
    /// Number of blocks that they are in.
    pub pieces: usize,
    /// Freed bytes that other streams still use, by the stream to wait for.
    pub waiting: Vec<(u32, u64)>,
    /// Bytes used on the device but not held by this allocator: contexts, libraries, other processes.
    pub held_by_others: Option<u64>,
    /// The largest sums of live bytes by tag; `None` stands for memory without a tag.
    pub largest_tags: Vec<(Option<String>, u64)>,
    /// Bytes given back to the device while trying to serve the request.
    pub released: u64,
    /// Bytes that reclaimers reported as freed while trying.
    pub reclaimed: u64,
    /// What each of them did, in the order in which they were called.
    pub reclaimers: Vec<Reclaimed>,
    /// Unused bytes that cannot go back to the device because a stream captures.
    pub kept_by_captures: u64,
    /// What helps, most helpful first. Where one alone gives too little, several together may give enough.
    pub advice: Vec<Advice>,
}

impl Allocator {
    /// Counts, traces and reports a request that nothing served, and calls the observers. If the allocator is about to sleep, returns that
    /// error instead, because reclaimers get no turns any more.
    #[cold]
    pub(crate) fn out_of_memory(&self, request: &Request, tried: Tried) -> AllocError {
        if self.shell().refuses_keepers() {
            return AllocError::Asleep;
        }
        let memory = self.device().memory_info().ok();
        let shell = self.shell();
        let mut whole = shell.part(Some(request.slot));
        shell.counters.num_ooms.add(1);
        let (pool, free) = (whole.pools.history_id(request.pool), memory.map_or(0, |memory| memory.free));
        let subject = Subject { addr: free, size: request.size, slot: request.slot, tag: request.tag, pool };
        shell.history.lock().note(Action::Oom, subject);
        let mut from_blocks = if tried.apart { Vec::new() } else { whole.advice_to_lend(request) };
        let growth = if tried.apart { request.size } else { self.growth_bytes(&whole, request) };
        let lacking = if tried.apart { None } else { whole.lacking_bytes(request) };
        drop(whole);
        // No cached hit waits for the core's lock, under which the time grows with waiting blocks and memory apart.
        let core = shell.core();
        let mut report = core.report(request, &tried);
        let mut seen = Seen::new(&core, request, tried.own);
        let waiting = core.waiting_requested();
        report.is_mapped = tried.apart || core.paged_granule_for(request).is_some();
        drop(core);
        report.growth = growth;
        report.from_device = lacking.unwrap_or(growth);
        report.allocated = shell.read(Hot::Bytes).all.current;
        report.requested_live = shell.read(Hot::Requested).all.current.saturating_sub(waiting);
        shell.walk(|core, heap, passed| seen.add(core, heap, passed));
        let held = seen.tell(&mut report);
        report.device = self.device().info().ordinal;
        report.device_name.clone_from(&self.device().info().name);
        report.limit = self.limit();
        report.headroom = self.config().headroom;
        report.memory = memory;
        report.held_by_others =
            memory.map(|memory| memory.total.saturating_sub(memory.free).saturating_sub(report.reserved));
        report.note_lacking();
        if !tried.apart {
            from_blocks.extend(self.advice_from_blocks(request));
            from_blocks.extend(self.advice_on_segments(request, &report));
        }
        report.advise(from_blocks, &held, self.config().fail_fast);
        tracing::debug!(
            target: "aquifer::oom",
            stream = request.slot,
            requested = report.requested,
            allocated = report.allocated,
            reserved = report.reserved,
            "out of memory"
        );
        self.hooks().notify(&report);
        AllocError::OutOfMemory(Box::new(report))
    }
}

impl Core {
    /// Builds the part of the report that needs no look at blocks.
    fn report(&self, request: &Request, tried: &Tried) -> OomReport {
        let private = |number| self.pools.owner_of(number);
        OomReport {
            device: 0,
            device_name: String::new(),
            requested: request.requested,
            padding: if tried.apart { 0 } else { request.size.saturating_sub(self.classes.round(request.requested)) },
            is_mapped: false,
            growth: 0,
            from_device: 0,
            lacking_below_limit: 0,
            lacking_on_device: 0,
            stream_id: request.slot,
            pool: private(request.pool).filter(|_| !tried.apart).map(|private| private.id),
            refusal: tried.refusal,
            limit: None,
            headroom: 0,
            memory: None,
            allocated: 0,
            requested_live: 0,
            reserved: self.reserved,
            unused_in_part: 0,
            reserved_by_private_pools: 0,
            largest_free: 0,
            free_in_pool: 0,
            pieces: 0,
            waiting: self.waiting_bytes(),
            held_by_others: None,
            largest_tags: Vec::new(),
            released: tried.released,
            reclaimed: tried.reclaimers.iter().fold(0, |sum, one| sum.saturating_add(one.bytes)),
            reclaimers: tried.reclaimers.clone(),
            kept_by_captures: 0,
            advice: Vec::new(),
        }
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OomReport { device, reserved, allocated, .. } = *self;
        // As PyTorch's, it names the segment that would have been taken from the device; unlike PyTorch's, also what
        // for.
        let tried = if self.is_mapped { self.requested } else { self.growth };
        let [tried, requested] = [tried, self.requested].map(|bytes| Bytes(bytes).to_string());
        write!(f, "out of memory. Tried to allocate {tried}")?;
        if tried != requested {
            write!(f, " for a request of {requested}")?;
        }
        if self.padding > 0 {
            write!(f, ", and {} more for its alignment", Bytes(self.padding))?;
        }
        write!(f, ". GPU {device} ({}) ", self.device_name)?;
        match self.memory {
            Some(memory) => {
                write!(f, "has a total capacity of {} of which {} is free. ", Bytes(memory.total), Bytes(memory.free))?;
            }
            None => write!(f, "did not tell how much memory is free. ")?,
        }
        if let Some(limit) = self.limit {
            write!(f, "{} allowed; ", Bytes(limit))?;
        }
        if let Some(others) = self.held_by_others.filter(|&others| others > 0) {
            write!(f, "{} is held by others than this allocator. ", Bytes(others))?;
        }
        let unallocated = reserved.saturating_sub(allocated);
        write!(f, "{} is allocated and {} is reserved but unallocated", Bytes(allocated), Bytes(unallocated))?;
        match self.reserved_by_private_pools {
            0 => write!(f, ".")?,
            pools => write!(f, "; of both together, private pools hold {}.", Bytes(pools))?,
        }
        self.explain(f)
    }
}

impl OomReport {
    fn explain(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.unused_in_part > 0 {
            let (unused, what) = (Bytes(self.unused_in_part), if self.is_mapped { "frames" } else { "segments" });
            write!(f, "\n  unallocated in {what} that other memory uses in part: {unused}")?;
        }
        let (free, largest) = (Bytes(self.free_in_pool), Bytes(self.largest_free));
        match self.pieces {
            0 => {}
            1 => write!(f, "\n  free in its pool: 1 piece of {free}")?,
            pieces => write!(f, "\n  free in its pool: {free} in {pieces} pieces, the largest of {largest}")?,
        }
        let (more, physical) = (Exactly(self.from_device), if self.is_mapped { " of physical memory" } else { "" });
        match self.refusal {
            Some(Refusal::Limit) => write!(f, "\n  refused by: the limit, for {more} more{physical}")?,
            Some(Refusal::Headroom) => {
                let headroom = Bytes(self.headroom);
                write!(f, "\n  refused by: the headroom of {headroom}, for {more} more{physical}")?;
            }
            Some(Refusal::Addresses) => {
                write!(f, "\n  refused by: the device's address space, for {}", Exactly(self.growth))?
            }
            Some(Refusal::Device) => write!(f, "\n  refused by: the device, for {more} more{physical}")?,
            None => {}
        }
        let lacking = [(self.lacking_below_limit, "below the limit"), (self.lacking_on_device, "on the device")];
        for (at, (bytes, place)) in lacking.into_iter().filter(|&(bytes, _)| bytes > 0).enumerate() {
            let start = if at == 0 { "\n  lacking: " } else { ", and " };
            write!(f, "{start}{} {place}", Exactly(bytes))?;
        }
        if self.released > 0 || self.reclaimed > 0 {
            let (released, reclaimed) = (Bytes(self.released), Bytes(self.reclaimed));
            write!(f, "\n  tried before: {released} given back to the device, {reclaimed} freed by reclaimers")?;
        }
        for Reclaimed { name, bytes, why } in self.reclaimers.iter().take(LISTED) {
            write!(f, "\n  asked: {name:?}, which freed {}", Bytes(*bytes))?;
            why.iter().try_for_each(|why| write!(f, ": {why}"))?;
        }
        for (tag, bytes) in &self.largest_tags {
            match tag {
                // Names come from the caller and may contain anything.
                Some(tag) => write!(f, "\n  live: {} {tag:?}", Bytes(*bytes))?,
                None => write!(f, "\n  live: {} (without a tag)", Bytes(*bytes))?,
            }
        }
        for advice in &self.advice {
            write!(f, "\n  try: {advice}")?;
        }
        Ok(())
    }
}
