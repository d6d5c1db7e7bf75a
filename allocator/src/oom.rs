//! The out-of-memory report: what was asked for, what there was, and what would have made it fit.

use std::collections::HashMap;
use std::fmt;

use aquifer_device::MemoryInfo;

use crate::allocator::Allocator;
use crate::core::Request;
use crate::error::AllocError;
use crate::format::Bytes;
use crate::fragmentation::unusable_index;
use crate::heap::{Block, State, kind_of};
use crate::history::{Action, Subject};
use crate::segments::Refusal;
use crate::stats::Hot;
use crate::tags::Tag;
use crate::whole::Whole;

/// How many tags and how many pieces of advice a report lists.
const LISTED: usize = 5;

/// What the ladder did before it gave up.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tried {
    pub(crate) refusal: Option<Refusal>,
    pub(crate) released: u64,
    pub(crate) reclaimed: u64,
}

/// Why a request could not be served. All sizes are bytes.
///
/// Its `Display` reads like PyTorch's message and then explains.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OomReport {
    /// Ordinal of the device.
    pub device: u32,
    /// Whether the device is a simulated one.
    pub device_name: String,
    /// Bytes that the caller asked for.
    pub requested: u64,
    /// Bytes that would have been taken from the device for it.
    pub segment: u64,
    /// Our own number of the stream it was for.
    pub stream_id: u32,
    /// The private pool it was for.
    pub pool: Option<(u64, u64)>,
    /// What refused the last attempt to take memory from the device.
    pub refusal: Option<Refusal>,
    /// The limit on reserved bytes, if there is one.
    pub limit: Option<u64>,
    /// Bytes to be left free on the device.
    pub headroom: u64,
    /// Free and total bytes of the device, if the driver tells.
    pub memory: Option<MemoryInfo>,
    /// Bytes in live blocks, rounding included.
    pub allocated: u64,
    /// Bytes that holders of live blocks asked for.
    pub requested_live: u64,
    /// Bytes held from the device.
    pub reserved: u64,
    /// The part of them that private pools hold.
    pub reserved_by_private_pools: u64,
    /// The largest free block of the request's pool, whoever owns it.
    pub largest_free: u64,
    /// Free bytes of the request's pool.
    pub free_in_pool: u64,
    /// The share of free bytes that a request of this size cannot use, 0 to 1 (Gorman & Whitcroft).
    pub unusable_index: f64,
    /// Bytes that other streams still use though they were given back, by stream waited for.
    pub waiting: Vec<(u32, u64)>,
    /// Bytes used on the device but not held by this allocator: contexts, libraries, other processes.
    pub held_by_others: Option<u64>,
    /// The largest sums of live bytes by tag; `None` is what carries no tag.
    pub largest_tags: Vec<(Option<String>, u64)>,
    /// Bytes given back to the device while trying to serve the request.
    pub released: u64,
    /// Bytes that reclaimers said they freed while trying.
    pub reclaimed: u64,
    /// What would have made the request fit, most helpful first.
    pub advice: Vec<Advice>,
}

/// Something that would have made a request fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// The free bytes would suffice, were they contiguous.
    Fragmented {
        /// Free bytes that may still be taken from the device.
        on_device: u64,
        /// Free bytes that are cached in the request's pool.
        cached: u64,
        /// Pieces the cached ones are in.
        pieces: usize,
        /// The largest of the pieces.
        largest: u64,
    },
    /// Wait for streams that still use memory given back.
    WaitFor {
        /// The stream.
        stream_id: u32,
        /// Bytes it keeps.
        bytes: u64,
    },
    /// Let requests use a free block that the size rules keep from them.
    RelaxSplitLimit {
        /// Size of that block.
        block: u64,
    },
    /// Use free memory of a private pool: `use_on_oom`, or release the pool.
    PrivatePool {
        /// Its id.
        pool: (u64, u64),
        /// The largest free block there.
        block: u64,
    },
    /// Let streams reuse each other's blocks.
    CrossStream {
        /// Size of a block that another stream owns.
        block: u64,
    },
    /// Raise the limit at least to this.
    RaiseLimit {
        /// Bytes.
        to: u64,
    },
    /// Lower the headroom at most to this.
    LowerHeadroom {
        /// Bytes.
        to: u64,
    },
    /// Free this much on the device: others hold it.
    OthersHold {
        /// Bytes used by others.
        held: u64,
        /// Bytes missing.
        missing: u64,
    },
    /// Nothing helps here: the whole device is smaller than the request.
    LargerDevice {
        /// The least capacity that would do.
        bytes: u64,
    },
    /// Free this much more; the request does not fit beside what is live.
    FreeMore {
        /// Bytes missing.
        bytes: u64,
        /// The tag that holds most, with its bytes.
        largest: Option<(String, u64)>,
    },
}

impl Allocator {
    /// Counts, traces and reports a request that nothing served, and tells the observers.
    #[cold]
    pub(crate) fn out_of_memory(&self, request: &Request, tried: Tried) -> AllocError {
        let memory = self.device().memory_info().ok();
        let shell = self.shell();
        let whole = shell.whole();
        shell.counters.num_ooms.add(1);
        let (pool, free) = (whole.pools.history_id(request.pool), memory.map_or(0, |memory| memory.free));
        let subject = Subject { addr: free, size: request.size, slot: request.slot, tag: request.tag, pool };
        shell.history.lock().note(Action::Oom, subject);
        let mut report = whole.report(request, tried);
        report.segment = self.growth_bytes(&whole, request);
        drop(whole);
        report.device = self.device().info().ordinal;
        report.device_name.clone_from(&self.device().info().name);
        report.limit = self.limit();
        report.headroom = self.config().headroom;
        report.memory = memory;
        report.allocated = shell.read(Hot::Bytes).all.current;
        report.requested_live = shell.read(Hot::Requested).all.current;
        report.held_by_others = memory.map(|memory| (memory.total - memory.free).saturating_sub(report.reserved));
        report.advise();
        tracing::debug!(requested = report.requested, reserved = report.reserved, "out of memory");
        self.hooks().notify(&report);
        AllocError::OutOfMemory(Box::new(report))
    }
}

impl Whole {
    /// The part of the report that is read under the lock.
    fn report(&self, request: &Request, tried: Tried) -> OomReport {
        let free: Vec<&Block> = self.free_blocks(request.pool).collect();
        let sizes = || free.iter().map(|block| block.size);
        let private = |number| self.pools.owner_of(number);
        let of_private = self.heaps().flat_map(|heap| {
            let regions = heap.regions().filter(|region| private(region.pool).is_some());
            regions.flat_map(|region| heap.mapped_ranges(region)).map(|(_, bytes)| bytes)
        });
        let reserved_by_private_pools = of_private.sum();
        OomReport {
            device: 0,
            device_name: String::new(),
            requested: request.requested,
            segment: 0,
            stream_id: request.slot,
            pool: private(request.pool).map(|private| private.id),
            refusal: tried.refusal,
            limit: None,
            headroom: 0,
            memory: None,
            allocated: 0,
            requested_live: 0,
            reserved: self.reserved,
            reserved_by_private_pools,
            largest_free: sizes().max().unwrap_or(0),
            free_in_pool: sizes().sum(),
            unusable_index: unusable_index(sizes(), request.size),
            waiting: self.waiting_bytes(),
            held_by_others: None,
            largest_tags: self.largest_tags(),
            released: tried.released,
            reclaimed: tried.reclaimed,
            advice: self.advice_from_blocks(request, &free),
        }
    }

    fn largest_tags(&self) -> Vec<(Option<String>, u64)> {
        let mut by_tag: HashMap<u32, u64> = HashMap::new();
        let blocks = self.heaps().flat_map(|heap| heap.blocks.iter()).map(|(_, block)| block);
        for block in blocks.filter(|block| block.state == State::Live) {
            *by_tag.entry(block.tag).or_default() += block.size;
        }
        for owned in self.paged.iter().flat_map(|paged| paged.owned.values()).filter(|owned| owned.size > 0) {
            *by_tag.entry(owned.tag.0).or_default() += owned.size;
        }
        let mut tags: Vec<(u32, u64)> = by_tag.into_iter().collect();
        tags.sort_by_key(|&(tag, bytes)| (std::cmp::Reverse(bytes), tag));
        tags.truncate(LISTED);
        tags.into_iter().map(|(tag, bytes)| (Tag(tag).name().map(|name| name.to_string()), bytes)).collect()
    }

    /// Advice that needs a look at the blocks: those that are there, but not for this request.
    fn advice_from_blocks(&self, request: &Request, free: &[&Block]) -> Vec<Advice> {
        let mut advice: Vec<Advice> =
            self.waiting_bytes().into_iter().map(|(stream_id, bytes)| Advice::WaitFor { stream_id, bytes }).collect();
        let own = |block: &&&Block| block.owner == request.slot;
        let large_enough = |block: &&&Block| block.size >= request.size;
        if let Some(block) = free.iter().filter(own).find(large_enough) {
            advice.push(Advice::RelaxSplitLimit { block: block.size });
        }
        let fits = |block: &&&Block| self.classes.fits(block.size, request.size);
        if let Some(block) = free.iter().filter(|block| !own(block)).find(fits) {
            advice.push(Advice::CrossStream { block: block.size });
        }
        let kind = kind_of(request.pool) as usize;
        for private in self.pools.private.iter().filter(|private| private.numbers[kind] != request.pool) {
            let largest = self.free_blocks(private.numbers[kind]).map(|block| block.size).max();
            if let Some(block) = largest.filter(|&size| size >= request.size) {
                advice.push(Advice::PrivatePool { pool: private.id, block });
            }
        }
        advice.push(Advice::Fragmented {
            on_device: 0,
            cached: free.iter().map(|block| block.size).sum(),
            pieces: free.len(),
            largest: free.iter().map(|block| block.size).max().unwrap_or(0),
        });
        advice
    }
}

impl OomReport {
    /// Completes the advice with what only the sums tell.
    fn advise(&mut self) {
        let device_free = self.memory.map_or(0, |memory| memory.free);
        let room = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.reserved));
        let from_device = device_free.saturating_sub(self.headroom).min(room);
        let usable = from_device + self.free_in_pool;
        let fragmented = usable >= self.segment.min(self.requested) && self.free_in_pool > 0;
        self.advice.retain_mut(|advice| match advice {
            Advice::Fragmented { on_device, .. } => {
                *on_device = from_device;
                fragmented
            }
            _ => true,
        });
        match self.refusal {
            Some(Refusal::Limit) if device_free >= self.segment => {
                self.advice.push(Advice::RaiseLimit { to: self.reserved.saturating_add(self.segment) });
            }
            Some(Refusal::Headroom) if device_free >= self.segment => {
                self.advice.push(Advice::LowerHeadroom { to: device_free - self.segment });
            }
            _ => {}
        }
        let missing = self.segment.saturating_sub(from_device);
        // Others can help where the device has too little, not where the limit does.
        let missing_there = self.segment.saturating_sub(device_free.saturating_sub(self.headroom));
        if let Some(held) = self.held_by_others.filter(|&held| held >= missing_there && missing_there > 0) {
            self.advice.push(Advice::OthersHold { held, missing: missing_there });
        }
        if self.memory.is_some_and(|memory| self.segment > memory.total) {
            self.advice = vec![Advice::LargerDevice { bytes: self.segment }];
        } else if !fragmented {
            let largest = self.largest_tags.iter().find_map(|(tag, bytes)| Some((tag.clone()?, *bytes)));
            self.advice.push(Advice::FreeMore { bytes: missing, largest });
        }
        self.advice.truncate(LISTED);
    }
}

impl fmt::Display for OomReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OomReport { device, requested, reserved, allocated, .. } = *self;
        write!(f, "out of memory. Tried to allocate {}. GPU {device} ({}) ", Bytes(requested), self.device_name)?;
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
        let percent = self.unusable_index * 100.0;
        write!(
            f,
            "\n  free in its pool: {}, the largest piece {}; {percent:.0} % of it is unusable for this request",
            Bytes(self.free_in_pool),
            Bytes(self.largest_free)
        )?;
        match self.refusal {
            Some(Refusal::Limit) => write!(f, "\n  refused by: the limit, for a segment of {}", Bytes(self.segment))?,
            Some(Refusal::Headroom) => {
                write!(
                    f,
                    "\n  refused by: the headroom of {}, for a segment of {}",
                    Bytes(self.headroom),
                    Bytes(self.segment)
                )?;
            }
            Some(Refusal::Addresses) => {
                write!(f, "\n  refused by: the device's address space, for {}", Bytes(self.segment))?
            }
            Some(Refusal::Device) => write!(f, "\n  refused by: the device, for a segment of {}", Bytes(self.segment))?,
            None => {}
        }
        if self.released + self.reclaimed > 0 {
            let (released, reclaimed) = (Bytes(self.released), Bytes(self.reclaimed));
            write!(f, "\n  tried before: {released} given back to the device, {reclaimed} freed by reclaimers")?;
        }
        for (tag, bytes) in &self.largest_tags {
            write!(f, "\n  live: {} {}", Bytes(*bytes), tag.as_deref().unwrap_or("(without a tag)"))?;
        }
        for advice in &self.advice {
            write!(f, "\n  it would fit: {advice}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Advice::Fragmented { on_device, cached, pieces, largest } => write!(
                f,
                "if free memory were in one piece: {} is free on the device and {} cached, in {pieces} pieces of at most {}",
                Bytes(*on_device),
                Bytes(*cached),
                Bytes(*largest)
            ),
            Advice::LargerDevice { bytes } => {
                write!(f, "only on a device of at least {}", Bytes(*bytes))
            }
            Advice::WaitFor { stream_id, bytes } => {
                write!(
                    f,
                    "once stream {stream_id} is done with {} that were given back while it used them",
                    Bytes(*bytes)
                )
            }
            Advice::RelaxSplitLimit { block } => {
                write!(
                    f,
                    "with a larger max_split_size_mb or max_non_split_rounding_mb: a block of {} is free",
                    Bytes(*block)
                )
            }
            Advice::PrivatePool { pool: (a, b), block } => {
                write!(
                    f,
                    "if private pool ({a}, {b}) were released or lent (use_on_oom): it has {} free",
                    Bytes(*block)
                )
            }
            Advice::CrossStream { block } => {
                write!(
                    f,
                    "if streams could reuse each other's blocks (cross_stream): another one has {}",
                    Bytes(*block)
                )
            }
            Advice::RaiseLimit { to } => write!(f, "with a limit of at least {}", Bytes(*to)),
            Advice::LowerHeadroom { to } => write!(f, "with a headroom of at most {}", Bytes(*to)),
            Advice::OthersHold { held, missing } => {
                write!(f, "if others, who hold {}, freed {}", Bytes(*held), Bytes(*missing))
            }
            Advice::FreeMore { bytes, largest } => {
                write!(f, "after freeing {} more", Bytes(*bytes))?;
                match largest {
                    Some((tag, held)) => write!(f, "; most is held by {tag:?} ({})", Bytes(*held)),
                    None => Ok(()),
                }
            }
        }
    }
}
