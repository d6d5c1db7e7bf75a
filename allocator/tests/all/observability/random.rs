//! Random programs: after every step everything that is said about the memory agrees.

use aquifer_allocator::{Fragmentation, HistoryOptions, MemoryStats, PoolStats, Snapshot, Stat};
use proptest::prelude::*;

use super::machine::{Machine, Step, configs, steps};
use super::replay::{check_history, check_segments};
use super::totals::{PoolTotals, totals};

/// Statistics of one pool, by which to read them.
fn of_pool(stats: &MemoryStats, pool: fn(&PoolStats) -> Stat) -> PoolTotals {
    let current = |stats: &PoolStats| pool(stats).current;
    PoolTotals {
        segment: current(&stats.segment),
        reserved_bytes: current(&stats.reserved_bytes),
        allocation: current(&stats.allocation),
        allocated_bytes: current(&stats.allocated_bytes),
        active: current(&stats.active),
        active_bytes: current(&stats.active_bytes),
        requested_bytes: current(&stats.requested_bytes),
        ..PoolTotals::default()
    }
}

/// Bytes of the largest frames of programs whose memory does not move in each repetition: what is
/// left of a broken one is spare.
const FRAME: u64 = 16 << 20;

fn check_stats(stats: &MemoryStats, snapshot: &Snapshot, spare: u64) -> Result<(), TestCaseError> {
    let mut totals = totals(snapshot);
    // Spare frames are mapped nowhere, so they are in no segment; they count as memory of large
    // pools.
    totals.all.reserved_bytes += spare;
    totals.large_pool.reserved_bytes += spare;
    // The statistics do not count these.
    for pool in [&mut totals.all, &mut totals.large_pool, &mut totals.small_pool] {
        (pool.inactive_split, pool.inactive_split_bytes) = (0, 0);
    }
    prop_assert_eq!(of_pool(stats, |stats| stats.all), totals.all);
    prop_assert_eq!(of_pool(stats, |stats| stats.large_pool), totals.large_pool);
    prop_assert_eq!(of_pool(stats, |stats| stats.small_pool), totals.small_pool);
    Ok(())
}

fn check_fragmentation(
    fragmentation: &Fragmentation,
    stats: &MemoryStats,
    snapshot: &Snapshot,
) -> Result<(), TestCaseError> {
    let current = |stats: &PoolStats| stats.all.current;
    prop_assert_eq!(fragmentation.reserved_bytes, current(&stats.reserved_bytes));
    prop_assert!(fragmentation.spare_bytes < FRAME, "without a fault little is spare: {:?}", fragmentation);
    let segments = snapshot.segments.iter();
    prop_assert_eq!(fragmentation.segments, segments.clone().count() as u64);
    prop_assert_eq!(segments.clone().filter(|segment| !segment.is_expandable).count() as u64, current(&stats.segment));
    prop_assert_eq!(fragmentation.allocated_bytes, current(&stats.allocated_bytes));
    prop_assert_eq!(
        fragmentation.allocated_bytes + fragmentation.waiting_bytes,
        current(&stats.active_bytes),
        "waiting"
    );
    if segments.clone().all(|segment| !segment.is_expandable) {
        let split = fragmentation.free_bytes - fragmentation.releasable_bytes;
        prop_assert_eq!(split, totals(snapshot).all.inactive_split_bytes, "split");
    }
    let whole = segments.filter(|segment| segment.active_size == 0 && segment.blocks.len() == 1);
    prop_assert_eq!(fragmentation.releasable_segments, whole.count() as u64);
    let sizes = &fragmentation.free_sizes;
    prop_assert_eq!(sizes.iter().map(|range| range.bytes).sum::<u64>(), fragmentation.free_bytes);
    prop_assert_eq!(sizes.iter().map(|range| range.count).sum::<u64>(), fragmentation.free_blocks);
    for range in sizes {
        prop_assert!(range.bytes >= range.count * range.at_least && range.bytes < range.count * range.at_least * 2);
    }
    prop_assert!((0.0..=1.0).contains(&fragmentation.external) && (0.0..=1.0).contains(&fragmentation.unusable));
    Ok(())
}

/// Statistics that only grow within a step before they fall, or the other way round: their peaks
/// are seen between steps.
fn peaks(stats: &MemoryStats) -> [(u64, u64); 6] {
    let pooled = [&stats.allocated_bytes, &stats.allocation, &stats.segment, &stats.reserved_bytes];
    let [a, b, c, d] = pooled.map(|stats| (stats.all.current, stats.all.peak));
    let large = stats.reserved_bytes.large_pool;
    let small = stats.allocated_bytes.small_pool;
    [a, b, c, d, (large.current, large.peak), (small.current, small.peak)]
}

fn run(machine: &mut Machine, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut seen = [0; 6];
    for step in steps {
        machine.run(step);
        let stats = machine.allocator.stats();
        let snapshot = machine.allocator.snapshot();
        check_segments(&snapshot).map_err(TestCaseError::fail)?;
        check_history(&snapshot).map_err(TestCaseError::fail)?;
        let fragmentation = machine.allocator.fragmentation(3 << 20);
        check_stats(&stats, &snapshot, fragmentation.spare_bytes)?;
        check_fragmentation(&fragmentation, &stats, &snapshot)?;
        for (seen, (current, peak)) in seen.iter_mut().zip(peaks(&stats)) {
            *seen = current.max(*seen);
            prop_assert_eq!(*seen, peak, "a peak after {:?}", step);
        }
        for (key, value) in stats.to_map() {
            prop_assert!(value >= 0 || key == "max_split_size", "{} is {}", key, value);
        }
        let private: u64 = machine.allocator.reserved_by_private_pools().values().sum();
        let in_pools = snapshot.segments.iter().filter(|segment| segment.segment_pool_id != (0, 0));
        prop_assert_eq!(private, in_pools.map(|segment| segment.total_size).sum::<u64>());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn everything_agrees_after_every_step(config in configs(), seed in any::<u64>(), steps in steps(60)) {
        let mut machine = Machine::new(config, seed);
        machine.allocator.record_history(HistoryOptions { entries: 100_000, ..HistoryOptions::default() });
        run(&mut machine, &steps)?;
    }

    #[test]
    fn a_ring_that_overflows_agrees_with_the_segments(
        config in configs(), seed in any::<u64>(), entries in 1..40_usize, steps in steps(60),
    ) {
        let mut machine = Machine::new(config, seed);
        machine.allocator.record_history(HistoryOptions { entries, ..HistoryOptions::default() });
        run(&mut machine, &steps)?;
        let kept = machine.allocator.snapshot();
        prop_assert!(kept.trace().len() <= entries);
        machine.allocator.record_history(HistoryOptions { entries: 1, ..HistoryOptions::default() });
        let shorter = machine.allocator.snapshot();
        prop_assert_eq!(shorter.trace().len(), 1);
        prop_assert_eq!(shorter.trace()[0].action, aquifer_allocator::Action::Snapshot);
    }

    #[test]
    fn accumulated_values_start_anew(config in configs(), steps in steps(40), more in steps(20)) {
        let mut machine = Machine::new(config, 1);
        steps.iter().for_each(|step| machine.run(step));
        let before = machine.allocator.stats().to_map();
        machine.allocator.reset_peak_stats();
        machine.allocator.reset_accumulated_stats();
        let reset = machine.allocator.stats().to_map();
        for (key, value) in &reset {
            let expected = match key.rsplit('.').next() {
                Some("peak") => before[&key.replace(".peak", ".current")],
                Some("allocated" | "freed") => 0,
                _ if key.starts_with("num_") => 0,
                _ => before[key],
            };
            prop_assert_eq!(*value, expected, "{}", key);
        }
        more.iter().for_each(|step| machine.run(step));
        let after = machine.allocator.stats().to_map();
        for (key, value) in after.iter().filter(|(key, _)| key.ends_with(".current")) {
            let part = |part| after[&key.replace(".current", part)];
            prop_assert_eq!(*value, before[key] + part(".allocated") - part(".freed"), "{}", key);
        }
    }
}
