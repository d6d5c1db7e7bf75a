//! PyTorch's default caching allocator as a [`Subject`].
//!
//! It reproduces torch 2.15 without expandable segments: a cache of plain driver allocations,
//! *segments*, for each stream and each of two pools. A request takes the smallest free block of its
//! stream and pool, and of several that at the lowest address. Otherwise these are tried in order:
//!
//! 1. release segments by age, if a limit and a threshold are set;
//! 2. take a segment from the device;
//! 3. release oversize segments, if there is a size from which on blocks are oversize, and repeat 2;
//! 4. wait for the blocks that other streams use, release all unused segments, and repeat 2.
//!
//! A block that other streams used is free once an event on each of them is complete. Events are
//! asked for when memory is requested.
//!
//! PyTorch has segments in the order of their addresses. Here a newer segment counts as higher, as on
//! a device that gives out each address once, so that figures do not depend on the driver.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use aquifer::device::{DeviceError, DevicePtr, Event};
use aquifer::memory::{MemoryStats, Stat};
use aquifer::{Device, Stream};
use aquifer_sim::Lagging;

use super::index::{Entry, Index};
use super::{Options, SMALL_MAX, refused};
use crate::cli::ConfigArg;
use crate::exit::Failure;
use crate::map::{Map, Piece, Use};
use crate::session::Session;
use crate::subject::{Measured, Refused, Subject, streams_of};

/// No neighbour.
const NONE: u32 = u32::MAX;

/// The allocator as a [`Subject`], with the streams of a program.
#[derive(Debug)]
pub struct Native {
    device: Device,
    lag: Option<Arc<Lagging>>,
    streams: Vec<Stream>,
    options: Options,
    /// The most bytes that may be held.
    limit: Option<u64>,
    blocks: Vec<Block>,
    /// Records of blocks that are gone.
    vacant: Vec<u32>,
    /// The small pool and the large one.
    pools: [Pool; 2],
    /// By place.
    segments: BTreeMap<u64, Segment>,
    /// The place of the next segment.
    next_place: u64,
    /// Other streams that use live blocks.
    uses: HashMap<u32, Vec<u16>>,
    /// For each stream, events of freed blocks that it used.
    pending: Vec<VecDeque<(Event, u32)>>,
    /// Number of these events.
    pending_events: usize,
    /// Events that are complete, for another use.
    spare_events: Vec<Event>,
    /// An event that could not be recorded when a block was freed; the next request reports it.
    failed: Option<DeviceError>,
    stats: MemoryStats,
}

/// The free blocks of a pool.
#[derive(Debug)]
struct Pool {
    free: Vec<Index>,
    /// How often a block was searched for: the clock of garbage collection.
    searches: u64,
}

/// A plain driver allocation.
#[derive(Debug, Clone, Copy)]
struct Segment {
    ptr: DevicePtr,
    first: u32,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    /// The place of its segment plus its offset there.
    place: u64,
    size: u64,
    prev: u32,
    next: u32,
    /// Its pool.
    kind: u8,
    state: State,
    stream: u16,
    /// Events that it waits for.
    events: u32,
    /// The pool's searches when it became free.
    since: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    /// Freed, while other streams use it.
    Pending,
    Free,
}

impl Block {
    fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    fn entry(&self, id: u32) -> Entry {
        Entry { size: self.size, place: self.place, id }
    }
}

impl Native {
    fn serve(&mut self, stream: u16, size: u64) -> Result<u32, Refused> {
        if let Some(error) = self.failed.take() {
            return Err(refused(error));
        }
        self.process_events().map_err(refused)?;
        let found = match self.best_fit(stream, size) {
            Some(id) => Some(id),
            None => self.grow_or_release(stream, size).map_err(refused)?,
        };
        match found {
            Some(id) => Ok(self.split(id, size)),
            None => Err(Refused::OutOfMemory(None)),
        }
    }

    /// Takes a free block for the request out of the index.
    #[inline]
    fn best_fit(&mut self, stream: u16, size: u64) -> Option<u32> {
        let pool = &mut self.pools[kind_of(size)];
        pool.searches += 1;
        let index = &mut pool.free[usize::from(stream)];
        let found = index.best_fit(size).filter(|found| self.options.fits(found.size, size))?;
        index.remove(found);
        Some(found.id)
    }

    #[cold]
    fn grow_or_release(&mut self, stream: u16, size: u64) -> Result<Option<u32>, DeviceError> {
        self.collect_garbage()?;
        if let Some(id) = self.grow(stream, size)? {
            return Ok(Some(id));
        }
        if self.options.throws_at_limit && self.is_over_limit(size) {
            self.stats.num_oom_rejections += 1;
            self.stats.num_ooms += 1;
            return Ok(None);
        }
        if self.release_oversize(stream, size)?
            && let Some(id) = self.grow(stream, size)?
        {
            return Ok(Some(id));
        }
        self.release_free()?;
        self.stats.num_alloc_retries += 1;
        let grown = self.grow(stream, size)?;
        self.stats.num_ooms += u64::from(grown.is_none());
        Ok(grown)
    }

    fn is_over_limit(&self, size: u64) -> bool {
        let reserved = self.stats.reserved_bytes.all.current;
        self.limit.is_some_and(|limit| reserved.saturating_add(self.options.segment_bytes(size)) > limit)
    }

    /// Takes a segment from the device, as one block that is in no index.
    fn grow(&mut self, stream: u16, size: u64) -> Result<Option<u32>, DeviceError> {
        if self.is_over_limit(size) {
            return Ok(None);
        }
        let bytes = self.options.segment_bytes(size);
        let ptr = match self.device.alloc(bytes) {
            Ok(ptr) => ptr,
            Err(error) if error.is_out_of_memory() => return Ok(None),
            Err(error) => return Err(error),
        };
        let kind = u8::from(size > SMALL_MAX);
        let block = Block {
            place: self.next_place,
            size: bytes,
            prev: NONE,
            next: NONE,
            kind,
            state: State::Free,
            stream,
            events: 0,
            since: 0,
        };
        let first = self.insert(block);
        self.segments.insert(self.next_place, Segment { ptr, first });
        self.next_place += bytes;
        raise(&mut self.stats.reserved_bytes.all, bytes);
        raise(&mut self.stats.segment.all, 1);
        self.stats.num_device_alloc += 1;
        Ok(Some(first))
    }

    /// Releases segments that were not used for long, if more than a share of the limit is held.
    fn collect_garbage(&mut self) -> Result<(), DeviceError> {
        let threshold = self.options.gc_threshold;
        let Some(limit) = self.limit.filter(|_| threshold > 0.0) else { return Ok(()) };
        let reserved = self.stats.reserved_bytes.all.current;
        let mut excess = reserved.saturating_sub(share(limit, threshold));
        while excess > 0 {
            let Pool { free, searches } = &self.pools[1];
            let unused = free.iter().flat_map(|index| index.iter_from(0)).map(|entry| entry.id);
            let unused: Vec<u32> = unused.filter(|&id| !self.blocks[id as usize].is_split()).collect();
            let age = |id: u32| u128::from(searches - self.blocks[id as usize].since);
            let ages: u128 = unused.iter().map(|&id| age(id)).sum();
            let is_old = |id: &u32| age(*id) * unused.len() as u128 >= ages;
            // All of them, however little is to go, so that this is rare.
            let old: Vec<u32> = unused.iter().copied().filter(is_old).collect();
            if old.is_empty() {
                break;
            }
            for id in old {
                excess = excess.saturating_sub(self.blocks[id as usize].size);
                self.release(id)?;
            }
        }
        Ok(())
    }

    /// Releases the smallest unused oversize segment that is large enough for the request, or else the
    /// largest ones. Returns whether together they are large enough.
    fn release_oversize(&mut self, stream: u16, size: u64) -> Result<bool, DeviceError> {
        let least = self.options.max_split;
        if least == u64::MAX {
            return Ok(false);
        }
        let need = size.max(least);
        let index = &self.pools[kind_of(size)].free[usize::from(stream)];
        let is_whole = |entry: &Entry| !self.blocks[entry.id as usize].is_split();
        let fit = index.iter_from(need).find(is_whole);
        let oversize: Vec<Entry> = index.iter_from(least).filter(is_whole).collect();
        if let Some(fit) = fit {
            self.release(fit.id)?;
            return Ok(true);
        }
        let mut sum = 0;
        for entry in oversize.into_iter().rev() {
            if sum >= need {
                break;
            }
            self.release(entry.id)?;
            sum += entry.size;
        }
        Ok(sum >= need)
    }

    /// Releases all unused segments, after the work that freed blocks wait for.
    fn release_free(&mut self) -> Result<(), DeviceError> {
        for stream in 0..self.pending.len() {
            while let Some((event, _)) = self.pending[stream].front() {
                event.synchronize()?;
                self.complete_first(stream);
            }
        }
        for kind in [1, 0] {
            let free = self.pools[kind].free.iter().flat_map(|index| index.iter_from(0)).map(|entry| entry.id);
            let unused: Vec<u32> = free.filter(|&id| !self.blocks[id as usize].is_split()).collect();
            unused.into_iter().try_for_each(|id| self.release(id))?;
        }
        Ok(())
    }

    /// Gives a segment back to the device, of which a free block is the only one.
    fn release(&mut self, id: u32) -> Result<(), DeviceError> {
        let Block { place, size, .. } = self.blocks[id as usize];
        let Some(segment) = self.segments.get(&place) else { unreachable!("an unsplit block is a segment") };
        self.device.free(segment.ptr)?;
        self.unlist(id);
        self.segments.remove(&place);
        self.vacant.push(id);
        self.stats.reserved_bytes.all.current -= size;
        self.stats.segment.all.current -= 1;
        self.stats.num_device_free += 1;
        Ok(())
    }

    /// Frees blocks whose last events are complete. Streams complete theirs in order.
    #[inline]
    fn process_events(&mut self) -> Result<(), DeviceError> {
        if self.pending_events == 0 {
            return Ok(());
        }
        for stream in 0..self.pending.len() {
            while let Some((event, _)) = self.pending[stream].front() {
                if !event.is_complete()? {
                    break;
                }
                self.complete_first(stream);
            }
        }
        Ok(())
    }

    fn complete_first(&mut self, stream: usize) {
        let Some((event, id)) = self.pending[stream].pop_front() else { return };
        self.pending_events -= 1;
        self.spare_events.push(event);
        let block = &mut self.blocks[id as usize];
        block.events -= 1;
        if block.events == 0 {
            self.merge_and_list(id);
        }
    }

    /// Records an event on a stream that used a freed block.
    fn record_event(&mut self, stream: u16, id: u32) -> Result<(), DeviceError> {
        let event = self.spare_events.pop().map_or_else(|| self.device.create_event(false), Ok)?;
        event.record(&self.streams[usize::from(stream)])?;
        self.pending[usize::from(stream)].push_back((event, id));
        self.pending_events += 1;
        self.blocks[id as usize].events += 1;
        Ok(())
    }

    /// Makes a block that is in no index live, without the bytes that are not needed.
    #[inline]
    fn split(&mut self, id: u32, size: u64) -> u32 {
        let block = &mut self.blocks[id as usize];
        block.state = State::Live;
        let whole = block.size;
        if self.options.splits(whole, size) {
            block.size = size;
            let next = block.next;
            let rest = Block { place: block.place + size, size: whole - size, prev: id, state: State::Free, ..*block };
            let rest = self.insert(rest);
            self.blocks[id as usize].next = rest;
            if next != NONE {
                self.blocks[next as usize].prev = rest;
            }
            self.list(rest);
        }
        id
    }

    /// Makes a block free, merges it with free neighbours, and puts it into the index.
    #[inline]
    fn merge_and_list(&mut self, id: u32) {
        let Block { mut place, mut size, prev, next, .. } = self.blocks[id as usize];
        let (mut into, mut after) = (id, next);
        if next != NONE && self.blocks[next as usize].state == State::Free {
            self.unlist(next);
            let above = &self.blocks[next as usize];
            (size, after) = (size + above.size, above.next);
            self.vacant.push(next);
        }
        if prev != NONE && self.blocks[prev as usize].state == State::Free {
            self.unlist(prev);
            let below = &self.blocks[prev as usize];
            (place, size, into) = (below.place, size + below.size, prev);
            self.vacant.push(id);
        }
        if after != NONE {
            self.blocks[after as usize].prev = into;
        }
        let block = &mut self.blocks[into as usize];
        (block.place, block.size, block.next, block.state) = (place, size, after, State::Free);
        self.list(into);
    }

    fn insert(&mut self, block: Block) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.blocks[id as usize] = block;
            return id;
        }
        self.blocks.push(block);
        u32::try_from(self.blocks.len() - 1).unwrap_or_else(|_| unreachable!("programs have fewer blocks"))
    }

    #[inline]
    fn list(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        let pool = &mut self.pools[usize::from(block.kind)];
        block.since = pool.searches;
        pool.free[usize::from(block.stream)].insert(block.entry(id));
    }

    #[inline]
    fn unlist(&mut self, id: u32) {
        let block = &self.blocks[id as usize];
        self.pools[usize::from(block.kind)].free[usize::from(block.stream)].remove(block.entry(id));
    }

    fn with_lag(
        device: &Device,
        config: &ConfigArg,
        streams: usize,
        lag: Option<Arc<Lagging>>,
    ) -> Result<Native, Failure> {
        let memory = device.memory_info()?;
        let pool = || Pool { free: (0..streams).map(|_| Index::default()).collect(), searches: 0 };
        Ok(Native {
            streams: streams_of(device, streams)?,
            device: device.clone(),
            lag,
            options: config.pytorch.clone().unwrap_or_default(),
            limit: config.config.limit_bytes(memory.total, memory.free),
            blocks: Vec::new(),
            vacant: Vec::new(),
            pools: [pool(), pool()],
            segments: BTreeMap::new(),
            next_place: 0,
            uses: HashMap::new(),
            pending: (0..streams).map(|_| VecDeque::new()).collect(),
            pending_events: 0,
            spare_events: Vec::new(),
            failed: None,
            stats: MemoryStats::default(),
        })
    }
}

fn kind_of(size: u64) -> usize {
    usize::from(size > SMALL_MAX)
}

#[inline]
fn raise(stat: &mut Stat, by: u64) {
    stat.current += by;
    stat.peak = stat.peak.max(stat.current);
}

/// A share of a limit, parts of a byte cut off.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "PyTorch computes it so; the share is in (0, 1)"
)]
fn share(limit: u64, threshold: f64) -> u64 {
    (limit as f64 * threshold) as u64
}

impl Measured for Native {
    fn new(_: &Session, device: &Device, config: &ConfigArg, streams: usize) -> Result<Native, Failure> {
        Native::with_lag(device, config, streams, None)
    }

    fn lagging(session: &Session, config: &ConfigArg, streams: usize, lag: u64) -> Result<Native, Failure> {
        match if lag > 0 { session.open_lagging(lag)? } else { None } {
            Some(lagged) => Native::with_lag(&lagged.device, config, streams, Some(lagged.lag)),
            None => Native::with_lag(&session.open()?, config, streams, None),
        }
    }

    /// Bytes allocated and reserved, segments, and the numbers of retries, refusals, and calls that
    /// took memory from the device and gave it back.
    fn stats(&self) -> MemoryStats {
        self.stats
    }

    fn reset_peaks(&mut self) {
        let MemoryStats { allocated_bytes, reserved_bytes, segment, .. } = &mut self.stats;
        for stat in [allocated_bytes, reserved_bytes, segment] {
            stat.all.peak = stat.all.current;
        }
    }

    fn held(&self) -> (u64, u64) {
        (self.stats.reserved_bytes.all.current, self.stats.allocated_bytes.all.current)
    }

    fn map(&self) -> Result<Map, Failure> {
        let mut pieces = Vec::new();
        for segment in self.segments.values() {
            let mut id = segment.first;
            while id != NONE {
                let Block { size, stream, state, prev, next, .. } = self.blocks[id as usize];
                let is = match state {
                    State::Live => Use::Live,
                    State::Pending => Use::Waiting,
                    State::Free => Use::Free,
                };
                pieces.push(Piece { bytes: size, is, stream, starts: prev == NONE });
                id = next;
            }
        }
        let memory = self.device.memory_info()?;
        Ok(Map::new(pieces, memory.free, memory.total))
    }

    fn empty_cache(&mut self) -> Result<(), Failure> {
        Ok(self.release_free()?)
    }

    fn place(&self, handle: &Option<u32>) -> (DevicePtr, u64) {
        let Some(id) = *handle else { return (DevicePtr(0), 0) };
        let Block { place, size, .. } = self.blocks[id as usize];
        let segment = self.segments.range(..=place).next_back();
        segment.map_or((DevicePtr(0), 0), |(start, segment)| (DevicePtr(segment.ptr.0 + (place - start)), size))
    }
}

impl Subject for Native {
    /// The number of a block; `None` for zero bytes.
    type Handle = Option<u32>;

    #[inline]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Option<u32>, Refused> {
        if bytes == 0 {
            return Ok(None);
        }
        let size = self.options.round(bytes).ok_or(Refused::OutOfMemory(None))?;
        let id = self.serve(stream, size)?;
        raise(&mut self.stats.allocated_bytes.all, self.blocks[id as usize].size);
        Ok(Some(id))
    }

    #[inline]
    fn free(&mut self, handle: Option<u32>) {
        let Some(id) = handle else { return };
        self.stats.allocated_bytes.all.current -= self.blocks[id as usize].size;
        let uses = if self.uses.is_empty() { None } else { self.uses.remove(&id) };
        let Some(uses) = uses else { return self.merge_and_list(id) };
        self.blocks[id as usize].state = State::Pending;
        if let Err(error) = uses.into_iter().try_for_each(|stream| self.record_event(stream, id)) {
            self.failed.get_or_insert(error);
        }
    }

    fn record_stream(&mut self, handle: &mut Option<u32>, stream: u16) -> Result<(), Refused> {
        let Some(id) = *handle else { return Ok(()) };
        if stream != self.blocks[id as usize].stream {
            let uses = self.uses.entry(id).or_default();
            if !uses.contains(&stream) {
                uses.push(stream);
            }
        }
        Ok(())
    }

    #[inline]
    fn begin_event(&mut self) {
        if let Some(lag) = &self.lag {
            lag.advance();
        }
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        self.segments.values().for_each(|segment| self.device.free_later(segment.ptr));
        self.device.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;
    use crate::random::Random;

    const MIB: u64 = 1 << 20;

    fn native(device: &str, options: &str, lag: u64) -> Native {
        let global = Global { device: Some(device.parse().unwrap()), ..Global::default() };
        let config = format!("backing:pytorch{options}").parse().unwrap();
        Native::lagging(&Session::new(&global).unwrap(), &config, 2, lag).unwrap()
    }

    fn reserved(subject: &Native) -> u64 {
        subject.stats().reserved_bytes.all.current / MIB
    }

    #[test]
    fn a_block_that_another_stream_uses_is_free_once_its_event_is_complete() {
        let mut subject = native("sim:64MiB", "", 3);
        let use_and_free = |subject: &mut Native| {
            subject.begin_event();
            let mut block = subject.alloc(30 * MIB, 0).unwrap();
            subject.record_stream(&mut block, 1).unwrap();
            subject.record_stream(&mut block, 0).unwrap();
            subject.free(block);
        };
        use_and_free(&mut subject);
        use_and_free(&mut subject);
        assert_eq!((reserved(&subject), subject.pending_events), (60, 2), "the first one is not done");
        (0..3).for_each(|_| subject.begin_event());
        let third = subject.alloc(30 * MIB, 0).unwrap();
        assert_eq!((reserved(&subject), subject.pending_events), (60, 0));
        subject.free(third);
        use_and_free(&mut subject);
        // Memory is short: the host waits.
        let large = subject.alloc(62 * MIB, 0).unwrap();
        assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (62, 1));
        subject.free(large);
        subject.empty_cache().unwrap();
        assert_eq!(reserved(&subject), 0);
    }

    #[test]
    fn segments_of_average_age_and_more_are_released_above_the_threshold() {
        let mut subject = native("sim:100MiB", ",garbage_collection_threshold:0.5,limit_mb:90", 0);
        let blocks = [20, 22, 24].map(|mib| subject.alloc(mib * MIB, 0).unwrap());
        blocks.into_iter().for_each(|block| subject.free(block));
        let again = subject.alloc(24 * MIB, 0).unwrap();
        assert_eq!(reserved(&subject), 66);
        // The two free ones are of the same age.
        let new = subject.alloc(30 * MIB, 0).unwrap();
        assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (54, 0));
        [again, new].into_iter().for_each(|block| subject.free(block));
    }

    #[test]
    fn oversize_segments_are_released_for_an_oversize_request_and_others_stay() {
        let mut subject = native("sim:200MiB", ",max_split_size_mb:40", 0);
        let blocks = [30, 40, 60, 44].map(|mib| subject.alloc(mib * MIB, 0).unwrap());
        blocks.into_iter().for_each(|block| subject.free(block));
        let one = subject.alloc(90 * MIB, 0).unwrap();
        // 60 and 44 MiB were released, the largest ones.
        assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (160, 0));
        assert!(matches!(subject.alloc(150 * MIB, 0), Err(Refused::OutOfMemory(_))));
        assert_eq!((reserved(&subject), subject.stats().num_ooms), (90, 1));
        subject.free(one);
    }

    #[test]
    fn a_limit_refuses_without_a_retry_if_so_asked() {
        for (options, retries) in [("", 1), (",throw_on_cudamalloc_oom:True", 0)] {
            let mut subject = native("sim:1GiB", &format!(",limit_mb:50{options}"), 0);
            assert!(matches!(subject.alloc(51 * MIB, 0), Err(Refused::OutOfMemory(_))));
            let stats = subject.stats();
            assert_eq!((stats.num_alloc_retries, stats.num_ooms, stats.num_oom_rejections), (retries, 1, 1 - retries));
            assert!(matches!(subject.alloc(u64::MAX, 0), Err(Refused::OutOfMemory(_))));
        }
    }

    #[test]
    fn everything_goes_back_whichever_driver_call_fails() {
        for call in ["cuMemAlloc#2", "cuMemFree#1", "cuEventCreate#1", "cuEventRecord#1", "cuEventQuery#1"] {
            let mut subject = native(&format!("sim:1GiB,fault={call}:999"), "", 0);
            let mut failed = 0;
            for bytes in [30 * MIB, 100 * MIB, 30 * MIB] {
                match subject.alloc(bytes, 0) {
                    Ok(mut block) => {
                        subject.record_stream(&mut block, 1).unwrap();
                        subject.free(block);
                    }
                    Err(_) => failed += 1,
                }
            }
            failed += usize::from(subject.empty_cache().is_err());
            assert_eq!(failed, 1, "{call}");
            let device = subject.device.clone();
            drop(subject);
            assert_eq!(device.memory_info().unwrap().free, 1 << 30, "{call}");
        }
    }

    /// Blocks tile their segments, free neighbours are merged, and the indexes have the free blocks.
    fn assert_consistent(subject: &Native) {
        let (mut held, mut live, mut free) = (0, 0, Vec::new());
        for (&start, segment) in &subject.segments {
            let (mut id, mut prev, mut at) = (segment.first, NONE, start);
            while id != NONE {
                let block = subject.blocks[id as usize];
                assert_eq!((block.place, block.prev), (at, prev));
                let is_free = |id: u32| id != NONE && subject.blocks[id as usize].state == State::Free;
                assert!(!is_free(id) || !is_free(prev));
                free.extend(is_free(id).then(|| block.entry(id)));
                live += if block.state == State::Live { block.size } else { 0 };
                (prev, id, at) = (id, block.next, at + block.size);
            }
            held += at - start;
        }
        assert_eq!((held, live), subject.held());
        let indexes = subject.pools.iter().flat_map(|pool| &pool.free);
        let mut indexed: Vec<Entry> = Vec::new();
        for index in indexes {
            let from = indexed.len();
            indexed.extend(index.iter_from(0));
            assert!(indexed[from..].is_sorted());
        }
        free.sort_unstable();
        indexed.sort_unstable();
        assert_eq!(free, indexed);
    }

    #[test]
    fn blocks_tile_their_segments_when_random_programs_lack_memory() {
        let options = [
            "",
            ",max_split_size_mb:40",
            ",roundup_power2_divisions:4",
            ",garbage_collection_threshold:0.7,limit_mb:250",
        ];
        for seed in 0..40 {
            let mut subject = native("sim:300MiB", options[usize::try_from(seed % 4).unwrap()], seed % 3);
            let mut live = Vec::new();
            let mut draw = Random::new(seed);
            for _ in 0..400 {
                subject.begin_event();
                if draw.below(5) < 2 && !live.is_empty() {
                    let at = draw.below(u32::try_from(live.len()).unwrap()) as usize;
                    let mut block = live.swap_remove(at);
                    if draw.below(4) == 0 {
                        subject.record_stream(&mut block, 1).unwrap();
                    }
                    subject.free(block);
                } else {
                    let most = [1 << 16, 1 << 20, 30 << 20, 90 << 20][draw.below(4) as usize];
                    let (bytes, stream) = (1 + draw.below(most), draw.below(2));
                    live.extend(subject.alloc(bytes.into(), u16::try_from(stream).unwrap()).ok());
                }
                assert_consistent(&subject);
            }
            assert!(subject.stats().num_alloc_retries > 0, "seed {seed}");
        }
    }
}
