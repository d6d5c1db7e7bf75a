//! Transfers: random programs compared with a model, faults, and defects that other libraries
//! reported.

mod bare_work;
mod batches;
mod copies;
mod elsewhere;
mod foreign_code;
mod interpreter;
mod op;
mod programs;
mod reported;
mod reported_page_locked;
mod sleep;
mod tensors;

use aquifer::transfer::Source;
use aquifer::transfer::{Transfer, TransferConfig};
use aquifer::{Error, Pending, PinnedBuffer};
use aquifer_tests::prelude::*;

/// Names the variable that says how many threads the staging ring has.
pub(crate) const STAGING_THREADS: &str = "AQUIFER_TEST_STAGING_THREADS";

/// New device memory, and a copy of these bytes to it.
fn to_device(by: &Transfer, bytes: Vec<u8>, stream: &Stream) -> Result<Pending<Buffer<u8>>, Error> {
    let mut buffer = by.allocator().alloc(bytes.len(), stream)?;
    Ok(buffer.upload(bytes, by)?.map(|()| buffer))
}

/// A copy to new pinned memory.
fn to_pinned(by: &Transfer, from: &Buffer<u8>) -> Result<Pending<PinnedBuffer<u8>>, Error> {
    from.download(by.pinned().alloc(from.len())?, by)
}

/// A copy to a new vector, which nothing waits for yet.
fn to_vec(by: &Transfer, from: &Buffer<u8>) -> Result<Pending<Vec<u8>>, Error> {
    from.download(vec![0; from.len()], by)
}

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
        let config = threads.map_or(TransferConfig::default(), |threads| TransferConfig::default().threads(threads));
        let transfer = Transfer::with_config(&allocator, config).unwrap();
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

    /// Sends `len` bytes to a new buffer and waits for them.
    fn send(&self, len: usize, bytes: impl Source<u8>) -> Buffer<u8> {
        let mut buffer = self.transfer.allocator().alloc(len, &self.stream).unwrap();
        buffer.upload(bytes, &self.transfer).unwrap().wait().unwrap();
        buffer
    }

    /// The bytes of a buffer.
    fn read(&self, buffer: &Buffer<u8>) -> Vec<u8> {
        buffer.to_vec(&self.transfer).unwrap()
    }

    /// Gives everything back, and panics if something is missing or was touched out of order.
    fn finish(self) {
        let allocator = self.transfer.allocator().clone();
        let pinned = self.transfer.pinned().clone();
        drop(self.transfer);
        self.device.synchronize().unwrap();
        let waiting = std::time::Instant::now();
        // Threads release chunks and buffers when they end with a transfer, a cancelled one, too. A
        // prefetcher's thread may begin with one more batch.
        loop {
            pinned.empty_cache().unwrap();
            allocator.empty_cache().unwrap();
            let held = pinned.stats().allocated_bytes.current + allocator.memory_reserved();
            if held == 0 || waiting.elapsed() > Duration::from_secs(10) {
                break;
            }
            std::thread::yield_now();
        }
        let stats = pinned.stats();
        assert_eq!((stats.active_bytes.current, stats.allocated_bytes.current), (0, 0), "pinned memory is missing");
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0), "device memory is missing");
        self.driver.assert_no_violation();
    }
}

/// A length in the host's memory.
fn host(len: u64) -> usize {
    usize::try_from(len).unwrap()
}
