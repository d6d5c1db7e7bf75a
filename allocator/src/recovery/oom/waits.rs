//! Advice to wait for streams that still use memory which was given back.

use crate::recovery::oom::Advice;
use crate::shell::core::{Core, Request};

/// What a request would get once streams are done with freed memory.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// Bytes that the request needs.
    needed: u64,
    /// True if memory that comes free adds up with other memory; otherwise the request is served from one block or not at all.
    adds_up: bool,
    streams: Vec<Wait>,
    /// Bytes that all of them together bring.
    all: u64,
}

/// A stream that still uses freed memory.
#[derive(Clone, Debug)]
struct Wait {
    stream_id: u32,
    /// Bytes that it uses.
    uses: u64,
    /// Bytes that come free for the request when this stream alone is done.
    brings: u64,
}

impl Core {
    /// The streams that a request might wait for. Work that a capturing stream was given before is done one day, but nobody can learn that
    /// before the capture has ended. Memory apart from heaps comes from the device, and so from any block.
    pub(super) fn waits(&self, request: &Request, apart: bool) -> Waits {
        let moves = apart || self.paged_granule_for(request).is_some();
        let mut waits = Waits { needed: request.size, adds_up: moves, ..Waits::default() };
        for (block, slots) in self.waiting_blocks() {
            if slots.iter().any(|&slot| self.captures_on(slot)) {
                continue;
            }
            let promised = self.pools.owner_of(block.pool).filter(|private| !private.is_released());
            let brings = if moves {
                promised.is_none_or(|private| private.owns(request.pool) && !apart)
            } else {
                let reaches = block.owner == request.slot || self.crosses_streams;
                reaches && block.pool == request.pool && self.classes.fits(block.size, request.size)
            };
            let brings = if brings { block.size } else { 0 };
            waits.all = if moves { waits.all + brings } else { waits.all.max(brings) };
            for &slot in &slots {
                waits.note(slot, block.size, if slots.len() == 1 { brings } else { 0 });
            }
        }
        waits
    }
}

impl Waits {
    fn note(&mut self, stream_id: u32, uses: u64, brings: u64) {
        let adds_up = self.adds_up;
        let Some(wait) = self.streams.iter_mut().find(|wait| wait.stream_id == stream_id) else {
            return self.streams.push(Wait { stream_id, uses, brings });
        };
        wait.uses += uses;
        wait.brings = if adds_up { wait.brings + brings } else { wait.brings.max(brings) };
    }

    /// Each stream that suffices by itself beside `usable` bytes, or all of them if only they do together.
    pub(super) fn advice(&self, usable: u64) -> Vec<Advice> {
        let beside = if self.adds_up { usable } else { 0 };
        let suffices = |brings: u64| brings > 0 && brings.saturating_add(beside) >= self.needed;
        let advice = |wait: &Wait| Advice::WaitFor { stream_id: wait.stream_id, bytes: wait.uses };
        let found: Vec<Advice> = self.streams.iter().filter(|wait| suffices(wait.brings)).map(advice).collect();
        if !found.is_empty() || !suffices(self.all) {
            return found;
        }
        vec![Advice::All(self.streams.iter().map(advice).collect())]
    }
}
