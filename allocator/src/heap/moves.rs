//! The two moves of a heap: an allocation cuts a block, and a free joins neighbours.
//!
//! They change the records of blocks and one index. They are written once for both kinds of index
//! and compiled for each, so that the kind is looked up once per operation. Running totals and
//! facts about regions are kept by [`super::Heap`]; what it needs for them is returned rather than
//! read again.

use super::block::{Block, BlockId, Records, State};
use super::index::Index;
use crate::size_class::{PoolKind, SizeClasses};

/// The piece that is taken from a free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    /// The stream that it is for.
    pub(super) owner: u32,
    /// Its length in bytes, and the bytes that were requested.
    pub(super) size: u64,
    pub(super) requested: u64,
}

/// The rules by which free blocks of a pool are cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) classes: &'a SizeClasses,
    pub(super) kind: PoolKind,
    pub(super) no_split: bool,
}

impl Rules<'_> {
    /// True if a block of `whole` bytes that serves a request of `size` bytes is cut.
    #[inline]
    fn cuts<I: Index>(self, whole: u64, size: u64) -> bool {
        !self.no_split && if I::SEGMENTS { self.classes.should_split(self.kind, whole, size) } else { whole > size }
    }
}

/// The result of taking a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) id: BlockId,
    /// Size of the taken block, and of the free block that it was taken from.
    pub(super) size: u64,
    pub(super) whole: u64,
    /// The neighbours of that free block.
    pub(super) prev: BlockId,
    pub(super) next: BlockId,
    /// The rest of that free block, if it was cut.
    pub(super) rest: Option<BlockId>,
    pub(super) region: u32,
}

/// The result of joining: the free block that a freed block became or became part of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joined {
    pub(super) id: BlockId,
    /// Bytes of the freed block, and of the free block now.
    pub(super) given: u64,
    pub(super) whole: u64,
    /// True if it was joined with the neighbour below; and the neighbour above, if it was joined
    /// with that. The upper one's record is gone if it was joined with both, and with
    /// [`Index::FIRST_STAYS`] in any case.
    pub(super) with_prev: bool,
    pub(super) with_next: Option<BlockId>,
    pub(super) prev: BlockId,
    pub(super) next: BlockId,
    pub(super) region: u32,
}

/// Takes a piece from the block that the index chooses, if the size rules allow.
#[inline(always)]
pub(super) fn take_best<I: Index>(
    index: &mut I,
    blocks: &mut Records<'_>,
    rules: Rules<'_>,
    piece: Piece,
) -> Option<Taken> {
    let (mut id, mut place) = index.choose(blocks, piece.size)?;
    let fits = |(id, place)| rules.classes.fits(I::size(blocks, id, place), piece.size);
    if I::SEGMENTS && !fits((id, place)) {
        // As with PyTorch, the smallest that is large enough decides.
        (id, place) = index.best_fit(blocks, piece.size).filter(|&best| fits(best))?;
    }
    Some(take(index, blocks, rules, id, place, piece))
}

/// Takes a piece from a given free block, whole or by cutting it off.
#[inline(always)]
pub(super) fn take<I: Index>(
    index: &mut I,
    blocks: &mut Records<'_>,
    rules: Rules<'_>,
    id: BlockId,
    place: I::Place,
    piece: Piece,
) -> Taken {
    let whole = I::size(blocks, id, place);
    if rules.cuts::<I>(whole, piece.size) {
        return cut(index, blocks, id, place, piece);
    }
    index.remove(blocks, id, place);
    let block = &mut blocks[id];
    (block.state, block.owner, block.requested) = (State::Live, piece.owner, piece.requested);
    Taken { id, size: whole, whole, prev: block.prev, next: block.next, rest: None, region: block.region }
}

/// Cuts a piece off the low end of a free block. The rest stays free and keeps its owner.
#[inline(always)]
fn cut<I: Index>(index: &mut I, blocks: &mut Records<'_>, id: BlockId, place: I::Place, piece: Piece) -> Taken {
    if I::FIRST_STAYS { cut_above(index, blocks, id, place, piece) } else { cut_below(index, blocks, id, place, piece) }
}

/// As [`cut`]; the piece keeps the block's number.
#[inline(always)]
fn cut_above<I: Index>(index: &mut I, blocks: &mut Records<'_>, id: BlockId, place: I::Place, piece: Piece) -> Taken {
    let Piece { owner, size, requested } = piece;
    let Block { addr, size: whole, after, prev, next, region, owner: from, pool, .. } = blocks[id];
    let (state, rest_addr, rest_size) = (State::Free, addr + size, whole - size);
    let rest = blocks.insert(Block {
        addr: rest_addr,
        size: rest_size,
        after,
        prev: id,
        next,
        region,
        owner: from,
        pool,
        state,
        ..Block::default()
    });
    let record = &mut blocks[id];
    (record.size, record.requested, record.next) = (size, requested, rest);
    (record.state, record.owner) = (State::Live, owner);
    blocks[next].prev = rest;
    index.changed(blocks, rest, place);
    Taken { id, size, whole, prev, next, rest: Some(rest), region }
}

/// As [`cut`]; the rest keeps the block's number.
#[inline(always)]
fn cut_below<I: Index>(index: &mut I, blocks: &mut Records<'_>, rest: BlockId, place: I::Place, piece: Piece) -> Taken {
    let Piece { owner, size, requested } = piece;
    let Block { addr, size: whole, prev, next, region, pool, .. } = blocks[rest];
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
    index.changed(blocks, rest, place);
    Taken { id: taken, size, whole, prev, next, rest: Some(rest), region }
}

/// Makes a block free that is in no index, joins it with those neighbours that are free and have
/// the same owner, and puts the result into `index`. The latest tick of its parts counts for all of
/// it, because blocks are not freed in the order of their ticks: some were held or deferred
/// meanwhile.
#[inline(always)]
pub(super) fn join<I: Index>(index: &mut I, blocks: &mut Records<'_>, id: BlockId, owner: u32, after: u64) -> Joined {
    let Block { addr, size: given, prev, next, region, .. } = blocks[id];
    let joins = |id: BlockId| index.holds(blocks, id, owner).then(|| &blocks[id]);
    let below = joins(prev).map(|block| (block.size, block.after));
    let above = joins(next).map(|block| (block.size, block.next, block.after));
    let (with_prev, with_next) = (below.is_some(), above.map(|_| next));
    let joined = Joined { id, given, whole: given, with_prev, with_next, prev, next, region };
    match (below, above) {
        (None, None) => {
            let block = &mut blocks[id];
            (block.state, block.owner, block.used_elsewhere, block.after) = (State::Free, owner, false, after);
            index.insert(blocks, id);
            joined
        }
        (None, Some((above, beyond, later))) if I::FIRST_STAYS => {
            let place = I::place(next, above);
            blocks.remove(next);
            let block = &mut blocks[id];
            (block.state, block.owner, block.used_elsewhere, block.after) =
                (State::Free, owner, false, after.max(later));
            (block.size, block.next) = (given + above, beyond);
            blocks[beyond].prev = id;
            index.changed(blocks, id, place);
            Joined { whole: given + above, next: beyond, ..joined }
        }
        (None, Some((above, beyond, later))) => {
            blocks.remove(id);
            let into = &mut blocks[next];
            let place = I::place(next, above);
            (into.addr, into.size, into.prev, into.after) = (addr, above + given, prev, after.max(later));
            blocks[prev].next = next;
            index.changed(blocks, next, place);
            Joined { id: next, whole: above + given, next: beyond, ..joined }
        }
        (Some((below, earlier)), above) => {
            let after = after.max(earlier);
            let (whole, beyond, after) = match above {
                Some((above, beyond, later)) => {
                    let place = I::place(next, above);
                    index.remove(blocks, next, place);
                    blocks.remove(next);
                    (below + given + above, beyond, after.max(later))
                }
                None => (below + given, next, after),
            };
            blocks.remove(id);
            let into = &mut blocks[prev];
            let place = I::place(prev, below);
            (into.size, into.next, into.after) = (whole, beyond, after);
            let before = into.prev;
            blocks[beyond].prev = prev;
            index.changed(blocks, prev, place);
            Joined { id: prev, whole, prev: before, next: beyond, ..joined }
        }
    }
}
