//! The out-of-memory report (`report.rs`): the request, the memory at that time and what follows
//! from it (`seen.rs`), and the words of what helps (`advice.rs`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aquifer_device::MemoryInfo;
use seen::Seen;

use crate::accounting::memory_stats::attribute;
use crate::allocator::Allocator;
use crate::backing::growth::growth_bytes;
use crate::backing::paged::split::choose_for;
use crate::config::SplitFrames;
use crate::core::Core;
use crate::core::limits::Refusal;
use crate::error::AllocError;
use crate::history::{Action, Subject};
use crate::open::trim_others;
use crate::size_class;
use crate::snapshot::SaveError;
use crate::types::Request;

pub(crate) mod advice;
pub(crate) mod report;
pub(crate) mod seen;

pub use advice::Advice;
pub use report::{OomReport, Reclaimed};

/// The attempts of the ladder before it gave up.
#[derive(Debug, Default)]
pub(crate) struct Tried {
    pub(crate) refusal: Option<Refusal>,
    pub(crate) released: u64,
    pub(crate) reclaimers: Vec<Reclaimed>,
    /// True if the request is for dedicated memory.
    pub(crate) dedicated: bool,
    /// True if it is for the reserve.
    pub(crate) reserve: bool,
    /// Bytes that the owner of such memory has already and keeps.
    pub(crate) own: u64,
    /// The private pool whose graph is to be launched, if the request brings back what that lent.
    pub(crate) launched_pool: Option<(u64, u64)>,
}

/// The name under which reports count what other allocators gave back.
const OTHER_ALLOCATORS: &str = "other allocators of this process";

impl Tried {
    /// For a request outside of the heaps, whose owner has `own` bytes already.
    pub(crate) fn for_dedicated(own: u64) -> Tried {
        Tried { dedicated: true, own, ..Tried::default() }
    }

    /// For a launch of a graph of a private pool.
    pub(crate) fn for_launch(pool: (u64, u64)) -> Tried {
        Tried { launched_pool: Some(pool), ..Tried::for_dedicated(0) }
    }

    /// Bytes that the device must give if nothing cached helps.
    pub(crate) fn growth(&self, allocator: &Allocator, core: &Core, request: &Request) -> u64 {
        if self.dedicated { request.size } else { growth_bytes(allocator, core, request) }
    }

    /// Has other allocators of the device give back what they cache, about `bytes`. Returns true if
    /// they gave anything.
    pub(crate) fn ask_others(&mut self, allocator: &Allocator, bytes: u64) -> bool {
        let freed = trim_others(allocator, bytes);
        if freed > 0 {
            match self.reclaimers.iter_mut().find(|one| one.name == OTHER_ALLOCATORS) {
                Some(one) => one.bytes = one.bytes.saturating_add(freed),
                None => self.reclaimers.push(Reclaimed { name: OTHER_ALLOCATORS.to_owned(), bytes: freed, why: None }),
            }
        }
        freed > 0
    }
}

/// How long an answer about processes serves, for programs that are refused often.
const PROCESSES_ARE_KNOWN_FOR: Duration = Duration::from_secs(1);

/// Counts, traces and reports a request that nothing served, and calls the observers. If the
/// allocator is about to sleep, returns that error instead, because reclaimers get no turns any
/// more.
#[cold]
pub(crate) fn out_of_memory(allocator: &Allocator, request: &Request, tried: Tried) -> AllocError {
    if allocator.state().refuses_wake_locks() {
        return AllocError::Asleep;
    }
    // Processes have no part in refusals by a limit.
    let is_of_device = matches!(tried.refusal, Some(Refusal::Device | Refusal::Headroom));
    let attribution = attribute(allocator, is_of_device.then_some(PROCESSES_ARE_KNOWN_FOR)).ok();
    let memory = attribution.as_ref().map(|all| MemoryInfo { free: all.free, total: all.total });
    let state = allocator.state();
    let mut guard = state.lock();
    guard.counters.events.num_ooms += 1;
    let (pool, free) = (guard.pools.history_id(request.pool), memory.map_or(0, |memory| memory.free));
    let subject = Subject { addr: free, size: request.size, stream: request.stream, tag: request.tag, pool };
    guard.history.note(&[Action::Oom], subject);
    let mut from_blocks = Vec::new();
    if !tried.dedicated {
        from_blocks.extend(advice_to_lend(&guard, request));
        from_blocks.extend(advice_to_cross_streams(&guard, request));
    }
    let mut seen = Seen::new(&guard, request, tried.own, tried.refusal == Some(Refusal::PoolLimit));
    let growth = tried.growth(allocator, &guard, request);
    let lacking = if tried.dedicated { None } else { guard.lacking_bytes(request) };
    if allocator.config().split_frames == SplitFrames::Off && !tried.dedicated && !guard.streams.any_captures() {
        let on_device = free.saturating_sub(allocator.headroom());
        let affordable =
            allocator.limit().map_or(on_device, |limit| on_device.min(limit.saturating_sub(guard.reserved())));
        let chosen = choose_for(&mut guard, request, affordable).filter(|chosen| !chosen.is_empty());
        from_blocks.extend(chosen.map(|_| Advice::SplitFrames));
    }
    // A request that the pool's limit allowed is claimed already.
    let under_way = if tried.refusal == Some(Refusal::PoolLimit) { 0 } else { request.requested };
    let own_pool = guard.pools.owner_of(request.pool).filter(|_| !tried.dedicated);
    let padding = if tried.dedicated { 0 } else { request.size.saturating_sub(size_class::round(request.requested)) };
    let mut report = OomReport {
        device: allocator.device().info().ordinal,
        device_name: allocator.device().info().name.clone(),
        requested: request.requested,
        padding,
        is_mapped: tried.dedicated || guard.paged_granule_for(request).is_some(),
        growth,
        from_device: lacking.unwrap_or(growth),
        stream_id: request.stream.0,
        pool: own_pool.map(|private| private.id),
        pool_limit: own_pool.and_then(|private| private.options.limit),
        claimed_in_pool: own_pool.map_or(0, |private| private.claimed.saturating_sub(under_way)),
        refusal: tried.refusal,
        limit: allocator.limit(),
        headroom: allocator.headroom(),
        memory,
        allocated: guard.counters.bytes.current_of_all(),
        requested_live: guard.counters.requested.current_of_all() - guard.waiting().requested(),
        reserved: guard.reserved(),
        waiting: guard.waiting_bytes().into_iter().map(|(stream, bytes)| (stream.0, bytes)).collect(),
        attribution,
        released: tried.released,
        reclaimed: tried.reclaimers.iter().fold(0, |sum, one| sum.saturating_add(one.bytes)),
        reclaimers: tried.reclaimers,
        is_reserve: tried.reserve,
        is_captured: guard.streams.captures(request.stream),
        launched_pool: tried.launched_pool,
        lent_by_graphs: guard.lent(),
        ..OomReport::default()
    };
    drop(guard);
    state.walk(|shared, passed| seen.add(shared, passed));
    let held = seen.tell(&mut report);
    report.note_lacking();
    let lacks_memory = tried.dedicated || report.lacking_on_device > 0 || report.lacking_below_limit > 0;
    let lacks_addresses = report.refusal == Some(Refusal::Addresses) && !lacks_memory;
    from_blocks.extend(lacks_addresses.then_some(Advice::UseSegments));
    report.advise(from_blocks, &held, allocator.config().fail_fast);
    let OomReport { stream_id: stream, requested, allocated, reserved, .. } = report;
    tracing::debug!(target: "aquifer::oom", stream, requested, allocated, reserved, "out of memory");
    if let Some(path) = &allocator.config().oom_snapshot
        && allocator.hooks().is_first_refusal()
    {
        report.snapshot = Some(save_snapshot(allocator, path, report.device, subject));
    }
    allocator.hooks().notify(&report);
    AllocError::OutOfMemory(Box::new(report))
}

/// Saves a snapshot for the option `oom_snapshot`, with the refused request. Returns the path of
/// the file.
fn save_snapshot(allocator: &Allocator, path: &Path, device: u32, refused: Subject) -> Result<PathBuf, SaveError> {
    let path = match path.extension() {
        Some(ending) if device > 0 => path.with_extension(format!("{device}.{}", ending.to_string_lossy())),
        _ => path.to_owned(),
    };
    match allocator.snapshot().with_refusal(refused).save(&path) {
        Ok(()) => tracing::info!(target: "aquifer::oom", path = %path.display(), "snapshot saved"),
        Err(error) => {
            tracing::warn!(target: "aquifer::oom", %error, "the snapshot could not be saved");
            return Err(error);
        }
    }
    Ok(path)
}

/// Advice to let streams reuse each other's blocks, if another one has a free block for the
/// request.
fn advice_to_cross_streams(core: &Core, request: &Request) -> Option<Advice> {
    let others = core.heap().indexes(request.pool).filter(|(owner, _)| owner.stream != request.stream);
    let mut sizes = others.filter_map(|(_, index)| Some(index.first_fit(request.size)?.size));
    sizes.next().map(|block| Advice::CrossStream { block })
}

/// Advice to let private pools lend their memory. As it is lent: only blocks of the stream itself,
/// except those that graphs may use.
fn advice_to_lend(core: &Core, request: &Request) -> Vec<Advice> {
    if request.pool.is_private() {
        return Vec::new();
    }
    let heap = core.heap();
    let mut largest: BTreeMap<(u64, u64), u64> = BTreeMap::new();
    for number in heap.pools().filter(|&number| number.kind() == request.pool.kind()) {
        let private = core.pools.owner_of(number).filter(|private| private.open && !private.keeps_for_graphs(number));
        let Some(private) = private else { continue };
        let own = heap.indexes(number).filter(|(owner, _)| owner.stream == request.stream);
        for size in own.flat_map(|(_, index)| index.iter_from(request.size)).map(|key| key.size) {
            largest.entry(private.id).and_modify(|largest| *largest = size.max(*largest)).or_insert(size);
        }
    }
    largest.into_iter().map(|(pool, block)| Advice::PrivatePool { pool, block }).collect()
}
