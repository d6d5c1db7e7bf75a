//! Launches of captured graphs: the streams that they were made on, and the ticks that they come
//! after. This is for owners of memory that graphs use.
//!
//! A graph's work uses addresses that are not named when it is launched. So an owner that gives
//! such memory up, whether or not the graph was dropped, asks here which launches must be done
//! before. And an owner that gives a capture memory which was in use reports its uses here.
//!
//! Launches into a capture do not occur: CUDA refuses them.
//!
//! Locks: that of an order of launches is held for a launch, and taken before those of timelines,
//! by number where there are several. That of a graph's launches is a leaf.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::driver::KeptAlive;
use crate::error::Result;
use crate::sync::Mutex;
use crate::timeline::{Tick, Timeline};

/// The launches of one captured graph, from the beginning of its capture on, and after it was
/// dropped.
///
/// ```
/// let device = aquifer::open("sim:24GiB")?;
/// let (one, two) = (device.stream()?, device.stream()?);
/// let ptr = device.alloc(1 << 20)?;
/// let capture = one.begin_capture()?;
/// let launches = one.launches_of_capture().expect("it captures");
/// one.fill(ptr, 7, 1 << 20)?;
/// capture.end()?.launch(&two)?; // and the graph is dropped
/// let pending = launches.pending().expect("we launch it");
/// assert_eq!(pending.iter().map(|tick| tick.timeline().id()).collect::<Vec<_>>(), [two.id()]);
/// pending.iter().try_for_each(|tick| tick.synchronize())?;
/// assert!(launches.pending().is_some_and(|pending| pending.is_empty()));
/// # device.free(ptr)?;
/// # Ok::<(), aquifer::Error>(())
/// ```
#[derive(Debug)]
pub struct Launches {
    number: u64,
    of: GraphOf,
    /// True if the graph itself was dropped, or was never made.
    gone: AtomicBool,
    made: Mutex<LaunchRecord>,
}

/// What is known of a graph and its launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GraphOf {
    /// [`crate::Graph::launch`] makes the launches, and [`crate::Graph`] ends the graph.
    Ours,
    /// Another library launches it. The driver tells when the graph is gone, with all launches.
    Driver,
    /// Another library launches it, and nothing tells how long.
    Others,
}

#[derive(Debug, Default)]
struct LaunchRecord {
    /// The last launch on each stream.
    last: Vec<Tick>,
    /// The ticks that launches come after, one for each stream.
    after: Vec<Tick>,
    /// The orders that launches keep with those of other graphs.
    orders: Vec<Arc<LaunchOrder>>,
    kept: Vec<KeptAlive>,
    /// Identities of streams on which bodies of conditional nodes were captured.
    of_bodies: Vec<u32>,
}

/// An order of launches. Graphs that share it are launched one after the other, on any streams,
/// because they use the same memory: [`Launches::keep_order`].
#[derive(Debug)]
pub struct LaunchOrder {
    number: u64,
    /// The last launch of any of them.
    last: Mutex<Option<Tick>>,
}

/// A number of what is made here, in the order in which it is made.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Default for LaunchOrder {
    fn default() -> LaunchOrder {
        LaunchOrder { number: next_number(), last: Mutex::default() }
    }
}

impl Launches {
    pub(crate) fn new(of: GraphOf) -> Arc<Launches> {
        Arc::new(Launches { number: next_number(), of, gone: AtomicBool::new(false), made: Mutex::default() })
    }

    /// True if the driver tells when the graph is gone: [`crate::Stream::follow_capture`].
    pub fn are_followed(&self) -> bool {
        self.of == GraphOf::Driver
    }

    /// A number that no other graph's launches have; later captures have larger ones.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Makes all launches come after the tick, because the graph uses memory that was in use
    /// before: [`crate::Graph::launch`] makes the stream wait. Call it during the capture. For a
    /// graph that another library captured, nothing is ordered, because its launches are not seen
    /// here.
    pub fn come_after(&self, tick: Tick) {
        let mut made = self.made.lock();
        made.after.retain(|known| !known.is_known_done());
        match made.after.iter_mut().find(|known| Arc::ptr_eq(known.timeline(), tick.timeline())) {
            Some(known) if known.n() >= tick.n() => {}
            Some(known) => *known = tick,
            None if tick.is_known_done() => {}
            None => made.after.push(tick),
        }
    }

    /// Makes launches come one after the other with those of all graphs that keep the same order:
    /// [`crate::Graph::launch`] makes streams wait. Call it during the capture. For a graph that
    /// another library captured, nothing is ordered.
    pub fn keep_order(&self, order: &Arc<LaunchOrder>) {
        let mut made = self.made.lock();
        if !made.orders.iter().any(|known| Arc::ptr_eq(known, order)) {
            made.orders.push(order.clone());
            // In the order in which their locks are taken.
            made.orders.sort_by_key(|order| order.number);
        }
    }

    /// Keeps `what` alive until the graph is dropped: memory that it uses, or the owner of that.
    /// Launches may still run then. Call it during the capture. Nothing is kept for a graph that
    /// another library captured, because it is not known here how long that is launched.
    pub fn keep(&self, what: &Arc<dyn Any + Send + Sync>) {
        let mut made = self.made.lock();
        if !self.is_over() && !made.kept.iter().any(|known| Arc::ptr_eq(known, what)) {
            made.kept.push(what.clone());
        }
    }

    /// Notes that a body of a conditional node was captured on streams.
    pub(crate) fn note_body(&self, streams: impl Iterator<Item = u32>) {
        let mut made = self.made.lock();
        streams.for_each(|id| made.of_bodies.push(id));
        made.of_bodies.sort_unstable();
        made.of_bodies.dedup();
    }

    /// True if work of the stream belongs to the graph: it takes part in the capture, or a body of
    /// a conditional node was captured on it.
    pub fn has(&self, stream: &Timeline) -> bool {
        stream.launches_of_capture().is_some_and(|launches| launches.number == self.number)
            || self.made.lock().of_bodies.contains(&stream.id())
    }

    /// The value of a type that the graph keeps; `None` if there is none, or once the graph was
    /// dropped.
    pub fn kept<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        let made = self.made.lock();
        made.kept.iter().find_map(|kept| kept.clone().downcast().ok())
    }

    /// The ticks that launches come after, without those known to be done.
    fn after(&self) -> Vec<Tick> {
        let mut made = self.made.lock();
        made.after.retain(|tick| !tick.is_known_done());
        made.after.clone()
    }

    /// Covers the ticks that launches come after with events, so that a launch need not record any:
    /// the streams may capture again later. An event that cannot be recorded now is recorded when
    /// it is needed.
    pub(crate) fn cover(&self) {
        for tick in self.after() {
            if let Err(error) = tick.cover() {
                tracing::debug!(%error, "a tick that a graph comes after is not covered by an event yet");
            }
        }
    }

    /// Calls `launch` to launch the graph on the stream, ordered after all ticks that it comes
    /// after, and notes the launch.
    pub(crate) fn launch(&self, stream: &Arc<Timeline>, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let orders = self.made.lock().orders.clone();
        let mut lasts: Vec<_> = orders.iter().map(|order| order.last.lock()).collect();
        let before = self.after();
        before
            .iter()
            .chain(lasts.iter().filter_map(|last| last.as_ref()))
            .try_for_each(|tick| stream.wait_for(&tick.timeline, tick.n))?;
        let launched = launch();
        // Noted even after a failure: part of it may run.
        let tick = stream.tick();
        lasts.iter_mut().for_each(|last| **last = Some(tick.clone()));
        let mut made = self.made.lock();
        made.last.retain(|tick| tick.timeline().id() != stream.id() && !tick.is_known_done());
        made.last.push(tick);
        launched
    }

    /// Notes that the graph is launched no more. Returns the things that it kept, to be dropped
    /// without a lock, and after the graph.
    pub(crate) fn note_gone(&self) -> Vec<KeptAlive> {
        let mut made = self.made.lock();
        self.gone.store(true, Ordering::Release);
        std::mem::take(&mut made.kept)
    }

    /// True if launches are not seen here, because another library captured the graph
    /// ([`crate::Stream::announce_capture`]), and nothing tells when it is gone.
    pub fn is_foreign(&self) -> bool {
        self.of == GraphOf::Others
    }

    /// True if there will be no launches any more, as far as this library sees: the graph is gone.
    /// Graphs that another library captured, and announced, count as over.
    pub fn is_over(&self) -> bool {
        self.is_foreign() || self.gone.load(Ordering::Acquire)
    }

    /// What must be done before memory of the graph may go, besides launches to come: the last
    /// launch on each stream, and, as there may be none, the ticks that launches come after. Those
    /// known to be done are left out. No driver call. `None` if launches of this graph are not seen
    /// here, and nothing tells when they are done.
    pub fn pending(&self) -> Option<Vec<Tick>> {
        (!self.is_foreign()).then(|| self.pending_here())
    }

    /// As [`Launches::pending`], but ignores launches that are not seen here.
    pub fn pending_here(&self) -> Vec<Tick> {
        let mut made = self.made.lock();
        made.last.retain(|tick| !tick.is_known_done());
        made.after.retain(|tick| !tick.is_known_done());
        made.last.iter().chain(&made.after).cloned().collect()
    }
}
