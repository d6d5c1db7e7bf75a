//! Threads on tasks that are played without a device.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;

use parking_lot::Mutex as PlainMutex;

use super::super::config::PAGE;
use super::super::task::Way;
use super::*;

/// What tells whoever submitted a job how it ended.
type Told = mpsc::Sender<bool>;

struct Crew {
    floor: Floor<Told, (), u32, Told>,
    sizes: Sizes,
    /// Who waits for lane 0 waits for this.
    still: PlainMutex<mpsc::Receiver<()>>,
    starts: AtomicUsize,
    /// The start that fails.
    fails: usize,
}

impl Crew {
    fn new(chunks: usize, threads: usize, fails: usize) -> (Arc<Crew>, mpsc::Sender<()>) {
        let (go, still) = mpsc::channel();
        let sizes = Sizes { chunk_bytes: PAGE, chunks, threads };
        let (still, starts) = (PlainMutex::new(still), AtomicUsize::new(0));
        (Arc::new(Crew { floor: Floor::new(), sizes, still, starts, fails }), go)
    }

    fn submit(self: &Arc<Self>, lane: u32, pieces: u64) -> mpsc::Receiver<bool> {
        let (told, ended) = mpsc::channel();
        let order = Order { work: told, way: Way::Up, bytes: pieces * PAGE as u64, phase: 0, lane, priority: 0 };
        self.floor.submit(order, self).unwrap();
        ended
    }
}

impl Hands<Told, (), u32, Told> for Arc<Crew> {
    fn perform(&self, task: Task<Told, (), u32>) -> Done<Told, (), u32> {
        match task {
            Task::Tune => Done::Tuned(self.sizes),
            Task::Grow { .. } => Done::Grown(Ok(())),
            Task::Fill(hand) | Task::Fetch(hand) => Done::Sent(hand, 0),
            Task::Land(hand) => Done::Landed(hand),
            Task::Wait(flight) => {
                if flight.lane == 0 {
                    // An end of the channel is as good.
                    let _ = self.still.lock().recv();
                }
                Done::Waited(flight, Ok(()))
            }
        }
    }

    fn settle(&self, after: After<Told, ()>) {
        let tell = |(told, result): (Told, Result<(), TransferError>)| told.send(result.is_ok()).unwrap_or_default();
        after.ended.into_iter().for_each(tell);
    }

    fn copy_on_host(&self, _: &Piece<Told>) -> Result<(), TransferError> {
        Ok(())
    }

    fn settle_copies(&self, ended: Vec<Ended<Told>>) {
        ended.into_iter().for_each(|(told, result)| told.send(result.is_ok()).unwrap_or_default());
    }

    fn hire(&self) -> Result<(), TransferError> {
        if self.starts.fetch_add(1, Ordering::SeqCst) + 1 == self.fails {
            let cause = Arc::new(std::io::ErrorKind::OutOfMemory.into());
            return Err(TransferError::Thread { what: "a model", cause });
        }
        let crew = self.clone();
        thread::spawn(move || crew.floor.work(&crew));
        Ok(())
    }
}

/// However few threads there may be: a stream that stands still keeps neither all of them nor all chunks.
#[test]
fn a_stream_that_stands_still_keeps_no_others_from_going_on() {
    for threads in [1, 2, 4] {
        let (crew, go) = Crew::new(8, threads, 0);
        let stuck = crew.submit(0, 100);
        assert_eq!(crew.submit(1, 100).recv(), Ok(true));
        assert!(stuck.try_recv().is_err(), "it stands still");
        assert!(crew.starts.load(Ordering::SeqCst) <= threads + 2, "one more for each stream at most");
        drop(go);
        assert_eq!(stuck.recv(), Ok(true));
        crew.floor.close();
        crew.floor.join();
    }
}

/// A thread that could not be started is tried again with the next job.
#[test]
fn one_failed_start_is_not_for_ever() {
    let (crew, go) = Crew::new(8, 2, 2);
    drop(go);
    assert_eq!(crew.submit(1, 50).recv(), Ok(true));
    assert_eq!(crew.starts.load(Ordering::SeqCst), 2, "one thread came, and one did not");
    assert_eq!(crew.submit(1, 50).recv(), Ok(true));
    assert_eq!((crew.starts.load(Ordering::SeqCst), crew.floor.staff().threads), (3, 2));
    crew.floor.close();
    crew.floor.join();
}

/// However few threads there may be, neither kind of work keeps the other from going on.
#[test]
fn copies_on_the_host_and_staged_ones_go_on_beside_each_other() {
    for threads in [1, 2] {
        let (crew, go) = Crew::new(4, threads, 0);
        let stuck = crew.submit(0, 100);
        let (told, copied) = mpsc::channel();
        crew.floor.submit_copy(told, 100 << 20, &crew);
        assert_eq!((copied.recv(), crew.submit(1, 100).recv()), (Ok(true), Ok(true)));
        drop(go);
        assert_eq!(stuck.recv(), Ok(true));
        crew.floor.close();
        crew.floor.join();
    }
}
