//! Soaks with all checks of the device: `aquifer_machine::soak`. `AQUIFER_PROGRAMS=1000` sets
//! how many seeds, each of 1000 operations.

use std::sync::atomic::{AtomicBool, AtomicU64};

use aquifer_machine::soak::{self, Counts, Plan};
use aquifer_tests::prelude::*;

const OPERATIONS: u64 = 1000;
const LIMIT: u64 = 24 * MIB;

/// Soaks a device; everything must read as it was written, in order, and be given back.
fn soak(seed: u64) -> Counts {
    let driver = Subject::open(&SimConfig::new(128 * MIB).seed(seed));
    let backing = BACKINGS[usize::from(seed % 2 == 1)];
    let config = Config::parse(&on(backing, "")).unwrap();
    let allocator = Allocator::new(&driver.device(), config).unwrap();
    let threads = 1 + u16::from(seed % 4 >= 2);
    let plan = Plan { seed, threads, streams: 4, limit: LIMIT, operations: Some(OPERATIONS), until: None };
    let counts = soak::run(&allocator, &plan, &AtomicU64::new(0), &AtomicBool::new(false))
        .unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    let damaged: Vec<String> = counts.mismatches.iter().map(ToString::to_string).collect();
    assert!(damaged.is_empty(), "seed {seed}: {}", damaged.join("\n"));
    assert_eq!((counts.operations, allocator.memory_allocated()), (OPERATIONS, 0), "seed {seed}");
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_reserved(), driver.free()), (0, driver.info().total_bytes), "seed {seed}");
    driver.assert_no_violation();
    counts
}

#[test]
fn soaks_are_clean() {
    let mut sum = Counts::default();
    (0..runner::asked().unwrap_or(8)).for_each(|seed| sum.add(soak(seed)));
    println!("{sum:?}");
    assert!(sum.ooms > 0 && sum.copies > 0 && sum.handed_over > 0 && sum.blocks_verified > 1000, "{sum:?}");
}
