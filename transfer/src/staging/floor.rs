//! How threads share a ring, and the copies between host memory beside it: which thread takes which task, sleeps or is woken, and when threads
//! start and end.
//!
//! A piece of a staged transfer and a piece of a copy between host memory follow each other in turn where there are both, so neither kind
//! keeps the other from going on. What copies no memory (waiting, enqueuing, getting chunks) is nobody's turn.
//!
//! A thread starts when there is a task and no thread is free, up to a bound; threads sleep when there is no task. Where all of them wait
//! for streams, which may stand still for long, one more thread starts; at most one waits for each stream. Whenever the lock is released
//! while there is a task, one sleeping thread is woken, or a new one starts, which then does the same. So no task is left undone, and one
//! task does not wake many threads. Threads end once the floor is closed and all jobs have ended; the last one releases the chunks.
//!
//! Tasks are done without the lock; it is a leaf: nothing else is locked, and no driver called, under it.

use super::config::Sizes;
use super::copies::{Copies, Ended, Piece};
use super::ring::Ring;
use super::task::{After, Done, Order, Task};
use crate::error::TransferError;
use crate::sync::{Condvar, Mutex, MutexGuard};

/// What the threads of a floor can do.
pub(super) trait Hands<J, C, T, K> {
    /// Does a task. Must not panic: who panics keeps what it was given, and a job would never end.
    fn perform(&self, task: Task<J, C, T>) -> Done<J, C, T>;

    /// Copies a piece between host memory. Must not panic either.
    fn copy_on_host(&self, piece: &Piece<K>) -> Result<(), TransferError>;

    /// Ends jobs, and lets go of chunks.
    fn settle(&self, after: After<J, C>);

    /// Ends copies between host memory.
    fn settle_copies(&self, ended: Vec<Ended<K>>);

    /// Starts a thread that calls [`Floor::work`].
    fn hire(&self) -> Result<(), TransferError>;
}

/// A ring and the threads that work on it.
#[derive(Debug)]
pub(super) struct Floor<J, C, T, K> {
    state: Mutex<State<J, C, T, K>>,
    /// Told of a task, or that threads may end.
    call: Condvar,
}

#[derive(Debug)]
struct State<J, C, T, K> {
    ring: Ring<J, C, T>,
    copies: Copies<K>,
    /// Whether the last piece of memory that was copied is of a copy between host memory.
    copied_on_host: bool,
    /// Threads that run or are about to start.
    threads: usize,
    /// Threads that wait for a task.
    asleep: usize,
    /// Threads that wait for a stream.
    waiting: usize,
    /// Most threads, once one more could not be started.
    threads_max: Option<usize>,
    closed: bool,
}

/// What a thread does next.
enum Step<J, C, T, K> {
    Task(Task<J, C, T>),
    Copy(Piece<K>),
}

impl<J: Clone, C, T, K: Clone> State<J, C, T, K> {
    fn next(&mut self) -> Option<Step<J, C, T, K>> {
        if !self.copied_on_host
            && let Some(piece) = self.copies.next()
        {
            self.copied_on_host = true;
            return Some(Step::Copy(piece));
        }
        let Some(task) = self.ring.next() else { return self.copies.next().map(Step::Copy) };
        if matches!(task, Task::Fill(_) | Task::Land(_)) {
            self.copied_on_host = false;
        }
        Some(Step::Task(task))
    }

    fn has_task(&self) -> bool {
        self.copies.has_piece() || self.ring.has_task()
    }

    fn is_idle(&self) -> bool {
        self.copies.is_idle() && self.ring.is_idle()
    }
}

/// What a floor is made of now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Staff {
    pub(super) sizes: Option<Sizes>,
    pub(super) chunks: usize,
    pub(super) chunk_bytes: usize,
    pub(super) threads: usize,
}

impl<J: Clone, C, T, K: Clone> Floor<J, C, T, K> {
    pub(super) fn new() -> Self {
        let state = State {
            ring: Ring::new(),
            copies: Copies::new(),
            copied_on_host: false,
            threads: 0,
            asleep: 0,
            waiting: 0,
            threads_max: None,
            closed: false,
        };
        Floor { state: Mutex::new(state), call: Condvar::default() }
    }

    /// Takes a job in. Tries for missing threads again.
    ///
    /// # Errors
    /// That of a device that is lost. When no thread can be started at all, the job fails with that.
    pub(super) fn submit(&self, order: Order<J>, hands: &impl Hands<J, C, T, K>) -> Result<(), TransferError> {
        let mut state = self.state.lock();
        state.ring.submit(order)?;
        // What was short then may not be now.
        state.threads_max = None;
        self.release(state, hands);
        Ok(())
    }

    /// Takes a copy between host memory in, of so many bytes, not 0. When no thread can be started at all, it fails with that.
    pub(super) fn submit_copy(&self, work: K, bytes: u64, hands: &impl Hands<J, C, T, K>) {
        let mut state = self.state.lock();
        state.copies.submit(work, bytes);
        // How many threads there may be is known with the ring's sizes.
        state.ring.ask_for_sizes();
        state.threads_max = None;
        self.release(state, hands);
    }

    /// Lets threads end when all jobs have.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.call.notify_all();
    }

    /// Takes all chunks out that nobody has in hand, if no job is under way. The next job gets others.
    pub(super) fn strip_idle(&self) -> Vec<C> {
        let mut state = self.state.lock();
        if state.ring.is_idle() { state.ring.strip() } else { Vec::new() }
    }

    pub(super) fn staff(&self) -> Staff {
        let state = self.state.lock();
        let (chunks, chunk_bytes) = state.ring.chunks();
        Staff { sizes: state.ring.sizes(), chunks, chunk_bytes, threads: state.threads }
    }

    /// What a thread of the floor does, until it ends.
    pub(super) fn work(&self, hands: &impl Hands<J, C, T, K>) {
        let mut state = self.state.lock();
        loop {
            match state.next() {
                Some(Step::Task(task)) => state = self.perform(state, task, hands),
                Some(Step::Copy(piece)) => state = self.copy(state, piece, hands),
                None if state.closed && state.is_idle() => break,
                None => {
                    state.asleep += 1;
                    state = self.call.wait(state);
                    state.asleep -= 1;
                }
            }
        }
        if state.threads == 1 {
            let chunks = state.ring.strip();
            drop(state);
            drop(chunks);
            state = self.state.lock();
        }
        state.threads -= 1;
        drop(state);
        self.call.notify_all();
    }

    fn perform<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<J, C, T, K>>,
        task: Task<J, C, T>,
        hands: &impl Hands<J, C, T, K>,
    ) -> MutexGuard<'a, State<J, C, T, K>> {
        let waits = usize::from(matches!(task, Task::Wait(_)));
        state.waiting += waits;
        self.release(state, hands);
        let done = hands.perform(task);
        state = self.state.lock();
        state.waiting -= waits;
        let after = state.ring.complete(done);
        if after.is_empty() {
            return state;
        }
        self.release(state, hands);
        hands.settle(after);
        self.state.lock()
    }

    fn copy<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<J, C, T, K>>,
        piece: Piece<K>,
        hands: &impl Hands<J, C, T, K>,
    ) -> MutexGuard<'a, State<J, C, T, K>> {
        self.release(state, hands);
        let copied = hands.copy_on_host(&piece);
        state = self.state.lock();
        let Some(ended) = state.copies.complete(piece, copied) else { return state };
        self.release(state, hands);
        hands.settle_copies(vec![ended]);
        self.state.lock()
    }

    /// Releases the lock. If there is a task, somebody is called for it; those who wait for the end are told of it.
    fn release(&self, mut state: MutexGuard<'_, State<J, C, T, K>>, hands: &impl Hands<J, C, T, K>) {
        let ends = state.closed && state.is_idle();
        if ends {
            self.call.notify_all();
        }
        if !state.has_task() {
            return;
        }
        if state.asleep > 0 {
            self.call.notify_one();
            return;
        }
        let bound = state.ring.sizes().map_or(1, |sizes| sizes.threads);
        let enough = state.threads >= state.threads_max.unwrap_or(bound).min(bound);
        if enough && state.waiting < state.threads {
            return;
        }
        state.threads += 1;
        drop(state);
        if let Err(error) = hands.hire() {
            self.not_hired(&error, hands);
        }
    }

    /// Makes do with the threads that there are; without any, the jobs fail, and the next one tries again.
    fn not_hired(&self, error: &TransferError, hands: &impl Hands<J, C, T, K>) {
        let (mut after, mut ended) = (After::default(), Vec::new());
        let mut state = self.state.lock();
        state.threads -= 1;
        if state.threads == 0 {
            state.threads_max = None;
            state.ring.fail_all(error, &mut after);
            ended = state.copies.fail_all(error);
        } else {
            state.threads_max = Some(state.threads);
        }
        drop(state);
        hands.settle(after);
        hands.settle_copies(ended);
    }

    /// Waits until no thread is left, nor a chunk, as is so at some time after [`Floor::close`].
    #[cfg(test)]
    pub(super) fn join(&self) {
        let mut state = self.state.lock();
        while state.threads > 0 {
            state = self.call.wait(state);
        }
    }
}

#[cfg(all(test, aquifer_shuttle))]
#[path = "schedules.rs"]
mod schedules;

#[cfg(all(test, not(aquifer_shuttle)))]
#[path = "floor_tests.rs"]
mod tests;
