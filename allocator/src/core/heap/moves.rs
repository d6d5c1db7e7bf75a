//! The two moves of a heap: an allocation cuts a block, and a free joins neighbours.
//!
//! They change the records of blocks, the set of free blocks and one index. Running totals and
//! facts about regions are kept by [`super::Heap`]; what it needs for them is returned rather than
//! read again.

use super::block::{Block, Members, Records, State};
use super::index::Bins;
use crate::types::{After, BlockId, StreamId};

/// The piece that is taken from a free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The stream that it is for.
    pub(super) owner: StreamId,
    /// Its length in bytes, and the bytes that were requested.
    pub(super) size: u64,
    pub(super) requested: u64,
}

/// The result of taking a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) id: BlockId,
    /// Size of the taken block.
    pub(super) size: u64,
    /// The neighbour below.
    pub(super) prev: BlockId,
    pub(super) region: u32,
}

/// The result of joining: the free block that a freed block became or became part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joined {
    pub(super) id: BlockId,
    /// Bytes of the freed block.
    pub(super) given: u64,
    /// The neighbour below the free block.
    pub(super) prev: BlockId,
    pub(super) owner: StreamId,
    pub(super) region: u32,
}

/// Takes a piece from the block that the index chooses.
#[inline(always)]
pub(super) fn take_best(
    index: &mut Bins,
    blocks: &mut Records<'_>,
    free: &mut Members,
    no_split: bool,
    piece: Piece,
) -> Option<Taken> {
    let id = index.choose(blocks, piece.size)?;
    Some(take(index, blocks, free, no_split, id, piece))
}

/// Takes a piece from a given free block: cut off, unless the block is handed out whole.
#[inline(always)]
pub(super) fn take(
    index: &mut Bins,
    blocks: &mut Records<'_>,
    free: &mut Members,
    no_split: bool,
    id: BlockId,
    piece: Piece,
) -> Taken {
    let Block { size, prev, region, .. } = blocks[id];
    if size > piece.size && !no_split {
        return cut(index, blocks, id, piece);
    }
    index.remove(blocks, id, size);
    free.remove(id);
    let block = &mut blocks[id];
    (block.state, block.owner, block.requested) = (State::Live, piece.owner, piece.requested);
    Taken { id, size, prev, region }
}

/// Cuts a piece off the low end of a free block. The rest stays free and keeps its owner and its
/// number, so that the index mostly need not be touched.
#[inline(always)]
fn cut(index: &mut Bins, blocks: &mut Records<'_>, rest: BlockId, piece: Piece) -> Taken {
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
    blocks[prev].next = taken;
    index.changed(blocks, rest, whole);
    Taken { id: taken, size, prev, region }
}

/// Makes a block free that is in no index, joins it with those neighbours that are free and have
/// the same owner, and puts the result into `index`. The latest tick of its parts counts for all of
/// it, because blocks are not freed in the order of their ticks: some were held or deferred
/// meanwhile.
#[inline(always)]
pub(super) fn join(
    index: &mut Bins,
    blocks: &mut Records<'_>,
    free: &mut Members,
    id: BlockId,
    owner: StreamId,
    after: After,
) -> Joined {
    let Block { addr, size: given, prev, next, region, .. } = blocks[id];
    let joins = |id: BlockId| (free.contains(id) && blocks[id].owner == owner).then(|| &blocks[id]);
    let below = joins(prev).map(|block| (block.size, block.after));
    let above = joins(next).map(|block| (block.size, block.next, block.after));
    let joined = Joined { id, given, prev, owner, region };
    match (below, above) {
        (None, None) => {
            let block = &mut blocks[id];
            (block.state, block.owner, block.used_elsewhere, block.after) = (State::Free, owner, false, after);
            free.insert(id);
            index.insert(blocks, id);
            joined
        }
        (None, Some((above, _, later))) => {
            blocks.remove(id);
            let into = &mut blocks[next];
            (into.addr, into.size, into.prev, into.after) = (addr, above + given, prev, after.max(later));
            blocks[prev].next = next;
            index.changed(blocks, next, above);
            Joined { id: next, ..joined }
        }
        (Some((below, earlier)), above) => {
            let after = after.max(earlier);
            let (whole, beyond, after) = match above {
                Some((above, beyond, later)) => {
                    index.remove(blocks, next, above);
                    free.remove(next);
                    blocks.remove(next);
                    (below + given + above, beyond, after.max(later))
                }
                None => (below + given, next, after),
            };
            blocks.remove(id);
            let into = &mut blocks[prev];
            (into.size, into.next, into.after) = (whole, beyond, after);
            let before = into.prev;
            blocks[beyond].prev = prev;
            index.changed(blocks, prev, below);
            Joined { id: prev, prev: before, ..joined }
        }
    }
}
