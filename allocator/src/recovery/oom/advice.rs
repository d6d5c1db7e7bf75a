//! What would have made a request fit.

use std::fmt;

use crate::backing::segments::Refusal;
use crate::format::Bytes;
use crate::heap::{Block, kind_of};
use crate::recovery::oom::{LISTED, OomReport};
use crate::shell::core::Request;
use crate::shell::whole::Whole;
use crate::size_class::MIN_LARGE_ALLOC;

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
    /// Make segments smaller, which requests from 1 to 10 MiB share.
    SmallerSegments {
        /// The largest [`crate::Config::large_segment_size`] that there is room for.
        to: u64,
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
    /// No other memory helps: the whole device is smaller than what the request takes from it.
    LargerDevice {
        /// The least capacity that would do.
        bytes: u64,
    },
    /// Release private pools: what they hold serves nobody else.
    ReleasePools {
        /// Bytes they hold.
        held: u64,
    },
    /// The driver refused memory although it says that enough is free: it cannot always give all of that (documentation of
    /// `cuMemGetInfo`). Ask for less, or free about as much as it was asked for.
    DriverRefuses {
        /// Bytes that the driver was asked for.
        asked: u64,
        /// Bytes that it says are free.
        free: u64,
    },
    /// Free at least this much of what is live here; the request does not fit beside it. More, where what is freed lies between
    /// blocks that stay.
    FreeMore {
        /// Bytes missing.
        bytes: u64,
        /// The tag that holds most, with its bytes; `None` if what carries no tag does.
        largest: Option<(String, u64)>,
    },
    /// All of these together; none of them suffices. Empty where nothing is known to be in the way, as when a driver call failed.
    All(Vec<Advice>),
}

/// What is lacking of the bytes that the request would take from the device.
#[derive(Clone, Copy, Debug)]
struct Lacking {
    /// Below the limit.
    limit: u64,
    /// On the device, beside the headroom.
    device: u64,
    /// Whether what is live here would be enough.
    live_suffices: bool,
}

impl Whole {
    /// Advice that needs a look at the blocks: those that are there, but not for this request.
    pub(super) fn advice_from_blocks(&self, request: &Request, free: &[&Block]) -> Vec<Advice> {
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
        for private in self.pools.private.iter().filter(|private| !private.owns(request.pool)) {
            let own = private.numbers().filter(|&number| kind_of(number) == kind_of(request.pool));
            let largest = own.flat_map(|number| self.free_blocks(number)).map(|block| block.size).max();
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
    /// Completes the advice with what only the sums tell. Each piece suffices by itself. `shares` tells whether the request would
    /// share its segment with others, so that it could be smaller.
    pub(super) fn advise(&mut self, shares: bool) {
        let device_free = self.memory.map_or(0, |memory| memory.free);
        let room = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.reserved));
        let from_device = device_free.saturating_sub(self.headroom).min(room);
        let usable = from_device.saturating_add(self.free_in_pool);
        let fragmented = usable >= self.segment.min(self.requested) && self.free_in_pool > 0;
        self.advice.retain_mut(|advice| match advice {
            Advice::Fragmented { on_device, .. } => {
                *on_device = from_device;
                fragmented
            }
            _ => true,
        });
        let smaller = from_device >> 20 << 20;
        if shares && smaller > MIN_LARGE_ALLOC && smaller < self.segment {
            self.advice.push(Advice::SmallerSegments { to: smaller });
        }
        if self.memory.is_some_and(|memory| self.segment > memory.total) {
            self.advice.retain(|advice| matches!(advice, Advice::SmallerSegments { .. }));
            self.advice.push(Advice::LargerDevice { bytes: self.segment });
        } else {
            let lacking = self.lacking(room, device_free);
            let remedies = self.remedies(lacking, device_free);
            let frees = |advice: &Advice| matches!(advice, Advice::FreeMore { .. });
            self.advice.extend(remedies.into_iter().filter(|advice| !fragmented || !frees(advice)));
            let has_room = self.memory.is_some() && (lacking.limit, lacking.device) == (0, 0);
            if has_room && self.refusal == Some(Refusal::Device) && self.from_device > 0 {
                self.advice.push(Advice::DriverRefuses { asked: self.from_device, free: device_free });
            }
        }
        if self.advice.is_empty() {
            self.advice.push(self.everything());
        }
        self.advice.truncate(LISTED);
    }

    /// All that is in the way of a request that nothing less would serve.
    fn everything(&self) -> Advice {
        let (segment, held) = (self.segment, self.held_by_others.unwrap_or(0));
        let beside = self.memory.map_or(u64::MAX, |memory| memory.total.saturating_sub(segment));
        let raise = self.limit.is_some_and(|limit| limit < segment).then_some(Advice::RaiseLimit { to: segment });
        let lower = (self.headroom > beside).then_some(Advice::LowerHeadroom { to: beside });
        let others = (held > 0).then_some(Advice::OthersHold { held, missing: held });
        let pools = self.held_by_other_pools();
        let pools = (pools > 0).then_some(Advice::ReleasePools { held: pools });
        let live = (self.allocated > 0).then(|| self.free_more(self.allocated));
        let mut all: Vec<Advice> = [raise, lower, others, pools, live].into_iter().flatten().collect();
        if all.len() == 1 { all.swap_remove(0) } else { Advice::All(all) }
    }

    /// Bytes that private pools keep from the request. Its own pool, if it has one, is not told from others: then it is none.
    fn held_by_other_pools(&self) -> u64 {
        if self.pool.is_none() { self.reserved_by_private_pools } else { 0 }
    }

    fn lacking(&self, room: u64, device_free: u64) -> Lacking {
        let wanted = |bytes: u64| bytes.saturating_add(self.headroom);
        // What is reserved and not live is free with it, such as the rest of granules.
        let ours = self.reserved.saturating_sub(self.held_by_other_pools());
        let ours = self.memory.map_or(u64::MAX, |_| device_free.saturating_add(ours));
        let live_suffices = wanted(self.segment) <= ours && self.segment <= self.limit.unwrap_or(u64::MAX);
        Lacking {
            limit: self.from_device.saturating_sub(room),
            device: self.memory.map_or(self.from_device, |_| wanted(self.from_device).saturating_sub(device_free)),
            live_suffices: live_suffices && self.allocated > 0,
        }
    }

    /// What gives the bytes that are lacking: for the limit, for the device, and for both.
    fn remedies(&self, lacking: Lacking, device_free: u64) -> Vec<Advice> {
        let raise = Advice::RaiseLimit { to: self.reserved.saturating_add(self.from_device) };
        let mut remedies = match (lacking.limit, lacking.device) {
            (0, _) => self.on_device(lacking, device_free),
            (_, 0) => vec![raise],
            (_, _) => {
                let first = self.on_device(lacking, device_free).into_iter().next();
                first.map(|there| Advice::All(vec![raise, there])).into_iter().collect()
            }
        };
        let missing = lacking.limit.max(lacking.device);
        if missing > 0 && lacking.live_suffices {
            remedies.push(self.free_more(missing));
        }
        remedies
    }

    /// What gives the bytes that the device lacks, beside freeing what is live here alone.
    fn on_device(&self, lacking: Lacking, device_free: u64) -> Vec<Advice> {
        let (missing, held) = (lacking.device, self.held_by_others.unwrap_or(0));
        let mut found = Vec::new();
        if missing > 0 && self.headroom > 0 && device_free >= self.from_device {
            found.push(Advice::LowerHeadroom { to: device_free - self.from_device });
        }
        if missing > 0 && held >= missing {
            found.push(Advice::OthersHold { held, missing });
        } else if missing > held
            && held > 0
            && self.allocated > 0
            && !lacking.live_suffices
            && missing - held <= self.reserved
        {
            let all_of_others = Advice::OthersHold { held, missing: held };
            found.push(Advice::All(vec![self.free_more(missing - held), all_of_others]));
        }
        found
    }

    fn free_more(&self, bytes: u64) -> Advice {
        let largest = self.largest_tags.first().and_then(|(tag, bytes)| Some((tag.clone()?, *bytes)));
        Advice::FreeMore { bytes: bytes.min(self.allocated), largest }
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
            Advice::SmallerSegments { to } => write!(f, "with a large_segment_size_mb of at most {}", to >> 20),
            Advice::All(all) if all.is_empty() => write!(f, "at another time: nothing is known to be in the way"),
            Advice::All(all) => all
                .iter()
                .enumerate()
                .try_for_each(|(at, advice)| write!(f, "{}{advice}", if at > 0 { ", and " } else { "" })),
            Advice::RaiseLimit { to } => write!(f, "with a limit of at least {}", Bytes(*to)),
            Advice::LowerHeadroom { to } => write!(f, "with a headroom of at most {}", Bytes(*to)),
            Advice::OthersHold { held, missing } => {
                write!(f, "if others, who hold {}, freed {}", Bytes(*held), Bytes(*missing))
            }
            Advice::ReleasePools { held } => write!(f, "if private pools, which hold {}, were released", Bytes(*held)),
            Advice::DriverRefuses { asked, free } => write!(
                f,
                "if the driver gave what it says is free: it refused {} of {}; ask for less, or free about as much",
                Bytes(*asked),
                Bytes(*free)
            ),
            Advice::FreeMore { bytes, largest } => {
                write!(f, "after freeing at least {} more", Bytes(*bytes))?;
                match largest {
                    Some((tag, held)) => write!(f, "; most is held by {tag:?} ({})", Bytes(*held)),
                    None => Ok(()),
                }
            }
        }
    }
}
