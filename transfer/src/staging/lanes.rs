//! The number of chunks that each *lane*, that is, each stream, may hold.
//!
//! Copies enqueued behind a long kernel wait for it, and other lanes cannot use their chunks
//! meanwhile. Nothing predicts whether a stream stands still. So a lane begins with few chunks, and
//! may hold one more with each copy that is seen to be done, as long as it holds any. Of three
//! chunks or more, one always stays free for other lanes.

use std::collections::BTreeMap;

/// Chunks with which a lane begins: one to fill while the other is copied.
const FIRST: usize = 2;

/// Lanes that hold chunks.
#[derive(Debug, Default)]
pub(super) struct Lanes(BTreeMap<u32, Lane>);

#[derive(Debug)]
struct Lane {
    held: usize,
    /// The number that it may hold.
    window: usize,
}

/// The most of `chunks` chunks that one lane may hold.
pub(super) fn most(chunks: usize) -> usize {
    chunks - usize::from(chunks > FIRST)
}

impl Lanes {
    /// Whether a lane may have one more of `chunks` chunks.
    pub(super) fn may_hold_more(&self, lane: u32, chunks: usize) -> bool {
        self.0.get(&lane).is_none_or(|lane| lane.held < lane.window.min(most(chunks)))
    }

    /// A lane gets a chunk.
    pub(super) fn hold(&mut self, lane: u32) {
        self.0.entry(lane).or_insert(Lane { held: 0, window: FIRST }).held += 1;
    }

    /// A copy of a lane is done: its window grows.
    pub(super) fn copy_is_done(&mut self, lane: u32) {
        if let Some(lane) = self.0.get_mut(&lane) {
            lane.window = lane.window.saturating_add(1);
        }
    }

    /// A chunk comes back from a lane.
    pub(super) fn release(&mut self, lane: u32) {
        if let Some(known) = self.0.get_mut(&lane) {
            known.held -= 1;
            if known.held == 0 {
                self.0.remove(&lane);
            }
        }
    }

    /// The chunks that each lane holds.
    #[cfg(test)]
    pub(super) fn held(&self) -> BTreeMap<u32, usize> {
        self.0.iter().map(|(&lane, known)| (lane, known.held)).collect()
    }
}
