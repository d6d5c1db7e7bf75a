//! What an allocation and a free do to the records of blocks and to one index: cut a block, join neighbours.
//!
//! They are written once for both kinds of index and compiled for each, so that a kind is looked up once an operation. The
//! running totals and what is known of regions are [`super::Heap`]'s.

use super::block::{Block, BlockId, Slab, State};
use super::index::Index;
use crate::size_class::{PoolKind, SizeClasses};

/// What is taken from a free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The stream it is for.
    pub(super) owner: u32,
    /// Its length in bytes, and the bytes of it that were asked for.
    pub(super) size: u64,
    pub(super) requested: u64,
}

/// Takes a piece from the block that the index chooses, if the size rules allow. Returns it and the size the block had.
#[inline]
pub(super) fn take_best(
    index: &mut impl Index,
    blocks: &mut Slab,
    classes: &SizeClasses,
    no_split: bool,
    kind: PoolKind,
    piece: Piece,
) -> Option<(BlockId, u64)> {
    let mut id = index.choose(blocks, piece.size)?;
    if !classes.fits(blocks[id].size, piece.size) {
        // As with PyTorch, the smallest that is large enough decides.
        id = index.best_fit(blocks, piece.size).filter(|&id| classes.fits(blocks[id].size, piece.size))?;
    }
    Some(take(index, blocks, classes, no_split, kind, id, piece))
}

/// Takes a piece from a given free block, whole or by cutting it off. Returns it and the size the block had.
#[inline]
pub(super) fn take(
    index: &mut impl Index,
    blocks: &mut Slab,
    classes: &SizeClasses,
    no_split: bool,
    kind: PoolKind,
    id: BlockId,
    piece: Piece,
) -> (BlockId, u64) {
    let whole = blocks[id].size;
    if !no_split && classes.should_split(kind, whole, piece.size) {
        return (cut(index, blocks, id, piece), whole);
    }
    index.remove(blocks, id);
    let block = &mut blocks[id];
    (block.state, block.owner, block.requested) = (State::Live, piece.owner, piece.requested);
    (id, whole)
}

/// Cuts a piece off the low end of a free block. The rest stays free, and its owner's.
#[inline]
fn cut(index: &mut impl Index, blocks: &mut Slab, rest: BlockId, piece: Piece) -> BlockId {
    let Piece { owner, size, requested } = piece;
    let Block { addr, size: whole, prev, region, pool, .. } = blocks[rest];
    let state = State::Live;
    let taken = blocks.insert(Block {
        addr,
        size,
        requested,
        prev,
        next: rest,
        region,
        owner,
        pool,
        state,
        ..Block::default()
    });
    let record = &mut blocks[rest];
    (record.addr, record.size, record.prev) = (addr + size, whole - size, taken);
    if let Some(prev) = blocks.get_mut(prev) {
        prev.next = taken;
    }
    index.changed(blocks, rest, whole, addr);
    taken
}

/// Joins a free block that is in no index with its neighbours in `index`, as said, or puts it there by itself. Returns the
/// block that it is then part of.
#[inline]
pub(super) fn join(
    index: &mut impl Index,
    blocks: &mut Slab,
    id: BlockId,
    with_prev: bool,
    with_next: bool,
) -> BlockId {
    let Block { addr, size, prev, next, .. } = blocks[id];
    match (with_prev, with_next) {
        (false, false) => {
            index.insert(blocks, id);
            id
        }
        (true, false) => {
            blocks.remove(id);
            extend_up(index, blocks, prev, size, next)
        }
        (false, true) => {
            blocks.remove(id);
            let into = &mut blocks[next];
            let (old_size, old_addr) = (into.size, into.addr);
            (into.addr, into.size, into.prev) = (addr, old_size + size, prev);
            if let Some(prev) = blocks.get_mut(prev) {
                prev.next = next;
            }
            index.changed(blocks, next, old_size, old_addr);
            next
        }
        (true, true) => {
            index.remove(blocks, next);
            let Block { size: next_size, next: beyond, .. } = blocks[next];
            blocks.remove(next);
            blocks.remove(id);
            extend_up(index, blocks, prev, size + next_size, beyond)
        }
    }
}

/// A free block grows upwards by `size` bytes; `next` is its neighbour then.
#[inline]
fn extend_up(index: &mut impl Index, blocks: &mut Slab, into: BlockId, size: u64, next: BlockId) -> BlockId {
    let block = &mut blocks[into];
    let (old_size, addr) = (block.size, block.addr);
    (block.size, block.next) = (old_size + size, next);
    if let Some(next) = blocks.get_mut(next) {
        next.prev = into;
    }
    index.changed(blocks, into, old_size, addr);
    into
}
