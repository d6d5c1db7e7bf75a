//! What CUDA graphs need, and what capturing and launching them costs.
//!
//! * `batches`: the graph of the largest of 50 batches alone, and graphs of all in one pool, captured
//!   in different orders, each on a stream of its own.
//! * `streams`: graphs of several streams, which fork and join at each operation, as in PyTorch's
//!   sweep of `graph_capture_record_stream_reuse`.
//! * `updates`: a graph that is launched 100 times, each time with parameters of its own.
//!
//! `pass_bytes` is the memory that the warm-up of the largest pass takes, with its output;
//! `output_bytes` that of all outputs, which live on; `pool_bytes` what the graphs' pool holds
//! without them; `held_bytes` what is held once all are captured; `driver_bytes` what the driver took
//! for the graphs (estimated); `lent_bytes` what all graphs, being idle, lend to a request for all
//! memory, and `return_us` the time of a launch that brings it back.

use std::time::{Duration, Instant};

use aquifer::memory::PoolOptions;
use aquifer::{Allocator, Buffer, Device, Error, Graph, Stream};
use aquifer_stress::commands::violations;
use aquifer_stress::exit::Failure;

use crate::row::{Row, ratio};
use crate::{Bench, Benchmark};

/// The graphs of a program, and what capturing them cost.
struct Captured {
    graphs: Vec<Graph<Buffer<u8>>>,
    took: Duration,
    calls: u64,
    wrong: u64,
}

/// The batch that is captured at a place, of so many.
type Order = fn(u64, u64) -> u64;

/// Orders in which batches are captured.
const ORDERS: [(&str, Order); 3] = [
    ("ascending", |place, _| place + 1),
    ("descending", |place, count| count - place),
    // 23 has no factor in common with the numbers of graphs.
    ("shuffled", |place, count| place * 23 % count + 1),
];
/// Launches in flight at a time, each with parameters of its own.
const UPDATES: u8 = 100;
/// Launches of each graph that are measured.
const LAUNCHES: usize = 5;
/// Bytes of the largest activation of a batch of one.
const ACTIVATION_BYTES: u64 = 12_000_000;
/// Bytes of a block of a program of several streams.
const BLOCK_BYTES: usize = 32 << 20;

pub(crate) fn all() -> Vec<Benchmark> {
    let batches = |bench: &Bench| {
        let count = if bench.args.quick { 10 } else { 50 };
        let largest = measure(bench, "largest alone", |memory, _| captured(memory, &[count]))?;
        let mut rows = vec![largest];
        for (name, order) in ORDERS {
            let batches: Vec<u64> = (0..count).map(|place| order(place, count)).collect();
            rows.push(measure(bench, name, |memory, _| captured(memory, &batches))?);
        }
        let alone = rows[0].1;
        Ok(rows.into_iter().map(|(row, pool)| row.with("pool_over_largest", ratio(pool, alone))).collect())
    };
    let streams = |bench: &Bench| {
        let mut rows = Vec::new();
        for &operations in if bench.args.quick { &[100][..] } else { &[1000, 10_000] } {
            for streams in [2, 4] {
                let name = format!("{streams} streams, {operations} operations");
                rows.push(measure(bench, &name, |memory, stream| forking(memory, stream, streams, operations))?.0);
            }
        }
        Ok(rows)
    };
    let updates = |bench: &Bench| Ok(vec![measure(bench, "updates between launches", updated)?.0]);
    vec![Benchmark::new("batches", batches), Benchmark::new("streams", streams), Benchmark::new("updates", updates)]
}

/// Captures a program on a new device, launches its graphs, and measures both. Also returns the
/// bytes of the graphs' pool.
#[expect(clippy::cast_precision_loss, reason = "figures to display")]
fn measure(
    bench: &Bench,
    program: &str,
    capture: impl FnOnce(&Allocator, &Stream) -> Result<Captured, Error>,
) -> Result<(Row, u64), Failure> {
    let device: Device = bench.session.open()?;
    let memory = bench.session.allocator(&device, &bench.config)?;
    let stream = device.stream()?;
    let Captured { graphs, took, calls, wrong } = capture(&memory, &stream)?;
    let pool_bytes = memory.reserved_by_private_pools().values().sum();
    let (held_bytes, allocated_bytes) = (memory.memory_reserved(), memory.max_memory_allocated());
    let driver_bytes = memory.attribution()?.graphs;
    device.synchronize()?;
    let (mut launched, mut launch_calls) = (Duration::ZERO, 0);
    for graph in (0..LAUNCHES).flat_map(|_| &graphs) {
        let (before, start) = (device.driver_calls(), Instant::now());
        graph.launch(&stream)?;
        launched += start.elapsed();
        launch_calls += device.driver_calls().since(&before).total();
        device.synchronize()?;
    }
    let (lent_bytes, returned) = lend(&memory, &stream, &graphs)?;
    // The pool has no outputs, and a pass does.
    let scratch = graphs.iter().map(|graph| graph.pass_bytes() - graph.output().bytes().min(graph.pass_bytes()));
    let pass = graphs.iter().map(Graph::pass_bytes).max().unwrap_or(0);
    let outputs: u64 = graphs.iter().map(|graph| graph.output().bytes()).sum();
    let (count, launches) = (graphs.len().max(1) as f64, (graphs.len() * LAUNCHES).max(1) as f64);
    let row = Row::new().with("program", program).with("graphs", graphs.len()).with("pass_bytes", pass);
    let row = row.with("output_bytes", outputs).with("pool_bytes", pool_bytes);
    let row = row.with("pool_over_pass", ratio(pool_bytes, scratch.max().unwrap_or(0)));
    let row = row.with("held_bytes", held_bytes).with("allocated_bytes", allocated_bytes);
    let row = row.with("held_over_allocated", ratio(held_bytes, allocated_bytes)).with("driver_bytes", driver_bytes);
    let row = row.us("capture_us", took.as_nanos() as f64 / count).with("capture_driver_calls", calls as f64 / count);
    let row = row.us("launch_us", launched.as_nanos() as f64 / launches);
    let row = row.with("launch_driver_calls", launch_calls as f64 / launches).with("wrong_results", wrong);
    let row = row.with("lent_bytes", lent_bytes).us("return_us", returned.as_nanos() as f64);
    Ok((row.with("violations", violations(&bench.session, program, &device)), pool_bytes))
}

/// Has the idle graphs lend all that they can, to a request for all that the device has free and
/// what they hold, and launches one, which brings that back. Returns how many bytes it was, and how
/// long that launch took on the host.
fn lend(memory: &Allocator, stream: &Stream, graphs: &[Graph<Buffer<u8>>]) -> Result<(u64, Duration), Error> {
    let pool_bytes: u64 = memory.reserved_by_private_pools().values().sum();
    let wanted = memory.device().memory_info()?.free.saturating_add(pool_bytes);
    match memory.alloc_bytes(wanted, stream) {
        Err(error) if !error.is_out_of_memory() => return Err(error.into()),
        // It is served but for what lies in granules with other memory.
        served => drop(served),
    }
    let start = Instant::now();
    graphs.first().map_or(Ok(()), |graph| graph.launch(stream))?;
    let took = start.elapsed();
    memory.device().synchronize()?;
    Ok((memory.stats().graph_bytes_lent, took))
}

/// A graph of each batch, in one pool, each captured on a stream of its own.
fn captured(memory: &Allocator, batches: &[u64]) -> Result<Captured, Error> {
    let pool = memory.create_pool(PoolOptions { lends_when_idle: true, ..PoolOptions::default() })?;
    let (before, start) = (memory.device().driver_calls(), Instant::now());
    let capture = |&batch: &u64| {
        let stream = memory.device().stream()?;
        memory.graph_in(&pool, &stream, |stream| decode(memory, batch, stream))
    };
    let graphs = batches.iter().map(capture).collect::<Result<_, _>>()?;
    let calls = memory.device().driver_calls().since(&before).total();
    Ok(Captured { graphs, took: start.elapsed(), calls, wrong: 0 })
}

/// The memory of a pass of a model: of each layer, activations of different sizes. The logits live
/// on.
fn decode(memory: &Allocator, batch: u64, stream: &Stream) -> Result<Buffer<u8>, Error> {
    let zeros = |quarters: u64| {
        let bytes = batch * ACTIVATION_BYTES * quarters / 4;
        memory.alloc_zeros::<u8>(usize::try_from(bytes).unwrap_or(usize::MAX), stream)
    };
    let mut hidden = zeros(1)?;
    for _ in 0..4 {
        let projected = zeros(3)?;
        let attended = zeros(1)?;
        drop(projected);
        let wide = zeros(4)?;
        hidden = zeros(1)?;
        drop((attended, wide));
    }
    let mut logits = memory.alloc::<u8>(hidden.len() / 8, stream)?;
    logits.copy_from(&hidden.slice(..logits.len()), stream)?;
    Ok(logits)
}

/// One graph of several streams: in each operation one of them uses a block of the first, which
/// waits for that before the next.
fn forking(memory: &Allocator, stream: &Stream, streams: usize, operations: usize) -> Result<Captured, Error> {
    let device = memory.device();
    let sides = (1..streams).map(|_| device.stream()).collect::<Result<Vec<_>, _>>()?;
    let (fork, join) = (device.create_event(false)?, device.create_event(false)?);
    let (before, start) = (device.driver_calls(), Instant::now());
    let graph = memory.graph(stream, |stream| {
        for side in (0..operations).map(|operation| &sides[operation % sides.len()]) {
            let mut block = memory.alloc_zeros::<u8>(BLOCK_BYTES, stream)?;
            fork.record(stream)?;
            side.wait_event(&fork)?;
            block.zero(side)?;
            join.record(side)?;
            stream.wait_event(&join)?;
        }
        memory.alloc_zeros::<u8>(1, stream)
    })?;
    let calls = device.driver_calls().since(&before).total();
    Ok(Captured { graphs: vec![graph], took: start.elapsed(), calls, wrong: 0 })
}

/// One graph, whose parameters change between launches that nothing waits for.
fn updated(memory: &Allocator, stream: &Stream) -> Result<Captured, Error> {
    let mut input = memory.alloc_zeros::<u8>(1 << 20, stream)?;
    let (before, start) = (memory.device().driver_calls(), Instant::now());
    let graph = memory.graph(stream, |stream| {
        let mut output = input.like(stream)?;
        output.copy_from(&input, stream)?;
        Ok(output)
    })?;
    let (took, calls) = (start.elapsed(), memory.device().driver_calls().since(&before).total());
    let mut results = Vec::new();
    for step in 0..UPDATES {
        graph.update(&mut input, vec![step; 1 << 20], stream)?;
        graph.launch(stream)?;
        results.push(graph.output().download(vec![0; 1 << 20], stream)?);
    }
    let mut wrong = 0;
    for (step, result) in (0..UPDATES).zip(results) {
        wrong += u64::from(result.wait()?.iter().any(|&byte| byte != step));
    }
    Ok(Captured { graphs: vec![graph], took, calls, wrong })
}
