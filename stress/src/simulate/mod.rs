//! Whole-system simulation: programs of several threads on a simulated device, under a
//! deterministic schedule, so that a failure is a seed.
//!
//! A seed fixes everything: the device and the options of its allocators, the steps of the threads,
//! their schedule ([`aquifer_device::executor`]: a thread may be interrupted at each driver call,
//! where it finds a lock taken, and between steps), the order of the device's work, and the faults.
//!
//! *Safety*, after each step: contents by pattern, races and misuse, statistics, snapshots, no
//! panic, no error without a cause. *Liveness*: all threads end; once faults have stopped,
//! everything goes back to the device, and a request that fits is served.

mod plan;
mod player;
mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use aquifer_device::executor::{self, Body};

pub use plan::{Ending, Plan, Step};
use player::Player;
use world::World;

/// Turns within which the threads of a program must have ended.
const TURNS_MAX: u64 = 2_000_000;

/// Programs tried, and time taken, while a failing one is made smaller.
const TRIALS: usize = 400;
const SHRINKING_MAX: Duration = Duration::from_secs(60);

/// What a program did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Steps of all threads.
    pub steps: u64,
    /// Turns of threads.
    pub turns: u64,
    /// Calls of the driver.
    pub calls: u64,
    /// Virtual time at the end, in ns.
    pub time_ns: u64,
}

/// Runs a program.
///
/// # Errors
/// What is wrong.
pub fn run(plan: &Plan) -> Result<Counts, String> {
    let world = Arc::new(World::new(plan)?);
    let bodies = plan.threads.iter().cloned().enumerate().filter(|(_, steps)| !steps.is_empty());
    let bodies = bodies.map(|(number, steps)| {
        let world = world.clone();
        Box::new(move || Player::new(&world, number).play(&steps)) as Body
    });
    let turns = executor::run(plan.seed, TURNS_MAX, bodies.collect()).map_err(|failure| failure.to_string());
    world.check_violations();
    let turns = match (world.found(), turns) {
        (_, Err(failure)) => return Err(failure),
        (Some(found), Ok(_)) => return Err(found),
        (None, Ok(turns)) => turns,
    };
    world.finish();
    let steps = world.steps.load(Ordering::Relaxed);
    let counts = Counts { steps, turns, calls: world.driver.calls_made(), time_ns: world.driver.now_ns() };
    match world.found() {
        Some(found) => Err(found),
        None => Ok(counts),
    }
}

/// Makes a failing program smaller as long as it fails. Returns it, and how it fails.
pub fn shrink(plan: Plan, failure: String) -> (Plan, String) {
    let (mut plan, mut failure) = (plan, failure);
    let (mut trials, since) = (0, Instant::now());
    let goes_on = |trials| trials < TRIALS && since.elapsed() < SHRINKING_MAX;
    let mut length = plan.threads.iter().map(Vec::len).max().unwrap_or(0);
    while length > 0 && goes_on(trials) {
        let mut removed = false;
        for thread in 0..plan.threads.len() {
            let mut start = 0;
            while start < plan.threads[thread].len() && goes_on(trials) {
                trials += 1;
                let smaller = plan.without(thread, start..start + length);
                match run(&smaller) {
                    Err(found) => (plan, failure, removed) = (smaller, found, true),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_fixes_everything() {
        for seed in 0..20 {
            let plan = Plan::of_seed(seed);
            assert_eq!(run(&plan), run(&plan), "{plan}");
        }
    }
}
