//! Reclaimers: callbacks that free memory when a request would fail otherwise, and how they are
//! called.
//!
//! The memory that a reclaimer frees may be in pieces that do not serve the request. So all
//! reclaimers are called again, in rounds, as long as some of them free something. Each round asks
//! for twice as much as the round before, up to all that the device has, so there are few rounds;
//! the second asks for at least a granule or a segment. A reclaimer that freed nothing is not
//! called again for that request.

use std::cell::Cell;
use std::collections::HashSet;

use aquifer_device::fork::Mutex;

use crate::allocator::Allocator;
use crate::backing::growth::growth_bytes;
use crate::recovery::hooks::{ReclaimRequest, Reclaimer, Within, contained};
use crate::recovery::oom::report::Reclaimed;
use crate::types::Request;

/// Prepares calling the reclaimers for a request.
pub(crate) fn ask_reclaimers<'a>(allocator: &'a Allocator, request: &Request) -> Asking<'a> {
    // The allocator's lock is below that of the hooks.
    let least_again = growth_bytes(allocator, &allocator.state().shared(), request);
    Asking {
        allocator,
        request: ReclaimRequest { bytes: request.size, stream_id: request.stream.0, why: Mutex::default() },
        least_again,
        round: reclaimers(allocator).into_iter(),
        spent: HashSet::new(),
        fruitful: false,
        answers: Vec::new(),
    }
}

/// The reclaimers, by descending priority, with their numbers; none while this thread runs one already.
fn reclaimers(allocator: &Allocator) -> Vec<(u64, Reclaimer)> {
    if RECLAIMING.get() { Vec::new() } else { allocator.hooks().reclaimers() }
}

/// The state of calling the reclaimers for one request.
pub(crate) struct Asking<'a> {
    allocator: &'a Allocator,
    request: ReclaimRequest,
    /// The least number of bytes that the second round asks for.
    least_again: u64,
    /// The reclaimers that are still to be called in this round.
    round: std::vec::IntoIter<(u64, Reclaimer)>,
    /// Numbers of the reclaimers that have nothing to free.
    spent: HashSet<u64>,
    /// True if any reclaimer freed something in this round.
    fruitful: bool,
    /// What each did so far, in the order in which they were first called.
    answers: Vec<Reclaimed>,
}

impl Asking<'_> {
    /// Calls reclaimers until one may have freed something, so that the request is worth another
    /// try. Returns false once all have nothing to free, or were asked for all memory of the
    /// device.
    pub(crate) fn ask(&mut self) -> bool {
        loop {
            while let Some((number, reclaimer)) = self.round.next() {
                if self.spent.contains(&number) {
                    continue;
                }
                let freed = run(&reclaimer, &self.request);
                self.note(&reclaimer.name, freed);
                if freed.unwrap_or(0) == 0 {
                    self.spent.insert(number);
                }
                self.fruitful |= freed.is_some_and(|freed| freed > 0);
                if freed != Some(0) {
                    // A reclaimer that panicked may have freed something before.
                    return true;
                }
            }
            if !self.begin_round() {
                return false;
            }
        }
    }

    /// Notes for the report what a reclaimer did; `None` means that it panicked.
    fn note(&mut self, name: &str, freed: Option<u64>) {
        let why = self.request.why.get_mut().take();
        let why = if freed.is_none() { Some("it panicked".to_owned()) } else { why };
        let at = self.answers.iter().position(|answer| answer.name == name).unwrap_or_else(|| {
            self.answers.push(Reclaimed { name: name.to_owned(), bytes: 0, why: None });
            self.answers.len() - 1
        });
        let answer = &mut self.answers[at];
        answer.bytes = answer.bytes.saturating_add(freed.unwrap_or(0));
        answer.why = why.or(answer.why.take());
    }

    /// What the reclaimers did.
    pub(crate) fn into_answers(self) -> Vec<Reclaimed> {
        self.answers
    }

    /// Begins a round that asks for more. Returns false if no reclaimer has more, or if all memory
    /// was asked for.
    fn begin_round(&mut self) -> bool {
        let all = self.allocator.device().info().total_bytes;
        if !std::mem::take(&mut self.fruitful) || self.request.bytes >= all {
            return false;
        }
        self.request.bytes = self.request.bytes.saturating_mul(2).max(self.least_again).min(all);
        self.round = reclaimers(self.allocator).into_iter();
        true
    }
}

thread_local! {
    static RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a reclaimer, during which this thread calls no others. Returns the number of bytes that it
/// reported, or `None` if it panicked.
fn run(reclaimer: &Reclaimer, request: &ReclaimRequest) -> Option<u64> {
    let _within = Within::enter(&RECLAIMING);
    let freed = contained(&format_args!("the reclaimer {:?}", reclaimer.name), || (reclaimer.reclaim)(request));
    let (name, bytes) = (&reclaimer.name, request.bytes);
    tracing::debug!(target: "aquifer::reclaim", reclaimer = %name, bytes, freed, "a reclaimer was asked for memory");
    freed
}
