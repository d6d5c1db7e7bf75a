//! Random programs against the model; see `aquifer_tests::world`.

use aquifer_tests::op::op;
use aquifer_tests::runner;
use aquifer_tests::setup::setup;
use aquifer_tests::world::World;
use proptest::collection::vec;

fn programs(name: &str, faults: bool, part: (u64, usize)) {
    let strategy = (setup(), vec(op(faults), 1..120));
    runner::run(name, 400, part, &strategy, |(setup, program)| World::run(&setup, &program));
}

#[test]
fn programs_with_even_numbers() {
    programs("programs, even", false, (0, 2));
}

#[test]
fn programs_with_odd_numbers() {
    programs("programs, odd", false, (1, 2));
}

#[test]
fn programs_with_faults() {
    programs("programs with faults", true, (0, 2));
}
