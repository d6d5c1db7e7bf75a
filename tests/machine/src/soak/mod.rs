//! Soak: threads that allocate, write patterns, pass memory on, copy, verify and free.
//!
//! Every word of a pattern depends on its address and on the operation that wrote it. So memory
//! with two owners at a time, with lost writes, or that is used before it was written reads
//! differently. The device verifies all patterns, at the latest when a block is freed. Streams are
//! shared by all threads, and blocks move between streams and threads, so most operations on a
//! block run on another stream than the previous one; their order is kept by the buffers
//! ([`aquifer_allocator::AccessGuard`]).
//!
//! Small blocks are also written and read by the host, through transfers that are still in flight
//! when the next operations begin.
//!
//! With one thread on a simulated device, the same seed always gives the same run. Several threads
//! are scheduled by the system.

mod block;
mod counts;
mod worker;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use aquifer::kernels::Kernels;
use aquifer::transfer::Transfer;
use aquifer::{Allocator, Stream};
use block::Block;
use crossbeam::channel::{self, Sender};

pub use block::Compared;
pub use counts::{Counts, Mismatch};
use worker::Worker;

/// Why a soak fails, other than by damage.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// The parameters of a soak.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "callers set all parameters")]
pub struct Plan {
    /// Seed of the operations.
    pub seed: u64,
    /// Threads.
    pub threads: u16,
    /// Streams, the default stream among them.
    pub streams: u16,
    /// Bytes that may be held from the device: the allocator's limit.
    pub limit: u64,
    /// Operations of all threads together; unlimited if `None`.
    pub operations: Option<u64>,
    /// The latest time to stop.
    pub until: Option<Instant>,
}

/// The state that workers share.
#[derive(Debug)]
struct Shared<'a> {
    plan: &'a Plan,
    allocator: &'a Allocator,
    transfer: Transfer,
    kernels: Kernels,
    streams: Vec<Stream>,
    /// Channels to the workers, for blocks that are passed on.
    outboxes: Vec<Sender<Block>>,
    /// Operations that have begun.
    begun: &'a AtomicU64,
    /// The user wants no more of them.
    stop: &'a AtomicBool,
    /// A worker failed.
    failed: AtomicBool,
}

impl Shared<'_> {
    /// The number of the next operation; `None` when it is time to stop.
    fn next(&self) -> Option<u64> {
        let is_over = self.failed.load(Ordering::Relaxed) || self.stop.load(Ordering::Relaxed);
        if is_over || self.plan.until.is_some_and(|until| Instant::now() >= until) {
            return None;
        }
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        self.plan.operations.is_none_or(|operations| number < operations).then_some(number)
    }
}

/// Runs a soak on an allocator without other users, and sets its limit. All memory is freed in the
/// end. `begun`, 0 at first, counts operations while they begin. Once `stop` is set, no more begin.
///
/// # Errors
/// When something fails for another reason than lack of memory. Damage is not an error: it is in
/// the counts.
pub fn run(allocator: &Allocator, plan: &Plan, begun: &AtomicU64, stop: &AtomicBool) -> Result<Counts, Failure> {
    let device = allocator.device();
    let new = (1..plan.streams).map(|_| device.stream());
    let streams = std::iter::once(Ok(device.default_stream().clone())).chain(new).collect::<Result<_, _>>()?;
    allocator.set_limit(Some(plan.limit));
    let (outboxes, inboxes): (Vec<_>, Vec<_>) = (0..plan.threads).map(|_| channel::unbounded()).unzip();
    let shared = Shared {
        plan,
        allocator,
        transfer: Transfer::new(allocator)?,
        kernels: Kernels::load(device)?,
        streams,
        outboxes,
        begun,
        stop,
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
    // Blocks that were passed to a worker after it had stopped are verified now.
    let mut counts = Counts::default();
    for worker in workers {
        counts.add(worker.finish()?);
    }
    counts.peak_reserved_bytes = allocator.stats().reserved_bytes.all.peak;
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer::Device;
    use aquifer::device::sim::{SimConfig, SimDriver};
    use aquifer::memory::Config;

    fn soaked(seed: u64, threads: u16, options: &str) -> (Counts, Allocator) {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30).seed(seed)));
        let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
        let plan = Plan { seed, threads, streams: 3, limit: 16 << 20, operations: Some(600), until: None };
        (run(&allocator, &plan, &AtomicU64::new(0), &AtomicBool::new(false)).unwrap(), allocator)
    }

    #[test]
    fn nothing_is_damaged_and_everything_goes_back() {
        for (seed, options) in [(1, ""), (2, "backing:segments"), (3, "cross_stream:wait")] {
            for threads in [1, 3] {
                let (counts, allocator) = soaked(seed, threads, options);
                assert_eq!((counts.operations, &counts.mismatches[..]), (600, &[][..]), "seed {seed}, {options}");
                // With several threads the schedule decides whether memory runs out.
                assert!(
                    (counts.ooms > 0 || threads > 1)
                        && counts.blocks_verified > 100
                        && counts.copies > 0
                        && counts.uploads > 0
                        && counts.downloads > 0,
                    "{counts:?}"
                );
                assert!(counts.peak_reserved_bytes <= 16 << 20);
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
