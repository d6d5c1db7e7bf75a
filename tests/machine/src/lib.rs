//! Whole-system simulation: programs of several threads on a simulated device, under a
//! deterministic schedule, so that a failure is a seed.
//!
//! A seed fixes everything: the device, its size and how far it lags behind the host, the options
//! of its allocators, the steps of the threads, their schedule ([`aquifer_device::executor`]: a
//! thread may be interrupted at each driver call, where it finds a lock taken, and between steps),
//! the order of the device's work, and the faults. Sizes that a machine would choose, such as the
//! number of threads that copy, are part of the program.
//!
//! *Safety*, after each step: contents by pattern, races and misuse, statistics, snapshots, no
//! panic, no error without a cause. *Liveness*, while a program of one thread runs: what fits is
//! served, and wakes up. At the end of each program, once faults have stopped: all threads have
//! ended, everything goes back to the device, and a request that fits is served within a bounded
//! number of driver calls, also where a cache, an idle pool or the other allocator holds memory
//! without need.
#![forbid(unsafe_code)]

mod bare;
mod graphs;
mod liveness;
mod plan;
mod player;
pub mod random;
mod sleep;
pub mod soak;
mod world;

use std::sync::Arc;
use std::time::{Duration, Instant};

use aquifer::device::sim::SimDriver;
use aquifer_device::executor::{self, Body};
use aquifer_device::fork::Mutex;

pub use plan::{Asleep, Ending, Freeing, Plan, Step};
use player::Player;
use world::World;

/// Turns within which the threads of a program must have ended.
const TURNS_MAX: u64 = 2_000_000;

/// Programs tried, and time taken, while a failing one is made smaller.
const TRIALS: usize = 400;
const SHRINKING_MAX: Duration = Duration::from_secs(60);

/// Of these, programs whose threads did not end: each leaves its threads behind.
const STUCK_MAX: usize = 24;

/// What a program did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
    /// Bytes that idle graphs lent.
    pub lent_bytes: u64,
    /// Turns of threads.
    pub turns: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// Virtual time at the end, in ns.
    pub time_ns: u64,
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

/// Runs a program.
///
/// # Errors
/// How it fails.
pub fn run(plan: &Plan) -> Result<Counts, Failed> {
    let world = Arc::new(World::new(plan)?);
    let (driver, may_fail) = (world.driver.clone(), world.may_fail);
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
    let turns = executor::run(plan.seed, TURNS_MAX, bodies).map_err(|failure| Failed {
        what: failure.to_string(),
        is_stuck: !matches!(failure, executor::Failure::Panicked(_)),
    })?;
    let counts = std::mem::replace(&mut *result.lock(), Ok(Counts::default()))?;
    if !may_fail {
        check_objects(&driver)?;
    }
    Ok(Counts { turns, calls: driver.calls_made(), time_ns: driver.now_ns(), ..counts })
}

/// Checks that nothing of the driver's is left once the last allocator and device are gone. Default
/// streams stay.
fn check_objects(driver: &SimDriver) -> Result<(), String> {
    let (left, bytes) = (driver.live_objects(), driver.held_bytes());
    if (left.events, left.captures, left.graphs, left.host, bytes) == (0, 0, 0, 0, 0) {
        return Ok(());
    }
    Err(format!("in the end, {bytes} bytes of the device are left, and of other objects {left:?}"))
}

/// Makes a failing program smaller as long as it fails. Returns it, and how it fails.
pub fn shrink(plan: Plan, failure: Failed) -> (Plan, Failed) {
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
