//! Launches of captured graphs: where they were made, and what they come after. This is for owners of memory that graphs use.
//!
//! A graph's work uses addresses that are not named when it is launched. So an owner that gives such memory up, whether or not the graph was
//! dropped, asks here what must be done before. And an owner that gives a capture memory which was in use says here what used it.
//!
//! Locks: that of an order of launches is held for a launch, and taken before those of timelines, by address where there are several. That of
//! a graph's launches is a leaf, except that those of the graphs that it was launched into, which were captured later, may be taken under it.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Result;
use crate::stream::Stream;
use crate::sync::Mutex;
use crate::timeline::Tick;

/// The launches of one captured graph, from the beginning of its capture on, and after it was dropped.
///
/// ```
/// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
/// let device = Device::new(SimDriver::new(SimConfig::default()));
/// let (one, two) = (device.create_stream()?, device.create_stream()?);
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
/// # Ok::<(), aquifer_device::DeviceError>(())
/// ```
#[derive(Debug)]
pub struct Launches {
    /// Whether they are made by [`crate::Graph::launch`].
    ours: bool,
    /// Whether the graph itself is gone, or never came to be.
    gone: AtomicBool,
    made: Mutex<Made>,
}

#[derive(Debug, Default)]
struct Made {
    /// The last launch on each stream.
    last: Vec<Tick>,
    /// Graphs that captured a launch: theirs launch this one, too.
    captured_into: Vec<Arc<Launches>>,
    /// Whether any that were there launch graphs of others, of which nobody here sees what they do.
    into_foreign: bool,
    /// What launches come after, one tick a stream.
    after: Vec<Tick>,
    /// Those that launches keep with other graphs.
    orders: Vec<Arc<LaunchOrder>>,
    kept: Vec<Kept>,
}

/// What a graph keeps: [`Launches::keep`].
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// What graphs share that are launched one after the other, on whichever streams, because they use the same memory:
/// [`Launches::keep_order`].
#[derive(Debug, Default)]
pub struct LaunchOrder {
    /// The last launch of any of them.
    last: Mutex<Option<Tick>>,
}

impl Launches {
    /// Of a graph that is captured here, or one that somebody else captures and will launch.
    pub(crate) fn new(ours: bool) -> Arc<Launches> {
        Arc::new(Launches { ours, gone: AtomicBool::new(false), made: Mutex::default() })
    }

    /// Lets launches come after the tick, for memory that the graph uses and that was in use before: [`crate::Graph::launch`] makes the
    /// stream wait. Call it during the capture. Nothing is ordered where launches are not seen here, because somebody else captured
    /// the graph.
    pub fn come_after(&self, tick: Tick) {
        let mut made = self.made.lock();
        made.after.retain(|known| !is_known_done(known));
        match made.after.iter_mut().find(|known| Arc::ptr_eq(known.timeline(), tick.timeline())) {
            Some(known) if known.n() >= tick.n() => {}
            Some(known) => *known = tick,
            None if is_known_done(&tick) => {}
            None => made.after.push(tick),
        }
    }

    /// Lets launches come one after the other with those of all graphs that keep the same order: [`crate::Graph::launch`] makes streams
    /// wait. Call it during the capture; for graphs that somebody else captured, nothing is ordered.
    pub fn keep_order(&self, order: &Arc<LaunchOrder>) {
        let mut made = self.made.lock();
        if !made.orders.iter().any(|known| Arc::ptr_eq(known, order)) {
            made.orders.push(order.clone());
            // As their locks are taken.
            made.orders.sort_by_key(Arc::as_ptr);
        }
    }

    /// Keeps something until the graph is dropped, and those that its launches are captured into: what it uses, or who has that. Launches
    /// may not be done then. Call it during the capture. Nothing is kept for a graph that somebody else captured, as nobody here
    /// knows how long it is launched.
    pub fn keep(&self, what: &Arc<dyn Any + Send + Sync>) {
        let mut made = self.made.lock();
        let is_over = !self.ours || self.gone.load(Ordering::Acquire);
        if !is_over && !made.kept.iter().any(|known| Arc::ptr_eq(known, what)) {
            made.kept.push(what.clone());
        }
    }

    /// What launches come after, without what is known to be done.
    fn after(&self) -> Vec<Tick> {
        let mut made = self.made.lock();
        made.after.retain(|tick| !is_known_done(tick));
        made.after.clone()
    }

    /// Makes sure that launches need to record nothing for what they come after: a stream may capture again by then. What cannot be
    /// recorded now is recorded when it is needed.
    pub(crate) fn cover(&self) {
        for tick in self.after() {
            if let Err(error) = tick.cover() {
                tracing::debug!(%error, "what a graph comes after is not covered by an event yet");
            }
        }
    }

    /// Lets `launch` launch the graph on the stream, after all that it comes after, and notes it. A launch that is captured itself passes
    /// that on to the graph that it becomes part of.
    pub(crate) fn launch(&self, stream: &Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        match stream.launches_of_capture() {
            Some(outer) => self.launch_captured(&outer, launch),
            None => self.launch_in_order(stream, launch),
        }
    }

    fn launch_captured(&self, outer: &Arc<Launches>, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        self.after().into_iter().for_each(|tick| outer.come_after(tick));
        let mut made = self.made.lock();
        made.forget_what_is_over();
        made.orders.iter().for_each(|order| outer.keep_order(order));
        made.kept.iter().for_each(|what| outer.keep(what));
        // Before it is made: after a failure, too, part of it may be there.
        if !made.captured_into.iter().any(|known| Arc::ptr_eq(known, outer)) {
            made.captured_into.push(outer.clone());
        }
        drop(made);
        launch()
    }

    fn launch_in_order(&self, stream: &Stream, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let orders = self.made.lock().orders.clone();
        let mut lasts: Vec<_> = orders.iter().map(|order| order.last.lock()).collect();
        let before = self.after();
        before
            .iter()
            .chain(lasts.iter().filter_map(|last| last.as_ref()))
            .try_for_each(|tick| stream.wait_for(tick))?;
        let launched = launch();
        // After a failure, too: part of it may run.
        let tick = stream.tick();
        lasts.iter_mut().for_each(|last| **last = Some(tick.clone()));
        let mut made = self.made.lock();
        made.last.retain(|tick| tick.timeline().id() != stream.id() && !is_known_done(tick));
        made.last.push(tick);
        launched
    }

    /// Notes that the graph is launched no more. The answer is what it kept, to be dropped without a lock, and after the graph.
    pub(crate) fn note_gone(&self) -> Vec<Kept> {
        let mut made = self.made.lock();
        self.gone.store(true, Ordering::Release);
        std::mem::take(&mut made.kept)
    }

    /// Whether launches are not seen here, because somebody else captured the graph ([`Stream::announce_capture`]).
    pub fn is_foreign(&self) -> bool {
        !self.ours
    }

    /// Whether there will be no launches any more, as far as that is seen here: the graph was dropped, and so was every other that a launch
    /// of it was captured into. Graphs that somebody else captured are taken to be over.
    pub fn is_over(&self) -> bool {
        let is_gone = !self.ours || self.gone.load(Ordering::Acquire);
        is_gone && self.made.lock().captured_into.iter().all(|outer| outer.is_over())
    }

    /// Whether it is over, and its launches are known to be done as far as they are seen here.
    fn is_done(&self) -> bool {
        self.is_over() && self.pending_here().is_empty()
    }

    /// The last launch on each stream, those left out that are known to be done; no driver call. `None` if launches are not seen
    /// here, of this graph or of one that it is part of.
    pub fn pending(&self) -> Option<Vec<Tick>> {
        self.are_all_seen().then(|| self.pending_here())
    }

    /// As [`Launches::pending`], without launches that are not seen here.
    pub fn pending_here(&self) -> Vec<Tick> {
        let mut made = self.made.lock();
        made.last.retain(|tick| !is_known_done(tick));
        made.forget_what_is_over();
        let mut pending = made.last.clone();
        made.captured_into.iter().for_each(|outer| pending.extend(outer.pending_here()));
        pending
    }

    fn are_all_seen(&self) -> bool {
        let made = self.made.lock();
        self.ours && !made.into_foreign && made.captured_into.iter().all(|outer| outer.are_all_seen())
    }
}

impl Made {
    /// A graph may be captured into one after another that is launched for a while.
    fn forget_what_is_over(&mut self) {
        let into_foreign = &mut self.into_foreign;
        self.captured_into.retain(|outer| {
            let is_done = outer.is_done();
            *into_foreign |= is_done && !outer.are_all_seen();
            !is_done
        });
    }
}

fn is_known_done(tick: &Tick) -> bool {
    tick.timeline().is_known_done(tick.n())
}

#[cfg(test)]
mod tests {
    use crate::Device;
    use crate::sim::{SimConfig, SimDriver};

    #[test]
    fn graphs_that_are_over_are_forgotten_by_those_that_they_launch() {
        let device = Device::new(SimDriver::new(SimConfig::default()));
        let stream = device.create_stream().unwrap();
        let capture = stream.begin_capture().unwrap();
        let launches = stream.launches_of_capture().unwrap();
        let inner = capture.end().unwrap();
        for _ in 0..100 {
            let capture = stream.begin_capture().unwrap();
            inner.launch(&stream).unwrap();
            let outer = capture.end().unwrap();
            outer.launch(&stream).unwrap();
            assert_eq!(launches.pending().map(|pending| pending.len()), Some(1));
            stream.synchronize().unwrap();
        }
        assert!(launches.made.lock().captured_into.len() <= 2);
        drop(inner);
        assert!(launches.is_over());
    }
}
