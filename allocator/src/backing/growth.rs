//! How much a request takes from the device, and how much may be taken: what the limit allows, and
//! what must stay free there for libraries (`headroom_mb`).
//!
//! The driver says how much is free, but must not be asked under a lock, and meanwhile other
//! threads take memory, too. So before asking, a thread notes how much is about to be taken by
//! whom. Afterwards, under the lock, it counts all of that, and what others began to take since, as
//! if the driver's answer did not include it. This may count too much, never too little; a thread
//! that is refused because of it asks again.

use std::time::Duration;

use crate::allocator::Allocator;
use crate::core::Core;
use crate::core::limits::{Growing, Refusal};
use crate::error::AllocError;
use crate::size_class;
use crate::types::{Granted, Request};

/// How often it is asked again while others take memory, and how long after each time: about as
/// long as a driver call takes.
pub(crate) const ASKS: u32 = 64;
const BETWEEN_ASKS: Duration = Duration::from_micros(50);

/// The memory that was free on the device beyond the headroom, and the bytes that other threads
/// were about to take before that question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// `None` where nothing must stay free.
    free: Option<u64>,
    growing: Growing,
}

impl Room {
    /// Nothing may be taken.
    pub(crate) const NONE: Room = Room { free: Some(0), growing: Growing { now: 0, begun: 0 } };

    /// Bytes that others took, or are about to take. The answer may include them or not.
    fn taken_meanwhile(&self, core: &Core) -> u64 {
        self.growing.now.saturating_add(core.growing().begun.wrapping_sub(self.growing.begun))
    }

    fn left(&self, core: &Core) -> u64 {
        self.free.map_or(u64::MAX, |free| free.saturating_sub(self.taken_meanwhile(core)))
    }

    /// True if another question may give more: this count includes memory taken meanwhile.
    pub(crate) fn is_uncertain(&self, core: &Core) -> bool {
        self.free.is_some() && self.taken_meanwhile(core) > 0
    }

    /// Lets those who take memory finish.
    pub(crate) fn wait_for_others() {
        aquifer_device::executor::pause(BETWEEN_ASKS);
    }
}

/// Asks the driver.
pub(crate) fn room(allocator: &Allocator) -> Result<Room, AllocError> {
    let headroom = allocator.config().headroom;
    let growing = allocator.state().shared().growing();
    let free = match headroom {
        0 => None,
        _ => Some(allocator.device().memory_info()?.free.saturating_sub(headroom)),
    };
    Ok(Room { free, growing })
}

/// Bytes that may still be taken from the device, and what would refuse more. To be asked under the
/// lock under which `growing` is raised, so that threads that grow together keep the limit and the
/// headroom.
pub(crate) fn buyable(allocator: &Allocator, core: &Core, room: &Room) -> (u64, Refusal) {
    let held = core.held_at_most();
    let by_limit = allocator.limit().map_or(u64::MAX, |limit| limit.saturating_sub(held));
    let by_room = room.left(core);
    if by_room < by_limit { (by_room, Refusal::Headroom) } else { (by_limit, Refusal::Limit) }
}

/// How an attempt to take memory from the device ended.
pub(crate) type Growth = Result<Granted, Refusal>;

/// Size of the segment for a request: its own size without caching, where nothing is shared.
pub(crate) fn segment_bytes(allocator: &Allocator, size: u64) -> u64 {
    if allocator.config().no_cache { size } else { size_class::segment_bytes(size) }
}

/// Bytes that the device must give for a request that nothing cached helps to serve.
pub(crate) fn growth_bytes(allocator: &Allocator, core: &Core, request: &Request) -> u64 {
    match core.paged_granule_for(request) {
        Some(granule) => request.size.next_multiple_of(granule),
        None => segment_bytes(allocator, request.size),
    }
}
