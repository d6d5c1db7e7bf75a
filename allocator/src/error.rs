//! Errors of the allocator.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::PathBuf;
use std::sync::Arc;

use aquifer_device::{DeviceError, DeviceLabel, RequestError};

use crate::config::ConfigError;
use crate::format::Bytes;
use crate::recovery::oom::report::OomReport;

/// Why an allocation, or another request to the allocator, failed. The allocator is as usable
/// afterwards as before.
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// There is not enough memory, or not in one piece. The report says why, and what helps.
    #[error("{0}")]
    OutOfMemory(Box<OomReport>),
    /// The caller asked for more than any device has: 2^60 bytes (1 EB) or more.
    #[error("out of memory: tried to allocate {requested} bytes, more than 1EB memory")]
    TooLarge {
        /// Bytes asked for.
        requested: u64,
    },
    /// The caller asked for an alignment that is not a power of two, or is larger than 2 MiB.
    #[error("an alignment of {alignment} bytes is not a power of two up to 2 MiB")]
    InvalidAlignment {
        /// Alignment asked for.
        alignment: u64,
    },
    /// The caller passed a pool, a buffer or an allocation of another allocator of the same device.
    /// Ask that one.
    #[error("the {what} belongs to another allocator of {device} than the one asked")]
    WrongAllocator {
        /// What was passed.
        what: &'static str,
        /// The device of both.
        device: DeviceLabel,
    },
    /// The caller configured the process's allocator of a device, which is open already. Configure
    /// it before its first use, or make an allocator that is not shared, with
    /// [`crate::Allocator::new`].
    #[error(
        "the process's allocator of {device} is in use already: configure it before its first use, or make another one with `Allocator::new`"
    )]
    AlreadyOpen {
        /// The device.
        device: DeviceLabel,
    },
    /// The caller passed a pointer that this allocator did not give out through the raw interface,
    /// or freed it twice.
    #[error(
        "invalid device pointer: {ptr:#x} is not a live raw allocation of this allocator (freed twice, or foreign)"
    )]
    InvalidPointer {
        /// The pointer.
        ptr: u64,
    },
    /// The caller asked a growable buffer to be larger than the addresses that it reserved.
    #[error("{requested} bytes are more than the {capacity} that addresses were reserved for")]
    BeyondCapacity {
        /// Bytes asked for.
        requested: u64,
        /// Bytes that it can have.
        capacity: u64,
    },
    /// The caller asked to shrink memory that buffers share. They might reach beyond its new end:
    /// drop them first.
    #[error("{what} cannot shrink while buffers share it: drop them first")]
    Shared {
        /// What is shared.
        what: &'static str,
    },
    /// The calling thread already has an [`crate::AccessGuard`] with the memory, and asked for
    /// another one, or for a reservation on it: it would wait for itself. Drop the first guard
    /// before, or take one guard with all the memory that is used. Parts of one buffer count as the
    /// same memory.
    #[error(
        "this thread is within `with`, or holds an `AccessGuard`, on the same memory and would wait for \
         itself: end that first, or name all buffers in one call"
    )]
    AccessHeld,
    /// The caller asked an allocator to sleep while work is about to be enqueued: threads have
    /// access guards or reservations, or called [`crate::Allocator::keep_awake`]. End that first,
    /// or wait for other threads with [`crate::SleepOptions::waiting`].
    #[error("the allocator is kept awake, so it cannot sleep ({0}): end that first, or wait for other threads to")]
    KeptAwake(KeptAwakeBy),
    /// A callback that [`crate::Allocator::observe_mappings`] registered asked for something that
    /// changes mappings, or waits for such a change to end: it would wait for itself. Memory that
    /// is free already can be allocated there; do the rest once the callback has returned.
    #[error(
        "this thread is within an observer of the allocator's mappings, and changing mappings would wait for that: do it once the observer has returned"
    )]
    Observing,
    /// The caller asked for memory, or for an access guard on some, while the allocator sleeps or
    /// is about to, or that memory does; see [`crate::Allocator::sleep`].
    #[error("the allocator or this memory is asleep, or about to be: call `Allocator::wake` first")]
    Asleep,
    /// The file for the contents of memory that sleeps could not be made, written or read. Falling
    /// asleep is undone, or the memory sleeps still.
    #[error("the contents of memory that sleeps: cannot {doing} {path}: {error}", path = path.display())]
    SavedFile {
        /// What failed.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        error: Arc<std::io::Error>,
    },
    /// The caller asked for a private pool, but there are already as many pools as there can
    /// be, including dropped ones that still hold memory. Drop some, and what was allocated from
    /// them.
    #[error("there are {pools} private pools, the most there can be: drop some, and the memory allocated from them")]
    TooManyPools {
        /// Pools that there are.
        pools: usize,
    },
    /// Work that was to write this memory failed after the call that began it had returned, and no
    /// caller asked for its result. The memory may have old contents, in part: write it again. Each
    /// failure is reported once, by the next access.
    #[error("earlier work that was to write this memory failed, and its result was not asked for: {cause}")]
    NotWritten {
        /// Why it failed.
        cause: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// There is not enough host memory for what is to be saved there.
    #[error("out of host memory: {bytes} bytes of device memory could not be saved there")]
    OutOfHostMemory {
        /// Bytes that were to be saved.
        bytes: u64,
    },
    /// The caller asked for a feature of mapped memory, but this allocator's memory comes in
    /// segments, for the reason given.
    #[error("{what} needs mapped memory, and here memory comes in segments: {why}")]
    NotMapped {
        /// What was asked for.
        what: &'static str,
        /// Why memory is not mapped; see [`crate::Allocator::why_segments`].
        why: Box<WhySegments>,
    },
    /// The request cannot be served as the caller made it.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The configuration is wrong.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A driver call failed for another reason than lack of memory, or was refused because it would
    /// break a stream's capture ([`aquifer_device::ErrorKind::Capture`]).
    #[error(transparent)]
    Device(#[from] DeviceError),
}

aquifer_device::debug_as_display!(AllocError);

// A cause is only read.
impl UnwindSafe for AllocError {}
impl RefUnwindSafe for AllocError {}

/// A configuration that cannot fail, where others can.
impl From<std::convert::Infallible> for AllocError {
    fn from(never: std::convert::Infallible) -> AllocError {
        match never {}
    }
}

impl AllocError {
    /// The caller passed what belongs to the device with the identity `is`, where that with
    /// `needed` was needed.
    #[cold]
    pub(crate) fn wrong_device(what: &'static str, is: u32, needed: u32) -> AllocError {
        RequestError::wrong_device(what, is, needed).into()
    }

    /// The caller passed what belongs to an allocator of the device `is` to another one, of the
    /// device `needed`.
    #[cold]
    pub(crate) fn wrong_allocator(what: &'static str, is: u32, needed: u32) -> AllocError {
        if is == needed {
            AllocError::WrongAllocator { what, device: DeviceLabel::of(is) }
        } else {
            AllocError::wrong_device(what, is, needed)
        }
    }

    /// Whether memory was lacking, so that freeing some may help: for the request, or for a driver
    /// call on the way.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, AllocError::OutOfMemory(_) | AllocError::TooLarge { .. } | AllocError::OutOfHostMemory { .. })
            || self.device().is_some_and(DeviceError::is_out_of_memory)
    }

    /// Whether the device is gone, so that every later call fails too.
    pub fn is_device_lost(&self) -> bool {
        self.device().is_some_and(DeviceError::is_device_lost)
    }

    /// The report of an out-of-memory error.
    pub fn report(&self) -> Option<&OomReport> {
        match self {
            AllocError::OutOfMemory(report) => Some(report),
            _ => None,
        }
    }

    /// What is wrong with the request, where the caller made it wrong.
    pub fn request(&self) -> Option<&RequestError> {
        match self {
            AllocError::Request(error) => Some(error),
            _ => None,
        }
    }

    /// The error of the device's driver that is the cause, if it is one.
    pub fn device(&self) -> Option<&DeviceError> {
        match self {
            AllocError::Device(error) => Some(error),
            AllocError::NotWritten { cause } => cause.downcast_ref(),
            _ => None,
        }
    }
}

/// What keeps an allocator awake: work that is about to be enqueued. See [`AllocError::KeptAwake`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeptAwakeBy {
    /// Number of [`crate::AccessGuard`]s on its memory.
    pub access_guards: u64,
    /// Number of [`crate::Reservation`]s on its memory: transfers that are not enqueued yet have
    /// them.
    pub reservations: u64,
    /// Number of [`crate::WakeLock`]s of [`crate::Allocator::keep_awake`], among them those of
    /// library code at work.
    pub wake_locks: u64,
    /// Whether the calling thread has any of them: then waiting is in vain.
    pub is_this_thread: bool,
}

impl fmt::Display for KeptAwakeBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeptAwakeBy { access_guards, reservations, wake_locks, is_this_thread } = *self;
        let counts = [(access_guards, "access guard"), (reservations, "reservation"), (wake_locks, "`keep_awake`")];
        for (at, (count, what)) in counts.into_iter().filter(|&(count, _)| count > 0).enumerate() {
            let (comma, s) = (if at > 0 { ", " } else { "" }, if count > 1 { "s" } else { "" });
            write!(f, "{comma}{count} {what}{s}")?;
        }
        f.write_str(if is_this_thread { "; this thread has some of them" } else { "" })
    }
}

/// Why an allocator's memory comes in segments: [`crate::Allocator::why_segments`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WhySegments {
    /// The configuration says so: `backing:segments`.
    #[error("segments were asked for (`backing:segments`; `backing:paged` maps memory)")]
    Chosen,
    /// The configuration says that nothing is cached: `no_cache:True`.
    #[error("nothing is cached (`no_cache:True`)")]
    NoCache,
    /// The device, or its driver, cannot map memory.
    #[error("the device cannot map memory")]
    DeviceCannot,
    /// The device has less memory than one granule.
    #[error(
        "the device has {}, less than one granule{} (`granule_mb`)",
        Bytes(*.total),
        .granule.map_or_else(String::new, |granule| format!(" of {}", Bytes(granule)))
    )]
    GranuleTooLarge {
        /// The least granule that the configuration and the device allow, if there is one.
        granule: Option<u64>,
        /// The device's memory in bytes.
        total: u64,
    },
    /// A driver call failed when the allocator was made and tried to map memory. It does not try
    /// again; another allocator does.
    #[error("mapping memory failed when the allocator was made, and is tried again by a new one: {0}")]
    Failed(DeviceError),
    /// The device gave no more addresses for some request. Memory is mapped at those that there
    /// are, and requests that find none get segments.
    #[error("addresses to map memory at ran out: {0}")]
    NoAddresses(DeviceError),
}
