//! Steps with graphs that order themselves: captured in one verb, launched with new parameters, and
//! read back.

use aquifer::prelude::*;
use aquifer::{Error, Graph};

use super::player::{Player, at, length};

/// A graph that copies its parameter, over another stream and through temporaries, to its output.
pub(super) struct Copying {
    graph: Graph<Buffer<u8>>,
    parameter: Buffer<u8>,
}

/// The most graphs of a thread. One more replaces the first.
const GRAPHS_MAX: usize = 3;

impl Player<'_> {
    /// Captures a graph, with memory of a pool or of its own, and a temporary that it writes.
    pub(super) fn make_graph(&mut self, pool: u32, stream: u32, bytes: u64, temporary: u64) {
        let world = self.world;
        let can_capture = |stream: &Stream| self.runs(stream) && !stream.raw().is_legacy();
        let (one, other) = (self.stream(stream), self.stream(stream + 1));
        if !can_capture(&one) || !can_capture(&other) || one.id() == other.id() {
            return;
        }
        let Some(_awake) = world.keep_awake() else { return };
        let made = world.request(&world.memory, bytes, || world.memory.alloc_zeros::<u8>(length(bytes), &one));
        let Some(parameter) = made else { return };
        let events = (world.device.create_event(false), world.device.create_event(false));
        let (Some(fork), Some(join)) = (world.allow(events.0), world.allow(events.1)) else { return };
        let work = |stream: &Stream| {
            world.memory.alloc::<u8>(length(temporary), stream)?.fill(1, stream)?;
            let mut first = parameter.like(stream)?;
            first.copy_from(&parameter, stream)?;
            fork.record(stream)?;
            other.wait_event(&fork)?;
            let mut second = parameter.like(&other)?;
            second.copy_from(&first, &other)?;
            drop(first);
            join.record(&other)?;
            stream.wait_event(&join)?;
            let mut output = parameter.like(stream)?;
            output.copy_from(&second, stream)?;
            Ok::<_, Error>(output)
        };
        world.note_graph();
        let captured = match at(&self.pools, pool) {
            Some(at) => world.memory.graph_in(&self.pools[at], &one, work),
            None => world.memory.graph(&one, work),
        };
        let Some(graph) = world.served(captured) else { return };
        if self.copying.len() == GRAPHS_MAX {
            self.copying.remove(0);
        }
        self.copying.push(Copying { graph, parameter });
    }

    /// Launches a graph twice, on two streams, each time with another parameter, and compares both
    /// outputs.
    pub(super) fn replay_graph(&mut self, pick: u32, stream: u32) {
        let (world, streams) = (self.world, [self.stream(stream), self.stream(stream + 1)]);
        let Some(at) = at(&self.copying, pick).filter(|_| streams.iter().all(|stream| self.runs(stream))) else {
            return;
        };
        let Some(_awake) = world.keep_awake() else { return };
        let patterns = [self.pattern(), self.pattern()];
        let Copying { graph, parameter } = &mut self.copying[at];
        let mut launch = |stream: &Stream, pattern: u8| {
            let _in_flight = graph.update(parameter, vec![pattern; parameter.len()], stream)?;
            graph.launch(stream)?;
            graph.output().download(vec![!pattern; parameter.len()], stream)
        };
        let [first, second] = [0, 1].map(|at| launch(&streams[at], patterns[at]));
        for (found, pattern) in [first, second].into_iter().zip(patterns) {
            if let Some(found) = world.launched(found.and_then(|found| found.wait())) {
                world.compare(&found, pattern);
            }
        }
    }
}
