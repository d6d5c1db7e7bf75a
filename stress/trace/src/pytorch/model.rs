//! PyTorch's caching allocator as a [`Subject`].
//!
//! It reproduces torch 2.15: blocks of each stream, in a pool of small and one of large ones. A
//! request takes the smallest free block of its stream and pool, and of several that at the lowest
//! address. Otherwise the allocator takes memory from the device, as `segments.rs` or `pages.rs`
//! has it.
//!
//! A block that other streams used is free once an event on each of them is complete. Events are
//! asked for when memory is requested.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use aquifer::device::{DeviceError, DevicePtr, Event};
use aquifer::memory::{MemoryStats, Stat};
use aquifer::{Device, Error, Stream};
use aquifer_device::{RawPhysical, Reservation};
use aquifer_sim::Lagging;

use super::index::{Entry, Index};
use super::pages::with_least_room;
use super::{Options, SMALL_MAX, refused};
use crate::map::{Map, Piece, Use};
use crate::subject::{Measured, Refused, Subject, streams_of};

/// No neighbour.
pub(super) const NONE: u32 = u32::MAX;

/// The allocator as a [`Subject`], with the streams of a program.
#[derive(Debug)]
pub struct PyTorch {
    pub(super) device: Device,
    pub(super) lag: Option<Arc<Lagging>>,
    pub(super) streams: Vec<Stream>,
    pub(super) options: Options,
    /// The most bytes that may be held.
    pub(super) limit: Option<u64>,
    pub(super) blocks: Vec<Block>,
    /// Records of blocks that are gone.
    pub(super) vacant: Vec<u32>,
    /// The small pool and the large one.
    pub(super) pools: [Pool; 2],
    /// By place.
    pub(super) segments: BTreeMap<u64, Segment>,
    /// The place of the next plain segment.
    pub(super) next_place: u64,
    /// The physical memory and the length of each page, by address.
    pub(super) pages: BTreeMap<u64, (RawPhysical, u64)>,
    /// Other streams that use live blocks.
    pub(super) uses: HashMap<u32, Vec<u16>>,
    /// For each stream, events of freed blocks that it used.
    pub(super) pending: Vec<VecDeque<(Event, u32)>>,
    /// Number of these events.
    pub(super) pending_events: usize,
    /// Events that are complete, for another use.
    pub(super) spare_events: Vec<Event>,
    /// An event that could not be recorded when a block was freed; the next request reports it.
    pub(super) failed: Option<DeviceError>,
    pub(super) stats: MemoryStats,
}

/// The free and the unmapped blocks of a pool.
#[derive(Debug)]
pub(super) struct Pool {
    /// By stream.
    pub(super) free: Vec<Index>,
    /// By stream, and then by place.
    pub(super) unmapped: BTreeSet<(u16, u64, u32)>,
    /// How often a block was searched for: the clock of garbage collection.
    pub(super) searches: u64,
}

/// A plain driver allocation, or addresses in which pages are mapped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    pub(super) ptr: DevicePtr,
    pub(super) bytes: u64,
    /// The block at the start.
    pub(super) first: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// The place of its segment plus its offset there: among pages, its address.
    pub(super) place: u64,
    pub(super) size: u64,
    pub(super) prev: u32,
    pub(super) next: u32,
    /// Its pool.
    pub(super) kind: u8,
    pub(super) state: State,
    pub(super) stream: u16,
    /// Events that it waits for.
    pub(super) events: u32,
    /// The pool's searches when it became free.
    pub(super) since: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Live,
    /// Freed, while other streams use it.
    Pending,
    Free,
    /// Addresses without pages.
    Unmapped,
}

impl Block {
    pub(super) fn is_split(&self) -> bool {
        self.prev != NONE || self.next != NONE
    }

    fn entry(&self, id: u32) -> Entry {
        Entry { size: self.size, place: self.place, id }
    }
}

impl PyTorch {
    fn serve(&mut self, stream: u16, size: u64) -> Result<u32, Refused> {
        if let Some(error) = self.failed.take() {
            return Err(refused(error));
        }
        self.process_events().map_err(refused)?;
        let found = match self.best_fit(stream, size) {
            Some(id) => Some(id),
            None if self.options.expandable_segments => self.expand_or_release(stream, size).map_err(refused)?,
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
        let mut found = index.best_fit(size).filter(|found| self.options.fits(found.size, size))?;
        if self.options.expandable_segments {
            found = with_least_room(&self.blocks, index.iter_from(size)).unwrap_or(found);
        }
        index.remove(found);
        Some(found.id)
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

    /// Releases all unused memory, after the work that freed blocks wait for.
    pub(super) fn release_free(&mut self) -> Result<(), DeviceError> {
        for stream in 0..self.pending.len() {
            while let Some((event, _)) = self.pending[stream].front() {
                event.synchronize()?;
                self.complete_first(stream);
            }
        }
        for kind in [1, 0] {
            let free = self.pools[kind].free.iter().flat_map(|index| index.iter_from(0));
            let free: Vec<u32> = free.map(|entry| entry.id).collect();
            for id in free {
                if self.options.expandable_segments {
                    self.unmap(id)?;
                } else if !self.blocks[id as usize].is_split() {
                    self.release(id)?;
                }
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
            self.merge_and_list(id, State::Free);
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
        self.blocks[id as usize].state = State::Free;
        if self.options.splits(self.blocks[id as usize].size, size) {
            let rest = self.cut(id, size);
            self.list(rest);
        }
        self.blocks[id as usize].state = State::Live;
        id
    }

    /// Cuts a block that is in no index to a size. The rest is a block in the same state, in no
    /// index either.
    #[inline]
    pub(super) fn cut(&mut self, id: u32, size: u64) -> u32 {
        let block = &mut self.blocks[id as usize];
        let rest = Block { place: block.place + size, size: block.size - size, prev: id, ..*block };
        block.size = size;
        let next = block.next;
        let rest = self.insert(rest);
        self.blocks[id as usize].next = rest;
        if next != NONE {
            self.blocks[next as usize].prev = rest;
        }
        rest
    }

    /// Gives a block that is in no index a state, free or unmapped, merges it with neighbours in
    /// the same state, and puts it into the index. Returns what it became.
    #[inline]
    pub(super) fn merge_and_list(&mut self, id: u32, state: State) -> u32 {
        let Block { mut place, mut size, prev, next, .. } = self.blocks[id as usize];
        let (mut into, mut after) = (id, next);
        if next != NONE && self.blocks[next as usize].state == state {
            self.unlist(next);
            let above = &self.blocks[next as usize];
            (size, after) = (size + above.size, above.next);
            self.vacant.push(next);
        }
        if prev != NONE && self.blocks[prev as usize].state == state {
            self.unlist(prev);
            let below = &self.blocks[prev as usize];
            (place, size, into) = (below.place, size + below.size, prev);
            self.vacant.push(id);
        }
        if after != NONE {
            self.blocks[after as usize].prev = into;
        }
        let block = &mut self.blocks[into as usize];
        (block.place, block.size, block.next, block.state) = (place, size, after, state);
        self.list(into);
        into
    }

    pub(super) fn insert(&mut self, block: Block) -> u32 {
        if let Some(id) = self.vacant.pop() {
            self.blocks[id as usize] = block;
            return id;
        }
        self.blocks.push(block);
        u32::try_from(self.blocks.len() - 1).unwrap_or_else(|_| unreachable!("programs have fewer blocks"))
    }

    /// Puts a free or an unmapped block into its index.
    #[inline]
    pub(super) fn list(&mut self, id: u32) {
        let block = &mut self.blocks[id as usize];
        let pool = &mut self.pools[usize::from(block.kind)];
        if block.state == State::Unmapped {
            pool.unmapped.insert((block.stream, block.place, id));
            return;
        }
        block.since = pool.searches;
        pool.free[usize::from(block.stream)].insert(block.entry(id));
    }

    #[inline]
    pub(super) fn unlist(&mut self, id: u32) {
        let block = &self.blocks[id as usize];
        let pool = &mut self.pools[usize::from(block.kind)];
        if block.state == State::Unmapped {
            pool.unmapped.remove(&(block.stream, block.place, id));
        } else {
            pool.free[usize::from(block.stream)].remove(block.entry(id));
        }
    }

    /// An allocator with `streams` streams that holds at most `limit` bytes. `lag` is that of a device
    /// that lags, if the events of a program are its clock. Expandable segments are reproduced without
    /// a lag.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(
        device: &Device,
        options: Options,
        limit: Option<u64>,
        streams: usize,
        lag: Option<Arc<Lagging>>,
    ) -> Result<PyTorch, DeviceError> {
        let free = || (0..streams).map(|_| Index::default()).collect();
        let pool = || Pool { free: free(), unmapped: BTreeSet::new(), searches: 0 };
        Ok(PyTorch {
            streams: streams_of(device, streams)?,
            device: device.clone(),
            lag,
            options,
            limit,
            blocks: Vec::new(),
            vacant: Vec::new(),
            pools: [pool(), pool()],
            segments: BTreeMap::new(),
            next_place: 0,
            pages: BTreeMap::new(),
            uses: HashMap::new(),
            pending: (0..streams).map(|_| VecDeque::new()).collect(),
            pending_events: 0,
            spare_events: Vec::new(),
            failed: None,
            stats: MemoryStats::default(),
        })
    }
}

pub(super) fn kind_of(size: u64) -> usize {
    usize::from(size > SMALL_MAX)
}

#[inline]
pub(super) fn raise(stat: &mut Stat, by: u64) {
    stat.current += by;
    stat.peak = stat.peak.max(stat.current);
}

impl Measured for PyTorch {
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

    fn map(&self) -> Result<Map, Error> {
        let mut pieces = Vec::new();
        for segment in self.segments.values() {
            let mut id = segment.first;
            while id != NONE {
                let Block { size, stream, state, prev, next, .. } = self.blocks[id as usize];
                let is = match state {
                    State::Live => Use::Live,
                    State::Pending => Use::Waiting,
                    State::Free => Use::Free,
                    State::Unmapped => {
                        id = next;
                        continue;
                    }
                };
                pieces.push(Piece { bytes: size, is, stream, starts: prev == NONE, movable: 0 });
                id = next;
            }
        }
        let memory = self.device.memory_info()?;
        Ok(Map::new(pieces, memory.free, memory.total))
    }

    fn empty_cache(&mut self) -> Result<(), Error> {
        Ok(self.release_free()?)
    }

    fn place(&self, handle: &Option<u32>) -> (DevicePtr, u64) {
        let Some(id) = *handle else { return (DevicePtr(0), 0) };
        let Block { place, size, .. } = self.blocks[id as usize];
        let segment = self.segments.range(..=place).next_back();
        segment.map_or((DevicePtr(0), 0), |(start, segment)| (DevicePtr(segment.ptr.0 + (place - start)), size))
    }
}

impl Subject for PyTorch {
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
        let Some(uses) = uses else {
            self.merge_and_list(id, State::Free);
            return;
        };
        self.blocks[id as usize].state = State::Pending;
        if let Err(error) = uses.into_iter().try_for_each(|stream| self.record_event(stream, id)) {
            self.failed.get_or_insert(error);
        }
    }

    fn record_stream(&mut self, handle: &mut Option<u32>, stream: u16) -> Result<(), Refused> {
        let Some(id) = *handle else { return Ok(()) };
        // Expandable segments are reproduced as if the device were idle.
        if stream != self.blocks[id as usize].stream && !self.options.expandable_segments {
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

impl Drop for PyTorch {
    fn drop(&mut self) {
        for &Segment { ptr, bytes, .. } in self.segments.values() {
            if self.options.expandable_segments {
                let pages = self.pages.range(ptr.0..ptr.0 + bytes);
                let mapped = pages.map(|(&at, &(physical, page))| (DevicePtr(at), page, Some(physical))).collect();
                self.device.unreserve_later(Reservation { ptr, bytes, mapped });
            } else {
                self.device.free_later(ptr);
            }
        }
        self.device.settle();
    }
}

#[cfg(test)]
mod tests;
