//! Models of threads that share a ring, under a scheduler that explores interleavings. Run by
//! `ci/schedules`.
//!
//! Tasks run without a device. The models find: a task that no thread takes (the scheduler reports
//! the deadlock), a chunk in two tasks, a job that ends twice or while a task has a piece of it.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;

use super::super::task::Way;
use super::*;
use crate::config::PAGE;

/// Explores `model` at random, and with few but well-placed switches.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 2000);
    shuttle::check_pct(move || again(), 1000, 3);
}

/// A job: its pieces in tasks, and its end.
#[derive(Default)]
struct Job {
    in_use: AtomicUsize,
    ended: Mutex<Option<bool>>,
}

struct Workers {
    scheduler: Scheduler<Arc<Job>, Arc<AtomicUsize>>,
    /// Every n-th task fails; none if 0.
    fails: usize,
    /// Starts of threads that fail, from the first on.
    failing_starts: AtomicUsize,
    tasks: AtomicUsize,
}

impl Workers {
    fn new(chunks: usize, threads: usize) -> Workers {
        let scheduler = Scheduler::new(Sizes { chunk_bytes: PAGE, chunks, threads });
        let (failing_starts, tasks) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Workers { scheduler, fails: 0, failing_starts, tasks }
    }

    fn submit(self: &Arc<Self>, way: Way, pieces: u64) -> Arc<Job> {
        let job = Arc::new(Job::default());
        let order =
            Submission { work: job.clone(), way, bytes: pieces * PAGE as u64, phase: 0, stream: 0, priority: 0 };
        self.scheduler.submit(order, self).unwrap();
        job
    }

    fn fails(&self) -> bool {
        self.fails > 0 && (self.tasks.fetch_add(1, Ordering::SeqCst) + 1).is_multiple_of(self.fails)
    }

    /// Ends the threads and waits for them. The scheduler reports a wait without end.
    fn end(&self) {
        self.scheduler.close();
        self.scheduler.join();
    }
}

/// Uses a piece for a while.
fn hold(work: &Job, chunk: &AtomicUsize) {
    assert_eq!(chunk.fetch_add(1, Ordering::SeqCst), 0, "two tasks have one chunk");
    work.in_use.fetch_add(1, Ordering::SeqCst);
    thread::yield_now();
    assert!(work.ended.lock().unwrap().is_none(), "it ended while a task had a piece of it");
    work.in_use.fetch_sub(1, Ordering::SeqCst);
    chunk.fetch_sub(1, Ordering::SeqCst);
}

impl Executor<Arc<Job>, Arc<AtomicUsize>> for Arc<Workers> {
    fn perform(&self, task: Task<Arc<Job>, Arc<AtomicUsize>>) -> TaskResult<Arc<Job>, Arc<AtomicUsize>> {
        match task {
            Task::Grow { .. } => TaskResult::Grown(Ok(Arc::default())),
            Task::Fill(piece) | Task::Fetch(piece) | Task::Store(piece) if self.fails() => {
                TaskResult::Failed(piece, TransferError::Cancelled)
            }
            Task::Fill(piece) | Task::Fetch(piece) => {
                hold(&piece.work, &piece.chunk);
                TaskResult::Sent(piece)
            }
            Task::Store(piece) => {
                hold(&piece.work, &piece.chunk);
                TaskResult::Stored(piece)
            }
            Task::Wait(flight) => {
                thread::yield_now();
                TaskResult::Waited(flight, Ok(()))
            }
        }
    }

    fn settle(&self, after: Followup<Arc<Job>, Arc<AtomicUsize>>) {
        for (job, result) in after.ended {
            assert_eq!(job.in_use.load(Ordering::SeqCst), 0);
            assert!(job.ended.lock().unwrap().replace(result.is_ok()).is_none(), "it ended twice");
        }
    }

    fn spawn(&self) -> Result<(), TransferError> {
        let refused = self.failing_starts.load(Ordering::SeqCst);
        if refused > 0 {
            self.failing_starts.store(refused - 1, Ordering::SeqCst);
            let cause = Arc::new(std::io::ErrorKind::OutOfMemory.into());
            return Err(TransferError::Thread { what: "a model", cause });
        }
        let workers = self.clone();
        thread::spawn(move || workers.scheduler.work(&workers));
        Ok(())
    }
}

fn ended(job: &Job) -> Option<bool> {
    *job.ended.lock().unwrap()
}

#[test]
fn every_job_and_every_thread_ends() {
    explore(|| {
        let workers = Arc::new(Workers::new(2, 2));
        let other = workers.clone();
        let submitter = thread::spawn(move || other.submit(Way::Down, 2));
        let up = workers.submit(Way::Up, 3);
        let down = submitter.join().unwrap();
        workers.end();
        assert_eq!((ended(&up), ended(&down)), (Some(true), Some(true)));
    });
}

#[test]
fn failures_end_their_jobs_and_no_others() {
    explore(|| {
        let workers = Arc::new(Workers { fails: 3, ..Workers::new(1, 2) });
        let jobs = [workers.submit(Way::Up, 2), workers.submit(Way::Down, 2)];
        workers.end();
        assert!(jobs.iter().all(|job| ended(job).is_some()));
    });
}

#[test]
fn a_closed_scheduler_finishes_its_jobs() {
    explore(|| {
        let workers = Arc::new(Workers::new(2, 3));
        let job = workers.submit(Way::Down, 3);
        let closing = workers.clone();
        let closer = thread::spawn(move || closing.scheduler.close());
        closer.join().unwrap();
        workers.scheduler.join();
        assert_eq!(ended(&job), Some(true));
    });
}

#[test]
fn jobs_fail_without_threads_and_succeed_with_one() {
    explore(|| {
        let workers = Arc::new(Workers { failing_starts: AtomicUsize::new(1), ..Workers::new(2, 2) });
        let none = workers.submit(Way::Up, 2);
        assert_eq!(ended(&none), Some(false));
        let job = workers.submit(Way::Up, 3);
        workers.failing_starts.store(1, Ordering::SeqCst);
        workers.end();
        assert_eq!(ended(&job), Some(true));
    });
}
