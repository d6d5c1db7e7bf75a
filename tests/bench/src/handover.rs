//! One thread allocates, another frees: blocks go from one to the other through a ring.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use aquifer_trace::{Refused, Subject, Yardstick};
use crossbeam::queue::ArrayQueue;

use aquifer_stress::exit::Failure;

use crate::team::{Team, refused};
use crate::workload::Replacements;

/// The most blocks in the ring.
pub(crate) const RING: u32 = 256;
/// Polls of a full or empty ring before the thread yields.
const SPINS: u32 = 64;

/// A subject that allocates, one that frees (if it is another), and the ring between them. The ring
/// is empty between rounds.
pub(crate) struct HandOver<S: Subject> {
    giver: S,
    taker: Option<S>,
    ring: ArrayQueue<S::Handle>,
}

impl<S: Subject> HandOver<S> {
    /// Two threads.
    pub(crate) fn between(giver: S, taker: S) -> HandOver<S> {
        HandOver { giver, taker: Some(taker), ring: ArrayQueue::new(RING as usize) }
    }

    /// One thread, which passes every block through the ring to itself.
    pub(crate) fn alone(subject: S) -> HandOver<S> {
        HandOver { giver: subject, taker: None, ring: ArrayQueue::new(RING as usize) }
    }
}

/// Repeats an attempt until it succeeds.
fn insist<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let mut spins = 0;
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        spins += 1;
        if spins % SPINS == 0 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Allocates everything and puts it into the ring, until something is refused.
fn give<S: Subject>(giver: &mut S, ring: &ArrayQueue<S::Handle>, round: &Replacements) -> Result<(), Refused> {
    for bytes in round.sizes() {
        let mut handle = Some(giver.alloc(bytes, 0)?);
        insist(|| match ring.push(handle.take()?) {
            Ok(()) => Some(()),
            Err(back) => {
                handle = Some(back);
                None
            }
        });
    }
    Ok(())
}

impl<S: Subject + Send> Team for HandOver<S>
where
    S::Handle: Send,
{
    fn round(&mut self, rounds: &[Replacements]) -> Result<Duration, Failure> {
        let HandOver { giver, taker, ring } = self;
        let ring = &*ring;
        let round = &rounds[0];
        let Some(taker) = taker else {
            let start = Instant::now();
            for bytes in round.sizes() {
                let handle = giver.alloc(bytes, 0).map_err(refused)?;
                if let Err(handle) = ring.push(handle) {
                    giver.free(handle);
                }
                if let Some(handle) = ring.pop() {
                    giver.free(handle);
                }
            }
            return Ok(start.elapsed());
        };
        let together = Barrier::new(2);
        let given = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let giving = scope.spawn(|| {
                together.wait();
                let start = Instant::now();
                let done = give(giver, ring, round);
                // All blocks are in the ring before this store.
                given.store(true, Ordering::Release);
                done.map(|()| start)
            });
            together.wait();
            loop {
                let handle = insist(|| {
                    let last = given.load(Ordering::Acquire);
                    let handle = ring.pop();
                    (handle.is_some() || last).then_some(handle)
                });
                match handle {
                    Some(handle) => taker.free(handle),
                    None => break,
                }
            }
            let end = Instant::now();
            let start = giving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            start.map(|start| end - start).map_err(refused)
        })
    }

    fn leave(self) {}
}

/// A yardstick that threads share, behind a lock of the standard library.
#[derive(Debug, Clone)]
pub(crate) struct Shared(Arc<Mutex<Yardstick>>);

impl Shared {
    pub(crate) fn new(yardstick: Yardstick) -> Shared {
        Shared(Arc::new(Mutex::new(yardstick)))
    }
}

impl Subject for Shared {
    type Handle = <Yardstick as Subject>::Handle;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Handle, Refused> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).alloc(bytes, stream)
    }

    #[inline]
    fn free(&mut self, handle: Self::Handle) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).free(handle);
    }
}
