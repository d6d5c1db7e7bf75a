//! Decides what falls asleep and what wakes up, under the locks and without driver calls
//! (`sleep.rs`).
//!
//! Memory sleeps by frames: a frame goes if a live block that is to sleep lies in it, and none that
//! stays awake. Memory wakes up by granules: those in which a block that is to wake up lies. So
//! blocks that share a granule may keep each other's memory in place.

use std::cmp::Reverse;
use std::ops::Range;

use crate::backing::paged::contents::Contents;
use crate::backing::paged::sleep_options::{Part, SleepOptions};
use crate::core::Core;
use crate::core::heap::{Block, State};
use crate::core::paged::frames::granules_of;
use crate::core::paged::granules::{Asleep, POOL};
use crate::core::pools::Which;
use crate::core::remap::donors::Donor;
use crate::core::sleep::absent::{Absent, ContentsPlace, united, within};
use crate::history::Action;
use crate::tags::Tag;
use crate::types::PoolId;

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
    /// Chooses what sleeps, and lists it as absent. It is mapped still.
    pub(crate) fn begin_sleep(&mut self, options: &SleepOptions) -> Vec<Falling> {
        let spans = self.spans(options);
        let Some(paged) = &self.paged else { return Vec::new() };
        let mut chosen: Vec<Asleep> = Vec::new();
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
        let Some(paged) = &mut self.paged else { return Vec::new() };
        for Asleep { range, kind, is_dedicated, .. } in chosen {
            let bytes = range.end - range.start;
            let frames = paged.forget_mapped(range.start, bytes);
            paged.mapped_bytes[kind as usize] -= bytes;
            paged.in_hands += granules_of(&frames);
            let largest = frames.iter().map(|frame| frame.granules.get()).max().unwrap_or(1);
            let mapped = frames.len();
            let (place, saved) = (ContentsPlace::InPlace, Vec::new());
            paged.absent.push(Absent { range, kind, is_dedicated, frames, mapped, place, largest, saved });
        }
        paged.absent.sort_unstable_by_key(|absent| absent.range.start);
        paged.is_asleep |= options.are_for_all();
        paged.note_sleeping([&[], &[]]);
        self.account_for_granules();
        falling
    }

    /// All memory that allocations have, or graphs may use, by address.
    fn spans<'a>(&self, options: &'a SleepOptions) -> Vec<Span<'a>> {
        let mut spans: Vec<Span> = Vec::new();
        // What sleeps in part already keeps its contents.
        let sleeps = |range: &Range<u64>| self.paged.as_ref().is_some_and(|paged| paged.sleeps(range));
        let fate = |range: &Range<u64>, pool: PoolId, tag: Option<Tag>| match options.fate(&self.pools, pool, tag) {
            Some(_) if sleeps(range) => options.are_for_all().then_some(&KEPT),
            fate => fate,
        };
        self.for_each_used(|block, tag| spans.push((block.range(), fate(&block.range(), block.pool, tag))));
        let owned = self.paged.iter().flat_map(|paged| &paged.owned).filter(|(_, owned)| owned.size > 0);
        let owned = owned.map(|(&base, owned)| (base..base + owned.size, owned.tag));
        spans.extend(owned.map(|(range, tag)| (range.clone(), fate(&range, POOL, Some(tag)))));
        spans.sort_unstable_by_key(|(range, _)| range.start);
        spans
    }

    /// Calls a function for each live block of mapped memory, with its tag, and for each free one that
    /// a graph may use.
    fn for_each_used(&self, mut with: impl FnMut(&Block, Option<Tag>)) {
        for (_, _, block) in self.heap.all_blocks().filter(|(region, ..)| region.is_paged()) {
            match block.state {
                State::Live => with(block, Some(Tag(block.tag))),
                State::Free if self.is_promised(block.pool) => with(block, None),
                _ => {}
            }
        }
    }

    /// True if a private pool keeps the free memory of a heap pool: a graph may use it.
    fn is_promised(&self, pool: PoolId) -> bool {
        !self.pools.is_among(pool, Which::Unpromised)
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
    /// Divides absent memory into what wakes up with some parts, and what sleeps on.
    pub(crate) fn divide_absent(&self, absent: Vec<Absent>, parts: &[Part]) -> [Vec<Absent>; 2] {
        let has = |pool: PoolId, tag: Option<Tag>| parts.iter().any(|part| part.has(&self.pools, pool, tag));
        let Some(paged) = &self.paged else { return [Vec::new(), absent] };
        let granule = paged.granule;
        let mut waking: Vec<Range<u64>> = Vec::new();
        self.for_each_used(|block, tag| {
            if has(block.pool, tag) {
                waking.push(block.addr / granule * granule..block.range().end.next_multiple_of(granule));
            }
        });
        for absent in absent.iter().filter(|absent| absent.is_dedicated) {
            let owner = paged.owned.range(..=absent.range.start).next_back();
            // What no owner has any more wakes up with anything.
            let sleeps_on = owner
                .is_some_and(|(&base, owned)| absent.range.start < base + owned.size && !has(POOL, Some(owned.tag)));
            waking.extend((!sleeps_on).then(|| absent.range.clone()));
        }
        let waking = united(waking);
        let mut divided = [Vec::new(), Vec::new()];
        for absent in absent {
            if !absent.is_released() || absent.is_dedicated {
                divided[usize::from(within(&waking, &absent.range).is_empty())].push(absent);
                continue;
            }
            let [inside, outside] = absent.split(&waking);
            divided[0].extend(inside);
            divided[1].extend(outside);
        }
        divided
    }

    /// Makes holes of absent granules that lie wholly in free blocks, unless a graph may use them, and
    /// returns the absent memory that is left. Ranges with frames stay as they are.
    pub(crate) fn forget_free(&mut self, absent: Vec<Absent>) -> Vec<Absent> {
        let free = self.free_granules(Which::Unpromised);
        let mut gone = Vec::new();
        for donor in free {
            let end = donor.addr + donor.bytes;
            let first = absent.partition_point(|absent| absent.range.end <= donor.addr);
            let touched = absent[first..].iter().take_while(|absent| absent.range.start < end);
            gone.extend(touched.filter(|absent| absent.is_released()).map(|absent| {
                let addr = donor.addr.max(absent.range.start);
                Donor { addr, bytes: end.min(absent.range.end) - addr, ..donor }
            }));
        }
        // Each block from its high end down, as holding it needs.
        gone.sort_unstable_by_key(|donor| (donor.block, Reverse(donor.addr)));
        for donor in self.hold_all(gone.clone()) {
            let region = self.heap.region_of(donor.block);
            let (pool, stream) = (region.pool, region.stream);
            self.heap.unhold_as_hole(donor.block);
            self.note_mapping(Action::SegmentUnmap, pool, stream, donor.addr, donor.bytes);
        }
        let gone = united(gone.into_iter().map(|donor| donor.addr..donor.addr + donor.bytes).collect());
        let left = absent.into_iter().flat_map(|absent| {
            if absent.is_released() {
                let [_, outside] = absent.split(&gone);
                outside
            } else {
                vec![absent]
            }
        });
        left.collect()
    }
}
