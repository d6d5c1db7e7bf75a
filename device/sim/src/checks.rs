//! Checks of how work uses memory: the bounds and lives of blocks, and bytes that nothing has
//! written.
//!
//! A caching allocator holds memory that no block uses at the moment, and blocks lie side by side
//! in one allocation of the driver. So a device cannot see that work goes beyond its block, or uses
//! a block that was dropped. The allocator reports to the device's [`Witness`] which ranges it
//! hands out in blocks, and the bounds and the life of each block.
//!
//! Work is checked in program order, when it is enqueued, as the race detector does. Each range
//! that work touches must lie in one live block, as it was requested: rounding is not part of it.
//! Work that was enqueued before a block was dropped may run later. Work in a graph is checked when
//! it is captured; a launch only needs those blocks that are not the graph's own (`PrivatePool`) to
//! be live still, and no live block in its memory that began after the capture. Blocks that began
//! in a later capture belong to other graphs, which may use the same memory. Memory that no
//! allocator manages, such as a plain allocation of the driver, is checked by the address space
//! alone, and counts as written.
//!
//! Bytes are *unwritten* from when their block was handed out until work writes them. Kernels and
//! downloads must not read such bytes; copies within the device carry them along. A kernel with a
//! host implementation is checked as it runs where it may leave unwritten bytes alone: in a range
//! that is written in part, such as rows with gaps, and in a range that it writes.
//!
//! Invariants: a live block is one range of `blocks`; no work enqueued so far wrote the bytes in
//! `unwritten`. The lock is a leaf, taken under that of the machine, so blocks may be dropped while
//! a kernel runs.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use aquifer_device::fork::Mutex;
use aquifer_device::internal::{Caller, caller, last_caller, moves_contents};
use aquifer_device::{AccessKind, DevicePtr, NewBlock, Witness};

use crate::address::QUARANTINED;
use crate::interval::IntervalMap;
use crate::violation::{BlockRef, DropRef, ViolationKind};
use crate::work::{Body, End};

/// The reports of allocators to a simulated device about their memory, and the bytes that were
/// never written.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    state: Mutex<ReportedMemory>,
}

/// The witness of a device with `checks=off`.
#[derive(Debug)]
pub(crate) struct Unchecked;

impl Witness for Unchecked {}

/// Where memory that was never written was allocated.
pub(crate) type Origin = Option<Caller>;

/// Unwritten bytes by address.
pub(crate) type Unwritten = Vec<(Range<u64>, Origin)>;

#[derive(Debug, Default)]
struct ReportedMemory {
    /// Blocks so far.
    count: u64,
    /// Whether a stream captures.
    captures: bool,
    /// Memory that allocators hand out in blocks.
    managed: IntervalMap<()>,
    /// Blocks in managed memory. One that was dropped stays until another takes its place.
    blocks: IntervalMap<Arc<Block>>,
    unwritten: IntervalMap<Origin>,
    /// Pinned memory with contents that were moved there and were never written, by host
    /// address.
    unwritten_host: IntervalMap<Origin>,
    /// Memory that the driver took back last, whose dropped blocks are known still.
    removed: VecDeque<Range<u64>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Block {
    number: u64,
    is_for_graphs: bool,
    /// It began while a stream captured.
    in_capture: bool,
    shown: BlockRef,
}

impl Block {
    fn is_live(&self) -> bool {
        self.shown.dropped.is_none()
    }

    fn end(&self) -> u64 {
        self.shown.ptr.0 + self.shown.bytes
    }
}

/// A range that work must not touch.
#[derive(Debug)]
pub(crate) struct Misuse {
    pub(crate) kind: ViolationKind,
    /// The first byte that must not be touched.
    pub(crate) at: u64,
    pub(crate) block: Option<BlockRef>,
    pub(crate) why: String,
}

/// A block that a graph uses, and that is not the graph's own: its address and number, and the end
/// of the part in use.
pub(crate) type Needed = (u64, u64, u64);

/// Unwritten bytes that work reads.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    /// Read in any case.
    pub(crate) all: Unwritten,
    /// Read if the kernel does, which shows when it runs.
    pub(crate) perhaps: Unwritten,
}

impl Witness for Checks {
    fn watches_blocks(&self) -> bool {
        true
    }

    fn managed(&self, range: Range<u64>) {
        self.state.lock().managed.insert(range, ());
    }

    fn begins(&self, block: NewBlock) {
        let mut state = self.state.lock();
        state.count += 1;
        let NewBlock { ptr, bytes, tag, is_for_graphs, at } = block;
        // The outermost place counts.
        let at = caller().or(at);
        let shown = BlockRef { ptr, bytes, tag, allocated: at, dropped: None };
        let block = Block { number: state.count, is_for_graphs, in_capture: state.captures, shown };
        state.unwritten.insert(ptr.range(bytes), at);
        state.blocks.insert(ptr.range(bytes), Arc::new(block));
    }

    fn resized(&self, ptr: DevicePtr, bytes: u64, at: Option<Caller>) {
        let mut state = self.state.lock();
        let Some(held) = state.blocks.at(ptr.0, u64::MAX).0.cloned() else { return };
        let (end, shown) = (held.end(), BlockRef { bytes, ..held.shown.clone() });
        let block = Block { shown, ..Block::clone(&held) };
        if block.end() < end {
            state.end(&held, at);
        } else {
            state.unwritten.insert(end..block.end(), at);
        }
        state.blocks.insert(ptr.range(bytes), Arc::new(block));
    }

    fn ends(&self, ptr: DevicePtr, at: Option<Caller>) {
        let mut state = self.state.lock();
        if let Some(held) = state.blocks.at(ptr.0, u64::MAX).0.cloned() {
            state.end(&held, at);
        }
    }

    fn lost(&self, range: Range<u64>) {
        self.state.lock().unwritten.insert(range, None);
    }
}

impl Checks {
    /// The driver took addresses back. Blocks that were dropped there are known for as long as
    /// nothing else gets the addresses.
    pub(crate) fn removed(&self, range: Range<u64>) {
        let mut state = self.state.lock();
        state.managed.remove(range.clone());
        state.unwritten.remove(range.clone());
        state.forget_blocks(range.clone(), Block::is_live);
        state.removed.push_back(range);
        if state.removed.len() > QUARANTINED
            && let Some(oldest) = state.removed.pop_front()
        {
            state.forget_blocks(oldest, |block| !block.is_live());
        }
    }

    /// Pinned memory was given back.
    pub(crate) fn host_removed(&self, range: Range<u64>) {
        self.state.lock().unwritten_host.remove(range);
    }

    /// The block at an address, if there is or was one.
    pub(crate) fn block_at(&self, at: u64) -> Option<BlockRef> {
        self.state.lock().blocks.at(at, u64::MAX).0.map(|held| held.shown.clone())
    }

    /// Checks that a range lies in one live block, where an allocator manages the memory. Returns
    /// the block if a graph needs it.
    pub(crate) fn check(&self, range: &Range<u64>) -> Result<Option<Needed>, Box<Misuse>> {
        let state = self.state.lock();
        if state.managed.at(range.start, u64::MAX).0.is_none() || moves_contents() {
            return Ok(None);
        }
        let Some(block) = state.blocks.at(range.start, u64::MAX).0 else {
            return Err(Box::new(state.in_no_block(range.start)));
        };
        let shown = Some(block.shown.clone());
        if !block.is_live() {
            let why = format!("the block was dropped{}", state.in_place_of(block, range.start));
            return Err(Box::new(Misuse { kind: ViolationKind::UseAfterFree, at: range.start, block: shown, why }));
        }
        let end = block.end();
        if range.end > end {
            let mut why = format!("it reaches {} bytes past the end of the block", range.end - end);
            if let Some(next) = state.blocks.at(end, u64::MAX).0.filter(|held| held.is_live()) {
                why.push_str(&format!(", into {}", next.shown));
            }
            return Err(Box::new(Misuse { kind: ViolationKind::OutOfBounds, at: end, block: shown, why }));
        }
        Ok((!block.is_for_graphs).then_some((block.shown.ptr.0, block.number, range.end)))
    }

    /// Checks that no live block but the one that holds `range` holds `alias`, a range of other
    /// addresses of the same physical memory.
    pub(crate) fn check_alias(&self, range: &Range<u64>, alias: &Range<u64>) -> Option<Box<Misuse>> {
        if moves_contents() {
            return None;
        }
        let state = self.state.lock();
        let own = state.blocks.at(range.start, u64::MAX).0;
        let is_other = |block: &Block| block.is_live() && own.is_none_or(|own| own.number != block.number);
        let other = state.blocks.overlapping(alias.clone()).map(|(_, block)| block).find(|block| is_other(block))?;
        let why = format!("the same physical memory is mapped in {}", other.shown);
        let block = own.map(|block| block.shown.clone());
        Some(Box::new(Misuse { kind: ViolationKind::Aliased, at: range.start, block, why }))
    }

    /// Checks that blocks which a graph needs are live.
    pub(crate) fn check_needed(&self, needed: impl IntoIterator<Item = Needed>) -> Option<Misuse> {
        let state = self.state.lock();
        needed.into_iter().find_map(|(at, number, end)| {
            let block = state.blocks.at(at, u64::MAX).0;
            let own = block.filter(|block| block.number == number);
            if own.is_some_and(|block| block.is_live() && block.end() >= end) {
                return None;
            }
            let why = match own {
                Some(block) if block.is_live() => {
                    format!("the graph uses {} bytes that the block gave up after the capture", end - block.end())
                }
                _ => "the graph uses a block that was dropped after the capture".to_owned(),
            };
            let block = own.map(|block| block.shown.clone());
            Some(Misuse { kind: ViolationKind::UseAfterFree, at, block, why })
        })
    }

    /// Notes whether a stream captures.
    pub(crate) fn note_captures(&self, captures: bool) {
        self.state.lock().captures = captures;
    }

    /// How many blocks began so far.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().count
    }

    /// Checks that a graph does not use the memory of blocks that began after its capture. `uses`
    /// are ranges with how many blocks had begun when their work was captured.
    pub(crate) fn check_given_out(&self, uses: impl Iterator<Item = (u64, Range<u64>)>) -> Option<Misuse> {
        let state = self.state.lock();
        let is_new = |block: &Block, begun| block.is_live() && !block.in_capture && block.number > begun;
        let mut met = uses.flat_map(|(begun, range)| state.blocks.overlapping(range).map(move |met| (begun, met)));
        let (_, (range, block)) = met.find(|(begun, (_, block))| is_new(block, *begun))?;
        let why = "the graph uses memory that was given out after the capture".to_owned();
        let block = Some(block.shown.clone());
        Some(Misuse { kind: ViolationKind::UseAfterFree, at: range.start, block, why })
    }

    /// Notes how work changes unwritten bytes, and returns those that it reads.
    pub(crate) fn run(&self, body: &Body) -> Reads {
        let mut state = self.state.lock();
        let mut reads = Reads::default();
        let moves = moves_contents();
        match body {
            Body::Memset { to, .. } => state.unwritten.remove(to.clone()),
            Body::FromTaken { to, .. } if !moves => state.unwritten.remove(to.clone()),
            Body::FromPeer { to, unwritten, .. } => state.carried(to, unwritten),
            Body::ToWaiting { from } if !moves => reads.all = state.unwritten_in(from),
            Body::Copy { parts, .. } => {
                // No part writes bytes that another one touches.
                for part in parts.iter() {
                    state.copied(&part.to, &part.from, moves, &mut reads);
                }
            }
            Body::Kernel(launch) => {
                for access in launch.accesses.iter().filter(|access| access.kind == AccessKind::Read) {
                    let found = state.unwritten_in(&access.ptr.range(access.bytes));
                    let sum: u64 = found.iter().map(|(piece, _)| piece.end - piece.start).sum();
                    let is_partial = sum < access.bytes && launch.host.is_some();
                    if is_partial { &mut reads.perhaps } else { &mut reads.all }.extend(found);
                }
                for access in launch.accesses.iter().filter(|access| access.kind == AccessKind::Write) {
                    let range = access.ptr.range(access.bytes);
                    // It may read there, too.
                    if launch.host.is_some() {
                        reads.perhaps.extend(state.unwritten_in(&range));
                    }
                    state.unwritten.remove(range);
                }
            }
            Body::FromTaken { .. }
            | Body::ToWaiting { .. }
            | Body::PoolAlloc { .. }
            | Body::PoolFree { .. }
            | Body::Fault { .. } => {}
        }
        reads
    }

    /// The unwritten bytes of a range, counted from its start.
    pub(crate) fn unwritten_from(&self, range: &Range<u64>) -> Unwritten {
        let mut found = self.state.lock().unwritten_in(range);
        for (piece, _) in &mut found {
            *piece = piece.start - range.start..piece.end - range.start;
        }
        found
    }
}

impl ReportedMemory {
    /// Forgets the blocks in a range that a condition is true of.
    fn forget_blocks(&mut self, range: Range<u64>, condition: impl Fn(&Block) -> bool) {
        let blocks = self.blocks.overlapping(range).filter(|(_, block)| condition(block));
        let ranges: Vec<Range<u64>> = blocks.map(|(range, _)| range).collect();
        ranges.into_iter().for_each(|range| self.blocks.remove(range));
    }

    /// Ends the life of a block.
    fn end(&mut self, held: &Arc<Block>, at: Option<Caller>) {
        if !held.is_live() {
            return;
        }
        let after = if at.is_none() { last_caller() } else { None };
        let thread = std::thread::current().name().map(Into::into);
        let shown = BlockRef { dropped: Some(DropRef { at, thread, after }), ..held.shown.clone() };
        let block = Block { shown, ..Block::clone(held) };
        self.blocks.insert(held.shown.ptr.0..held.end(), Arc::new(block));
    }

    /// Names the live block that begins in the memory of one that was dropped, and ends last before
    /// an address.
    fn in_place_of(&self, dropped: &Block, at: u64) -> String {
        let pieces = self.blocks.overlapping(dropped.shown.ptr.0..at);
        let live = pieces.filter(|(_, held)| held.is_live()).last();
        live.map_or_else(String::new, |(range, live)| {
            format!(", and the memory is in use again: {} bytes before this ends {}", at - range.end, live.shown)
        })
    }

    fn in_no_block(&self, at: u64) -> Misuse {
        let before = self.blocks.before(at).filter(|(range, _)| {
            // In the same piece of managed memory, with no other one between.
            self.managed.at(range.end - 1, at + 1).1 > at
        });
        let (block, why) = match before {
            Some((range, block)) => {
                let gap = at - range.end;
                (Some(block.shown.clone()), format!("it begins {gap} bytes past the end of the block, in no block"))
            }
            None => (None, "the memory is an allocator's, and in no block".to_owned()),
        };
        Misuse { kind: ViolationKind::OutOfBounds, at, block, why }
    }

    fn unwritten_in(&self, range: &Range<u64>) -> Unwritten {
        self.unwritten.overlapping(range.clone()).map(|(piece, &origin)| (piece, origin)).collect()
    }

    /// Bytes were copied to a range; those listed, counted from its start, were unwritten.
    fn carried(&mut self, to: &Range<u64>, unwritten: &[(Range<u64>, Origin)]) {
        self.unwritten.remove(to.clone());
        for (piece, origin) in unwritten {
            self.unwritten.insert(to.start + piece.start..to.start + piece.end, *origin);
        }
    }

    fn copied(&mut self, to: &End, from: &End, moves: bool, reads: &mut Reads) {
        let (target, source) = (to.range(), from.range());
        let found: Unwritten = match (from.is_host(), moves) {
            (false, _) => self.unwritten_in(&source),
            (true, true) => self.unwritten_host.overlapping(source.clone()).map(|(piece, &at)| (piece, at)).collect(),
            (true, false) => Vec::new(),
        };
        if to.is_host() && !moves {
            reads.all.extend(found);
            return;
        }
        let states = if to.is_host() { &mut self.unwritten_host } else { &mut self.unwritten };
        states.remove(target.clone());
        for (piece, origin) in found {
            let offset = piece.start - source.start;
            states.insert(target.start + offset..target.start + offset + (piece.end - piece.start), origin);
        }
    }
}
