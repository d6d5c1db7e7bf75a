//! Memory that cannot go back to the device while a stream captures.
//!
//! The driver waits for the device before it takes a segment back, which would break the capture, and unmapping granules might. So neither
//! goes back meanwhile.

use crate::accounting::Releasable;
use crate::heap::State;
use crate::shell::core::Core;

/// Bytes that cannot go back while a stream captures: parts of what is in [`super::remedies::Holds`]. Where that is not known exactly, they
/// are too many.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Captured {
    /// The part of the unused bytes that are promised to nobody.
    pub(super) loose: u64,
    /// The part of the unused bytes that are pinned.
    pub(super) pinned_free: u64,
    /// Bytes that were given back, but wait for capturing streams.
    pub(super) waiting: u64,
    /// Other bytes that are promised to nobody: in live blocks, for example.
    pub(super) rest: u64,
    /// The part of the bytes of private pools that do not serve the request.
    pub(super) pools: u64,
    /// The part of the bytes of the request's own private pool,
    pub(super) own_pool: u64,
    /// and of its unused ones.
    pub(super) own_pool_loose: u64,
}

impl Captured {
    /// Counts a block that keeps `held` bytes, of which a `part` could go back. `of_own` tells whether it is in the request's own private
    /// pool, or in another one; `None` if it is in neither.
    pub(super) fn add(&mut self, state: State, held: u64, part: &Releasable, of_own: Option<bool>) {
        let is_free = state == State::Free;
        match of_own {
            Some(false) => self.pools += held,
            Some(true) => {
                self.own_pool += held;
                self.own_pool_loose += if is_free { part.bytes } else { 0 };
            }
            None => {
                let waits = state == State::Waiting;
                self.loose += if is_free { part.bytes } else { 0 };
                self.waiting += if waits { part.bytes } else { 0 };
                self.pinned_free += if is_free { part.pinned } else { 0 };
                self.rest += held - if is_free || waits { part.bytes } else { 0 };
            }
        }
    }

    /// Unused bytes, which would go back if no stream captured.
    pub(super) fn cached(&self) -> u64 {
        self.loose + self.waiting
    }

    /// All bytes outside of private pools.
    pub(super) fn outside(&self) -> u64 {
        self.loose + self.waiting + self.rest
    }

    /// True if there are any.
    pub(super) fn any(&self) -> bool {
        self.outside() + self.pools + self.own_pool > 0
    }
}

impl Core {
    /// True if a stream of the device captures.
    pub(crate) fn is_capturing(&self) -> bool {
        self.device.as_ref().is_some_and(aquifer_device::Device::is_capturing)
    }

    /// True if the stream with this number captures.
    pub(super) fn captures_on(&self, slot: u32) -> bool {
        let Some((device, timeline)) = self.device.as_ref().zip(self.timeline(slot)) else { return false };
        timeline.device_id_unless_capturing() != device.id()
    }
}
