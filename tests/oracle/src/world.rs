//! Streams, events, captures and graphs, each with the vector clock of what comes before it.
//!
//! The rules, with where NVIDIA states them:
//!
//! * Work of one stream runs in order. Different streams are ordered by events alone: a wait orders
//!   later work of its stream after the work before the event's latest record (`cuStreamWaitEvent`,
//!   `cuEventRecord`). A later record of the event does not change earlier waits.
//! * An action on the legacy default stream waits for all blocking streams, and later actions on
//!   blocking streams wait for it. Per-thread default streams are blocking streams. Records and
//!   waits are actions ("Stream synchronization behavior").
//! * Waiting for a stream or an event, or a query that finds it complete, makes the work before it
//!   known to the host. So does waiting for the context, for all work (`cuStreamSynchronize`,
//!   `cuEventQuery`, `cuCtxSynchronize`). What is known comes before all that the host enqueues
//!   later, on whichever thread: threads are taken to agree on the order of their calls.
//! * A destroyed stream's work still runs, and the context still waits for it (`cuStreamDestroy`). A
//!   wait outlives its event (`cuEventDestroy`).
//! * A capture records work of its stream, and of streams that wait for its events, into a graph.
//!   Nodes are ordered by the order on each stream and by those events alone, not by what the
//!   streams did before (CUDA Programming Guide, "Cross-stream Dependencies and Events").
//! * A launch runs after the earlier work of its stream and after earlier launches of the same
//!   graph. Later work of its stream runs after all nodes (`cuGraphLaunch`).
//!
//! NVIDIA leaves some cases open. A destroyed stream counts as a stream until its work is done, so
//! the legacy stream waits for it. Waiting on the host for a blocking stream does not cover the
//! legacy stream's later work.

use std::collections::HashMap;
use std::thread::ThreadId;

use aquifer_device::{RawEvent, RawGraph, RawStream};

use crate::clock::{Clock, Line};
use crate::memory::{Accesses, Touch};
use crate::race::Op;

/// The identity of a live stream: its handle, or the thread whose default stream it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Handle(RawStream),
    Thread(ThreadId),
}

const LEGACY: Key = Key::Handle(RawStream::LEGACY);

impl Key {
    fn of(thread: ThreadId, stream: RawStream) -> Key {
        match stream {
            RawStream::PER_THREAD => Key::Thread(thread),
            stream if stream.is_legacy() => LEGACY,
            stream => Key::Handle(stream),
        }
    }
}

#[derive(Clone, Debug)]
struct Stream {
    line: Line,
    /// Whether it and the legacy stream wait for each other.
    blocking: bool,
    /// What comes before its next work.
    clock: Clock,
    /// The capture that it takes part in, by number, and its chain there.
    capture: Option<(u64, Line)>,
}

/// The latest record of an event.
#[derive(Clone, Debug)]
enum Record {
    /// What comes before it.
    Run(Clock),
    /// In a capture, by number: the nodes that come before it.
    Captured(u64, Clock),
}

/// A capture. Each stream that takes part is a *chain*, a line within the capture; clocks are over
/// chains.
#[derive(Clone, Debug)]
struct Capture {
    origin: Key,
    /// For each chain, what comes before its next node.
    chains: Vec<Clock>,
    nodes: Vec<Node>,
    accesses: Accesses,
}

/// A node of a graph.
#[derive(Clone, Debug)]
struct Node {
    chain: Line,
    /// The nodes before it, itself included.
    clock: Clock,
    number: u64,
    call: &'static str,
    place: u64,
    touches: Vec<Touch>,
}

#[derive(Clone, Debug)]
struct Graph {
    nodes: Vec<Node>,
    /// The line of each chain.
    lines: Vec<Line>,
    /// The latest launch and what came before it.
    last: Clock,
}

/// An operation that begins, with what comes before it and what it touches.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) op: Op,
    pub(crate) before: Clock,
    pub(crate) touches: Vec<Touch>,
    /// The capture that it is recorded in instead of run. The line and the clock are those of the
    /// capture then.
    pub(crate) capture: Option<u64>,
}

/// Everything that orders work.
#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    streams: HashMap<Key, Stream>,
    /// What comes before the end of destroyed blocking streams.
    destroyed: Clock,
    events: HashMap<RawEvent, Record>,
    captures: HashMap<u64, Capture>,
    graphs: HashMap<RawGraph, Graph>,
    /// What the host knows to be complete. It comes before all that the host does from now on.
    known: Clock,
    lines: Line,
    number: u64,
    next_capture: u64,
    /// Where the call is made that is being taken.
    pub(crate) place: u64,
}

impl World {
    /// Whether the host knows the operation to be complete.
    pub(crate) fn is_known(&self, op: &Op) -> bool {
        self.known.covers(op.line, op.number)
    }

    pub(crate) fn create_stream(&mut self, stream: RawStream, non_blocking: bool) {
        self.prune();
        let line = self.new_line();
        let made = Stream { line, blocking: !non_blocking, clock: Clock::default(), capture: None };
        self.streams.insert(Key::Handle(stream), made);
    }

    pub(crate) fn destroy_stream(&mut self, stream: RawStream) {
        let Some(gone) = self.streams.remove(&Key::Handle(stream)) else { return };
        if gone.blocking {
            self.destroyed.join(&gone.clock);
        }
        // A capture ends with the stream that began it.
        if let Some((capture, _)) = gone.capture
            && self.captures.get(&capture).is_some_and(|capture| capture.origin == Key::Handle(stream))
        {
            self.close(capture);
        }
    }

    /// Enqueues work on a stream, or records it where the stream captures.
    pub(crate) fn enqueue(
        &mut self,
        thread: ThreadId,
        stream: RawStream,
        call: &'static str,
        touches: Vec<Touch>,
    ) -> Option<Started> {
        let key = self.key(thread, stream);
        let Some((id, chain)) = self.streams[&key].capture else {
            let before = self.act(key);
            return Some(Started { op: self.append(key, call, stream), before, touches, capture: None });
        };
        let capture = self.captures.get_mut(&id)?;
        let clock = &mut capture.chains[chain as usize];
        let number = clock.until(chain) + 1;
        clock.advance(chain, number);
        let place = self.place;
        let op = Op { line: chain, number, call, stream: Some(stream), place, launch: None };
        let started = Started { op, before: clock.clone(), touches: touches.clone(), capture: Some(id) };
        capture.nodes.push(Node { chain, clock: clock.clone(), number, call, place, touches });
        Some(started)
    }

    /// The accesses of the nodes of a capture.
    pub(crate) fn accesses(&mut self, capture: u64) -> Option<&mut Accesses> {
        self.captures.get_mut(&capture).map(|capture| &mut capture.accesses)
    }

    /// Destroys an event.
    pub(crate) fn forget_event(&mut self, event: RawEvent) {
        self.events.remove(&event);
    }

    pub(crate) fn record(&mut self, thread: ThreadId, event: RawEvent, stream: RawStream) {
        let key = self.key(thread, stream);
        let record = match self.streams[&key].capture {
            None => Record::Run(self.act(key)),
            Some((id, chain)) => {
                let before = self.captures.get(&id).map(|capture| capture.chains[chain as usize].clone());
                Record::Captured(id, before.unwrap_or_default())
            }
        };
        self.events.insert(event, record);
    }

    pub(crate) fn wait(&mut self, thread: ThreadId, stream: RawStream, event: RawEvent) {
        let key = self.key(thread, stream);
        match (self.events.get(&event).cloned(), self.streams[&key].capture) {
            (Some(Record::Captured(id, before)), joined) => {
                let Some(capture) = self.captures.get_mut(&id) else { return };
                let chain = match joined {
                    Some((joined, chain)) if joined == id => chain,
                    _ => {
                        capture.chains.push(Clock::default());
                        index(capture.chains.len() - 1)
                    }
                };
                capture.chains[chain as usize].join(&before);
                self.at(key).capture = Some((id, chain));
            }
            (Some(Record::Run(before)), None) => {
                self.act(key);
                self.at(key).clock.join(&before);
            }
            // Waiting for an event that was never recorded does nothing. A graph has no edges to
            // work outside.
            (None, _) | (_, Some(_)) => {}
        }
    }

    /// Orders later work of the stream after all work.
    pub(crate) fn wait_for_all(&mut self, thread: ThreadId, stream: RawStream) {
        let key = self.key(thread, stream);
        self.at(key).clock = Clock::all(self.number);
    }

    /// The host learns that the stream is complete.
    pub(crate) fn stream_is_complete(&mut self, thread: ThreadId, stream: RawStream) {
        let key = self.key(thread, stream);
        self.known.join(&self.streams[&key].clock);
    }

    /// The host learns that the event is complete.
    pub(crate) fn event_is_complete(&mut self, event: RawEvent) {
        if let Some(Record::Run(before)) = self.events.get(&event) {
            self.known.join(before);
        }
    }

    /// The host learns that all work is complete.
    pub(crate) fn all_is_complete(&mut self) {
        self.known = Clock::all(self.number);
        self.prune();
    }

    pub(crate) fn begin_capture(&mut self, thread: ThreadId, stream: RawStream) {
        let origin = self.key(thread, stream);
        self.next_capture += 1;
        let (nodes, accesses) = (Vec::new(), Accesses::default());
        let capture = Capture { origin, chains: vec![Clock::default()], nodes, accesses };
        self.captures.insert(self.next_capture, capture);
        self.at(origin).capture = Some((self.next_capture, 0));
    }

    /// Ends a capture. Its nodes become `graph`, unless the capture failed.
    pub(crate) fn end_capture(&mut self, thread: ThreadId, stream: RawStream, graph: Option<RawGraph>) {
        let key = self.key(thread, stream);
        let Some((id, _)) = self.streams[&key].capture else { return };
        let Some(Capture { chains, nodes, .. }) = self.close(id) else { return };
        if let Some(graph) = graph {
            let lines = chains.iter().map(|_| self.new_line()).collect();
            self.graphs.insert(graph, Graph { nodes, lines, last: Clock::default() });
        }
    }

    pub(crate) fn destroy_graph(&mut self, graph: RawGraph) {
        self.graphs.remove(&graph);
    }

    /// Gives `copy` the nodes of a graph. Its later launches still come after its earlier ones.
    pub(crate) fn copy_graph(&mut self, graph: RawGraph, copy: RawGraph) {
        let Some(Graph { nodes, lines, .. }) = self.graphs.get(&graph) else {
            self.graphs.remove(&copy);
            return;
        };
        let (nodes, chains) = (nodes.clone(), lines.len());
        let before = self.graphs.remove(&copy).map(|before| (before.lines, before.last));
        // Its launches are in order whatever their nodes, and so are the lines of their chains.
        let (mut lines, last) = before.unwrap_or_default();
        self.prune();
        lines.resize_with(chains.max(lines.len()), || self.new_line());
        self.graphs.insert(copy, Graph { nodes, lines, last });
    }

    /// The call, place and accesses of each node of a graph.
    pub(crate) fn nodes(&self, graph: RawGraph) -> impl Iterator<Item = (&'static str, u64, &[Touch])> {
        let nodes = self.graphs.get(&graph).into_iter().flat_map(|graph| &graph.nodes);
        nodes.map(|node| (node.call, node.place, &node.touches[..]))
    }

    /// Whether the stream takes part in a capture.
    pub(crate) fn is_capturing(&self, thread: ThreadId, stream: RawStream) -> bool {
        self.streams.get(&Key::of(thread, stream)).is_some_and(|stream| stream.capture.is_some())
    }

    /// Launches a graph: its nodes, in an order that their edges allow. Drivers here refuse to
    /// capture a launch.
    pub(crate) fn launch(&mut self, thread: ThreadId, graph: RawGraph, stream: RawStream) -> Vec<Started> {
        let key = self.key(thread, stream);
        let mut before = self.act(key);
        let base = self.number;
        let Some(Graph { nodes, lines, last }) = self.graphs.get(&graph) else { return Vec::new() };
        before.join(last);
        let (line, launch) = (|chain: Line| lines[chain as usize], Some(self.place));
        let start = |node: &Node| {
            let mut before = before.clone();
            node.clock.lines().for_each(|(chain, until)| before.advance(line(chain), base + until));
            let (line, number) = (line(node.chain), base + node.number);
            let op = Op { line, number, call: node.call, stream: Some(stream), place: node.place, launch };
            Started { op, before, touches: node.touches.clone(), capture: None }
        };
        let started: Vec<Started> = nodes.iter().map(start).collect();
        self.number = started.iter().map(|node| node.op.number).max().unwrap_or(base);
        started.iter().for_each(|node| before.join(&node.before));
        self.at(key).clock = before;
        // The launch is itself an operation of the stream, after its nodes.
        self.append(key, "cuGraphLaunch", stream);
        let last = self.at(key).clock.clone();
        self.graphs.get_mut(&graph).into_iter().for_each(|graph| graph.last.clone_from(&last));
        started
    }

    /// Takes a capture out of the streams that take part in it.
    fn close(&mut self, id: u64) -> Option<Capture> {
        for stream in self.streams.values_mut() {
            stream.capture = stream.capture.filter(|(capture, _)| *capture != id);
        }
        self.captures.remove(&id)
    }

    /// An action on a stream: orders it with the legacy stream. Returns what comes before it.
    fn act(&mut self, key: Key) -> Clock {
        let mut clock = std::mem::take(&mut self.at(key).clock);
        if key == LEGACY {
            clock.join(&self.destroyed);
            self.streams.values().filter(|stream| stream.blocking).for_each(|stream| clock.join(&stream.clock));
        } else if self.streams[&key].blocking
            && let Some(legacy) = self.streams.get(&LEGACY)
        {
            clock.join(&legacy.clock);
        }
        self.at(key).clock.clone_from(&clock);
        clock
    }

    /// Appends an operation to a stream.
    fn append(&mut self, key: Key, call: &'static str, stream: RawStream) -> Op {
        self.number += 1;
        let number = self.number;
        let at = self.at(key);
        at.clock.advance(at.line, number);
        Op { line: at.line, number, call, stream: Some(stream), place: self.place, launch: None }
    }

    /// The key of a stream that a call names. A stream that is met for the first time is a default
    /// stream, or belongs to another library, which is taken to have made a blocking stream.
    fn key(&mut self, thread: ThreadId, stream: RawStream) -> Key {
        let key = Key::of(thread, stream);
        if !self.streams.contains_key(&key) {
            let line = self.new_line();
            self.streams.insert(key, Stream { line, blocking: true, clock: Clock::default(), capture: None });
        }
        key
    }

    /// A stream that [`World::key`] found.
    fn at(&mut self, key: Key) -> &mut Stream {
        self.streams.get_mut(&key).expect("the key of a live stream")
    }

    fn new_line(&mut self) -> Line {
        self.lines += 1;
        self.lines
    }

    /// Drops from all clocks what is known, so that they do not grow with each stream.
    fn prune(&mut self) {
        let streams = self.streams.values_mut().map(|stream| &mut stream.clock);
        let events = self.events.values_mut().filter_map(|record| match record {
            Record::Run(before) => Some(before),
            Record::Captured(..) => None,
        });
        let graphs = self.graphs.values_mut().map(|graph| &mut graph.last);
        let destroyed = std::iter::once(&mut self.destroyed);
        streams.chain(events).chain(graphs).chain(destroyed).for_each(|clock| clock.prune(&self.known));
    }
}

/// The number of a chain. There are never as many as 2^32.
fn index(chain: usize) -> Line {
    Line::try_from(chain).unwrap_or(Line::MAX)
}
