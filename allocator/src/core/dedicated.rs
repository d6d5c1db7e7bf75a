//! Dedicated memory: what its owners have, and what they gave up.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{DevicePtr, RawPhysical};

use crate::core::Core;
use crate::core::paged::deferred_release::DeferredRelease;
use crate::core::paged::frames::Frame;
use crate::core::paged::granules::{Owned, POOL, Purpose};
use crate::history::{Action, FREE, Subject};
use crate::size_class::PoolKind;
use crate::tags::Tag;
use crate::types::{Recipient, Request, StreamId, Use};

/// Deferred memory while the driver unmaps it.
pub(crate) struct Recycling {
    pub(crate) piece: DeferredRelease,
    pub(crate) purpose: Purpose,
    pub(crate) frames: Vec<Frame>,
}

impl Core {
    /// Takes one piece of deferred memory that is done off the list.
    pub(crate) fn begin_recycling(&mut self) -> Option<Recycling> {
        let Core { paged, streams, .. } = self;
        if !paged.sleep.allows_recycling() {
            return None;
        }
        let piece = paged.deferred_release.take_done(|stream| streams.known_done(stream))?;
        let purpose = paged.purpose_of(piece.base)?;
        let frames = paged.forget_mapped(piece.range.start, piece.range.end - piece.range.start);
        Some(Recycling { piece, purpose, frames })
    }

    /// Accounts for deferred memory after the driver unmapped it, or failed to. Returns the frames
    /// that are of no use to others, with their bytes.
    pub(crate) fn commit_recycling(&mut self, recycled: Recycling, unmapped: bool) -> Vec<(RawPhysical, u64)> {
        let Recycling { piece, purpose, frames } = recycled;
        let paged = &mut self.paged;
        let Range { start, end } = piece.range;
        if !unmapped {
            paged.put_all(start, &frames);
            paged.deferred_release.put_back(piece);
            return Vec::new();
        }
        paged.mapped_bytes[PoolKind::Large as usize] -= end - start;
        let stream = paged.owned.get(&piece.base).map_or(StreamId::default(), |owned| owned.stream);
        paged.deferred_release.forget(piece.base);
        let frames = if purpose == Purpose::Exportable {
            frames.into_iter().map(|frame| (frame.physical, end - start)).collect()
        } else {
            paged.spares.extend(frames);
            Vec::new()
        };
        self.note_mapping(Action::SegmentUnmap, Recipient { pool: POOL, stream }, start, end - start);
        self.counters.events.num_device_free += 1;
        self.account_for_granules();
        frames
    }

    /// Adds the deferred granules to those that ticks not known done keep from moving, by tick.
    pub(crate) fn add_deferred_release(&self, not_done: &mut BTreeMap<Use, u64>) {
        let ticks = self.paged.deferred_release.ticks();
        for (last_use, granules) in ticks.filter(|&(last_use, _)| !self.streams.is_done(last_use)) {
            *not_done.entry(last_use).or_default() += granules;
        }
    }

    /// Bytes in blocks that are in use, dedicated memory included.
    pub(crate) fn in_use(&self) -> u64 {
        self.paged.owned_bytes + self.heap.in_use()
    }

    /// Sets the size of an owner's part of its reservation, and notes that in statistics and
    /// history.
    pub(crate) fn set_owned(&mut self, base: u64, size: u64, requested: u64) {
        let paged = &mut self.paged;
        let Some(owned) = paged.owned.get_mut(&base) else { return };
        let before = *owned;
        (owned.size, owned.requested) = (size, requested);
        paged.owned_bytes = paged.owned_bytes - before.size + size;
        self.count_owned(before, size, requested);
        let subject = |size| Subject { addr: base, size, stream: before.stream, tag: before.tag, pool: 0 };
        if before.size > 0 {
            self.history.note(FREE, subject(before.requested));
        }
        if size > 0 {
            self.history.note(&[Action::Alloc], subject(requested));
        }
    }

    pub(crate) fn count_owned(&mut self, before: Owned, size: u64, requested: u64) {
        if before.size > 0 {
            self.counters.freed(PoolKind::Large, before.size, before.requested);
        }
        if size > 0 {
            self.counters.allocated(PoolKind::Large, size, requested);
        }
    }

    /// True if deferred memory is known done, or addresses may go back. Not while the allocator
    /// sleeps: nothing is behind the addresses then.
    pub(crate) fn is_recyclable(&mut self) -> bool {
        let Core { paged, streams, .. } = self;
        paged.sleep.allows_recycling() && paged.deferred_release.any_done(|stream| streams.known_done(stream))
    }

    /// Forgets a reservation whose owner is gone and in which no memory is mapped. Returns its
    /// addresses and length.
    pub(crate) fn take_vacant_reservation(&mut self) -> Option<(DevicePtr, u64)> {
        let paged = &mut self.paged;
        if !paged.sleep.allows_recycling() {
            return None;
        }
        let base = paged.deferred_release.take_vacant()?;
        paged.owned.remove(&base);
        Some((DevicePtr(base), paged.remove_reservation(base)))
    }

    /// Retires a range of a reservation that its owner gives up and that the streams `users` used.
    pub(crate) fn retire(&mut self, base: u64, range: Range<u64>, users: &[StreamId]) {
        let uses = users.iter().map(|&stream| self.streams.use_so_far(stream)).collect();
        if !range.is_empty() {
            self.paged.deferred_release.add(DeferredRelease { base, range, uses, was_told: true });
        }
    }

    /// Adds the reservation of a growable, in which nothing is mapped so far.
    pub(crate) fn add_growable(&mut self, base: u64, bytes: u64, stream: StreamId, tag: Tag) {
        let paged = &mut self.paged;
        paged.add_reservation(base, bytes, PoolKind::Large, Purpose::Growable);
        paged.owned.insert(base, Owned { stream, tag, ..Owned::default() });
    }

    /// Adds exportable memory, which is mapped.
    pub(crate) fn add_exportable(&mut self, request: &Request, base: u64, physical: RawPhysical) {
        let paged = &mut self.paged;
        paged.add_reservation(base, request.size, PoolKind::Large, Purpose::Exportable);
        paged.put_all(base, &[Frame::new(physical, 1)]);
        paged.mapped_bytes[PoolKind::Large as usize] += request.size;
        paged.owned.insert(base, Owned { stream: request.stream, tag: request.tag, ..Owned::default() });
        self.counters.events.num_device_alloc += 1;
        self.account_for_granules();
        self.note_mapping(Action::SegmentMap, request.recipient(), base, request.size);
        self.set_owned(base, request.size, request.requested);
    }

    /// Retires all of an owner's memory: it is gone. `users` are the streams that used it.
    pub(crate) fn end_owned(&mut self, base: u64, users: &[StreamId]) {
        let size = self.paged.owned.get(&base).map_or(0, |owned| owned.size);
        self.set_owned(base, 0, 0);
        self.retire(base, base..base + size, users);
        self.paged.deferred_release.abandon(base);
    }

    /// Takes memory that an owner gave up and that is not recycled yet, up to `end`, off the list.
    pub(crate) fn take_retired(&mut self, base: u64, end: u64) -> Vec<DeferredRelease> {
        self.paged.deferred_release.take_below(base, end)
    }

    /// Retires the memory that a failed growth got, between `from` and `end`, and what it had taken
    /// off the list.
    pub(crate) fn put_back_retired(&mut self, base: u64, mut from: u64, end: u64, taken_back: Vec<DeferredRelease>) {
        let paged = &mut self.paged;
        let known = taken_back.iter().chain(paged.deferred_release.of(base));
        let mut known: Vec<Range<u64>> = known.map(|piece| piece.range.clone()).collect();
        known.sort_by_key(|range| range.start);
        known.push(end..end);
        for next in known {
            for range in paged.held_within(&(from..next.start.min(end))) {
                paged.deferred_release.add(DeferredRelease { base, range, uses: Vec::new(), was_told: true });
            }
            from = next.end;
        }
        taken_back.into_iter().for_each(|piece| paged.deferred_release.add(piece));
    }
}
