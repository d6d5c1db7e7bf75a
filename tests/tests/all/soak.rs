//! Soaks of several threads with all checks: `aquifer_machine`. `AQUIFER_PROGRAMS=1000` sets how many
//! seeds, each of 1000 operations.

use aquifer_machine::{Plan, run_free};
use aquifer_tests::prelude::*;

const OPERATIONS: u64 = 1000;

#[test]
fn soaks_are_clean() {
    let (mut ooms, mut compared) = (0, 0);
    for seed in 0..runner::asked().unwrap_or(8) {
        let backing = BACKINGS[usize::from(seed % 2 == 1)];
        let threads = 1 + u16::from(seed % 4 >= 2);
        let plan = Plan::of_soak(seed, 128 * MIB, &on(backing, ""), (threads, OPERATIONS));
        let counts = run_free(&plan, || false).unwrap_or_else(|failure| panic!("seed {seed}: {}", failure.what));
        assert_eq!(counts.steps, OPERATIONS, "seed {seed}");
        (ooms, compared) = (ooms + counts.stats.num_ooms, compared + counts.compared);
    }
    assert!(ooms > 0 && compared > 100 * MIB, "{ooms} refused, {compared} bytes compared");
}
