//! Steps with graphs that order themselves: captured in one verb, launched with new inputs and
//! conditions, and read back.

use aquifer::Error;
use aquifer::prelude::*;
use aquifer_sim::Conditional;

use crate::held::Replayed;
use crate::player::{Player, at, length};
use crate::world::World;

/// The most graphs of a thread. One more replaces the first.
const GRAPHS_MAX: usize = 3;

impl World {
    /// Does the work of two bodies of a SWITCH on `side`: one after the other or, in a capture, in
    /// bodies of a conditional node, which is returned.
    fn switch(
        &self,
        stream: &Stream,
        side: &Stream,
        mut work: impl FnMut(u32) -> Result<(), Error>,
    ) -> Result<Option<u64>, Error> {
        if !stream.is_capturing() {
            for body in 0..2 {
                side.wait_for(&stream.tick())?;
                work(body)?;
                stream.wait_for(&side.tick())?;
            }
            return Ok(None);
        }
        let Some(driver) = &self.subject.simulator else { return Ok(None) };
        let order_captured = |earlier: &Stream, later: &Stream| {
            self.judged.iter().for_each(|judged| judged.order_captured(earlier.raw(), later.raw()));
        };
        let node = driver.add_conditional(stream.raw(), Conditional::Switch, 2, 0)?;
        driver.come_after_conditional(stream.raw(), node)?;
        for body in 0..2 {
            driver.begin_body(node, body, side.raw())?;
            order_captured(stream, side);
            let announced = stream.announce_body(side);
            let done = if announced.is_ok() { work(body) } else { Ok(()) };
            // Also where its work failed. A fault may refuse it; the end of a capture that is
            // broken is an error.
            let _ended = (0..9).find(|_| driver.end_body(side.raw()).is_ok());
            order_captured(side, stream);
            let _over = announced?;
            done?;
        }
        Ok(Some(node))
    }
}

impl Player<'_> {
    /// Captures a graph, with memory of a pool or of its own, that copies its inputs by way of
    /// temporaries, another stream and bodies of a SWITCH.
    pub(crate) fn make_graph(&mut self, pool: u32, stream: u32, bytes: u64, temporary: u64) {
        let (world, memory, pattern) = (self.world, &self.world.memory, self.pattern());
        let can_capture = |stream: &Stream| self.runs(stream) && !stream.raw().is_legacy();
        let [one, other, side] = [0, 1, 2].map(|further| self.stream(stream + further));
        if !can_capture(&one) || !can_capture(&other) || one.id() == other.id() {
            return;
        }
        let has_bodies = pool.is_multiple_of(2) && can_capture(&side) && ![one.id(), other.id()].contains(&side.id());
        let Some(_awake) = world.keep_awake() else { return };
        let input = || world.request(memory, (bytes, true), || memory.alloc_zeros::<u8>(length(bytes), &one));
        let (Some(parameter), Some(mut constant)) = (input(), input()) else { return };
        let pattern = world.allow(constant.fill(pattern, &one)).map(|()| (pattern, world.sleeping.lost(0)));
        let events = (world.device.create_event(false), world.device.create_event(false));
        let (Some(fork), Some(join)) = (world.allow(events.0), world.allow(events.1)) else { return };
        let mut pinned =
            pool.is_multiple_of(3).then(|| world.allow(world.transfer.pinned().alloc(length(bytes)))).flatten();
        let mut node = None;
        let work = |stream: &Stream| {
            let mut first = parameter.like(stream)?;
            first.copy_from(&parameter, stream)?;
            let scratch = memory.alloc_bytes(bytes, stream)?;
            stream.fill(scratch.ptr(), 1, bytes)?;
            fork.record(stream)?;
            other.wait_event(&fork)?;
            let mut second = parameter.like(&other)?;
            second.copy_from(&first, &other)?;
            other.fill(scratch.ptr(), 2, bytes)?;
            // The other stream still uses both, so they must not serve what comes now.
            drop(first);
            scratch.drop_on(&other)?;
            for bytes in [bytes, temporary] {
                memory.alloc::<u8>(length(bytes), stream)?.fill(3, stream)?;
            }
            join.record(&other)?;
            stream.wait_event(&join)?;
            let mut outputs = [parameter.like(stream)?, parameter.like(stream)?];
            outputs[0].copy_from(&second, stream)?;
            outputs[1].copy_from(&constant, stream)?;
            if has_bodies {
                node = world.switch(stream, &side, |body| {
                    let mut copy = constant.like(&side)?;
                    copy.copy_from([&second, &constant][body as usize], &side)?;
                    outputs[1].copy_from(&copy, &side)
                })?;
            }
            if let Some(pinned) = &mut pinned {
                outputs[0].download(pinned, stream)?;
            }
            Ok::<_, Error>(outputs)
        };
        world.note_graph();
        let captured = match at(&self.pools, pool) {
            Some(at) if !pool.is_multiple_of(4) => memory.graph_in(&self.pools[at], &one, work),
            _ => memory.graph(&one, work),
        };
        let Some(graph) = world.served(captured) else { return };
        if self.replayed.len() == GRAPHS_MAX {
            self.replayed.remove(0);
        }
        self.replayed.push(Replayed { graph, parameter, constant: Some(constant), pattern, node, pinned });
    }

    /// Launches a graph twice, on two streams. Each time, the other stream has just begun to write
    /// new inputs. Compares what the launches wrote, unless they are left under way.
    pub(crate) fn replay_graph(&mut self, pick: u32, stream: u32) {
        let (world, streams) = (self.world, [self.stream(stream), self.stream(stream + 1)]);
        let Some(at) = at(&self.replayed, pick).filter(|_| streams.iter().all(|stream| self.runs(stream))) else {
            return;
        };
        world.end_uploads();
        let Some(_awake) = world.keep_awake() else { return };
        let (patterns, condition, lost) = ([self.pattern(), self.pattern()], pick / 4 % 3, world.sleeping.lost(0));
        let Replayed { graph, parameter, constant, pattern, node, pinned } = &mut self.replayed[at];
        if let (Some(node), Some(driver)) = (*node, &world.subject.simulator)
            && world.allow(driver.set_condition(node, condition)).is_none()
        {
            return;
        }
        let mut launch = |on: &Stream, by: &Stream, new: u8| {
            if let Some(constant) = constant {
                *pattern = None;
                constant.fill(!new, by)?;
                *pattern = Some((!new, lost));
            }
            let _in_flight = graph.update(parameter, vec![new; parameter.len()], by)?;
            graph.launch(on)?;
            let constant = pattern.filter(|&(_, before)| before == lost).map(|(pattern, _)| pattern);
            // What was lost must not be read.
            let read = |output: &Buffer<u8>, expected: Option<u8>| {
                let read =
                    |expected: u8| Ok::<_, Error>((expected, output.download(vec![!expected; output.len()], by)?));
                expected.map(read).transpose()
            };
            let [first, second] = graph.output();
            let has_new = node.is_some() && condition == 0;
            Ok::<_, Error>([read(first, Some(new))?, read(second, if has_new { Some(new) } else { constant })?])
        };
        let [one, other] = &streams;
        let launched = [launch(one, other, patterns[0]), launch(other, one, patterns[1])];
        let is_last_known = launched[1].is_ok();
        for (expected, found) in launched.into_iter().filter_map(|one| world.launched(one)).flatten().flatten() {
            if !pick.is_multiple_of(4)
                && let Some(found) = world.allow(found.wait())
            {
                world.compare(&found, expected);
            }
        }
        let pinned = pinned.as_ref().filter(|_| is_last_known).and_then(|pinned| world.allow(pinned.read()));
        pinned.into_iter().for_each(|found| world.compare(&found, patterns[1]));
    }

    /// Drops the last handle of what a graph reads, and allocates an equal buffer.
    pub(crate) fn drop_input(&mut self, pick: u32, stream: u32) {
        let (world, stream) = (self.world, self.stream(stream));
        let Some(at) = at(&self.replayed, pick) else { return };
        if let Some(bytes) = self.replayed[at].constant.take().map(|constant| constant.bytes()) {
            self.add(&world.memory, bytes, &stream, 0, || world.memory.alloc(length(bytes), &stream));
        }
    }
}
