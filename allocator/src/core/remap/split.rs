//! Which frames are split, and what a split came to.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::DeviceError;

use crate::core::Core;
use crate::core::paged::frames::{Frame, granules_of};
use crate::core::pools::Which;
use crate::core::remap::donors::Donor;
use crate::core::sleep::{ContentsPlace, SleepingRange};
use crate::history::Action;
use crate::size_class::PoolKind;
use crate::types::Use;

/// A frame to split.
#[derive(Debug)]
pub(crate) struct Split {
    pub(crate) range: Range<u64>,
    /// The kind of pool that it counts in.
    pub(crate) kind: PoolKind,
    /// The stretches of granules that stay, by address.
    pub(crate) live: Vec<Range<u64>>,
    /// The granules that lie wholly in free blocks.
    pub(crate) free: Vec<Donor>,
}

impl Split {
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live.iter().map(|live| live.end - live.start).sum()
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        self.free.iter().map(|donor| donor.bytes).sum()
    }
}

impl Core {
    /// The frames of several granules that are free in part, and that may be split. In the window,
    /// splitting gains nothing.
    pub(crate) fn split_candidates(&mut self, window: &Range<u64>) -> Vec<Split> {
        let free = self.free_granules(Which::NotForGraphs);
        let paged = &self.paged;
        let mut frames: BTreeMap<u64, Split> = BTreeMap::new();
        let mut not_done = Vec::new();
        for donor in free {
            let block = self.heap.block(donor.block);
            let is_done = self.streams.is_done(Use { stream: block.owner, after: block.after });
            let (mut addr, end) = (donor.addr, donor.addr + donor.bytes);
            while let Some(range) = (addr < end).then(|| paged.frame_at(addr)).flatten() {
                let bytes = range.end.min(end) - addr;
                if !is_done {
                    not_done.push(range.start);
                }
                let is_in_window = range.start < window.end && window.start < range.end;
                if range.end - range.start > bytes && !is_in_window && !self.pins.are_in(range.clone()) {
                    let new =
                        Split { range: range.clone(), kind: block.pool.kind(), live: Vec::new(), free: Vec::new() };
                    let frame = frames.entry(range.start).or_insert(new);
                    frame.free.push(Donor { addr, bytes, ..donor });
                }
                addr = range.end;
            }
        }
        not_done.into_iter().for_each(|start| drop(frames.remove(&start)));
        let mut frames: Vec<Split> = frames.into_values().collect();
        for frame in &mut frames {
            frame.free.sort_unstable_by_key(|donor| donor.addr);
            let mut at = frame.range.start;
            for donor in &frame.free {
                frame.live.push(at..donor.addr);
                at = donor.addr + donor.bytes;
            }
            frame.live.push(at..frame.range.end);
            frame.live.retain(|live| !live.is_empty());
        }
        frames
    }
}

/// Chooses frames with `missing` bytes of free granules together, or as many as it can, of which
/// the live granules have at most `affordable` bytes.
pub(crate) fn choose(mut candidates: Vec<Split>, missing: u64, affordable: u64) -> Vec<Split> {
    candidates.sort_by_key(|split| (split.live_bytes(), Reverse(split.range.start)));
    let (mut live, mut free) = (0, 0);
    let chosen = candidates.into_iter().take_while(|split| {
        let wanted = free < missing && live + split.live_bytes() <= affordable;
        live += split.live_bytes();
        free += split.free_bytes();
        wanted
    });
    chosen.collect()
}

impl Core {
    /// Holds the free granules of the frames. Returns them by address.
    pub(crate) fn hold_split(&mut self, chosen: &[Split]) -> BTreeMap<u64, Donor> {
        let free: Vec<Donor> = chosen.iter().flat_map(|split| &split.free).copied().collect();
        self.hold_all(free).into_iter().map(|donor| (donor.addr, donor)).collect()
    }
}

/// The result of the driver's work.
#[derive(Default)]
pub(crate) struct SplitDone {
    /// For each of the first frames, which were unmapped, the stretches of its live granules.
    pub(crate) replaced: Vec<Vec<Replaced>>,
    /// New frames that are of no use and that the driver did not take back.
    pub(crate) spares: Vec<Frame>,
    pub(crate) error: Option<DeviceError>,
}

/// A stretch of live granules, and the new frames that have its contents.
pub(crate) struct Replaced {
    pub(crate) range: Range<u64>,
    pub(crate) frames: Vec<Frame>,
    /// How many of the frames are mapped.
    pub(crate) mapped: usize,
    pub(crate) is_accessible: bool,
}

/// The result of a split.
#[derive(Default)]
pub(crate) struct SplitOutcome {
    pub(crate) frames: u64,
    /// Bytes that were copied, and bytes that can move now.
    pub(crate) copied: u64,
    pub(crate) freed: u64,
    /// Live memory that lacks its mapping. It is to be listed as asleep.
    pub(crate) unmapped: Vec<SleepingRange>,
}

impl Core {
    /// Accounts for what the driver did.
    pub(crate) fn commit_split(
        &mut self,
        chosen: &[Split],
        mut held: BTreeMap<u64, Donor>,
        done: SplitDone,
    ) -> SplitOutcome {
        let mut replaced = done.replaced.into_iter();
        let mut outcome = SplitOutcome::default();
        for split in chosen {
            let stretches = replaced.next();
            for donor in split.free.iter().filter_map(|donor| held.remove(&donor.addr)) {
                if stretches.is_none() {
                    self.heap.unhold_as_free(donor.block);
                    continue;
                }
                self.note_donor(Action::SegmentUnmap, &donor);
                self.heap.unhold_as_hole(donor.block);
            }
            let (Some(stretches), paged) = (stretches, &mut self.paged) else { continue };
            let (kind, bytes) = (split.kind, split.range.end - split.range.start);
            let old = paged.forget_mapped(split.range.start, bytes);
            paged.spares.extend(old);
            paged.mapped_bytes[kind as usize] -= bytes;
            outcome.frames += 1;
            outcome.copied += split.live_bytes();
            outcome.freed += split.free_bytes();
            for Replaced { range, frames, mapped, is_accessible } in stretches {
                if is_accessible {
                    paged.put_all(range.start, &frames);
                    paged.mapped_bytes[kind as usize] += range.end - range.start;
                    continue;
                }
                paged.in_flight += granules_of(&frames);
                let (is_dedicated, place, largest, saved) = (false, ContentsPlace::InFrames, 1, Vec::new());
                outcome.unmapped.push(SleepingRange {
                    range,
                    kind,
                    is_dedicated,
                    frames,
                    mapped,
                    place,
                    largest,
                    saved,
                });
            }
        }
        self.paged.spares.extend(done.spares);
        if outcome.copied > 0 {
            self.counters.events.num_device_alloc += 1;
        }
        self.counters.events.frames_split += outcome.frames;
        self.growing.end(chosen.iter().map(Split::live_bytes).sum());
        self.account_for_granules();
        outcome
    }
}
