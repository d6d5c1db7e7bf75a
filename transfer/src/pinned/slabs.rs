//! Slabs of pinned memory and the blocks that tile them: a pure data structure without a
//! driver, locks or waits.
//!
//! Invariants, which [`Slabs::check`] asserts:
//! * the blocks of a slab lie side by side and add up to its length;
//! * every block is a multiple of 512 bytes; blocks of paged slabs are multiples of a page, and so
//!   is every address there;
//! * a live block is exactly as large as the class that was asked for;
//! * no two neighbours are free: they merge at once. A *deferred* block is unused but stays as it
//!   is for the next request of its class; it merges when no block fits a request, or memory is to
//!   go back;
//! * `reserved = Σ slabs`.
//!
//! A block found in the index is the smallest that fits, and of these the one at the lowest
//! address. The rest of it stays free.

#[cfg(test)]
mod check;

use std::collections::BTreeSet;

use super::class::{self, PAGED};

/// A block, by its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BlockId(u32);

/// The kind of blocks in a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grain {
    /// Blocks of less than 32 KiB.
    Fine,
    /// Larger ones, all of them whole pages.
    Paged,
}

impl Grain {
    pub(super) fn of(class: usize) -> Grain {
        if class < PAGED { Grain::Fine } else { Grain::Paged }
    }
}

/// A slab that is free as a whole, and larger than this, is not split for requests smaller than an
/// eighth of it, unless it came for requests of any size, or the caller says so.
const GUARDED: usize = 32 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    /// It has an owner.
    Live,
    /// It has no owner, but the device may still use it.
    Waiting,
    /// Unused, and reserved for its class.
    Deferred,
    /// Unused.
    Free,
    /// The record is not in use.
    Vacant,
}

#[derive(Clone, Debug)]
struct Block {
    slab: u32,
    start: usize,
    bytes: usize,
    before: Option<u32>,
    after: Option<u32>,
    state: BlockState,
}

/// A slab.
#[derive(Debug)]
pub(super) struct Slab<M> {
    pub(super) start: usize,
    pub(super) bytes: usize,
    grain: Grain,
    /// Whether it is prewarmed, and split for any request.
    open: bool,
    pub(super) memory: M,
}

type Index = BTreeSet<(usize, usize, u32)>;

/// The slabs; `M` is what holds the memory of one.
#[derive(Debug)]
pub(super) struct Slabs<M> {
    slabs: Vec<Option<Slab<M>>>,
    /// Places among them without a slab.
    vacant_slabs: Vec<u32>,
    blocks: Vec<Block>,
    vacant: Vec<u32>,
    /// Deferred blocks by class, the latest last.
    deferred: Vec<Vec<u32>>,
    deferred_count: usize,
    /// Free blocks by (size, address, record), of fine and of paged slabs: parts of a slab, and
    /// slabs that are free as a whole.
    parts: [Index; 2],
    whole: [Index; 2],
    reserved: usize,
}

impl<M> Default for Slabs<M> {
    fn default() -> Self {
        Slabs {
            slabs: Vec::new(),
            vacant_slabs: Vec::new(),
            blocks: Vec::new(),
            vacant: Vec::new(),
            deferred: Vec::new(),
            deferred_count: 0,
            parts: [Index::new(), Index::new()],
            whole: [Index::new(), Index::new()],
            reserved: 0,
        }
    }
}

impl<M> Slabs<M> {
    /// Bytes of all slabs.
    pub(super) fn reserved(&self) -> usize {
        self.reserved
    }

    pub(super) fn start(&self, block: BlockId) -> usize {
        self.block(block.0).start
    }

    pub(super) fn bytes(&self, block: BlockId) -> usize {
        self.block(block.0).bytes
    }

    /// A block of exactly this class, out of unused memory. With `any`, large slabs are split for
    /// small requests, too.
    #[inline]
    pub(super) fn take(&mut self, class: usize, any: bool) -> Option<BlockId> {
        if let Some(block) = self.deferred.get_mut(class::index(class)).and_then(Vec::pop) {
            self.deferred_count -= 1;
            self.block_mut(block).state = BlockState::Live;
            return Some(BlockId(block));
        }
        self.take_free(class, any)
    }

    fn take_free(&mut self, class: usize, any: bool) -> Option<BlockId> {
        let found = self.find(class, any).or_else(|| {
            self.merge_deferred();
            self.find(class, any)
        })?;
        Some(self.carve(found, class))
    }

    /// The free block that serves the class best.
    fn find(&self, class: usize, any: bool) -> Option<u32> {
        let grain = Grain::of(class) as usize;
        let best = |index: &Index| index.range((class, 0, 0)..).next().copied();
        match (best(&self.whole[grain]), best(&self.parts[grain])) {
            (Some((bytes, _, block)), _) if bytes == class => Some(block),
            (_, Some((_, _, block))) => Some(block),
            (Some(_), None) => {
                let may_split = |bytes: usize| any || bytes <= GUARDED || class >= bytes / 8;
                let mut whole = self.whole[grain].range((class, 0, 0)..);
                whole.find(|&&(bytes, _, block)| may_split(bytes) || self.is_open(block)).map(|&(_, _, block)| block)
            }
            (None, None) => None,
        }
    }

    fn is_open(&self, block: u32) -> bool {
        self.slabs[self.block(block).slab as usize].as_ref().is_some_and(|slab| slab.open)
    }

    /// Makes the first `class` bytes of a free block a live one.
    fn carve(&mut self, block: u32, class: usize) -> BlockId {
        self.unlist(block);
        let Block { slab, start, bytes, after, .. } = *self.block(block);
        if bytes > class {
            let rest = Block {
                slab,
                start: start + class,
                bytes: bytes - class,
                before: Some(block),
                after,
                state: BlockState::Free,
            };
            let rest = self.new_record(rest);
            if let Some(after) = after {
                self.block_mut(after).before = Some(rest);
            }
            let block = self.block_mut(block);
            (block.bytes, block.after) = (class, Some(rest));
            self.list(rest);
        }
        self.block_mut(block).state = BlockState::Live;
        BlockId(block)
    }

    /// A live block loses its owner, and the device is done with it.
    #[inline]
    pub(super) fn defer(&mut self, block: BlockId) {
        debug_assert!(matches!(self.block(block.0).state, BlockState::Live | BlockState::Waiting));
        let record = self.block_mut(block.0);
        record.state = BlockState::Deferred;
        let class = class::index(record.bytes);
        if self.deferred.len() <= class {
            self.deferred.resize_with(class + 1, Vec::new);
        }
        self.deferred[class].push(block.0);
        self.deferred_count += 1;
    }

    /// A live block loses its owner, but the device may still use it. Ends with [`Slabs::defer`].
    pub(super) fn wait(&mut self, block: BlockId) {
        debug_assert_eq!(self.block(block.0).state, BlockState::Live);
        self.block_mut(block.0).state = BlockState::Waiting;
    }

    /// Merges all deferred blocks with free neighbours.
    pub(super) fn merge_deferred(&mut self) {
        if self.deferred_count == 0 {
            return;
        }
        self.deferred_count = 0;
        for class in 0..self.deferred.len() {
            while let Some(block) = self.deferred[class].pop() {
                self.free(block);
            }
        }
    }

    fn free(&mut self, block: u32) {
        let Block { before, after, .. } = *self.block(block);
        self.block_mut(block).state = BlockState::Free;
        if let Some(after) = after.filter(|&after| self.block(after).state == BlockState::Free) {
            self.unlist(after);
            self.absorb(block, after);
        }
        let mut merged = block;
        if let Some(before) = before.filter(|&before| self.block(before).state == BlockState::Free) {
            self.unlist(before);
            self.absorb(before, block);
            merged = before;
        }
        self.list(merged);
    }

    /// Makes the right one of two free neighbours a part of the left one.
    fn absorb(&mut self, left: u32, right: u32) {
        let Block { bytes, after, .. } = *self.block(right);
        let grown = self.block_mut(left);
        grown.bytes += bytes;
        grown.after = after;
        if let Some(after) = after {
            self.block_mut(after).before = Some(left);
        }
        self.block_mut(right).state = BlockState::Vacant;
        self.vacant.push(right);
    }

    /// Adds a slab, whose first `class` bytes are live at once.
    pub(super) fn add(&mut self, start: usize, bytes: usize, class: usize, memory: M) -> BlockId {
        let block = self.insert(Slab { start, bytes, grain: Grain::of(class), open: false, memory });
        self.carve(block, class)
    }

    /// Adds a slab for paged requests to come, of any size.
    pub(super) fn add_open(&mut self, start: usize, bytes: usize, memory: M) {
        self.insert(Slab { start, bytes, grain: Grain::Paged, open: true, memory });
    }

    /// Puts a slab back that was removed.
    pub(super) fn put_back(&mut self, removed: Slab<M>) {
        self.insert(removed);
    }

    fn insert(&mut self, new: Slab<M>) -> u32 {
        let slab = self.vacant_slabs.pop().unwrap_or_else(|| {
            self.slabs.push(None);
            number(self.slabs.len() - 1)
        });
        let (start, bytes) = (new.start, new.bytes);
        self.slabs[slab as usize] = Some(new);
        self.reserved += bytes;
        let block = self.new_record(Block { slab, start, bytes, before: None, after: None, state: BlockState::Free });
        self.list(block);
        block
    }

    /// Removes slabs of which nothing is in use, the largest first, until at least `bytes` bytes
    /// are gone or none is left.
    pub(super) fn remove_unused(&mut self, bytes: usize) -> Vec<Slab<M>> {
        self.merge_deferred();
        let mut removed = Vec::new();
        let mut left = bytes;
        while left > 0 {
            let largest = self.whole.iter().filter_map(|index| index.last().copied()).max();
            let Some((_, _, block)) = largest else { break };
            self.unlist(block);
            let slab = std::mem::replace(&mut self.block_mut(block).slab, u32::MAX);
            self.block_mut(block).state = BlockState::Vacant;
            self.vacant.push(block);
            let Some(unused) = self.slabs[slab as usize].take() else { break };
            self.vacant_slabs.push(slab);
            self.reserved -= unused.bytes;
            left = left.saturating_sub(unused.bytes);
            removed.push(unused);
        }
        removed
    }

    /// All slabs, including those in use.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = M> {
        std::mem::take(self).slabs.into_iter().flatten().map(|slab| slab.memory)
    }

    /// Unused bytes.
    pub(super) fn unused(&self) -> usize {
        let unused = |block: &&Block| matches!(block.state, BlockState::Deferred | BlockState::Free);
        self.blocks.iter().filter(unused).map(|block| block.bytes).sum()
    }

    fn new_record(&mut self, block: Block) -> u32 {
        if let Some(vacant) = self.vacant.pop() {
            *self.block_mut(vacant) = block;
            return vacant;
        }
        self.blocks.push(block);
        number(self.blocks.len() - 1)
    }

    fn list(&mut self, block: u32) {
        let key = self.key(block);
        self.index_of(block).insert(key);
    }

    fn unlist(&mut self, block: u32) {
        let key = self.key(block);
        let listed = self.index_of(block).remove(&key);
        debug_assert!(listed, "free block {block} is not in its index");
    }

    fn key(&self, block: u32) -> (usize, usize, u32) {
        let Block { bytes, start, .. } = *self.block(block);
        (bytes, start, block)
    }

    fn index_of(&mut self, block: u32) -> &mut Index {
        let Block { slab, before, after, .. } = *self.block(block);
        let grain = self.slabs[slab as usize].as_ref().map_or(Grain::Paged, |slab| slab.grain);
        let indexes = if before.is_none() && after.is_none() { &mut self.whole } else { &mut self.parts };
        &mut indexes[grain as usize]
    }

    #[inline]
    fn block(&self, block: u32) -> &Block {
        &self.blocks[block as usize]
    }

    #[inline]
    fn block_mut(&mut self, block: u32) -> &mut Block {
        &mut self.blocks[block as usize]
    }
}

/// A place in a vector of records, of which there are far fewer than 2^32: each stands for at least
/// 512 bytes of locked memory, or for a slab.
#[expect(
    clippy::cast_possible_truncation,
    reason = "2^32 records would take 2 TiB of pinned memory in the smallest blocks"
)]
fn number(place: usize) -> u32 {
    debug_assert!(u32::try_from(place).is_ok());
    place as u32
}
