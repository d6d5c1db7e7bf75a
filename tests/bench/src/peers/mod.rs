//! Benchmarks that other projects published, with several allocators side by side. They have the
//! names and parameters of their sources; with `--quick`, those with 1000 allocations.
//!
//! * `random_allocations/N/MAX`, RMM: N allocations of 1 B to MAX MiB among random frees, with at
//!   most 16000 MiB live; the same random numbers.
//! * `ascending`, `comb`, `loophole_1mib`, PyTorch's devlog of 2026-06-01: 8 x 16 MiB, then 4 x 32
//!   MiB; 32 MiB where every other block of 16 MiB is free; half a MiB after 2 MiB.
//! * `stays_behind`, PyTorch 193400: 91 and 45.5 MiB, of which 2 MiB stay behind, 100 times.
//! * `comb_1gib`, TorchRec 4584: 9 GiB where every other block of 1 GiB is free.
//! * `stride_1.75mib`, `stride_64kib`, kvcached: KV blocks of Qwen3-0.6B with their layers beside
//!   each other, or each by itself.
//! * `grow_by_little`, llama.cpp 22107: two buffers that grow by 4 KiB 20 000 times.
//! * `larson`, `xmalloc-test`, `mstress`, mimalloc-bench: threads as streams; sizes are 1024 times as
//!   large, of `mstress` 128 times.
//! * `multi_stream_allocations/STREAMS/KERNELS/PREWARMED`, RMM: kernels on streams in turn, each with
//!   a block of 8 B.
//! * `async_priming/primed`, `async_priming/unprimed`, RMM: two rounds of ten blocks of 9 % of the
//!   device; primed: after half of the device was allocated and freed.
//! * `captures/STREAMS/OPERATIONS/ALLOCATIONS`, PyTorch 158352: four graphs captured in one pool.
//!   Each operation uses a random block of 4 MiB on a random stream; before it one is allocated in so
//!   many of 100 cases, one freed and a stream joined in 10. PyTorch by default frees what several
//!   streams used when the capture ends.
//!
//! `peak_reserved_bytes` is the most memory that the device lacked after any request of two passes,
//! and of captures what the pool holds in the end. A simulated device has at least 512 GiB but for
//! the last three benchmarks. Each allocator gets a device of its own. What it holds, its driver calls and their time are
//! observed in two passes of the pattern; its speed is timed in other passes, on another device.

mod captures;
mod streams;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use aquifer::Device;
use aquifer::device::sim::SimDriver;
use aquifer_stress::exit::{Failure, Outcome};
use aquifer_stress::opened::Opened;
use aquifer_stress::output;
use aquifer_stress::session::Session;
use aquifer_trace::input::Program;
use aquifer_trace::{Aquifer, DriverPool, OnOom, Player, PyTorch, Refusal, Refused, Subject, Times};

use crate::bare::Bare;
use crate::pairs::SIMULATED_BYTES;
use crate::patterns::{self, Pattern};
use crate::row::{Row, ratio};
use crate::{Bench, Benchmark};
use captures::Captures;
use streams::{Iterations, Priming};

/// Timed passes of each pattern.
const PASSES: u32 = 4;

/// An allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Aquifer,
    PyTorch,
    Expandable,
    DriverPool,
    Bare,
}

const PEERS: &[(Peer, &str)] = &[
    (Peer::Aquifer, "Aquifer"),
    (Peer::PyTorch, "PyTorch (model)"),
    (Peer::Expandable, "PyTorch, expandable segments (model)"),
    (Peer::DriverPool, "driver's pool (cuMemAllocAsync)"),
    (Peer::Bare, "cuMemAlloc"),
];

/// What an allocator is to do.
enum Task {
    Pattern(Pattern),
    Streams(Iterations),
    Priming(Priming),
    Captures(Captures),
}

impl Task {
    fn name(&self) -> &str {
        match self {
            Task::Pattern(pattern) => &pattern.name,
            Task::Streams(iterations) => &iterations.name,
            Task::Priming(priming) => priming.name,
            Task::Captures(captures) => &captures.name,
        }
    }

    fn source(&self) -> &'static str {
        match self {
            Task::Pattern(pattern) => pattern.source,
            Task::Captures(_) => "PyTorch 158352",
            Task::Streams(_) | Task::Priming(_) => "RMM",
        }
    }
}

/// Each task with each allocator; `quick` leaves out those with many allocations.
pub(crate) fn all(quick: bool) -> Vec<Benchmark> {
    let patterns = patterns::all().into_iter().map(Task::Pattern);
    let streams = Iterations::all().into_iter().map(Task::Streams);
    let captures = Captures::all().into_iter().map(Task::Captures);
    let tasks = patterns.chain(streams).chain(Priming::ALL.map(Task::Priming)).chain(captures);
    let tasks = tasks.filter(|task| !quick || !task.name().contains("000/") || task.name().contains("/1000/"));
    let with_peers = |task: Task| {
        let task = Arc::new(task);
        // The driver's own allocations within a capture are nodes of the graph, not memory of a pool.
        let peers = if matches!(*task, Task::Captures(_)) { &PEERS[..3] } else { PEERS };
        peers.iter().map(move |&(peer, allocator)| {
            let task = Arc::clone(&task);
            let name = task.name().to_owned();
            Benchmark::new(name, move |bench| Ok(vec![measure(bench, &task, peer)?])).with(allocator)
        })
    };
    tasks.flat_map(with_peers).collect()
}

/// Writes the programs among them as traces.
pub(crate) fn write_traces(session: &Session, chosen: &[Benchmark], folder: &Path) -> Result<Outcome, Failure> {
    std::fs::create_dir_all(folder).map_err(|cause| Failure::File { path: folder.to_owned(), cause })?;
    for pattern in patterns::all() {
        if chosen.iter().any(|one| one.name == pattern.name) {
            let path = folder.join(pattern.name.replace('/', "-") + ".trace");
            output::write(&path, &pattern.program().to_trace())?;
            session.show(path.display())?;
        }
    }
    Ok(Outcome::Done)
}

fn measure(bench: &Bench, task: &Task, peer: Peer) -> Result<Row, Failure> {
    let (session, job) = (&bench.session, Job { session: &bench.session, task, peer });
    let row = match (peer, task) {
        (Peer::Aquifer, Task::Captures(captures)) => captures.capture(bench, &Lab::open(session, None)?)?,
        (Peer::Aquifer, _) => {
            job.measure(|lab, streams| Aquifer::open(session, &lab.device, &bench.config, streams))?
        }
        (Peer::PyTorch | Peer::Expandable, _) => {
            let backing = if peer == Peer::PyTorch { "backing:pytorch" } else { "backing:expandable" };
            let config = backing.parse().map_err(|error| Failure::Usage(format!("{error}")))?;
            job.measure(|lab, streams| PyTorch::open(session, &lab.device, &config, streams))?
        }
        (Peer::DriverPool, _) => job.measure(|lab, streams| Ok(DriverPool::new(lab.device.clone(), streams)?))?,
        (Peer::Bare, _) => job.measure(|lab, _| Ok(Bare::new(lab.device.clone())))?,
    };
    Ok(row.with("source", task.source()))
}

/// A task for an allocator.
struct Job<'a> {
    session: &'a Session,
    task: &'a Task,
    peer: Peer,
}

impl Job<'_> {
    /// Runs it with what `make` makes for a device and a number of streams.
    fn measure<S: Subject>(&self, make: impl Fn(&Lab, usize) -> Result<S, Failure>) -> Result<Row, Failure> {
        match self.task {
            Task::Pattern(pattern) => {
                let program = pattern.program();
                Ok(self.play(&program, |lab| make(lab, program.streams.len()))?.0)
            }
            Task::Captures(captures) => {
                let program = captures.of_pytorch();
                Ok(captures.figures(self.play(&program, |lab| make(lab, program.streams.len()))?.1))
            }
            Task::Streams(iterations) => {
                let lab = Lab::open(self.session, None)?;
                iterations.time(&lab, make(&lab, iterations.streams)?)
            }
            Task::Priming(priming) => {
                let lab = Lab::open(self.session, None)?;
                priming.time(&lab, make(&lab, 1)?)
            }
        }
    }

    /// The figures, and the most memory that was held.
    fn play<S: Subject>(
        &self,
        program: &Program,
        make: impl Fn(&Lab) -> Result<S, Failure>,
    ) -> Result<(Row, u64), Failure> {
        let lab = Lab::open(self.session, Some(SIMULATED_BYTES))?;
        let mut subject = Held { subject: make(&lab)?, lab: &lab, before: lab.free_bytes()?, most: 0, failed: None };
        let mut player = Player::new(program);
        let mut ooms = 0;
        let mut pass = || {
            let (calls, time) = (lab.device.driver_calls(), lab.driver_ns());
            ooms += player.pass(&mut subject, OnOom::Skip)?.ooms;
            #[expect(clippy::cast_precision_loss, reason = "a time to display")]
            let spent = lab.simulated.is_some().then(|| (lab.driver_ns() - time) as f64 / 1e3);
            // A real device is asked what it has left after each request.
            let asked = if lab.simulated.is_some() { 0 } else { program.allocs() };
            Ok::<_, Failure>((lab.device.driver_calls().since(&calls).total().saturating_sub(asked), spent))
        };
        let (first, warm) = (pass()?, pass()?);
        let (held, failed) = (subject.most, subject.failed.take());
        failed.map_or(Ok(()), Err)?;
        subject.subject.check()?;
        drop((player, subject));
        let timed = Lab::open(self.session, Some(SIMULATED_BYTES))?;
        let (mut subject, mut player, mut times) = (make(&timed)?, Player::new(program), Times::default());
        for _ in 0..PASSES {
            times.add(player.pass(&mut subject, OnOom::Skip)?.elapsed, program.operations());
        }
        // With these two, the host's time on a simulated device is that of the simulator.
        let is_timed = lab.simulated.is_none() || !matches!(self.peer, Peer::DriverPool | Peer::Bare);
        let requested = program.peak_requested_bytes;
        let row = Row::new().with("peak_requested_bytes", requested).with("peak_reserved_bytes", held);
        let row = row.with("reserved_over_requested", ratio(held, requested).filter(|_| ooms == 0));
        let row = row.with("driver_calls", first.0).with("driver_time_modelled_us", first.1);
        let row = row.with("warm_driver_calls", warm.0).with("warm_driver_time_modelled_us", warm.1);
        let row = row.with("ns_per_op", times.later().filter(|_| is_timed)).with("ooms", ooms);
        Ok((row, held))
    }
}

/// A device and its clock.
pub(super) struct Lab {
    pub(super) device: Device,
    pub(super) simulated: Option<Arc<SimDriver>>,
    begun: Instant,
}

impl Lab {
    /// The session's device; a simulated one with at least `least` bytes, if given.
    fn open(session: &Session, least: Option<u64>) -> Result<Lab, Failure> {
        let sized = session.sim().zip(least).map(|(sim, least)| session.resized(sim.capacity_bytes.max(least)));
        let (device, simulated) = match &sized {
            Some(sized) => sized.open_with_simulator()?,
            None => session.open_with_simulator()?,
        };
        Ok(Lab { device, simulated, begun: Instant::now() })
    }

    fn free_bytes(&self) -> Result<u64, Failure> {
        Ok(self.device.memory_info()?.free)
    }

    fn driver_ns(&self) -> u64 {
        self.simulated.as_ref().map_or(0, |driver| driver.time_in_calls_ns())
    }

    /// The time of the device's clock: a virtual one, or the host's.
    pub(super) fn now_ns(&self) -> u64 {
        match &self.simulated {
            Some(driver) => driver.now_ns(),
            None => u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }

    /// The name of the clock.
    pub(super) fn clock(&self) -> &'static str {
        if self.simulated.is_some() { "virtual" } else { "host" }
    }
}

/// A subject, and the most memory that the device lacked after any of its requests.
struct Held<'a, S> {
    subject: S,
    lab: &'a Lab,
    /// Free before the subject was made.
    before: u64,
    most: u64,
    failed: Option<Failure>,
}

impl<S: Subject> Subject for Held<'_, S> {
    type Handle = S::Handle;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<S::Handle, Refused> {
        let handle = self.subject.alloc(bytes, stream)?;
        let held = match &self.lab.simulated {
            Some(driver) => Ok(driver.held_bytes()),
            None => self.lab.free_bytes().map(|free| self.before.saturating_sub(free)),
        };
        match held {
            Ok(held) => self.most = self.most.max(held),
            Err(failure) => drop(self.failed.get_or_insert(failure)),
        }
        Ok(handle)
    }

    fn free(&mut self, handle: S::Handle) {
        self.subject.free(handle);
    }

    fn record_stream(&mut self, handle: &mut S::Handle, stream: u16) -> Result<(), Refused> {
        self.subject.record_stream(handle, stream)
    }

    fn refused(&mut self, refusal: Refusal) {
        self.subject.refused(refusal);
    }
}
