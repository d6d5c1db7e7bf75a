//! The memory that graphs need, and where it is reused.

use aquifer::device::sim::{Fault, SimDriver};
use aquifer::memory::{Contents, KeptBy, Part, PoolOptions, PrivatePool, SleepOptions};
use aquifer::prelude::*;
use aquifer::{Error, Graph, GraphPlan};
use aquifer_device::{Code, Operation};
use proptest::prelude::*;

use super::graphs::{Bench, MIB, bench};

/// A pool of 32 MiB that captured programs keep: burn holds 3 times as much.
#[test]
fn a_capture_needs_as_much_memory_as_one_pass() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let mut x = memory.alloc::<u8>(1 << 20, stream).unwrap();
    x.zero(stream).unwrap();
    let before = memory.memory_reserved();
    let pass = |stream: &Stream| {
        let layers: Vec<_> = (1..9).map(|mib| memory.alloc_zeros::<u8>(mib << 20, stream)).collect::<Result<_, _>>()?;
        drop(layers);
        memory.alloc_zeros::<u8>(20 << 20, stream).map(drop)
    };
    pass(stream).unwrap();
    let one_pass = memory.memory_reserved() - before;
    assert!(one_pass <= 38 * MIB);
    memory.empty_cache().unwrap();
    let graph = memory.graph(stream, pass).unwrap();
    let held = memory.memory_reserved() - before;
    assert!(held * 10 <= one_pass * 11, "{held} for {one_pass}");
    assert!(graph.pass_bytes().abs_diff(one_pass) <= 2 * MIB, "{}", graph.pass_bytes());
    graph.launch(stream).unwrap();
}

/// One pass of a model for a batch: of each layer, temporaries of different sizes; the logits live
/// on.
fn bucket(memory: &Allocator, batch: usize, stream: &Stream) -> Result<Buffer<u8>, Error> {
    let mut hidden = memory.alloc_zeros::<u8>(batch * 3_000_000, stream)?;
    for _ in 0..4 {
        let projected = memory.alloc_zeros::<u8>(batch * 9_000_000, stream)?;
        let attended = memory.alloc_zeros::<u8>(batch * 3_000_000, stream)?;
        drop(projected);
        let wide = memory.alloc_zeros::<u8>(batch * 12_000_000, stream)?;
        hidden = memory.alloc_zeros::<u8>(batch * 3_000_000, stream)?;
        drop((attended, wide));
    }
    let mut logits = memory.alloc::<u8>(batch * 640_000, stream)?;
    logits.copy_from(&hidden.slice(..logits.len()), stream)?;
    Ok(logits)
}

fn reserved(memory: &Allocator) -> u64 {
    memory.reserved_by_private_pools().values().sum()
}

#[test]
fn graphs_that_share_a_pool_need_as_much_as_the_largest_one_in_any_order() {
    type Order = fn(usize) -> usize;
    let orders: [(&str, Order); 3] = [
        ("ascending", |place| place + 1),
        ("descending", |place| 50 - place),
        ("shuffled", |place| (place * 23 + 7) % 50 + 1),
    ];
    let alone = bench("sim:24GiB,violations=panic");
    let largest = alone.memory.graph(&alone.stream, |stream| bucket(&alone.memory, 50, stream)).unwrap();
    let needed = reserved(&alone.memory);
    assert!(needed * 10 <= (largest.pass_bytes() - largest.output().bytes()) * 11, "one pass");
    for (name, order) in orders {
        let bench = bench("sim:24GiB,violations=panic");
        let pool = bench.memory.create_pool(PoolOptions::default()).unwrap();
        let graphs: Vec<Graph<Buffer<u8>>> = (0..50)
            .map(|place| {
                let stream = bench.device.stream().unwrap();
                bench.memory.graph_in(&pool, &stream, |stream| bucket(&bench.memory, order(place), stream)).unwrap()
            })
            .collect();
        // Outputs are no part of the pool.
        let held = reserved(&bench.memory);
        assert!(held <= needed + needed / 100, "{name}: {held} for {needed}");
        for graph in &graphs {
            graph.launch(&bench.stream).unwrap();
        }
    }
}

/// As PyTorch's `graph_capture_record_stream_reuse`: each operation uses a block on another stream,
/// which the capture's own edges order before the next. Without reuse, PyTorch reserves 3424 MB for
/// 168.
#[test]
fn memory_that_other_streams_of_a_capture_used_is_reused_where_its_edges_order_that() {
    for (streams, operations) in [(2, 500), (4, 1000)] {
        let bench = bench("sim:24GiB,violations=panic");
        let Bench { memory, stream, device, .. } = &bench;
        let sides: Vec<Stream> = (1..streams).map(|_| device.stream().unwrap()).collect();
        let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
        let graph = memory
            .graph(stream, |stream| {
                for side in (0..operations).map(|operation| &sides[operation % sides.len()]) {
                    let mut own = memory.alloc_zeros::<u8>(2 << 20, stream)?;
                    fork.record(stream)?;
                    side.wait_event(&fork)?;
                    own.fill(1, side)?;
                    let mut theirs = memory.alloc_zeros::<u8>(2 << 20, side)?;
                    theirs.copy_from(&own, side)?;
                    join.record(side)?;
                    stream.wait_event(&join)?;
                }
                Ok(())
            })
            .unwrap();
        let held = reserved(memory);
        assert!(held <= 32 * MIB, "{streams} streams, {operations} operations: {held}");
        graph.launch(stream).unwrap();
        graph.launch(&sides[0]).unwrap();
    }
}

/// What no edge orders must not share memory.
#[test]
fn memory_that_runs_beside_other_work_of_a_capture_is_not_reused() {
    let bench = bench("sim:24GiB,violations=panic");
    let Bench { memory, stream, side, device, .. } = &bench;
    let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
    let graph = memory
        .graph(stream, |stream| {
            for round in 0..10 {
                let mut own = memory.alloc_zeros::<u8>(2 << 20, stream)?;
                fork.record(stream)?;
                side.wait_event(&fork)?;
                own.fill(1, side)?;
                drop(own);
                if round % 3 == 2 {
                    join.record(side)?;
                    stream.wait_event(&join)?;
                }
            }
            join.record(side)?;
            Ok(stream.wait_event(&join)?)
        })
        .unwrap();
    let held = reserved(memory);
    assert!((6 * MIB..=12 * MIB).contains(&held), "three rounds at a time: {held}");
    graph.launch(stream).unwrap();
}

/// An edge of a graph orders nothing that was enqueued before the capture.
#[test]
fn launches_come_after_earlier_work_on_memory_of_the_streams_that_joined() {
    let bench = bench("sim:24GiB,violations=panic");
    let Bench { memory, stream, side, device, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
    let late = memory.alloc_in::<u8>(&pool, 8 << 20, side).unwrap();
    bench.stall(side);
    late.share().zero(side).unwrap();
    drop(late);
    let graph = memory
        .graph_in(&pool, stream, |stream| {
            if stream.is_capturing() {
                fork.record(stream)?;
                side.wait_event(&fork)?;
                join.record(side)?;
                stream.wait_event(&join)?;
            }
            memory.alloc_zeros::<u8>(8 << 20, stream).map(drop)
        })
        .unwrap();
    graph.launch(&device.stream().unwrap()).unwrap();
}

#[test]
fn a_plan_tells_what_graphs_leave() {
    for config in ["", "limit_mb:20000", "backing:segments"] {
        let bench = bench("sim:24GiB,violations=panic");
        let memory = Allocator::new(&bench.device, config).unwrap();
        let stream = &bench.stream;
        let _cached = memory.alloc::<u8>(3 << 30, stream).unwrap();
        let batches = [1, 50, 20, 30];
        let plans = batches.map(|batch| memory.plan_graph(stream, |stream| bucket(&memory, batch, stream)).unwrap());
        let plan = plans.into_iter().reduce(GraphPlan::sharing).unwrap();
        let planned = memory.available_after(&plan).unwrap();
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let graphs =
            batches.map(|batch| memory.graph_in(&pool, stream, |stream| bucket(&memory, batch, stream)).unwrap());
        let left = memory.available_after(&GraphPlan::default()).unwrap();
        // Several graphs in segments need more than the largest, and segments that are partly in
        // use serve no large request.
        let (about, pieces) = if config == "backing:segments" { (planned / 100, 4 << 30) } else { (12 * MIB, 2 * MIB) };
        assert!(planned.abs_diff(left) <= about, "{config:?}: {planned} planned, {left} left");
        let rest = memory.alloc::<u8>(usize::try_from(left - pieces).unwrap(), stream);
        assert!(rest.is_ok(), "{config:?}: {rest:?}");
        drop(graphs);
    }
}

/// Outputs that have segments of 20 MiB in the warm-up have them elsewhere in the capture.
#[test]
fn a_plan_counts_no_segments_of_outputs() {
    for (temporaries, outputs) in
        [(vec![48], vec![2]), (vec![30, 3], vec![2, 5]), (vec![1], vec![3]), (vec![4], vec![30])]
    {
        let bench = Bench::new();
        let memory = Allocator::new(&bench.device, "backing:segments").unwrap();
        let work = |stream: &Stream| {
            let all: Vec<_> = temporaries.iter().map(|mib| memory.alloc_zeros::<u8>(mib << 20, stream)).collect();
            let outputs = outputs.iter().map(|mib| memory.alloc_zeros::<u8>(mib << 20, stream)).collect();
            drop(all);
            outputs
        };
        let mut work = |stream: &Stream| -> Result<Vec<Buffer<u8>>, Error> { work(stream) };
        let plan = memory.plan_graph(&bench.stream, &mut work).unwrap();
        let planned = memory.available_after(&plan).unwrap();
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let _graph = memory.graph_in(&pool, &bench.stream, &mut work).unwrap();
        let left = memory.available_after(&GraphPlan::default()).unwrap();
        assert!(planned.abs_diff(left) <= 2 * MIB, "{temporaries:?}, {outputs:?}: {planned} planned, {left} left");
    }
}

/// A pass whose memory of a fixed size does not fit between what other batches left: of each layer,
/// an activation, a workspace, and the next activation.
fn with_workspace(
    memory: &Allocator,
    (batch, layers, workspace): (usize, u32, usize),
    stream: &Stream,
) -> Result<Buffer<f32>, Error> {
    let mut hidden = None;
    for _ in 0..layers {
        let projected = memory.alloc_zeros::<u8>(batch << 13, stream)?;
        drop(memory.alloc_zeros::<u8>(workspace, stream)?);
        hidden = Some(memory.alloc_zeros::<u8>(batch << 13, stream)?);
        drop(projected);
    }
    drop(hidden);
    memory.alloc_zeros(1, stream)
}

/// Graphs of these batches from one pool, captured on two streams in turn, and how much that holds.
fn sharing(bench: &Bench, pool: &PrivatePool, batches: &[usize], more: (u32, usize)) -> (Vec<Graph<Buffer<f32>>>, u64) {
    let graph = |(&batch, stream): (&usize, &Stream)| {
        let work = |stream: &Stream| with_workspace(&bench.memory, (batch, more.0, more.1), stream);
        bench.memory.graph_in(pool, stream, work).unwrap_or_else(|error| panic!("{error}"))
    };
    let streams = [&bench.stream, &bench.side].into_iter().cycle();
    let graphs = batches.iter().zip(streams).map(graph).collect();
    (graphs, bench.memory.reserved_by_private_pools()[&pool.id()])
}

fn falling() -> Vec<usize> {
    (96..=4096).rev().step_by(400).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]
    #[test]
    fn the_order_of_captures_costs_a_hundredth_at_most(
        batches in prop_oneof![Just(falling()), Just(falling()).prop_shuffle(), prop::collection::vec(1..4096_usize, 1..12)],
        layers in 1..9_u32,
        workspace_mib in 1..40_usize,
        elsewhere_gib in prop_oneof![Just(0_usize), 1..20_usize],
    ) {
        let held = |batches: &[usize]| {
            let bench = bench("sim:24GiB,violations=panic");
            let Bench { memory, stream, .. } = &bench;
            let _elsewhere = memory.alloc::<u8>(elsewhere_gib << 30, stream).unwrap();
            let pool = memory.create_pool(PoolOptions::default()).unwrap();
            let (graphs, held) = sharing(&bench, &pool, batches, (layers, workspace_mib << 20));
            graphs.iter().for_each(|graph| graph.launch(stream).unwrap());
            drop((graphs, _elsewhere));
            memory.empty_cache().unwrap();
            assert_eq!(memory.memory_reserved(), 0);
            held
        };
        let largest = held(&[*batches.iter().max().unwrap()]);
        let all = held(&batches);
        // And a granule for each of the two streams.
        prop_assert!(all * 100 <= largest * 101 + 400 * MIB, "{} for {}", all >> 20, largest >> 20);
    }
}

#[test]
fn memory_that_graphs_have_at_several_addresses_stays_awake_and_is_named() {
    let bench = bench("sim:24GiB,violations=panic");
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let (graphs, held) = sharing(&bench, &pool, &falling(), (8, 32 << 20));
    for options in [SleepOptions::all(Contents::Discard), SleepOptions::part(Part::pool(&pool), Contents::Zero)] {
        let gone = memory.sleep(options.clone()).unwrap();
        let staying = memory.staying_awake(options);
        let bytes: u64 = staying.iter().map(|one| one.range.end - one.range.start).sum();
        assert!(staying.iter().all(|one| one.why == KeptBy::Graphs) && (1..held).contains(&bytes), "{staying:?}");
        assert!(gone >= held - bytes - 4 * MIB && graphs[0].launch(stream).unwrap_err().is_asleep());
        memory.wake().unwrap();
        assert_eq!(memory.reserved_by_private_pools()[&pool.id()], held);
        graphs.iter().for_each(|graph| graph.launch(stream).unwrap());
    }
    drop(graphs);
    let slept = memory.sleep(Contents::Discard).unwrap();
    assert!(slept >= held && memory.memory_reserved() == 0, "{slept}");
}

#[test]
fn idle_graphs_lend_what_has_one_address() {
    let bench = bench("sim:192MiB,violations=panic");
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(PoolOptions { lends_when_idle: true, ..PoolOptions::default() }).unwrap();
    let (graphs, held) = sharing(&bench, &pool, &falling(), (8, 32 << 20));
    for graph in &graphs {
        let rest = usize::try_from(192 * MIB - held + 6 * MIB).unwrap();
        drop(memory.alloc::<u8>(rest, stream).unwrap());
        assert!(memory.stats().graph_bytes_lent > 0);
        graph.launch(stream).unwrap();
    }
}

#[test]
fn captures_that_cannot_map_memory_again_leave_nothing_behind() {
    let mut failed = 0;
    for (operation, nth) in
        [Operation::Map, Operation::SetAccess].into_iter().flat_map(|one| [1, 2, 15].map(|nth| (one, nth)))
    {
        let bench = bench("sim:24GiB,violations=panic");
        let Bench { memory, stream, device, .. } = &bench;
        let sim = device.driver().as_any().and_then(|driver| driver.downcast_ref::<SimDriver>()).unwrap();
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let (graphs, held) = sharing(&bench, &pool, &[4096], (4, 32 << 20));
        let work = |stream: &Stream| with_workspace(memory, (3896, 4, 32 << 20), stream);
        let tried = memory.graph_in(&pool, stream, |stream| {
            if stream.is_capturing() {
                sim.inject(Fault::Nth { operation: Some(operation), nth, code: Code::NOT_PERMITTED });
            }
            work(stream)
        });
        failed += u32::from(tried.is_err());
        sim.clear_faults();
        let again = memory.graph_in(&pool, stream, work).unwrap();
        let now = memory.reserved_by_private_pools()[&pool.id()];
        assert!(now <= held + 4 * MIB, "{operation} {nth}: {now} for {held}");
        graphs.iter().chain(tried.as_ref().ok()).chain([&again]).for_each(|graph| graph.launch(stream).unwrap());
        drop((graphs, tried, again));
        memory.empty_cache().unwrap();
        assert_eq!(memory.memory_reserved(), 0, "{operation} {nth}");
    }
    assert!(failed >= 4, "{failed}");
}

#[test]
fn what_the_driver_takes_for_graphs_is_named_until_they_are_gone() {
    let bench = Bench::new();
    let Bench { memory, stream, device, .. } = &bench;
    let sim = device.driver().as_any().and_then(|driver| driver.downcast_ref::<SimDriver>()).unwrap();
    let graph = memory.graph(stream, |stream| {
        if stream.is_capturing() {
            sim.set_kept_bytes(16 * MIB, 0); // as by instantiating
        }
        memory.alloc_zeros::<u8>(20 << 20, stream).map(drop)
    });
    assert_eq!(memory.attribution().unwrap().graphs, 16 * MIB);
    sim.set_kept_bytes(0, 0);
    assert_eq!(memory.attribution().unwrap().graphs, 0, "no more than there is");
    sim.set_kept_bytes(16 * MIB, 0);
    let _held = memory.alloc::<u8>(900 << 20, stream).unwrap();
    sim.inject(Fault::Nth { operation: Some(Operation::TrimPool), nth: 1, code: Code::NOT_SUPPORTED });
    let refusal = memory.alloc::<u8>(200 << 20, stream).unwrap_err().to_string();
    assert!(refusal.contains("16.00 MiB is held by the driver for graphs"), "{refusal}");
    drop(graph);
    assert_eq!(memory.attribution().unwrap().graphs, 0);
}

/// As of graphs that allocate by `cuMemAllocAsync`, which other libraries capture.
#[test]
fn memory_of_allocations_within_graphs_is_named_and_taken_before_a_refusal() {
    let bench = Bench::new();
    let Bench { memory, stream, device, .. } = &bench;
    let sim = device.driver().as_any().and_then(|driver| driver.downcast_ref::<SimDriver>()).unwrap();
    let driver = device.driver();
    driver.begin_capture(stream.raw()).unwrap();
    driver.alloc_async(8 * MIB, stream.raw()).unwrap();
    let graph = driver.end_capture(stream.raw()).unwrap();
    assert_eq!(memory.attribution().unwrap().graphs, 8 * MIB);
    driver.destroy_graph(graph).unwrap();
    sim.set_kept_bytes(0, 980 * MIB);
    let attribution = memory.attribution().unwrap();
    assert_eq!(attribution.graphs, 980 * MIB);
    assert!(attribution.to_string().contains("980.00 MiB by the driver for graphs"), "{attribution}");
    let _served = memory.alloc::<u8>(900 << 20, stream).unwrap();
    assert_eq!(memory.attribution().unwrap().graphs, 0);
}

#[test]
fn memory_that_outlives_a_capture_without_a_buffer_in_the_warm_up_is_refused() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let uneven = |result: Result<(), Error>| assert!(matches!(result, Err(Error::UnevenWork { .. })), "{result:?}");
    // By the bytes, which the warm-up does not follow.
    let bytes = memory.graph_in(&pool, stream, |stream| {
        let mut output = memory.buffer_of::<u8>(memory.alloc_bytes(1024, stream)?, stream)?;
        output.fill(2, stream)?;
        Ok(output)
    });
    uneven(bytes.map(drop));
    // Kept outside, by the capture alone.
    let mut kept = None;
    let outside = memory.graph_in(&pool, stream, |stream| {
        if stream.is_capturing() {
            kept = Some(memory.alloc_bytes(1024, stream)?);
        }
        Ok(())
    });
    uneven(outside.map(drop));
    // Of another stream of the capture.
    let event = bench.device.create_event(false).unwrap();
    let of_fork = memory.graph_in(&pool, stream, |stream| {
        event.record(stream)?;
        bench.side.wait_event(&event)?;
        let bytes = memory.alloc_bytes(1024, &bench.side)?;
        event.record(&bench.side)?;
        stream.wait_event(&event)?;
        Ok(bytes)
    });
    uneven(of_fork.map(drop));
    drop(kept);
    // A graph that frees what it allocates is captured after both.
    let graph = memory.graph_in(&pool, stream, |stream| Ok(memory.alloc_bytes(1024, stream).map(drop)?)).unwrap();
    graph.launch(stream).unwrap();
}

#[test]
fn a_launch_is_refused_while_memory_sleeps_that_only_bare_addresses_name() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let work = |stream: &Stream| {
        let workspace = memory.alloc_bytes(1 << 20, stream)?;
        Ok(stream.fill(workspace.ptr(), 0, workspace.bytes())?)
    };
    let graph = memory.graph_in(&pool, stream, work).unwrap();
    memory.sleep(SleepOptions::part(Part::pool(&pool), Contents::Discard)).unwrap();
    let refused = graph.launch(stream).unwrap_err();
    assert!(refused.is_asleep(), "{refused}");
    memory.wake().unwrap();
    graph.launch(stream).unwrap();
}

#[test]
fn the_warm_up_of_a_fork_leaves_its_memory_to_the_capture() {
    let bench = bench("sim:64MiB,violations=panic");
    let Bench { device, memory, stream, side } = &bench;
    let event = device.create_event(false).unwrap();
    let work = |stream: &Stream| {
        let mut temporary = memory.alloc_zeros::<u8>(40 << 20, stream)?;
        event.record(stream)?;
        side.wait_event(&event)?;
        temporary.fill(1, side)?;
        event.record(side)?;
        Ok(stream.wait_event(&event)?)
    };
    memory.graph(stream, work).unwrap().launch(stream).unwrap();
}

#[test]
fn a_buffer_made_ready_in_a_capture_is_kept_and_ordered_by_the_graph() {
    let bench = Bench::new();
    let Bench { memory, stream, side, .. } = &bench;
    let mut target = memory.alloc::<u8>(1000, stream).unwrap();
    target.fill(1, stream).unwrap();
    let work = |stream: &Stream| {
        target.ready_on(stream)?;
        Ok(stream.fill(target.ptr(), 7, target.bytes())?)
    };
    let graph = memory.graph(stream, work).unwrap();
    bench.stall(stream);
    graph.launch(stream).unwrap();
    assert_eq!(target.to_vec(side).unwrap(), [7; 1000]);
    drop(target);
    let others: Vec<_> = (0..100).map(|_| memory.alloc_zeros::<u8>(1000, side).unwrap()).collect();
    graph.launch(stream).unwrap();
    assert!(others.iter().all(|other| other.to_vec(side).unwrap() == [0; 1000]));
}

#[test]
fn an_empty_parameter_is_updated() {
    let bench = Bench::new();
    let Bench { memory, stream, .. } = &bench;
    let mut empty = memory.alloc::<f32>(0, stream).unwrap();
    let graph = memory.graph(stream, |_| Ok(())).unwrap();
    graph.update(&mut empty, vec![], stream).unwrap();
}

/// A graph's edges order nothing that was enqueued before the capture. Its launches come after
/// that; where there is none, what gives the memory back must.
#[test]
fn memory_of_a_graph_that_is_never_launched_goes_back_after_earlier_work_on_it() {
    for waits_for_pool in [true, false] {
        let bench = Bench::new();
        let Bench { memory, stream, side, device } = &bench;
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let (fork, join) = (device.create_event(false).unwrap(), device.create_event(false).unwrap());
        let before = pool.alloc_bytes(100 * MIB, side).unwrap();
        bench.stall(side);
        side.fill(before.ptr(), 1, before.bytes()).unwrap();
        drop(before);
        let capture = stream.begin_capture().unwrap();
        let route = memory.capture(stream, &pool).unwrap();
        fork.record(stream).unwrap();
        side.wait_event(&fork).unwrap();
        join.record(side).unwrap();
        stream.wait_event(&join).unwrap();
        let inside = memory.alloc_bytes(100 * MIB, stream).unwrap();
        stream.fill(inside.ptr(), 2, inside.bytes()).unwrap();
        drop(inside);
        assert_eq!(reserved(memory), 100 * MIB, "the stream's memory serves the graph");
        let graph = capture.end().unwrap();
        drop((route, graph));
        if waits_for_pool {
            pool.empty_cache().unwrap();
        } else {
            drop(pool);
            memory.empty_cache().unwrap();
        }
        assert_eq!(memory.memory_reserved(), 0);
    }
}

/// As counters that a library's kernels initialise once, in a workspace that the capture frees.
#[test]
fn state_in_memory_that_a_capture_freed_is_kept_by_sleep_unless_its_pool_is_discarded() {
    type Sleep = fn(&PrivatePool) -> SleepOptions;
    let sleeps: [(&str, Sleep, bool); 4] = [
        ("all, saved", |_| SleepOptions::all(Contents::SaveToHost), true),
        ("the pool, saved", |pool| SleepOptions::part(Part::pool(pool), Contents::SaveToHost), true),
        (
            "all else discarded",
            |pool| SleepOptions::all(Contents::Discard).with(Part::pool(pool), Contents::SaveToHost),
            true,
        ),
        ("all zeroed", |_| SleepOptions::all(Contents::Zero), false),
    ];
    for (name, sleep, keeps) in sleeps {
        let bench = Bench::new();
        let Bench { memory, stream, .. } = &bench;
        let pool = memory.create_pool(PoolOptions::default()).unwrap();
        let mut state = Vec::new();
        let mut workspace = |stream: &Stream| {
            let workspace = memory.alloc_bytes(1 << 20, stream)?;
            state.push(workspace.ptr());
            Ok::<_, Error>(workspace)
        };
        let first =
            memory.graph_in(&pool, stream, |stream| Ok(stream.fill(workspace(stream)?.ptr(), 7, 512)?)).unwrap();
        let graph = memory
            .graph_in(&pool, stream, |stream| {
                let workspace = workspace(stream)?;
                let mut output = memory.alloc::<u8>(512, stream)?;
                with(stream, [write(&mut output)], |raw, [output]| raw.copy(output.ptr(), workspace.ptr(), 512))?;
                Ok(output)
            })
            .unwrap();
        assert_eq!(state[1], state[3], "both captures had the same memory");
        first.launch(stream).unwrap();
        let read = || {
            graph.launch(stream).unwrap();
            graph.output().to_vec(stream).unwrap()
        };
        assert_eq!(read(), [7; 512], "{name}: before");
        memory.sleep(sleep(&pool)).unwrap();
        memory.wake().unwrap();
        assert_eq!(read(), [if keeps { 7 } else { 0 }; 512], "{name}");
    }
}

#[test]
fn a_graph_of_two_streams_replays_after_memory_ran_out_and_the_cache_was_emptied() {
    let bench = bench("sim:64MiB,violations=panic");
    let Bench { device, memory, stream, side } = &bench;
    let pool = memory.create_pool(PoolOptions::default()).unwrap();
    let event = device.create_event(false).unwrap();
    let mut of_side = 0;
    let mut capture = |mib: usize| {
        memory.graph_in(&pool, stream, |stream| {
            let own = memory.alloc_zeros::<u8>(mib << 20, stream)?;
            event.record(stream)?;
            side.wait_event(&event)?;
            let mut theirs = memory.alloc::<u8>(mib << 20, side)?;
            of_side = theirs.ptr().0;
            theirs.copy_from(&own, side)?;
            let mut output = memory.alloc::<u8>(512, side)?;
            output.copy_from(&theirs.slice(..512), side)?;
            event.record(side)?;
            stream.wait_event(&event)?;
            Ok(output)
        })
    };
    let graph = capture(10).unwrap();
    assert!(memory.alloc::<u8>(48 << 20, stream).unwrap_err().is_out_of_memory());
    // The device is full of what another capture would need.
    let full = memory.alloc::<u8>(36 << 20, stream).unwrap();
    assert!(capture(20).unwrap_err().is_out_of_memory());
    drop(full);
    memory.empty_cache().unwrap();
    let small = capture(4).unwrap();
    let in_pool = |addr: u64| {
        let segments = memory.snapshot().segments;
        let holds = segments.iter().find(|one| (one.address..one.address + one.total_size).contains(&addr));
        holds.is_some_and(|segment| segment.segment_pool_id == pool.id())
    };
    assert!(in_pool(of_side), "what the second stream allocates in the capture is the pool's");
    for graph in [&graph, &small, &graph] {
        graph.launch(stream).unwrap();
        assert_eq!(graph.output().to_vec(stream).unwrap(), [0; 512]);
    }
}

#[test]
fn an_output_of_another_stream_of_the_capture_stays_that_streams() {
    let bench = Bench::new();
    let Bench { device, memory, stream, side } = &bench;
    let event = device.create_event(false).unwrap();
    let graph = memory
        .graph(stream, |stream| {
            event.record(stream)?;
            side.wait_event(&event)?;
            let output = memory.alloc_zeros::<u8>(3 << 20, side)?;
            event.record(side)?;
            stream.wait_event(&event)?;
            Ok(output)
        })
        .unwrap();
    let at = graph.output().ptr().0;
    let segments = memory.snapshot().segments;
    let of = segments.iter().find(|one| (one.address..one.address + one.total_size).contains(&at)).unwrap();
    assert_eq!(of.stream, side.id());
    graph.launch(stream).unwrap();
    assert_eq!(graph.output().slice(..3).to_vec(stream).unwrap(), [0; 3]);
}

#[test]
fn a_refusal_in_a_capture_names_its_pool() {
    let bench = bench("sim:64MiB,violations=panic");
    let Bench { memory, stream, .. } = &bench;
    let mut other = Vec::new();
    let refused = memory
        .graph(stream, |stream| {
            let first = memory.alloc_zeros::<u8>(20 << 20, stream)?;
            if stream.is_capturing() {
                // As another program that takes memory between the passes.
                other.push(memory.device().alloc(30 << 20)?);
            }
            let second = memory.alloc_zeros::<u8>(20 << 20, stream)?;
            drop((first, second));
            Ok(())
        })
        .unwrap_err();
    assert!(refused.is_out_of_memory(), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("for: a capture, whose pool holds 20.00 MiB"), "{text}");
    for ptr in other {
        bench.device.free(ptr).unwrap();
    }
}
