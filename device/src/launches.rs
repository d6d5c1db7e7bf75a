//! Where captured graphs were launched, and what their launches come after: for whoever keeps memory that they use.
//!
//! A graph's work uses addresses that nobody names when it is launched. So whoever gives such memory up, after the graph was dropped
//! or not, asks here what must be done before; and whoever gives a capture memory that was in use says here what used it.
//!
//! Locks: that of a graph's launches is a leaf, but for those of the graphs that it was launched into; those were captured later.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::error::Result;
use crate::stream::Stream;
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
    within: Vec<Arc<Launches>>,
    /// What launches come after, one tick a stream.
    after: Vec<Tick>,
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
        made.after.retain(|known| !Arc::ptr_eq(known.timeline(), tick.timeline()) && !is_known_done(known));
        if !is_known_done(&tick) {
            made.after.push(tick);
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

    /// Orders a launch that is about to be enqueued on the stream after what it comes after. A launch that is captured itself passes that
    /// on to the graph that it becomes part of.
    pub(crate) fn order(&self, stream: &Stream) -> Result<()> {
        let after = self.after();
        match stream.launches_of_capture() {
            Some(outer) => after.into_iter().for_each(|tick| outer.come_after(tick)),
            None => after.iter().try_for_each(|tick| stream.wait_for(tick))?,
        }
        Ok(())
    }

    /// Notes a launch that was enqueued on the stream just now.
    pub(crate) fn note(&self, stream: &Stream) {
        let outer = stream.launches_of_capture();
        let mut made = self.made.lock();
        match outer {
            Some(outer) => {
                if !made.within.iter().any(|known| Arc::ptr_eq(known, &outer)) {
                    made.within.push(outer);
                }
            }
            None => {
                made.last.retain(|tick| tick.timeline().id() != stream.id() && !is_known_done(tick));
                made.last.push(stream.tick());
            }
        }
    }

    /// Notes that the graph is launched no more.
    pub(crate) fn note_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }

    /// Whether launches are not seen here, because somebody else captured the graph ([`Stream::announce_capture`]).
    pub fn is_foreign(&self) -> bool {
        !self.ours
    }

    /// Whether there will be no launches any more: the graph was dropped, and so was every other that a launch of it was captured into.
    /// Never known of graphs that somebody else captured.
    pub fn is_over(&self) -> bool {
        self.gone.load(Ordering::Acquire) && self.made.lock().within.iter().all(|outer| outer.is_over())
    }

    /// The last launch on each stream, those left out that are known to be done; no driver call. `None` if launches are not seen
    /// here, of this graph or of one that it is part of.
    pub fn pending(&self) -> Option<Vec<Tick>> {
        if !self.ours {
            return None;
        }
        let mut made = self.made.lock();
        made.last.retain(|tick| !is_known_done(tick));
        let mut pending = made.last.clone();
        for outer in &made.within {
            pending.extend(outer.pending()?);
        }
        Some(pending)
    }
}

fn is_known_done(tick: &Tick) -> bool {
    tick.timeline().is_known_done(tick.n())
}
