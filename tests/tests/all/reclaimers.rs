//! Reclaimers and observers of out-of-memory errors: how often they run, the calls that they may
//! make, and their panics.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use aquifer_tests::prelude::*;

/// A cache that frees its least recently used blocks, and the bytes that it was asked for.
#[derive(Clone, Default)]
struct Cache {
    blocks: Arc<Mutex<VecDeque<Allocation>>>,
    asked: Arc<Mutex<Vec<u64>>>,
}

impl Cache {
    /// Fills the device with blocks of 1 MiB, which are used so that no two neighbours follow each
    /// other.
    fn filling(bench: &Bench) -> Cache {
        let mut blocks: Vec<_> = (0..64).map(|_| bench.allocator.alloc_bytes(MIB, &bench.stream).ok()).collect();
        let order = (0..7).flat_map(|first| (first..64).step_by(7));
        let lru = order.filter_map(|at| blocks[at].take()).collect();
        Cache { blocks: Arc::new(Mutex::new(lru)), asked: Arc::default() }
    }

    fn evict(&self, bytes: u64) -> u64 {
        let mut blocks = self.blocks.lock().unwrap();
        let mut freed = 0;
        while let Some(block) = if freed < bytes { blocks.pop_front() } else { None } {
            freed += block.bytes();
        }
        freed
    }

    fn register(&self, bench: &Bench, priority: i32) -> Registration {
        let cache = self.clone();
        bench.allocator.register_reclaimer(priority, "cache", move |request| {
            cache.asked.lock().unwrap().push(request.bytes);
            cache.evict(request.bytes)
        })
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().unwrap().clone()
    }
}

#[test]
fn reclaimers_are_asked_again_when_pieces_do_not_suffice() {
    for bench in Bench::on_both(64 * MIB, "") {
        let cache = Cache::filling(&bench);
        let registration = cache.register(&bench, 0);
        let held = bench.alloc(5 * MIB);
        let asked = cache.asked();
        assert!(asked.len() > 1 && asked[0] == 5 * MIB, "{asked:?}");
        assert!(asked.windows(2).all(|pair| pair[1] >= 2 * pair[0] || pair[1] == 64 * MIB), "{asked:?}");
        drop((held, registration));
        cache.evict(u64::MAX);
        bench.assert_returned();
    }
}

#[test]
fn reclaimers_are_asked_again_for_dedicated_memory_too() {
    let bench = Bench::new(64 * MIB, "");
    let cache = Cache::filling(&bench);
    let registration = cache.register(&bench, 0);
    let mut growable = bench.growable(32 * MIB);
    growable.grow_to(9 * MIB, &bench.stream).unwrap();
    assert!(cache.asked().len() > 1, "{:?}", cache.asked());
    cache.evict(u64::MAX);
    drop((growable, registration));
    bench.assert_returned();
}

#[test]
fn a_small_request_asks_for_a_segment_in_the_second_round() {
    let bench = Bench::new(64 * MIB, "");
    let cache = Cache::filling(&bench);
    // What is freed first is one block of two in a granule, so that 1 MiB of the large pool is free
    // and nothing for the small one.
    let registration = cache.register(&bench, 0);
    let small = bench.alloc(512);
    let asked = cache.asked();
    assert_eq!(asked[0], 512);
    assert!(asked.get(1).is_none_or(|&bytes| bytes == 2 * MIB), "{asked:?}");
    cache.evict(u64::MAX);
    drop((small, registration));
    bench.assert_returned();
}

#[test]
fn reclaimers_that_free_nothing_are_asked_a_bounded_number_of_times() {
    let bench = Bench::new(64 * MIB, "");
    let held = bench.alloc(60 * MIB);
    let asked: Arc<Mutex<Vec<(&str, u64)>>> = Arc::default();
    let reclaimer = |name: &'static str, freed: u64| {
        let asked = asked.clone();
        bench.allocator.register_reclaimer(0, name, move |request| {
            asked.lock().unwrap().push((name, request.bytes / MIB));
            if freed == 0 {
                request.explain("nothing is cached");
            }
            freed
        })
    };
    let registrations = [reclaimer("liar", u64::MAX), reclaimer("honest", 0)];
    let error = bench.refused(10 * MIB);
    assert_eq!(*asked.lock().unwrap(), [("liar", 10), ("honest", 10), ("liar", 20), ("liar", 40), ("liar", 64)]);
    let report = error.report().unwrap();
    assert_eq!(report.reclaimed, u64::MAX);
    let reported: Vec<_> = report.reclaimers.iter().map(|one| (&*one.name, one.bytes, one.why.as_deref())).collect();
    assert_eq!(reported, [("liar", u64::MAX, None), ("honest", 0, Some("nothing is cached"))]);
    let text = report.to_string();
    assert!(text.contains("asked: \"honest\", which freed 0 bytes: nothing is cached"), "{text}");
    drop((held, registrations));
    bench.assert_returned();
}

#[test]
fn reclaimers_come_and_go_between_rounds() {
    let bench = Bench::new(64 * MIB, "");
    let held = bench.alloc(60 * MIB);
    let own: Arc<Mutex<Option<Registration>>> = Arc::default();
    let (taken, asked) = (own.clone(), Arc::new(AtomicU64::new(0)));
    let count = asked.clone();
    let registration = bench.allocator.register_reclaimer(0, "once", move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        drop(taken.lock().unwrap().take());
        1
    });
    *own.lock().unwrap() = Some(registration);
    bench.refused(10 * MIB);
    assert_eq!(asked.load(Ordering::Relaxed), 1, "it ended its own registration");
    drop(held);
    bench.assert_returned();
}

#[test]
fn a_reclaimer_whose_allocation_fails_is_not_asked_again() {
    let bench = Bench::new(64 * MIB, "");
    let held = bench.alloc(60 * MIB);
    let (allocator, stream, asked) = (bench.allocator.clone(), bench.stream.clone(), Arc::new(AtomicU64::new(0)));
    let count = asked.clone();
    let registration = bench.allocator.register_reclaimer(0, "hungry", move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        assert!(allocator.alloc_bytes(60 * MIB, &stream).unwrap_err().is_out_of_memory());
        0
    });
    bench.refused(60 * MIB);
    assert_eq!((asked.load(Ordering::Relaxed), bench.allocator.stats().num_ooms), (1, 2));
    drop((held, registration));
    bench.assert_returned();
}

#[test]
fn a_panic_in_a_reclaimer_stays_there() {
    let bench = Bench::new(64 * MIB, "");
    let cache = Cache::filling(&bench);
    let (panics, asked) = (cache.clone(), Arc::new(AtomicU64::new(0)));
    let count = asked.clone();
    let broken = bench.allocator.register_reclaimer(1, "broken", move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        panics.evict(8 * MIB);
        panic!("a reclaimer panics");
    });
    // What it freed in pieces before it panicked is not lost, and the next reclaimer is asked.
    let registration = cache.register(&bench, 0);
    let served = bench.alloc(5 * MIB);
    assert_eq!((asked.load(Ordering::Relaxed), bench.allocator.stats().num_ooms), (1, 0));
    drop(registration);
    // Alone it makes no request panic either, and the memory that it frees serves the request.
    cache.evict(u64::MAX);
    *cache.blocks.lock().unwrap() = VecDeque::from([bench.alloc(50 * MIB)]);
    drop(bench.alloc(40 * MIB));
    let error = bench.refused(70 * MIB);
    assert_eq!(error.report().unwrap().reclaimers[0].why.as_deref(), Some("it panicked"));
    drop((served, broken));
    bench.assert_returned();
}

#[test]
fn a_panic_in_an_observer_stays_there() {
    let bench = Bench::new(64 * MIB, "");
    let told = Arc::new(AtomicU64::new(0));
    let (count, allocator, stream) = (told.clone(), bench.allocator.clone(), bench.stream.clone());
    let observers = [
        bench.allocator.observe_oom(|_| panic!("an observer panics")),
        bench.allocator.observe_oom(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            // Failures inside of an observer are not reported to observers.
            assert!(allocator.alloc_bytes(80 * MIB, &stream).unwrap_err().is_out_of_memory());
        }),
    ];
    for round in 1..=2 {
        assert!(bench.refused(70 * MIB).is_out_of_memory());
        assert_eq!(told.load(Ordering::Relaxed), round);
    }
    drop(observers);
    drop(bench.alloc(60 * MIB));
    bench.assert_returned();
}
