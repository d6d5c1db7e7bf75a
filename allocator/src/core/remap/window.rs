//! Windows: the places where contiguous memory costs the fewest granules.
//!
//! In a stream's regions, adjacent free blocks of the stream and holes form a *run*; each of them
//! is a *piece*. A *window* is a stretch of a run as long as the request, and its cost is the
//! number of granules that its holes lack, which get memory in whole slots. The best windows begin
//! where a piece begins or end where one ends, so only those are looked at, and runs with large free
//! blocks before others. Among equally cheap ones the lowest address wins, which keeps the high ends
//! of regions empty.

use std::ops::Range;

use crate::core::heap::{Block, Heap, Owner, State};
use crate::core::paged::layout::{Slots, parts};
use crate::types::{BlockId, Recipient};

/// A window: a stretch of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Number of granules that its holes lack.
    pub(crate) lacks: u64,
    /// The pieces that it touches, by address.
    pub(crate) pieces: Vec<BlockId>,
    /// Its holes get memory within these addresses.
    pub(crate) fill: Range<u64>,
    /// Room for memory taken ahead of need: the end of the hole that the window's end lies in or
    /// beside, if there is one.
    pub(crate) room: Option<u64>,
}

impl Window {
    /// The addresses of the granules that it touches, and of those that get memory.
    pub(crate) fn granules(&self, granule: u64) -> Range<u64> {
        let (start, end) = (self.start / granule * granule, self.end.next_multiple_of(granule));
        start.min(self.fill.start)..end.max(self.fill.end)
    }

    /// Lengths of the parts of its holes that get memory, in granules.
    pub(crate) fn holes(&self, heap: &Heap, granule: u64) -> Vec<u64> {
        let holes = self.pieces.iter().map(|&id| heap.block(id)).filter(|block| block.state == State::Hole);
        let filled = |hole: &Block| hole.addr.max(self.fill.start)..(hole.addr + hole.size).min(self.fill.end);
        holes.flat_map(|hole| parts(&filled(hole), granule)).collect()
    }
}

/// A piece of a run: a free block or a hole.
#[derive(Clone, Copy)]
struct Piece {
    id: BlockId,
    start: u64,
    end: u64,
    is_hole: bool,
    /// Number of granules of holes in the run before this piece.
    holes_before: u64,
}

/// A run: pieces that lie side by side.
struct Run {
    slots: Slots,
    pieces: Vec<Piece>,
}

/// Windows are looked for first beside free blocks of at least the request's size divided by this.
/// A window found there is good enough if as much of it need not be filled.
const LARGE_SHARE: u64 = 8;

/// The cheapest window of `size` bytes in a pool's regions of a stream, or one that is nearly as
/// cheap.
///
/// There may be thousands of holes. Most of them lie alone between live blocks, but finding that
/// out takes a look at their neighbours' records. So windows beside large free blocks are looked
/// for first. A cheaper window without large blocks would have to hold several small ones that
/// holes separate. Figures in docs/notes/2026-11-26-mapped-memory.md.
pub(crate) fn cheapest(heap: &Heap, of: Recipient, size: u64, slots: Slots) -> Option<Window> {
    let large = size.div_ceil(LARGE_SHARE);
    let good = ((size - large) / slots.granule).max(1).next_multiple_of(slots.bytes / slots.granule);
    let near = runs_of(heap, of, beside_large_blocks(heap, of, large));
    let near = cheapest_in(heap, of, near, size, slots);
    near.filter(|window| window.lacks <= good).or_else(|| cheapest_in(heap, of, all_runs(heap, of), size, slots))
}

/// The holes beside free blocks of at least `least` bytes, by address. Empty if there are more such
/// blocks than holes.
fn beside_large_blocks(heap: &Heap, of: Recipient, least: u64) -> Vec<BlockId> {
    let (mut found, mut looked_at) = (Vec::new(), 0);
    let Some(free) = heap.index(of.pool, Owner::in_own_regions(of.stream)) else { return found };
    free.iter_from(least).take(heap.holes().len()).for_each(|key| {
        let block = heap.block(key.block);
        found.extend([block.prev, block.next].into_iter().find(|&id| heap.holes().contains(id)));
        looked_at += 1;
    });
    if looked_at >= heap.holes().len() {
        return Vec::new();
    }
    found.sort_unstable_by_key(|&id| heap.block(id).addr);
    found
}

/// The runs that some holes belong to. The holes are given by ascending address.
fn runs_of(heap: &Heap, of: Recipient, holes: Vec<BlockId>) -> impl Iterator<Item = Extent> {
    let mut seen_to = 0;
    holes.into_iter().filter_map(move |hole| {
        let extent = (heap.block(hole).addr >= seen_to).then(|| Extent::around(heap, of, hole))?;
        seen_to = extent.end;
        Some(extent)
    })
}

/// All runs with a hole in a pool, by ascending address. Reads no record of a block beside a run: a
/// search takes most of its time waiting for records.
fn all_runs(heap: &Heap, of: Recipient) -> impl Iterator<Item = Extent> {
    let mut holes = heap.holes().of(of.pool, of.stream).peekable();
    let free_block = move |id: BlockId| of.is_free(heap, id).then(|| heap.block(id));
    std::iter::from_fn(move || {
        let first = holes.next()?;
        let mut hole = heap.block(first);
        // Below that is no further hole, or the run before would have gone on to here.
        let (first, start, mut free) =
            free_block(hole.prev).map_or((first, hole.addr, 0), |below| (hole.prev, below.addr, below.size));
        loop {
            let Some(above) = free_block(hole.next) else {
                return Some(Extent { first, start, end: hole.addr + hole.size, free });
            };
            free += above.size;
            let Some(next) = holes.next_if_eq(&above.next) else {
                return Some(Extent { first, start, end: above.addr + above.size, free });
            };
            hole = heap.block(next);
        }
    })
}

/// The cheapest window in runs that are given by ascending address.
fn cheapest_in(
    heap: &Heap,
    of: Recipient,
    runs: impl Iterator<Item = Extent>,
    size: u64,
    slots: Slots,
) -> Option<Window> {
    let mut best: Option<(u64, u64)> = None;
    let mut best_run = None;
    for extent in runs {
        // Most runs are too short, or would lack too much even with all their free memory in the
        // window.
        let lacks_at_least = || size.saturating_sub(extent.free).div_ceil(slots.granule);
        if extent.end - extent.start < size || best.is_some_and(|best| (lacks_at_least(), extent.start) >= best) {
            continue;
        }
        let run = Run::of(heap, of, &extent, slots);
        if let Some(found) = run.cheapest(size)
            && best.is_none_or(|best| found < best)
        {
            best = Some(found);
            best_run = Some(run);
        }
    }
    let ((lacks, start), run) = (best?, best_run?);
    Some(run.window(start, start + size, lacks))
}

/// Position and free memory of a run.
#[derive(Debug, PartialEq, Eq)]
struct Extent {
    first: BlockId,
    start: u64,
    end: u64,
    /// Bytes of its free blocks.
    free: u64,
}

impl Recipient {
    /// True if a block in such a region is free and the stream's.
    fn is_free(self, heap: &Heap, id: BlockId) -> bool {
        heap.is_free(id) && heap.block(id).owner == self.stream
    }

    /// True if a block in such a region is a piece of a run. Mostly its record is not read.
    fn is_piece(self, heap: &Heap, id: BlockId) -> bool {
        heap.holes().contains(id) || self.is_free(heap, id)
    }
}

impl Extent {
    fn around(heap: &Heap, of: Recipient, id: BlockId) -> Extent {
        let piece = |id: BlockId| of.is_piece(heap, id).then(|| heap.block(id));
        let hole = heap.block(id);
        let (mut first, mut start, mut below) = (id, hole.addr, hole.prev);
        let (mut end, mut above, mut free) = (hole.addr + hole.size, hole.next, 0);
        let free_bytes = |block: &Block| if block.state == State::Free { block.size } else { 0 };
        while let Some(block) = piece(below) {
            (first, start, below) = (below, block.addr, block.prev);
            free += free_bytes(block);
        }
        while let Some(block) = piece(above) {
            (end, above) = (end + block.size, block.next);
            free += free_bytes(block);
        }
        Extent { first, start, end, free }
    }
}

impl Run {
    fn of(heap: &Heap, of: Recipient, extent: &Extent, slots: Slots) -> Run {
        let next = |&id: &BlockId| Some(heap.block(id).next).filter(|&id| of.is_piece(heap, id));
        let mut holes_before = 0;
        let pieces = std::iter::successors(Some(extent.first), next).map(|id| {
            let block = heap.block(id);
            let (start, end, is_hole) = (block.addr, block.addr + block.size, block.state == State::Hole);
            let piece = Piece { id, start, end, is_hole, holes_before };
            holes_before += if is_hole { block.size / slots.granule } else { 0 };
            piece
        });
        Run { slots, pieces: pieces.collect() }
    }

    fn start(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| piece.start)
    }

    fn end(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.end)
    }

    /// The piece that holds the byte at `addr`.
    fn piece_at(&self, addr: u64) -> Option<&Piece> {
        self.pieces.get(self.pieces.partition_point(|piece| piece.end <= addr))
    }

    /// Where memory begins in the piece that `addr` lies in, so that the slot there is whole as far
    /// as the piece goes.
    fn filled_from(&self, addr: u64) -> u64 {
        let hole = self.piece_at(addr).filter(|piece| piece.is_hole);
        hole.map_or(addr, |hole| self.slots.around(addr..addr).start.max(hole.start))
    }

    /// The same for where it ends, below `addr`.
    fn filled_to(&self, addr: u64) -> u64 {
        let hole = self.piece_at(addr.saturating_sub(1)).filter(|piece| piece.is_hole);
        hole.map_or(addr, |hole| self.slots.around(addr..addr).end.min(hole.end))
    }

    /// Number of granules of holes, or of their parts, that lie below an address.
    fn holes_below(&self, addr: u64) -> u64 {
        let Some(piece) = self.piece_at(addr.saturating_sub(1)) else { return 0 };
        piece.holes_before + if piece.is_hole { (addr - piece.start) / self.slots.granule } else { 0 }
    }

    /// The number of granules that the cheapest window of `size` bytes lacks, and its first
    /// address.
    fn cheapest(&self, size: u64) -> Option<(u64, u64)> {
        let (start, end) = (self.start(), self.end());
        let last = end.checked_sub(size).filter(|&last| last >= start)?;
        let edges = self.pieces.iter().flat_map(|piece| {
            // A window in a long hole starts at its low end: growth goes upwards.
            let ends_here = (!piece.is_hole || piece.end != end).then(|| piece.end.checked_sub(size)).flatten();
            [Some(piece.start), ends_here].into_iter().flatten()
        });
        let inside = edges.filter(|&at| start <= at && at <= last);
        let lacks = |at| self.holes_below(self.filled_to(at + size)) - self.holes_below(self.filled_from(at));
        inside.map(|at| (lacks(at), at)).min()
    }

    fn window(&self, start: u64, end: u64, lacks: u64) -> Window {
        let touched = self.pieces.iter().filter(|piece| piece.start < end && start < piece.end);
        let pieces = touched.map(|piece| piece.id).collect();
        let fill = self.filled_from(start)..self.filled_to(end).max(end.next_multiple_of(self.slots.granule));
        let beyond = self.pieces.iter().find(|piece| piece.is_hole && piece.start <= fill.end && fill.end < piece.end);
        // A window that ends in a free block has its room there.
        let inside_hole = self.piece_at(end - 1).is_some_and(|piece| piece.is_hole);
        let room = beyond.filter(|piece| inside_hole || piece.start == end).map(|piece| piece.end);
        Window { start, end, lacks, pieces, fill, room }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::{PoolId, StreamId, ticks};

    const G: u64 = 4096;
    const SLOTS: Slots = Slots { granule: G, bytes: G };
    const BASE: u64 = 1 << 20;
    const OF: Recipient = Recipient { pool: PoolId::SMALL, stream: StreamId(0) };

    /// A region of a map, a letter for each granule: `.` a hole, `f` free, `l` live.
    fn heap(map: &str) -> Heap {
        let mut heap = Heap::new(true);
        heap.add_reservation(BASE, map.len() as u64 * G, StreamId(0), PoolId::SMALL, G);
        let mut taken = Vec::new();
        for (at, letter) in map.bytes().enumerate().filter(|(_, letter)| *letter != b'.') {
            let addr = BASE + at as u64 * G;
            let hole = heap.hole_blocks().find(|(_, hole)| hole.addr <= addr && addr < hole.addr + hole.size);
            let held = heap.hold(hole.unwrap().0, addr, addr + G).id;
            let free = heap.unhold_as_free(held);
            let id = heap.take(free, StreamId(0), G, G);
            taken.push((id, letter));
        }
        for (id, _) in taken.into_iter().filter(|(_, letter)| *letter == b'f') {
            heap.give(id, StreamId(0), ticks(1));
        }
        heap
    }

    fn found(map: &str, size: u64) -> Option<(u64, u64, bool)> {
        let window = cheapest(&heap(map), OF, size, SLOTS)?;
        Some(((window.start - BASE) / G, window.lacks, window.room.is_some()))
    }

    #[test]
    fn the_cheapest_window_lacks_the_fewest_granules() {
        assert_eq!(found("....", 2 * G), Some((0, 2, true)));
        assert_eq!(found("f...", 2 * G), Some((0, 1, true)));
        assert_eq!(found("l.f.", 2 * G), Some((1, 1, true)), "the lower of equals");
        assert_eq!(found("lf.fl....", 3 * G), Some((1, 1, false)));
        assert_eq!(found("l.ffl...", 4 * G), None);
        assert_eq!(found("lfl", 2 * G), None);
        assert_eq!(found("lf.ff.l.........", 4 * G), Some((1, 1, true)));
        assert_eq!(found("lf..fffl", 4 * G), Some((3, 1, false)), "it may begin within a hole");
    }

    #[test]
    fn holes_are_filled_by_whole_slots() {
        let filled = |map: &str, size: u64| {
            let heap = heap(map);
            let window = cheapest(&heap, OF, size, Slots { bytes: 4 * G, ..SLOTS }).unwrap();
            let [start, from, to] = [window.start, window.fill.start, window.fill.end].map(|at| (at - BASE) / G);
            assert!(window.holes(&heap, G).iter().sum::<u64>() == window.lacks);
            (start, window.lacks, from..to)
        };
        assert_eq!(filled("........", 3 * G), (0, 4, 0..4));
        assert_eq!(filled("ff......", 3 * G), (0, 2, 0..4));
        assert_eq!(filled("l.......", 2 * G), (1, 3, 1..4), "as far as the hole goes");
        assert_eq!(filled("....f...", 2 * G), (4, 3, 4..8), "upwards, as downwards are more");
        assert_eq!(filled("l..ff...", 4 * G), (1, 2, 1..5));
    }

    /// What a window lacks that starts so many bytes into the region; `None` if something in it is
    /// live.
    fn lacks(map: &str, size: u64, start: u64) -> Option<u64> {
        let touched = usize::try_from(start / G).unwrap()..usize::try_from((start + size).div_ceil(G)).unwrap();
        let letters = map.as_bytes().get(touched)?;
        (!letters.contains(&b'l')).then(|| letters.iter().filter(|&&letter| letter == b'.').count() as u64)
    }

    /// The least that any window lacks which starts or ends at a border between granules, of those
    /// that lack anything.
    fn least(map: &str, size: u64) -> Option<u64> {
        let borders = (0..=map.len() as u64).map(|border| border * G);
        let starts = borders.flat_map(|border| [Some(border), border.checked_sub(size)]).flatten();
        starts.filter_map(|start| lacks(map, size, start)).filter(|&lacks| lacks > 0).min()
    }

    /// Whether a free block is large enough. Only runs with a hole are looked at: what fits into a
    /// free block needs no window.
    fn fits_already(map: &str, size: u64) -> bool {
        map.split(['.', 'l']).any(|free| free.len() as u64 * G >= size)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        #[test]
        fn no_window_lacks_less(map in "[.fl]{1,24}", granules in 1..8u64, bytes in 0..3u64) {
            let size = granules * G - bytes * 512;
            let least = least(&map, size);
            let window = cheapest(&heap(&map), OF, size, SLOTS);
            let found = window.as_ref().map(|window| window.lacks);
            prop_assert_eq!(found, window.as_ref().and_then(|window| lacks(&map, size, window.start - BASE)));
            prop_assert!(fits_already(&map, size) || found == least, "{:?}", window);
        }

        #[test]
        fn a_window_that_mostly_lacks_is_the_cheapest(
            // Many small free blocks, and a large one beside which more is lacking.
            map in prop_oneof!["([.]{1,9}|f{1,9}|l){1,40}", "(f{1,3}[.]){1,20}lf{4,9}[.]{60}l(f{1,3}[.]){1,20}"],
            granules in 1..60u64,
        ) {
            let size = granules * G;
            let (least, window) = (least(&map, size), cheapest(&heap(&map), OF, size, SLOTS));
            let found = window.as_ref().map(|window| window.lacks);
            let good = found.is_some_and(|lacks| lacks <= (granules - granules.div_ceil(8)).max(1)) && found >= least;
            prop_assert!(fits_already(&map, size) || good || found == least, "{:?}, {:?}", least, window);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        #[test]
        fn runs_are_found_in_order_as_from_each_hole(map in "[.fl]{1,40}") {
            let heap = heap(&map);
            prop_assert!(all_runs(&heap, OF).eq(runs_of(&heap, OF, heap.holes().of(PoolId::SMALL, StreamId(0)).collect())));
        }
    }

    #[test]
    fn a_window_may_begin_and_end_within_granules() {
        assert_eq!(found("f...", G + 512), Some((0, 1, true)));
        assert_eq!(found("l.f", G + 512), Some((1, 1, false)));
    }
}
