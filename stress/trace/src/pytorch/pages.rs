//! Memory with expandable segments: a range of addresses for each stream and pool, of which pages
//! are mapped as needed.
//!
//! If no free block serves a request, pages are mapped; after a refusal once more, when all free
//! pages have been released. The driver calls are PyTorch's. Uses by other streams are done at
//! once, as if the device were idle.

use std::ops::Range;

use aquifer::device::{DeviceError, DevicePtr};
use aquifer_device::{PhysicalOptions, RawPhysical};

use super::SMALL_SEGMENT;
use super::index::Entry;
use super::model::{Block, NONE, PyTorch, Segment, State, kind_of, raise};

/// Bytes of a page of the small and of the large pool.
pub(super) const PAGES: [u64; 2] = [SMALL_SEGMENT, 20 << 20];

/// The smallest of the free blocks. Blocks that can grow count with their room, and are passed over
/// for those with less.
pub(super) fn with_least_room(blocks: &[Block], mut fits: impl Iterator<Item = Entry>) -> Option<Entry> {
    let with_room = |entry: Entry| {
        let next = blocks.get(blocks[entry.id as usize].next as usize);
        entry.size + next.filter(|next| next.state == State::Unmapped).map_or(0, |next| next.size)
    };
    let mut best = fits.next()?;
    for entry in fits {
        if with_room(entry) >= with_room(best) {
            break;
        }
        best = entry;
    }
    Some(best)
}

impl PyTorch {
    #[cold]
    pub(super) fn expand_or_release(&mut self, stream: u16, size: u64) -> Result<Option<u32>, DeviceError> {
        if let Some(id) = self.expand(stream, size)? {
            return Ok(Some(id));
        }
        self.stats.num_alloc_retries += 1;
        self.release_free()?;
        let expanded = self.expand(stream, size)?;
        self.stats.num_ooms += u64::from(expanded.is_none());
        Ok(expanded)
    }

    /// Maps pages until a stretch of free blocks and unmapped ones of a segment is one block that
    /// is large enough, and takes it; `None` if memory is lacking.
    fn expand(&mut self, stream: u16, size: u64) -> Result<Option<u32>, DeviceError> {
        if size > self.device.info().total_bytes {
            return Ok(None);
        }
        match self.map_stretch(stream, size) {
            Ok(id) => Ok(Some(id)),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn map_stretch(&mut self, stream: u16, size: u64) -> Result<u32, DeviceError> {
        let mut id = self.stretch(stream, size)?;
        if self.blocks[id as usize].state == State::Unmapped {
            id = self.map(id, size)?;
        }
        while self.blocks[id as usize].size < size {
            let Block { next, size: has, .. } = self.blocks[id as usize];
            id = self.map(next, size - has)?;
        }
        self.unlist(id);
        Ok(id)
    }

    /// The first block of the lowest stretch of free and unmapped blocks that is long enough; that
    /// of a new segment if there is none.
    fn stretch(&mut self, stream: u16, size: u64) -> Result<u32, DeviceError> {
        let kind = kind_of(size);
        let is_free = |id: u32| id != NONE && matches!(self.blocks[id as usize].state, State::Free | State::Unmapped);
        for &(.., unmapped) in self.pools[kind].unmapped.range((stream, 0, 0)..=(stream, u64::MAX, NONE)) {
            let prev = self.blocks[unmapped as usize].prev;
            let first = if is_free(prev) { prev } else { unmapped };
            let (mut at, mut bytes) = (first, 0);
            while is_free(at) {
                bytes += self.blocks[at as usize].size;
                if bytes >= size {
                    return Ok(first);
                }
                at = self.blocks[at as usize].next;
            }
        }
        let memory = self.device.info().total_bytes;
        let bytes = (memory + memory / 8).next_multiple_of(PAGES[kind]);
        let ptr = self.device.driver().reserve(bytes, PAGES[0])?;
        let state = State::Unmapped;
        let kind = u8::from(kind == 1);
        let whole =
            Block { place: ptr.0, size: bytes, prev: NONE, next: NONE, kind, state, stream, events: 0, since: 0 };
        let first = self.insert(whole);
        self.segments.insert(ptr.0, Segment { ptr, bytes, first });
        self.list(first);
        Ok(first)
    }

    /// Maps the pages of the first `bytes` bytes of an unmapped block, which becomes free and
    /// merges with the free blocks next to it. Returns the block that it became.
    fn map(&mut self, id: u32, bytes: u64) -> Result<u32, DeviceError> {
        let Block { kind, place, size, .. } = self.blocks[id as usize];
        let page = PAGES[usize::from(kind)];
        let mapped = bytes.min(size).next_multiple_of(page);
        if let Err(error) = self.map_pages(place..place + mapped, page) {
            // What cannot be unmapped either is unmapped with the segment.
            let _ = self.unmap_pages(place..place + mapped, page);
            return Err(error);
        }
        self.unlist(id);
        if mapped < size {
            let above = self.cut(id, mapped);
            self.list(above);
        }
        raise(&mut self.stats.reserved_bytes.all, mapped);
        self.stats.num_device_alloc += 1;
        Ok(self.merge_and_list(id, State::Free))
    }

    /// Releases every page that lies in a free block, after its stream's work.
    pub(super) fn unmap(&mut self, id: u32) -> Result<(), DeviceError> {
        let Block { kind, stream, place, size, .. } = self.blocks[id as usize];
        let Some((&segment, _)) = self.segments.range(..=place).next_back() else {
            unreachable!("a block is in a segment")
        };
        let (page, end) = (PAGES[usize::from(kind)], place + size);
        let low = segment + (place - segment).next_multiple_of(page);
        let high = segment + (end - segment) / page * page;
        if low >= high {
            return Ok(());
        }
        self.streams[usize::from(stream)].synchronize()?;
        self.unmap_pages(low..high, page)?;
        self.unlist(id);
        let mut unmapped = id;
        if place < low {
            unmapped = self.cut(id, low - place);
            self.list(id);
        }
        if high < end {
            let above = self.cut(unmapped, high - low);
            self.list(above);
        }
        self.stats.reserved_bytes.all.current -= high - low;
        self.stats.num_device_free += 1;
        self.merge_and_list(unmapped, State::Unmapped);
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
                self.release_page(physical);
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
            self.pages.remove(&at).into_iter().for_each(|(physical, _)| self.release_page(physical));
        }
        Ok(())
    }

    /// Releases physical memory, later if the driver refuses now.
    fn release_page(&self, physical: RawPhysical) {
        if self.device.driver().release_physical(physical).is_err() {
            self.device.release_later(physical);
        }
    }
}
