//! From a request to a served one: a draft, waits where they pay, a plan, its driver calls, and the accounts.
//!
//! When the host must learn how far streams got, it asks first, which waits for nothing. Really waiting stalls the program: it
//! is done where memory would be refused otherwise, and where growth would exceed what is in use by more than a share, as
//! long as stalls stay within their budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_device::{DeviceError, Timeline};

use crate::allocator::Allocator;
use crate::core::Request;
use crate::cross_stream::cannot_be_asked;
use crate::error::AllocError;
use crate::paged::driver::carry_out;
use crate::paged::milestones::Reason;
use crate::paged::plan::{Draft, Planned, Terms};
use crate::segments::{Growth, Refusal};
use crate::whole::Whole;

/// The host waits rather than let reserved memory exceed the peak in use by more than this share,
const SLACK_SHARE: u64 = 128;
/// as long as it waited for at most one allocation in so many.
const STALL_SPACING: u64 = 1000;
/// How often a request is planned anew, at most; others may take what it waited for.
const ROUNDS: u32 = 64;

/// What is still allowed for a request.
#[derive(Clone, Copy, Debug)]
struct Leave {
    /// Ask the streams how far they got.
    ask: bool,
    /// Take memory from the device.
    create: bool,
    /// And more than the request needs.
    ahead: bool,
}

/// What to do next.
enum Next {
    Finished(Result<Growth, AllocError>),
    /// Learn, without waiting, how far these streams got.
    Ask(Vec<(Arc<Timeline>, u64)>),
    /// Wait for this.
    Wait(Arc<Timeline>, u64),
    Reserve,
    Again,
}

impl Allocator {
    /// Serves the request from memory that moves, or that comes from the device.
    pub(crate) fn grow_paged(&self, request: &Request) -> Result<Growth, AllocError> {
        let mut leave = Leave { ask: true, create: true, ahead: true };
        for _ in 0..ROUNDS {
            match self.step(request, &mut leave)? {
                Next::Finished(growth) => return growth,
                Next::Ask(ticks) => {
                    leave.ask = false;
                    self.poll(&ticks)?;
                }
                Next::Wait(timeline, after) => {
                    if !self.stall_for(&timeline, after)? {
                        return Ok(Growth::Refused(Refusal::Device));
                    }
                    leave.ask = true;
                }
                Next::Reserve => {
                    if !self.reserve_addresses(request)? {
                        return Ok(Growth::Refused(Refusal::Addresses));
                    }
                }
                Next::Again => {}
            }
        }
        Ok(Growth::Refused(Refusal::Device))
    }

    fn step(&self, request: &Request, leave: &mut Leave) -> Result<Next, AllocError> {
        let buyable = if leave.create { self.buyable()? } else { (0, Refusal::Device) };
        let mut whole = self.shell().whole();
        // Somebody may have given something back meanwhile.
        if let Some(granted) = whole.take_own(request) {
            return Ok(Next::Finished(Ok(Growth::Grown(granted))));
        }
        let Some(draft) = whole.draft(request) else { return Ok(Next::Reserve) };
        if draft.buy > 0 {
            if leave.ask && !draft.donors.not_done.is_empty() {
                let ticks = whole.askable(&draft.donors.not_done);
                if !ticks.is_empty() {
                    return Ok(Next::Ask(ticks));
                }
            }
            if let Some((timeline, after)) = whole.worth_waiting(&draft) {
                return Ok(Next::Wait(timeline, after));
            }
        }
        let (buyable, refusal) = buyable;
        let terms = Terms { buyable, refusal, ahead: leave.ahead };
        match whole.plan(request, draft, &terms) {
            Planned::Ready(plan) => {
                drop(whole);
                let (work, held) = plan.part();
                let done = carry_out(self.device(), self.hooks(), work);
                let mut whole = self.shell().whole();
                let window = whole.settle_plan(request, held, &done);
                if let Some(window) = window {
                    let granted = whole.arena(request.slot).take(request, window);
                    return Ok(Next::Finished(Ok(Growth::Grown(granted))));
                }
                drop(whole);
                Ok(refused(done.error, done.at_creation, leave))
            }
            Planned::NoAddresses => Ok(Next::Reserve),
            Planned::Short { missing, not_done, refusal } => Ok(match whole.first_enough(&not_done, missing) {
                Some((timeline, after)) => Next::Wait(timeline, after),
                None => Next::Finished(Ok(Growth::Refused(refusal))),
            }),
        }
    }

    /// Bytes that may still be taken from the device, and what would refuse more.
    fn buyable(&self) -> Result<(u64, Refusal), AllocError> {
        let headroom = self.config().headroom;
        let by_headroom =
            if headroom == 0 { u64::MAX } else { self.device().memory_info()?.free.saturating_sub(headroom) };
        let core = self.shell().core();
        let held = core.reserved.saturating_add(core.growing);
        let by_limit = self.limit().map_or(u64::MAX, |limit| limit.saturating_sub(held));
        Ok(if by_headroom < by_limit { (by_headroom, Refusal::Headroom) } else { (by_limit, Refusal::Limit) })
    }

    /// Waits on the host; tells whether that could be done.
    fn stall_for(&self, timeline: &Timeline, after: u64) -> Result<bool, AllocError> {
        tracing::debug!(stream = timeline.id(), "the host waits so that memory can move");
        if let Some(paged) = &mut self.shell().core().paged {
            paged.stalls += 1;
        }
        match timeline.synchronize(after.saturating_sub(1)) {
            Ok(()) => Ok(true),
            Err(error) if cannot_be_asked(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Reserves addresses for the request's pool: as much as the device has memory, less where that is refused.
    fn reserve_addresses(&self, request: &Request) -> Result<bool, AllocError> {
        let Some(granule) = self.shell().core().paged.as_ref().map(|paged| paged.granule) else { return Ok(false) };
        let total = self.device().info().total_bytes;
        let least = request.size.next_multiple_of(granule) + granule;
        let share = if request.size <= crate::size_class::SMALL_SIZE { 16 } else { 1 };
        let mut bytes = (total / share).next_multiple_of(granule).max(least);
        self.device().settle();
        loop {
            match self.device().driver().reserve(bytes) {
                Ok(ptr) => {
                    let mut whole = self.shell().whole();
                    if let Some(paged) = &mut whole.paged {
                        paged.add_reservation(ptr.0, bytes);
                    }
                    whole.arena(request.slot).heap.add_reservation(ptr.0, bytes, request.pool, granule);
                    return Ok(true);
                }
                Err(error) if error.kind == aquifer_device::ErrorKind::OutOfAddresses || error.is_out_of_memory() => {
                    if bytes == least {
                        return Ok(false);
                    }
                    bytes = (bytes / 4).next_multiple_of(granule).max(least);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What follows from a plan that did not come off.
fn refused(error: Option<DeviceError>, at_creation: bool, leave: &mut Leave) -> Next {
    match error {
        Some(error) if !error.is_out_of_memory() => Next::Finished(Err(error.into())),
        Some(_) if at_creation && leave.ahead => {
            leave.ahead = false;
            Next::Again
        }
        Some(_) if at_creation && leave.create => {
            leave.create = false;
            Next::Again
        }
        _ => Next::Finished(Ok(Growth::Refused(Refusal::Device))),
    }
}

impl Whole {
    /// Where the streams may be asked how far they got: at the latest tick for which an event was recorded or may be now.
    fn askable(&mut self, not_done: &BTreeMap<(u32, u64), u64>) -> Vec<(Arc<Timeline>, u64)> {
        let mut latest: BTreeMap<u32, u64> = BTreeMap::new();
        for &(slot, after) in not_done.keys() {
            let Some(timeline) = self.timeline(slot) else { continue };
            let recorded = timeline.now();
            let may_record = self.may_record(slot, Reason::Question);
            // Ticks below the count are covered by an event that was recorded already.
            if after <= recorded || may_record {
                latest.insert(slot, after);
            }
        }
        for (&slot, &after) in &latest {
            if self.timeline(slot).is_some_and(|timeline| after > timeline.now()) {
                self.note_recorded(slot, Reason::Question);
            }
        }
        latest.into_iter().filter_map(|(slot, after)| Some((self.timeline(slot)?.clone(), after))).collect()
    }

    /// What to wait for rather than grow: where growth would exceed the peak in use by too much, and stalls are few.
    fn worth_waiting(&self, draft: &Draft) -> Option<(Arc<Timeline>, u64)> {
        let paged = self.paged.as_ref()?;
        let searches: u64 = self.heaps().flat_map(|heap| &heap.pools).map(|pool| pool.searches).sum();
        let within_budget = (paged.stalls + 1).saturating_mul(STALL_SPACING) <= searches;
        let grown = self.reserved + self.growing + draft.buy * paged.granule;
        let tolerated = paged.in_use_peak + paged.in_use_peak / SLACK_SHARE;
        if !within_budget || grown <= tolerated {
            return None;
        }
        self.first_enough(&draft.donors.not_done, draft.buy)
    }

    /// The earliest tick of a stream by which so many granules are done, on that stream alone; if there is none, the latest of
    /// the stream that has most.
    fn first_enough(&self, not_done: &BTreeMap<(u32, u64), u64>, granules: u64) -> Option<(Arc<Timeline>, u64)> {
        let mut sums: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        for (&(slot, after), &count) in not_done {
            let (sum, latest) = sums.entry(slot).or_default();
            if *sum < granules {
                (*sum, *latest) = (*sum + count, after);
            }
        }
        let (&slot, &(_, after)) = sums.iter().max_by_key(|(_, (sum, _))| *sum)?;
        Some((self.timeline(slot)?.clone(), after))
    }
}
