//! Prefetching: batches that are on the device before they are needed.
//!
//! There is a slot for each batch ahead, and one for the batch in use. [`Prefetcher`] documents the
//! bounds.

mod batch;

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use aquifer_allocator::{AllocError, WakeLock};
use aquifer_device::fork::{Condvar, Mutex};
use aquifer_device::internal::defer_panics_here;
use aquifer_device::{Stream, Tick};
use aquifer_transfer::TransferError;
use aquifer_transfer::internal::{covered_tick, guarded};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded, unbounded};

use crate::allocator::Allocator;

pub use batch::Batch;

use crate::error::Error;
use crate::transfer::{Pending, Transfer};

/// Brings batches to a device ahead of their use. It is an iterator of batches on the device.
///
/// A thread takes batches from the source and enqueues their copies on a stream of its own. The
/// consumer's stream is ordered after each copy without waiting on the host.
///
/// **Using a batch.** It is ready on the stream that the prefetcher was made for
/// ([`crate::transfer::OnStreams::ready_on`]): any work of that stream may use it, with or without
/// access guards, and it may be dropped at any time. Other streams use access guards
/// ([`aquifer_allocator::AccessGuard`]). The bound below counts the batch's memory as free once
/// that stream is done with the work enqueued before the next batch was asked for, so enqueue the
/// work before that, and drop the batch.
///
/// **Bounds.** On the device there is memory for at most `ahead` batches and the one in use: before
/// the thread sends another batch, it waits until the device is done with the batch whose slot it
/// takes. The source itself is one more batch ahead, on the host. So neither a fast source nor a
/// host that runs ahead of the device makes memory grow.
///
/// **Errors and panics** arrive in the source's order, in the place of their batch. After an error,
/// of the source or of sending a batch, the source is asked for its next batch. A panic, or the
/// loss of the device, is the last item.
///
/// **Dropping** the prefetcher ends the thread as soon as the source, or [`Batch::send`], returns
/// control. It waits for the thread unless that runs such code, which may take any time.
///
/// **While the allocator sleeps**, or is about to, no batch is sent, and none is lost: asking for
/// one returns [`aquifer_allocator::AllocError::Asleep`] until the allocator has woken up.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::Error;
/// use aquifer::tensor::Place;
/// use aquifer::transfer::Prefetcher;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
///
/// let loader = (0..10).map(|n| Tensor::full(&[1000], n as f32, Place::Host));
/// let mut sums = Vec::new();
/// for batch in Prefetcher::try_new(loader, &memory, &stream, 2)? {
///     sums.push(batch?.sum(&stream)?);
/// }
/// assert_eq!((sums.len(), sums[9].item::<f32>()?), (10, 9000.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Prefetcher<B: Batch> {
    batches: Option<Receiver<SentBatch<B>>>,
    /// A batch that arrived while the allocator slept.
    arrived: Option<Pending<B::OnDevice>>,
    /// Ticks after which slots are free again.
    slots: Option<Sender<Tick>>,
    stream: Stream,
    allocator: Allocator,
    /// Whether the consumer has a batch, and with it a slot.
    holds_slot: bool,
    starved: u64,
    worker: Option<(JoinHandle<()>, Arc<WorkerStatus>)>,
}

// The loader runs on a thread of its own, where its panics are caught.
impl<B: Batch> UnwindSafe for Prefetcher<B> {}
impl<B: Batch> RefUnwindSafe for Prefetcher<B> {}

/// The period after which the thread checks again whether the prefetcher is dropped, and the
/// consumer checks again whether the allocator sleeps.
const NAP: Duration = Duration::from_millis(1);

/// The most batches ahead: the channel allocates room for them at once.
const AHEAD_MAX: usize = 1024;

/// An item of the channel.
type SentBatch<B> = Result<Pending<<B as Batch>::OnDevice>, Error>;

/// The state of the thread.
#[derive(Default)]
struct WorkerStatus {
    /// Whether the prefetcher is gone.
    is_dropped: AtomicBool,
    state: Mutex<WorkerState>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum WorkerState {
    #[default]
    Working,
    /// It runs code of the caller, which may need the thread that drops the prefetcher.
    Away,
    Ended,
}

impl<B: Batch> Prefetcher<B> {
    /// Begins to bring batches to memory of an allocator (`&memory`), or by the runtime of a
    /// `&transfer`, `ahead` batches before they are asked for, for use on `stream`. An `ahead`
    /// below 1 counts as 1, and one above 1024 as 1024.
    ///
    /// # Errors
    /// A stream of another device, and when a stream or a thread cannot be had.
    #[track_caller]
    pub fn new<S>(
        source: S,
        by: impl TryInto<Transfer, Error: Into<Error>>,
        stream: &Stream,
        ahead: usize,
    ) -> Result<Prefetcher<B>, Error>
    where
        S: IntoIterator<Item = B>,
        S::IntoIter: Send + 'static,
    {
        Prefetcher::begin(source.into_iter().map(Ok), by.try_into().map_err(Into::into)?, stream, ahead)
    }

    /// As [`Prefetcher::new`], for a source that may fail. After an error it is asked for its next
    /// batch.
    ///
    /// # Errors
    /// As [`Prefetcher::new`].
    #[track_caller]
    pub fn try_new<S, E>(
        source: S,
        by: impl TryInto<Transfer, Error: Into<Error>>,
        stream: &Stream,
        ahead: usize,
    ) -> Result<Prefetcher<B>, Error>
    where
        S: IntoIterator<Item = Result<B, E>>,
        S::IntoIter: Send + 'static,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let failed = |error: E| Error::Source { cause: Arc::from(error.into()) };
        let source = source.into_iter().map(move |item| item.map_err(failed));
        Prefetcher::begin(source, by.try_into().map_err(Into::into)?, stream, ahead)
    }

    #[track_caller]
    fn begin(
        source: impl Iterator<Item = Result<B, Error>> + Send + 'static,
        transfer: Transfer,
        stream: &Stream,
        ahead: usize,
    ) -> Result<Prefetcher<B>, Error> {
        transfer.check_device("stream", stream.device_id())?;
        let ahead = ahead.clamp(1, AHEAD_MAX);
        let own = transfer.device().stream()?;
        let (send_batch, batches) = bounded(ahead);
        let (slots, take_slot) = unbounded();
        // Work of the stream until now is done before its work on a batch.
        for _ in 0..=ahead {
            let _ = slots.send(own.tick());
        }
        let at = Arc::new(WorkerStatus::default());
        let worker = Worker {
            transfer: transfer.on(&own)?,
            asked: Location::caller(),
            slots: take_slot,
            slot: None,
            batches: send_batch,
            at: at.clone(),
        };
        let thread = std::thread::Builder::new().name("aquifer-prefetch".to_owned()).spawn(move || {
            defer_panics_here();
            worker.run(source);
            // It may have held the last buffers of a dropped allocator.
            aquifer_allocator::close_abandoned();
        });
        let thread = thread.map_err(|cause| TransferError::Thread { what: "prefetching", cause: cause.into() })?;
        Ok(Prefetcher {
            batches: Some(batches),
            arrived: None,
            slots: Some(slots),
            stream: stream.clone(),
            allocator: transfer.allocator().clone(),
            holds_slot: false,
            starved: 0,
            worker: Some((thread, at)),
        })
    }

    /// The number of waits for a batch that was not in flight yet, because the source is slower
    /// than the consumer.
    pub fn starved(&self) -> u64 {
        self.starved
    }

    /// Waits for the thread's next item; `None` if it has ended. Does not wait while the allocator
    /// sleeps: this thread may have to wake it up.
    fn receive(&mut self) -> Option<SentBatch<B>> {
        let batches = self.batches.as_ref()?;
        match batches.try_recv() {
            Err(TryRecvError::Empty) => {}
            received => return received.ok(),
        }
        let mut starved = false;
        while !self.allocator.is_asleep() {
            self.starved += u64::from(!std::mem::replace(&mut starved, true));
            match batches.recv_timeout(NAP) {
                Err(RecvTimeoutError::Timeout) => {}
                received => return received.ok(),
            }
        }
        Some(Err(AllocError::Asleep.into()))
    }

    /// Returns the slot of the batch in use: free once the stream is done with its present work.
    fn give_slot_back(&mut self) {
        if !std::mem::take(&mut self.holds_slot) {
            return;
        }
        if let Some(slots) = &self.slots {
            // The thread may have ended.
            let _ = slots.send(covered_tick(&self.stream));
        }
    }
}

impl<B: Batch> Iterator for Prefetcher<B> {
    type Item = Result<B::OnDevice, Error>;

    /// The next batch. The stream is ordered after its copy. Waits on the host only while none is
    /// on its way.
    fn next(&mut self) -> Option<Self::Item> {
        if let Err(error) = aquifer_device::fork::check(aquifer_device::Operation::SynchronizeEvent) {
            return Some(Err(error.into()));
        }
        self.give_slot_back();
        let pending = match self.arrived.take() {
            Some(pending) => pending,
            None => match self.receive()? {
                Ok(pending) => pending,
                Err(error) => return Some(Err(error)),
            },
        };
        // Conversions on the device are enqueued now.
        match self.allocator.keep_awake() {
            Ok(_awake) => {
                self.holds_slot = true;
                Some(pending.then(&self.stream, |_, batch| batch))
            }
            Err(asleep) => {
                self.arrived = Some(pending);
                Some(Err(asleep.into()))
            }
        }
    }
}

impl<B: Batch> Drop for Prefetcher<B> {
    fn drop(&mut self) {
        if aquifer_device::fork::is_child() {
            return std::mem::forget((self.worker.take(), self.batches.take(), self.slots.take()));
        }
        let Some((thread, at)) = self.worker.take() else { return };
        at.is_dropped.store(true, Ordering::Relaxed);
        // The channel would keep its batches until the thread ends, which may wait for its source
        // for any time.
        self.batches.iter().for_each(|batches| batches.try_iter().for_each(drop));
        // Wakes the thread if it waits for this side.
        self.batches = None;
        self.slots = None;
        let mut state = at.state.lock();
        while *state == WorkerState::Working {
            state = at.changed.wait(state);
        }
        let ended = *state == WorkerState::Ended;
        drop(state);
        if ended && thread.join().is_err() {
            tracing::error!("the prefetching thread panicked");
        }
    }
}

impl<B: Batch> fmt::Debug for Prefetcher<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefetcher")
            .field("stream", &self.stream)
            .field("starved", &self.starved)
            .finish_non_exhaustive()
    }
}

/// The state of the thread's loop.
struct Worker<B: Batch> {
    transfer: Transfer,
    /// The place in the program that made the prefetcher.
    asked: &'static Location<'static>,
    slots: Receiver<Tick>,
    /// The slot for the next batch: that of one that could not be sent.
    slot: Option<Tick>,
    batches: Sender<SentBatch<B>>,
    at: Arc<WorkerStatus>,
}

impl<B: Batch> Worker<B> {
    fn run(self, source: impl Iterator<Item = Result<B, Error>>) {
        let at = self.at.clone();
        if catch_unwind(AssertUnwindSafe(move || self.work(source))).is_err() {
            tracing::error!("a prefetching thread panicked outside its source");
        }
        at.set(WorkerState::Ended);
    }

    fn work(mut self, source: impl Iterator<Item = Result<B, Error>>) {
        let mut source = Some(source);
        while let Some(item) = self.ask(&mut source) {
            let sent = item.and_then(|batch| self.send(batch));
            let Some(sent) = sent.transpose() else { break };
            let over = match &sent {
                Err(error) => {
                    error.is_device_lost() || matches!(error, Error::Transfer(TransferError::Panicked { .. }))
                }
                Ok(_) => false,
            };
            if let Err(unwanted) = self.batches.send(sent) {
                self.away(|| drop(unwanted));
                break;
            }
            if over {
                break;
            }
        }
        if let Err(error) = self.contained(SOURCE, move || drop(source)) {
            let _ = self.batches.send(Err(error));
        }
    }

    /// Runs code of the caller.
    fn away<R>(&self, run: impl FnOnce() -> R) -> R {
        self.at.set(WorkerState::Away);
        let result = run();
        self.at.set(WorkerState::Working);
        result
    }

    /// Runs code of the caller that may panic.
    fn contained<R>(&self, whose: &'static str, run: impl FnOnce() -> R) -> Result<R, Error> {
        self.away(|| guarded(whose, || Ok(run())))
    }

    /// The source's next item. A panic is the last.
    fn ask(&self, source: &mut Option<impl Iterator<Item = Result<B, Error>>>) -> Option<Result<B, Error>> {
        self.contained(SOURCE, || source.as_mut()?.next()).unwrap_or_else(|panicked| Some(Err(panicked)))
    }

    /// Waits for a slot and sends a batch; nothing if the prefetcher is gone.
    fn send(&mut self, batch: B) -> Result<Option<Pending<B::OnDevice>>, Error> {
        let ready = self.get_ready();
        match ready {
            Ok(Some(_awake)) => {
                let sent = self.contained("a batch that was to be sent", || {
                    let _place = self.transfer.device().called_from(self.asked);
                    batch.send(&self.transfer)
                })??;
                self.slot = None;
                Ok(Some(sent))
            }
            unwanted => {
                self.contained("a batch that was dropped", || drop(batch))?;
                unwanted.map(|_| None)
            }
        }
    }

    /// Waits for a slot, and for the allocator to be awake; nothing if the prefetcher is gone.
    fn get_ready(&mut self) -> Result<Option<WakeLock>, Error> {
        let Some(free_after) = self.slot.take().or_else(|| self.slots.recv().ok()) else { return Ok(None) };
        // The consumer returns slots of batches that it got. So this slot stays here until its
        // batch is in flight.
        self.slot.insert(free_after).synchronize()?;
        Ok(self.stay_awake())
    }

    /// Waits while the allocator sleeps, which would refuse the batch; then keeps it awake. `None`
    /// if the prefetcher is dropped.
    fn stay_awake(&self) -> Option<WakeLock> {
        loop {
            match self.transfer.allocator().keep_awake() {
                Ok(awake) => return Some(awake),
                Err(_) if self.at.is_dropped.load(Ordering::Relaxed) => return None,
                Err(_) => {
                    self.transfer.allocator().wait_awake(NAP);
                }
            }
        }
    }
}

impl WorkerStatus {
    fn set(&self, state: WorkerState) {
        *self.state.lock() = state;
        self.changed.notify_all();
    }
}

/// Named in errors about panics.
const SOURCE: &str = "the source of batches";

/// The batches that [`Allocator::prefetch`] keeps ahead of their use.
const AHEAD: usize = 2;

impl Allocator {
    /// Brings the batches that `source` gives to the device, two ahead of their use on `stream`: an
    /// iterator of batches that are ready for `stream`. A thread calls `source`. [`Prefetcher`] has
    /// more settings.
    ///
    /// # Errors
    /// As [`Prefetcher::new`].
    pub fn prefetch<S>(&self, source: S, stream: &Stream) -> Result<Prefetcher<S::Item>, Error>
    where
        S: IntoIterator,
        S::IntoIter: Send + 'static,
        S::Item: Batch,
    {
        Prefetcher::new(source, self, stream, AHEAD)
    }
}

#[cfg(test)]
mod tests;
