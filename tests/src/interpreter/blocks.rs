//! What programs do with live blocks: use them, tell the allocator, give them back.

use aquifer_allocator::AllocError;
use aquifer_device::{Stream, StreamFlags};

use super::Interpreter;
use crate::model::{Handle, Live};
use crate::op::FreeHow;

impl Interpreter {
    pub(super) fn touch(&mut self, pick: usize, stream: usize, write: bool, record: bool) {
        let Some(at) = self.blocks.pick(pick) else { return };
        let stream = self.stream(stream).clone();
        let mut live = self.blocks.0.swap_remove(at);
        if live.bytes > 0 && self.allows(live.order(&stream, write)).is_some() {
            self.next_pattern = self.next_pattern.wrapping_add(1);
            let is_own = stream.id() == live.own;
            self.lagging.iter().for_each(|lagging| lagging.used(live.ptr));
            self.judge(live.touch(&stream, write.then_some(self.next_pattern), is_own));
            // A stream that is gone cannot be made to wait before the block is given back.
            if !is_own && (record || !self.is_live(live.own)) {
                self.record(&mut live, &stream);
            }
        }
        self.blocks.0.push(live);
    }

    pub(super) fn is_live(&self, stream: u32) -> bool {
        self.streams.iter().any(|live| live.id() == stream)
    }

    pub(super) fn record(&self, live: &mut Live, stream: &Stream) {
        let recorded = live.record(stream, |ptr, stream| self.allocator.record_stream_raw(ptr, stream));
        recorded.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Makes a block fit to be given back: its own stream waits for uses that the allocator was not
    /// told of.
    pub(super) fn settle(&self, live: &mut Live) {
        let own = self.streams.iter().find(|stream| stream.id() == live.own);
        let untold = live.uses.iter().filter(|used| !used.recorded && !used.is_behind);
        let untold: Vec<_> = untold.map(|used| (used.stream, used.tick.clone())).collect();
        for (user, tick) in untold {
            if own.is_some_and(|own| self.allows(own.wait_for(&tick)).is_some()) {
                continue;
            }
            if let Some(stream) = self.streams.iter().find(|stream| stream.id() == user) {
                self.record(live, stream);
            }
        }
    }

    pub(super) fn free(&mut self, pick: usize, how: FreeHow, verify: bool) {
        let Some(at) = self.blocks.pick(pick) else { return };
        let mut live = self.blocks.0.swap_remove(at);
        if verify && live.bytes > 0 {
            let reader = self.streams.iter().find(|stream| stream.id() == live.own).unwrap_or(&self.streams[0]).clone();
            if self.allows(live.order(&reader, false)).is_some() {
                self.judge(live.verify(&reader));
            }
        }
        self.settle(&mut live);
        let on = match how {
            FreeHow::DropOn(stream) => Some(self.stream(stream).clone()),
            _ => None,
        };
        let on = on.filter(|on| self.allows(live.order(on, true)).is_some());
        self.note_end(&live);
        match (live.handle, on) {
            (Handle::Raw, _) => self.allocator.free_raw(live.ptr).unwrap_or_else(|error| panic!("{error}")),
            (Handle::Exportable(exportable), _) => drop(exportable),
            (Handle::Growable(growable), _) => drop(growable),
            (Handle::Owned(handle), Some(on)) => handle.drop_on(&on).unwrap_or_else(|error| panic!("{error}")),
            (Handle::Owned(handle), None) if how == FreeHow::OnThread => {
                std::thread::spawn(move || drop(handle)).join().unwrap_or_else(|_| panic!("the thread panicked"));
            }
            (Handle::Owned(handle), None) => drop(handle),
        }
    }

    /// Replaces blocks, not one after the other in memory, by others of sizes around `bytes`.
    pub(super) fn replace(&mut self, pick: usize, stream: usize, blocks: usize, bytes: u64) {
        for n in 0..blocks {
            self.free(pick.wrapping_add(n * 31), FreeHow::Drop, false);
            self.alloc(stream, 1 + (bytes + n as u64 * 997) % (4 * bytes), 0, false);
        }
    }

    pub(super) fn free_wrong(&self, pick: usize) {
        let Some(at) = self.blocks.pick(pick) else { return };
        let live = &self.blocks.0[at];
        let wrong = if matches!(live.handle, Handle::Raw) { live.ptr.offset(512) } else { live.ptr };
        let raw_elsewhere = |other: &Live| matches!(other.handle, Handle::Raw) && other.ptr == wrong;
        if wrong.0 != 0 && !self.blocks.0.iter().any(raw_elsewhere) {
            let refused = self.allocator.free_raw(wrong);
            assert!(matches!(refused, Err(AllocError::InvalidPointer { .. })), "{refused:?}");
        }
    }

    /// Destroys a stream, after the allocator knows of all its work, and makes another one.
    pub(super) fn replace_stream(&mut self, at: usize, blocking: bool) {
        let made = self.device.stream_with(StreamFlags { non_blocking: !blocking, priority: 0 });
        let Some(new) = self.allows(made) else { return };
        if at >= 4 || at >= self.streams.len() {
            if self.streams.len() < 6 {
                self.streams.push(new);
            }
            return;
        }
        let gone = self.streams[at.max(2)].id();
        let mut blocks = std::mem::take(&mut self.blocks.0);
        let concerned = |live: &Live| live.own == gone || live.uses.iter().any(|used| used.stream == gone);
        blocks.iter_mut().filter(|live| concerned(live)).for_each(|live| self.settle(live));
        for used in blocks.iter_mut().flat_map(|live| &mut live.uses) {
            used.is_behind |= used.stream == gone;
        }
        self.blocks.0 = blocks;
        self.streams[at.max(2)] = new;
    }
}
