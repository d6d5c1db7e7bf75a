//! The worker threads of a ring: they perform its tasks with pinned memory and a device.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use aquifer_device::fork::{self, Mutex};
use aquifer_device::internal::{defer_panics_here, enqueues_expected_work};
use aquifer_device::{Operation, Stream, executor};

use super::ring::CHUNK_BYTES_LEAST;
use super::scheduler::{Executor, Scheduler};
use super::staged_transfer::{Chunk, DeviceEndpoint, HostEndpoint, Piece, StagedTransfer, fill, send, store};
use super::task::{Followup, Task, TaskResult, Way};
use crate::config::{StagingStats, TransferConfig};
use crate::error::TransferError;
use crate::foreign_code::{self, DRIVER, guarded};
use crate::job::Job;
use crate::pinned::PinnedPool;

/// The staging ring of a runtime. Nothing is pinned and no thread runs before its first use.
/// When it is dropped, the transfers in flight complete; then its threads end and its memory goes
/// back to the pool.
pub(crate) struct Staging(pub(super) Arc<Workers>);

impl Staging {
    /// A ring of memory of `pool`.
    pub(crate) fn new(pool: &PinnedPool, config: TransferConfig) -> Staging {
        let scheduler = Scheduler::new(config.sizes());
        let workers = Arc::new(Workers { pool: pool.clone(), scheduler, work: Mutex::default() });
        let idle = Arc::downgrade(&workers);
        // Chunks that copies still use go back with the ticks of these copies.
        pool.set_cache(move || idle.upgrade().is_some_and(|workers| !workers.scheduler.strip_idle().is_empty()));
        Staging(workers)
    }

    /// Begins to copy all bytes between a host end and a device end of one length, by copies on
    /// `stream`, or on `own` where another thread cannot enqueue them there. Both must be streams
    /// of the memory's device, and `own` must not capture. Transfers of lower `priority` go first.
    /// An upload's reservation ends when the last copy is enqueued, that of a download when the
    /// bytes are in the target.
    ///
    /// # Errors
    /// A lost device, and errors of the driver. The job has later errors.
    pub(crate) fn begin(
        &self,
        host: HostEndpoint,
        device: DeviceEndpoint,
        stream: &Stream,
        own: &Stream,
        priority: i32,
    ) -> Result<Arc<Job>, TransferError> {
        fork::check(Operation::CopyToDevice)?;
        let transfer = StagedTransfer::new(host, device, (stream, own), priority)?;
        let job = transfer.job().clone();
        if transfer.bytes() == 0 {
            transfer.end(Ok(()));
        } else {
            self.0.scheduler.submit(transfer.order(), &self.0)?;
        }
        Ok(job)
    }

    /// Sizes and counters.
    pub(crate) fn stats(&self) -> StagingStats {
        let size = self.0.scheduler.size();
        StagingStats {
            chunk_bytes: size.chunk_bytes as u64,
            chunks: size.chunks as u64,
            threads: size.threads as u64,
            ..*self.0.work.lock()
        }
    }
}

impl Drop for Staging {
    /// Waits for nothing: this may be the last handle, dropped by a thread of the ring.
    fn drop(&mut self) {
        if !fork::is_child() {
            self.0.scheduler.close();
        }
    }
}

/// A ring with its worker threads, each of which keeps it alive.
pub(super) struct Workers {
    pool: PinnedPool,
    pub(super) scheduler: Scheduler<Arc<StagedTransfer>, Chunk>,
    /// The bytes that the threads moved, and their time by activity.
    work: Mutex<StagingStats>,
}

impl Workers {
    /// Allocates a chunk for a ring that already has `others` bytes. The ring takes at most half of
    /// a pool with a limit, so that small copies and the caller's buffers fit too. That half holds
    /// two chunks at least, or one of the smallest size.
    fn allocate_chunk(&self, bytes: usize, others: usize) -> Result<Chunk, TransferError> {
        let wanted = bytes + others.max(bytes);
        let is_smallest = others == 0 && bytes < 2 * CHUNK_BYTES_LEAST;
        if !is_smallest && self.pool.limit().is_some_and(|limit| wanted as u64 > limit / 2) {
            return Err(self.pool.refusal(bytes as u64));
        }
        self.pool.alloc(bytes)
    }

    /// Reads a source or writes a target, and counts the time.
    fn copy(
        &self,
        piece: &mut Piece,
        step: impl FnOnce(&mut Piece) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        let start = Instant::now();
        let result = step(piece);
        let mut work = self.work.lock();
        let time = if piece.work.is_storage() { &mut work.time_reading } else { &mut work.time_copying };
        *time += start.elapsed();
        result
    }

    /// Fills the chunk for an upload, and enqueues the copy.
    fn send(&self, mut piece: Piece, way: Way) -> TaskResult<Arc<StagedTransfer>, Chunk> {
        let sent = guarded(DRIVER, || {
            if way == Way::Up {
                self.copy(&mut piece, fill)?;
            }
            send(&mut piece, way)
        });
        if let Err(error) = sent {
            return TaskResult::Failed(piece, error);
        }
        let mut work = self.work.lock();
        let bytes = if way == Way::Up { &mut work.uploaded_bytes } else { &mut work.downloaded_bytes };
        *bytes += piece.range.end - piece.range.start;
        drop(work);
        TaskResult::Sent(piece)
    }
}

impl Executor<Arc<StagedTransfer>, Chunk> for Arc<Workers> {
    fn perform(&self, task: Task<Arc<StagedTransfer>, Chunk>) -> TaskResult<Arc<StagedTransfer>, Chunk> {
        match task {
            Task::Grow { bytes, others } => TaskResult::Grown(guarded(DRIVER, || self.allocate_chunk(bytes, others))),
            Task::Fill(piece) => self.send(piece, Way::Up),
            Task::Fetch(piece) => self.send(piece, Way::Down),
            Task::Store(mut piece) => match guarded(DRIVER, || self.copy(&mut piece, |piece| store(piece))) {
                Ok(()) => TaskResult::Stored(piece),
                Err(error) => TaskResult::Failed(piece, error),
            },
            Task::Wait(flight) => {
                let start = Instant::now();
                let waited = guarded(DRIVER, || flight.chunk.synchronize());
                let mut work = self.work.lock();
                let StagingStats { time_waiting_for_chunks, time_waiting_for_arrivals, .. } = &mut *work;
                let time = if flight.way == Way::Up { time_waiting_for_chunks } else { time_waiting_for_arrivals };
                *time += start.elapsed();
                drop(work);
                TaskResult::Waited(flight, waited)
            }
        }
    }

    fn settle(&self, after: Followup<Arc<StagedTransfer>, Chunk>) {
        for (transfer, result) in after.ended {
            // No task has a piece of it, so this is the last reference.
            if let Some(transfer) = Arc::into_inner(transfer) {
                transfer.end(result);
            }
        }
        drop(after.surplus);
        // The transfer may have held the last buffer of a dropped allocator.
        aquifer_allocator::close_abandoned();
    }

    fn spawn(&self) -> Result<(), TransferError> {
        let workers = self.clone();
        let started = executor::spawn(thread::Builder::new().name("aquifer-staging".to_owned()), move || {
            defer_panics_here();
            enqueues_expected_work();
            foreign_code::with_deferring(true, || {
                workers.scheduler.work(&workers);
                drop(workers);
            });
            aquifer_allocator::close_abandoned();
        });
        match started {
            Ok(_) => Ok(()),
            Err(error) => Err(TransferError::Thread { what: "staged transfers", cause: Arc::new(error) }),
        }
    }
}
