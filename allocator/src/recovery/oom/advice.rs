//! What helps a request that was refused.

use std::fmt;

use crate::accounting::attribution::Attribution;
use crate::core::limits::Refusal;
use crate::format::{Bytes, Exactly};
use crate::recovery::oom::report::OomReport;

/// Something that helps a request that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// Wait for a stream that still uses freed memory.
    WaitFor {
        /// The stream.
        stream_id: u32,
        /// Bytes that it still uses.
        bytes: u64,
    },
    /// Let a private pool lend its free memory (`use_on_oom`).
    PrivatePool {
        /// Id of the pool.
        pool: (u64, u64),
        /// The largest free block there that the request would get.
        block: u64,
    },
    /// Let streams reuse each other's blocks.
    CrossStream {
        /// Size of a block that another stream owns.
        block: u64,
    },
    /// Raise the limit.
    RaiseLimit {
        /// The least limit, in bytes, that does not refuse the request.
        to: u64,
    },
    /// Lower the headroom.
    LowerHeadroom {
        /// The largest headroom, in bytes, with which the device has enough; 0 if it has too little
        /// without any, too.
        to: u64,
    },
    /// Give cached memory back (`empty_cache`), or let requests do that
    /// (`throw_on_cudamalloc_oom`).
    EmptyCache {
        /// Unused bytes that are cached now.
        cached: u64,
    },
    /// Wait until no stream captures. Or, next time, give cached memory back (`empty_cache`) before
    /// a capture begins: while a stream captures, segments cannot go back to the device, nor can
    /// memory that the stream used last.
    AfterCapture {
        /// Unused bytes that are cached now and cannot go back.
        cached: u64,
    },
    /// Give back the memory that the request's own private pool caches
    /// ([`crate::PrivatePool::empty_cache`]).
    EmptyPool {
        /// Bytes that it holds.
        held: u64,
    },
    /// Drop the graphs whose captures allocated from the request's own private pool, ending those
    /// in progress, and then give back the memory that the pool caches
    /// ([`crate::PrivatePool::empty_cache`]): until then it keeps that for them.
    DropGraphs {
        /// Bytes that it holds.
        held: u64,
    },
    /// Drop pins ([`crate::PinnedMapping`]), which keep memory where it is.
    EndPins {
        /// Bytes that pins keep.
        held: u64,
    },
    /// Release private pools, and the live memory in them: their memory serves no other request.
    ReleasePools {
        /// Bytes that they hold.
        held: u64,
    },
    /// Free live memory of this allocator.
    FreeMore {
        /// No less than this many bytes will do, wherever they are. More is needed if what is freed
        /// lies between blocks that stay. 0 if there is enough free memory already, in pieces, or
        /// the driver did not tell how much there is.
        least: u64,
        /// The tag that holds most, with its bytes; `None` if memory without a tag holds most.
        largest: Option<(String, u64)>,
    },
    /// Free memory of the device that others hold: contexts, libraries, other processes.
    OthersHold {
        /// Bytes that others hold.
        held: u64,
    },
    /// Use a larger device: the whole device has less memory than the request takes from it.
    LargerDevice {
        /// The capacity that would do beside what is live here and what others hold, headroom
        /// included.
        bytes: u64,
    },
    /// Drop memory that grows in place ([`crate::Growable`]) or is exported
    /// ([`crate::Exportable`]): addresses are lacking, not memory.
    FreeAddresses {
        /// Bytes of addresses that are reserved for it.
        held: u64,
    },
    /// The driver refused memory although it reports enough free memory, all of which it cannot
    /// always give (documentation of `cuMemGetInfo`). Request less, or free about as much as was
    /// requested.
    DriverRefuses {
        /// Bytes that the driver was asked for.
        asked: u64,
        /// Bytes that it reports as free.
        free: u64,
    },
    /// Ask again: nothing is known to be in the way any more.
    Retry,
}

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

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Advice::WaitFor { stream_id, bytes } => {
                write!(f, "wait for stream {stream_id}, which still uses {} of freed memory", Bytes(*bytes))
            }
            Advice::PrivatePool { pool: (a, b), block } => {
                write!(f, "let private pool ({a}, {b}) lend its memory (use_on_oom): it has {} free", Bytes(*block))
            }
            Advice::CrossStream { block } => {
                write!(
                    f,
                    "let streams reuse each other's blocks (cross_stream): another one has {} free",
                    Bytes(*block)
                )
            }
            Advice::EmptyCache { cached } => {
                write!(
                    f,
                    "call empty_cache(), which gives back what is cached ({}), or do without throw_on_cudamalloc_oom",
                    Bytes(*cached)
                )
            }
            Advice::AfterCapture { cached } => {
                write!(f, "wait until no stream captures, or call empty_cache() before a capture begins")?;
                match cached {
                    0 => Ok(()),
                    kept => write!(f, ": meanwhile {} of unused memory cannot go back to the device", Bytes(*kept)),
                }
            }
            Advice::EmptyPool { held } => {
                write!(f, "call PrivatePool::empty_cache() of the request's own pool, which holds {}", Bytes(*held))
            }
            Advice::DropGraphs { held } => {
                write!(
                    f,
                    "drop the graphs that use the request's own pool, which holds {}, and call its empty_cache()",
                    Bytes(*held)
                )
            }
            Advice::EndPins { held } => write!(f, "drop pins, which keep {} in place", Bytes(*held)),
            Advice::RaiseLimit { to } => write!(f, "raise the limit to {}", Exactly(*to)),
            Advice::LowerHeadroom { to } => write!(f, "lower the headroom to {}", Exactly(*to)),
            Advice::OthersHold { held } => {
                write!(f, "free memory of the device that others than this allocator hold: {}", Bytes(*held))
            }
            Advice::LargerDevice { bytes } => write!(f, "use a device of at least {}", Exactly(*bytes)),
            Advice::ReleasePools { held } => write!(f, "release private pools, which hold {}", Bytes(*held)),
            Advice::FreeAddresses { held } => {
                let held = Bytes(*held);
                write!(f, "drop growable and exported memory, for which {held} of addresses are reserved")
            }
            Advice::DriverRefuses { asked, free } => {
                let (asked, free) = (Bytes(*asked), Bytes(*free));
                write!(f, "request less, or free about as much: the driver refused {asked}, and reports {free} as free")
            }
            Advice::FreeMore { least, largest } => {
                match least {
                    0 => write!(f, "free live memory: larger pieces come together then")?,
                    least => write!(f, "free at least {}", Exactly(*least))?,
                }
                match largest {
                    Some((tag, held)) => write!(f, "; most is held by {tag:?} ({})", Bytes(*held)),
                    None => Ok(()),
                }
            }
            Advice::Retry => write!(f, "ask again: nothing is known to be in the way"),
        }
    }
}
