//! The ring as a pure state machine: it assigns pieces of jobs to chunks, and hands out tasks.
//!
//! A job is one transfer. Pieces of at most a chunk go through chunks of pinned memory: an
//! upload fills the chunk and sends it to the device, a download fetches into the chunk and stores
//! the contents. [`Ring::next`] returns the next task, and [`Ring::complete`] takes its result.
//! Nothing here calls a driver, waits or locks.
//!
//! Invariants:
//! * a chunk is in one place: free, in one task, flying (a copy on the device uses it), or arrived
//!   (its contents are to be stored). It moves by value, and [`Ring::complete`] takes it back from
//!   a task;
//! * every byte of a job that does not fail is begun once, in order, and a job ends once, when no
//!   task has a piece of it;
//! * no job begins a piece while a more urgent one may;
//! * jobs of one priority alternate by the piece: while a job may begin one and holds less than its
//!   share, every other job of its priority begins at most one piece;
//! * at most one task waits for each stream: later copies of a stream are not done earlier;
//! * a stream holds few chunks until copies of it are seen to be done, and never all: chunks that
//!   it holds while its stream stands still, for instance behind a long kernel, are not available
//!   to others (`windows`).

use std::collections::{BTreeMap, VecDeque};

use super::task::{Flight, Followup, JobId, Piece, Submission, Task, TaskResult, Way};
use super::windows::{self, Windows};
use crate::config::{PAGE, Sizes};
use crate::error::TransferError;

#[derive(Debug)]
struct JobState<J> {
    order: Submission<J>,
    /// Bytes that were begun.
    begun: u64,
    /// Pieces begun and neither sent (uploads) nor stored (downloads).
    open: usize,
    /// Pieces in tasks.
    in_use: usize,
    /// Chunks that it holds: in tasks, flying or arrived.
    held: usize,
    failed: Option<TransferError>,
}

impl<J> JobState<J> {
    fn is_begun(&self) -> bool {
        self.begun == self.order.bytes
    }
}

/// The staging ring. See the module's documentation.
#[derive(Debug)]
pub(super) struct Ring<J, C> {
    sizes: Sizes,
    /// Bytes of the chunks that there are, or of those to be had next.
    chunk_bytes: usize,
    /// Chunks that there are.
    chunks: usize,
    /// Chunks that tasks are allocating.
    growing: usize,
    /// Chunks that the ring aims for, as far as memory allows.
    target: usize,
    free: Vec<C>,
    flying: VecDeque<Flight<C>>,
    arrived: VecDeque<Flight<C>>,
    jobs: BTreeMap<JobId, JobState<J>>,
    next_job: JobId,
    /// Jobs with pieces that were not begun, in the order in which they go on: those of lower
    /// priority numbers first.
    queued: VecDeque<JobId>,
    /// The chunks that each stream holds.
    windows: Windows,
    /// Streams that a task waits for.
    watched: Vec<u32>,
    /// The error of a lost device.
    lost: Option<TransferError>,
}

/// The kind of the next task. [`NextStep::Begin`] has the index of a queued job, [`NextStep::Wait`]
/// that of a flight.
enum NextStep {
    Store,
    Begin(usize),
    Grow,
    Wait(usize),
}

/// The size of the smallest chunk where memory is short, in bytes.
pub(super) const CHUNK_BYTES_LEAST: usize = 64 << 10;

impl<J: Clone, C> Ring<J, C> {
    /// A ring without chunks.
    pub(super) fn new(sizes: Sizes) -> Self {
        Ring {
            sizes,
            chunk_bytes: sizes.chunk_bytes,
            chunks: 0,
            growing: 0,
            target: sizes.chunks,
            free: Vec::new(),
            flying: VecDeque::new(),
            arrived: VecDeque::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            queued: VecDeque::new(),
            windows: Windows::default(),
            watched: Vec::new(),
            lost: None,
        }
    }

    /// The configured sizes.
    pub(super) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Chunks that there are, and the size of each in bytes.
    pub(super) fn chunks(&self) -> (usize, usize) {
        (self.chunks, self.chunk_bytes)
    }

    /// Whether no job is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Takes all chunks out that no task has.
    pub(super) fn strip(&mut self) -> Vec<C> {
        let used = std::mem::take(&mut self.flying).into_iter().chain(std::mem::take(&mut self.arrived));
        let used: Vec<_> = used.inspect(|flight| self.windows.release(flight.stream)).collect();
        let chunks: Vec<C> = self.free.drain(..).chain(used.into_iter().map(|flight| flight.chunk)).collect();
        self.chunks -= chunks.len();
        chunks
    }

    /// Accepts a job. Retries to allocate missing chunks.
    ///
    /// # Errors
    /// The device is lost.
    pub(super) fn submit(&mut self, order: Submission<J>) -> Result<(), TransferError> {
        if let Some(error) = &self.lost {
            return Err(error.clone());
        }
        let (id, priority) = (self.next_job, order.priority);
        self.next_job += 1;
        self.jobs.insert(id, JobState { order, begun: 0, open: 0, in_use: 0, held: 0, failed: None });
        self.queue(id, priority);
        self.target = self.sizes.chunks;
        if self.chunks + self.growing == 0 {
            self.chunk_bytes = self.sizes.chunk_bytes;
        }
        Ok(())
    }

    /// Whether [`Ring::next`] has a task.
    pub(super) fn has_task(&self) -> bool {
        self.step().is_some()
    }

    /// The next task, if there is one before another completes or a job comes.
    pub(super) fn next(&mut self) -> Option<Task<J, C>> {
        match self.step()? {
            NextStep::Store => self.store(),
            NextStep::Begin(index) => self.begin(index),
            NextStep::Grow => {
                let (bytes, others) = (self.chunk_bytes, (self.chunks + self.growing) * self.chunk_bytes);
                self.growing += 1;
                Some(Task::Grow { bytes, others })
            }
            NextStep::Wait(index) => {
                let flight = self.flying.remove(index)?;
                self.watched.push(flight.stream);
                Some(Task::Wait(flight))
            }
        }
    }

    /// Tasks that free chunks come first. A task waits for a chunk only if a job needs it or its
    /// contents.
    fn step(&self) -> Option<NextStep> {
        if !self.arrived.is_empty() {
            return Some(NextStep::Store);
        }
        let wanting = !self.queued.is_empty();
        let next = self.next_queued();
        if let Some(index) = next.filter(|_| !self.free.is_empty()) {
            return Some(NextStep::Begin(index));
        }
        // Also before the only stream may hold them: it may soon.
        let most = if next.is_some() { self.target } else { windows::most(self.target) };
        let to_come = self.growing + self.free.len();
        if wanting && self.chunks + self.growing < most && to_come < self.pieces_not_begun(to_come + 1) {
            return Some(NextStep::Grow);
        }
        let is_needed = |flight: &Flight<C>| wanting || (flight.way == Way::Down && self.is_alive(flight.id));
        let first = self.flying.iter().position(|flight| is_needed(flight) && !self.watched.contains(&flight.stream));
        first.map(NextStep::Wait)
    }

    /// The number of pieces that were not begun, counted up to `enough`.
    fn pieces_not_begun(&self, enough: usize) -> usize {
        let chunk_bytes = self.chunk_bytes.max(1) as u64;
        let mut pieces = 0;
        for entry in self.queued.iter().filter_map(|id| self.jobs.get(id)) {
            if pieces >= enough {
                break;
            }
            let of_this = (entry.order.bytes - entry.begun).div_ceil(chunk_bytes);
            pieces = pieces.saturating_add(usize::try_from(of_this).unwrap_or(usize::MAX));
        }
        pieces
    }

    fn is_alive(&self, id: JobId) -> bool {
        self.jobs.get(&id).is_some_and(|entry| entry.failed.is_none())
    }

    fn store(&mut self) -> Option<Task<J, C>> {
        let Flight { id, range, chunk, .. } = self.arrived.pop_front()?;
        // Pieces of failed jobs are not in `arrived`.
        let entry = self.jobs.get_mut(&id)?;
        entry.in_use += 1;
        Some(Task::Store(Piece { id, work: entry.order.work.clone(), range, chunk }))
    }

    /// The index of the first queued job that may have another chunk: the job and its stream hold
    /// less than their shares.
    fn next_queued(&self) -> Option<usize> {
        self.queued.iter().position(|id| self.jobs.get(id).is_some_and(|entry| self.may_hold_more(entry)))
    }

    fn may_hold_more(&self, entry: &JobState<J>) -> bool {
        // Less urgent jobs do not reduce the share. Rounded up.
        let share = self.target.div_ceil(self.queued_up_to(entry.order.priority).max(1));
        entry.held < share && self.windows.may_hold_more(entry.order.stream, self.target)
    }

    /// The number of queued jobs of at least this urgency.
    fn queued_up_to(&self, priority: i32) -> usize {
        self.queued.partition_point(|id| self.jobs.get(id).is_some_and(|entry| entry.order.priority <= priority))
    }

    /// Queues a job behind the others of its priority.
    fn queue(&mut self, id: JobId, priority: i32) {
        self.queued.insert(self.queued_up_to(priority), id);
    }

    /// Begins a piece of the queued job with this index.
    fn begin(&mut self, index: usize) -> Option<Task<J, C>> {
        let id = self.queued.remove(index)?;
        let entry = self.jobs.get_mut(&id)?;
        let chunk = self.free.pop()?;
        let start = entry.begun;
        let shorter = if start == 0 { entry.order.phase } else { 0 };
        let most = (self.chunk_bytes as u64).saturating_sub(shorter).max(1);
        entry.begun = start.saturating_add(most).min(entry.order.bytes);
        entry.open += 1;
        entry.in_use += 1;
        entry.held += 1;
        self.windows.hold(entry.order.stream);
        let piece = Piece { id, work: entry.order.work.clone(), range: start..entry.begun, chunk };
        let (way, priority) = (entry.order.way, entry.order.priority);
        if !entry.is_begun() {
            self.queue(id, priority);
        }
        Some(if way == Way::Up { Task::Fill(piece) } else { Task::Fetch(piece) })
    }

    /// Accepts the result of a task.
    pub(super) fn complete(&mut self, done: TaskResult<J, C>) -> Followup<J, C> {
        let mut after = Followup::default();
        match done {
            TaskResult::Grown(grown) => self.grown(grown, &mut after),
            TaskResult::Sent(piece) => self.sent(piece, &mut after),
            TaskResult::Stored(piece) => {
                let id = self.put_down(piece, true, &mut after);
                self.end_if_done(id, &mut after);
            }
            TaskResult::Failed(piece, error) => {
                let id = self.put_down(piece, false, &mut after);
                self.fail(id, error, &mut after);
            }
            TaskResult::Waited(flight, waited) => self.waited(flight, waited, &mut after),
        }
        after
    }

    fn grown(&mut self, grown: Result<C, TransferError>, after: &mut Followup<J, C>) {
        self.growing -= 1;
        match grown {
            Ok(chunk) => {
                self.chunks += 1;
                self.keep(chunk, after);
            }
            Err(error) if error.is_device_lost() => self.lose(error, after),
            Err(_) if self.chunks + self.growing > 0 => self.target = self.chunks + self.growing,
            Err(_) if self.chunk_bytes >= 2 * CHUNK_BYTES_LEAST => {
                self.chunk_bytes = self.chunk_bytes / 2 / PAGE * PAGE;
                self.target = self.sizes.chunks;
            }
            Err(error) => self.fail_all(&error, after),
        }
    }

    fn sent(&mut self, piece: Piece<J, C>, after: &mut Followup<J, C>) {
        let Piece { id, work, range, chunk } = piece;
        drop(work);
        let Some(entry) = self.jobs.get_mut(&id) else { return self.discard(chunk, after) };
        entry.in_use -= 1;
        let (way, stream) = (entry.order.way, entry.order.stream);
        if way == Way::Up {
            entry.open -= 1;
        }
        if self.lost.is_some() {
            self.windows.release(stream);
            self.discard(chunk, after);
        } else {
            self.flying.push_back(Flight { id, way, stream, range, chunk });
        }
        self.end_if_done(id, after);
    }

    fn waited(&mut self, flight: Flight<C>, waited: Result<(), TransferError>, after: &mut Followup<J, C>) {
        self.watched.retain(|&stream| stream != flight.stream);
        let (id, stream) = (flight.id, flight.stream);
        if waited.is_ok() {
            self.windows.copy_is_done(stream);
        }
        match waited {
            Ok(()) if flight.way == Way::Down && self.is_alive(id) && self.lost.is_none() => {
                self.arrived.push_back(flight);
            }
            Ok(()) => self.recycle(id, Some(stream), flight.chunk, after),
            Err(error) => {
                self.recycle(id, Some(stream), flight.chunk, after);
                if error.is_device_lost() {
                    self.lose(error, after);
                } else if flight.way == Way::Down {
                    self.fail(id, error, after);
                }
                // The next fill of the chunk waits for the copy again.
            }
        }
    }

    /// Takes a piece back from a task, and frees its chunk. Returns its job.
    fn put_down(&mut self, piece: Piece<J, C>, is_stored: bool, after: &mut Followup<J, C>) -> JobId {
        let Piece { id, work, chunk, .. } = piece;
        // Dropped first, so that `after` has the last reference.
        drop(work);
        let stream = self.jobs.get_mut(&id).map(|entry| {
            entry.in_use -= 1;
            entry.open -= usize::from(is_stored);
            entry.order.stream
        });
        self.recycle(id, stream, chunk, after);
        id
    }

    /// Frees a chunk that a job held on a stream.
    fn recycle(&mut self, id: JobId, stream: Option<u32>, chunk: C, after: &mut Followup<J, C>) {
        if let Some(entry) = self.jobs.get_mut(&id) {
            entry.held -= 1;
        }
        stream.into_iter().for_each(|stream| self.windows.release(stream));
        self.keep(chunk, after);
    }

    fn keep(&mut self, chunk: C, after: &mut Followup<J, C>) {
        if self.lost.is_some() { self.discard(chunk, after) } else { self.free.push(chunk) }
    }

    fn discard(&mut self, chunk: C, after: &mut Followup<J, C>) {
        self.chunks -= 1;
        after.surplus.push(chunk);
    }

    /// Fails a job: no more of it is begun, and it ends when no task has a piece of it.
    fn fail(&mut self, id: JobId, error: TransferError, after: &mut Followup<J, C>) {
        if error.is_device_lost() {
            return self.lose(error, after);
        }
        if let Some(entry) = self.jobs.get_mut(&id) {
            entry.failed.get_or_insert(error);
        }
        self.queued.retain(|&queued| queued != id);
        let (of_it, others) = std::mem::take(&mut self.arrived).into_iter().partition(|flight| flight.id == id);
        self.arrived = others;
        let of_it: VecDeque<Flight<C>> = of_it;
        for flight in of_it {
            self.recycle(id, Some(flight.stream), flight.chunk, after);
        }
        self.end_if_done(id, after);
    }

    /// Fails all jobs.
    pub(super) fn fail_all(&mut self, error: &TransferError, after: &mut Followup<J, C>) {
        for id in self.jobs.keys().copied().collect::<Vec<_>>() {
            self.fail(id, error.clone(), after);
        }
    }

    /// The device is lost: all jobs fail, and no chunk is used again.
    fn lose(&mut self, error: TransferError, after: &mut Followup<J, C>) {
        if self.lost.is_none() {
            self.queued.clear();
            after.surplus.extend(self.strip());
            for entry in self.jobs.values_mut() {
                entry.failed.get_or_insert_with(|| error.clone());
            }
            self.lost = Some(error);
        }
        for id in self.jobs.keys().copied().collect::<Vec<_>>() {
            self.end_if_done(id, after);
        }
    }

    /// Ends a job once no task has a piece of it and it failed or all of it is done.
    fn end_if_done(&mut self, id: JobId, after: &mut Followup<J, C>) {
        let is_done = |entry: &JobState<J>| {
            entry.in_use == 0 && (entry.failed.is_some() || (entry.open == 0 && entry.is_begun()))
        };
        if self.jobs.get(&id).is_some_and(is_done)
            && let Some(entry) = self.jobs.remove(&id)
        {
            after.ended.push((entry.order.work, entry.failed.map_or(Ok(()), Err)));
        }
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
