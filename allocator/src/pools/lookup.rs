//! Pools: the pool that a thread is routed to, launches that pools wait for, and the pools of the heap
//! that have regions.

use std::any::Any;
use std::sync::Arc;

use aquifer_device::Stream;

use crate::allocator::Allocator;
use crate::core::graphs::Launched;
use crate::core::pools::PoolKey;
use crate::cross_stream::progress::{cannot_be_asked, synchronize_all};
use crate::error::AllocError;
use crate::types::PoolId;

/// The launches that memory of closed pools still waits for: of all of them, or of one.
pub(crate) fn awaited_launches(allocator: &Allocator, of: Option<PoolKey>) -> Launched {
    let now = allocator.device().wait_mark();
    allocator.state().shared().pools.awaited_launches(&now, of)
}

/// The numbers of the pool that the thread's innermost scope routes to, for a request for the
/// stream; `None` if there is none. If the stream captures, this notes that the graph uses the
/// pool, and that its launches come after earlier work of the stream, because the graph may get
/// memory that this work used.
pub(crate) fn route_and_note(allocator: &Allocator, stream: &Stream) -> Option<[PoolId; 2]> {
    let thread = std::thread::current().id();
    allocator.state().shared().pools.routed(thread)?;
    // Before the allocator's lock is taken, because no timeline is locked under it.
    let captured = stream.launches_of_capture();
    let (numbers, is_new) = allocator.state().shared().pools.route_and_note(thread, captured.as_ref())?;
    if let Some(launches) = captured {
        launches.come_after(stream.tick());
        if is_new {
            // Otherwise all memory would go back once the last handle of the allocator is dropped.
            let allocator: Arc<dyn Any + Send + Sync> = Arc::new(allocator.kept_open());
            launches.keep(&allocator);
        }
    }
    Some(numbers)
}

/// True if a block granted outside of captures may belong to a graph, because one was captured
/// since the request was routed.
pub(crate) fn came_from_a_graph(allocator: &Allocator, pool: PoolId, stream: &Stream) -> bool {
    let keeps = allocator.state().shared().pools.owner_of(pool).is_some_and(|private| private.keeps_for_graphs(pool));
    keeps && !stream.is_capturing()
}

/// Waits until launches are done. Skips a stream, or the device, that cannot be waited for now
/// because a stream captures.
pub(crate) fn wait_for_launched(allocator: &Allocator, launched: &Launched) -> Result<(), AllocError> {
    synchronize_all(&launched.ticks)?;
    if launched.is_device_pending() {
        match allocator.device().synchronize() {
            Err(error) if !cannot_be_asked(&error) => return Err(error.into()),
            _ => {}
        }
    }
    Ok(())
}
