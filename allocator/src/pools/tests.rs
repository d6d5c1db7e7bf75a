//! What is kept for private pools, and when it goes.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

use crate::allocation::Allocation;
use crate::allocator::Allocator;
use crate::config::Config;
use crate::core::Core;
use crate::core::pools::Private;
use crate::{PoolOptions, PrivatePool};

const MIB: u64 = 1 << 20;

fn setup(config: &str) -> (Allocator, [Stream; 3]) {
    setup_on("16GiB", config)
}

fn setup_on(device: &str, config: &str) -> (Allocator, [Stream; 3]) {
    let device = Device::new(SimDriver::new(SimConfig::parse(device).unwrap()));
    let streams = [(); 3].map(|()| device.stream().unwrap());
    (Allocator::new(&device, Config::parse(config).unwrap()).unwrap(), streams)
}

/// Checks the table against the heap: regions are counted, the heap has just the pools that have
/// regions, and closed pools without any are gone, unless `graphs` may keep them.
fn check(core: &Core, graphs: bool) -> Result<(), TestCaseError> {
    let mut regions = std::collections::BTreeMap::new();
    for region in core.heap().regions().filter(|region| region.pool.is_private()) {
        prop_assert!(core.pools.owner_of(region.pool).is_some(), "a region without a pool");
        *regions.entry(region.pool).or_insert(0) += 1;
    }
    prop_assert_eq!(core.heap().pools().filter(|pool| pool.is_private()).count(), regions.len());
    let noted: Vec<_> = core.pools.iter().flat_map(|private| private.regions()).collect();
    prop_assert_eq!(noted, regions.into_iter().collect::<Vec<_>>());
    for private in core.pools.iter() {
        prop_assert!(private.open || graphs || private.regions().next().is_some(), "a pool that is over is listed");
    }
    Ok(())
}

#[test]
fn nothing_is_left_of_pools_that_are_gone() {
    for config in ["", "backing:segments"] {
        let (allocator, streams) = setup(config);
        for _ in 0..3 {
            let pools: Vec<PrivatePool> = (0..40)
                .map(|_| allocator.create_pool(PoolOptions { use_on_oom: true, ..PoolOptions::default() }).unwrap())
                .collect();
            let blocks: Vec<Allocation> = pools
                .iter()
                .zip(streams.iter().cycle())
                .map(|(pool, stream)| pool.alloc_bytes(MIB, stream).unwrap())
                .collect();
            let places: Vec<u16> = pools.iter().map(|pool| pool.key().place()).collect();
            assert_eq!(places, (0..40).collect::<Vec<u16>>(), "places are used again");
            // Half of the pools are dropped before their blocks.
            let mut pools = pools.into_iter();
            pools.by_ref().take(20).for_each(drop);
            assert_eq!(allocator.state().lock().pools.iter().count(), 40);
            drop((pools, blocks));
            allocator.empty_cache().unwrap();
            let guard = allocator.state().lock();
            assert_eq!((guard.pools.iter().count(), guard.pools.lenders().count(), guard.pools.places()), (0, 0, 0));
            check(&guard, false).unwrap();
        }
        assert_eq!(allocator.memory_reserved(), 0);
    }
}

#[test]
fn a_pool_that_a_thread_is_routed_to_stays_listed() {
    let (allocator, [stream, ..]) = setup("");
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let (outer, inner) = (pool.route_thread(), pool.route_thread());
    drop(pool);
    let listed = || allocator.state().shared().pools.iter().count();
    assert_eq!(listed(), 1, "a request with its numbers may be under way");
    drop(outer);
    assert_eq!((listed(), allocator.state().shared().pools.routed(std::thread::current().id())), (1, None));
    drop(allocator.alloc_bytes(MIB, &stream).unwrap());
    drop(inner);
    assert_eq!(listed(), 0);
}

#[test]
fn graphs_that_are_over_are_forgotten() {
    let (allocator, [stream, ..]) = setup("");
    let pool = allocator.create_pool(PoolOptions::default()).unwrap();
    let capture = || {
        let capture = stream.begin_capture().unwrap();
        let route = allocator.capture(&stream, &pool).unwrap();
        let scratch = allocator.alloc_bytes(MIB, &stream).unwrap();
        stream.fill(scratch.ptr(), 1, MIB).unwrap();
        drop(scratch);
        let graph = capture.end().unwrap();
        drop(route);
        graph
    };
    let known = || allocator.state().shared().pools.find(pool.key()).map(Private::graphs_known);
    for _ in 0..100 {
        drop(capture());
        assert!(known() <= Some(9), "{:?}", known());
    }
    let graphs: Vec<_> = (0..50).map(|_| capture()).collect();
    graphs[0].launch(&stream).unwrap();
    drop(graphs);
    stream.synchronize().unwrap();
    drop(pool.alloc_bytes(MIB, &stream).unwrap());
    assert_eq!(known(), Some(0), "a request tells that none may be launched");
    let kept = capture();
    drop(pool);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.state().shared().pools.iter().count(), 1, "the graph may be launched");
    drop(kept);
    allocator.empty_cache().unwrap();
    assert_eq!(allocator.state().shared().pools.places(), 0);
}

#[derive(Clone, Debug)]
enum Step {
    Create { lends: bool, no_split: bool },
    Alloc { pool: prop::sample::Index, stream: usize, bytes: u64, default: bool },
    Free(prop::sample::Index),
    Drop(prop::sample::Index),
    Empty(Option<prop::sample::Index>),
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<prop::sample::Index>;
    let bytes = prop_oneof![1..MIB, MIB..30 * MIB];
    prop_oneof![
        2 => any::<[bool; 2]>().prop_map(|[lends, no_split]| Step::Create { lends, no_split }),
        6 => (which(), 0..3_usize, bytes, prop::bool::weighted(0.2))
            .prop_map(|(pool, stream, bytes, default)| Step::Alloc { pool, stream, bytes, default }),
        4 => which().prop_map(Step::Free),
        1 => which().prop_map(Step::Drop),
        1 => prop::option::of(which()).prop_map(Step::Empty),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn the_table_agrees_with_the_heaps(
        steps in prop::collection::vec(step(), 1..60),
        config in prop::sample::select(vec!["", "backing:segments", "limit_mb:64", "backing:segments,limit_mb:200"]),
        device in prop::sample::select(vec!["16GiB", "16GiB,addresses=64MiB,violations=panic"]),
    ) {
        let (allocator, streams) = setup_on(device, config);
        let (mut pools, mut blocks): (Vec<PrivatePool>, Vec<Allocation>) = (Vec::new(), Vec::new());
        for step in steps {
            match step {
                Step::Create { lends, no_split } => {
                    pools.push(allocator.create_pool(PoolOptions { use_on_oom: lends, no_split, ..PoolOptions::default() }).unwrap());
                }
                Step::Alloc { pool, stream, bytes, default } => {
                    let granted = match pools.get(pool.index(pools.len().max(1))).filter(|_| !default) {
                        Some(pool) => pool.alloc_bytes(bytes, &streams[stream]),
                        None => allocator.alloc_bytes(bytes, &streams[stream]),
                    };
                    blocks.extend(granted.ok());
                }
                Step::Free(which) if !blocks.is_empty() => drop(blocks.swap_remove(which.index(blocks.len()))),
                Step::Drop(which) if !pools.is_empty() => drop(pools.swap_remove(which.index(pools.len()))),
                Step::Empty(Some(which)) if !pools.is_empty() => {
                    pools[which.index(pools.len())].empty_cache().unwrap();
                }
                Step::Empty(None) => {
                    allocator.empty_cache().unwrap();
                }
                _ => {}
            }
            check(&allocator.state().lock(), false)?;
        }
        drop((pools, blocks));
        allocator.empty_cache().unwrap();
        prop_assert_eq!(allocator.state().shared().pools.places(), 0);
    }
}
