//! Pools: the pool that a thread is routed to, launches that pools wait for, and the pools of the heap
//! that have regions.

use std::any::Any;
use std::sync::Arc;

use aquifer_device::{Device, Stream};

use crate::allocator::Allocator;
use crate::cross_stream::progress::{cannot_be_asked, synchronize_all};
use crate::error::AllocError;
use crate::heap::Heap;
use crate::pools::graphs::Launched;
use crate::pools::table::{PoolKey, Private, Which};
use crate::state::shared::SharedState;
use crate::types::PoolId;

/// The work that must be done before memory of a pool may go that was used by graphs which are not
/// launched any more.
pub(super) fn launches_of(shared: &SharedState, private: &Private) -> Launched {
    shared.device.as_ref().map_or_else(Launched::default, |device| private.graphs.launched(device.wait_mark()))
}

/// Closes a pool. Returns the launches that its memory waits for.
pub(super) fn close_pool(shared: &mut SharedState, key: PoolKey) -> Launched {
    let SharedState { pools, device: Some(device), .. } = shared else { return Launched::default() };
    let Some(private) = pools.find_mut(key) else { return Launched::default() };
    let now = device.wait_mark();
    private.open = false;
    private.graphs.close(now.clone());
    let launched = private.graphs.launched(now);
    pools.lenders.remove(&key.place);
    pools.closed.insert(key.place);
    pools.forget_if_over(key.place);
    launched
}

/// The launches that memory of closed pools still waits for: of all of them, or of one.
pub(crate) fn awaited_launches(shared: &SharedState, of: Option<PoolKey>) -> Launched {
    let now = shared.device.as_ref().map(Device::wait_mark);
    now.map_or_else(Launched::default, |now| shared.pools.awaited_launches(&now, of))
}

/// The heap, for a region to be added to a pool. [`PoolTable::note_region`] counts the region.
pub(crate) fn heap_with_pool(shared: &mut SharedState, pool: PoolId) -> &mut Heap {
    let options = shared.pools.owner_of(pool).map(Private::heap_options);
    options.into_iter().for_each(|options| shared.heap.add_private_pool(pool, options));
    &mut shared.heap
}

/// The numbers of some pools that have regions: the default pools first, then by pool.
pub(crate) fn numbers_of(shared: &SharedState, which: Which) -> impl Iterator<Item = PoolId> + '_ {
    let default = [PoolId::SMALL, PoolId::LARGE].into_iter().filter(move |_| which.has_default());
    default.chain(shared.pools.with_regions(which))
}

/// The numbers of the pool that the thread's innermost scope routes to, for a request for the
/// stream; `None` if there is none. If the stream captures, this notes that the graph uses the
/// pool, and that its launches come after earlier work of the stream, because the graph may get
/// memory that this work used.
pub(crate) fn route_and_note(allocator: &Allocator, stream: &Stream) -> Option<[PoolId; 2]> {
    allocator.state().shared().pools.routed()?;
    // Before the allocator's lock is taken, because no timeline is locked under it.
    let captured = stream.launches_of_capture();
    let (numbers, is_new) = allocator.state().shared().pools.route_and_note(captured.as_ref())?;
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
