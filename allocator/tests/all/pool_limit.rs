//! The limit of a private pool.

use aquifer_allocator::{Advice, Allocator, OomReport, PoolOptions, PrivatePool, Refusal, TagScope};
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
        let cache = {
            let _tag = TagScope::new("kv_cache");
            pool.alloc_bytes(70 * MIB, &stream).unwrap()
        };
        let _other = pool.alloc_bytes(20 * MIB, &stream).unwrap();
        let report = refused(&pool, 11 * MIB, &stream);
        assert_eq!((report.refusal, report.pool), (Some(Refusal::PoolLimit), Some(pool.id())));
        let tags = [(Some("kv_cache".to_owned()), 70 * MIB), (None, 20 * MIB)];
        assert_eq!((&*report.largest_tags, report.claimed_in_pool), (&tags[..], 90 * MIB));
        let raise = Advice::RaisePoolLimit { pool: pool.id(), to: 101 * MIB };
        let free = Advice::FreeMore { least: MIB, largest: Some(("kv_cache".to_owned(), 70 * MIB)) };
        assert_eq!(report.advice, [raise, free]);
        let id = format!("({}, {})", pool.id().0, pool.id().1);
        let text = report.to_string();
        let expected = format!("refused by: the limit of 100.00 MiB of private pool {id}, in which 90.00 MiB is live");
        assert!(text.contains(&expected) && text.contains("live: 70.00 MiB \"kv_cache\""), "{text}");
        drop(cache);
        let _served = pool.alloc_bytes(80 * MIB, &stream).unwrap();
        assert_eq!(refused(&pool, 101 * MIB, &stream).advice.len(), 1, "more than the limit");
    }
}

#[test]
fn what_others_borrow_and_what_was_refused_does_not_count() {
    let (allocator, pool, stream) = scene("", 800 * MIB);
    drop(pool.alloc_bytes(800 * MIB, &stream).unwrap());
    let borrowed = allocator.alloc_bytes(700 * MIB, &stream).unwrap();
    // The device refuses this.
    assert_eq!(refused(&pool, 800 * MIB, &stream).refusal, Some(Refusal::Device));
    drop(borrowed);
    drop(pool.alloc_bytes(800 * MIB, &stream).unwrap());
    let raw = pool.alloc_raw(500 * MIB, &stream).unwrap();
    assert_eq!(refused(&pool, 301 * MIB, &stream).claimed_in_pool, 500 * MIB);
    allocator.free_raw(raw).unwrap();
    let _whole = pool.alloc_bytes(800 * MIB, &stream).unwrap();
}

proptest! {
    /// By blocks that are freed on their stream, or after another one used them.
    #[test]
    fn a_pool_never_exceeds_its_limit_and_is_refused_nothing_below_it(
        steps in prop::collection::vec((1..30 * MIB, any::<prop::sample::Index>(), 0..4_u8), 1..60),
    ) {
        let (allocator, pool, stream) = scene("", 100 * MIB);
        let other = allocator.device().stream().unwrap();
        let mut held: Vec<(aquifer_allocator::Allocation, u64)> = Vec::new();
        for (bytes, which, kind) in steps {
            if kind == 0 && !held.is_empty() {
                drop(held.swap_remove(which.index(held.len())));
                continue;
            }
            let live = held.iter().map(|(_, bytes)| bytes).sum::<u64>();
            match if kind == 1 { pool.alloc_aligned(bytes, MIB, &stream) } else { pool.alloc_bytes(bytes, &stream) } {
                Ok(block) => {
                    prop_assert!(live + bytes <= 100 * MIB);
                    if kind == 2 {
                        block.record_stream(&other).unwrap();
                    }
                    held.push((block, bytes));
                }
                Err(error) => {
                    let report = error.report().unwrap();
                    prop_assert_eq!((report.refusal, report.claimed_in_pool), (Some(Refusal::PoolLimit), live));
                    prop_assert!(live + bytes > 100 * MIB);
                }
            }
        }
    }
}
