//! Learning how far the streams got that waiting blocks depend on (`core/waiting.rs`).
//!
//! While blocks wait, allocations ask how far the streams got, with at most one driver query for
//! each stream. With mapped memory they ask only while a 64th of what is reserved waits. As long as
//! no stream gets further, fewer allocations ask: down to one in four. Allocations that find no
//! memory otherwise ask in any case. If a request would fail otherwise, the host waits for the
//! streams instead.

use crate::allocator::Allocator;
use crate::core::pools::Which;
use crate::cross_stream::progress::{poll, synchronize_all};
use crate::error::AllocError;

/// Asks how far the streams got that waiting blocks depend on, and frees the blocks that need not
/// wait any more.
pub(crate) fn poll_waiting(allocator: &Allocator) -> Result<(), AllocError> {
    let pending = allocator.state().shared().waited_for(Which::All);
    poll(&pending)?;
    let got_further = allocator.state().shared().note_asked();
    if got_further {
        let mut guard = allocator.state().lock();
        guard.end_waits();
        guard.show_waiting();
    }
    Ok(())
}

/// Waits on the host for the streams that freed memory still depends on, in some pools, so that it
/// becomes free and merges. Returns true if there was anything to wait for. Skips streams that
/// cannot be waited for now.
pub(crate) fn synchronize_pending(allocator: &Allocator, which: Which) -> Result<bool, AllocError> {
    let mut waited = false;
    // Twice, because a block that waited may become a stray, with a tick of its own stream.
    for _ in 0..2 {
        let mut guard = allocator.state().lock();
        let waits = !guard.waiting().is_empty() || guard.heap().has_strays();
        let mut pending = guard.waited_for(which);
        pending.extend(guard.strays_wait_for(which));
        if !waits {
            break;
        }
        if !waited && !pending.is_empty() {
            guard.counters.num_sync_all_streams.add(1);
        }
        drop(guard);
        waited = true;
        synchronize_all(&pending)?;
        let mut guard = allocator.state().lock();
        guard.end_waits();
        guard.show_waiting();
        while guard.return_strays() {}
    }
    Ok(waited)
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;
    use crate::state::special;
    use crate::sync::atomic::Ordering;

    #[test]
    fn a_little_that_waits_is_freed_though_requests_are_served_without_it() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let (one, two) = (device.stream().unwrap(), device.stream().unwrap());
        drop(allocator.alloc_bytes(512 << 20, &one).unwrap());
        let block = allocator.alloc_bytes(1000, &one).unwrap();
        two.wait_for(&one.tick()).unwrap();
        two.fill(block.ptr(), 1, 1000).unwrap();
        block.record_stream(&two).unwrap();
        drop(block);
        drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        two.synchronize().unwrap();
        for _ in 0..200 {
            drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        }
        assert_eq!(allocator.stats().active.all.current, 0);
        assert_eq!(allocator.state().special().load(Ordering::Relaxed) & special::WAITING, 0);
    }
}
