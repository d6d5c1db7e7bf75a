//! What virtual time and seeds make of unordered and of ordered work.

use std::collections::BTreeSet;

use aquifer_device::{Driver, RawStream};
use aquifer_sim::{SimConfig, SimDriver, Violation};
use proptest::prelude::*;

use crate::common::{MIB, Short, device};

/// The last of two writers, over 200 seeds.
fn outcomes(ordered: bool) -> BTreeSet<u8> {
    let run = |seed| {
        let driver = device(seed);
        let (one, two) = (driver.stream(), driver.stream());
        let memory = driver.alloc(MIB).unwrap();
        driver.memset(memory, 1, MIB, one).unwrap();
        if ordered {
            driver.order(one, two);
        }
        driver.memset(memory, 2, MIB, two).unwrap();
        driver.synchronize().unwrap();
        driver.get(memory, 1, one).unwrap()[0]
    };
    (0..200).map(run).collect()
}

#[test]
fn unordered_writers_end_in_both_orders_and_ordered_ones_in_one() {
    assert_eq!(outcomes(false), BTreeSet::from([1, 2]));
    assert_eq!(outcomes(true), BTreeSet::from([2]));
}

/// What a program of random steps leaves: contents, virtual time, violations.
fn run(config: &SimConfig, steps: &[(u8, u8, u8)], orders: bool) -> (Vec<u8>, u64, Vec<String>) {
    let driver = SimDriver::new(config.clone());
    let mut streams = vec![RawStream::LEGACY, RawStream::PER_THREAD];
    streams.extend([driver.stream(), driver.stream(), driver.blocking_stream()]);
    let events: Vec<_> = (0..3).map(|_| driver.event()).collect();
    let memory = driver.alloc(4096).unwrap();
    let host = driver.host_alloc(4096).unwrap();
    let mut last = streams[0];
    for &(what, which, value) in steps {
        let stream = streams[usize::from(which) % streams.len()];
        let place = u64::from(value % 16) * 256;
        if orders && last != stream {
            driver.order(last, stream);
        }
        last = stream;
        match what % 8 {
            0 | 1 => driver.memset(memory.offset(place), value, 256, stream).unwrap(),
            2 => driver.put(memory.offset(place), &[value; 200], stream).unwrap(),
            3 => {
                driver.copy_on_device(memory.offset(place), memory.offset((place + 2048) % 4096), 256, stream).unwrap()
            }
            4 => driver.record(events[usize::from(value) % 3], stream).unwrap(),
            5 => driver.wait(stream, events[usize::from(value) % 3]).unwrap(),
            6 => {
                let _ = driver.query_event(events[usize::from(value) % 3]).unwrap();
            }
            _ => driver.download(host, memory.offset(place), 256, stream),
        }
    }
    driver.synchronize().unwrap();
    // Addresses of pinned memory come from the host's allocator and differ between runs.
    let name = |found: &Violation| {
        format!("{}: {} {:?}", found.kind, found.second, found.first.map(|first| first.to_string()))
    };
    let found = driver.take_violations().iter().map(name).collect();
    (driver.get(memory, 4096, last).unwrap(), driver.now_ns(), found)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn one_seed_is_one_run(steps in prop::collection::vec(any::<(u8, u8, u8)>(), 0..80), seed in any::<u64>()) {
        let config = SimConfig::new(MIB).seed(seed);
        prop_assert_eq!(run(&config, &steps, false), run(&config, &steps, false));
    }

    #[test]
    fn ordered_programs_are_clean_and_the_same_under_every_seed(
        steps in prop::collection::vec(any::<(u8, u8, u8)>(), 0..80),
        seeds in any::<[u64; 2]>(),
    ) {
        let [one, two] = seeds.map(|seed| run(&SimConfig::new(MIB).seed(seed), &steps, true));
        prop_assert_eq!(&one.2, &Vec::<String>::new());
        prop_assert_eq!((one.0, one.2), (two.0, two.2));
    }

    #[test]
    fn programs_without_violations_give_the_same_result_under_every_seed(
        steps in prop::collection::vec(any::<(u8, u8, u8)>(), 0..12),
        seeds in any::<[u64; 3]>(),
    ) {
        // Queries tell the host different things under different seeds, so they are left out.
        let steps: Vec<_> = steps.into_iter().filter(|step| step.0 % 8 != 6).collect();
        let runs = seeds.map(|seed| run(&SimConfig::new(MIB).seed(seed), &steps, false));
        prop_assert_eq!(&runs[0].2, &runs[1].2, "the violations do not depend on the seed");
        if runs[0].2.is_empty() {
            prop_assert!(runs.iter().all(|run| run.0 == runs[0].0));
        }
    }
}

#[test]
fn work_overlaps_across_streams_and_copy_engines() {
    let timed = |streams: usize| {
        let driver = SimDriver::new(SimConfig::new(1 << 30).jitter(false));
        let streams: Vec<_> = (0..streams).map(|_| driver.stream()).collect();
        let memory = driver.alloc(512 * MIB).unwrap();
        let host = driver.host_alloc(64 << 20).unwrap();
        let start = driver.now_ns();
        driver.upload(memory, host, 32 << 20, streams[0]);
        let (to, from) = (host.as_ptr() as usize + (32 << 20), memory.offset(64 * MIB));
        driver.download(aquifer_device::HostPtr(to), from, 32 << 20, streams[streams.len() - 1]);
        driver.synchronize().unwrap();
        driver.now_ns() - start
    };
    let (one, two) = (timed(1), timed(2));
    assert!(one > 1_200_000 && two < 700_000, "{one} ns on one stream, {two} ns on two");
}
