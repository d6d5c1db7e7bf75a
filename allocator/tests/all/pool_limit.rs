//! The limit of a private pool.

use aquifer_allocator::{Advice, Allocation, Allocator, OomReport, PoolOptions, PrivatePool, Refusal, TagScope};
use aquifer_device::Stream;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn scene(options: &str, limit: u64) -> (Allocator, PrivatePool, Stream) {
    let device = aquifer_sim::open("1GiB").unwrap();
    let allocator = Allocator::new(&device, options).unwrap();
    let options = PoolOptions { limit: Some(limit), use_on_oom: true, ..PoolOptions::default() };
    let pool = allocator.create_pool(options).unwrap();
    (allocator, pool, device.stream().unwrap())
}

fn refused(pool: &PrivatePool, bytes: u64, stream: &Stream) -> OomReport {
    pool.alloc_bytes(bytes, stream).unwrap_err().report().unwrap().clone()
}

#[test]
fn a_refusal_names_the_pool_its_limit_and_the_tags_that_hold_its_memory() {
    for options in ["", "backing:segments", "no_cache:True"] {
        let (allocator, pool, stream) = scene(options, 100 * MIB);
        let _elsewhere = allocator.alloc_bytes(500 * MIB, &stream).unwrap();
        let tag = TagScope::new("kv_cache");
        let _cache = pool.alloc_bytes(70 * MIB, &stream).unwrap();
        drop(tag);
        let _other = pool.alloc_bytes(20 * MIB, &stream).unwrap();
        let report = refused(&pool, 11 * MIB, &stream);
        assert_eq!((report.refusal, report.pool), (Some(Refusal::PoolLimit), Some(pool.id())));
        assert_eq!(report.largest_tags, [(Some("kv_cache".to_owned()), 70 * MIB), (None, 20 * MIB)]);
        let raise = Advice::RaisePoolLimit { pool: pool.id(), to: 101 * MIB };
        let free = Advice::FreeMore { least: MIB, largest: Some(("kv_cache".to_owned(), 70 * MIB)) };
        assert_eq!(report.advice, [raise, free]);
        let id = format!("({}, {})", pool.id().0, pool.id().1);
        let expected = format!("refused by: the limit of 100.00 MiB of private pool {id}, in which 90.00 MiB is live");
        assert!(report.to_string().contains(&expected), "{report}");
        assert_eq!(refused(&pool, 101 * MIB, &stream).advice.len(), 1, "more than the limit");
    }
}

#[test]
fn what_others_borrow_and_what_was_refused_does_not_count() {
    let (allocator, pool, stream) = scene("", 800 * MIB);
    drop(pool.alloc_bytes(800 * MIB, &stream).unwrap());
    let borrowed = allocator.alloc_bytes(700 * MIB, &stream).unwrap();
    assert_eq!(refused(&pool, 800 * MIB, &stream).refusal, Some(Refusal::Device));
    drop(borrowed);
    let _whole = pool.alloc_bytes(800 * MIB, &stream).unwrap();
}

proptest! {
    #[test]
    fn a_pool_never_exceeds_its_limit_and_is_refused_nothing_below_it(
        steps in prop::collection::vec((1..30 * MIB, any::<prop::sample::Index>(), 0..4_u8), 1..60),
    ) {
        let (allocator, pool, stream) = scene("", 100 * MIB);
        let other = allocator.device().stream().unwrap();
        let mut held: Vec<(Allocation, u64)> = Vec::new();
        for (bytes, which, kind) in steps {
            if kind == 0 && !held.is_empty() {
                drop(held.swap_remove(which.index(held.len())));
                continue;
            }
            let live = held.iter().map(|(_, bytes)| bytes).sum::<u64>();
            let alignment = if kind == 1 { MIB } else { 1 };
            match pool.alloc_aligned(bytes, alignment, &stream) {
                Ok(block) => held.push((block, bytes)),
                Err(error) => prop_assert_eq!(error.report().unwrap().claimed_in_pool, live),
            }
            prop_assert_eq!(held.iter().map(|(_, bytes)| bytes).sum::<u64>() > live, live + bytes <= 100 * MIB);
            if kind == 2 && let Some((block, _)) = held.last() {
                block.record_stream(&other).unwrap();
            }
        }
    }
}

#[test]
fn a_request_that_the_device_refused_counts_as_no_live_memory() {
    let (_allocator, pool, stream) = scene("", 4096 * MIB);
    let report = refused(&pool, 2000 * MIB, &stream);
    assert_eq!((report.refusal, report.claimed_in_pool), (Some(Refusal::Device), 0));
}

#[test]
fn a_free_that_another_thread_keeps_waiting_leaves_its_room() {
    let (allocator, pool, stream) = scene("", 10 * MIB);
    std::thread::scope(|scope| {
        let busy = scope.spawn(|| (0..20_000).for_each(|_| drop(allocator.snapshot())));
        while !busy.is_finished() {
            drop(pool.alloc_bytes(10 * MIB, &stream).unwrap());
        }
    });
}
