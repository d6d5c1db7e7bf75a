//! Graph capture: work that is recorded instead of run, and the calls that are refused meanwhile.
//!
//! A capture has one origin stream; a stream that waits for one of its events joins it. Inside a
//! capture order is kept with clocks of its own, so unordered accesses of one graph are found while
//! it is captured, or when it is launched and its addresses have become the same memory. A graph
//! runs as the work was captured, one after the other on the stream it is launched on, which is one
//! of the orders it allows. Launches of one graph wait for each other, on whichever streams.
//!
//! Invariant: a stream has a membership exactly while it is a member of a live capture.

use std::collections::BTreeSet;

use aquifer_device::{CaptureStatus, Code, Operation, RawGraph, RawStream};

use crate::checks::Misuse;
use crate::clock::{OpClock, StreamKey};
use crate::machine::Machine;
use crate::objects::{CaptureState, CapturedGraph, GraphAccesses, GraphNode, Membership};
use crate::queue::LEGACY;
use crate::race::{Epoch, Space};
use crate::refused::{Answer, Refused};
use crate::violation::Violation;
use crate::work::Body;

fn unsupported(detail: impl Into<String>) -> Refused {
    Refused::new(Code::CAPTURE_UNSUPPORTED, detail)
}

impl Machine {
    /// Refuses work on the legacy stream while a blocking stream captures, and on a stream whose
    /// capture broke.
    pub(crate) fn capture_allows(&mut self, id: u32) -> Answer<()> {
        if !self.has_captures() {
            return Ok(());
        }
        if id == LEGACY {
            let blocking = self.streams.iter_mut().filter(|(_, stream)| stream.blocking);
            let broken: Vec<u64> = blocking.filter_map(|(_, stream)| Some(stream.capture.as_ref()?.capture)).collect();
            broken.iter().for_each(|&capture| self.invalidate(capture));
            let refusal =
                || Refused::new(Code::CAPTURE_IMPLICIT, "the legacy stream would wait for a stream that captures");
            return if broken.is_empty() { Ok(()) } else { Err(refusal()) };
        }
        let capture = self.streams.get(id)?.capture.as_ref().map(|member| member.capture);
        match capture.and_then(|capture| self.captures.get(&capture)) {
            Some(CaptureState { invalid: true, .. }) => {
                Err(Refused::new(Code::CAPTURE_INVALIDATED, "an earlier call broke this stream's capture"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a call that a capturing stream cannot take, and breaks its capture.
    pub(crate) fn forbid_capture(&mut self, id: u32, refusal: impl FnOnce() -> Refused) -> Answer<()> {
        self.capture_allows(id)?;
        if self.streams.get(id)?.capture.is_none() {
            return Ok(());
        }
        self.invalidate_capture_of(id);
        Err(refusal())
    }

    /// Refuses to wait for a capturing stream.
    pub(crate) fn forbid_wait(&mut self, id: u32) -> Answer<()> {
        self.forbid_capture(id, || {
            unsupported("the stream captures; its work does not run, so it cannot be waited for")
        })
    }

    /// Refuses to make a capturing stream wait for an event from outside of the capture.
    pub(crate) fn forbid_outside_event(&mut self, id: u32) -> Answer<()> {
        let detail = "the stream captures, and the event was not recorded in its capture";
        self.forbid_capture(id, || Refused::new(Code::CAPTURE_ISOLATION, detail))
    }

    /// Refuses to wait for the whole device while anything captures, and breaks all captures.
    pub(crate) fn forbid_device_wait(&mut self) -> Answer<()> {
        let refused = self.refuse_device_wait();
        if refused.is_err() {
            self.captures.values_mut().for_each(|capture| capture.invalid = true);
        }
        refused
    }

    /// Refuses to wait for the whole device while anything captures. Breaks no capture.
    pub(crate) fn refuse_device_wait(&mut self) -> Answer<()> {
        if !self.has_captures() {
            return Ok(());
        }
        Err(unsupported("this waits for the device, which is not possible while a stream captures"))
    }

    /// Whether any capture is live. A capture that began on the default stream of a thread that has
    /// ended is removed.
    fn has_captures(&mut self) -> bool {
        if self.captures.is_empty() {
            return false;
        }
        let ended = self.streams.of_ended_threads();
        let gone = self.captures.iter().filter(|(_, capture)| ended.contains(&capture.origin));
        for number in gone.map(|(&number, _)| number).collect::<Vec<_>>() {
            if let Some(capture) = self.dissolve(number) {
                self.discard(capture.graph);
            }
        }
        !self.captures.is_empty()
    }

    /// Tells the checks whether any capture is live.
    fn note_captures(&self) {
        self.checks().inspect(|checks| checks.note_captures(!self.captures.is_empty()));
    }

    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some(capture) = self.captures.get_mut(&capture) {
            capture.invalid = true;
        }
    }

    /// Whether a live capture was broken.
    pub(crate) fn is_broken(&self, capture: u64) -> bool {
        self.captures.get(&capture).is_some_and(|capture| capture.invalid)
    }

    /// Breaks the capture that the stream is part of.
    pub(crate) fn invalidate_capture_of(&mut self, id: u32) {
        let member = self.streams.get(id).ok().and_then(|stream| stream.capture.as_ref());
        if let Some(capture) = member.map(|member| member.capture) {
            self.invalidate(capture);
        }
    }

    /// Removes a destroyed stream from its capture. That breaks the capture, or ends it if it began
    /// on the stream.
    pub(crate) fn leave_capture(&mut self, id: u32, member: &Membership) {
        self.invalidate(member.capture);
        let Some(capture) = self.captures.get_mut(&member.capture) else { return };
        capture.members.remove(&id);
        if capture.origin == id
            && let Some(capture) = self.dissolve(member.capture)
        {
            self.discard(capture.graph);
        }
    }

    fn dissolve(&mut self, number: u64) -> Option<CaptureState> {
        for body in self.bodies_of(number) {
            self.dissolve(body);
        }
        let capture = self.captures.remove(&number)?;
        self.note_captures();
        for &member in &capture.members {
            if let Ok(stream) = self.streams.get(member) {
                stream.capture = None;
            }
        }
        Some(capture)
    }

    /// Whether the stream captures. Breaks nothing.
    pub(crate) fn capture_status(&mut self, stream: RawStream) -> Answer<CaptureStatus> {
        let id = self.streams.find(stream)?;
        if self.has_captures()
            && id == LEGACY
            && self.streams.iter_mut().any(|(_, stream)| stream.blocking && stream.capture.is_some())
        {
            let detail = "a blocking stream captures, so the legacy stream cannot be asked";
            return Err(Refused::new(Code::CAPTURE_IMPLICIT, detail));
        }
        let number = self.streams.get(id)?.capture.as_ref().map(|member| member.capture);
        Ok(match number.and_then(|number| self.captures.get(&number)) {
            None => CaptureStatus::None,
            Some(CaptureState { invalid: true, .. }) => CaptureStatus::Invalidated,
            Some(_) => CaptureStatus::Active,
        })
    }

    /// A stream that can begin to capture.
    pub(crate) fn stream_to_capture(&mut self, stream: RawStream) -> Answer<u32> {
        let id = self.streams.find(stream)?;
        if id == LEGACY {
            return Err(unsupported("the legacy default stream cannot capture"));
        }
        if self.streams.get(id)?.capture.is_some() {
            return Err(unsupported("the stream captures already"));
        }
        Ok(id)
    }

    pub(crate) fn begin_capture(&mut self, stream: RawStream) -> Answer<()> {
        let id = self.stream_to_capture(stream)?;
        self.capture_count += 1;
        let capture = CaptureState { origin: id, members: BTreeSet::from([id]), ..CaptureState::default() };
        self.captures.insert(self.capture_count, capture);
        self.note_captures();
        let member = Membership { capture: self.capture_count, clock: OpClock::default(), seq: 0 };
        self.streams.get(id)?.capture = Some(member);
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: RawStream) -> Answer<RawGraph> {
        let id = self.streams.find(stream)?;
        let member = self.streams.get(id)?.capture.as_ref();
        let (number, clock) = match member {
            Some(member) => (member.capture, member.clock.clone()),
            None => return Err(Refused::value("the stream does not capture")),
        };
        let capture = self.captures.get(&number);
        if capture.is_some_and(|capture| capture.origin != id) {
            self.invalidate(number);
            return Err(Refused::new(Code(903), "the capture began on another stream and must end there"));
        }
        if capture.is_some_and(|capture| capture.body.is_some()) {
            return Err(Refused::value(
                "the stream captures a body of a conditional node, which is no graph to launch",
            ));
        }
        Ok(RawGraph(self.close_capture(number, &clock).map(|graph| self.graphs.insert(graph))?))
    }

    /// Ends a capture whose first stream has this clock, and returns what it recorded.
    pub(crate) fn close_capture(&mut self, number: u64, clock: &OpClock) -> Answer<CapturedGraph> {
        let mut unjoined = Vec::new();
        let device = self.detector.known.device;
        for (id, stream) in self.streams.iter_mut() {
            if let Some(member) = stream.capture.as_ref().filter(|member| member.capture == number)
                && clock.get(StreamKey { device, stream: id }) < member.seq
            {
                unjoined.push(stream.name.to_string());
            }
        }
        let goes_on = !self.bodies_of(number).is_empty();
        let Some(capture) = self.dissolve(number) else { return Err(Refused::value("the stream does not capture")) };
        let refused = if capture.invalid {
            Refused::new(Code::CAPTURE_INVALIDATED, "an earlier call broke the capture; it is gone")
        } else if goes_on {
            let detail = "the capture of a body of its conditional nodes goes on; both are gone";
            Refused::new(Code::CAPTURE_UNJOINED, detail)
        } else if !unjoined.is_empty() {
            let detail =
                format!("{} joined the capture and did not join back; the capture is gone", unjoined.join(", "));
            Refused::new(Code::CAPTURE_UNJOINED, detail)
        } else {
            return Ok(capture.graph);
        };
        self.discard(capture.graph);
        Err(refused)
    }

    /// A wait for an event that was recorded inside a capture: the stream joins it.
    pub(crate) fn wait_captured(&mut self, id: u32, capture: u64, clock: &OpClock) -> Answer<()> {
        if !self.captures.contains_key(&capture) {
            return Err(Refused::new(Code::CAPTURED_EVENT, "the event was recorded in a capture that is over"));
        }
        if id == LEGACY {
            self.invalidate(capture);
            return Err(Refused::new(Code::CAPTURE_IMPLICIT, "the legacy default stream cannot join a capture"));
        }
        let seq = self.last_in(capture, id);
        let stream = self.streams.get(id)?;
        match &mut stream.capture {
            Some(member) if member.capture == capture => member.clock.join(clock),
            Some(member) => {
                let other = member.capture;
                self.invalidate(other);
                self.invalidate(capture);
                return Err(Refused::new(Code(902), "two captures would merge"));
            }
            None => {
                stream.capture = Some(Membership { capture, clock: clock.clone(), seq });
                if let Some(capture) = self.captures.get_mut(&capture) {
                    capture.members.insert(id);
                }
            }
        }
        Ok(())
    }

    /// Adds work to the capture that the stream is part of. Returns the work when the stream
    /// captures nothing. `is_new` unless it was captured before, in a graph that is launched.
    pub(crate) fn capture_work(&mut self, id: u32, body: Body, is_new: bool) -> Answer<Option<Body>> {
        self.capture_allows(id)?;
        if self.streams.get(id)?.capture.is_none() {
            return Ok(Some(body));
        }
        let pageable = "copies of pageable memory cannot be captured here; use pinned memory";
        match body {
            Body::FromTaken { .. } | Body::ToWaiting { .. } => self.forbid_capture(id, || unsupported(pageable))?,
            Body::FromPeer { .. } => {
                self.forbid_capture(id, || unsupported("copies between devices cannot be captured here"))?;
            }
            _ => {}
        }
        let op = self.op_ref(Some(id), body.operation(), body.kernel());
        let key = self.streams.key(id);
        let needed = if is_new { self.check_blocks(op, &body.touches()) } else { Vec::new() };
        let Some(member) = &mut self.streams.get(id)?.capture else { return Ok(Some(body)) };
        member.seq += 1;
        member.clock.raise(key, member.seq);
        let (epoch, clock, capture) =
            (Epoch { stream: key, seq: member.seq, op }, member.clock.clone(), member.capture);
        let (root, within) = self.graph_of(capture);
        let blocks = self.checks().map_or(0, |checks| checks.count());
        let node = GraphNode { body, epoch, clock, within, blocks };
        let Some(capture) = self.captures.get_mut(&root) else { return Ok(Some(node.body)) };
        for (space, conflict) in capture.accesses.add(&node, &self.physicals, &self.address.mappings) {
            self.detector.conflict(space, &conflict, op);
            capture.graph.races = true;
        }
        capture.graph.needed.extend(needed);
        capture.graph.nodes.push(node);
        Ok(None)
    }

    pub(crate) fn launch_graph(&mut self, graph: RawGraph, stream: RawStream) -> Answer<()> {
        let unknown = || Refused::handle("graph", graph.0);
        let found = self.graphs.get(graph.0).ok_or_else(unknown)?.clone();
        let nodes: Vec<&GraphNode> = found.nodes.iter().filter(|node| self.runs(&node.within)).collect();
        let id = self.streams.find(stream)?;
        self.forbid_capture(id, || unsupported("launches of graphs cannot be captured"))?;
        if let Some(misuse) = self.check_graph_blocks(&found, &nodes) {
            let second = self.op_ref(Some(id), Operation::LaunchGraph, None);
            let Misuse { kind, at, block, why } = misuse;
            let range = at..block.as_ref().map_or(at, |block| block.ptr.0 + block.bytes);
            self.detector.report(Violation { kind, first: None, second, range, missing: why, block });
        }
        self.check_graph_memory(&found)?;
        self.check_aliased(graph);
        match &found.launched {
            Some((at, clock)) => self.order_after(id, *at, clock)?,
            None => self.streams.arrive(id),
        }
        nodes.into_iter().try_for_each(|node| self.launch_node(id, node.body.clone()))?;
        let launched = Some(self.end_of(id)?);
        self.graphs.get_mut(graph.0).ok_or_else(unknown)?.launched = launched;
        Ok(())
    }

    /// A block that a graph needs and that is gone, or that began in the graph's memory since its
    /// capture.
    fn check_graph_blocks(&self, graph: &CapturedGraph, nodes: &[&GraphNode]) -> Option<Misuse> {
        let checks = self.checks()?;
        let touches = nodes.iter().flat_map(|node| node.body.touches().into_iter().map(|touch| (node.blocks, touch)));
        let on_device = touches.filter(|(_, touch)| touch.space == Space::Device);
        let uses = on_device.flat_map(|(blocks, touch)| {
            let aliases = touch.aliases(&self.physicals, &self.address.mappings);
            aliases.into_iter().chain([touch.range]).map(move |range| (blocks, range))
        });
        let gone = checks.check_needed(graph.needed.iter().copied());
        gone.or_else(|| checks.check_given_out(uses))
    }

    /// Reports nodes that race because their addresses have become the same memory since they were
    /// captured.
    fn check_aliased(&mut self, graph: RawGraph) {
        let Machine { graphs, physicals, address, detector, .. } = self;
        let Some(graph) = graphs.get(graph.0).filter(|graph| !graph.races && physicals.has_aliases()) else { return };
        let mut accesses = GraphAccesses::default();
        for node in &graph.nodes {
            for (space, conflict) in accesses.add(node, physicals, &address.mappings) {
                detector.conflict(space, &conflict, node.epoch.op);
            }
        }
    }

    pub(crate) fn destroy_graph(&mut self, graph: RawGraph) -> Answer<()> {
        let graph = self.graphs.remove(graph.0).ok_or_else(|| Refused::handle("graph", graph.0))?;
        self.discard(graph);
        Ok(())
    }

    /// Gives up what a graph has that is destroyed, or was never made.
    fn discard(&mut self, graph: CapturedGraph) {
        self.forget_conditionals(&graph);
        self.release_graph_memory(graph.memory);
    }
}
