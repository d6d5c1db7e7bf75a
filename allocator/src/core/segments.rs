//! Regions that are plain driver allocations, and accounting for mapped memory.

use crate::core::Core;
use crate::core::heap::{Block, Heap, Region, State};
use crate::core::paged::granules::Purpose;
use crate::core::pools::{Private, Which};
use crate::core::remap::donors::Donor;
use crate::history::{Action, Subject};
use crate::tags::Tag;
use crate::types::{After, BlockId, PoolId, Recipient, Request, StreamId};

/// A segment out of the heap while the driver is asked to take it back.
pub(crate) struct Releasing {
    pub(crate) region: Region,
    /// Tag of the allocation that made it.
    pub(crate) tag: Tag,
    /// Who may have its one block, as [`crate::core::heap::Block`] says.
    pub(crate) owner: StreamId,
    pub(crate) after: After,
}

/// A segment to be released.
pub(crate) struct Chosen {
    pub(crate) block: BlockId,
    pub(crate) addr: u64,
    /// Whether it was chosen although graphs of other libraries may use it.
    pub(crate) kept_for_graphs: bool,
}

impl Chosen {
    pub(crate) fn new(core: &Core, id: BlockId) -> Chosen {
        let block = core.heap.block(id);
        let owner = core.pools.owner_of(block.pool);
        let kept_for_graphs = owner.is_some_and(|private| private.keeps_for_graphs(block.pool));
        Chosen { block: id, addr: block.addr, kept_for_graphs }
    }
}

impl Core {
    pub(crate) fn add_segment(&mut self, request: &Request, addr: u64, bytes: u64) -> BlockId {
        self.counters.events.num_device_alloc += 1;
        self.count_segment(request.pool, request.stream, request.tag, addr, bytes);
        self.pools.note_region(request.pool);
        self.heap_with_pool(request.pool).add_region(addr, bytes, request.stream, request.pool)
    }

    pub(crate) fn count_segment(&mut self, pool: PoolId, stream: StreamId, tag: Tag, addr: u64, bytes: u64) {
        let kind = pool.kind();
        self.reserved += bytes;
        self.counters.segment.add(kind, 1);
        self.counters.reserved_bytes.add(kind, bytes);
        self.segments.insert(addr, tag);
        let pool = self.pools.history_id(pool);
        let subject = Subject { addr, size: bytes, stream, tag, pool };
        self.history.note(&[Action::SegmentAlloc], subject);
    }

    /// Takes a segment out of the heap. `None` if it is not wholly free any more, or if a graph may
    /// use it by now.
    pub(crate) fn begin_release(&mut self, &Chosen { block: id, addr, kept_for_graphs }: &Chosen) -> Option<Releasing> {
        let block = self.heap.block(id);
        if block.state != State::Free || block.addr != addr || !self.is_whole_segment(block) {
            return None;
        }
        let owner = self.pools.owner_of(block.pool);
        let kept = |private: &Private| {
            private.keeps_for_our_graphs(block.pool) || (!kept_for_graphs && private.keeps_for_graphs(block.pool))
        };
        if owner.is_some_and(kept) {
            return None;
        }
        let (owner, after) = (block.owner, block.after);
        let region = self.heap.remove_region(id);
        let kind = region.pool.kind();
        self.reserved -= region.bytes;
        self.being_released += region.bytes;
        self.counters.segment.sub(kind, 1);
        self.counters.reserved_bytes.sub(kind, region.bytes);
        let tag = self.segments.remove(&region.addr).unwrap_or_default();
        let pool = self.pools.history_id(region.pool);
        let subject = Subject { addr: region.addr, size: region.bytes, stream: region.stream, tag, pool };
        self.history.note(&[Action::SegmentFree], subject);
        Some(Releasing { region, tag, owner, after })
    }

    /// The driver did not take a segment back.
    pub(crate) fn cancel_release(&mut self, Releasing { region, tag, owner, after }: Releasing) {
        self.being_released -= region.bytes;
        self.count_segment(region.pool, region.stream, tag, region.addr, region.bytes);
        self.heap_with_pool(region.pool).restore_region(&region, owner, after);
    }

    /// Wholly free segments of some pools that are not pinned.
    pub(crate) fn whole_segments(&self, which: Which) -> Vec<BlockId> {
        let free = self.pools_among(which).flat_map(|pool| self.heap.free_blocks(pool)).map(|key| key.block);
        free.filter(|&id| self.is_whole_segment(self.heap.block(id))).collect()
    }

    /// Whether a free block is a whole segment that may go back to the device.
    pub(crate) fn is_whole_segment(&self, block: &Block) -> bool {
        !block.is_split() && !self.heap.region(block.region).is_paged() && !self.pins.contains(block.addr)
    }

    pub(crate) fn segment_released(&mut self, region: &Region) {
        self.being_released -= region.bytes;
        self.pools.forget_region(region.pool);
        self.counters.events.num_device_free += 1;
    }

    /// Adds a region of mapped memory for requests like this one, in which nothing is mapped so
    /// far.
    pub(crate) fn add_reservation(&mut self, request: &Request, addr: u64, bytes: u64) {
        let paged = &mut self.paged;
        paged.add_reservation(addr, bytes, request.pool.kind(), Purpose::Heap);
        let granule = paged.granule;
        self.pools.note_region(request.pool);
        let heap = self.heap_with_pool(request.pool);
        heap.add_reservation(addr, bytes, request.stream, request.pool, granule);
    }

    /// The heap, for a region to be added to a pool. [`PoolTable::note_region`] counts the region.
    pub(super) fn heap_with_pool(&mut self, pool: PoolId) -> &mut Heap {
        let options = self.pools.owner_of(pool).map(Private::heap_options);
        options.into_iter().for_each(|options| self.heap.add_private_pool(pool, options));
        &mut self.heap
    }

    /// The numbers of some pools that have regions: the default pools first, then by pool.
    pub(crate) fn pools_among(&self, which: Which) -> impl Iterator<Item = PoolId> + '_ {
        let default = [PoolId::SMALL, PoolId::LARGE].into_iter();
        let default = default.filter(move |&number| self.pools.is_among(number, which));
        default.chain(self.pools.with_regions(which))
    }

    /// Notes in the history that held memory is mapped or unmapped. Returns its pool.
    pub(crate) fn note_donor(&mut self, action: Action, donor: &Donor) -> PoolId {
        let region = self.heap.region_of(donor.block);
        let of = Recipient { pool: region.pool, stream: region.stream };
        self.note_mapping(action, of, donor.addr, donor.bytes);
        of.pool
    }

    pub(crate) fn note_mapping(&mut self, action: Action, of: Recipient, addr: u64, bytes: u64) {
        let pool = self.pools.history_id(of.pool);
        let subject = Subject { addr, size: bytes, stream: of.stream, tag: Tag::default(), pool };
        self.history.note(&[action], subject);
    }

    /// Makes `reserved` the sum of granules and segments (P3).
    pub(crate) fn account_for_granules(&mut self) {
        let paged = &mut self.paged;
        let now = [paged.mapped_bytes[0], paged.mapped_bytes[1] + paged.spare_bytes()];
        let before = std::mem::replace(&mut paged.accounted, now);
        let sum = |bytes: [u64; 2]| bytes.iter().sum::<u64>();
        self.reserved = self.reserved + sum(now) - sum(before);
        self.counters.reserved_bytes.replace(before, now);
    }
}
