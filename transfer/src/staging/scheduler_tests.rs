//! Threads that perform tasks without a device.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use aquifer_device::fork::parking_lot::Mutex as PlainMutex;

use super::super::task::Way;
use super::*;
use crate::config::PAGE;

/// Reports the end of a job to the thread that submitted it.
type Notify = mpsc::Sender<bool>;

struct Workers {
    scheduler: Scheduler<Notify, ()>,
    /// A wait for stream 0 waits for this.
    still: PlainMutex<mpsc::Receiver<()>>,
    starts: AtomicUsize,
    /// The start that fails.
    fails: usize,
}

impl Workers {
    fn new(chunks: usize, threads: usize, fails: usize) -> (Arc<Workers>, mpsc::Sender<()>) {
        let (go, still) = mpsc::channel();
        let scheduler = Scheduler::new(Sizes { chunk_bytes: PAGE, chunks, threads });
        let (still, starts) = (PlainMutex::new(still), AtomicUsize::new(0));
        (Arc::new(Workers { scheduler, still, starts, fails }), go)
    }

    fn submit(self: &Arc<Self>, stream: u32, pieces: u64) -> mpsc::Receiver<bool> {
        let (notify, ended) = mpsc::channel();
        let order =
            Submission { work: notify, way: Way::Up, bytes: pieces * PAGE as u64, phase: 0, stream, priority: 0 };
        self.scheduler.submit(order, self).unwrap();
        ended
    }
}

impl Executor<Notify, ()> for Arc<Workers> {
    fn perform(&self, task: Task<Notify, ()>) -> TaskResult<Notify, ()> {
        match task {
            Task::Grow { .. } => TaskResult::Grown(Ok(())),
            Task::Fill(piece) | Task::Fetch(piece) => TaskResult::Sent(piece),
            Task::Store(piece) => TaskResult::Stored(piece),
            Task::Wait(flight) => {
                if flight.stream == 0 {
                    // A closed channel ends the wait, too.
                    let _ = self.still.lock().recv();
                }
                TaskResult::Waited(flight, Ok(()))
            }
        }
    }

    fn settle(&self, after: Followup<Notify, ()>) {
        let notify_end =
            |(notify, result): (Notify, Result<(), TransferError>)| notify.send(result.is_ok()).unwrap_or_default();
        after.ended.into_iter().for_each(notify_end);
    }

    fn spawn(&self) -> Result<(), TransferError> {
        if self.starts.fetch_add(1, Ordering::SeqCst) + 1 == self.fails {
            let cause = Arc::new(std::io::ErrorKind::OutOfMemory.into());
            return Err(TransferError::Thread { what: "a model", cause });
        }
        let workers = self.clone();
        thread::spawn(move || workers.scheduler.work(&workers));
        Ok(())
    }
}

/// A stream that stands still does not hold all threads or all chunks.
#[test]
fn a_stream_that_stands_still_does_not_block_others() {
    for threads in [1, 2, 4] {
        let (workers, go) = Workers::new(8, threads, 0);
        let stuck = workers.submit(0, 100);
        assert_eq!(workers.submit(1, 100).recv(), Ok(true));
        assert!(stuck.try_recv().is_err(), "it stands still");
        assert!(workers.starts.load(Ordering::SeqCst) <= threads + 2, "one more for each stream at most");
        drop(go);
        assert_eq!(stuck.recv(), Ok(true));
        workers.scheduler.close();
        workers.scheduler.join();
    }
}

/// A thread that could not be started is tried again with the next job.
#[test]
fn a_failed_start_is_tried_again() {
    let (workers, go) = Workers::new(8, 2, 2);
    drop(go);
    assert_eq!(workers.submit(1, 50).recv(), Ok(true));
    assert_eq!(workers.starts.load(Ordering::SeqCst), 2, "one thread came, and one did not");
    assert_eq!(workers.submit(1, 50).recv(), Ok(true));
    assert_eq!((workers.starts.load(Ordering::SeqCst), workers.scheduler.size().threads), (3, 2));
    workers.scheduler.close();
    workers.scheduler.join();
}
