//! Graphs that order themselves, keep what they use, and leave nothing behind when they fail.

#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

use std::time::Duration;

use aquifer::device::sim::SimDriver;
use aquifer::memory::{Contents, Part, PoolOptions, SleepOptions};
use aquifer::prelude::*;
use aquifer::{Error, Graph};
use aquifer_device::{AccessKind, Operation, executor};

pub(super) const MIB: u64 = 1 << 20;

pub(super) struct Bench {
    pub(super) device: Device,
    pub(super) memory: Allocator,
    pub(super) stream: Stream,
    pub(super) side: Stream,
}

pub(super) fn bench(device: &str) -> Bench {
    let device = aquifer::open(device).unwrap();
    let memory = Allocator::new(&device, "quarantine_mb:0").unwrap();
    let (stream, side) = (device.stream().unwrap(), device.stream().unwrap());
    Bench { device, memory, stream, side }
}

impl Bench {
    pub(super) fn new() -> Bench {
        bench("sim:1GiB,violations=panic")
    }

    pub(super) fn filled(&self, value: f32) -> Buffer<f32> {
        let mut buffer = self.memory.alloc(1000, &self.stream).unwrap();
        buffer.fill(value, &self.stream).unwrap();
        buffer
    }

    /// Work that takes its time.
    pub(super) fn stall(&self, stream: &Stream) {
        self.simulator().stall(stream.raw(), Duration::from_secs(1)).unwrap();
    }

    pub(super) fn simulator(&self) -> &SimDriver {
        let driver = self.device.driver().as_any().and_then(|driver| driver.downcast_ref::<SimDriver>());
        driver.expect("it is simulated")
    }

    fn first(&self, buffer: &Buffer<f32>) -> f32 {
        buffer.slice(..1).item(&self.side).unwrap()
    }

    /// Adds `x` to `y`, through a temporary.
    pub(super) fn adds<'a>(
        &'a self,
        x: &'a Buffer<f32>,
        y: &'a mut Buffer<f32>,
    ) -> impl FnMut(&Stream) -> Result<(), Error> + 'a {
        move |stream| {
            let mut copy = x.like(stream)?;
            copy.copy_from(x, stream)?;
            y.axpy(1.0, &copy, stream)
        }
    }
}

#[test]
fn launches_are_ordered_with_other_uses_of_the_graphs_buffers() {
    let bench = Bench::new();
    let Bench { stream, side, .. } = &bench;
    let (mut x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let graph = bench.memory.graph(stream, bench.adds(&x, &mut y)).unwrap();
    assert_eq!((graph.access_to(&x), graph.access_to(&y)), (Some(AccessKind::Read), Some(AccessKind::Write)));
    assert_eq!(graph.access_to(&bench.filled(0.0)), None);
    bench.stall(side);
    x.fill(10.0, side).unwrap();
    graph.launch(stream).unwrap();
    x.fill(100.0, side).unwrap();
    bench.stall(stream);
    graph.launch(stream).unwrap();
    graph.launch(side).unwrap();
    assert_eq!(bench.first(&y), 1.0 + 10.0 + 100.0 + 100.0, "the warm-up, and three launches");
}

#[test]
fn a_capture_does_not_wait_for_work_of_other_streams() {
    let bench = Bench::new();
    let (mut x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let (mut calls, other) = (0, x.share());
    let graph = bench.memory.graph(&bench.stream, |stream| {
        calls += 1;
        if calls == 2 {
            x.fill(5.0, &bench.side)?; // between warm-up and capture
        }
        let _temporary = other.like(stream)?;
        y.axpy(1.0, &other, stream)
    });
    graph.unwrap().launch(&bench.stream).unwrap();
    assert_eq!(bench.first(&y), 6.0);
}

#[test]
fn a_graph_keeps_the_buffers_that_it_uses_and_gives_all_back_when_it_is_dropped() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let graph = memory.graph(stream, bench.adds(&x, &mut y)).unwrap();
    drop(x);
    let _others: Vec<_> = (0..100).map(|_| bench.filled(f32::NAN)).collect();
    memory.empty_cache().unwrap();
    graph.launch(stream).unwrap();
    assert_eq!(bench.first(&y), 2.0);
    drop((graph, y, _others));
    bench.device.synchronize().unwrap();
    memory.empty_cache().unwrap();
    assert_eq!(memory.memory_reserved(), 0);
}

#[test]
fn outputs_are_written_by_each_launch() {
    let bench = Bench::new();
    let mut x = bench.filled(1.0);
    let reads = x.share();
    let graph = bench.memory.graph(&bench.stream, |stream| reads.sum(stream)).unwrap();
    for value in [2.0, 3.0] {
        x.fill(value, &bench.side).unwrap();
        graph.launch(&bench.stream).unwrap();
        assert_eq!(graph.output().item(&bench.side).unwrap(), 1000.0 * value);
    }
}

#[test]
fn launches_in_flight_read_their_own_parameters() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let (mut token, mut y) = (bench.filled(0.0), bench.filled(0.0));
    let reads = token.share();
    let graph = memory.graph(stream, bench.adds(&reads, &mut y)).unwrap();
    bench.stall(stream);
    let mut expected = 0.0;
    let mut results = Vec::new();
    for (step, stream) in [stream, side, stream, stream, side].into_iter().enumerate() {
        let value = 10_f32.powi(i32::try_from(step).unwrap());
        expected += value;
        graph.update(&mut token, vec![value; 1000], stream).unwrap();
        graph.launch(stream).unwrap();
        results.push((y.download(vec![0.0; 1000], stream).unwrap(), expected));
    }
    for (result, expected) in results {
        assert_eq!(result.wait().unwrap(), vec![expected; 1000]);
    }
    let refused = graph.update(&mut bench.filled(0.0), vec![0.0; 1000], stream).unwrap_err();
    assert!(matches!(refused, Error::NotOfGraph), "{refused}");
}

#[test]
fn uploads_in_a_capture_are_copies_of_memory_that_the_graph_keeps() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let sizes = [1000, 1 << 18]; // the larger one is staged outside of captures
    for size in sizes {
        let mut pinned = memory.pinned_from_slice(&vec![1.0_f32; size]).unwrap();
        let mut out = memory.alloc_zeros::<f32>(3 * size, stream).unwrap();
        let mut read_back = memory.pinned::<f32>(3 * size).unwrap();
        let mut ordinary = vec![2.0_f32; size];
        let graph = memory
            .graph(stream, |stream| {
                out.slice_mut(..size).upload(&pinned, stream)?;
                out.slice_mut(size..2 * size).upload(&ordinary, stream)?;
                out.slice_mut(2 * size..).upload(vec![3.0; size], stream)?;
                out.download(&mut read_back, stream).map(drop)
            })
            .unwrap();
        ordinary.fill(f32::NAN);
        for value in [4.0, 5.0] {
            bench.stall(stream);
            pinned.write().unwrap().fill(value); // waits for the launch before
            out.zero(stream).unwrap();
            graph.launch(stream).unwrap();
            let expected = [vec![value; size], vec![2.0; size], vec![3.0; size]].concat();
            assert_eq!(read_back.read().unwrap(), expected, "waits for the launch");
        }
        drop(pinned);
        graph.launch(stream).unwrap();
        assert_eq!(out.slice(..1).item(stream).unwrap(), 5.0);
    }
}

/// Threads enqueue an upload of ordinary memory while the stream begins another capture.
#[test]
fn uploads_before_a_capture_are_not_lost() {
    for (seed, way) in (0..).zip(["slice", "new", "device", "stream", "vec"].repeat(6)) {
        let body = move || {
            let bench = Bench::new();
            let Bench { device, memory, stream, .. } = &bench;
            let len = 100_000;
            let mut input = memory.alloc_zeros::<f32>(len, stream).unwrap();
            let first = memory.graph(stream, |stream| input.sum(stream)).unwrap();
            let host = vec![2.0_f32; len];
            match way {
                "slice" => drop(first.update(&mut input, &host[..], stream).unwrap()),
                "new" => input = memory.from_slice(&host, stream).unwrap(),
                _ => drop(first.update(&mut input, host, stream).unwrap()),
            }
            match way {
                "device" => device.synchronize().unwrap(),
                "stream" => stream.synchronize().unwrap(),
                _ => {}
            }
            let mut other = memory.alloc_zeros::<f32>(1000, stream).unwrap();
            let second = memory.graph(stream, |stream| other.fill(1.0, stream)).unwrap();
            first.launch(stream).unwrap();
            assert!(input.to_vec(stream).unwrap().iter().all(|&value| value == 2.0), "{way}");
            if way != "new" {
                assert_eq!(first.output().item(stream).unwrap(), 200_000.0);
            }
            drop(second);
        };
        executor::run(seed, 1_000_000, vec![Box::new(body)]).unwrap_or_else(|failure| panic!("{seed}: {failure}"));
    }
}

#[test]
fn calls_that_wait_are_refused_in_a_capture_and_break_nothing() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let x = bench.filled(1.0);
    type Waits = fn(&Buffer<f32>, &Stream) -> Result<(), Error>;
    let waits: [(&str, Waits); 4] = [
        ("to_vec", |x, stream| x.to_vec(stream).map(drop)),
        ("item", |x, stream| x.slice(..1).item(stream).map(drop)),
        ("download_blocking", |x, stream| x.download_blocking(&mut [0.0; 1000], stream)),
        ("download", |x, stream| x.download(vec![0.0; 1000], stream).map(drop)),
    ];
    for (name, wait) in waits {
        let mut y = bench.filled(0.0);
        let graph = memory.graph(stream, |stream| {
            y.axpy(1.0, &x, stream)?;
            if stream.is_capturing() {
                let error = wait(&x, stream).expect_err(name);
                assert!(error.to_string().contains("after a launch on its stream"), "{name}: {error}");
            }
            y.axpy(1.0, &x, stream)
        });
        graph.unwrap().launch(stream).unwrap();
        assert_eq!(bench.first(&y), 4.0, "{name}");
    }
}

/// What a failed capture could leave behind.
fn held(bench: &Bench) -> (u64, u64, usize) {
    bench.device.synchronize().unwrap();
    bench.memory.empty_cache().unwrap();
    let live =
        bench.device.driver().as_any().and_then(|driver| driver.downcast_ref::<SimDriver>()).unwrap().live_objects();
    (bench.memory.memory_allocated(), bench.memory.memory_reserved(), live.graphs + live.captures)
}

#[test]
fn captures_that_fail_name_the_call_leave_nothing_behind_and_can_be_tried_again() {
    let bench = Bench::new();
    let Bench { memory, stream, device, .. } = &bench;
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    type Fails<'a> = &'a dyn Fn(&Stream) -> Result<(), Error>;
    let swallowed = |stream: &Stream| {
        assert!(stream.driver().synchronize_stream(stream.raw()).is_err());
        Ok(())
    };
    let fails: [(&str, Fails); 4] = [
        ("cuStreamSynchronize", &|stream| Ok(stream.synchronize()?)),
        ("the call that broke it: cuStreamSynchronize", &swallowed),
        ("out of memory", &|stream| memory.alloc::<u8>(2 << 30, stream).map(drop)),
        ("no tokens", &|_| Err(Error::other("no tokens"))),
    ];
    let before = held(&bench);
    for (text, fail) in fails {
        let failed = memory.graph(stream, |stream| {
            bench.adds(&x, &mut y)(stream)?;
            if stream.is_capturing() { fail(stream) } else { Ok(()) }
        });
        let error = failed.unwrap_err();
        assert!(error.to_string().contains(text), "{text}: {error}");
        assert!(!stream.is_capturing());
        assert_eq!(held(&bench), before, "{text}");
    }
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        memory.graph(stream, |stream| if stream.is_capturing() { panic!("of the work") } else { Ok(()) })
    }));
    assert!(panics.is_err() && !stream.is_capturing());
    assert_eq!(held(&bench), before);
    let mut z = bench.filled(0.0);
    memory.graph(stream, bench.adds(&x, &mut z)).unwrap().launch(stream).unwrap();
    assert_eq!(bench.first(&z), 2.0);
    drop(device.stream().unwrap());
}

#[test]
fn every_driver_call_of_a_capture_may_fail() {
    let faults = [
        Operation::BeginCapture,
        Operation::EndCapture,
        Operation::Launch,
        Operation::CreatePhysical,
        Operation::Map,
        Operation::LaunchGraph,
    ];
    for operation in faults {
        for nth in 1..6 {
            let bench = bench(&format!("sim:1GiB,fault={}#{nth}:999", operation.name()));
            let x = bench.memory.alloc::<f32>(1 << 20, &bench.stream).and_then(|mut x| {
                x.fill(1.0, &bench.stream)?;
                Ok(x)
            });
            let Ok(x) = x else { continue };
            let captured = bench.memory.graph(&bench.stream, |stream| x.like(stream)?.copy_from(&x, stream));
            let launched = captured.and_then(|graph: Graph| graph.launch(&bench.stream));
            assert!(!bench.stream.is_capturing());
            drop((x, launched));
            let (allocated, _, objects) = held(&bench);
            assert_eq!((allocated, objects), (0, 0), "{operation} {nth}");
        }
    }
}

#[test]
fn streams_fork_and_join_by_events() {
    let bench = Bench::new();
    let Bench { memory, stream, side, device, .. } = &bench;
    let (x, mut y, mut z) = (bench.filled(1.0), bench.filled(0.0), bench.filled(0.0));
    let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
    let graph = memory
        .graph(stream, |stream| {
            fork.record(stream)?;
            side.wait_event(&fork)?;
            y.axpy(1.0, &x, stream)?;
            z.axpy(2.0, &x, side)?;
            join.record(side)?;
            Ok(stream.wait_event(&join)?)
        })
        .unwrap();
    x.share().fill(3.0, side).unwrap();
    graph.launch(stream).unwrap();
    assert_eq!((bench.first(&y), bench.first(&z)), (4.0, 8.0));
    let late = device.stream().unwrap();
    let error = memory.graph(stream, |stream| {
        if stream.is_capturing() {
            let _enqueued = memory.alloc_zeros::<u8>(4, &late)?;
            return Ok(stream.wait_for(&late.tick())?);
        }
        Ok(())
    });
    assert!(error.unwrap_err().to_string().contains("Stream::wait_event"));
}

#[test]
fn graphs_replay_after_the_allocator_slept() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let graph = memory.graph(stream, bench.adds(&x, &mut y)).unwrap();
    memory.sleep(Contents::SaveToHost).unwrap();
    assert!(graph.launch(stream).unwrap_err().is_asleep());
    memory.wake().unwrap();
    graph.launch(stream).unwrap();
    assert_eq!(bench.first(&y), 2.0);
}

#[test]
fn graphs_of_one_pool_run_one_after_the_other() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let (x, mut y, mut z) = (bench.filled(1.0), bench.filled(0.0), bench.filled(0.0));
    let first = memory.graph_in(&pool, stream, bench.adds(&x, &mut y)).unwrap();
    let second = memory.graph_in(&pool, side, bench.adds(&x, &mut z)).unwrap();
    drop(pool);
    for (graph, stream) in [(&first, stream), (&second, side), (&second, stream), (&first, side)] {
        bench.stall(stream);
        graph.launch(stream).unwrap();
    }
    assert_eq!((bench.first(&y), bench.first(&z)), (3.0, 3.0));
    let other = Allocator::new(&bench.device, "").unwrap();
    let foreign = other.create_pool(PoolOptions::default()).unwrap();
    assert!(memory.graph_in(&foreign, stream, |_| Ok(())).is_err());
    assert!(!stream.is_capturing());
}

#[test]
fn an_output_is_read_while_another_graph_of_the_pool_runs() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let fills = |value: u8| {
        move |stream: &Stream| {
            let [mut large, mut small] = [memory.alloc::<u8>(20 << 20, stream)?, memory.alloc::<u8>(1 << 20, stream)?];
            large.fill(value, stream)?;
            small.copy_from(&large.slice(..1 << 20), stream)?;
            Ok(small)
        }
    };
    let first = memory.graph_in(&pool, stream, fills(1)).unwrap();
    let second = memory.graph_in(&pool, stream, fills(2)).unwrap();
    first.launch(stream).unwrap();
    second.launch(stream).unwrap();
    bench.stall(side);
    // Pinned: no other thread waits for the copy, so no time passes meanwhile.
    let mut values = memory.pinned::<u8>(1 << 20).unwrap();
    first.output().download(&mut values, side).unwrap();
    let late = side.tick();
    second.launch(stream).unwrap();
    assert!(!stream.is_ordered_after(&late), "it need not wait for the reader");
    assert_eq!(*values.read().unwrap(), [1; 1 << 20]);
    assert_eq!(second.output().to_vec(stream).unwrap(), [2; 1 << 20]);
}

#[test]
fn work_that_keeps_other_memory_when_it_is_captured_is_refused() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let before = held(&bench);
    let failed = memory.graph(stream, |stream| {
        let buffer = memory.alloc_zeros::<u8>(1000, stream)?;
        Ok(stream.is_capturing().then_some(buffer))
    });
    assert!(matches!(failed, Err(Error::UnevenWork { bytes: 1000 })), "{failed:?}");
    assert_eq!(held(&bench), before);
    // A cache that the warm-up fills is the program's.
    let mut cache = None;
    let graph = memory.graph(stream, |stream| {
        let cached = cache.get_or_insert(memory.alloc_zeros::<u8>(1000, stream)?);
        let mut out = cached.like(stream)?;
        out.copy_from(&*cached, stream)?;
        Ok(out)
    });
    let graph = graph.unwrap();
    cache.as_mut().unwrap().fill(7, stream).unwrap();
    graph.launch(stream).unwrap();
    assert_eq!(graph.output().to_vec(stream).unwrap(), [7; 1000]);
}

#[test]
fn a_capture_within_a_capture_is_refused() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let mut inner = None;
    let outer = memory.graph(stream, |stream| {
        if stream.is_capturing() {
            inner = memory.graph(stream, |_| Ok(())).err();
        }
        Ok(())
    });
    assert!(outer.is_ok() && inner.unwrap().to_string().contains("within another one"));
}

#[test]
fn a_pool_that_sleeps_holds_its_graphs_up() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let (x, mut y) = (bench.filled(1.0), bench.filled(0.0));
    let graph = memory.graph_in(&pool, stream, bench.adds(&x, &mut y)).unwrap();
    memory.sleep(SleepOptions::part(Part::pool(&pool), Contents::SaveToHost)).unwrap();
    assert!(graph.launch(stream).unwrap_err().is_asleep());
    memory.wake_parts(&[Part::pool(&pool)]).unwrap();
    graph.launch(stream).unwrap();
    assert_eq!(bench.first(&y), 2.0);
}
