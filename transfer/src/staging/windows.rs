//! The number of chunks that each stream may hold.
//!
//! Copies enqueued behind a long kernel wait for it, and other streams cannot use their chunks
//! meanwhile. Nothing predicts whether a stream stands still. So a stream begins with few chunks,
//! and may hold one more with each copy that is seen to be done, as long as it holds any. Of three
//! chunks or more, one always stays free for other streams.

use std::collections::BTreeMap;

/// Chunks with which a stream begins: one to fill while the other is copied.
const FIRST: usize = 2;

/// The windows of streams that hold chunks.
#[derive(Debug, Default)]
pub(super) struct Windows(BTreeMap<u32, Window>);

#[derive(Debug)]
struct Window {
    held: usize,
    /// The number that it may hold.
    size: usize,
}

/// The most of `chunks` chunks that one stream may hold.
pub(super) fn most(chunks: usize) -> usize {
    chunks - usize::from(chunks > FIRST)
}

impl Windows {
    /// Whether a stream may have one more of `chunks` chunks.
    pub(super) fn may_hold_more(&self, stream: u32, chunks: usize) -> bool {
        self.0.get(&stream).is_none_or(|window| window.held < window.size.min(most(chunks)))
    }

    /// A stream gets a chunk.
    pub(super) fn hold(&mut self, stream: u32) {
        self.0.entry(stream).or_insert(Window { held: 0, size: FIRST }).held += 1;
    }

    /// A copy of a stream is done: its window grows.
    pub(super) fn copy_is_done(&mut self, stream: u32) {
        if let Some(window) = self.0.get_mut(&stream) {
            window.size = window.size.saturating_add(1);
        }
    }

    /// A chunk comes back from a stream.
    pub(super) fn release(&mut self, stream: u32) {
        if let Some(window) = self.0.get_mut(&stream) {
            window.held -= 1;
            if window.held == 0 {
                self.0.remove(&stream);
            }
        }
    }

    /// The chunks that each stream holds.
    #[cfg(test)]
    pub(super) fn held(&self) -> BTreeMap<u32, usize> {
        self.0.iter().map(|(&stream, window)| (stream, window.held)).collect()
    }
}
