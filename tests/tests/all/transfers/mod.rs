//! Transfers: random programs beside a model, faults, and named tests.

mod bare_work;
mod batches;
mod copies;
mod foreign_code;
mod op;
mod pains;
mod pains_pinned;
mod peers;
mod programs;
mod sleep;
mod spills;
mod tensors;
mod world;

use aquifer::device::sim::SimConfig;
use aquifer::memory::Config;
use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Allocator, Buffer, Device, Stream};
use aquifer_tests::{MIB, Subject};
use aquifer_transfer::StagingConfig;

/// Names the variable that says how many threads the staging ring has.
pub(crate) const STAGING_THREADS: &str = "AQUIFER_TEST_STAGING_THREADS";

/// A device with a transfer runtime.
struct Bench {
    driver: Subject,
    device: Device,
    transfer: Transfer,
    stream: Stream,
}

impl Bench {
    fn new() -> Bench {
        Bench::seeded(0)
    }

    fn seeded(seed: u64) -> Bench {
        let driver = Subject::open(&SimConfig::new(256 * MIB).seed(seed));
        let device = driver.device();
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let threads = std::env::var(STAGING_THREADS).ok().and_then(|threads| threads.parse().ok());
        let staging = threads.map_or(StagingConfig::default(), |threads| StagingConfig::default().threads(threads));
        let transfer = Transfer::with_config(&allocator, TransferConfig::default().staging(staging)).unwrap();
        let stream = device.stream().unwrap();
        Bench { driver, device, transfer, stream }
    }

    fn alloc(&self, len: u64) -> Buffer<u8> {
        self.transfer.allocator().alloc(usize::try_from(len).unwrap(), &self.stream).unwrap()
    }

    fn alloc_zeroed(&self, len: u64) -> Buffer<u8> {
        let zeroed = self.transfer.allocator().alloc_bytes_zeroed(len, &self.stream).unwrap();
        self.transfer.allocator().buffer_of(zeroed, &self.stream).unwrap()
    }

    /// Gives everything back, and panics if something is missing or was touched out of order.
    fn finish(self) {
        let allocator = self.transfer.allocator().clone();
        let pinned = self.transfer.pinned().clone();
        drop(self.transfer);
        self.device.synchronize().unwrap();
        let waiting = std::time::Instant::now();
        // Threads let go of chunks and buffers when they end with a transfer, which nobody waits
        // for if it was cancelled. A prefetcher's thread may begin with one more batch.
        loop {
            pinned.empty_cache().unwrap();
            allocator.empty_cache().unwrap();
            let held = pinned.stats().allocated_bytes.current + allocator.memory_reserved();
            if held == 0 || waiting.elapsed() > std::time::Duration::from_secs(10) {
                break;
            }
            std::thread::yield_now();
        }
        let stats = pinned.stats();
        assert_eq!(
            (stats.active_bytes.current, stats.allocated_bytes.current),
            (0, 0),
            "page-locked memory is missing"
        );
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0), "device memory is missing");
        self.driver.assert_no_violation();
    }
}

/// A length in the host's memory.
fn host(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

/// Bytes that differ from place to place.
fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(|_| next()).collect()
}
