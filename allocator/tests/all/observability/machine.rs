//! A simulated device with an allocator and what a program holds of it; runs programs of random
//! steps.

use std::sync::Arc;
use std::time::Duration;

use aquifer_allocator::config::Backing;
use aquifer_allocator::{Allocation, Allocator, Config, PoolOptions, PrivatePool};
use aquifer_device::{Device, Stream};
use aquifer_sim::{SimConfig, SimDriver};
use proptest::prelude::*;

/// Bytes of the simulated device: few enough for programs to run out of memory.
const CAPACITY: u64 = 512 << 20;
const STREAMS: usize = 3;
const POOLS: usize = 2;

/// One step of a program. Numbers of what it acts on are taken modulo how many there are.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Alloc { bytes: u64, stream: usize, pool: Option<usize> },
    AllocAligned { bytes: u64, alignment_log2: u32, stream: usize },
    Free { which: usize },
    FreeOn { which: usize, stream: usize },
    Share { which: usize, stream: usize },
    Stall { stream: usize },
    Synchronize { stream: usize },
    Order { first: usize, then: usize },
    Pass,
    EmptyCache,
    Trim { bytes: u64 },
    EmptyPool { pool: usize },
    ReplacePool { pool: usize, use_on_oom: bool, no_split: bool },
}

/// Sizes of both pools, at their borders, and some that are scarce on the device.
fn sizes() -> impl Strategy<Value = u64> {
    let at_borders = prop::sample::select(vec![0, 1, 512, 513, 1 << 20, (1 << 20) + 1, 10 << 20, (10 << 20) - 511]);
    prop_oneof![3 => 1..100_000_u64, 3 => 1_u64..8 << 20, 2 => at_borders, 2 => 8_u64 << 20..64 << 20, 1 => 64_u64 << 20..400 << 20]
}

pub(crate) fn steps(most: usize) -> impl Strategy<Value = Vec<Step>> {
    let stream = || 0..STREAMS;
    let which = any::<usize>;
    let step = prop_oneof![
        12 => (sizes(), stream(), prop::option::weighted(0.25, 0..POOLS))
            .prop_map(|(bytes, stream, pool)| Step::Alloc { bytes, stream, pool }),
        1 => (sizes(), 0_u32..22, stream())
            .prop_map(|(bytes, alignment_log2, stream)| Step::AllocAligned { bytes, alignment_log2, stream }),
        8 => which().prop_map(|which| Step::Free { which }),
        2 => (which(), stream()).prop_map(|(which, stream)| Step::FreeOn { which, stream }),
        4 => (which(), stream()).prop_map(|(which, stream)| Step::Share { which, stream }),
        3 => stream().prop_map(|stream| Step::Stall { stream }),
        1 => stream().prop_map(|stream| Step::Synchronize { stream }),
        1 => (stream(), stream()).prop_map(|(first, then)| Step::Order { first, then }),
        2 => Just(Step::Pass),
        1 => Just(Step::EmptyCache),
        1 => (0..CAPACITY).prop_map(|bytes| Step::Trim { bytes }),
        1 => (0..POOLS).prop_map(|pool| Step::EmptyPool { pool }),
        1 => (0..POOLS, any::<bool>(), any::<bool>())
            .prop_map(|(pool, use_on_oom, no_split)| Step::ReplacePool { pool, use_on_oom, no_split }),
    ];
    prop::collection::vec(step, 1..most)
}

/// Configurations that take different ways through the allocator.
pub(crate) fn configs() -> impl Strategy<Value = Config> {
    let options = prop::sample::select(vec![
        "",
        "cross_stream:off",
        "cross_stream:wait",
        "limit_mb:400",
        "throw_on_cudamalloc_oom:True,limit_mb:200",
        "no_cache:True",
        "headroom_mb:32",
    ]);
    let quarantine = prop::sample::select(vec![Some(0), Some(0), None]);
    (options, prop::sample::select(Backing::ALL), quarantine).prop_map(|(options, backing, quarantine)| {
        let mut config = Config::parse(options).unwrap();
        (config.backing, config.quarantine) = (backing, quarantine);
        config
    })
}

/// An allocation, and the streams that use it beside its own.
struct Held {
    allocation: Allocation,
    stream: usize,
    users: Vec<usize>,
}

pub(crate) struct Machine {
    driver: Arc<SimDriver>,
    pub(crate) allocator: Allocator,
    pools: Vec<PrivatePool>,
    streams: Vec<Stream>,
    held: Vec<Held>,
}

/// An allocator for a simulated device.
pub(crate) fn allocator(config: Config, seed: u64) -> (Arc<SimDriver>, Allocator) {
    let driver = SimDriver::new(SimConfig::new(CAPACITY).seed(seed));
    let allocator = Allocator::new(&Device::new(driver.clone()), config).unwrap();
    (driver, allocator)
}

impl Machine {
    pub(crate) fn new(config: Config, seed: u64) -> Machine {
        let (driver, allocator) = allocator(config, seed);
        let device = allocator.device().clone();
        let pools = (0..POOLS).map(|_| allocator.create_pool(PoolOptions::default()).unwrap()).collect();
        let own = (1..STREAMS).map(|_| device.stream().unwrap());
        let streams = std::iter::once(device.default_stream().clone()).chain(own).collect();
        Machine { driver, allocator, pools, streams, held: Vec::new() }
    }

    pub(crate) fn run(&mut self, step: &Step) {
        match *step {
            Step::Alloc { bytes, stream, pool } => {
                let _route = pool.map(|pool| self.pools[pool].route_thread());
                let result = self.allocator.alloc_bytes(bytes, &self.streams[stream]);
                self.hold(result, stream);
            }
            Step::AllocAligned { bytes, alignment_log2, stream } => {
                let result = self.allocator.alloc_aligned(bytes, 1 << alignment_log2, &self.streams[stream]);
                self.hold(result, stream);
            }
            Step::Free { which } => drop(self.pick(which)),
            Step::FreeOn { which, stream } => {
                if let Some(held) = self.pick(which) {
                    held.users.iter().chain([&held.stream]).for_each(|user| self.order(*user, stream));
                    held.allocation.drop_on(&self.streams[stream]).unwrap();
                }
            }
            Step::Share { which, stream } => {
                if let Some(mut held) = self.pick(which) {
                    held.users.iter().chain([&held.stream]).for_each(|user| self.order(*user, stream));
                    held.allocation.record_stream(&self.streams[stream]).unwrap();
                    self.touch(&held.allocation, stream);
                    held.users.push(stream);
                    self.held.push(held);
                }
            }
            Step::Stall { stream } => {
                self.driver.stall(self.streams[stream].raw(), Duration::from_millis(1)).unwrap();
            }
            Step::Synchronize { stream } => self.streams[stream].synchronize().unwrap(),
            Step::Order { first, then } => self.order(first, then),
            Step::Pass => self.driver.advance(Duration::from_micros(200)),
            Step::EmptyCache => drop(self.allocator.empty_cache().unwrap()),
            Step::Trim { bytes } => drop(self.allocator.trim_to(bytes).unwrap()),
            Step::EmptyPool { pool } => drop(self.pools[pool].empty_cache().unwrap()),
            Step::ReplacePool { pool, use_on_oom, no_split } => {
                self.pools[pool] =
                    self.allocator.create_pool(PoolOptions { use_on_oom, no_split, ..PoolOptions::default() }).unwrap();
            }
        }
        assert_eq!(self.driver.violations(), [], "work on memory that was handed out too early");
    }

    fn hold(&mut self, result: Result<Allocation, aquifer_allocator::AllocError>, stream: usize) {
        match result {
            Ok(allocation) => {
                self.touch(&allocation, stream);
                self.held.push(Held { allocation, stream, users: Vec::new() });
            }
            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
        }
    }

    /// Work on the first and last bytes, which the simulator checks against other streams' work.
    fn touch(&self, allocation: &Allocation, stream: usize) {
        let bytes = allocation.bytes().min(64);
        if bytes > 0 {
            self.streams[stream].fill(allocation.ptr(), 1, bytes).unwrap();
            self.streams[stream].fill(allocation.ptr().offset(allocation.bytes() - bytes), 2, bytes).unwrap();
        }
    }

    fn order(&self, first: usize, then: usize) {
        self.streams[then].wait_for(&self.streams[first].tick()).unwrap();
    }

    fn pick(&mut self, which: usize) -> Option<Held> {
        (!self.held.is_empty()).then(|| self.held.swap_remove(which % self.held.len()))
    }
}
