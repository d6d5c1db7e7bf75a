//! The graphs whose captures allocated from a private pool: they use its memory whenever they are
//! launched.
//!
//! Every launch of a graph that is captured through this library is known, and so is when the graph
//! is dropped. Of a graph that is followed, the driver tells when it and its launches are over, and
//! it counts as ours here. Of other graphs nothing is known: they are assumed to be launched as
//! long as the pool is open, on any stream, so only waiting for the device tells that they are
//! done.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use aquifer_device::Tick;
use aquifer_device::internal::{LaunchOrder, Launches, WaitMark};

/// The work that must be done before memory that graphs used may go.
#[derive(Debug, Default)]
pub(crate) struct Launched {
    pub(crate) ticks: Vec<Tick>,
    /// For launches that are not seen here: a wait for the whole device.
    pub(crate) device: Option<WaitMark>,
}

impl Launched {
    /// True if any of it is not known to be done.
    pub(crate) fn is_pending(&self) -> bool {
        self.ticks.iter().any(|tick| !tick.is_known_done()) || self.is_device_pending()
    }

    /// True if the device must be waited for.
    pub(crate) fn is_device_pending(&self) -> bool {
        self.device.as_ref().is_some_and(|mark| !mark.is_passed())
    }

    /// Combines both. One wait for the device passes either mark, so one that is not passed yet is
    /// enough.
    pub(crate) fn and(mut self, other: Launched) -> Launched {
        self.ticks.extend(other.ticks);
        self.device = other.device.or(self.device);
        self
    }
}

#[derive(Debug, Default)]
pub(crate) struct Graphs {
    /// Memory that one graph's capture freed may be used by the next graph. So the graphs are
    /// launched one after the other.
    order: Arc<LaunchOrder>,
    /// Graphs captured through this library, or followed, by number, except some that are over and
    /// done.
    ours: BTreeMap<u64, Arc<Launches>>,
    /// Numbers of those of which each launch first brings back what the pool lent.
    bring_back: BTreeSet<u64>,
    /// How many of them were left when those that are over were last forgotten.
    left: usize,
    /// True if other libraries captured graphs.
    foreign: bool,
    /// Once the pool is closed: the wait after which graphs of other libraries are done.
    closed: Option<WaitMark>,
}

impl Graphs {
    /// Notes that the graph with these launches uses the pool.
    ///
    /// Returns true if that was not known.
    pub(crate) fn note(&mut self, launches: &Arc<Launches>) -> bool {
        launches.keep_order(&self.order);
        if launches.is_foreign() {
            return !std::mem::replace(&mut self.foreign, true);
        }
        let is_new = self.ours.insert(launches.number(), launches.clone()).is_none();
        // Once there are enough of them to pay for the search.
        if is_new && self.ours.len() > 2 * self.left + 8 {
            self.foreign = self.any_foreign();
            self.ours.retain(|_, graph| is_alive(graph));
            self.bring_back.retain(|number| self.ours.contains_key(number));
            self.left = self.ours.len();
        }
        is_new
    }

    /// Forgets graphs that are over and done, until one is not. So [`Graphs::any`] finds that one
    /// first.
    pub(crate) fn forget_those_over(&mut self) {
        while let Some(graph) = self.ours.first_entry()
            && !is_alive(graph.get())
        {
            let graph = graph.remove();
            self.foreign |= graph.pending().is_none();
            self.bring_back.remove(&graph.number());
            self.left = self.left.min(self.ours.len());
        }
    }

    /// True if a graph may be launched, or runs.
    pub(crate) fn any(&self) -> bool {
        let closed = self.closed.as_ref().is_some_and(WaitMark::is_passed);
        self.any_of_ours() || (!closed && self.any_foreign())
    }

    /// True if the pool keeps its memory for the graph with these launches.
    pub(crate) fn has(&self, launches: &Launches) -> bool {
        if launches.is_foreign() { self.foreign } else { self.ours.contains_key(&launches.number()) }
    }

    /// True if a graph of ours may be launched, or runs.
    pub(crate) fn any_of_ours(&self) -> bool {
        self.ours.values().any(is_alive)
    }

    /// Notes that each launch of a graph first brings back what the pool lent.
    pub(crate) fn note_bringing_back(&mut self, number: u64) {
        if self.ours.contains_key(&number) {
            self.bring_back.insert(number);
        }
    }

    /// True if no graph runs, as far as is known, and each one that may be launched brings back
    /// first what the pool lent.
    pub(crate) fn are_idle(&self) -> bool {
        let may_rest = |(number, graph): (&u64, &Arc<Launches>)| {
            (graph.is_over() || self.bring_back.contains(number)) && graph.pending_here().is_empty()
        };
        !self.any_foreign() && self.ours.iter().all(may_rest)
    }

    /// The launches under way of all graphs that are seen here.
    pub(crate) fn running(&self) -> impl Iterator<Item = Tick> + '_ {
        self.ours.values().flat_map(|graph| graph.pending_here())
    }

    /// True if other libraries captured graphs, or captured launches of ours into their graphs.
    fn any_foreign(&self) -> bool {
        self.foreign || self.ours.values().any(|graph| graph.pending().is_none())
    }

    /// The launches under way of graphs that are not launched any more.
    pub(crate) fn last_launches(&self) -> impl Iterator<Item = Tick> + '_ {
        self.ours.values().filter(|graph| graph.is_over()).flat_map(|graph| graph.pending_here())
    }

    #[cfg(all(test, not(aquifer_shuttle)))]
    pub(crate) fn known(&self) -> usize {
        self.ours.len()
    }

    /// Notes that the pool is closed. Graphs of other libraries are not launched after `now`.
    pub(crate) fn close(&mut self, now: WaitMark) {
        self.closed = Some(now);
    }

    /// The work that must be done before memory may go that was used by graphs which are not
    /// launched after `now`. Memory of graphs that may still be launched stays, however long one
    /// waits.
    pub(crate) fn launched(&self, now: WaitMark) -> Launched {
        let others = self.any_foreign().then(|| self.closed.clone().unwrap_or(now));
        Launched { ticks: self.running().collect(), device: others.filter(|mark| !mark.is_passed()) }
    }
}

/// True if a graph may still be launched, or runs, as far as this library sees.
fn is_alive(graph: &Arc<Launches>) -> bool {
    !graph.is_over() || !graph.pending_here().is_empty()
}
