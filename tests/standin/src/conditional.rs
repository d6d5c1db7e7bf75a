//! Conditional nodes of graphs under construction: what is made while a stream captures.
//!
//! Nothing else of such a graph can be changed here. So the nodes that a stream's next work comes
//! after are one node, its *end*, and a conditional node comes after just that. No kernel sets a
//! condition: its value is the one that it has at the beginning of each launch.

use std::collections::HashMap;

use aquifer_device::{CaptureStatus, Code, Driver as _, RawStream};
use aquifer_sim::Conditional;
use parking_lot::Mutex;

use crate::abi::{Answer, Handle, In, InOut, Out, abi, array, code, needed, offer};
use crate::capture::Mode;
use crate::process::Life;

/// First handles of bodies, of nodes, and of conditions.
const BODIES: Handle = 0x6B_0000_0000_0000;
const NODES: Handle = 0x6C_0000_0000_0000;
const CONDITIONS: Handle = 0x6D_0000_0000_0000;

/// A condition has the default value at the beginning of each launch.
const ASSIGN_DEFAULT: u32 = 1;
/// The type of a conditional node among those of nodes.
const CONDITIONAL: u32 = 13;
/// What a stream captures next comes after the given nodes alone.
const SET: u32 = 1;

/// `CUgraphNodeParams` of a conditional node.
#[repr(C)]
struct NodeParams {
    kind: u32,
    reserved: [i32; 3],
    condition: Handle,
    conditional: u32,
    size: u32,
    bodies: *const Handle,
    context: Handle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Node {
    /// All that a stream captured.
    End(Handle),
    /// A conditional node of the simulated device.
    Conditional(u64),
    /// A child graph, which is a node of the simulated device.
    Child(u64),
}

/// What was made of graphs under construction. Handles of nodes, conditions and bodies are never
/// used again.
#[derive(Debug, Default)]
pub(crate) struct Conditionals(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    nodes: Vec<Node>,
    /// The ends of streams, in the memory that callers read them from.
    ends: HashMap<Handle, Box<[Handle; 1]>>,
    /// Conditions without a node yet: the number of the capture, and the value.
    conditions: HashMap<Handle, (u64, u32)>,
    conditions_made: u64,
    /// Bodies by handle: the node, which of its bodies, and the graph that is no body and has it.
    bodies: HashMap<Handle, (u64, u32, Handle)>,
    /// The handles of a node's bodies, in the memory that callers read them from.
    arrays: Vec<Box<[Handle]>>,
    /// The graph or the body that each capture makes.
    captured: HashMap<u64, Handle>,
}

impl Table {
    fn add(&mut self, node: Node) -> Handle {
        self.nodes.push(node);
        NODES + self.nodes.len() as u64
    }

    fn node(&self, handle: Handle) -> Answer<Node> {
        let at = usize::try_from(handle.wrapping_sub(NODES + 1)).map_err(|_| Code::INVALID_VALUE)?;
        self.nodes.get(at).copied().ok_or(Code::INVALID_VALUE)
    }

    /// The handle of a stream's end, and where it can be read.
    fn end(&mut self, stream: Handle) -> &[Handle; 1] {
        let node = if self.ends.contains_key(&stream) { 0 } else { self.add(Node::End(stream)) };
        self.ends.entry(stream).or_insert_with(|| Box::new([node]))
    }
}

impl Conditionals {
    /// A capture began, which makes this graph or body.
    pub(crate) fn begin_capture(&self, capture: u64, graph: Handle) {
        self.0.lock().captured.insert(capture, graph);
    }

    /// A capture is over. Returns the graph that it made.
    pub(crate) fn end_capture(&self, capture: u64) -> Option<Handle> {
        self.0.lock().captured.remove(&capture)
    }

    /// A handle for a child graph.
    pub(crate) fn add_child(&self, node: u64) -> Handle {
        self.0.lock().add(Node::Child(node))
    }

    /// The child graph of a handle. Other nodes cannot be depended on once their capture is over.
    pub(crate) fn child(&self, handle: Handle) -> Answer<u64> {
        match self.0.lock().node(handle)? {
            Node::Child(node) => Ok(node),
            _ => Err(Code::NOT_SUPPORTED),
        }
    }

    /// The graph that has a body; any other graph itself.
    pub(crate) fn graph_with(&self, graph: Handle) -> Handle {
        self.0.lock().bodies.get(&graph).map_or(graph, |&(_, _, with)| with)
    }
}

impl Life {
    /// The number of the capture that the stream is part of.
    fn capturing(&self, stream: Handle) -> Answer<u64> {
        match self.sim.capture_status(RawStream(stream)).map_err(code)? {
            CaptureStatus::Active => self.sim.capture_of(RawStream(stream)).map(|capture| capture.number),
            CaptureStatus::Invalidated => return Err(Code::CAPTURE_INVALIDATED),
            _ => None,
        }
        .ok_or(Code::INVALID_VALUE)
    }

    /// The graph that the stream is captured into, and the nodes that its next work comes after.
    pub(crate) fn inside(
        &self,
        stream: Handle,
        graph: Out<'_, Handle>,
        dependencies: Out<'_, Handle>,
        count: Out<'_, usize>,
    ) {
        let Ok(capture) = self.capturing(stream) else { return };
        let mut table = self.conditionals.0.lock();
        offer(graph, table.captured.get(&capture).copied().unwrap_or(0));
        offer(dependencies, table.end(stream).as_ptr().expose_provenance() as u64);
        offer(count, 1);
    }

    fn create_condition(&self, out: Out<'_, Handle>, graph: Handle, value: u32, flags: u32) -> Answer {
        let out = needed(out)?;
        let mut table = self.conditionals.0.lock();
        let made_by = table.captured.iter().find(|(_, made)| **made == graph).map(|(&capture, _)| capture);
        let capture = made_by.ok_or(Code::INVALID_VALUE)?;
        // A condition without a default keeps its value between launches, which nothing sets here.
        if flags != ASSIGN_DEFAULT {
            return Err(if flags == 0 { Code::NOT_SUPPORTED } else { Code::INVALID_VALUE });
        }
        table.conditions_made += 1;
        let handle = CONDITIONS + table.conditions_made;
        table.conditions.insert(handle, (capture, value));
        out.write(handle);
        Ok(())
    }

    fn add_conditional(
        &self,
        out: Out<'_, Handle>,
        graph: Handle,
        dependencies: &[Handle],
        params: &mut NodeParams,
    ) -> Answer {
        let out = needed(out)?;
        let mut table = self.conditionals.0.lock();
        let kind = match (params.kind, params.conditional) {
            (CONDITIONAL, 0) => Conditional::If,
            (CONDITIONAL, 1) => Conditional::While,
            (CONDITIONAL, 2) => Conditional::Switch,
            (CONDITIONAL, _) => return Err(Code::INVALID_VALUE),
            _ => return Err(Code::NOT_SUPPORTED),
        };
        let &(capture, value) = table.conditions.get(&params.condition).ok_or(Code::INVALID_VALUE)?;
        let [end] = dependencies else { return Err(Code::NOT_SUPPORTED) };
        let Node::End(stream) = table.node(*end)? else { return Err(Code::NOT_SUPPORTED) };
        if table.captured.get(&capture) != Some(&graph) || self.capturing(stream)? != capture {
            return Err(Code::INVALID_VALUE);
        }
        let node = self.sim.add_conditional(RawStream(stream), kind, params.size, value).map_err(code)?;
        table.conditions.remove(&params.condition);
        let first = BODIES + table.bodies.len() as u64;
        let bodies: Box<[Handle]> = (0..params.size).map(|body| first + u64::from(body)).collect();
        let with = table.bodies.get(&graph).map_or(graph, |&(_, _, with)| with);
        table.bodies.extend(bodies.iter().zip(0..).map(|(&body, number)| (body, (node, number, with))));
        params.bodies = bodies.as_ptr();
        table.arrays.push(bodies);
        out.write(table.add(Node::Conditional(node)));
        Ok(())
    }

    fn set_dependencies(&self, stream: Handle, nodes: &[Handle], flags: u32) -> Answer {
        let table = self.conditionals.0.lock();
        match (nodes, flags) {
            (&[node], SET) => match table.node(node)? {
                Node::Conditional(node) => self.sim.come_after_conditional(RawStream(stream), node).map_err(code),
                Node::End(of) if of == stream => Ok(()),
                Node::End(_) | Node::Child(_) => Err(Code::NOT_SUPPORTED),
            },
            (_, SET | 0) => Err(Code::NOT_SUPPORTED),
            _ => Err(Code::INVALID_VALUE),
        }
    }

    fn begin_capture_to(&self, stream: Handle, graph: Handle, dependencies: usize, mode: Mode) -> Answer {
        let table = self.conditionals.0.lock();
        // Other graphs cannot be added to.
        let &(node, body, _) = table.bodies.get(&graph).ok_or(Code::NOT_SUPPORTED)?;
        if dependencies > 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        self.sim.begin_body(node, body, RawStream(stream)).map_err(code)?;
        drop(table);
        self.note_capture(stream, mode, graph);
        Ok(())
    }

    /// Ends the capture of a body, if that is what the stream captures. Returns the body.
    pub(crate) fn end_body(&self, stream: Handle) -> Option<Answer<Handle>> {
        let capture = self.sim.capture_of(RawStream(stream))?.number;
        let table = self.conditionals.0.lock();
        let body = *table.captured.get(&capture).filter(|graph| table.bodies.contains_key(graph))?;
        drop(table);
        Some(self.sim.end_body(RawStream(stream)).map(|()| body).map_err(code))
    }
}

abi! {
    /// Creates a condition for a graph that a stream is captured into. One without a default value
    /// is refused.
    12030 cuGraphConditionalHandleCreate(
        call, condition: Out<'_, Handle>, graph: Handle, _context: Handle, value: u32, flags: u32,
    ) {
        call.life()?.create_condition(condition, graph, value, flags)
    }

    /// Adds a conditional node, IF or SWITCH, behind all that a stream captured. Other nodes are
    /// refused.
    12030 cuGraphAddNode_v2(
        call, node: Out<'_, Handle>, graph: Handle, dependencies: *const Handle, _edges: In<'_, u64>, count: usize,
        params: InOut<'_, NodeParams>,
    ) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the nodes.
        let dependencies = unsafe { array(dependencies, count) }?;
        life.add_conditional(node, graph, dependencies, needed(params)?)
    }

    /// Puts what a stream captures next behind a conditional node.
    12030 cuStreamUpdateCaptureDependencies_v2(
        call, stream: Handle, nodes: *const Handle, _edges: In<'_, u64>, count: usize, flags: u32,
    ) {
        let life = call.life()?;
        // SAFETY: the caller vouches for the nodes.
        let nodes = unsafe { array(nodes, count) }?;
        life.set_dependencies(stream, nodes, flags)
    }

    /// Starts to capture the stream into a body of a conditional node; other graphs are refused.
    12030 cuStreamBeginCaptureToGraph(
        call, stream: Handle, graph: Handle, _dependencies: In<'_, Handle>, _edges: In<'_, u64>, count: usize,
        mode: u32,
    ) {
        let life = call.life()?;
        life.begin_capture_to(stream, graph, count, Mode::parse(mode)?)
    }
}
