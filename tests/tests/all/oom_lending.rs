//! Pools keep what is theirs, and lend what they lend, wherever on the way to running out of memory
//! their blocks come free.

use std::sync::{Arc, Mutex};

use aquifer::memory::{Allocation, PoolOptions, PrivatePool};
use aquifer_allocator::Advice;
use aquifer_tests::{Bench, MIB};

fn lending(bench: &Bench) -> PrivatePool {
    bench.allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap()
}

/// Gives memory back while the other stream uses it.
fn drop_in_use(bench: &Bench, allocation: Allocation) {
    bench.side.wait_for(&bench.stream.tick()).unwrap();
    bench.driver.stall(&bench.side, std::time::Duration::from_secs(1)).unwrap();
    bench.side.fill(allocation.ptr(), 1, allocation.bytes()).unwrap();
    allocation.record_stream(&bench.side).unwrap();
}

#[test]
fn a_pool_is_reused_without_a_cache_too() {
    for bench in Bench::on_both(64 * MIB, "no_cache:True") {
        let pool = bench.allocator.create_pool(PoolOptions::default()).unwrap();
        (0..20).for_each(|_| drop(pool.alloc_bytes(10 * MIB, &bench.stream).unwrap()));
        assert_eq!(bench.allocator.memory_reserved(), 10 * MIB);
        drop(bench.allocator.alloc_bytes(10 * MIB, &bench.stream).unwrap());
        drop(pool);
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_what_came_free_while_the_host_waited() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40") {
        let pool = lending(&bench);
        drop_in_use(&bench, pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
        drop(bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap());
        drop(pool);
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_what_a_reclaimer_gave_back() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40") {
        let pool = lending(&bench);
        let cache = Arc::new(Mutex::new(Some(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap())));
        let reclaimer = bench.allocator.register_reclaimer(0, "cache", move |_| {
            cache.lock().unwrap().take().map_or(0, |allocation| allocation.bytes())
        });
        drop(bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap());
        drop((pool, reclaimer));
        bench.assert_returned();
    }
}

#[test]
fn a_pool_lends_before_the_limit_refuses_at_once() {
    for bench in Bench::on_both(256 * MIB, "limit_mb:40,throw_on_cudamalloc_oom:True") {
        let pool = lending(&bench);
        drop(pool.alloc_bytes(30 * MIB, &bench.stream).unwrap());
        let lent = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap();
        let error = bench.allocator.alloc_bytes(20 * MIB, &bench.stream).unwrap_err();
        let advises = |advice: &Advice| matches!(advice, Advice::PrivatePool { .. });
        assert!(!error.report().unwrap().advice.iter().any(advises), "{error}");
        assert_eq!(bench.allocator.stats().num_oom_rejections, 1);
        drop((lent, pool));
        bench.assert_returned();
    }
}
