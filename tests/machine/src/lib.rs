//! Random programs for Aquifer: one generator, one interpreter, one set of checks. `tests/` runs them
//! on all drivers, and the program `aquifer-machine` (`simulate`, `soak`) from the command line.
//!
//! * A [`Plan`] is a value that a seed fixes: a device, its size and how far it lags behind the host,
//!   the options of two allocators, the steps of one to four threads, and the faults.
//! * A *player* makes the steps of a thread. Numbers in steps pick from what the thread has then, so
//!   any steps may be left out.
//! * The *world* has what the threads share, with the shadow of all contents. It judges each error:
//!   one that no fault, no other thread and no lack of memory explains is a failure.
//! * *Safety*, after each step: contents by pattern, races and misuse (on a simulated device by two
//!   checkers), limits, statistics, snapshots. *Liveness*, while one thread runs: what fits is served,
//!   and wakes up. At the end, once faults have stopped: all threads have ended, everything goes back
//!   to the device, and a request that fits is served within a bounded number of driver calls, also
//!   where a cache, an idle pool or the other allocator holds memory without need.
//! * Under a schedule ([`run`]), a seed also fixes where threads interrupt each other
//!   ([`aquifer_device::executor`]: at driver calls, where they find a lock taken, and between steps)
//!   and the order of the device's work, so that a failure is a seed. Without ([`run_free`]), threads
//!   of the system run, on any [`Subject`].
//! * [`shrink`] leaves out steps of a failing plan as long as it fails.
#![forbid(unsafe_code)]
#![allow(clippy::missing_panics_doc, reason = "helpers of tests panic where a test fails")]

mod bare;
pub mod check;
mod graphs;
mod held;
mod liveness;
mod plan;
mod player;
pub mod random;
mod sleep;
mod sleeping;
pub mod subject;
mod world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer::memory::MemoryStats;
use aquifer_device::CallCounts;
use aquifer_device::executor::{self, Body};
use aquifer_device::fork::Mutex;

pub use plan::{Asleep, Ending, Freeing, Plan, Step};
use player::Player;
pub use subject::Subject;
use world::{IsOver, World};

/// Turns within which the threads of a program must have ended.
const TURNS_MAX: u64 = 2_000_000;

/// Programs tried, and time taken, while a failing one is made smaller.
const TRIALS: usize = 400;
const SHRINKING_MAX: Duration = Duration::from_secs(60);

/// Of these, programs whose threads did not end: each leaves its threads behind.
const STUCK_MAX: usize = 24;

/// What a program did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Steps of all threads.
    pub steps: u64,
    /// Checks that nothing is wrong: comparisons of contents, looks for races and misuse, and
    /// readings of statistics and snapshots.
    pub safety: u64,
    /// Checks that what should happen does: refusals that were found right, and requests that had
    /// to be served.
    pub liveness: u64,
    /// Requests that waited although the device had more than enough free memory.
    pub needless_waits: u64,
    /// Bytes that were compared.
    pub compared: u64,
    /// Turns of threads.
    pub turns: u64,
    /// Calls of the driver, but for those of the checks at the end.
    pub calls: u64,
    /// Time of the device at the end, in ns.
    pub time_ns: u64,
    /// Statistics of the allocator before these.
    pub stats: MemoryStats,
    /// Calls of each operation, before these.
    pub operations: Option<CallCounts>,
}

/// How a program fails.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failed {
    /// What is wrong.
    pub what: String,
    /// True if threads did not end. They stay where they are.
    pub is_stuck: bool,
}

impl From<String> for Failed {
    fn from(what: String) -> Failed {
        Failed { what, is_stuck: false }
    }
}

/// Runs a program under the schedule that its seed fixes.
///
/// # Errors
/// How it fails.
pub fn run(plan: &Plan) -> Result<Counts, Failed> {
    let never: IsOver = Arc::new(|| false);
    run_with(plan, true, &never, |bodies| {
        executor::run(plan.seed, TURNS_MAX, bodies).map_err(|failure| Failed {
            what: failure.to_string(),
            is_stuck: !matches!(failure, executor::Failure::Panicked(_)),
        })
    })
}

/// Runs a program on threads of the system, until `is_over`.
///
/// # Errors
/// How it fails.
pub fn run_free(plan: &Plan, is_over: impl Fn() -> bool + Send + Sync + 'static) -> Result<Counts, Failed> {
    let is_over: IsOver = Arc::new(is_over);
    run_with(plan, false, &is_over, |bodies| {
        let threads: Vec<_> = bodies.into_iter().map(std::thread::spawn).collect();
        let ended: Vec<_> = threads.into_iter().map(std::thread::JoinHandle::join).collect();
        let panicked = ended.into_iter().find_map(Result::err);
        let text = panicked.map(|panic| panic.downcast_ref::<String>().map_or("a panic".to_owned(), String::clone));
        text.map_or(Ok(0), |text| Err(text.into()))
    })
}

fn run_with(
    plan: &Plan,
    is_scheduled: bool,
    is_over: &IsOver,
    run_threads: impl FnOnce(Vec<Body>) -> Result<u64, Failed>,
) -> Result<Counts, Failed> {
    let world = Arc::new(World::new(plan, is_scheduled, is_over)?);
    let (subject, may_fail) = (world.subject.clone(), world.may_fail);
    let result = Arc::new(Mutex::new(Ok(Counts::default())));
    let bodies = plan.threads.iter().cloned().enumerate().filter(|(_, steps)| !steps.is_empty());
    let bodies = bodies.map(|(number, steps)| {
        let (world, result) = (world.clone(), result.clone());
        Box::new(move || {
            Player::new(&world, number).play(&steps);
            // Transfers have threads in the executor, too, which end with the last allocator.
            if let Some(world) = Arc::into_inner(world) {
                *result.lock() = world.finish();
            }
        }) as Body
    });
    let bodies = bodies.collect();
    drop(world);
    let turns = run_threads(bodies)?;
    let counts = std::mem::replace(&mut *result.lock(), Ok(Counts::default()))?;
    if is_scheduled && !may_fail {
        check_objects(&subject)?;
    }
    Ok(Counts { turns, ..counts })
}

/// Checks that nothing of the driver's is left once the last allocator and device are gone. Default
/// streams stay.
fn check_objects(subject: &Subject) -> Result<(), String> {
    let Some(simulator) = &subject.simulator else { return Ok(()) };
    let (left, bytes) = (simulator.live_objects(), simulator.held_bytes());
    if (left.events, left.captures, left.graphs, left.host, bytes) == (0, 0, 0, 0, 0) {
        return Ok(());
    }
    Err(format!("in the end, {bytes} bytes of the device are left, and of other objects {left:?}"))
}

/// Makes a failing program smaller as long as it fails. Returns it, and how it fails.
pub fn shrink(plan: Plan, failure: Failed, run: impl Fn(&Plan) -> Result<Counts, Failed>) -> (Plan, Failed) {
    let (mut plan, mut failure) = (plan, failure);
    let (mut trials, mut stuck) = (0, usize::from(failure.is_stuck));
    let since = Instant::now();
    let goes_on = |trials, stuck| trials < TRIALS && stuck < STUCK_MAX && since.elapsed() < SHRINKING_MAX;
    let mut length = plan.threads.iter().map(Vec::len).max().unwrap_or(0);
    while length > 0 && goes_on(trials, stuck) {
        let mut removed = false;
        for thread in 0..plan.threads.len() {
            let mut start = 0;
            while start < plan.threads[thread].len() && goes_on(trials, stuck) {
                trials += 1;
                let smaller = plan.without(thread, start..start + length);
                match run(&smaller) {
                    Err(found) => {
                        stuck += usize::from(found.is_stuck);
                        (plan, failure, removed) = (smaller, found, true);
                    }
                    Ok(_) => start += length,
                }
            }
        }
        if !removed {
            length /= 2;
        }
    }
    (plan, failure)
}
