//! What helps a request that was refused.

use std::fmt;

use crate::format::{Bytes, Exactly};

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
    /// Raise the limit of the request's private pool.
    RaisePoolLimit {
        /// Id of the pool.
        pool: (u64, u64),
        /// The least limit, in bytes, that does not refuse the request.
        to: u64,
    },
    /// Lower the headroom.
    LowerHeadroom {
        /// The largest headroom, in bytes, with which the device has enough; 0 if it has too little
        /// without any, too.
        to: u64,
    },
    /// Split frames that are partly in use (`split_frames:on`), if the program keeps the promise of
    /// [`crate::config::SplitFrames::On`]: their free granules serve the request.
    SplitFrames,
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
    /// Have all memory come in segments (`backing:segments`): addresses to map memory at are
    /// lacking.
    UseSegments,
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
                let free = Bytes(*block);
                write!(f, "let streams reuse each other's blocks (cross_stream): another one has {free} free")
            }
            Advice::SplitFrames => f.write_str(
                "set split_frames:on, if one thread enqueues all work or all memory is used through access guards: \
                 frames that are partly in use have enough free memory",
            ),
            Advice::EmptyCache { cached } => {
                write!(f, "call empty_cache(), which gives back what is cached ({}), or ", Bytes(*cached))?;
                f.write_str("do without throw_on_cudamalloc_oom")
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
                let held = Bytes(*held);
                write!(
                    f,
                    "drop the graphs that use the request's own pool, which holds {held}, and call its empty_cache()"
                )
            }
            Advice::EndPins { held } => write!(f, "drop pins, which keep {} in place", Bytes(*held)),
            Advice::RaiseLimit { to } => write!(f, "raise the limit to {}", Exactly(*to)),
            Advice::RaisePoolLimit { pool: (a, b), to } => {
                write!(f, "raise the limit of private pool ({a}, {b}) to {}", Exactly(*to))
            }
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
            Advice::UseSegments => f.write_str("use backing:segments, which needs no addresses to map memory at"),
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
