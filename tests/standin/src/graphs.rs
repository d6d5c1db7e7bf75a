//! Graphs: the result of a capture, and executables made from it. Each of them has a copy of the
//! captured work.

use std::collections::{HashMap, HashSet};

use aquifer_device::{Code, Driver as _, RawGraph, RawStream};
use parking_lot::Mutex;

use crate::abi::{Answer, Handle, In, Out, abi, code, needed};
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

/// Two calls use an object that takes one at a time.
const ILLEGAL_STATE: Code = Code(401);

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
}

impl Table {
    fn add(&mut self, kind: Kind, work: RawGraph) -> Handle {
        self.created += 1;
        let handle = FIRST + self.created;
        self.live.insert(handle, (kind, work));
        handle
    }

    fn get(&self, handle: Handle, kind: Kind) -> Answer<RawGraph> {
        let found = self.live.get(&handle).filter(|(known, _)| *known == kind);
        found.map(|&(_, work)| work).ok_or(Code::INVALID_HANDLE)
    }
}

impl Graphs {
    /// A new graph of captured work, with the handle that it had during its capture.
    pub(crate) fn add(&self, handle: Handle, work: RawGraph) {
        self.0.lock().live.insert(handle, (Kind::Graph, work));
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

    /// Destroys a graph or an executable.
    fn destroy(&self, handle: Handle, kind: Kind) -> Answer {
        let mut table = self.graphs.0.lock();
        self.sim.destroy_graph(table.get(handle, kind)?).map_err(code)?;
        table.live.remove(&handle);
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

    /// Enqueues the work of an executable.
    10000 cuGraphLaunch(call, executable: Handle, stream: Handle) {
        let life = call.life()?;
        let work = life.graphs.begin_launch(executable)?;
        let references = life.user_objects.of_launch(executable);
        let launched = life.sim.launch_graph(work, RawStream(stream)).map_err(code);
        life.graphs.end_launch(executable);
        // Without a known end they are held as long as the device.
        life.user_objects.note_launch(life.sim.launch_done_ns(work).unwrap_or(u64::MAX), references);
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
