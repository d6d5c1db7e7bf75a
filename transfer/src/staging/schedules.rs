//! Models of threads that share a ring, under a scheduler that explores interleavings. Run by `ci/schedules`.
//!
//! Tasks are played without a device. What is looked for: a task that nobody comes for (the scheduler reports the deadlock), a chunk in
//! two hands, a job that ends twice or while somebody has it in hand.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::Arc;

use shuttle::sync::Mutex;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;

use super::super::config::PAGE;
use super::super::copies::PIECE_BYTES;
use super::super::task::Way;
use super::*;

/// Explores `model` at random, and with few but well-placed switches.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let model = Arc::new(model);
    let again = model.clone();
    shuttle::check_random(move || model(), 2000);
    shuttle::check_pct(move || again(), 1000, 3);
}

/// A job: pieces in hands, and how it ended.
#[derive(Default)]
struct Job {
    in_hands: AtomicUsize,
    ended: Mutex<Option<bool>>,
}

struct Crew {
    floor: Floor<Arc<Job>, Arc<AtomicUsize>, (), Arc<Job>>,
    sizes: Sizes,
    /// Tasks that fail: every so many, none if 0.
    fails: usize,
    /// Starts of threads that fail, from the first on.
    idle_agency: AtomicUsize,
    tasks: AtomicUsize,
}

impl Crew {
    fn new(chunks: usize, threads: usize) -> Crew {
        let sizes = Sizes { chunk_bytes: PAGE, chunks, threads };
        let (idle_agency, tasks) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Crew { floor: Floor::new(), sizes, fails: 0, idle_agency, tasks }
    }

    fn submit(self: &Arc<Self>, way: Way, pieces: u64) -> Arc<Job> {
        let job = Arc::new(Job::default());
        let order = Order { work: job.clone(), way, bytes: pieces * PAGE as u64, phase: 0, lane: 0, priority: 0 };
        self.floor.submit(order, self).unwrap();
        job
    }

    fn fails(&self) -> bool {
        self.fails > 0 && (self.tasks.fetch_add(1, Ordering::SeqCst) + 1).is_multiple_of(self.fails)
    }

    /// Lets threads end and waits for them, which the scheduler reports where it lasts for ever.
    fn end(&self) {
        self.floor.close();
        self.floor.join();
    }
}

/// Has a piece in hand for a while.
fn hold(work: &Job, chunk: &AtomicUsize) {
    assert_eq!(chunk.fetch_add(1, Ordering::SeqCst), 0, "two have one chunk");
    work.in_hands.fetch_add(1, Ordering::SeqCst);
    thread::yield_now();
    assert!(work.ended.lock().unwrap().is_none(), "it ended while somebody had it in hand");
    work.in_hands.fetch_sub(1, Ordering::SeqCst);
    chunk.fetch_sub(1, Ordering::SeqCst);
}

impl Hands<Arc<Job>, Arc<AtomicUsize>, (), Arc<Job>> for Arc<Crew> {
    fn perform(&self, task: Task<Arc<Job>, Arc<AtomicUsize>, ()>) -> Done<Arc<Job>, Arc<AtomicUsize>, ()> {
        match task {
            Task::Tune => Done::Tuned(self.sizes),
            Task::Grow { .. } => Done::Grown(Ok(Arc::default())),
            Task::Fill(hand) | Task::Fetch(hand) | Task::Land(hand) if self.fails() => {
                Done::Failed(hand, TransferError::Cancelled)
            }
            Task::Fill(hand) | Task::Fetch(hand) => {
                hold(&hand.work, &hand.chunk);
                Done::Sent(hand, ())
            }
            Task::Land(hand) => {
                hold(&hand.work, &hand.chunk);
                Done::Landed(hand)
            }
            Task::Wait(flight) => {
                thread::yield_now();
                Done::Waited(flight, Ok(()))
            }
        }
    }

    fn settle(&self, after: After<Arc<Job>, Arc<AtomicUsize>>) {
        for (job, result) in after.ended {
            assert_eq!(job.in_hands.load(Ordering::SeqCst), 0);
            assert!(job.ended.lock().unwrap().replace(result.is_ok()).is_none(), "it ended twice");
        }
    }

    fn copy_on_host(&self, piece: &Piece<Arc<Job>>) -> Result<(), TransferError> {
        hold(&piece.work, &AtomicUsize::new(0));
        if self.fails() { Err(TransferError::Cancelled) } else { Ok(()) }
    }

    fn settle_copies(&self, ended: Vec<Ended<Arc<Job>>>) {
        let ended = ended.into_iter().collect();
        self.settle(After { ended, surplus: Vec::new() });
    }

    fn hire(&self) -> Result<(), TransferError> {
        let refused = self.idle_agency.load(Ordering::SeqCst);
        if refused > 0 {
            self.idle_agency.store(refused - 1, Ordering::SeqCst);
            let cause = Arc::new(std::io::ErrorKind::OutOfMemory.into());
            return Err(TransferError::Thread { what: "a model", cause });
        }
        let crew = self.clone();
        thread::spawn(move || crew.floor.work(&crew));
        Ok(())
    }
}

fn ended(job: &Job) -> Option<bool> {
    *job.ended.lock().unwrap()
}

#[test]
fn every_job_ends_and_every_thread_does() {
    explore(|| {
        let crew = Arc::new(Crew::new(2, 2));
        let other = crew.clone();
        let submitter = thread::spawn(move || other.submit(Way::Down, 2));
        let up = crew.submit(Way::Up, 3);
        let down = submitter.join().unwrap();
        crew.end();
        assert_eq!((ended(&up), ended(&down)), (Some(true), Some(true)));
    });
}

#[test]
fn failures_end_their_jobs_and_no_others() {
    explore(|| {
        let crew = Arc::new(Crew { fails: 3, ..Crew::new(1, 2) });
        let jobs = [crew.submit(Way::Up, 2), crew.submit(Way::Down, 2)];
        crew.end();
        assert!(jobs.iter().all(|job| ended(job).is_some()));
    });
}

#[test]
fn copies_on_the_host_end_beside_staged_ones() {
    explore(|| {
        let crew = Arc::new(Crew { fails: 7, ..Crew::new(1, 2) });
        let other = crew.clone();
        let submitter = thread::spawn(move || {
            let copy = Arc::new(Job::default());
            other.floor.submit_copy(copy.clone(), 2 * PIECE_BYTES, &other);
            copy
        });
        let up = crew.submit(Way::Up, 2);
        let copy = submitter.join().unwrap();
        crew.end();
        assert!(ended(&up).is_some() && ended(&copy).is_some());
    });
}

#[test]
fn a_floor_that_closes_finishes_what_it_has() {
    explore(|| {
        let crew = Arc::new(Crew::new(2, 3));
        let job = crew.submit(Way::Down, 3);
        let closing = crew.clone();
        let closer = thread::spawn(move || closing.floor.close());
        closer.join().unwrap();
        crew.floor.join();
        assert_eq!(ended(&job), Some(true));
    });
}

#[test]
fn without_threads_jobs_fail_and_with_one_they_do_not() {
    explore(|| {
        let crew = Arc::new(Crew { idle_agency: AtomicUsize::new(1), ..Crew::new(2, 2) });
        let none = crew.submit(Way::Up, 2);
        assert_eq!(ended(&none), Some(false));
        let job = crew.submit(Way::Up, 3);
        crew.idle_agency.store(1, Ordering::SeqCst);
        crew.end();
        assert_eq!(ended(&job), Some(true));
    });
}
