//! Serving a request: from the cache of its stream, which makes no driver call, and otherwise by
//! the ladder.

use std::panic::Location;
use std::sync::atomic::Ordering;

use aquifer_device::{DevicePtr, Operation, Stream, fork};

use crate::allocation::{Allocation, acting};
use crate::allocator::{ALIGNMENT, Allocator};
use crate::backing::segments::release_where;
use crate::core::limits::Refusal;
use crate::core::pools::Which;
use crate::cross_stream::{poll_waiting, record_progress};
use crate::error::AllocError;
use crate::pools::{came_from_a_graph, refuse_capture, route_and_note};
use crate::recovery::ladder::climb;
use crate::recovery::oom::{Tried, out_of_memory};
use crate::size_class::{self, PoolKind, REQUEST_LIMIT};
use crate::sleep::wake_lock::NotedCount;
use crate::state::slow;
use crate::tags::Tag;
use crate::types::{BlockId, Granted, PoolId, Request, StreamId};

/// The largest alignment that can be asked for, in bytes.
const ALIGNMENT_MAX: u64 = 2 << 20;

impl Allocator {
    /// Allocates `bytes` for work on `stream`, aligned to [`crate::ALIGNMENT`]. The memory is
    /// uninitialised. A request of zero bytes gives a handle with a null pointer and no memory.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`], with a report, after everything was tried;
    /// [`AllocError::TooLarge`] from 2^60 bytes on; a stream of another device, or one that
    /// captures while the thread is not routed to a private pool ([`Allocator::capture`]); a
    /// failing driver.
    #[track_caller]
    #[inline]
    pub fn alloc_bytes(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        // Build the handle in the caller so that it stays in registers. A handle written by a
        // callee is read back with wider loads than it was written with, and these stall until the
        // stores retire: longer than the rest of a hit takes.
        let at = Location::caller();
        let Granted { block, addr } = match grant_cached(self, bytes, stream, at, Owner::Handle) {
            Ok(granted) => granted,
            Err(miss) => grant_uncached(self, bytes, stream, miss, at)?,
        };
        let state = self.inner().state;
        Ok(Allocation::new(state, block, stream.id() | self.inner().mark, DevicePtr(addr), bytes))
    }

    /// Allocates with a larger alignment: a power of two up to 2 MiB. The block is larger than the
    /// request by the alignment less 512 bytes.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`], and an invalid alignment.
    #[track_caller]
    #[inline]
    pub fn alloc_aligned(&self, bytes: u64, alignment: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
            return Err(AllocError::InvalidAlignment { alignment });
        }
        let padded = bytes.saturating_add(alignment.saturating_sub(ALIGNMENT));
        if alignment <= ALIGNMENT
            || bytes == 0
            || padded >= REQUEST_LIMIT
            || stream.device_id() != self.inner().device.id()
        {
            return self.alloc_bytes(bytes, stream);
        }
        let inner = self.inner();
        let Granted { block, addr } = grant_rounded(self, bytes, size_class::round(padded), stream, Miss::NotSearched)?;
        let ptr = DevicePtr(addr.next_multiple_of(alignment));
        inner.state.report_block(block, ptr, bytes, Location::caller());
        Ok(Allocation::new(inner.state, block, stream.id() | inner.mark, ptr, bytes))
    }

    /// Allocates memory and enqueues a fill with zeros on `stream`.
    ///
    /// # Errors
    /// As [`Allocator::alloc_bytes`]; a failing fill gives the memory back.
    #[track_caller]
    pub fn alloc_bytes_zeroed(&self, bytes: u64, stream: &Stream) -> Result<Allocation, AllocError> {
        if bytes == 0 {
            return self.alloc_bytes(bytes, stream);
        }
        // The fill is enqueued without an access guard.
        let _awake = NotedCount::of_guard(self.state(), &(0..0))?;
        let allocation = self.alloc_bytes(bytes, stream)?;
        stream.fill(allocation.ptr(), 0, bytes)?;
        Ok(allocation)
    }
}

/// Who gets a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// A handle.
    Handle,
    /// A caller with the bare pointer: the block is entered in the table of raw pointers.
    Raw,
    /// A storage: the block keeps the allocator open.
    Storage,
}

/// Takes a free block that the stream may reuse at once.
#[inline]
pub(crate) fn grant_cached(
    allocator: &Allocator,
    bytes: u64,
    stream: &Stream,
    at: &'static Location<'static>,
    owner: Owner,
) -> Result<Granted, Miss> {
    let (block, addr) = take_cached(allocator, bytes, stream, at, owner);
    if block != BlockId::NONE {
        return Ok(Granted { block, addr });
    }
    Err(match addr {
        SEARCHED => Miss::Searched,
        POLL_DUE => Miss::PollDue,
        _ => Miss::NotSearched,
    })
}

/// Why no cached block was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The stream's free blocks were searched, and none serves.
    Searched,
    /// It is time to ask how far streams got that blocks wait for.
    PollDue,
    /// The request is none for the fast path.
    NotSearched,
}

/// In place of an address, beside [`BlockId::NONE`].
const SEARCHED: u64 = 1;
const POLL_DUE: u64 = 2;

/// Takes a free block that the stream may reuse at once, and returns its number and address, in two
/// registers. If there is none, returns [`BlockId::NONE`], and [`SEARCHED`], [`POLL_DUE`] or 0. One
/// function serves all owners, because its callees are inlined only if they have one caller.
#[inline(never)]
fn take_cached(
    allocator: &Allocator,
    bytes: u64,
    stream: &Stream,
    at: &'static Location<'static>,
    owner: Owner,
) -> (BlockId, u64) {
    let inner = &**allocator.inner();
    let slow = inner.state.slow_reasons().load(Ordering::Relaxed);
    if bytes == 0
        || bytes >= REQUEST_LIMIT
        || stream.timeline().device_id_unless_capturing() != inner.device.id()
        || slow & !slow::WAITING != 0
    {
        return (BlockId::NONE, 0);
    }
    let mut guard = inner.state.enter();
    if slow != 0 && guard.is_poll_due() {
        return (BlockId::NONE, POLL_DUE);
    }
    let size = size_class::round(bytes);
    let pool = PoolId::default_of(PoolKind::of(size));
    let request = Request {
        requested: bytes,
        size,
        pool,
        stream: StreamId::of(stream),
        tag: inner.scope_tag(),
        is_regular: true,
    };
    let granted = guard.take_own(&request);
    let is_event_due = guard.is_progress_event_due(request.stream);
    match (owner, &granted) {
        (Owner::Raw, Some(granted)) => inner.state.raw.insert(granted.addr, granted.block),
        (Owner::Storage, Some(_)) => guard.count_keeping_open(allocator.inner()),
        _ => (),
    }
    drop(guard);
    if is_event_due {
        record_progress(stream);
    }
    let Some(granted) = granted else { return (BlockId::NONE, SEARCHED) };
    if inner.mark != 0 {
        inner.state.report_block(granted.block, DevicePtr(granted.addr), bytes, at);
    }
    (granted.block, granted.addr)
}

/// Grants a block where the fast path does not apply: zero bytes, a request that no free block
/// serves, or any slow reason.
#[cold]
#[inline(never)]
pub(crate) fn grant_uncached(
    allocator: &Allocator,
    bytes: u64,
    stream: &Stream,
    miss: Miss,
    at: &'static Location<'static>,
) -> Result<Granted, AllocError> {
    fork::check(Operation::Alloc)?;
    let inner = &**allocator.inner();
    if bytes == 0 || bytes >= REQUEST_LIMIT || stream.device_id() != inner.device.id() {
        zero_or_refuse(allocator, bytes, stream)?;
        return Ok(Granted { block: BlockId::NONE, addr: 0 });
    }
    let size = size_class::round(bytes);
    let granted = grant_rounded(allocator, bytes, size, stream, miss)?;
    if inner.mark != 0 {
        inner.state.report_block(granted.block, DevicePtr(granted.addr), bytes, at);
    }
    Ok(granted)
}

/// Refuses requests that are too large, and streams of another device: what is left is for zero
/// bytes.
#[cold]
fn zero_or_refuse(allocator: &Allocator, bytes: u64, stream: &Stream) -> Result<(), AllocError> {
    allocator.check_stream(stream)?;
    if bytes >= REQUEST_LIMIT {
        return Err(AllocError::TooLarge { requested: bytes });
    }
    Ok(())
}

/// Grants a block of `size` bytes, the rounded size, for a valid request of `bytes`, for any slow
/// reason: the allocator sleeps, blocks wait, threads are routed to private pools, tags come from
/// spans, or nothing is cached.
#[cold]
fn grant_rounded(
    allocator: &Allocator,
    bytes: u64,
    size: u64,
    stream: &Stream,
    miss: Miss,
) -> Result<Granted, AllocError> {
    fork::check(Operation::Alloc)?;
    stream.end_abandoned_captures()?;
    let stream = &*acting(stream);
    let inner = &**allocator.inner();
    let state = inner.state;
    let slow = state.slow_reasons().load(Ordering::Relaxed);
    if slow & slow::LOST != 0 {
        inner.device.refuse_if_lost(Operation::Alloc)?;
    }
    if slow & slow::ASLEEP != 0 {
        return Err(AllocError::Asleep);
    }
    let mut may_poll = slow & slow::WAITING != 0;
    if miss == Miss::PollDue || (miss == Miss::NotSearched && may_poll && state.shared().is_poll_due()) {
        poll_waiting(allocator)?;
        may_poll = false;
    }
    let tag = if slow & slow::SPANS != 0 { Tag::of_span() } else { inner.scope_tag() };
    let is_regular = slow & !slow::WAITING == 0 && size == size_class::round(bytes);
    let kind = PoolKind::of(size);
    loop {
        let private = if slow & slow::ROUTED != 0 { route_and_note(allocator, stream) } else { None };
        let private = private.map(|numbers| numbers[kind as usize]);
        if private.is_none() {
            refuse_capture(stream)?;
        }
        let pool = private.unwrap_or(PoolId::default_of(kind));
        let request = Request { requested: bytes, size, pool, stream: StreamId::of(stream), tag, is_regular };
        if private.is_some() && !state.enter().pools.claim(pool, bytes) {
            let tried = Tried { refusal: Some(Refusal::PoolLimit), ..Tried::default() };
            return Err(out_of_memory(allocator, &request, tried));
        }
        let granted = search_and_climb(allocator, &request, stream, slow, miss, may_poll);
        let granted = granted.inspect_err(|_| state.shared().pools.end_claim(pool, bytes))?;
        if private.is_none() || !came_from_a_graph(allocator, pool, stream) {
            return Ok(granted);
        }
        // The block was not used: give it back and search the pool that captures do not use.
        state.free(granted.block, request.stream.0, None, bytes);
    }
}

/// Serves a request from the free blocks of its stream, or else by the ladder. With `may_poll`,
/// waiting blocks are polled if no block serves the request.
fn search_and_climb(
    allocator: &Allocator,
    request: &Request,
    stream: &Stream,
    slow: u32,
    miss: Miss,
    may_poll: bool,
) -> Result<Granted, AllocError> {
    let state = allocator.inner().state;
    // Private pools keep their memory also without a cache.
    let caches = slow & slow::NO_CACHE == 0 || request.pool.is_private();
    let may_find_more = slow & !slow::WAITING != 0 || miss != Miss::Searched;
    // Everything that can fail comes before a block is taken.
    if slow & slow::NO_CACHE != 0 {
        release_where(allocator, |core| core.whole_segments(Which::NotForGraphs))?;
    }
    let mut guard = state.enter();
    guard.stream(stream);
    let mut granted = if caches && may_find_more { guard.take_own(request) } else { None };
    drop(guard);
    if granted.is_none() && may_poll {
        poll_waiting(allocator)?;
        granted = state.enter().take_own(request);
    }
    granted.map_or_else(|| climb(allocator, request), Ok)
}
