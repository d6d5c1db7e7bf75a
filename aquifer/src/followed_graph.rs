//! Graphs that another library captures and launches: the driver tells when they are gone.

use std::any::Any;
use std::sync::Arc;

use aquifer_allocator::{GraphUses, PoolOptions, PrivatePool};
use aquifer_device::fork::Mutex;
use aquifer_device::{DevicePtr, Stream};
use aquifer_transfer::HostUses;

use crate::allocator::Allocator;
use crate::error::Error;

/// The memory of a graph whose driver calls another library makes: for adapters. The driver keeps
/// this until the graph is gone, with its clones, its executables and all their launches.
///
/// Launches are not seen, so the graph's pool serves no other graph, and lends nothing. What it
/// gets during the capture is fresh, or known done, or was freed in the capture by the same stream
/// (edges of other libraries are not seen): so launches need not come after earlier work.
#[derive(Debug)]
pub struct FollowedGraph {
    pool: PrivatePool,
    /// Memory from outside of the capture, to be freed with the graph. It may be another
    /// allocator's.
    dropped: Mutex<Vec<(Allocator, DevicePtr)>>,
}

/// Held while a thread looks for the memory of a capture, which two may see first at the same time.
/// Above all other locks.
static FOLLOWING: Mutex<()> = Mutex::new(());

impl Allocator {
    /// The memory of the graph that `stream` captures by calls of another library. `None` if it
    /// captures none, or one that was [begun](Allocator::begin_graph) here or
    /// announced, and if a call broke the capture before this was first asked. Asks the driver.
    ///
    /// # Errors
    /// On a driver before CUDA 11.3, if the stream captures; errors of the driver.
    pub fn followed_graph(&self, stream: &Stream) -> Result<Option<Arc<FollowedGraph>>, Error> {
        self.device().settle_graphs();
        let _alone = FOLLOWING.lock();
        let Some(launches) = stream.follow_capture()?.filter(|launches| launches.are_followed()) else {
            return Ok(None);
        };
        if let Some(known) = launches.kept() {
            return Ok(Some(known));
        }
        let pool = self.create_pool(PoolOptions::default())?;
        // The graph keeps them.
        GraphUses::collect(&pool, stream)?;
        HostUses::collect(stream);
        let graph = Arc::new(FollowedGraph { pool, dropped: Mutex::default() });
        let kept: Arc<dyn Any + Send + Sync> = graph.clone();
        launches.keep(&kept);
        Ok(Some(graph))
    }
}

impl FollowedGraph {
    /// The pool that serves the capture.
    pub fn pool(&self) -> &PrivatePool {
        &self.pool
    }

    /// Frees memory of any allocator from outside of the capture once the graph is gone, whose work
    /// may use it, and in the order of `stream`, as the `free_raw_on` of the allocator does.
    ///
    /// # Errors
    /// As `free_raw_on` of the allocator.
    pub fn free_raw_on(&self, memory: &Allocator, ptr: DevicePtr, stream: &Stream) -> Result<(), Error> {
        memory.record_stream_raw(ptr, stream)?;
        self.dropped.lock().push((memory.clone(), ptr));
        Ok(())
    }
}

impl Drop for FollowedGraph {
    fn drop(&mut self) {
        for (memory, ptr) in std::mem::take(self.dropped.get_mut()) {
            if let Err(error) = memory.free_raw(ptr) {
                tracing::warn!(%error, "memory that a graph kept could not be freed");
            }
        }
    }
}
