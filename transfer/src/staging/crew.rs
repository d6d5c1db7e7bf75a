//! The threads that work on a ring: how its tasks are done with page-locked memory and a device.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_device::Tick;
use aquifer_device::sim::defer_panics_here;

use super::config::StagingConfig;
use super::copies::{self, Ended};
use super::floor::{Floor, Hands};
use super::on_host::OnHost;
use super::ring::CHUNK_BYTES_LEAST;
use super::task::{After, Done, Task, Way};
use super::tune;
use super::work::{Chunk, Piece, Work, fill, guarded, land, send};
use crate::errands;
use crate::error::TransferError;
use crate::pinned::{Keeper, PinnedPool};

/// A ring with its threads. Each thread keeps it alive.
pub(super) struct Crew {
    pool: PinnedPool,
    config: StagingConfig,
    pub(super) floor: Floor<Arc<Work>, Chunk, Tick, Arc<OnHost>>,
    pub(super) tally: Tally,
}

/// What the threads did so far.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) uploaded: AtomicU64,
    pub(super) downloaded: AtomicU64,
    pub(super) copy_ns: AtomicU64,
    pub(super) storage_ns: AtomicU64,
    pub(super) chunk_wait_ns: AtomicU64,
    pub(super) arrival_wait_ns: AtomicU64,
}

impl Crew {
    pub(super) fn new(pool: &PinnedPool, config: StagingConfig) -> Arc<Crew> {
        let crew = Arc::new(Crew { pool: pool.clone(), config, floor: Floor::new(), tally: Tally::default() });
        let keeper: Weak<Crew> = Arc::downgrade(&crew);
        pool.add_keeper(keeper);
        crew
    }

    /// Takes a job in.
    pub(super) fn submit(self: &Arc<Self>, work: Work) -> Result<(), TransferError> {
        self.floor.submit(work.order(), self)
    }

    /// Takes a copy between host memory in, which comes after nothing.
    pub(super) fn submit_copy(self: &Arc<Self>, copy: OnHost) {
        let bytes = copy.bytes();
        self.floor.submit_copy(Arc::new(copy), bytes, self);
    }

    /// A chunk, beside `others` bytes of them. Half of a pool with a limit is left to small copies and to the caller, so that they go on
    /// while the ring is at work; the other half holds two chunks at least, or one that cannot be smaller.
    fn chunk(&self, bytes: usize, others: usize) -> Result<Chunk, TransferError> {
        let wanted = bytes + others.max(bytes);
        let is_smallest = others == 0 && bytes < 2 * CHUNK_BYTES_LEAST;
        if !is_smallest && self.pool.limit().is_some_and(|limit| wanted as u64 > limit / 2) {
            return Err(self.pool.refusal(bytes));
        }
        self.pool.alloc(bytes)
    }

    /// Reads a source or writes a target, and notes the time that took.
    fn copy(
        &self,
        piece: &mut Piece,
        step: impl FnOnce(&mut Piece) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        let time = if piece.work.is_storage() { &self.tally.storage_ns } else { &self.tally.copy_ns };
        timed(time, || step(piece))
    }

    fn fill(&self, piece: &mut Piece) -> Result<Tick, TransferError> {
        self.copy(piece, fill)?;
        self.send(piece, Way::Up)
    }

    fn send(&self, piece: &mut Piece, way: Way) -> Result<Tick, TransferError> {
        let tick = send(piece, way)?;
        let bytes = if way == Way::Up { &self.tally.uploaded } else { &self.tally.downloaded };
        bytes.fetch_add(piece.range.end - piece.range.start, Ordering::Relaxed);
        Ok(tick)
    }
}

impl Keeper for Crew {
    fn give_back(&self) -> bool {
        // Chunks that copies still use go back with the ticks of these.
        !self.floor.strip_idle().is_empty()
    }
}

impl Hands<Arc<Work>, Chunk, Tick, Arc<OnHost>> for Arc<Crew> {
    fn perform(&self, task: Task<Arc<Work>, Chunk, Tick>) -> Done<Arc<Work>, Chunk, Tick> {
        match task {
            Task::Tune => Done::Tuned(self.config.sizes(tune::or_assumed(|| tune::choose(&self.config, &self.pool)))),
            Task::Grow { bytes, others } => Done::Grown(guarded(DRIVER, || self.chunk(bytes, others))),
            Task::Fill(mut piece) => match guarded(DRIVER, || self.fill(&mut piece)) {
                Ok(tick) => Done::Sent(piece, tick),
                Err(error) => Done::Failed(piece, error),
            },
            Task::Fetch(mut piece) => match guarded(DRIVER, || self.send(&mut piece, Way::Down)) {
                Ok(tick) => Done::Sent(piece, tick),
                Err(error) => Done::Failed(piece, error),
            },
            Task::Land(mut piece) => match guarded(DRIVER, || self.copy(&mut piece, |piece| land(piece))) {
                Ok(()) => Done::Landed(piece),
                Err(error) => Done::Failed(piece, error),
            },
            Task::Wait(flight) => {
                let Tally { chunk_wait_ns, arrival_wait_ns, .. } = &self.tally;
                let time = if flight.way == Way::Up { chunk_wait_ns } else { arrival_wait_ns };
                let waited = timed(time, || guarded(DRIVER, || Ok(flight.tick.synchronize()?)));
                Done::Waited(flight, waited)
            }
        }
    }

    fn settle(&self, after: After<Arc<Work>, Chunk>) {
        for (work, result) in after.ended {
            // No thread has the job in hand any more, so this is the last of it.
            if let Some(work) = Arc::into_inner(work) {
                work.end(result);
            }
        }
        drop(after.surplus);
        // The job may have had the last buffer of an allocator that nobody else has any more.
        aquifer_allocator::internal::close_abandoned();
    }

    fn copy_on_host(&self, piece: &copies::Piece<Arc<OnHost>>) -> Result<(), TransferError> {
        timed(&self.tally.copy_ns, || piece.work.copy(piece.range.clone()))
    }

    fn settle_copies(&self, ended: Vec<Ended<Arc<OnHost>>>) {
        for (copy, result) in ended {
            // Nobody has the copy in hand any more, so this is the last of it.
            if let Some(copy) = Arc::into_inner(copy) {
                copy.end(result);
            }
        }
    }

    fn hire(&self) -> Result<(), TransferError> {
        let crew = self.clone();
        let started = thread::Builder::new().name("aquifer-staging".to_owned()).spawn(move || {
            defer_panics_here();
            errands::on_duty(|| {
                crew.floor.work(&crew);
                drop(crew);
            });
            aquifer_allocator::internal::close_abandoned();
        });
        match started {
            Ok(_) => Ok(()),
            Err(error) => Err(TransferError::Thread { what: "staged transfers", cause: Arc::new(error) }),
        }
    }
}

/// Whose code it is that panics outside of sources and targets.
const DRIVER: &str = "the driver of the device";

fn timed<R>(total_ns: &AtomicU64, call: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = call();
    total_ns.fetch_add(nanoseconds(start.elapsed()), Ordering::Relaxed);
    result
}

pub(super) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
