//! Reclaimers: callbacks that free memory when a request would fail otherwise, and how they are called.
//!
//! The memory that a reclaimer frees may be in pieces that do not serve the request. So all reclaimers are called again, in rounds, as long
//! as some of them free something. Each round asks for twice as much as the round before, up to all that the device has, so there are few
//! rounds; the second asks for at least a granule or a segment. A reclaimer that freed nothing is not called again for that request.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use aquifer_device::fork::Mutex;

use crate::allocator::Allocator;
use crate::recovery::hooks::{Registration, Within, contained};
use crate::shell::core::Request;

/// The request to a reclaimer.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReclaimRequest {
    /// Bytes to free, as far as possible. At first, these are the bytes that the failing request needs; in later rounds, more each time.
    pub bytes: u64,
    /// The stream that the memory is for, by its [`Stream::id`](aquifer_device::Stream::id).
    pub stream_id: u32,
    why: Mutex<Option<String>>,
}

impl ReclaimRequest {
    /// Says why no more was freed. If memory runs out all the same, the report has it ([`Reclaimed::why`]). The last call counts.
    pub fn explain(&self, why: impl Into<String>) {
        *self.why.lock() = Some(why.into());
    }
}

/// What a reclaimer did for a request that failed all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reclaimed {
    /// The name that it was registered with. Reclaimers of one name count as one.
    pub name: String,
    /// Bytes that it reported as freed, in all rounds.
    pub bytes: u64,
    /// Why it freed no more, if it said so.
    pub why: Option<String>,
}

pub(crate) type Reclaim = Arc<dyn Fn(&ReclaimRequest) -> u64 + Send + Sync>;

/// A registered reclaimer.
#[derive(Clone)]
pub(crate) struct Reclaimer {
    pub(crate) number: u64,
    pub(crate) priority: i32,
    pub(crate) name: String,
    pub(crate) reclaim: Reclaim,
}

impl Allocator {
    /// Registers the callback `reclaim`, which is called when a request would fail otherwise: unused memory has gone back to the device,
    /// streams were waited for, and neither helped. It is to free [`ReclaimRequest::bytes`] or more by dropping handles, or as much as it
    /// can, and to return how many bytes it freed. 0 means that it has nothing to free.
    ///
    /// *How often.* Reclaimers of higher `priority` are called first, those of equal priority in the order of registration. After each one
    /// that freed something the request is tried again, once streams that still use the memory are done with it. If the request still does
    /// not fit when all were called, because the freed memory is in pieces, they are called again for twice as much, and so on up to
    /// all that the device has; those that returned 0 or panicked are left out. So a request fails only when reclaimers have
    /// nothing more, and one that only claims to free memory is called a bounded number of times.
    ///
    /// *Where.* It runs on the thread that made the request, and on several threads at once if several run out of memory. The allocator
    /// holds no lock, but the caller may. So a reclaimer that shares a lock with code that allocates must only try to take it, and return 0
    /// if it is taken.
    ///
    /// *What is told of it.* The report of a request that fails lists the reclaimers, what they freed, and why they freed no more, if they
    /// say so ([`ReclaimRequest::explain`]).
    ///
    /// *What it may do.* It may free and allocate, also from this allocator. An allocation that fails inside it returns an error there and
    /// calls no reclaimers. It may end registrations, including its own. A panic in it is logged and goes no further; it counts as having
    /// freed nothing, but any memory that it freed serves the request all the same.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use aquifer_allocator::{Allocation, Allocator, Config};
    /// use aquifer_device::{Device, sim::{SimConfig, SimDriver}};
    /// let device = Device::new(SimDriver::new(SimConfig::parse("64MiB")?));
    /// let allocator = Allocator::new(&device, Config::default())?;
    /// let stream = device.default_stream();
    /// let cache = Arc::new(Mutex::new(Vec::<Allocation>::new()));
    /// let evicted = cache.clone();
    /// let registration = allocator.register_reclaimer(0, "cache", move |request| {
    ///     let Ok(mut cache) = evicted.try_lock() else { return 0 };
    ///     let mut freed = 0;
    ///     while freed < request.bytes {
    ///         let Some(block) = cache.pop() else { break };
    ///         freed += block.bytes();
    ///     }
    ///     freed
    /// });
    /// for _ in 0..60 {
    ///     let block = allocator.alloc_bytes(1 << 20, stream)?;
    ///     cache.lock().unwrap().push(block); // not locked while it allocates
    /// }
    /// let large = allocator.alloc_bytes(40 << 20, stream)?; // 36 blocks are evicted for it
    /// assert!(cache.lock().unwrap().len() >= 20);
    /// # drop((large, registration));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn register_reclaimer(
        &self,
        priority: i32,
        name: &str,
        reclaim: impl Fn(&ReclaimRequest) -> u64 + Send + Sync + 'static,
    ) -> Registration {
        self.hooks().add_reclaimer(priority, name, Arc::new(reclaim))
    }

    /// Prepares calling the reclaimers for a request.
    pub(crate) fn ask_reclaimers(&self, request: &Request) -> Asking<'_> {
        // The core's lock is below that of the hooks.
        let least_again = self.growth_bytes(&self.shell().core(), request);
        Asking {
            allocator: self,
            request: ReclaimRequest { bytes: request.size, stream_id: request.slot, why: Mutex::default() },
            least_again,
            round: self.reclaimers().into_iter(),
            spent: HashSet::new(),
            fruitful: false,
            answers: Vec::new(),
            by_name: HashMap::new(),
        }
    }

    /// The reclaimers, by descending priority; none while this thread runs one already.
    fn reclaimers(&self) -> Vec<Reclaimer> {
        if RECLAIMING.get() { Vec::new() } else { self.hooks().reclaimers() }
    }
}

/// The state of calling the reclaimers for one request.
pub(crate) struct Asking<'a> {
    allocator: &'a Allocator,
    request: ReclaimRequest,
    /// The least number of bytes that the second round asks for.
    least_again: u64,
    /// The reclaimers that are still to be called in this round.
    round: std::vec::IntoIter<Reclaimer>,
    /// Numbers of the reclaimers that have nothing to free.
    spent: HashSet<u64>,
    /// True if any reclaimer freed something in this round.
    fruitful: bool,
    /// What each did so far, in the order in which they were first called.
    answers: Vec<Reclaimed>,
    /// Their places among these.
    by_name: HashMap<String, usize>,
}

impl Asking<'_> {
    /// Calls reclaimers until one may have freed something, so that the request is worth another try. Returns false once all have nothing to
    /// free, or were asked for all memory of the device.
    pub(crate) fn ask(&mut self) -> bool {
        loop {
            while let Some(reclaimer) = self.round.next() {
                if self.spent.contains(&reclaimer.number) {
                    continue;
                }
                let freed = run(&reclaimer, &self.request);
                self.note(&reclaimer.name, freed);
                if freed.unwrap_or(0) == 0 {
                    self.spent.insert(reclaimer.number);
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
        let at = *self.by_name.entry(name.to_owned()).or_insert_with(|| {
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

    /// Begins a round that asks for more. Returns false if no reclaimer has more, or if all memory was asked for.
    fn begin_round(&mut self) -> bool {
        let all = self.allocator.device().info().total_bytes;
        if !std::mem::take(&mut self.fruitful) || self.request.bytes >= all {
            return false;
        }
        self.request.bytes = self.request.bytes.saturating_mul(2).max(self.least_again).min(all);
        self.round = self.allocator.reclaimers().into_iter();
        true
    }
}

thread_local! {
    static RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a reclaimer, during which this thread calls no others. Returns the number of bytes that it reported, or `None` if it panicked.
fn run(reclaimer: &Reclaimer, request: &ReclaimRequest) -> Option<u64> {
    let _within = Within::enter(&RECLAIMING);
    let freed = contained(&format_args!("the reclaimer {:?}", reclaimer.name), || (reclaimer.reclaim)(request));
    tracing::debug!(
        target: "aquifer::reclaim",
        reclaimer = %reclaimer.name,
        bytes = request.bytes,
        freed,
        "a reclaimer was asked for memory"
    );
    freed
}
