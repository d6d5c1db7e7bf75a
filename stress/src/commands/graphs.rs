//! `graphs`: what CUDA graphs need, and what capturing and launching them costs.

use std::time::{Duration, Instant};

use aquifer::memory::PoolOptions;
use aquifer::{Allocator, Buffer, Device, Error, Graph, Stream};
use serde::Serialize;

use crate::cli::GraphsArgs;
use crate::commands::{hundredths, ratio, violations};
use crate::exit::{Failure, Outcome};
use crate::session::Session;
use crate::table::{Column, number, table};
use crate::text::Bytes;

/// A row of results. `graphs --help` explains the fields.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "the help text explains them")]
#[non_exhaustive]
pub struct Row {
    pub program: String,
    pub device: String,
    pub graphs: u64,
    pub pass_bytes: u64,
    pub output_bytes: u64,
    pub pool_bytes: u64,
    pub pool_over_pass: Option<f64>,
    pub pool_over_largest: Option<f64>,
    pub held_bytes: u64,
    pub allocated_bytes: u64,
    pub held_over_allocated: Option<f64>,
    pub driver_bytes: u64,
    pub capture_us: f64,
    pub capture_driver_calls: f64,
    pub launch_us: f64,
    pub launch_driver_calls: f64,
    pub wrong_results: u64,
    pub lent_bytes: u64,
    pub return_us: f64,
    pub violations: u64,
}

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

/// Runs the command.
///
/// # Errors
/// When the device cannot be opened, a capture or a launch fails, or standard output cannot be
/// written.
pub fn run(session: &Session, args: &GraphsArgs) -> Result<Outcome, Failure> {
    let (graphs, operations): (u64, &[usize]) = if args.quick { (10, &[100]) } else { (50, &[1000, 10_000]) };
    let mut rows = vec![measure(session, "one graph", |memory, stream| captured(memory, stream, &[graphs]))?];
    for (name, order) in ORDERS {
        let batches: Vec<u64> = (0..graphs).map(|place| order(place, graphs)).collect();
        let name = format!("{graphs} batches, {name}");
        rows.push(measure(session, &name, |memory, stream| captured(memory, stream, &batches))?);
    }
    for &operations in operations {
        for streams in [2, 4] {
            let name = format!("{streams} streams, {operations} operations");
            rows.push(measure(session, &name, |memory, stream| forking(memory, stream, streams, operations))?);
        }
    }
    // The first graph is that of the largest batch, alone.
    let largest = rows.first().map_or(0, |row| row.pool_bytes);
    rows.iter_mut().take(1 + ORDERS.len()).for_each(|row| row.pool_over_largest = ratio(row.pool_bytes, largest));
    rows.push(measure(session, "updates between launches", updated)?);
    let mut outcome = Outcome::Done;
    for row in &rows {
        session.row(row)?;
        if row.violations > 0 || row.wrong_results > 0 {
            outcome = Outcome::Violations;
        }
    }
    session.show(format_args!("{}", table(&rows, 1, &COLUMNS)))?;
    Ok(outcome)
}

const COLUMNS: [Column<Row>; 13] = [
    ("program", |row| row.program.clone()),
    ("pool", |row| Bytes(row.pool_bytes).to_string()),
    ("pool/pass", |row| number(row.pool_over_pass, 3)),
    ("held/allocated", |row| number(row.held_over_allocated, 3)),
    ("capture µs", |row| number(Some(row.capture_us), 0)),
    ("launch µs", |row| number(Some(row.launch_us), 1)),
    ("calls a launch", |row| number(Some(row.launch_driver_calls), 1)),
    ("pool/largest", |row| number(row.pool_over_largest, 3)),
    ("lent", |row| Bytes(row.lent_bytes).to_string()),
    ("return µs", |row| number(Some(row.return_us), 0)),
    ("largest pass", |row| Bytes(row.pass_bytes).to_string()),
    ("outputs", |row| Bytes(row.output_bytes).to_string()),
    ("graphs", |row| row.graphs.to_string()),
];

/// Captures a program on a new device, launches its graphs, and measures both.
fn measure(
    session: &Session,
    program: &str,
    capture: impl FnOnce(&Allocator, &Stream) -> Result<Captured, Error>,
) -> Result<Row, Failure> {
    let device: Device = session.open()?;
    let memory = session.allocator(&device, session.config()?)?;
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
    let each = |sum: f64, count: usize| hundredths(sum / count.max(1) as f64);
    let launches = graphs.len() * LAUNCHES;
    Ok(Row {
        program: program.to_owned(),
        device: session.device_text().to_owned(),
        graphs: graphs.len() as u64,
        pass_bytes: graphs.iter().map(Graph::pass_bytes).max().unwrap_or(0),
        output_bytes: graphs.iter().map(|graph| graph.output().bytes()).sum(),
        pool_bytes,
        pool_over_pass: ratio(pool_bytes, scratch.max().unwrap_or(0)),
        pool_over_largest: None,
        held_bytes,
        allocated_bytes,
        held_over_allocated: ratio(held_bytes, allocated_bytes),
        driver_bytes,
        capture_us: each(took.as_secs_f64() * 1e6, graphs.len()),
        capture_driver_calls: each(calls as f64, graphs.len()),
        launch_us: each(launched.as_secs_f64() * 1e6, launches),
        launch_driver_calls: each(launch_calls as f64, launches),
        wrong_results: wrong,
        lent_bytes,
        return_us: hundredths(returned.as_secs_f64() * 1e6),
        violations: violations(session, program, &device),
    })
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
fn captured(memory: &Allocator, _stream: &Stream, batches: &[u64]) -> Result<Captured, Error> {
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
