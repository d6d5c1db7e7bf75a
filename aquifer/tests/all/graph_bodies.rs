//! Bodies of conditional nodes, which exclude each other: the memory that they share, and what is
//! kept across them.

use std::cell::RefCell;

use aquifer::Error;
use aquifer::device::sim::SimDriver;
use aquifer::memory::{Allocation, PoolOptions};
use aquifer::prelude::*;
use aquifer_device::{Code, Event};
use aquifer_sim::Conditional;

use super::graphs::{Bench, MIB, bench};

fn sim(stream: &Stream) -> &SimDriver {
    stream.driver().as_any().and_then(|driver| driver.downcast_ref()).expect("it is simulated")
}

/// Does the work of each body of a SWITCH, each on a stream of `sides`: in a capture, in a body of
/// a conditional node, which is returned, else one after the other.
fn switch(
    stream: &Stream,
    sides: &[Stream],
    bodies: u32,
    mut work: impl FnMut(u32, &Stream) -> Result<(), Error>,
) -> Result<u64, Error> {
    let side = |body: u32| &sides[body as usize % sides.len()];
    if !stream.is_capturing() {
        for body in 0..bodies {
            side(body).wait_for(&stream.tick())?;
            work(body, side(body))?;
            stream.wait_for(&side(body).tick())?;
        }
        return Ok(0);
    }
    let node = sim(stream).add_conditional(stream.raw(), Conditional::Switch, bodies, 0)?;
    sim(stream).come_after_conditional(stream.raw(), node)?;
    for body in 0..bodies {
        sim(stream).begin_body(node, body, side(body).raw())?;
        let announced = stream.announce_body(side(body))?;
        work(body, side(body))?;
        sim(stream).end_body(side(body).raw())?;
        drop(announced);
    }
    Ok(node)
}

/// Layers of a branch, by size: each has temporaries that its later ones use again.
fn branch(memory: &Allocator, mib: usize, stream: &Stream) -> Result<(), Error> {
    for _ in 0..3 {
        let wide = memory.alloc_zeros::<u8>(mib << 21, stream)?;
        let narrow = memory.alloc_zeros::<u8>(mib << 20, stream)?;
        drop(wide);
        let mut again = memory.alloc_zeros::<u8>(mib << 20, stream)?;
        again.copy_from(&narrow, stream)?;
    }
    Ok(())
}

fn reserved(memory: &Allocator) -> u64 {
    memory.reserved_by_private_pools().values().sum()
}

#[test]
fn four_bodies_need_as_much_as_the_largest_one_in_any_order_on_any_streams() {
    let sizes = [10, 40, 20, 30];
    let alone = bench("sim:24GiB,violations=panic");
    let largest = alone.memory.graph(&alone.stream, |stream| branch(&alone.memory, 40, stream)).unwrap();
    let needed = reserved(&alone.memory);
    drop(largest);
    for first in 0..4 {
        for streams in [1, 2, 4] {
            let bench = bench("sim:24GiB,violations=panic");
            let Bench { device, memory, stream, .. } = &bench;
            let sides: Vec<Stream> = (0..streams).map(|_| device.stream().unwrap()).collect();
            let graph = memory
                .graph(stream, |stream| {
                    switch(stream, &sides, 4, |body, side| branch(memory, sizes[(first + body as usize) % 4], side))
                })
                .unwrap();
            let held = reserved(memory);
            assert!(held <= needed + needed / 100, "{held} for {needed}: {streams} streams, {first} first");
            for condition in 0..5 {
                sim(stream).set_condition(*graph.output(), condition).unwrap();
                graph.launch(stream).unwrap();
            }
        }
    }
}

/// The long form, on a pool and on streams of the program's own.
#[test]
fn bodies_of_captures_in_the_long_form_share_memory_too() {
    for by_another_library in [false, true] {
        let bench = Bench::new();
        let Bench { device, memory, stream, side } = &bench;
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let capture = if by_another_library {
            stream.driver().begin_capture(stream.raw()).unwrap();
            None
        } else {
            Some(stream.begin_capture().unwrap())
        };
        let route = memory.capture(stream, &pool).unwrap();
        drop(memory.alloc_bytes(100 * MIB, stream).unwrap());
        switch(stream, &[side.clone(), device.stream().unwrap()], 4, |_, side| {
            let own = memory.alloc_bytes(100 * MIB, side)?;
            side.fill(own.ptr(), 1, own.bytes())?;
            Ok(())
        })
        .unwrap();
        let after = memory.alloc_bytes(100 * MIB, stream).unwrap();
        stream.fill(after.ptr(), 2, after.bytes()).unwrap();
        drop(after);
        assert_eq!(reserved(memory), 100 * MIB, "before, in, and after the bodies");
        if let Some(capture) = capture {
            capture.end().unwrap().launch(stream).unwrap();
        } else {
            let graph = stream.driver().end_capture(stream.raw()).unwrap();
            stream.driver().destroy_graph(graph).unwrap();
        }
        drop(route);
    }
}

/// A made-up step with a branch: blocks of random sizes are filled, read and dropped, before, in
/// and after the bodies, on the stream of each or on one that forks from it.
struct Random<'a> {
    memory: &'a Allocator,
    /// Outside of bodies, and in them: a stream takes part in one capture at a time.
    forks: &'a [Stream; 2],
    event: Event,
    seed: u64,
    /// With its value, and the body that made it.
    live: Vec<(Buffer<u8>, u8, Option<u32>)>,
}

impl Random<'_> {
    fn below(&mut self, limit: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.seed >> 33).expect("31 bits") % limit.max(1)
    }

    /// Steps on a stream, in a body or not.
    fn steps(&mut self, sums: &mut Buffer<u8>, body: Option<u32>, stream: &Stream) -> Result<(), Error> {
        for _ in 0..self.below(8) {
            let at = self.below(self.live.len());
            // What another body made is there only if that one runs.
            let is_there = |live: &&(Buffer<u8>, u8, Option<u32>)| live.2.is_none() || live.2 == body;
            match (self.below(4), self.live.get(at).filter(is_there)) {
                (0, Some(_)) => drop(self.live.swap_remove(at)),
                (1, Some((buffer, ..))) => sums.slice_mut(..1).copy_from(&buffer.slice(..1), stream)?,
                (2, Some(_)) => {
                    let (side, event) = (&self.forks[usize::from(body.is_some())], &self.event);
                    event.record(stream)?;
                    side.wait_event(event)?;
                    drop(self.memory.alloc_zeros::<u8>(1 << 20, side)?);
                    event.record(side)?;
                    stream.wait_event(event)?;
                }
                _ => {
                    let bytes = self.below(6 << 20) + 1;
                    let mut made = self.memory.alloc::<u8>(bytes, stream)?;
                    let value = u8::try_from(self.below(255)).expect("a byte");
                    made.fill(value, stream)?;
                    self.live.push((made, value, body));
                }
            }
        }
        Ok(())
    }
}

/// Which body runs is not known when the graph is captured, so what was made before the bodies must
/// hold after each of them what it held before.
#[test]
fn what_lives_across_bodies_is_kept_whichever_runs() {
    let mut looked_at = 0;
    for seed in 0..150 {
        let bench = Bench::new();
        let Bench { device, memory, stream, side } = &bench;
        let [one, forks @ ..] = [(); 3].map(|()| device.stream().unwrap());
        let (sides, mut sums) = ([side.clone(), one], memory.alloc_zeros::<u8>(20, stream).unwrap());
        let mut expected = Vec::new();
        let graph = memory.graph(stream, |stream| {
            let event = device.create_event(false)?;
            let mut random = Random { memory, forks: &forks, event, seed, live: Vec::new() };
            random.steps(&mut sums, None, stream)?;
            let node = switch(stream, &sides, 3, |body, side| random.steps(&mut sums, Some(body), side))?;
            random.steps(&mut sums, None, stream)?;
            expected.clear();
            let live = random.live.iter().filter(|(.., body)| body.is_none()).zip(1..20);
            for ((buffer, value, _), at) in live {
                sums.slice_mut(at..=at).copy_from(&buffer.slice(buffer.len() - 1..), stream)?;
                expected.push(*value);
            }
            Ok(node)
        });
        let graph = graph.unwrap();
        for condition in [0, 1, 2, 3, 1] {
            sim(stream).set_condition(*graph.output(), condition).unwrap();
            sums.fill(0, stream).unwrap();
            graph.launch(stream).unwrap();
            let found = sums.to_vec(stream).unwrap();
            assert_eq!(found[1..=expected.len()], expected, "seed {seed}, body {condition}");
            looked_at += expected.len();
        }
    }
    assert!(looked_at > 1000, "{looked_at}");
}

#[test]
fn memory_that_a_body_leaves_in_the_pool_is_refused() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let sides = [side.clone()];
    let left: RefCell<Vec<Allocation>> = RefCell::default();
    let made = memory.graph(stream, |stream| {
        switch(stream, &sides, 2, |_, side| {
            if stream.is_capturing() {
                left.borrow_mut().push(memory.alloc_bytes(MIB, side)?);
            }
            Ok(())
        })
    });
    assert!(matches!(made, Err(Error::UnevenWork { bytes }) if bytes == 2 * MIB), "{:?}", made.map(drop));
    left.borrow_mut().clear();
    memory.graph(stream, |stream| switch(stream, &sides, 2, |_, side| branch(memory, 1, side))).unwrap();
}

#[test]
fn bodies_that_cannot_be_announced_are_refused_and_leave_everything_as_it_was() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let code = |result: Result<_, aquifer_device::DeviceError>| result.map(drop).unwrap_err().code;
    assert_eq!(code(stream.announce_body(side)), Code::INVALID_VALUE, "no capture around it");
    let other = super::graphs::bench("sim:1GiB");
    let capture = stream.begin_capture().unwrap();
    assert_eq!(code(stream.announce_body(&other.stream)), Code::INVALID_HANDLE, "of another device");
    let error = stream.announce_body(side).unwrap_err();
    assert!(error.to_string().contains("the stream does not capture"), "{error}");
    let node = sim(stream).add_conditional(stream.raw(), Conditional::If, 1, 1).unwrap();
    sim(stream).come_after_conditional(stream.raw(), node).unwrap();
    sim(stream).begin_body(node, 0, side.raw()).unwrap();
    let body = stream.announce_body(side).unwrap();
    assert_eq!(code(stream.announce_body(side)), Code::CAPTURE_UNSUPPORTED, "it is known");
    let error = capture.end().unwrap_err();
    assert!(error.to_string().contains("a body of a conditional node of the graph is being captured"), "{error}");
    assert!(stream.is_capturing() && side.is_capturing());
    sim(stream).end_body(side.raw()).unwrap();
    drop(body);
    assert!(!side.is_capturing());
    capture.end().unwrap().launch(stream).unwrap();
    memory.alloc_zeros::<u8>(4096, side).unwrap().to_vec(side).unwrap();
}

/// The work of a body fails, or breaks its capture: the graph is not made, and everything works
/// afterwards.
#[test]
fn a_body_that_fails_fails_the_graph_and_nothing_else() {
    let bench = Bench::new();
    let Bench { device, memory, stream, side, .. } = &bench;
    let sides = [side.clone()];
    for breaks in [true, false] {
        let made = memory.graph(stream, |stream| {
            switch(stream, &sides, 2, |body, side| {
                let mut own = memory.alloc_zeros::<u8>(4096, side)?;
                if stream.is_capturing() && body == 1 {
                    if breaks {
                        own.to_vec(side)?;
                    }
                    drop(memory.alloc_bytes(2 << 30, side)?);
                }
                own.fill(1, side)
            })
        });
        assert!(made.is_err());
        // The program ends what it began.
        let _ = sim(stream).end_body(side.raw());
        assert!(!stream.is_capturing() && !side.is_capturing());
        device.synchronize().unwrap();
        memory.graph(stream, |stream| switch(stream, &sides, 2, |_, side| branch(memory, 1, side))).unwrap();
    }
    memory.empty_cache().unwrap();
    assert_eq!(memory.memory_allocated(), 0);
}

/// Streams of a body: what one gives up, or used, is the other's only where the graph's edges say so.
#[test]
fn streams_that_a_body_forked_do_not_share_its_memory() {
    let bench = Bench::new();
    let Bench { device, memory, stream, side } = &bench;
    let forked = device.stream().unwrap();
    let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
    let after_side = || {
        fork.record(side)?;
        forked.wait_event(&fork)
    };
    let work = |_, side: &Stream| {
        after_side()?;
        let first = memory.alloc_bytes(MIB, side)?;
        side.fill(first.ptr(), 1, MIB)?;
        drop(first);
        let second = memory.alloc_bytes(MIB, &forked)?;
        forked.fill(second.ptr(), 2, MIB)?;
        let both = memory.alloc_bytes(MIB, side)?;
        after_side()?;
        both.record_stream(&forked)?;
        forked.fill(both.ptr(), 3, MIB)?;
        drop(both);
        let next = memory.alloc_bytes(MIB, side)?;
        side.fill(next.ptr(), 4, MIB)?;
        join.record(&forked)?;
        side.wait_event(&join)?;
        Ok(())
    };
    let graph = memory.graph(stream, |stream| switch(stream, std::slice::from_ref(side), 2, work)).unwrap();
    for condition in 0..2 {
        sim(stream).set_condition(*graph.output(), condition).unwrap();
        graph.launch(stream).unwrap();
    }
}
