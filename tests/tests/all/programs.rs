//! Random programs against the model; see `aquifer_tests::world`.

use std::cell::RefCell;

use aquifer_tests::op::op;
use aquifer_tests::runner;
use aquifer_tests::setup::setup;
use aquifer_tests::world::World;
use proptest::collection::vec;

fn programs(name: &str, faults: bool, part: (u64, usize)) {
    let strategy = (setup(), vec(op(faults), 1..120));
    runner::run(name, 1000, part, &strategy, |(setup, program)| World::run(&setup, &program));
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

#[test]
fn programs_reach_every_rung() {
    let strategy = (setup(), vec(op(false), 60..120));
    let sums = RefCell::new([0; 8]);
    runner::run_exactly("programs that count", 150, (0, 1), &strategy, |(setup, program)| {
        let mut world = World::new(&setup);
        world.steps(&program);
        let stats = world.stats();
        let reached = [
            stats.num_ooms,
            stats.num_alloc_retries,
            stats.num_sync_all_streams,
            stats.num_device_free,
            stats.num_oom_rejections,
            stats.cross_stream_reuses,
            stats.cross_stream_waits,
            stats.oversize_segments.allocated,
        ];
        sums.borrow_mut().iter_mut().zip(reached).for_each(|(sum, n)| *sum += n);
        world.finish(setup.ending);
    });
    println!("reached: {:?}", sums.borrow());
    assert!(sums.borrow().iter().all(|&sum| sum > 0), "{:?}", sums.borrow());
}
