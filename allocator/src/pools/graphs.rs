//! The graphs whose captures allocated from a private pool: they use its memory whenever they are launched.
//!
//! Of graphs that are captured here every launch is known, and when they are dropped. Of others nothing is: they are taken to be
//! launched as long as the pool is open, and to be done when what had been enqueued is that was there when it was closed.

use std::sync::Arc;

use aquifer_device::{LaunchOrder, Launches, Timeline};

/// Streams, and where their timelines must have got to.
pub(crate) type Launched = Vec<(Arc<Timeline>, u64)>;

#[derive(Debug, Default)]
pub(crate) struct Graphs {
    /// What one gives back while it is captured, the next may use. So they are launched one after the other.
    order: Arc<LaunchOrder>,
    /// Those captured here, but for what is over and done.
    ours: Vec<Arc<Launches>>,
    /// Whether others captured graphs.
    foreign: bool,
    /// Once the pool is closed: what graphs of others are done after.
    closed: Option<Launched>,
}

impl Graphs {
    /// Notes that the graph with these launches uses the pool.
    pub(crate) fn note(&mut self, launches: &Arc<Launches>) {
        launches.keep_order(&self.order);
        if launches.is_foreign() {
            self.foreign = true;
        } else if !self.ours.iter().any(|known| Arc::ptr_eq(known, launches)) {
            self.foreign = self.any_foreign();
            self.ours.retain(is_alive);
            self.ours.push(launches.clone());
        }
    }

    /// Whether one may be launched, or runs.
    pub(crate) fn any(&self) -> bool {
        let foreign =
            self.closed.as_ref().map_or_else(|| self.any_foreign(), |launched| launched.iter().any(is_pending));
        foreign || self.any_of_ours()
    }

    /// Whether one that is captured here may be launched, or runs.
    pub(crate) fn any_of_ours(&self) -> bool {
        self.ours.iter().any(is_alive)
    }

    /// Whether others captured graphs, or ours into graphs of theirs.
    fn any_foreign(&self) -> bool {
        self.foreign || self.ours.iter().any(|graph| graph.pending().is_none())
    }

    /// The pool is closed: graphs of others are launched no more. `known` are all streams that they may have been launched on.
    pub(crate) fn close(&mut self, known: &[Option<Arc<Timeline>>]) {
        self.closed = Some(if self.any_foreign() { all_of(known) } else { Vec::new() });
    }

    /// What must be done before memory goes, if the graphs are launched no more; that of those which are is no matter of waiting.
    /// `known` are all streams.
    pub(crate) fn launched(&self, known: &[Option<Arc<Timeline>>]) -> Launched {
        let mut launched = match &self.closed {
            Some(launched) => launched.clone(),
            None if self.any_foreign() => all_of(known),
            None => Vec::new(),
        };
        let pending = self.ours.iter().flat_map(|graph| graph.pending_here());
        launched.extend(pending.map(|tick| (tick.timeline().clone(), tick.n() + 1)));
        launched.retain(is_pending);
        launched
    }
}

/// Whether a graph may still be launched, or runs, as far as that is seen here.
fn is_alive(graph: &Arc<Launches>) -> bool {
    !graph.is_over() || !graph.pending_here().is_empty()
}

/// Everything enqueued so far.
fn all_of(timelines: &[Option<Arc<Timeline>>]) -> Launched {
    timelines.iter().flatten().map(|timeline| (timeline.clone(), timeline.now() + 1)).collect()
}

fn is_pending((timeline, after): &(Arc<Timeline>, u64)) -> bool {
    !timeline.is_known_done(after.saturating_sub(1))
}
