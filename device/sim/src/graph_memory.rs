//! Memory of graphs: what is allocated from the driver's pool while a stream captures.
//!
//! Its address is fixed at the capture. Each launch begins its life; a free of the same graph, or
//! one of the program after the launch, ends it. A graph that leaves memory allocated cannot be
//! launched again before that was freed, unless its launches free it. The physical memory is taken
//! at the capture, which is earlier than CUDA does, and kept until the last copy of the graph is
//! destroyed. Memory that is allocated then goes over to the pool.
//!
//! Invariant: memory of a graph is `freed`, as the program sees it, except after a launch that did
//! not free it.

use std::collections::BTreeSet;
use std::sync::Arc;

use aquifer_device::{Code, DevicePtr, Operation};

use crate::machine::Machine;
use crate::objects::{CaptureState, CapturedGraph};
use crate::refused::{Answer, Refused};
use crate::work::Body;

impl Machine {
    /// The number of the capture that the stream is part of.
    fn capture_number(&mut self, id: u32) -> Answer<Option<u64>> {
        Ok(self.streams.get(id)?.capture.as_ref().map(|member| member.capture))
    }

    /// Adds an allocation to the graph that the stream is captured into. `None` if it does not
    /// capture.
    pub(crate) fn alloc_in_graph(&mut self, id: u32, bytes: u64) -> Answer<Option<DevicePtr>> {
        self.capture_allows(id)?;
        let Some(number) = self.capture_number(id)? else { return Ok(None) };
        if self.captures.get(&number).is_some_and(|capture| capture.body.is_some()) {
            self.invalidate(number);
            let detail = "bodies of conditional nodes cannot allocate memory";
            return Err(Refused::new(Code::CAPTURE_UNSUPPORTED, detail));
        }
        let ptr = self.allocate(bytes, true)?;
        let captured = self.op_ref(Some(id), Operation::AllocAsync, None);
        if let Some(allocation) = self.address.allocation_mut(ptr) {
            (allocation.of_graph, allocation.freed) = (true, Some(captured));
        }
        if let Some(capture) = self.captures.get_mut(&number) {
            Arc::make_mut(&mut capture.graph.memory).insert(ptr);
        }
        self.submit(id, Body::PoolAlloc { memory: ptr..ptr + bytes })?;
        Ok(Some(DevicePtr(ptr)))
    }

    /// Adds a free to the graph that the stream is captured into. Returns false if it does not
    /// capture.
    pub(crate) fn free_in_graph(&mut self, id: u32, ptr: DevicePtr) -> Answer<bool> {
        self.capture_allows(id)?;
        let Some(number) = self.capture_number(id)? else { return Ok(false) };
        let own = self.captures.get(&number).is_some_and(|CaptureState { graph, .. }| {
            graph.memory.contains(&ptr.0) && !graph.frees().any(|freed| freed == ptr.0)
        });
        let bytes = self.address.allocation_mut(ptr.0).map(|allocation| allocation.bytes);
        let Some(bytes) = bytes.filter(|_| own) else {
            self.invalidate_capture_of(id);
            return Err(Refused::value(format!("a graph frees memory that it allocated, once, and {ptr} is not")));
        };
        self.submit(id, Body::PoolFree { memory: ptr.range(bytes) })?;
        Ok(true)
    }

    /// Refuses to launch a graph whose memory is still allocated.
    pub(crate) fn check_graph_memory(&mut self, graph: &CapturedGraph) -> Answer<()> {
        let Machine { address, .. } = self;
        let live = |&ptr: &u64| address.allocation_mut(ptr).is_some_and(|allocation| allocation.freed.is_none());
        match graph.memory.iter().copied().find(live).filter(|_| !graph.frees_on_launch) {
            None => Ok(()),
            Some(ptr) => Err(Refused::value(format!(
                "{ptr:#x}, which an earlier launch of the graph allocated, was not freed; free it before the next \
                 launch, or instantiate the graph to free it on launch"
            ))),
        }
    }

    /// Enqueues a node of a graph that is launched.
    pub(crate) fn launch_node(&mut self, id: u32, body: Body) -> Answer<()> {
        let (begins, ends) = match &body {
            Body::PoolAlloc { memory } => (Some(memory.start), None),
            Body::PoolFree { memory } => (None, Some(memory.start)),
            _ => (None, None),
        };
        if let Some(allocation) = begins.and_then(|ptr| self.address.allocation_mut(ptr)) {
            allocation.freed = None;
        }
        let submitted = self.submit_checked(id, body, false)?;
        if let Some(allocation) = ends.and_then(|ptr| self.address.allocation_mut(ptr)) {
            allocation.freed = submitted.map(|submitted| submitted.op);
        }
        Ok(())
    }

    /// Gives up the memory of a graph that is destroyed, or was never made, unless a copy of it is
    /// left: once work enqueued so far is done or, if it is allocated, when it is freed.
    pub(crate) fn release_graph_memory(&mut self, memory: Arc<BTreeSet<u64>>) {
        let Ok(memory) = Arc::try_unwrap(memory) else { return };
        for ptr in memory {
            let Some(allocation) = self.address.allocation_mut(ptr) else { continue };
            allocation.of_graph = false;
            let (bytes, is_live) = (allocation.bytes, allocation.freed.is_none());
            self.pool_holds(self.pool.used.saturating_add(bytes));
            if !is_live {
                self.free_at_horizon(ptr..ptr + bytes);
            }
        }
    }
}

impl CapturedGraph {
    /// Addresses of the memory that it frees.
    fn frees(&self) -> impl Iterator<Item = u64> + '_ {
        self.nodes.iter().filter_map(|node| match &node.body {
            Body::PoolFree { memory } => Some(memory.start),
            _ => None,
        })
    }
}
