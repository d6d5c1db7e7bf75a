//! The steps of falling asleep and of waking up between driver calls: what is chosen, and the
//! account of what was done.
//!
//! Memory sleeps by frames: a frame goes if a live block that is to sleep lies in it, and none that
//! stays awake. Memory wakes up by granules: those in which a block that is to wake up lies. So
//! blocks that share a granule may keep each other's memory in place.
//!
//! While a part sleeps, it is *isolated*:
//! * Free memory beside it, in the same granules, is *held*, so that no request takes it.
//! * Its live blocks are irregular. So their frees leave the fast path, which asks nothing, and come
//!   to `free_by_record` (`../free.rs`), which keeps the blocks until their memory wakes up. Blocks
//!   stay irregular after that: their frees are only slower.
//!
//! Allocations and frees of other memory are as fast as without. The isolation ends and begins
//! again under the lock, so no other thread sees memory without it. While the whole allocator
//! sleeps it is not needed, because nothing is allocated.

use std::ops::Range;

use aquifer_device::HostBuffer;
use aquifer_device::PhysicalOptions;

use crate::core::Core;
use crate::core::heap::{Block, State};
use crate::core::paged::frames::{Frame, granules_of};
use crate::core::paged::granules::{MaySleep, POOL};
use crate::core::pools::Which;
use crate::core::remap::donors::Donor;
use crate::core::sleep::{ContentsPlace, Sleep, SleepingRange, united, within};
use crate::history::Action;
use crate::sleep::options::{Contents, Part, SleepOptions};
use crate::tags::Tag;
use crate::types::{After, PoolId};

/// What wakes up.
pub(crate) enum Waking<'a> {
    All,
    Parts(&'a [Part]),
    /// Ranges that were about to fall asleep.
    Ranges(Vec<Range<u64>>),
}

/// Memory that wakes up, and what its frames are made with.
pub(crate) struct Woken {
    pub(crate) ranges: Vec<SleepingRange>,
    /// What sleeps on.
    pub(crate) staying: Vec<SleepingRange>,
    pub(crate) granule: u64,
    pub(crate) options: PhysicalOptions,
    pub(crate) access: Vec<u32>,
}

/// Memory that is to sleep, and those of its contents that are to be saved.
pub(crate) struct Falling {
    pub(crate) range: Range<u64>,
    pub(crate) contents: Vec<(Range<u64>, Contents)>,
}

static KEPT: Contents = Contents::SaveToHost;

/// Memory that an allocation has, or a graph may use, with the fate of its contents; `None` if it
/// stays awake.
type Span<'a> = (Range<u64>, Option<&'a Contents>);

impl Core {
    /// Chooses what sleeps, and lists it. It is mapped still.
    pub(crate) fn begin_sleep(&mut self, options: &SleepOptions) -> Vec<Falling> {
        let spans = self.spans(options);
        let paged = &self.paged;
        let mut chosen: Vec<MaySleep> = Vec::new();
        for frame in paged.may_sleep(&self.pins) {
            let mut fates = touching(&spans, &frame.range).iter().map(|(_, fate)| fate.is_some()).peekable();
            if !options.are_for_all() && (fates.peek().is_none() || !fates.all(|sleeps| sleeps)) {
                continue;
            }
            match chosen.last_mut() {
                Some(last) if last.base == frame.base && last.range.end == frame.range.start => {
                    last.range.end = frame.range.end;
                }
                _ => chosen.push(frame),
            }
        }
        let granule = paged.granule;
        let contents = |range: &Range<u64>| contents_of(touching(&spans, range), range, granule);
        let falling = chosen.iter().map(|one| Falling { range: one.range.clone(), contents: contents(&one.range) });
        let falling: Vec<Falling> = falling.collect();
        let paged = &mut self.paged;
        let mut ranges = paged.sleep.take_ranges();
        for MaySleep { range, kind, is_dedicated, .. } in chosen {
            let bytes = range.end - range.start;
            let frames = paged.forget_mapped(range.start, bytes);
            paged.mapped_bytes[kind as usize] -= bytes;
            paged.in_flight += granules_of(&frames);
            let largest = frames.iter().map(|frame| frame.granules.get()).max().unwrap_or(1);
            let mapped = frames.len();
            let (place, saved) = (ContentsPlace::InPlace, Vec::new());
            ranges.push(SleepingRange { range, kind, is_dedicated, frames, mapped, place, largest, saved });
        }
        paged.sleep.list(ranges, [&[], &[]]);
        paged.sleep.is_whole |= options.are_for_all();
        paged.moves = 0;
        self.account_for_granules();
        falling
    }

    /// All memory that allocations have, or graphs may use, by address.
    fn spans<'a>(&self, options: &'a SleepOptions) -> Vec<Span<'a>> {
        let mut spans: Vec<Span> = Vec::new();
        // What sleeps in part already keeps its contents.
        let sleeps = |range: &Range<u64>| self.paged.sleep.has(range);
        let fate = |range: &Range<u64>, pool: PoolId, tag: Option<Tag>| match options.fate(&self.pools, pool, tag) {
            Some(_) if sleeps(range) => options.are_for_all().then_some(&KEPT),
            fate => fate,
        };
        self.for_each_used(|block, tag| spans.push((block.range(), fate(&block.range(), block.pool, tag))));
        let owned = self.paged.owned.iter().filter(|(_, owned)| owned.size > 0);
        let owned = owned.map(|(&base, owned)| (base..base + owned.size, owned.tag));
        spans.extend(owned.map(|(range, tag)| (range.clone(), fate(&range, POOL, Some(tag)))));
        spans.sort_unstable_by_key(|(range, _)| range.start);
        spans
    }

    /// Calls a function for each live block of mapped memory, with its tag, and for each free one
    /// that a graph may use.
    fn for_each_used(&self, mut with: impl FnMut(&Block, Option<Tag>)) {
        for (_, _, block) in self.heap.all_blocks().filter(|(region, ..)| region.is_paged()) {
            match block.state {
                State::Live => with(block, Some(Tag(block.tag))),
                state if state.is_free() && self.is_promised(block.pool) => with(block, None),
                _ => {}
            }
        }
    }

    /// True if a private pool keeps the free memory of a heap pool: a graph may use it.
    fn is_promised(&self, pool: PoolId) -> bool {
        !self.pools.is_among(pool, Which::NotForGraphs)
    }
}

/// The spans that touch a range.
fn touching<'a, 'b>(spans: &'b [Span<'a>], range: &Range<u64>) -> &'b [Span<'a>] {
    let first = spans.partition_point(|(span, _)| span.end <= range.start);
    let count = spans[first..].partition_point(|(span, _)| span.start < range.end);
    &spans[first..first + count]
}

/// What of a range is to be saved. Pieces with less than a granule between are one.
fn contents_of(spans: &[Span], range: &Range<u64>, granule: u64) -> Vec<(Range<u64>, Contents)> {
    let mut pieces: Vec<(Range<u64>, Contents)> = Vec::new();
    for (span, fate) in spans {
        let Some(contents) = fate.filter(|fate| **fate != Contents::Discard) else { continue };
        let piece = span.start.max(range.start)..span.end.min(range.end);
        match pieces.last_mut() {
            Some((last, same)) if same == contents && piece.start - last.end < granule => last.end = piece.end,
            _ => pieces.push((piece, contents.clone())),
        }
    }
    pieces
}

impl Core {
    /// Takes out what wakes up. `None` if nothing sleeps.
    pub(crate) fn begin_waking(&mut self, waking: &Waking) -> Option<Woken> {
        let paged = &mut self.paged;
        if !paged.sleep.is_whole && !paged.sleep.is_any() {
            return None;
        }
        let (granule, options, access) = (paged.granule, paged.options, paged.access.clone());
        let ranges = paged.sleep.take_ranges();
        self.end_isolation();
        // Blocks may have been freed meanwhile.
        let ranges = self.forget_free(ranges);
        let [ranges, staying] = match waking {
            Waking::All => [ranges, Vec::new()],
            Waking::Parts(parts) => self.divide(ranges, parts),
            Waking::Ranges(falling) => {
                let falls = |one: &SleepingRange| falling.iter().any(|range| range.contains(&one.range.start));
                let (waking, staying) = ranges.into_iter().partition(falls);
                [waking, staying]
            }
        };
        self.paged.sleep.list(Vec::new(), [&ranges, &staying]);
        self.isolate_sleeping();
        Some(Woken { ranges, staying, granule, options, access })
    }

    /// Divides ranges into what wakes up with some parts, and what sleeps on.
    fn divide(&self, ranges: Vec<SleepingRange>, parts: &[Part]) -> [Vec<SleepingRange>; 2] {
        let has = |pool: PoolId, tag: Option<Tag>| parts.iter().any(|part| part.has(&self.pools, pool, tag));
        let paged = &self.paged;
        let granule = paged.granule;
        let mut waking: Vec<Range<u64>> = Vec::new();
        self.for_each_used(|block, tag| {
            if has(block.pool, tag) {
                waking.push(block.addr / granule * granule..block.range().end.next_multiple_of(granule));
            }
        });
        for one in ranges.iter().filter(|one| one.is_dedicated) {
            let owner = paged.owned.range(..=one.range.start).next_back();
            // What no owner has any more wakes up with anything.
            let sleeps_on =
                owner.is_some_and(|(&base, owned)| one.range.start < base + owned.size && !has(POOL, Some(owned.tag)));
            waking.extend((!sleeps_on).then(|| one.range.clone()));
        }
        let waking = united(waking);
        let mut divided = [Vec::new(), Vec::new()];
        for one in ranges {
            if !one.frames.is_empty() || one.is_dedicated {
                divided[usize::from(within(&waking, &one.range).is_empty())].push(one);
                continue;
            }
            let [inside, outside] = one.split(&waking);
            divided[0].extend(inside);
            divided[1].extend(outside);
        }
        divided
    }

    /// Makes holes of sleeping granules that lie wholly in free blocks, unless a graph may use
    /// them, and returns the ranges that are left. Those with frames stay as they are.
    pub(super) fn forget_free(&mut self, ranges: Vec<SleepingRange>) -> Vec<SleepingRange> {
        // Blocks that were given back meanwhile.
        self.heap.end_quarantine(|_| true);
        let free = self.free_granules(Which::NotForGraphs);
        let mut gone = Vec::new();
        for donor in free {
            let end = donor.addr + donor.bytes;
            let first = ranges.partition_point(|one| one.range.end <= donor.addr);
            let touched = ranges[first..].iter().take_while(|one| one.range.start < end);
            gone.extend(touched.filter(|one| one.frames.is_empty()).map(|one| {
                let addr = donor.addr.max(one.range.start);
                Donor { addr, bytes: end.min(one.range.end) - addr, ..donor }
            }));
        }
        for donor in self.hold_all(gone.clone()) {
            self.note_donor(Action::SegmentUnmap, &donor);
            self.heap.unhold_as_hole(donor.block);
        }
        let gone = united(gone.into_iter().map(|donor| donor.addr..donor.addr + donor.bytes).collect());
        let left = ranges.into_iter().flat_map(|one| {
            if one.frames.is_empty() {
                let [_, outside] = one.split(&gone);
                outside
            } else {
                vec![one]
            }
        });
        left.collect()
    }
}

impl Core {
    /// Changes what is listed for the sleeping range that starts at an address.
    pub(crate) fn change_sleeping(&mut self, start: u64, change: impl FnOnce(&mut SleepingRange)) {
        let paged = &mut self.paged;
        if let Ok(at) = paged.sleep.ranges.binary_search_by_key(&start, |one| one.range.start) {
            change(&mut paged.sleep.ranges[at]);
        }
    }

    /// Isolates all memory that sleeps, unless everything does: see the module's documentation.
    pub(crate) fn isolate_sleeping(&mut self) {
        let sleep = &self.paged.sleep;
        if sleep.is_whole || sleep.addresses.is_empty() {
            return;
        }
        let sleeping = sleep.addresses.clone();
        self.heap.end_quarantine(|_| true);
        let (mut live, mut free) = (Vec::new(), Vec::new());
        let touches = |range: &Range<u64>| !within(&sleeping, range).is_empty();
        let heap = &self.heap;
        for region in heap.regions().filter(|region| touches(&(region.addr..region.addr + region.bytes))) {
            for (id, block) in heap.blocks_of(region) {
                let parts = within(&sleeping, &block.range());
                match block.state {
                    State::Live if !parts.is_empty() => live.push(id),
                    State::Free => free.extend(parts.into_iter().map(|Range { start: addr, end }| Donor {
                        block: id,
                        addr,
                        bytes: end - addr,
                        after: After::NOTHING,
                    })),
                    _ => {}
                }
            }
        }
        let held = self.hold_all(free).into_iter().map(|donor| donor.block).collect();
        live.into_iter().for_each(|id| self.heap.make_irregular(id));
        let freed = self.waiting.take_where(|waiting| touches(&waiting.block.range()));
        let paged = &mut self.paged;
        paged.sleep.held = held;
        paged.sleep.freed.extend(freed);
    }

    /// Ends the isolation: blocks that were given back meanwhile are free, and so is what was held.
    pub(crate) fn end_isolation(&mut self) {
        let Sleep { held, freed, .. } = &mut self.paged.sleep;
        let (held, freed) = (std::mem::take(held), std::mem::take(freed));
        for block in held {
            self.heap.unhold_as_free(block);
        }
        for waiting in freed {
            if waiting.uses.iter().all(|&one| self.streams.is_done(one)) {
                self.end_wait(&waiting);
            } else {
                self.waiting.push(waiting);
            }
        }
    }

    /// Takes the pinned host memory that is kept for the contents of the next sleep.
    pub(crate) fn take_host_buffers(&mut self) -> Vec<HostBuffer> {
        std::mem::take(&mut self.paged.sleep.host_buffers)
    }

    pub(crate) fn keep_host_buffers(&mut self, buffers: impl IntoIterator<Item = HostBuffer>) {
        self.paged.sleep.host_buffers.extend(buffers);
    }

    /// Takes out the list, and spare frames if everything sleeps, so that frames can be released.
    pub(crate) fn begin_release_sleeping(&mut self) -> Option<(Vec<SleepingRange>, Vec<Frame>)> {
        let paged = &mut self.paged;
        let mut spares: Vec<Frame> = Vec::new();
        if paged.sleep.is_whole {
            spares.extend(std::mem::take(&mut paged.spares).iter());
        }
        paged.in_flight += granules_of(&spares);
        Some((paged.sleep.take_ranges(), spares))
    }

    /// Accounts for `released` granules of frames that were released, and puts the list and the
    /// other spare frames back.
    pub(crate) fn commit_release_sleeping(&mut self, ranges: Vec<SleepingRange>, spares: Vec<Frame>, released: u64) {
        let paged = &mut self.paged;
        paged.in_flight -= released + granules_of(&spares);
        paged.spares.extend(spares);
        self.end_isolation();
        let ranges = self.forget_free(ranges);
        self.relist(ranges);
        self.counters.events.num_device_free += u64::from(released > 0);
        self.account_for_granules();
    }

    /// Lists memory as asleep that lacks its mapping, with its contents in frames.
    pub(crate) fn list_unmapped(&mut self, unmapped: Vec<SleepingRange>) {
        let listed = self.paged.sleep.take_ranges();
        self.end_isolation();
        self.relist(listed.into_iter().chain(unmapped).collect());
    }

    /// Puts the list back, and isolates what is in it.
    fn relist(&mut self, ranges: Vec<SleepingRange>) {
        self.paged.sleep.list(ranges, [&[], &[]]);
        self.isolate_sleeping();
    }

    /// Accounts for frames that were created for sleeping ranges, and released again, in granules.
    /// `lacking` bytes were to be created.
    pub(crate) fn commit_created(&mut self, created: u64, released: u64, lacking: u64) {
        let paged = &mut self.paged;
        paged.in_flight = paged.in_flight + created - released;
        self.counters.events.num_device_alloc += u64::from(created > released);
        self.account_for_granules();
        self.growing.end(lacking);
    }

    /// Accounts for ranges that are mapped again. Returns those that were not mapped before.
    pub(crate) fn commit_mapped(&mut self, woken: &[SleepingRange]) -> Vec<Range<u64>> {
        let paged = &mut self.paged;
        for SleepingRange { range, kind, frames, .. } in woken {
            paged.put_all(range.start, frames);
            paged.mapped_bytes[*kind as usize] += range.end - range.start;
            paged.in_flight -= granules_of(frames);
        }
        self.account_for_granules();
        let mapped = woken.iter().filter(|one| one.place != ContentsPlace::InPlace);
        mapped.map(|one| one.range.clone()).collect()
    }

    /// Lists what still sleeps after an attempt to wake up. `has_woken` says whether it succeeded.
    pub(crate) fn end_waking(&mut self, ranges: Vec<SleepingRange>, has_woken: bool) {
        self.end_isolation();
        self.paged.sleep.is_whole &= !has_woken;
        self.relist(ranges);
    }
}
