//! Graphs, which captures make, or which are made of other graphs; and executables, which are made
//! from graphs. Each of them has a copy of the captured work.

use std::collections::{HashMap, HashSet};

use aquifer_device::{Code, Driver as _, RawGraph, RawStream};
use parking_lot::Mutex;

use crate::abi::{Answer, Handle, In, Out, abi, array, check_flags, code, needed};
use crate::process::Life;

/// First handle of graphs and executables.
const FIRST: Handle = 0x6A_0000_0000_0000;

/// All flags of an instantiation: free memory on launch, upload, launch from the device, node
/// priorities.
const FLAGS: u64 = 0xf;
/// A launch frees what the one before left allocated.
const FREE_ON_LAUNCH: u64 = 1;
/// An executable that the device launches by itself.
const DEVICE_LAUNCH: u64 = 4;

/// The result of an update that failed as the call's code says.
const UPDATE_ERROR: u32 = 1;
/// The graphs differ in how many nodes they have.
const TOPOLOGY_CHANGED: u32 = 2;
/// They differ in the kinds of their nodes.
const NODE_TYPE_CHANGED: u32 = 3;
/// They have nodes that cannot be updated.
const UPDATE_NOT_SUPPORTED: u32 = 6;

/// An executable cannot take the work of a graph.
const UPDATE_FAILURE: Code = Code(910);
/// Two calls use an object that takes one at a time.
const ILLEGAL_STATE: Code = Code(401);

/// `CUgraphExecUpdateResultInfo`. The nodes, which have no handles here, are null.
#[repr(C)]
struct UpdateResult {
    result: u32,
    error_node: Handle,
    error_from_node: Handle,
}

/// What a handle stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Graph,
    Executable,
}

/// The live graphs and executables, by handle. The lock is held while the simulated device destroys
/// work.
#[derive(Debug, Default)]
pub(crate) struct Graphs(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    live: HashMap<Handle, (Kind, RawGraph)>,
    /// Executables that a call launches just now.
    launching: HashSet<Handle>,
    created: u64,
    /// Handles of what was destroyed, which are given again: the latest first.
    free: Vec<Handle>,
}

impl Table {
    fn reserve(&mut self) -> Handle {
        self.free.pop().unwrap_or_else(|| {
            self.created += 1;
            FIRST + self.created
        })
    }

    fn add(&mut self, kind: Kind, work: RawGraph) -> Handle {
        let handle = self.reserve();
        self.live.insert(handle, (kind, work));
        handle
    }

    fn get(&self, handle: Handle, kind: Kind) -> Answer<RawGraph> {
        let found = self.live.get(&handle).filter(|(known, _)| *known == kind);
        found.map(|&(_, work)| work).ok_or(Code::INVALID_HANDLE)
    }
}

impl Graphs {
    /// A handle for a graph that is going to be captured.
    pub(crate) fn reserve(&self) -> Handle {
        self.0.lock().reserve()
    }

    /// The capture of a graph ended; without work, there is no graph.
    pub(crate) fn end_capture(&self, handle: Handle, work: Option<RawGraph>) {
        let mut table = self.0.lock();
        match work {
            Some(work) => drop(table.live.insert(handle, (Kind::Graph, work))),
            None => table.free.push(handle),
        }
    }

    /// Whether a handle is a live graph's.
    pub(crate) fn is_graph(&self, handle: Handle) -> bool {
        self.work(handle, Kind::Graph).is_ok()
    }

    fn work(&self, handle: Handle, kind: Kind) -> Answer<RawGraph> {
        self.0.lock().get(handle, kind)
    }

    /// The work of an executable that is launched. Refused while another thread launches it, where
    /// CUDA would do anything.
    fn begin_launch(&self, executable: Handle) -> Answer<RawGraph> {
        let mut table = self.0.lock();
        let work = table.get(executable, Kind::Executable)?;
        if table.launching.insert(executable) { Ok(work) } else { Err(ILLEGAL_STATE) }
    }

    fn end_launch(&self, executable: Handle) {
        self.0.lock().launching.remove(&executable);
    }
}

impl Life {
    fn instantiate(&self, out: Out<'_, Handle>, graph: Handle, flags: u64) -> Answer {
        let out = needed(out)?;
        let mut table = self.graphs.0.lock();
        let work = self
            .sim
            .copy_graph(table.get(graph, Kind::Graph)?, flags & FREE_ON_LAUNCH != 0)
            .ok_or(Code::INVALID_HANDLE)?;
        let executable = table.add(Kind::Executable, work);
        self.user_objects.copy(graph, executable);
        out.write(executable);
        Ok(())
    }

    /// Refuses to copy what allocates memory, as CUDA does.
    fn check_no_memory(&self, work: RawGraph) -> Answer {
        if self.sim.graph_allocates(work).ok_or(Code::INVALID_HANDLE)? { Err(Code::NOT_SUPPORTED) } else { Ok(()) }
    }

    fn clone_graph(&self, out: Out<'_, Handle>, graph: Handle) -> Answer {
        let out = needed(out)?;
        let mut table = self.graphs.0.lock();
        let work = table.get(graph, Kind::Graph)?;
        self.check_no_memory(work)?;
        let copy = self.sim.copy_graph(work, false).ok_or(Code::INVALID_HANDLE)?;
        let handle = table.add(Kind::Graph, copy);
        self.user_objects.copy(graph, handle);
        out.write(handle);
        Ok(())
    }

    fn add_child(&self, out: Out<'_, Handle>, graph: Handle, dependencies: &[Handle], child: Handle) -> Answer {
        let out = needed(out)?;
        if self.conditionals.graph_with(graph) != graph || self.is_being_captured(graph) {
            // Graphs under construction take what their streams capture alone.
            return Err(Code::NOT_SUPPORTED);
        }
        let table = self.graphs.0.lock();
        let (work, of_child) = (table.get(graph, Kind::Graph)?, table.get(child, Kind::Graph)?);
        let after: Vec<u64> = dependencies.iter().map(|&node| self.conditionals.child(node)).collect::<Answer<_>>()?;
        let node = self.sim.add_child(work, of_child, &after).map_err(code)?;
        out.write(self.conditionals.add_child(node));
        self.user_objects.add(child, graph)
    }

    /// Gives an executable the work of a graph. The result is for `UpdateResult`.
    fn update(&self, executable: Handle, graph: Handle) -> Result<(), (Code, u32)> {
        let failed = |code| (code, UPDATE_ERROR);
        let table = self.graphs.0.lock();
        let work = table.get(executable, Kind::Executable).map_err(failed)?;
        let from = table.get(graph, Kind::Graph).map_err(failed)?;
        if table.launching.contains(&executable) {
            return Err(failed(ILLEGAL_STATE));
        }
        let lengths = [work, from].map(|graph| self.sim.graph_len(graph));
        match self.sim.update_graph(work, from).ok_or(failed(Code::INVALID_HANDLE))? {
            true => self.user_objects.copy(graph, executable),
            false if lengths[0] != lengths[1] => return Err((UPDATE_FAILURE, TOPOLOGY_CHANGED)),
            false if [work, from].into_iter().any(|graph| self.check_no_memory(graph).is_err()) => {
                return Err((UPDATE_FAILURE, UPDATE_NOT_SUPPORTED));
            }
            false => return Err((UPDATE_FAILURE, NODE_TYPE_CHANGED)),
        }
        Ok(())
    }

    /// Destroys a graph or an executable.
    fn destroy(&self, handle: Handle, kind: Kind) -> Answer {
        let mut table = self.graphs.0.lock();
        self.sim.destroy_graph(table.get(handle, kind)?).map_err(code)?;
        table.live.remove(&handle);
        table.free.push(handle);
        self.user_objects.forget(handle);
        Ok(())
    }
}

abi! {
    /// Makes an executable from a graph. One for launches by the device is refused.
    11040 cuGraphInstantiateWithFlags(call, executable: Out<'_, Handle>, graph: Handle, flags: u64) {
        let life = call.life()?;
        if flags & !FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if flags & DEVICE_LAUNCH != 0 {
            // It excludes freeing memory on launch, and is not supported here otherwise.
            return Err(if flags & FREE_ON_LAUNCH != 0 { Code::INVALID_VALUE } else { Code::NOT_SUPPORTED });
        }
        life.instantiate(executable, graph, flags)
    }

    /// An older shape of `cuGraphInstantiateWithFlags`; nothing is ever logged.
    11000 cuGraphInstantiate_v2(
        call, executable: Out<'_, Handle>, graph: Handle, _node: Out<'_, Handle>, _log: Out<'_, u8>, _capacity: usize,
    ) {
        call.life()?.instantiate(executable, graph, 0)
    }

    /// Makes a graph without nodes.
    10000 cuGraphCreate(call, graph: Out<'_, Handle>, flags: u32) {
        let life = call.life()?;
        check_flags(flags, 0)?;
        let out = needed(graph)?;
        out.write(life.graphs.0.lock().add(Kind::Graph, life.sim.create_graph()));
        Ok(())
    }

    /// Copies a graph. One that allocates memory is refused.
    10000 cuGraphClone(call, copy: Out<'_, Handle>, graph: Handle) {
        call.life()?.clone_graph(copy, graph)
    }

    /// Adds a copy of a graph to a graph as one node, behind others of this kind. One with
    /// conditional nodes, or that allocates memory, is refused, and so is a graph that is being
    /// captured.
    10000 cuGraphAddChildGraphNode(
        call, node: Out<'_, Handle>, graph: Handle, dependencies: *const Handle, count: usize, child: Handle,
    ) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the nodes.
        let dependencies = unsafe { array(dependencies, count) }?;
        life.add_child(node, graph, dependencies, child)
    }

    /// Gives later launches of an executable the work of a graph with the same kinds of nodes.
    12000 cuGraphExecUpdate_v2(call, executable: Handle, graph: Handle, info: Out<'_, UpdateResult>) {
        let life = call.life()?;
        let info = needed(info)?;
        let updated = life.update(executable, graph);
        let result = updated.map_or_else(|(_, result)| result, |()| 0);
        info.write(UpdateResult { result, error_node: 0, error_from_node: 0 });
        updated.map_err(|(code, _)| code)
    }

    /// Enqueues the work of an executable.
    10000 cuGraphLaunch(call, executable: Handle, stream: Handle) {
        let life = call.life()?;
        let work = life.graphs.begin_launch(executable)?;
        let references = life.user_objects.of_launch(executable);
        let launched = life.sim.launch_graph(work, RawStream(stream)).map_err(code);
        life.graphs.end_launch(executable);
        life.user_objects.note_launch(life.sim.launch_end(work), references);
        launched
    }

    /// Does nothing: an executable has nothing to upload here.
    11010 cuGraphUpload(call, executable: Handle, stream: Handle) {
        let life = call.life()?;
        life.graphs.work(executable, Kind::Executable)?;
        life.sim.stream_id(RawStream(stream)).map_err(code)?;
        Ok(())
    }

    /// Destroys an executable. Its launches still run.
    10000 cuGraphExecDestroy(call, executable: Handle) {
        call.life()?.destroy(executable, Kind::Executable)
    }

    /// Destroys a graph. Executables made from it stay.
    10000 cuGraphDestroy(call, graph: Handle) {
        call.life()?.destroy(graph, Kind::Graph)
    }

    /// How many nodes a graph has. Their handles cannot be had.
    10000 cuGraphGetNodes(call, graph: Handle, nodes: In<'_, Handle>, count: Out<'_, usize>) {
        let life = call.life()?;
        let work = life.graphs.work(graph, Kind::Graph)?;
        let out = needed(count)?;
        if nodes.is_some() {
            return Err(Code::NOT_SUPPORTED);
        }
        out.write(life.sim.graph_len(work).ok_or(Code::INVALID_HANDLE)?);
        Ok(())
    }
}
