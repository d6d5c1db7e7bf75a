//! Random programs, judged by both checkers.
//!
//! Each program has a number, which is its seed. `AQUIFER_PROGRAM`, `AQUIFER_PROGRAMS` and
//! `AQUIFER_FIRST_PROGRAM` choose which ones run. A failing program is shrunk and printed.

use std::ops::Range;
use std::time::Instant;

use aquifer_oracle::RaceKind;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::program::{Step, program};
use crate::running::{Outcome, run};

/// How many programs run where nothing else is asked for.
const PROGRAMS: u64 = 300;

fn numbers() -> Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number of a program"));
    if let Some(only) = number("AQUIFER_PROGRAM") {
        return only..only + 1;
    }
    number("AQUIFER_FIRST_PROGRAM").unwrap_or(0)..number("AQUIFER_PROGRAMS").unwrap_or(PROGRAMS)
}

#[derive(Debug, Default)]
struct Tally {
    calls: u64,
    launches: u64,
    left_out: u64,
    races: [u64; 3],
}

impl Tally {
    fn add(&mut self, outcome: &Outcome) {
        self.calls += outcome.calls;
        self.launches += outcome.launches;
        self.left_out += outcome.left_out;
        for kind in outcome.first.iter().flat_map(|(_, _, oracle)| oracle) {
            let at = [RaceKind::Work, RaceKind::Host, RaceKind::Removal].iter().position(|other| other == kind);
            self.races[at.expect("the kinds of races")] += 1;
        }
    }
}

/// The first call that races, and the kinds of its races, are the same for both.
#[test]
fn the_detector_and_the_oracle_agree() {
    let (programs, began) = (program(), Instant::now());
    let numbers = numbers();
    let mut tally = Tally::default();
    for number in numbers.clone() {
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&number.to_le_bytes());
        let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
        let config = Config { failure_persistence: None, ..Config::default() };
        let steps = programs.new_tree(&mut TestRunner::new_with_rng(config, rng)).expect("a program").current();
        let outcome = run(number, &steps);
        tally.add(&outcome);
        if outcome.is_split() {
            panic!("program {number}: {}", shrunk(number, steps));
        }
    }
    let rate = numbers.end.saturating_sub(numbers.start) as f64 / began.elapsed().as_secs_f64();
    println!("programs {numbers:?}, {rate:.0} a second: {tally:?}");
}

/// The program without steps that it does not need, and the reports about it.
fn shrunk(number: u64, mut steps: Vec<Step>) -> String {
    let mut at = steps.len();
    while at > 0 {
        at -= 1;
        let mut fewer = steps.clone();
        fewer.remove(at);
        if run(number, &fewer).is_split() {
            steps = fewer;
            at = steps.len();
        }
    }
    let lines: String = steps.iter().map(|step| format!("\n  {step:?}")).collect();
    let outcome = run(number, &steps);
    format!("the checkers differ: {:?}{lines}\n{}", outcome.first, outcome.reports)
}
