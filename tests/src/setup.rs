//! The device and the allocator that a program runs on.

use aquifer_allocator::Config;
use aquifer_allocator::config::{Backing, CrossStream};
use proptest::prelude::*;

use crate::MIB;

/// How a program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Everything is freed, then the allocator is dropped.
    FreeFirst,
    /// The allocator is dropped while blocks are live.
    AllocatorFirst,
}

/// What a program runs on, and how it ends.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Memory of the device in bytes.
    pub capacity: u64,
    /// Seed of the simulated device: durations and the order of unordered work.
    pub seed: u64,
    /// The allocator's configuration.
    pub config: Config,
    /// How the program ends.
    pub ending: Ending,
    /// How many steps of the program the device lags behind; 0 for a device that works in virtual
    /// time alone.
    pub lag: u64,
    /// How many small blocks are live when the program begins.
    pub crowd: usize,
}

impl Setup {
    /// A device of `capacity` bytes with seed 0, and the given options.
    pub fn new(capacity: u64, options: &str) -> Setup {
        let config = Config::parse(options).unwrap_or_else(|error| panic!("{options}: {error}"));
        Setup { capacity, seed: 0, config, ending: Ending::FreeFirst, lag: 0, crowd: 0 }
    }
}

fn config(backing: Backing) -> impl Strategy<Value = Config> {
    let cross_stream = prop::sample::select(vec![CrossStream::Off, CrossStream::Ready, CrossStream::Wait]);
    let mib = |from: u64, to: u64| (from..to).prop_map(|mib| mib * MIB);
    (
        cross_stream,
        (prop::option::weighted(0.3, mib(20, 200)), prop_oneof![4 => Just(0), 1 => mib(1, 40)]),
        prop::option::weighted(0.5, prop::sample::select(vec![2 * MIB, 4 * MIB, 8 * MIB, 32 * MIB])),
        prop_oneof![4 => Just(0_u32), 1 => 1_u32..2000],
        (prop::bool::weighted(0.1), prop::bool::weighted(0.08)),
    )
        .prop_map(move |(cross_stream, (limit, headroom), frame, history, (fail_fast, no_cache))| {
            let mut config = Config::default();
            config.backing = backing;
            config.cross_stream = cross_stream;
            (config.limit, config.headroom) = (limit, headroom);
            config.frame = frame;
            config.history = history;
            (config.fail_fast, config.no_cache) = (fail_fast, no_cache);
            config
        })
}

/// Any setup with memory from the given backing.
pub fn setup(backing: Backing) -> impl Strategy<Value = Setup> {
    let ending = prop_oneof![3 => Just(Ending::FreeFirst), 1 => Just(Ending::AllocatorFirst)];
    (48_u64..260, any::<u64>(), config(backing), ending).prop_map(|(mib, seed, config, ending)| Setup {
        capacity: mib * MIB,
        seed,
        config,
        ending,
        lag: 0,
        crowd: 0,
    })
}

/// As [`setup`], with a device that lags behind the program.
pub fn lagging(backing: Backing) -> impl Strategy<Value = Setup> {
    (setup(backing), 1_u64..60).prop_map(|(setup, lag)| Setup { lag, ..setup })
}

/// As [`setup`], with so many small blocks that their records do not fit the processor's caches
/// (`heap/deferred.rs` of the allocator).
pub fn crowded(backing: Backing) -> impl Strategy<Value = Setup> {
    (setup(backing), prop_oneof![2 => Just(0), 1 => 1_u64..60]).prop_map(|(setup, lag)| {
        let mut config = setup.config;
        config.no_cache = false;
        Setup { lag, crowd: 6000, config, ..setup }
    })
}
