//! The report: facts about the request and the memory at that time, and how they are written.

use std::fmt;
use std::path::PathBuf;

use aquifer_device::MemoryInfo;

use crate::accounting::attribution::{Attribution, write_holders};
use crate::core::limits::Refusal;
use crate::format::{Bytes, Exactly};
use crate::recovery::oom::advice::Advice;
use crate::snapshot::SaveError;

/// Why a request could not be served. All sizes are bytes.
///
/// Locks are held for some blocks at a time. While other threads allocate, each block counts as it
/// was at some moment after the last attempt to serve the request, and the sums may be of slightly
/// different moments.
///
/// Its `Display` reads like PyTorch's message and then explains.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OomReport {
    /// Ordinal of the device.
    pub device: u32,
    /// Human-readable name of the device, such as `NVIDIA H100 80GB HBM3`.
    pub device_name: String,
    /// Requested bytes.
    pub requested: u64,
    /// Bytes that the request takes in addition for its alignment
    /// ([`crate::Allocator::alloc_aligned`]).
    pub padding: u64,
    /// True if its memory is mapped in granules, to which free ones move from elsewhere; false if
    /// it comes in segments.
    pub is_mapped: bool,
    /// Bytes that it takes from the device if no free memory of the allocator helps: a segment, or
    /// whole granules.
    pub growth: u64,
    /// The part of them that the device would have had to provide, because no free memory of the
    /// allocator could be moved there.
    pub from_device: u64,
    /// Bytes by which the memory held would then have exceeded the limit.
    pub lacking_below_limit: u64,
    /// Bytes that the device then lacked, headroom included.
    pub lacking_on_device: u64,
    /// The stream that the request was for, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream_id: u32,
    /// The private pool that the request was for.
    pub pool: Option<(u64, u64)>,
    /// The limit of that pool, if it has one ([`crate::PoolOptions::limit`]).
    pub pool_limit: Option<u64>,
    /// Bytes requested for live blocks of that pool, if it has a limit.
    pub claimed_in_pool: u64,
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
    /// Bytes of it that no block uses but that cannot go elsewhere, because other memory uses the
    /// rest of their frame, or segment.
    pub unused_in_part: u64,
    /// The part of them that private pools keep from others: those that are open, or that graphs
    /// use.
    pub reserved_by_private_pools: u64,
    /// Bytes of the largest free block of the request's pool, whichever stream owns it.
    pub largest_free: u64,
    /// Free bytes of the request's pool, less what only captures of a private pool may have because
    /// a graph uses it.
    pub free_in_pool: u64,
    /// Number of blocks that they are in.
    pub pieces: usize,
    /// Freed bytes that other streams still use, by the stream to wait for.
    pub waiting: Vec<(u32, u64)>,
    /// The device's memory by holder, if the driver reported how much is free. Figures of processes
    /// may be a second old; what they took since is unattributed. Where a limit refused the
    /// request, they are unknown.
    pub attribution: Option<Attribution>,
    /// The largest sums of live bytes by tag; `None` stands for memory without a tag. Those of the
    /// request's pool alone if its limit refused.
    pub largest_tags: Vec<(Option<String>, u64)>,
    /// Bytes given back to the device while trying to serve the request.
    pub released: u64,
    /// Bytes that reclaimers reported as freed while trying.
    pub reclaimed: u64,
    /// What each of them did, in the order in which they were called.
    pub reclaimers: Vec<Reclaimed>,
    /// Unused bytes that cannot go back to the device because a stream captures.
    pub kept_by_captures: u64,
    /// True if the allocator was opening and took its reserve ([`crate::Config::reserve`]).
    pub is_reserve: bool,
    /// True if the request was part of a capture.
    pub is_captured: bool,
    /// Bytes that the request's private pool holds.
    pub held_by_pool: u64,
    /// The private pool that had lent as much while its graphs were idle
    /// ([`PoolOptions::lends_when_idle`](crate::PoolOptions::lends_when_idle)), if the memory was
    /// for a launch of one of them, or for the capture of another.
    pub launched_pool: Option<(u64, u64)>,
    /// Bytes that idle graphs have lent, in all.
    pub lent_by_graphs: u64,
    /// The file of the snapshot that the option `oom_snapshot` saved, or why it was not saved; `None`
    /// unless this is the first refused request.
    pub snapshot: Option<Result<PathBuf, SaveError>>,
    /// What helps, most helpful first. Where one alone gives too little, several together may give
    /// enough.
    pub advice: Vec<Advice>,
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OomReport { device, reserved, allocated, .. } = *self;
        // As PyTorch's, it names the segment that would have been taken from the device; unlike
        // PyTorch's, also what for.
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
                let is_shared = self.attribution.as_ref().is_some_and(|all| all.shares_host_memory);
                let shared = if is_shared { ", shared with the host," } else { "" };
                let (total, free) = (Bytes(memory.total), Bytes(memory.free));
                write!(f, "has a total capacity of {total}{shared} of which {free} is free. ")?;
            }
            None => write!(f, "did not tell how much memory is free. ")?,
        }
        if let Some(limit) = self.limit {
            write!(f, "{} allowed; ", Bytes(limit))?;
        }
        let others = self.attribution.as_ref().map(Attribution::others).unwrap_or_default();
        if !others.is_empty() {
            write_holders(f, others)?;
            f.write_str(" ")?;
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
        if self.is_reserve {
            write!(f, "\n  for: the reserve (reserve_mb), which is taken when an allocator opens")?;
        }
        if self.is_captured {
            let held = Bytes(self.held_by_pool);
            write!(f, "\n  for: a capture, whose pool holds {held}; while it lasts, no memory moves or goes back")?;
        }
        if self.launched_pool.is_some() {
            write!(f, "\n  for: memory that idle graphs of a pool lent; nothing was launched")?;
        }
        if self.lent_by_graphs > 0 {
            write!(f, "\n  lent by idle graphs, whose launches need as much again: {}", Bytes(self.lent_by_graphs))?;
        }
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
            Some(Refusal::PoolLimit) => {
                let (limit, live) = (Bytes(self.pool_limit.unwrap_or(0)), Bytes(self.claimed_in_pool));
                let (a, b) = self.pool.unwrap_or_default();
                write!(f, "\n  refused by: the limit of {limit} of private pool ({a}, {b}), in which {live} is live")?;
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
        match &self.snapshot {
            Some(Ok(path)) => write!(f, "\n  snapshot: saved as {}", path.display())?,
            Some(Err(error)) => write!(f, "\n  snapshot: {error}")?,
            None => {}
        }
        for advice in &self.advice {
            write!(f, "\n  try: {advice}")?;
        }
        Ok(())
    }
}

/// How many tags and reclaimers a report lists.
pub(crate) const LISTED: usize = 5;

/// What a reclaimer did for a request that failed nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The name that it was registered with. Reclaimers of one name count as one.
    pub name: String,
    /// Bytes that it reported as freed, in all rounds.
    pub bytes: u64,
    /// Why it freed no more, if it said so.
    pub why: Option<String>,
}
