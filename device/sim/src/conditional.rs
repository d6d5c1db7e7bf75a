//! Nodes that hold graphs, their *bodies*. A launch runs at most one body of a conditional node. A
//! child graph is a node with one body, a copy of another graph, which always runs.
//!
//! The bodies of a node exclude each other. They are captured one after the other, before any work
//! that comes after the node, and each counts as ordered after those captured before it. So clocks
//! find races within a body and with work beside the node, and none between two bodies. The value
//! of a condition is read when the graph is launched: no kernel sets it here.
//!
//! Invariants: a graph's work stands in an order that all its edges allow, that of bodies included;
//! a node lives as long as its capture or a graph that has it.

use std::collections::{BTreeMap, BTreeSet};

use aquifer_device::{Code, Operation, RawGraph, RawStream, Result};

use crate::SimDriver;
use crate::clock::{OpClock, StreamKey};
use crate::machine::Machine;
use crate::objects::{CaptureState, CapturedGraph, GraphAccesses, GraphNode, Membership};
use crate::queue::StreamState;
use crate::race::Epoch;
use crate::refused::{Answer, Refused};

/// What a conditional node does with its bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Conditional {
    /// Runs the first body unless the condition is 0, and the second one, if there is one, if it
    /// is.
    If,
    /// Runs the body whose number is the condition's value; none if there is no such body.
    Switch,
    /// Runs its one body as long as the condition is not 0. Not supported: a body that runs again
    /// may read memory that it gave up the first time.
    While,
}

/// A conditional node.
#[derive(Debug)]
pub(crate) struct ConditionalNode {
    kind: Conditional,
    bodies: u32,
    value: u32,
    /// The capture whose graph has it. None has number 0, which child graphs have.
    capture: u64,
    /// Names the node in clocks, where its bodies and what comes after it hold 1.
    key: StreamKey,
    /// What the next body is ordered after: the node, and the bodies before it.
    clock: OpClock,
    begun: BTreeSet<u32>,
}

/// A body of a conditional node, which a graph's work is within.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodyRef {
    node: u64,
    body: u32,
}

impl SimDriver {
    /// Adds a conditional node to the graph that a stream is captured into. It comes after all that
    /// the stream captured so far; what the stream captures later comes after the node from
    /// [`SimDriver::come_after_conditional`] on. Its condition has this value until
    /// [`SimDriver::set_condition`].
    ///
    /// ```
    /// use aquifer::device::sim::{Conditional, SimConfig, SimDriver};
    /// let sim = SimDriver::new(SimConfig::default());
    /// let device = aquifer::Device::new(sim.clone());
    /// let (one, two, memory) = (device.stream()?, device.stream()?, device.alloc(4096)?);
    /// let (driver, stream, side) = (device.driver(), one.raw(), two.raw());
    /// driver.begin_capture(stream)?;
    /// let node = sim.add_conditional(stream, Conditional::Switch, 2, 0)?;
    /// sim.come_after_conditional(stream, node)?;
    /// for body in 0..2 {
    ///     sim.begin_body(node, body, side)?;
    ///     driver.memset(memory, body as u8, 4096, side)?;
    ///     sim.end_body(side)?;
    /// }
    /// let graph = driver.end_capture(stream)?;
    /// sim.set_condition(node, 1)?;
    /// driver.launch_graph(graph, stream)?;
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the stream does not capture, for no bodies or too many, and for [`Conditional::While`].
    pub fn add_conditional(&self, stream: RawStream, kind: Conditional, bodies: u32, value: u32) -> Result<u64> {
        self.call(Operation::BeginCapture, |machine| machine.add_conditional(stream, kind, bodies, value))
    }

    /// Orders what a stream captures later after a conditional node of the same graph.
    ///
    /// # Errors
    /// When the node is not of the graph that the stream is captured into.
    pub fn come_after_conditional(&self, stream: RawStream, node: u64) -> Result<()> {
        self.call(Operation::BeginCapture, |machine| machine.come_after_conditional(stream, node))
    }

    /// Starts to capture a stream into a body of a conditional node.
    ///
    /// # Errors
    /// When there is no such body, it was captured already, another one is being captured, or work
    /// was captured that comes after the node; when the stream captures, or is the legacy one.
    pub fn begin_body(&self, node: u64, body: u32, stream: RawStream) -> Result<()> {
        self.call(Operation::BeginCapture, |machine| machine.begin_body(node, body, stream))
    }

    /// Ends the capture of a body, which began on this stream.
    ///
    /// # Errors
    /// When it did not, a stream of it has not joined back, or an earlier call broke it. The
    /// capture that the node belongs to is broken then.
    pub fn end_body(&self, stream: RawStream) -> Result<()> {
        self.call(Operation::EndCapture, |machine| machine.end_body(stream))
    }

    /// Makes a graph without nodes.
    pub fn create_graph(&self) -> RawGraph {
        RawGraph(self.machine.lock().graphs.insert(CapturedGraph::default()))
    }

    /// Adds a copy of another graph to a graph, as one node that comes after others of this kind.
    /// Returns the node.
    ///
    /// # Errors
    /// When a graph is gone, a node is no child graph of this one, or the other graph has
    /// conditional nodes or allocates.
    pub fn add_child(&self, graph: RawGraph, child: RawGraph, after: &[u64]) -> Result<u64> {
        self.call(Operation::BeginCapture, |machine| machine.add_child(graph, child, after))
    }

    /// Sets the value of a condition for launches from now on, as a kernel of the graph does on
    /// GPUs.
    ///
    /// # Errors
    /// When the node is gone.
    pub fn set_condition(&self, node: u64, value: u32) -> Result<()> {
        self.call(Operation::LaunchGraph, |machine| {
            machine.conditional_mut(node)?.value = value;
            Ok(())
        })
    }
}

impl Machine {
    fn conditional(&self, node: u64) -> Answer<&ConditionalNode> {
        self.conditionals.get(node).ok_or_else(|| Refused::handle("conditional node", node))
    }

    fn conditional_mut(&mut self, node: u64) -> Answer<&mut ConditionalNode> {
        self.conditionals.get_mut(node).ok_or_else(|| Refused::handle("conditional node", node))
    }

    fn add_conditional(&mut self, stream: RawStream, kind: Conditional, bodies: u32, value: u32) -> Answer<u64> {
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        let most = match kind {
            Conditional::If => 2,
            Conditional::Switch => u32::MAX,
            Conditional::While => {
                let detail = "nodes that run a body again are not supported";
                return Err(Refused::new(Code::NOT_SUPPORTED, detail));
            }
        };
        if bodies == 0 || bodies > most {
            return Err(Refused::value(format!("a conditional node of this kind does not have {bodies} bodies")));
        }
        let Some(member) = &self.streams.get(id)?.capture else {
            return Err(Refused::value("the stream does not capture"));
        };
        let (capture, mut clock) = (member.capture, member.clock.clone());
        let key = self.streams.key_of_node();
        clock.raise(key, 1);
        let node = ConditionalNode { kind, bodies, value, capture, key, clock, begun: BTreeSet::new() };
        let handle = self.conditionals.insert(node);
        let (root, within) = self.graph_of(capture);
        if let Some(root) = self.captures.get_mut(&root) {
            root.graph.conditionals.push((handle, within.is_empty()));
        }
        Ok(handle)
    }

    fn come_after_conditional(&mut self, stream: RawStream, node: u64) -> Answer<()> {
        let id = self.streams.find(stream)?;
        self.capture_allows(id)?;
        let ConditionalNode { capture, clock, .. } = self.conditional(node)?;
        let (capture, clock) = (*capture, clock.clone());
        match &mut self.streams.get(id)?.capture {
            Some(member) if member.capture == capture => member.clock.join(&clock),
            _ => return Err(Refused::value("the node is not of the graph that the stream is captured into")),
        }
        Ok(())
    }

    fn add_child(&mut self, graph: RawGraph, child: RawGraph, after: &[u64]) -> Answer<u64> {
        let unknown = |graph: RawGraph| Refused::handle("graph", graph.0);
        let child = self.graphs.get(child.0).ok_or_else(|| unknown(child))?.clone();
        let parent = self.graphs.get(graph.0).ok_or_else(|| unknown(graph))?;
        let mut clock = OpClock::default();
        for &node in after {
            let before = self.conditional(node)?;
            if before.capture > 0 || !parent.conditionals.contains(&(node, true)) {
                return Err(Refused::value("a child graph comes after child graphs of the same graph"));
            }
            clock.join(&before.clock);
        }
        let is_conditional = |&(node, _): &(u64, bool)| self.conditional(node).map_or(true, |node| node.capture > 0);
        if child.conditionals.iter().any(is_conditional) || !child.memory.is_empty() {
            let detail = "a child graph must neither have conditional nodes nor allocate";
            return Err(Refused::new(Code::NOT_SUPPORTED, detail));
        }
        let key = self.streams.key_of_node();
        let mut node = ConditionalNode {
            kind: Conditional::Switch,
            bodies: 1,
            value: 0,
            capture: 0,
            key,
            clock: clock.clone(),
            begun: BTreeSet::from([0]),
        };
        node.clock.raise(key, 1);
        // The same graph may be a child twice, so its streams get other names here.
        let mut names = BTreeMap::new();
        let mut name = |stream| *names.entry(stream).or_insert_with(|| self.streams.key_of_node());
        let mut work = child.nodes;
        for of_child in &mut work {
            let mut renamed = clock.clone();
            of_child.clock.iter().for_each(|(stream, seq)| renamed.raise(name(stream), seq));
            node.clock.join(&renamed);
            of_child.clock = renamed;
            of_child.epoch = Epoch { stream: name(of_child.epoch.stream), ..of_child.epoch };
        }
        let handle = self.conditionals.insert(node);
        work.iter_mut().for_each(|of_child| of_child.within.push(BodyRef { node: handle, body: 0 }));
        let Machine { graphs, physicals, address, detector, .. } = self;
        let Some(parent) = graphs.get_mut(graph.0) else { return Err(unknown(graph)) };
        let mut accesses = GraphAccesses::default();
        for node in &parent.nodes {
            accesses.add(node, physicals, &address.mappings);
        }
        for node in &work {
            for (space, conflict) in accesses.add(node, physicals, &address.mappings) {
                detector.conflict(space, &conflict, node.epoch.op);
                parent.races = true;
            }
        }
        parent.nodes.extend(work);
        parent.needed.extend(child.needed);
        parent.conditionals.extend(child.conditionals.into_iter().map(|(node, _)| (node, false)));
        parent.conditionals.push((handle, true));
        Ok(handle)
    }

    fn begin_body(&mut self, node: u64, body: u32, stream: RawStream) -> Answer<()> {
        let id = self.stream_to_capture(stream)?;
        let ConditionalNode { bodies, capture, key, clock, begun, .. } = self.conditional(node)?;
        if body >= *bodies || begun.contains(&body) {
            return Err(Refused::value(format!("the node has no body {body} that is to be captured")));
        }
        let (capture, key, clock) = (*capture, *key, clock.clone());
        if !self.captures.contains_key(&capture) {
            return Err(Refused::value("the capture that the node belongs to is over"));
        }
        if self.captures.values().any(|other| other.body.is_some_and(|of| of.node == node)) {
            return Err(Refused::value("another body of the node is being captured"));
        }
        let (root, _) = self.graph_of(capture);
        let behind = |other: &GraphNode| other.clock.get(key) > 0 && other.within.iter().all(|of| of.node != node);
        if self.captures.get(&root).is_some_and(|root| root.graph.nodes.iter().any(behind)) {
            let detail = "work was captured that comes after the node: capture its bodies first";
            return Err(Refused::new(Code::NOT_SUPPORTED, detail));
        }
        self.conditional_mut(node)?.begun.insert(body);
        self.capture_count += 1;
        let state = CaptureState {
            origin: id,
            members: BTreeSet::from([id]),
            body: Some(BodyRef { node, body }),
            ..CaptureState::default()
        };
        self.captures.insert(self.capture_count, state);
        let seq = self.last_in(root, id);
        self.streams.get(id)?.capture = Some(Membership { capture: self.capture_count, clock, seq });
        Ok(())
    }

    fn end_body(&mut self, stream: RawStream) -> Answer<()> {
        let id = self.streams.find(stream)?;
        let member = self.streams.get(id)?.capture.as_ref().map(|member| (member.capture, member.clock.clone()));
        let own = member.and_then(|(number, end)| {
            let capture = self.captures.get(&number).filter(|capture| capture.origin == id)?;
            Some((number, end, capture.body?))
        });
        let Some((number, end, BodyRef { node, .. })) = own else {
            return Err(Refused::value("the capture of no body began on the stream"));
        };
        let ConditionalNode { capture: parent, key, .. } = self.conditional(node)?;
        let (parent, key, (root, _)) = (*parent, *key, self.graph_of(number));
        let of_body = |(id, stream): (u32, &mut StreamState)| {
            let member = stream.capture.as_ref().filter(|member| member.capture == number)?;
            Some((id, member.seq))
        };
        let last: Vec<(u32, u64)> = self.streams.iter_mut().filter_map(of_body).collect();
        if let Err(refused) = self.close_capture(number, &end) {
            self.invalidate(parent);
            return Err(refused);
        }
        if let Some(root) = self.captures.get_mut(&root) {
            root.last.extend(last);
        }
        self.conditional_mut(node)?.clock.join(&end);
        let members = self.streams.iter_mut().filter_map(|(_, stream)| stream.capture.as_mut());
        members.filter(|member| member.clock.get(key) > 0).for_each(|member| member.clock.join(&end));
        Ok(())
    }

    /// The last place that a stream had in the graph of a capture, from which it goes on in another
    /// body.
    pub(crate) fn last_in(&self, capture: u64, stream: u32) -> u64 {
        let (root, _) = self.graph_of(capture);
        self.captures.get(&root).and_then(|root| root.last.get(&stream).copied()).unwrap_or(0)
    }

    /// The capture that makes the graph which work of this capture belongs to, and the bodies that
    /// the work is within.
    pub(crate) fn graph_of(&self, mut capture: u64) -> (u64, Vec<BodyRef>) {
        let mut within = Vec::new();
        while let Some(body) = self.captures.get(&capture).and_then(|capture| capture.body)
            && let Some(node) = self.conditionals.get(body.node)
        {
            within.push(body);
            capture = node.capture;
        }
        (capture, within)
    }

    /// The captures of bodies of nodes of a capture.
    pub(crate) fn bodies_of(&self, capture: u64) -> Vec<u64> {
        let of = |body: BodyRef| self.conditionals.get(body.node).is_some_and(|node| node.capture == capture);
        self.captures.iter().filter(|(_, other)| other.body.is_some_and(of)).map(|(&number, _)| number).collect()
    }

    /// Whether a launch runs work that is within these bodies.
    pub(crate) fn runs(&self, within: &[BodyRef]) -> bool {
        within.iter().all(|&BodyRef { node, body }| match self.conditionals.get(node) {
            Some(&ConditionalNode { kind: Conditional::If, value, .. }) => (value == 0) == (body == 1),
            Some(&ConditionalNode { value, .. }) => value == body,
            None => false,
        })
    }

    /// Whether two nodes of graphs are child graphs at the same depth.
    pub(crate) fn are_children(&self, one: &(u64, bool), other: &(u64, bool)) -> bool {
        let is_child = |node| self.conditional(node).is_ok_and(|node| node.capture == 0);
        one.1 == other.1 && is_child(one.0) && is_child(other.0)
    }

    /// Forgets the conditional nodes of a graph that is gone, unless a copy of it is left.
    pub(crate) fn forget_conditionals(&mut self, gone: &CapturedGraph) {
        for (node, _) in &gone.conditionals {
            let has = |graph: &CapturedGraph| graph.conditionals.iter().any(|(other, _)| other == node);
            if !self.graphs.iter().any(has) {
                self.conditionals.remove(*node);
            }
        }
    }
}
