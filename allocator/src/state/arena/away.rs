//! Blocks of an arena that other streams own or get (`cross_stream/reuse.rs`). Only where memory
//! comes in granules: whole segments move to the arena of the stream that uses them.

use super::{ArenaGuard, ArenaInner, Granted};
use crate::cross_stream::progress::Pending;
use crate::heap::{BlockId, IndexView, Key};
use crate::request::Request;

impl ArenaGuard {
    /// The foreign free blocks that the request's stream has here; `None` if there are none.
    pub(crate) fn foreign_of(&self, request: &Request) -> Option<IndexView<'_>> {
        self.inner.heap.index(request.pool, request.slot).filter(|index| !index.is_empty())
    }

    /// Serves a request of another stream from its foreign free blocks here.
    pub(crate) fn take_foreign(&mut self, request: &Request) -> Option<Granted> {
        let block = self.foreign_of(request)?.best_fit(request.size)?.block();
        Some(self.take(request, block))
    }

    /// Has foreign free blocks that are known done go home. Adds the ticks of others, but for those
    /// of the stream `user`, to `unknown`. Returns true if any went home.
    pub(crate) fn send_home(&mut self, user: u32, unknown: &mut Pending) -> bool {
        if !self.inner.lends() || !self.inner.heap.has_foreign() {
            return false;
        }
        let ArenaInner { heap, borrowers, .. } = &mut *self.inner;
        heap.send_home(|owner, after| {
            let Some(timeline) = borrowers.get(&owner) else { return false };
            let is_done = after <= timeline.frontier();
            match unknown.last_mut() {
                _ if is_done || owner == user => {}
                Some((last, latest)) if last.id() == owner => *latest = after.max(*latest),
                _ => unknown.push((timeline.clone(), after)),
            }
            is_done
        })
    }

    /// The best of the home stream's free blocks for a request of another stream.
    pub(crate) fn best_to_lend(&self, request: &Request) -> Option<Key> {
        let index = self.inner.heap.index(request.pool, self.inner.heap.home)?;
        if self.inner.lends() { index.best_fit(request.size) } else { None }
    }

    /// True if a free block of the home stream is known done. Otherwise adds its tick to `unknown`.
    pub(crate) fn is_known_done(&self, id: BlockId, unknown: &mut Pending) -> bool {
        let after = self.inner.heap.blocks[id].after;
        let is_done = after <= self.done();
        if !is_done {
            unknown.extend(self.inner.timeline.iter().map(|timeline| (timeline.clone(), after)));
        }
        is_done
    }
}

impl ArenaInner {
    /// True if blocks here may serve other streams.
    pub(super) fn lends(&self) -> bool {
        self.is_paged && self.crosses_streams
    }
}
