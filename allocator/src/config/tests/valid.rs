//! What a configuration that is valid promises, also if it was made in code: its option string
//! gives it again, and allocators with it serve or refuse requests.

use aquifer_device::Device;
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

use super::{Backing, Config, CrossStream, MIB, parse};
use crate::{Allocation, Allocator};

/// Sizes that are often valid, and ones at the ends of what is written in full.
fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (11..200_u64).prop_map(|mib| mib * MIB),
        1 => (0..40_u64, 0..2000_u64).prop_map(|(mib, more)| mib * MIB + more),
        1 => (0..64_u32).prop_map(|log2| 1 << log2),
        1 => (0..53_u32).prop_map(|log2| u64::MAX >> 11 << log2),
        1 => 0..1_u64 << 53,
    ]
}

fn fraction() -> impl Strategy<Value = f64> {
    prop_oneof![4 => 0.0..1.0, 1 => any::<f64>(), 1 => prop::sample::select(vec![0.0, -0.0, 1.0, f64::NAN, 5e-324])]
}

/// A configuration made in code, a few fields of which are set, in their range or not.
fn config() -> impl Strategy<Value = Config> {
    fn some<S: Strategy>(of: S) -> impl Strategy<Value = Option<S::Value>> {
        prop::option::weighted(0.2, of)
    }
    let sizes = (some(size()), some(size()), some(size()), some(size()));
    let fractions = (some(fraction()), some(fraction()));
    let others = (any::<u32>(), prop::sample::select(CrossStream::ALL), any::<bool>());
    (sizes, fractions, others).prop_map(|(sizes, fractions, (history, cross_stream, no_cache))| {
        let default = Config::default();
        Config {
            limit: sizes.0,
            headroom: sizes.1,
            granule: sizes.2,
            frame: sizes.3,
            per_process_memory_fraction: fractions.0.unwrap_or(1.0),
            limit_free_fraction: fractions.1,
            history,
            cross_stream,
            no_cache,
            ..default
        }
    })
}

/// Requests of all kinds on a small device; none panics, and no two that are served overlap.
fn play(config: Config) {
    let driver = SimDriver::new(SimConfig::parse("64MiB").unwrap());
    let device = Device::new(driver.clone());
    let stream = device.default_stream();
    let allocator = Allocator::new(&device, config).unwrap();
    let mut held = Vec::new();
    for (turn, bytes) in [1, 3 * MIB, 700, MIB, 12 * MIB, MIB + 1, 5 * MIB + 512, 1 << 40, (1 << 60) - 1, 2 * MIB]
        .into_iter()
        .enumerate()
    {
        held.extend(allocator.alloc_bytes(bytes, stream));
        if turn % 3 == 2 && !held.is_empty() {
            drop(held.swap_remove(0));
        }
    }
    let mut ranges: Vec<_> = held.iter().map(Allocation::range).collect();
    ranges.sort_by_key(|range| range.start);
    assert!(ranges.iter().all(|range| range.start.is_multiple_of(crate::ALIGNMENT)));
    assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start), "{ranges:?}");
    drop(held);
    allocator.empty_cache().unwrap();
    assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
    assert_eq!(driver.take_violations(), []);
}

#[test]
fn a_negative_zero_is_zero() {
    let config = Config { per_process_memory_fraction: -0.0, ..Config::default() };
    assert_eq!(parse(&config.to_string()), config);
}

proptest! {
    #[test]
    fn what_is_valid_can_be_written_and_used(config in config()) {
        if config.validate().is_ok() {
            prop_assert_eq!(&parse(&config.to_string()), &config);
            for backing in [Backing::Paged, Backing::Segments] {
                play(Config { backing, ..config.clone() });
            }
        }
    }
}
