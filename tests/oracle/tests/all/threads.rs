//! Host threads that run one at a time, in the order that a program gives.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

type Job = Box<dyn FnOnce() + Send>;

/// The calling thread, as number 0, and others that start when they are first needed.
#[derive(Default)]
pub(crate) struct Threads {
    others: Vec<Option<Worker>>,
}

struct Worker {
    jobs: Sender<Job>,
    done: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Threads {
    /// Runs `job` on a thread and waits for it.
    ///
    /// # Panics
    /// When the job panics.
    pub(crate) fn run(&mut self, thread: usize, job: impl FnOnce() + Send + 'static) {
        let Some(other) = thread.checked_sub(1) else { return job() };
        if self.others.len() <= other {
            self.others.resize_with(other + 1, || None);
        }
        let worker = self.others[other].get_or_insert_with(Worker::start);
        worker.jobs.send(Box::new(job)).unwrap();
        worker.done.recv().expect("the job does not panic");
    }

    /// Ends a thread. The next job of that number starts a new one.
    pub(crate) fn end(&mut self, thread: usize) {
        let other = thread.checked_sub(1).and_then(|other| self.others.get_mut(other));
        if let Some(Worker { jobs, thread, .. }) = other.and_then(Option::take) {
            drop(jobs);
            thread.join().unwrap();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        (1..=self.others.len()).for_each(|thread| self.end(thread));
    }
}

impl Worker {
    fn start() -> Worker {
        let (jobs, inbox) = channel::<Job>();
        let (finished, done) = channel();
        let thread = std::thread::spawn(move || {
            for job in inbox {
                job();
                finished.send(()).unwrap();
            }
        });
        Worker { jobs, done, thread }
    }
}
