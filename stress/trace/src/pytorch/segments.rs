//! Memory without expandable segments: a cache of plain driver allocations, *segments*.
//!
//! If no free block serves a request, these are tried in order:
//!
//! 1. release segments by age, if a limit and a threshold are set;
//! 2. take a segment from the device;
//! 3. release oversize segments, if there is a size from which on blocks are oversize, and repeat 2;
//! 4. wait for the blocks that other streams use, release all unused segments, and repeat 2.
//!
//! PyTorch has segments in the order of their addresses. Here a newer segment counts as higher, as
//! on a device that gives out each address once, so that figures do not depend on the driver.

use aquifer::device::DeviceError;

use super::SMALL_MAX;
use super::index::Entry;
use super::model::{Block, NONE, Pool, PyTorch, Segment, State, kind_of, raise};

impl PyTorch {
    #[cold]
    pub(super) fn grow_or_release(&mut self, stream: u16, size: u64) -> Result<Option<u32>, DeviceError> {
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
        self.segments.insert(self.next_place, Segment { ptr, bytes, first });
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
            let Pool { free, searches, .. } = &self.pools[1];
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

    /// Releases the smallest unused oversize segment that is large enough for the request, or else
    /// the largest ones. Returns whether together they are large enough.
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

    /// Gives a segment back to the device, of which a free block is the only one.
    pub(super) fn release(&mut self, id: u32) -> Result<(), DeviceError> {
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
