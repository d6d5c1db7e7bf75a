//! Memory that more than one stream uses, and how far streams got.
//!
//! **Reuse.** Stream S may use a free block of another stream once the block's tick is known done
//! on the host, or once S's later work is ordered after that tick. Both can be learned without
//! waiting. Making S wait would couple the streams, so it is done only where the policy says so, or
//! as a rung of the ladder before memory runs out. It is counted and traced. Other streams' blocks
//! are tried only when a stream's own free blocks do not serve a request, just before memory would
//! be taken from the device.
//!
//! **Waiting blocks** (`core/waiting.rs`). While blocks wait, allocations ask how far the streams
//! got, with at most one driver query for each stream. With mapped memory they ask only while a
//! 64th of what is reserved waits. As long as no stream gets further, fewer allocations ask: down
//! to one in four. Allocations that find no memory otherwise ask in any case. If a request would
//! fail otherwise, the host waits for the streams instead.
//!
//! **Progress events.** Before memory can move, the host must know that its last use is done, which
//! takes an event. An event recorded only when memory has to move would complete only after
//! everything queued before it. So a stream records one whenever much was given back since the last
//! one, within a budget (`core/policy.rs`).
//!
//! Asking may record an event, and both call the driver, so neither happens under a lock of the
//! allocator. A stream that cannot be asked now is skipped: its memory becomes free later.

use aquifer_device::{DeviceError, ErrorKind, Stream, Tick};

use crate::allocator::Allocator;
use crate::core::pools::Which;
use crate::error::AllocError;
use crate::types::{Granted, Request};

/// Serves the request from blocks of other streams, or from what they give back, without waiting.
pub(crate) fn reuse_of_others(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let mut guard = allocator.state().lock();
    if let Some(granted) = guard.take_done(request) {
        return Ok(Some(granted));
    }
    let ticks = guard.others_wait_for(request);
    if ticks.is_empty() && guard.waiting().is_empty() {
        return Ok(None);
    }
    let own = guard.streams.timeline(request.stream).cloned();
    drop(guard);
    poll(&ticks)?;
    let clock = own.map(|timeline| timeline.clock()).unwrap_or_default();
    let mut guard = allocator.state().lock();
    guard.end_waits_ordered(request.stream, &clock);
    guard.show_waiting();
    if let Some(granted) = guard.take_done(request) {
        return Ok(Some(granted));
    }
    Ok(guard.take_ordered(request, &clock))
}

/// Serves the request from a block of another stream, for which it makes the request's stream wait.
pub(crate) fn wait_for_other(allocator: &Allocator, request: &Request) -> Result<Option<Granted>, AllocError> {
    let guard = allocator.state().lock();
    let Some(own) = guard.streams.timeline(request.stream).cloned() else { return Ok(None) };
    let last_use = guard.last_use_of_best(request);
    let Some(tick) = last_use.and_then(|last_use| guard.streams.tick(last_use)) else { return Ok(None) };
    drop(guard);
    if let Err(error) = own.wait_for(tick.timeline(), tick.n()) {
        return if cannot_be_asked(&error) { Ok(None) } else { Err(error.into()) };
    }
    let clock = own.clock();
    let mut guard = allocator.state().lock();
    // Another thread may have taken the block meanwhile; any block that is ordered now will do.
    let Some(granted) = guard.take_ordered(request, &clock) else { return Ok(None) };
    guard.counters.events.cross_stream_waits += 1;
    drop(guard);
    let (stream, waits_for, bytes) = (request.stream.0, tick.timeline().id(), request.size);
    tracing::debug!(target: "aquifer::wait", stream, waits_for, bytes, "a stream waits for another one to reuse its memory");
    Ok(Some(granted))
}

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
    let (mut waited, mut last) = (false, usize::MAX);
    loop {
        let mut guard = allocator.state().lock();
        guard.end_quarantine();
        // A block that waited may become a stray, with a tick of its own stream.
        let left = 2 * guard.waiting().len() + guard.heap().noted_strays();
        if left == 0 || left >= last {
            break;
        }
        last = left;
        let mut pending = guard.waited_for(which);
        pending.extend(guard.strays_wait_for(which));
        if !waited && !pending.is_empty() {
            guard.counters.events.num_sync_all_streams += 1;
        }
        drop(guard);
        waited = true;
        synchronize_all(&pending)?;
        let mut guard = allocator.state().lock();
        guard.end_waits();
        guard.show_waiting();
        guard.return_strays(usize::MAX);
    }
    Ok(waited)
}

/// Asks how far streams got. Skips streams that cannot be asked now.
pub(crate) fn poll(pending: &[Tick]) -> Result<(), AllocError> {
    for tick in pending {
        match tick.cover().and_then(|()| tick.is_done()) {
            Ok(_) => {}
            Err(error) if cannot_be_asked(&error) => {
                tracing::debug!(%error, stream = tick.timeline().id(), "a stream could not be asked how far it got");
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits on the host until the given work is done. Skips streams that cannot be waited for now.
pub(crate) fn synchronize_all(pending: &[Tick]) -> Result<(), AllocError> {
    pending.iter().try_for_each(|tick| synchronize(tick).map(drop))
}

/// Waits on the host until the work is done. Returns false if that cannot be waited for now.
fn synchronize(tick: &Tick) -> Result<bool, AllocError> {
    match tick.timeline().synchronize(tick.n()) {
        Ok(()) => Ok(true),
        Err(error) if cannot_be_asked(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// True if the error only means that a stream cannot be asked or waited for now: it captures, or it
/// is gone without a last event.
pub(crate) fn cannot_be_asked(error: &DeviceError) -> bool {
    matches!(error.kind, ErrorKind::Capture | ErrorKind::InvalidUse)
}

/// Waits on the host until the work is done, so that memory can move. Returns false if that cannot
/// be waited for now.
pub(crate) fn stall_for(allocator: &Allocator, tick: &Tick) -> Result<bool, AllocError> {
    tracing::debug!(target: "aquifer::wait", stream = tick.timeline().id(), "the host waits so that memory can move");
    allocator.state().shared().counters.events.num_sync_all_streams += 1;
    synchronize(tick)
}

/// Records an event on the stream.
#[cold]
pub(crate) fn record_progress(stream: &Stream) {
    let timeline = stream.timeline();
    // A stream that captures, or one that is gone, records none. The host then learns in other ways
    // what is done there.
    if let Err(error) = timeline.cover(timeline.now()) {
        tracing::debug!(%error, stream = stream.id(), "no progress event could be recorded");
    }
}

#[cfg(all(test, not(aquifer_shuttle)))]
#[allow(clippy::unwrap_used, reason = "a failed call fails the test")]
mod tests {
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;
    use crate::config::Config;
    use crate::state::slow;
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
        assert_eq!(allocator.stats().active.all.current, 1, "it waits");
        drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        two.synchronize().unwrap();
        for _ in 0..200 {
            drop(allocator.alloc_bytes(4 << 20, &one).unwrap());
        }
        assert_eq!(allocator.stats().active.all.current, 0);
        assert_eq!(allocator.state().slow_reasons().load(Ordering::Relaxed) & slow::WAITING, 0);
    }

    #[test]
    fn free_memory_of_a_pool_is_waited_for_beside_any_number_of_other_strays() {
        let device = Device::new(SimDriver::new(SimConfig::new(4 << 30)));
        let allocator = Allocator::new(&device, Config::parse("backing:segments,quarantine_mb:0").unwrap()).unwrap();
        let pool = allocator.create_pool(Default::default()).unwrap();
        let [one, two, three] = [(); 3].map(|()| device.stream().unwrap());
        let blocks = |stream| (0..200).map(|_| allocator.alloc_bytes(2 << 20, stream).unwrap()).collect::<Vec<_>>();
        drop((blocks(&one), pool.alloc_bytes(20 << 20, &one).unwrap()));
        one.synchronize().unwrap();
        let (of_two, of_three) = (blocks(&two), pool.alloc_bytes(10 << 20, &three).unwrap());
        of_two.iter().for_each(|block| two.fill(block.ptr(), 1, block.bytes()).unwrap());
        let (_used, strays): (Vec<_>, Vec<_>) = of_two.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        drop(strays);
        three.fill(of_three.ptr(), 1, of_three.bytes()).unwrap();
        drop(of_three);
        assert_eq!(allocator.state().lock().heap().noted_strays(), 101);
        assert_eq!(pool.empty_cache().unwrap(), 20 << 20);
    }
}
