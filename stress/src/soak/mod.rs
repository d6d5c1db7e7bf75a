//! Soak: threads that allocate, write patterns, pass memory on, copy, verify and free, for as long
//! as one likes.
//!
//! Every word of a pattern depends on its address and on the operation that wrote it. So memory
//! that has two owners at a time, that is used before it was written, or whose writes are lost,
//! does not read as it should. Everything that is written is verified by the device itself, at the
//! latest when it is freed. Streams are shared by all threads, and blocks move between streams and
//! threads, so most operations on a block run on another stream than the previous one; their order
//! is kept by the buffers ([`aquifer::memory::AccessGuard`]).
//!
//! Small blocks are also written and read by the host, through transfers that are still in flight
//! when the next operations begin.
//!
//! With one thread on a simulated device, the same seed always gives the same run. Several threads
//! are scheduled by the system.

mod block;
mod tally;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use aquifer::kernels::Kernels;
use aquifer::transfer::Transfer;
use aquifer::{Allocator, Stream};
use crossbeam::channel::{self, Sender};

use crate::exit::Failure;
use block::Block;
pub use tally::{Mismatch, Tally};
use worker::Worker;

/// How much is done, and how.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "whoever soaks says all of it")]
pub struct Plan {
    /// Seed of what is done.
    pub seed: u64,
    /// Threads.
    pub threads: u16,
    /// Streams, the default stream among them.
    pub streams: u16,
    /// Bytes that may be held from the device: the allocator's limit.
    pub limit: u64,
    /// Operations of all threads together; `None` for no end.
    pub operations: Option<u64>,
    /// When to stop at the latest.
    pub until: Option<Instant>,
}

/// What workers share.
#[derive(Debug)]
struct Shared<'a> {
    plan: &'a Plan,
    allocator: &'a Allocator,
    transfer: Transfer,
    kernels: Kernels,
    streams: Vec<Stream>,
    /// Where blocks go that another worker is to go on with.
    outboxes: Vec<Sender<Block>>,
    /// Operations begun.
    begun: AtomicU64,
    /// A worker failed.
    failed: AtomicBool,
}

impl Shared<'_> {
    /// The number of the next operation; `None` when it is time to stop.
    fn next(&self) -> Option<u64> {
        if self.failed.load(Ordering::Relaxed) || self.plan.until.is_some_and(|until| Instant::now() >= until) {
            return None;
        }
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        self.plan.operations.is_none_or(|operations| number < operations).then_some(number)
    }
}

/// Runs a soak on an allocator that is used for nothing else, whose limit is set. All memory is
/// freed in the end.
///
/// # Errors
/// When something fails for another reason than lack of memory. Damage is no error: it is in the
/// tally.
pub fn run(allocator: &Allocator, plan: &Plan) -> Result<Tally, Failure> {
    let device = allocator.device();
    let mut streams = vec![device.default_stream().clone()];
    for _ in 1..plan.streams {
        streams.push(device.stream()?);
    }
    allocator.set_limit(Some(plan.limit));
    let (outboxes, inboxes): (Vec<_>, Vec<_>) = (0..plan.threads).map(|_| channel::unbounded()).unzip();
    let shared = Shared {
        plan,
        allocator,
        transfer: Transfer::new(allocator)?,
        kernels: Kernels::load(device)?,
        streams,
        outboxes,
        begun: AtomicU64::new(0),
        failed: AtomicBool::new(false),
    };
    let workers = inboxes.into_iter().enumerate().map(|(number, inbox)| Worker::new(&shared, number, inbox));
    let mut workers = workers.collect::<Result<Vec<_>, Failure>>()?;
    thread::scope(|scope| {
        let running: Vec<_> = workers.iter_mut().map(|worker| scope.spawn(|| worker.run())).collect();
        running
            .into_iter()
            .try_for_each(|running| running.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })?;
    // What was handed to a worker that had stopped is seen to now.
    let mut tally = Tally::default();
    for worker in workers {
        tally.add(worker.finish()?);
    }
    tally.peak_reserved_bytes = allocator.stats().reserved_bytes.all.peak;
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer::Device;
    use aquifer::device::sim::{SimConfig, SimDriver};
    use aquifer::memory::Config;

    fn soaked(seed: u64, threads: u16, options: &str) -> (Tally, Allocator) {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).seed(seed)));
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let plan = Plan { seed, threads, streams: 3, limit: 16 << 20, operations: Some(600), until: None };
        (run(&allocator, &plan).unwrap(), allocator)
    }

    #[test]
    fn nothing_is_damaged_and_everything_goes_back() {
        for (seed, options) in [(1, ""), (2, "backing:segments"), (3, "cross_stream:wait")] {
            for threads in [1, 3] {
                let (tally, allocator) = soaked(seed, threads, options);
                assert_eq!((tally.operations, &tally.mismatches[..]), (600, &[][..]), "seed {seed}, {options}");
                // Whether several threads hold too much at a time depends on how they happen to
                // run.
                assert!(
                    (tally.ooms > 0 || threads > 1)
                        && tally.blocks_verified > 100
                        && tally.copies > 0
                        && tally.uploads > 0
                        && tally.downloads > 0,
                    "{tally:?}"
                );
                assert!(tally.peak_reserved_bytes <= 16 << 20);
                assert_eq!(allocator.memory_allocated(), 0);
                allocator.empty_cache().unwrap();
                let memory = allocator.device().memory_info().unwrap();
                assert_eq!(memory.free, memory.total);
                assert_eq!(allocator.device().driver().take_violation(), None);
            }
        }
    }

    #[test]
    fn one_thread_does_the_same_for_the_same_seed() {
        let [one, two] = [(); 2].map(|()| soaked(7, 1, "").0);
        assert_eq!(format!("{one:?}"), format!("{two:?}"));
    }
}
