//! Runs many numbered programs. A program's number is its seed: it is printed when the program
//! fails, and the same number gives the same program.
//!
//! * `AQUIFER_PROGRAMS=10000` sets how many programs each test draws; else a GPU gets fewer than
//!   virtual time: [`Subject::share`];
//! * `AQUIFER_FIRST_PROGRAM=5000` leaves out those before that number, so that several processes
//!   share the work;
//! * `AQUIFER_PROGRAM=4711` runs only the program with that number.

use std::time::Instant;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::Subject;

/// Names the variable that sets how many programs each test draws.
pub const PROGRAMS: &str = "AQUIFER_PROGRAMS";

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

/// How many programs each test draws, if the variable sets that.
pub fn asked() -> Option<u64> {
    number(PROGRAMS)
}

/// How many programs a test runs that runs `few` by default.
pub fn count(few: u64) -> u64 {
    asked().unwrap_or_else(|| Subject::share(few))
}

/// Runs programs `first, first + step, …` below `count`, and panics with the first failure.
pub fn each(name: &str, count: u64, (first, step): (u64, usize), run: impl Fn(u64) -> Result<(), String>) {
    let begin = Instant::now();
    let from = number("AQUIFER_FIRST_PROGRAM").unwrap_or(0);
    let all = (first..count).step_by(step).filter(|&number| number >= from);
    let numbers = number("AQUIFER_PROGRAM").map_or_else(|| all.collect(), |only| vec![only]);
    for &number in &numbers {
        if let Err(error) = run(number) {
            panic!("{name}: program {number} failed (AQUIFER_PROGRAM={number} runs it alone): {error}");
        }
    }
    println!("{name}: {} programs in {:.1} s", numbers.len(), begin.elapsed().as_secs_f64());
}

/// Runs so many programs drawn from `programs`; a failing one is made small and printed.
pub fn run<P: Strategy>(name: &str, count: u64, programs: &P, run: impl Fn(P::Value)) {
    each(name, count, (0, 1), |number| {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&number.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let config = Config { cases: 1, failure_persistence: None, max_shrink_iters: 4096, ..Config::default() };
        let outcome = TestRunner::new_with_rng(config, rng).run(programs, |program| {
            run(program);
            Ok(())
        });
        outcome.map_err(|error| error.to_string())
    });
}
