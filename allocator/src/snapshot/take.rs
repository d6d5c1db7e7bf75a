//! Taking a snapshot: blocks are copied under the lock, at one moment, and put into form without
//! it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{Block, BlockState, Segment, Settings, Snapshot, TraceEntry};
use crate::allocator::Allocator;
use crate::core::Core;
use crate::core::heap::{self, Passed, State};
use crate::core::paged::granules::POOL;
use crate::history::{Action, Entry, History, Stamp, Subject};
use crate::size_class::PoolKind;
use crate::tags::Tag;
use crate::types::StreamId;

impl Allocator {
    /// Takes a snapshot of the memory and, if it is recorded, the history. The two agree: undoing
    /// the history's entries from the last to the first, starting from the segments, meets no
    /// contradiction.
    ///
    /// All of it is of one moment: other threads that allocate wait while the blocks are copied. As
    /// in PyTorch, an [`crate::Action::Snapshot`] is recorded, which later snapshots show.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let memory = Allocator::new(&device, "history:1000")?;
    /// let buffer = memory.alloc_bytes((1 << 20) + 512, device.default_stream())?;
    /// let snapshot = memory.snapshot();
    /// assert!(snapshot.segments[0].is_expandable);
    /// assert_eq!(snapshot.trace().len(), 2); // segment_map and alloc
    /// # drop(buffer);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    pub fn snapshot(&self) -> Snapshot {
        let state = self.state();
        let mut copied = Copied::default();
        let mut guard = state.lock();
        guard.heap().walk(|passed| copied.add(&guard, passed));
        copied.add_shared(&guard);
        copied.add_history(&guard.history);
        if guard.history.is_on() {
            let size = guard.in_use();
            guard.history.note(&[Action::Snapshot], Subject { size, ..Subject::default() });
        }
        drop(guard);
        let settings = Settings::new(self.config(), copied.capacity, copied.overwritten);
        let device = self.device().info().ordinal;
        let mut names = Names::default();
        let mut device_traces = vec![Vec::new(); device as usize];
        device_traces.push(copied.entries.iter().map(|entry| trace_entry(entry, &mut names)).collect());
        Snapshot {
            entries_overwritten: copied.overwritten,
            segments: copied.into_segments(device, &mut names),
            device_traces,
            allocator_settings: settings,
            external_annotations: &[],
            host_segments: &[],
            host_traces: &[],
        }
    }
}

impl Snapshot {
    /// Adds a request that was just refused, unless a refusal is in the history.
    pub(crate) fn with_refusal(mut self, refused: Subject) -> Snapshot {
        let trace = self.device_traces.last_mut().filter(|trace| trace.iter().all(|entry| entry.action != Action::Oom));
        let entry = Entry::new(Action::Oom, refused, Stamp::now());
        trace.into_iter().for_each(|trace| trace.push(trace_entry(&entry, &mut Names::default())));
        self
    }
}

/// Contiguous memory from the device: a segment, or a mapped range of a region whose memory comes
/// in granules.
struct Range {
    addr: u64,
    bytes: u64,
    stream: StreamId,
    kind: PoolKind,
    /// Id of the private pool; `(0, 0)` for the default ones.
    pool: (u64, u64),
    is_paged: bool,
}

/// The data that is copied under the lock.
#[derive(Default)]
struct Copied {
    ranges: Vec<Range>,
    blocks: Vec<heap::Block>,
    entries: Vec<Entry>,
    overwritten: u64,
    /// Number of history entries that are kept.
    capacity: usize,
    /// Tags of segments, by address.
    tags: BTreeMap<u64, Tag>,
}

impl Copied {
    /// Adds a block, if it has memory.
    fn add(&mut self, core: &Core, passed: &Passed) {
        let block = &passed.block;
        if !block.state.has_memory() {
            return;
        }
        self.blocks.push(*block);
        match self.ranges.last_mut().filter(|_| !passed.begins_range) {
            Some(range) => range.bytes += block.size,
            None => {
                let region = core.heap().region(block.region);
                let is_paged = region.is_paged();
                let pool = core.pools.owner_of(region.pool).map_or((0, 0), |private| private.id);
                let (stream, kind) = (region.stream, region.pool.kind());
                self.ranges.push(Range { addr: block.addr, bytes: block.size, stream, kind, pool, is_paged });
            }
        }
    }

    /// Adds memory outside of heaps.
    fn add_shared(&mut self, core: &Core) {
        self.tags.clone_from(core.segments());
        for (range, owned) in core.paged().dedicated() {
            let border = range.start + owned.size;
            let block = |range: std::ops::Range<u64>, state: State| heap::Block {
                addr: range.start,
                size: range.end - range.start,
                requested: owned.requested,
                tag: owned.tag.0,
                owner: owned.stream,
                pool: POOL,
                state,
                ..heap::Block::default()
            };
            let parts = [block(range.start..border, State::Live), block(border..range.end, State::Free)];
            self.blocks.extend(parts.into_iter().filter(|block| block.size > 0));
            let (addr, bytes) = (range.start, range.end - range.start);
            let (stream, kind, pool) = (owned.stream, PoolKind::Large, (0, 0));
            self.ranges.push(Range { addr, bytes, stream, kind, pool, is_paged: true });
        }
    }

    fn add_history(&mut self, history: &History) {
        self.entries = history.entries().collect();
        self.overwritten = history.overwritten();
        self.capacity = history.capacity();
    }

    /// The segments by address, with their blocks by address.
    fn into_segments(mut self, device: u32, names: &mut Names) -> Vec<Segment> {
        self.ranges.sort_unstable_by_key(|range| range.addr);
        self.blocks.sort_unstable_by_key(|block| block.addr);
        let mut blocks = self.blocks.iter().peekable();
        let mut segments = Vec::with_capacity(self.ranges.len());
        for range in &self.ranges {
            let end = range.addr + range.bytes;
            let inside = std::iter::from_fn(|| blocks.next_if(|block| block.addr < end));
            let blocks: Vec<Block> = inside.map(|block| snapshot_block(block, names)).collect();
            let tag = self.tags.get(&range.addr).copied().unwrap_or_default();
            segments.push(segment(device, range, names.of(tag), blocks));
        }
        segments
    }
}

fn segment(device: u32, range: &Range, user_metadata: Option<Arc<str>>, blocks: Vec<Block>) -> Segment {
    let active = || blocks.iter().filter(|block| block.state.is_active());
    let live = blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated);
    Segment {
        device,
        address: range.addr,
        total_size: range.bytes,
        allocated_size: live.map(|block| block.size).sum(),
        active_size: active().map(|block| block.size).sum(),
        requested_size: active().map(|block| block.requested_size).sum(),
        stream: range.stream.0,
        segment_type: range.kind,
        segment_pool_id: range.pool,
        is_expandable: range.is_paged,
        frames: &[],
        user_metadata,
        blocks,
    }
}

fn snapshot_block(block: &heap::Block, names: &mut Names) -> Block {
    let state = match block.state {
        State::Live => BlockState::ActiveAllocated,
        State::Waiting => BlockState::ActivePendingFree,
        _ => BlockState::Inactive,
    };
    let (requested_size, tag) = if state.is_active() { (block.requested, Tag(block.tag)) } else { (0, Tag::default()) };
    Block { address: block.addr, size: block.size, requested_size, state, frames: &[], user_metadata: names.of(tag) }
}

fn trace_entry(entry: &Entry, names: &mut Names) -> TraceEntry {
    let Entry { addr, size, stamp, stream, tag, pool, action } = *entry;
    let is_oom = action == Action::Oom;
    TraceEntry {
        action,
        addr: (!is_oom).then_some(addr),
        device_free: is_oom.then_some(addr),
        size,
        stream: stream.0,
        time_us: stamp.time_us(),
        compile_context: "N/A",
        user_metadata: names.of(tag).unwrap_or_else(|| names.none.clone()),
        pool_id: (0, u64::from(pool)),
    }
}

/// Names of tags, each looked up once.
struct Names {
    known: HashMap<u32, Option<Arc<str>>>,
    none: Arc<str>,
}

impl Default for Names {
    fn default() -> Names {
        Names { known: HashMap::new(), none: "".into() }
    }
}

impl Names {
    fn of(&mut self, tag: Tag) -> Option<Arc<str>> {
        self.known.entry(tag.0).or_insert_with(|| tag.name()).clone()
    }
}
