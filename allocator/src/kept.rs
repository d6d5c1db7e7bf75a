//! The report of what keeps an allocator awake.

use std::fmt;
use std::sync::Arc;

use aquifer_device::DevicePtr;

use crate::format::Bytes;

/// What keeps an allocator awake: work that is about to be enqueued. See [`crate::AllocError::KeptAwake`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeptAwakeBy {
    /// Number of [`crate::AccessGuard`]s on its memory.
    pub access_guards: u64,
    /// Number of [`crate::Reservation`]s on its memory: transfers that are not enqueued yet have
    /// them.
    pub reservations: u64,
    /// Number of results of [`crate::Allocator::keep_awake`], among them those of library code at work.
    pub awake: u64,
    /// Number of all of these that were too many to be told apart.
    pub others: u64,
    /// Whether the calling thread has any of them: then waiting is in vain.
    pub is_this_thread: bool,
    /// The allocations that are known to be in use. An allocation is known if it is the only one
    /// with an access guard, or the only one with a reservation.
    pub allocations: Vec<UsedAllocation>,
}

/// An allocation with an access guard or a reservation.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct UsedAllocation {
    /// Its first address.
    pub ptr: DevicePtr,
    /// Bytes asked for.
    pub bytes: u64,
    /// Its tag: see [`crate::TagScope`].
    pub tag: Option<Arc<str>>,
    /// The [`aquifer_device::Stream::id`] of the stream that it was allocated for.
    pub stream: u32,
}

impl fmt::Display for KeptAwakeBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeptAwakeBy { access_guards, reservations, awake, others, .. } = *self;
        let counts = [
            (access_guards, "access guard"),
            (reservations, "reservation"),
            (awake, "`keep_awake`"),
            (others, "other"),
        ];
        for (at, (count, what)) in counts.into_iter().filter(|&(count, _)| count > 0).enumerate() {
            let (comma, s) = (if at > 0 { ", " } else { "" }, if count > 1 { "s" } else { "" });
            write!(f, "{comma}{count} {what}{s}")?;
        }
        for used in &self.allocations {
            write!(f, "; in use: {} at {}", Bytes(used.bytes), used.ptr)?;
            if let Some(tag) = &used.tag {
                write!(f, ", tagged `{tag}`")?;
            }
            write!(f, ", of stream {}", used.stream)?;
        }
        f.write_str(if self.is_this_thread { "; this thread has some of them" } else { "" })
    }
}
