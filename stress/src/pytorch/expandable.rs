//! PyTorch's caching allocator with expandable segments as a [`Subject`].
//!
//! It reproduces torch 2.15 with `expandable_segments:True` and no other option, with the same
//! driver calls: a segment for each stream and pool, which grows by pages; best fit; and after a
//! refusal one retry, once all free pages have been released. Uses by other streams are done at
//! once, as if the device were idle.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use aquifer::device::{DeviceError, DevicePtr};
use aquifer::memory::MemoryStats;
use aquifer::{Device, Stream};
use aquifer_device::Reservation;
use aquifer_device::{PhysicalOptions, RawPhysical};

use super::{SMALL_MAX, SMALL_SEGMENT, UNIT, refused};
use crate::cli::ConfigArg;
use crate::exit::Failure;
use crate::map::{Map, Piece, Use};
use crate::session::Session;
use crate::subject::{Measured, Refused, Subject, streams_of};

/// Bytes of a page of the small and of the large pool.
const PAGES: [u64; 2] = [SMALL_SEGMENT, 20 << 20];

/// The allocator as a [`Subject`], with the streams of a program.
#[derive(Debug)]
pub struct Expandable {
    device: Device,
    streams: Vec<Stream>,
    blocks: Vec<Block>,
    /// Records of blocks that are gone.
    vacant: Vec<usize>,
    /// The small pool and the large one.
    pools: [Pool; 2],
    /// The physical memory and the length of each page, by address.
    pages: BTreeMap<u64, (RawPhysical, u64)>,
    /// Addresses and lengths of the segments.
    segments: Vec<(DevicePtr, u64)>,
    stats: MemoryStats,
}

/// The free and the unmapped blocks of a pool, by stream.
#[derive(Debug, Default)]
struct Pool {
    /// By size, and then by address.
    free: BTreeSet<(u16, u64, u64, usize)>,
    /// By address.
    unmapped: BTreeSet<(u16, u64, usize)>,
}

#[derive(Debug, Clone, Copy)]
struct Block {
    kind: usize,
    stream: u16,
    /// The first address of its segment.
    segment: u64,
    addr: u64,
    size: u64,
    state: State,
    prev: Option<usize>,
    next: Option<usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Live,
    Free,
    Unmapped,
}

/// Why pages were not mapped.
enum Unmappable {
    NoMemory,
    Failed(DeviceError),
}

impl From<DeviceError> for Unmappable {
    fn from(error: DeviceError) -> Unmappable {
        if error.is_out_of_memory() { Unmappable::NoMemory } else { Unmappable::Failed(error) }
    }
}

impl Expandable {
    fn serve(&mut self, kind: usize, stream: u16, size: u64) -> Result<usize, Refused> {
        let found = match self.best_fit(kind, stream, size) {
            Some(found) => Ok(found),
            None => self.expand(kind, stream, size),
        };
        let found = match found {
            Err(Unmappable::NoMemory) => {
                self.stats.num_alloc_retries += 1;
                self.release_free().map_err(refused)?;
                self.expand(kind, stream, size)
            }
            found => found,
        };
        match found {
            Ok(id) => Ok(self.split(id, size)),
            Err(Unmappable::Failed(error)) => Err(refused(error)),
            Err(Unmappable::NoMemory) => {
                self.stats.num_ooms += 1;
                Err(Refused::OutOfMemory(None))
            }
        }
    }

    /// Takes the smallest free block that is large enough. Blocks that can grow count with their
    /// room, and are passed over for those with less.
    fn best_fit(&mut self, kind: usize, stream: u16, size: u64) -> Option<usize> {
        let with_room = |id: usize| {
            let next = self.blocks[id].next.map(|next| self.blocks[next]);
            self.blocks[id].size + next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
        };
        let of_stream = (stream, size, 0, 0)..=(stream, u64::MAX, u64::MAX, usize::MAX);
        let mut fits = self.pools[kind].free.range(of_stream).map(|&(.., id)| id);
        let mut best = fits.next()?;
        for id in fits {
            if with_room(id) >= with_room(best) {
                break;
            }
            best = id;
        }
        self.unlist(best);
        Some(best)
    }

    /// Maps pages until a stretch of free blocks and unmapped ones of a segment is one block that is
    /// large enough, and takes it.
    fn expand(&mut self, kind: usize, stream: u16, size: u64) -> Result<usize, Unmappable> {
        if size > self.device.info().total_bytes {
            return Err(Unmappable::NoMemory);
        }
        let mut id = self.stretch(kind, stream, size)?;
        if self.blocks[id].state == State::Unmapped {
            self.map(id, size)?;
        }
        while self.blocks[id].size < size {
            let missing = size - self.blocks[id].size;
            let next = self.blocks[id].next.unwrap_or_else(|| unreachable!("the stretch is long enough"));
            self.map(next, missing)?;
            // The block below was merged into this one.
            id = next;
        }
        self.unlist(id);
        Ok(id)
    }

    /// The first block of the lowest stretch of free and unmapped blocks that is long enough; that
    /// of a new segment if there is none.
    fn stretch(&mut self, kind: usize, stream: u16, size: u64) -> Result<usize, Unmappable> {
        let is_free = |id: &usize| self.blocks[*id].state != State::Live;
        let of_stream = (stream, 0, 0)..=(stream, u64::MAX, usize::MAX);
        for &(.., unmapped) in self.pools[kind].unmapped.range(of_stream) {
            let first = self.blocks[unmapped].prev.filter(is_free).unwrap_or(unmapped);
            let (mut at, mut bytes) = (Some(first), 0);
            while let Some(id) = at {
                bytes += self.blocks[id].size;
                if bytes >= size {
                    return Ok(first);
                }
                at = self.blocks[id].next.filter(is_free);
            }
        }
        let memory = self.device.info().total_bytes;
        let length = (memory + memory / 8).next_multiple_of(PAGES[kind]);
        let ptr = self.device.driver().reserve(length, PAGES[0])?;
        self.segments.push((ptr, length));
        let (prev, next) = (None, None);
        let whole =
            Block { kind, stream, segment: ptr.0, addr: ptr.0, size: length, state: State::Unmapped, prev, next };
        let id = self.insert(whole);
        self.list(id);
        Ok(id)
    }

    /// Maps the pages of the first `bytes` bytes of an unmapped block, which becomes free and merges
    /// with the free blocks next to it.
    fn map(&mut self, id: usize, bytes: u64) -> Result<(), Unmappable> {
        let Block { kind, addr, size, .. } = self.blocks[id];
        let page = PAGES[kind];
        let mapped = bytes.min(size).next_multiple_of(page);
        if let Err(error) = self.map_pages(addr..addr + mapped, page) {
            // What cannot be unmapped either is unmapped with the segment.
            let _ = self.unmap_pages(addr..addr + mapped, page);
            return Err(error.into());
        }
        self.unlist(id);
        if mapped < size {
            let above = Block { addr: addr + mapped, size: size - mapped, prev: Some(id), ..self.blocks[id] };
            let above = self.insert(above);
            self.blocks[id].size = mapped;
            self.link(Some(above), self.blocks[above].next);
            self.link(Some(id), Some(above));
            self.list(above);
        }
        self.blocks[id].state = State::Free;
        let reserved = &mut self.stats.reserved_bytes.all;
        reserved.current += mapped;
        reserved.peak = reserved.peak.max(reserved.current);
        self.stats.num_device_alloc += 1;
        self.merge_and_list(id);
        Ok(())
    }

    /// Releases every page that lies in a free block, after its stream's work.
    fn release_free(&mut self) -> Result<(), DeviceError> {
        for kind in [1, 0] {
            let free: Vec<usize> = self.pools[kind].free.iter().map(|&(.., id)| id).collect();
            free.into_iter().try_for_each(|id| self.unmap(id))?;
        }
        Ok(())
    }

    fn unmap(&mut self, id: usize) -> Result<(), DeviceError> {
        let Block { kind, stream, segment, addr, size, .. } = self.blocks[id];
        let (page, end) = (PAGES[kind], addr + size);
        let low = segment + (addr - segment).next_multiple_of(page);
        let high = segment + (end - segment) / page * page;
        if low >= high {
            return Ok(());
        }
        self.streams[usize::from(stream)].synchronize()?;
        self.unmap_pages(low..high, page)?;
        self.unlist(id);
        if addr < low {
            let below = self.insert(Block { size: low - addr, next: Some(id), ..self.blocks[id] });
            self.link(self.blocks[below].prev, Some(below));
            self.link(Some(below), Some(id));
            self.list(below);
        }
        if high < end {
            let above = self.insert(Block { addr: high, size: end - high, prev: Some(id), ..self.blocks[id] });
            self.link(Some(above), self.blocks[above].next);
            self.link(Some(id), Some(above));
            self.list(above);
        }
        let block = &mut self.blocks[id];
        (block.addr, block.size, block.state) = (low, high - low, State::Unmapped);
        self.stats.reserved_bytes.all.current -= high - low;
        self.stats.num_device_free += 1;
        self.merge_and_list(id);
        Ok(())
    }

    /// Creates, maps and makes accessible the pages of a range. If that fails, some may be mapped.
    fn map_pages(&mut self, range: Range<u64>, page: u64) -> Result<(), DeviceError> {
        let driver = self.device.driver();
        let mut created = Vec::new();
        let mut result = Ok(());
        for _ in 0..(range.end - range.start) / page {
            match driver.create_physical(page, PhysicalOptions::default()) {
                Ok(physical) => created.push(physical),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        let mut at = range.start;
        for physical in created {
            result = result.and_then(|()| driver.map(DevicePtr(at), page, physical));
            if result.is_ok() {
                self.pages.insert(at, (physical, page));
            } else {
                self.release(physical);
            }
            at += page;
        }
        result?;
        driver.set_access(DevicePtr(range.start), range.end - range.start, &[self.device.info().ordinal])
    }

    /// Unmaps and releases the pages of a range.
    fn unmap_pages(&mut self, range: Range<u64>, page: u64) -> Result<(), DeviceError> {
        let mapped: Vec<u64> = self.pages.range(range).map(|(&at, _)| at).collect();
        for at in mapped {
            self.device.driver().unmap(DevicePtr(at), page)?;
            self.pages.remove(&at).into_iter().for_each(|(physical, _)| self.release(physical));
        }
        Ok(())
    }

    /// Releases physical memory, later if the driver refuses now.
    fn release(&self, physical: RawPhysical) {
        if self.device.driver().release_physical(physical).is_err() {
            self.device.release_later(physical);
        }
    }

    /// Cuts a taken block to `size` bytes. The rest is free.
    fn split(&mut self, id: usize, size: u64) -> usize {
        if self.blocks[id].size > size {
            let low = self.insert(Block { size, next: Some(id), ..self.blocks[id] });
            self.link(self.blocks[low].prev, Some(low));
            self.link(Some(low), Some(id));
            let rest = &mut self.blocks[id];
            (rest.addr, rest.size) = (rest.addr + size, rest.size - size);
            self.list(id);
            self.blocks[low].state = State::Live;
            return low;
        }
        self.blocks[id].state = State::Live;
        id
    }

    /// Merges a block that is in no list with neighbours in the same state, and lists it.
    fn merge_and_list(&mut self, id: usize) {
        let state = self.blocks[id].state;
        if let Some(prev) = self.blocks[id].prev.filter(|&prev| self.blocks[prev].state == state) {
            self.unlist(prev);
            let below = self.blocks[prev];
            (self.blocks[id].addr, self.blocks[id].size) = (below.addr, self.blocks[id].size + below.size);
            self.link(below.prev, Some(id));
            self.vacant.push(prev);
        }
        if let Some(next) = self.blocks[id].next.filter(|&next| self.blocks[next].state == state) {
            self.unlist(next);
            let above = self.blocks[next];
            self.blocks[id].size += above.size;
            self.link(Some(id), above.next);
            self.vacant.push(next);
        }
        self.list(id);
    }

    fn link(&mut self, low: Option<usize>, high: Option<usize>) {
        if let Some(low) = low {
            self.blocks[low].next = high;
        }
        if let Some(high) = high {
            self.blocks[high].prev = low;
        }
    }

    fn insert(&mut self, block: Block) -> usize {
        match self.vacant.pop() {
            Some(id) => {
                self.blocks[id] = block;
                id
            }
            None => {
                self.blocks.push(block);
                self.blocks.len() - 1
            }
        }
    }

    fn list(&mut self, id: usize) {
        let Block { kind, stream, addr, size, state, .. } = self.blocks[id];
        match state {
            State::Free => drop(self.pools[kind].free.insert((stream, size, addr, id))),
            State::Unmapped => drop(self.pools[kind].unmapped.insert((stream, addr, id))),
            State::Live => {}
        }
    }

    fn unlist(&mut self, id: usize) {
        let Block { kind, stream, addr, size, state, .. } = self.blocks[id];
        match state {
            State::Free => drop(self.pools[kind].free.remove(&(stream, size, addr, id))),
            State::Unmapped => drop(self.pools[kind].unmapped.remove(&(stream, addr, id))),
            State::Live => {}
        }
    }
}

impl Measured for Expandable {
    fn new(_: &Session, device: &Device, _: &ConfigArg, streams: usize) -> Result<Expandable, Failure> {
        Ok(Expandable {
            streams: streams_of(device, streams)?,
            device: device.clone(),
            blocks: Vec::new(),
            vacant: Vec::new(),
            pools: Default::default(),
            pages: BTreeMap::new(),
            segments: Vec::new(),
            stats: MemoryStats::default(),
        })
    }

    fn lagging(session: &Session, config: &ConfigArg, streams: usize, lag: u64) -> Result<Expandable, Failure> {
        if lag > 0 {
            return Err(Failure::Usage("--lag is not reproduced with backing:expandable: leave it out".to_owned()));
        }
        Expandable::new(session, &session.open()?, config, streams)
    }

    /// Bytes allocated and reserved, and the numbers of retries, refusals, and calls that took
    /// memory from the device and gave it back.
    fn stats(&self) -> MemoryStats {
        self.stats
    }

    fn reset_peaks(&mut self) {
        for stat in [&mut self.stats.allocated_bytes.all, &mut self.stats.reserved_bytes.all] {
            stat.peak = stat.current;
        }
    }

    fn held(&self) -> (u64, u64) {
        (self.stats.reserved_bytes.all.current, self.stats.allocated_bytes.all.current)
    }

    fn map(&self) -> Result<Map, Failure> {
        let mut blocks: BTreeMap<u64, Block> = BTreeMap::new();
        let mut gone = vec![false; self.blocks.len()];
        self.vacant.iter().for_each(|&id| gone[id] = true);
        blocks.extend(self.blocks.iter().zip(gone).filter(|&(_, gone)| !gone).map(|(block, _)| (block.addr, *block)));
        let mut pieces = Vec::new();
        let mut segment = None;
        for block in blocks.into_values() {
            let is = match block.state {
                State::Live => Use::Live,
                State::Free => Use::Free,
                State::Unmapped => continue,
            };
            let starts = segment.replace(block.segment) != Some(block.segment);
            pieces.push(Piece { bytes: block.size, is, stream: block.stream, starts });
        }
        let memory = self.device.memory_info()?;
        Ok(Map::new(pieces, memory.free, memory.total))
    }

    fn empty_cache(&mut self) -> Result<(), Failure> {
        Ok(self.release_free()?)
    }

    fn place(&self, handle: &Option<usize>) -> (DevicePtr, u64) {
        handle.map_or((DevicePtr(0), 0), |id| (DevicePtr(self.blocks[id].addr), self.blocks[id].size))
    }
}

impl Subject for Expandable {
    /// The number of a block; `None` for zero bytes.
    type Handle = Option<usize>;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Option<usize>, Refused> {
        if bytes == 0 {
            return Ok(None);
        }
        let size = bytes.checked_next_multiple_of(UNIT).unwrap_or(u64::MAX);
        let id = self.serve(usize::from(size > SMALL_MAX), stream, size)?;
        let allocated = &mut self.stats.allocated_bytes.all;
        allocated.current += self.blocks[id].size;
        allocated.peak = allocated.peak.max(allocated.current);
        Ok(Some(id))
    }

    fn free(&mut self, handle: Option<usize>) {
        let Some(id) = handle else { return };
        self.stats.allocated_bytes.all.current -= self.blocks[id].size;
        self.blocks[id].state = State::Free;
        self.merge_and_list(id);
    }
}

impl Drop for Expandable {
    fn drop(&mut self) {
        for &(ptr, bytes) in &self.segments {
            let pages = self.pages.range(ptr.0..ptr.0 + bytes);
            let mapped = pages.map(|(&at, &(physical, page))| (DevicePtr(at), page, Some(physical))).collect();
            self.device.unreserve_later(Reservation { ptr, bytes, mapped });
        }
        self.device.settle();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Global;
    use crate::random::Random;

    const MIB: u64 = 1 << 20;

    fn expandable(device: &str) -> Expandable {
        let global = Global { device: Some(device.parse().unwrap()), ..Global::default() };
        let config = "backing:expandable".parse().unwrap();
        Expandable::lagging(&Session::new(&global).unwrap(), &config, 2, 0).unwrap()
    }

    fn reserved(subject: &Expandable) -> u64 {
        subject.stats().reserved_bytes.all.current
    }

    #[test]
    fn a_segment_grows_by_pages_of_its_pool() {
        let mut subject = expandable("sim:1GiB");
        let small = subject.alloc(1000, 0).unwrap();
        assert_eq!((reserved(&subject), subject.stats().allocated_bytes.all.current), (2 * MIB, 1024));
        let large = subject.alloc(MIB + 1, 0).unwrap();
        assert_eq!(reserved(&subject), 22 * MIB);
        let grown = subject.alloc(30 * MIB, 0).unwrap();
        assert_eq!(reserved(&subject), 42 * MIB, "it begins in the free part of the last page");
        let other_stream = subject.alloc(MIB, 1).unwrap();
        assert_eq!(reserved(&subject), 44 * MIB);
        [small, large, grown, other_stream].into_iter().for_each(|block| subject.free(block));
        assert_eq!(reserved(&subject), 44 * MIB);
        subject.empty_cache().unwrap();
        assert_eq!(reserved(&subject), 0);
        assert_eq!(subject.device.memory_info().unwrap().free, 1 << 30);
    }

    #[test]
    fn free_pages_are_released_once_before_a_refusal() {
        let mut subject = expandable("sim:100MiB");
        let blocks = [(); 4].map(|()| subject.alloc(20 * MIB, 0).unwrap());
        let [one, two, three, four] = blocks;
        subject.free(one);
        subject.free(three);
        // Neither of the two holes is long enough, but their pages serve at the segment's end.
        let moved = subject.alloc(60 * MIB, 0).unwrap();
        assert_eq!((reserved(&subject), subject.stats().num_alloc_retries), (100 * MIB, 1));
        assert!(matches!(subject.alloc(20 * MIB, 0), Err(Refused::OutOfMemory(_))));
        assert_eq!((subject.stats().num_alloc_retries, subject.stats().num_ooms), (2, 1));
        [two, four, moved].into_iter().for_each(|block| subject.free(block));
        let device = subject.device.clone();
        drop(subject);
        assert_eq!(device.memory_info().unwrap().free, 100 * MIB);
        device.assert_no_violations();
    }

    #[test]
    fn everything_goes_back_whichever_driver_call_fails() {
        for call in ["cuMemCreate#2", "cuMemMap#2", "cuMemSetAccess#2", "cuMemUnmap#2", "cuMemRelease#2"] {
            let mut subject = expandable(&format!("sim:1GiB,fault={call}:999"));
            let mut failed = 0;
            for bytes in [30 * MIB, 100 * MIB] {
                match subject.alloc(bytes, 0) {
                    Ok(block) => subject.free(block),
                    Err(_) => failed += 1,
                }
            }
            failed += usize::from(subject.empty_cache().is_err());
            // What cannot be released now is released later.
            assert_eq!(failed, usize::from(!call.starts_with("cuMemRelease")), "{call}");
            let device = subject.device.clone();
            drop(subject);
            device.settle();
            assert_eq!(device.memory_info().unwrap().free, 1 << 30, "{call}");
        }
    }

    /// The blocks are linked in the order of their addresses, without gaps, and neighbours differ.
    fn assert_linked(subject: &Expandable) {
        let gone: BTreeSet<usize> = subject.vacant.iter().copied().collect();
        let blocks: Vec<usize> = (0..subject.blocks.len()).filter(|id| !gone.contains(id)).collect();
        let (mut mapped, mut live) = (0, 0);
        for &id in &blocks {
            let block = subject.blocks[id];
            let page = PAGES[block.kind];
            match block.state {
                State::Unmapped => assert_eq!([(block.addr - block.segment) % page, block.size % page], [0; 2]),
                _ => mapped += block.size,
            }
            live += if block.state == State::Live { block.size } else { 0 };
            if let Some(next) = block.next {
                let next = subject.blocks[next];
                assert_eq!((next.prev, next.addr, next.segment), (Some(id), block.addr + block.size, block.segment));
                assert!(next.state != block.state || block.state == State::Live);
            }
        }
        assert_eq!(mapped, reserved(subject));
        assert_eq!(live, subject.stats().allocated_bytes.all.current);
        assert_eq!(subject.pages.values().map(|(_, page)| page).sum::<u64>(), mapped);
    }

    #[test]
    fn blocks_stay_linked_when_random_programs_lack_memory() {
        for seed in 0..40 {
            let mut subject = expandable("sim:300MiB");
            let mut live = Vec::new();
            let mut draw = Random::new(seed);
            for _ in 0..400 {
                if draw.below(5) < 2 && !live.is_empty() {
                    let at = draw.below(u32::try_from(live.len()).unwrap()) as usize;
                    subject.free(live.swap_remove(at));
                } else {
                    let most = [1 << 16, 1 << 20, 30 << 20, 90 << 20][draw.below(4) as usize];
                    let (bytes, stream) = (1 + draw.below(most), draw.below(2));
                    live.extend(subject.alloc(bytes.into(), u16::try_from(stream).unwrap()).ok());
                }
                assert_linked(&subject);
            }
            assert!(subject.stats().num_alloc_retries > 0, "seed {seed}");
        }
    }

    #[test]
    fn requests_larger_than_the_device_are_refused() {
        let mut subject = expandable("sim:1GiB");
        for bytes in [(1 << 30) + 1, u64::MAX] {
            assert!(matches!(subject.alloc(bytes, 0), Err(Refused::OutOfMemory(_))));
        }
        assert!(subject.segments.is_empty() && subject.alloc(0, 0).unwrap().is_none());
    }

    #[test]
    fn other_options_and_commands_are_refused() {
        for odd in
            ["backing:expandable,max_split_size_mb:128", "backing:pytorch,expandable_segments:True,backing:paged"]
        {
            assert!(odd.parse::<ConfigArg>().is_err(), "{odd}");
        }
        let config: ConfigArg = "expandable_segments:True, backing:pytorch".parse().unwrap();
        assert!(config.is_same(&"backing:expandable".parse().unwrap()));
        assert!("expandable_segments:True".parse::<ConfigArg>().unwrap().pytorch.is_none());
        let session = Session::new(&Global::default()).unwrap();
        assert!(session.allocator(&session.open().unwrap(), &config).is_err());
        assert!(Expandable::lagging(&session, &config, 1, 1).is_err());
    }
}
