//! Advice: the changes that would have made a request fit.

use std::collections::BTreeMap;
use std::fmt;

use crate::allocator::Allocator;
use crate::backing::headroom::Refusal;
use crate::format::{Bytes, Exactly};
use crate::heap::kind_of;
use crate::recovery::oom::remedies::{Holds, Remedies, frees_alone};
use crate::recovery::oom::waits::Waits;
use crate::recovery::oom::{LISTED, OomReport};
use crate::shell::core::Request;
use crate::shell::whole::Whole;
use crate::size_class::MIN_LARGE_ALLOC;

/// A change that would have made a request fit.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Advice {
    /// The free bytes would suffice if they were contiguous.
    Fragmented {
        /// Free bytes that may still be taken from the device.
        on_device: u64,
        /// Free bytes that are cached in the request's pool.
        cached: u64,
        /// Number of pieces that the cached bytes are in.
        pieces: usize,
        /// Bytes of the largest piece.
        largest: u64,
    },
    /// Wait for a stream that still uses freed memory.
    WaitFor {
        /// The stream.
        stream_id: u32,
        /// Bytes that it still uses.
        bytes: u64,
    },
    /// Let the request use a free block that the size rules keep from it.
    RelaxSplitLimit {
        /// Size of that block.
        block: u64,
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
    /// Make segments smaller, which requests from 1 to 10 MiB share.
    SmallerSegments {
        /// The largest [`crate::Config::large_segment_size`] that there is room for.
        to: u64,
    },
    /// Raise the limit to at least this.
    RaiseLimit {
        /// Bytes.
        to: u64,
    },
    /// Lower the headroom to at most this.
    LowerHeadroom {
        /// Bytes.
        to: u64,
    },
    /// Give cached memory back (`empty_cache`), or let requests do that (`throw_on_cudamalloc_oom`).
    EmptyCache {
        /// Unused bytes that are cached now.
        cached: u64,
    },
    /// Wait until no stream captures. Or, next time, give cached memory back (`empty_cache`) before a capture begins: while a stream
    /// captures, segments cannot go back to the device, nor can memory that the stream used last.
    AfterCapture {
        /// Unused bytes that are cached now and cannot go back; none if that is so only for memory that is to be freed, too.
        cached: u64,
    },
    /// Give back the memory that the request's own private pool caches ([`crate::PrivatePool::empty_cache`]).
    EmptyPool {
        /// Bytes that it holds.
        held: u64,
    },
    /// Drop the graphs whose captures allocated from the request's own private pool, ending those in progress, and then give back the memory
    /// that the pool caches ([`crate::PrivatePool::empty_cache`]): until then it keeps that for them.
    DropGraphs {
        /// Bytes that it holds.
        held: u64,
    },
    /// Drop pins ([`crate::PinnedMapping`]), which keep memory where it is.
    EndPins {
        /// Free bytes that pins keep; also live ones, if live memory is to be freed, too.
        held: u64,
    },
    /// Free memory on the device that others hold.
    OthersHold {
        /// Bytes that others hold.
        held: u64,
        /// Bytes missing.
        missing: u64,
    },
    /// Use a larger device: the whole device has less memory than the request takes from it.
    LargerDevice {
        /// The capacity that would do beside what is live here and what others hold, headroom included.
        bytes: u64,
    },
    /// Release private pools, and the live memory in them: their memory serves no other request.
    ReleasePools {
        /// Bytes that they hold.
        held: u64,
    },
    /// Drop memory that grows in place ([`crate::Growable`]) or is exported ([`crate::Exportable`]): addresses are lacking, not memory.
    FreeAddresses {
        /// Bytes of addresses that are reserved for it.
        held: u64,
    },
    /// The driver refused memory although it reports enough free memory, all of which it cannot always give (documentation of
    /// `cuMemGetInfo`). Request less, or free about as much as was requested.
    DriverRefuses {
        /// Bytes that the driver was asked for.
        asked: u64,
        /// Bytes that it reports as free.
        free: u64,
    },
    /// Free at least this much live memory of this allocator, beside which the request does not fit. More is needed if the freed memory
    /// lies between blocks that stay.
    FreeMore {
        /// Bytes missing.
        bytes: u64,
        /// The tag that holds most, with its bytes; `None` if memory without a tag holds most.
        largest: Option<(String, u64)>,
    },
    /// All of these together, because none of them suffices. Empty if nothing is known to be in the way, as when a driver call failed.
    All(Vec<Advice>),
}

impl Allocator {
    /// Advice from a look at the free blocks of the request's pool that the request may not have.
    pub(super) fn advice_from_blocks(&self, request: &Request) -> Vec<Advice> {
        let (mut relaxed, mut of_another) = (None, None);
        self.shell().each_arena(|core, arena| {
            for (owner, index) in arena.heap.indexes(request.pool) {
                let mut sizes = index.iter_from(request.size).map(|key| key.size());
                let fits = |size: u64| core.classes.fits(size, request.size);
                if owner == request.slot {
                    relaxed = relaxed.or_else(|| sizes.find(|&size| !fits(size)));
                } else {
                    of_another = of_another.or_else(|| sizes.find(|&size| fits(size)));
                }
            }
        });
        let relaxed = relaxed.map(|block| Advice::RelaxSplitLimit { block });
        relaxed.into_iter().chain(of_another.map(|block| Advice::CrossStream { block })).collect()
    }
}

impl Whole {
    /// Advice to let private pools lend their memory. As it is lent: only blocks of the stream itself, except those
    /// that graphs may use.
    pub(super) fn advice_to_lend(&mut self, request: &Request) -> Vec<Advice> {
        if request.pool >= 2 || self.try_arena(request.slot).is_none() {
            return Vec::new();
        }
        let heap = self.heap_of(request.slot);
        let mut largest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
        for number in heap.pools.numbers().filter(|&number| kind_of(number) == kind_of(request.pool)) {
            let private =
                self.pools.owner_of(number).filter(|private| private.open && !private.keeps_for_graphs(number));
            let Some((private, index)) = private.zip(heap.index(number, request.slot)) else { continue };
            let sizes = index.iter_from(request.size).map(|key| key.size());
            for size in sizes.filter(|&size| self.classes.fits(size, request.size)) {
                largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
            }
        }
        largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
    }
}

impl OomReport {
    /// Adds the advice that follows from the sums. Each piece of advice suffices by itself. `shares` is true if the request would share its
    /// segment with others, so that the segment could be smaller.
    pub(super) fn advise(&mut self, shares: bool, holds: &Holds, waits: &Waits) {
        let device_free = self.memory.map_or(0, |memory| memory.free);
        let room = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.reserved));
        let from_device = device_free.saturating_sub(self.headroom).min(room);
        let usable = from_device.saturating_add(self.free_in_pool);
        let suffices = usable >= self.segment.min(self.requested + self.padding) && self.free_in_pool > 0;
        let mut fragmented = false;
        self.advice.retain_mut(|advice| match advice {
            Advice::Fragmented { on_device, .. } => {
                (*on_device, fragmented) = (from_device, suffices);
                suffices
            }
            _ => true,
        });
        let smaller = from_device >> 20 << 20;
        if shares && smaller > MIN_LARGE_ALLOC && smaller < self.segment {
            self.advice.push(Advice::SmallerSegments { to: smaller });
        }
        let alone = self.segment.saturating_add(holds.own);
        if self.memory.is_some_and(|memory| alone > memory.total) {
            self.advice.retain(|advice| matches!(advice, Advice::SmallerSegments { .. }));
            self.advice.push(self.larger_device(holds));
        } else {
            self.advice.splice(0..0, waits.advice(usable));
            self.advise_remedies(holds, fragmented);
        }
        if self.refusal == Some(Refusal::Addresses) && holds.addresses_apart >= self.segment {
            self.advice.push(Advice::FreeAddresses { held: holds.addresses_apart });
        }
        if self.advice.is_empty() {
            self.advice.push(Advice::All(Vec::new()));
        }
        self.advice.truncate(LISTED);
    }

    /// Advice to use a device that has room for the request beside what is live here and what others hold, under the same options.
    fn larger_device(&self, holds: &Holds) -> Advice {
        let ours = Remedies { report: self, holds }.beside_live();
        let others = self.held_by_others.unwrap_or(0);
        let device = Advice::LargerDevice { bytes: ours.saturating_add(others).saturating_add(self.headroom) };
        match self.limit {
            Some(limit) if limit < ours => Advice::All(vec![device, Advice::RaiseLimit { to: ours }]),
            _ => device,
        }
    }

    fn advise_remedies(&mut self, holds: &Holds, fragmented: bool) {
        let remedies = Remedies { report: self, holds };
        // Sets that only free live memory are left out if the free memory would suffice in one piece: that is told instead.
        let sets = remedies.sufficient().into_iter().filter(|&set| !(fragmented && frees_alone(set)));
        let mut found: Vec<Advice> = sets.map(|set| remedies.advice(set)).collect();
        let (asked, free) = (self.from_device, self.memory.map_or(0, |memory| memory.free));
        let has_room = self.memory.is_some() && remedies.lacking() == (0, 0);
        if has_room && self.refusal == Some(Refusal::Device) && asked > 0 {
            found.push(Advice::DriverRefuses { asked, free });
        }
        if found.iter().any(|advice| matches!(advice, Advice::EmptyCache { .. } | Advice::AfterCapture { .. })) {
            // In pieces it is only as long as it is kept.
            self.advice.retain(|advice| !matches!(advice, Advice::Fragmented { .. }));
        }
        self.advice.extend(found);
    }
}

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Advice::Fragmented { on_device, cached, pieces, largest } => {
                let (on_device, cached, largest) = (Bytes(*on_device), Bytes(*cached), Bytes(*largest));
                let pieces = if *pieces == 1 { "1 piece of".into() } else { format!("{pieces} pieces of at most") };
                write!(
                    f,
                    "if free memory were in one piece: {on_device} may be taken from the device and {cached} is cached, in {pieces} {largest}"
                )
            }
            Advice::LargerDevice { bytes } => {
                write!(f, "only on a device of at least {}", Exactly(*bytes))
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
                write!(f, "if private pool ({a}, {b}) lent its memory (use_on_oom): it has {} free", Bytes(*block))
            }
            Advice::CrossStream { block } => {
                write!(
                    f,
                    "if streams could reuse each other's blocks (cross_stream): another one has {}",
                    Bytes(*block)
                )
            }
            Advice::SmallerSegments { to } => write!(f, "with a large_segment_size_mb of at most {}", to >> 20),
            Advice::All(all) if all.is_empty() => write!(f, "at another time: nothing is known to be in the way"),
            Advice::All(all) => all
                .iter()
                .enumerate()
                .try_for_each(|(at, advice)| write!(f, "{}{advice}", if at > 0 { ", and " } else { "" })),
            Advice::EmptyCache { cached } => {
                write!(f, "without throw_on_cudamalloc_oom, or after empty_cache() ({} is cached)", Bytes(*cached))
            }
            Advice::AfterCapture { cached } => {
                write!(f, "once no stream captures, or with empty_cache() called before the capture began")?;
                match cached {
                    0 => Ok(()),
                    cached => write!(f, " ({} of cached memory cannot go back meanwhile)", Bytes(*cached)),
                }
            }
            Advice::EmptyPool { held } => {
                let held = Bytes(*held);
                write!(f, "after PrivatePool::empty_cache() of its own pool, which holds {held}")
            }
            Advice::DropGraphs { held } => {
                let held = Bytes(*held);
                write!(
                    f,
                    "once the graphs that use its own pool are dropped, after PrivatePool::empty_cache() of that, which holds {held}"
                )
            }
            Advice::EndPins { held } => {
                write!(f, "once pins ended that keep {} of free memory in place", Bytes(*held))
            }
            Advice::RaiseLimit { to } => write!(f, "with a limit of at least {}", Exactly(*to)),
            Advice::LowerHeadroom { to } => write!(f, "with a headroom of at most {}", Exactly(*to)),
            Advice::OthersHold { held, missing } => {
                write!(f, "if others, who hold {}, freed {}", Bytes(*held), Exactly(*missing))
            }
            Advice::ReleasePools { held } => write!(f, "if private pools, which hold {}, were released", Bytes(*held)),
            Advice::FreeAddresses { held } => {
                let held = Bytes(*held);
                write!(f, "if growable and exported memory, for which {held} of addresses are reserved, were dropped")
            }
            Advice::DriverRefuses { asked, free } => write!(
                f,
                "if the driver gave what it says is free: it refused {} of {}; ask for less, or free about as much",
                Bytes(*asked),
                Bytes(*free)
            ),
            Advice::FreeMore { bytes, largest } => {
                write!(f, "after freeing at least {} more", Exactly(*bytes))?;
                match largest {
                    Some((tag, held)) => write!(f, "; most is held by {tag:?} ({})", Bytes(*held)),
                    None => Ok(()),
                }
            }
        }
    }
}
