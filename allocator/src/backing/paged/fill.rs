//! Maps memory at given addresses: those of memory that grows, and those of graphs whose memory was
//! lent.
//!
//! The memory comes from the same places as that of blocks: spare frames, frames in free blocks
//! whose last use is done, and the device.

use std::ops::Range;

use aquifer_device::{ErrorKind, Tick};

use crate::allocator::Allocator;
use crate::backing::growth::{buyable, room};
use crate::backing::paged::carry_out::carry_out;
use crate::backing::paged::dedicated::recycle_deferred_releases;
use crate::backing::paged::grow::ROUNDS;
use crate::backing::trim::take_stuck_back;
use crate::core::Core;
use crate::core::limits::Refusal;
use crate::core::pools::{PoolKey, Which};
use crate::core::remap::commit::Committed;
use crate::core::remap::lend::LentMemory;
use crate::core::remap::plan::Sources;
use crate::cross_stream::{poll, stall_for};
use crate::error::AllocError;
use crate::types::{BlockId, Recipient, Request, latest_by_stream};

/// Where memory is to be mapped.
#[derive(Debug)]
pub(crate) enum Place {
    /// The parts of a range that have no memory, in the reservation at `base`.
    Dedicated { base: u64, range: Range<u64> },
    /// The addresses whose memory a pool has lent.
    Lent(PoolKey),
}

/// What is to be filled now, as the lock's holder sees it.
enum Lacking {
    Nothing,
    Dedicated {
        base: u64,
        ranges: Vec<Range<u64>>,
    },
    Lent {
        of: Recipient,
        holes: Vec<(BlockId, Range<u64>)>,
    },
    /// Another thread changes mappings there.
    Changing,
}

/// The next step.
enum Next {
    Finished(Result<(), Refusal>),
    /// Learn, without waiting, how far these streams got.
    Ask(Vec<Tick>),
    /// Wait on the host until the work is done.
    Wait(Tick),
    /// Wait until other threads have finished taking memory or changing mappings.
    AwaitOthers,
    /// The same for memory that is stuck.
    AwaitStuck,
    /// A part was filled.
    Filled,
    Again,
}

/// Maps memory at those addresses of a place that have none. Plans anew after each wait.
pub(crate) fn try_fill(
    allocator: &Allocator,
    request: &Request,
    place: &Place,
) -> Result<Result<(), Refusal>, AllocError> {
    let (mut may_ask, mut round) = (true, 0);
    while round < ROUNDS {
        round += 1;
        recycle_deferred_releases(allocator, true)?;
        match fill_step(allocator, request, place, may_ask)? {
            Next::Finished(filled) => return Ok(filled),
            Next::Ask(ticks) => {
                may_ask = false;
                poll(&ticks)?;
            }
            Next::Wait(tick) => {
                if !stall_for(allocator, &tick)? {
                    break;
                }
                may_ask = true;
            }
            Next::AwaitOthers => allocator.gate()?.wait(),
            Next::AwaitStuck => {
                allocator.gate()?.wait();
                take_stuck_back(allocator)?;
            }
            Next::Filled => round = 0,
            Next::Again => {}
        }
    }
    Ok(Err(Refusal::Device))
}

/// What a place lacks.
fn look(core: &mut Core, place: &Place) -> Result<Lacking, AllocError> {
    match place {
        Place::Dedicated { base, range } => {
            if core.sleeps(&(*base..range.end)) {
                return Err(AllocError::Asleep);
            }
            let paged = core.paged();
            // Another thread was recycling this memory when it was looked for, and could not unmap
            // it.
            if paged.deferred_release.is_below(*base, range.end) {
                return Ok(Lacking::Changing);
            }
            Ok(Lacking::Dedicated { base: *base, ranges: paged.unmapped_within(range) })
        }
        Place::Lent(_) if core.is_asleep() => Err(AllocError::Asleep),
        Place::Lent(key) => Ok(match core.lent_memory(*key) {
            LentMemory::Nothing => Lacking::Nothing,
            LentMemory::Changing => Lacking::Changing,
            LentMemory::Holes { of, holes } => Lacking::Lent { of, holes },
        }),
    }
}

impl Lacking {
    fn bytes(&self) -> u64 {
        let of = |range: &Range<u64>| range.end - range.start;
        match self {
            Lacking::Dedicated { ranges, .. } => ranges.iter().map(of).sum(),
            Lacking::Lent { holes, .. } => holes.iter().map(|(_, range)| of(range)).sum(),
            Lacking::Nothing | Lacking::Changing => 0,
        }
    }
}

fn fill_step(allocator: &Allocator, request: &Request, place: &Place, may_ask: bool) -> Result<Next, AllocError> {
    let room = room(allocator)?;
    let _gate = allocator.gate()?.shared();
    let mut guard = allocator.state().lock();
    let lacking = look(&mut guard, place)?;
    let is_whole = match &lacking {
        Lacking::Nothing => return Ok(Next::Finished(Ok(()))),
        Lacking::Changing if matches!(place, Place::Lent(_)) => return Ok(Next::AwaitStuck),
        Lacking::Changing => return Ok(Next::Again),
        Lacking::Dedicated { .. } => true,
        Lacking::Lent { .. } => false,
    };
    let (buyable, refusal) = buyable(allocator, &guard, &room);
    if lacking.bytes() > allocator.device().info().total_bytes {
        // Laying it out granule by granule is not worth while.
        let refusal = if buyable < lacking.bytes() { refusal } else { Refusal::Device };
        return Ok(Next::Finished(Err(refusal)));
    }
    let paged = guard.paged();
    let (granule, at_hand) = (paged.granule, paged.spares.granules());
    let granules = lacking.bytes() / granule;
    let spares = granules.min(at_hand);
    let donors = guard.donors(granules - spares, None, Which::NotForGraphs);
    let buy = (granules - spares).saturating_sub(donors.granules);
    if buy > 0 && may_ask {
        let ticks = guard.streams.not_done(latest_by_stream(donors.not_done.keys().copied()));
        if !ticks.is_empty() {
            return Ok(Next::Ask(ticks));
        }
    }
    if buy > buyable / granule {
        return Ok(match guard.streams.first_enough(&donors.not_done, buy - buyable / granule) {
            _ if room.is_uncertain(&guard, refusal) => Next::AwaitOthers,
            Some(tick) => Next::Wait(tick),
            None => Next::Finished(Err(refusal)),
        });
    }
    let sources = Sources { donors, spares, create: buy };
    let mut remap = match lacking {
        Lacking::Lent { of, holes } => guard.plan_bringing_back(of, &holes, sources),
        Lacking::Dedicated { base, ranges } => guard.plan_dedicated(base, request.recipient(), ranges, sources),
        Lacking::Nothing | Lacking::Changing => return Ok(Next::Again),
    };
    drop(guard);
    carry_out(allocator.device(), allocator.hooks(), &mut remap);
    let mut guard = allocator.state().lock();
    let Committed { filled, error, .. } = guard.commit(remap);
    if !is_whole {
        guard.counters.events.graph_bytes_returned += filled;
    }
    drop(guard);
    match error {
        None if is_whole => Ok(Next::Finished(Ok(()))),
        None => Ok(Next::Filled),
        Some(error) if error.is_out_of_memory() => Ok(Next::Finished(Err(Refusal::Device))),
        // A capture began before memory was unmapped. The next plan moves none.
        Some(error) if error.kind == ErrorKind::Capture => Ok(Next::Again),
        Some(error) => Err(error.into()),
    }
}
