//! The graphs whose captures allocated from a private pool: they use its memory whenever they are launched.
//!
//! Of graphs that are captured here every launch is known, and when they are dropped. Of others nothing is: they are taken to be
//! launched as long as the pool is open, and to be done when what had been enqueued is that was there when it was closed.

use std::sync::Arc;

use aquifer_device::{Launches, Timeline};

/// Streams, and where their timelines must have got to.
pub(crate) type Launched = Vec<(Arc<Timeline>, u64)>;

#[derive(Debug, Default)]
pub(crate) struct Graphs {
    /// Those captured here, but for what is over and done.
    ours: Vec<Arc<Launches>>,
    foreign: Foreign,
}

/// Graphs that others captured.
#[derive(Debug, Default)]
enum Foreign {
    #[default]
    None,
    /// They may be launched.
    Some,
    /// They are launched no more, and are done after this.
    Over(Launched),
}

impl Graphs {
    /// Notes that the graph with these launches uses the pool.
    pub(crate) fn note(&mut self, launches: &Arc<Launches>) {
        if launches.is_foreign() {
            self.foreign = Foreign::Some;
        } else if !self.ours.iter().any(|known| Arc::ptr_eq(known, launches)) {
            self.ours.retain(is_alive);
            self.ours.push(launches.clone());
        }
    }

    /// Whether one may be launched, or runs.
    pub(crate) fn any(&self) -> bool {
        let foreign = match &self.foreign {
            Foreign::None => false,
            Foreign::Some => true,
            Foreign::Over(launched) => launched.iter().any(is_pending),
        };
        foreign || self.ours.iter().any(is_alive)
    }

    /// Whether one that is captured here may be launched.
    pub(crate) fn any_to_launch(&self) -> bool {
        self.ours.iter().any(|graph| !graph.is_over())
    }

    /// The pool is closed: graphs of others, and those that ours became part of, are launched no more. `known` are all streams that they may have been launched on.
    pub(crate) fn close(&mut self, known: &[Option<Arc<Timeline>>]) {
        let count = self.ours.len();
        self.ours.retain(|graph| graph.pending().is_some());
        if matches!(self.foreign, Foreign::Some) || self.ours.len() < count {
            self.foreign = Foreign::Over(all_of(known));
        }
    }

    /// What must be done before memory goes, if the graphs are launched no more; that of those which are is no matter of waiting.
    /// `known` are all streams.
    pub(crate) fn launched(&self, known: &[Option<Arc<Timeline>>]) -> Launched {
        let mut launched = match &self.foreign {
            Foreign::Over(launched) => launched.clone(),
            Foreign::None | Foreign::Some => Vec::new(),
        };
        let mut unseen = matches!(self.foreign, Foreign::Some);
        for graph in &self.ours {
            match graph.pending() {
                Some(pending) => launched.extend(pending.iter().map(|tick| (tick.timeline().clone(), tick.n() + 1))),
                None => unseen = true,
            }
        }
        if unseen {
            launched.extend(all_of(known));
        }
        launched.retain(is_pending);
        launched
    }
}

/// Whether a graph may still be launched, or runs.
fn is_alive(graph: &Arc<Launches>) -> bool {
    !graph.is_over() || graph.pending().is_none_or(|pending| !pending.is_empty())
}

/// Everything enqueued so far.
fn all_of(timelines: &[Option<Arc<Timeline>>]) -> Launched {
    timelines.iter().flatten().map(|timeline| (timeline.clone(), timeline.now() + 1)).collect()
}

fn is_pending((timeline, after): &(Arc<Timeline>, u64)) -> bool {
    !timeline.is_known_done(after.saturating_sub(1))
}
