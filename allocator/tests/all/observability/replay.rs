//! Replaying history backwards from the segments of its snapshot, as the memory viewer does.

use std::collections::BTreeMap;

use aquifer_allocator::Action;
use aquifer_allocator::snapshot::{BlockState, Snapshot, TraceEntry};

/// An active block while history is undone.
#[derive(Debug)]
struct Active {
    requested: u64,
    free_requested: bool,
}

/// A segment, or a part of a mapped range, while history is undone.
#[derive(Debug)]
struct Held {
    bytes: u64,
    pool: (u64, u64),
    is_mapped: bool,
}

/// What is there before the entries undone so far.
#[derive(Debug, Default)]
struct Before {
    blocks: BTreeMap<u64, Active>,
    segments: BTreeMap<u64, Held>,
}

impl Before {
    fn of(snapshot: &Snapshot) -> Before {
        let mut before = Before::default();
        for segment in &snapshot.segments {
            let (bytes, pool) = (segment.total_size, segment.segment_pool_id);
            let held = Held { bytes, pool, is_mapped: segment.is_expandable };
            before.segments.insert(segment.address, held);
        }
        for (_, block) in snapshot.blocks().filter(|(_, block)| block.state.is_active()) {
            let free_requested = block.state == BlockState::ActivePendingFree;
            before.blocks.insert(block.address, Active { requested: block.requested_size, free_requested });
        }
        before
    }

    /// The segment or mapped part around an address.
    fn segment_of(&self, addr: u64) -> Option<(u64, &Held)> {
        let (&start, held) = self.segments.range(..=addr).next_back()?;
        (addr < start + held.bytes).then_some((start, held))
    }

    /// Whether a range lies in a segment of the pool, or in mapped parts side by side.
    fn check_inside(&self, addr: u64, bytes: u64, pool: (u64, u64)) -> Result<(), String> {
        let mut at = addr;
        loop {
            let (start, held) = self.segment_of(at).ok_or("no segment around it, or it reaches beyond")?;
            check(held.pool == pool, "in a segment of another pool")?;
            at = start + held.bytes;
            if addr + bytes <= at {
                return Ok(());
            }
            check(held.is_mapped, "reaches beyond its segment")?;
        }
    }

    /// Takes a range out of the mapped parts.
    fn unmap(&mut self, addr: u64, bytes: u64, pool: (u64, u64)) -> Result<(), String> {
        self.check_inside(addr, bytes, pool)?;
        let end = addr + bytes;
        for at in [addr, end] {
            let Some((start, &Held { bytes, pool, is_mapped })) = self.segment_of(at) else { continue };
            if start < at {
                self.segments.insert(start, Held { bytes: at - start, pool, is_mapped });
                self.segments.insert(at, Held { bytes: start + bytes - at, pool, is_mapped });
            }
        }
        let parts: Vec<u64> = self.segments.range(addr..end).map(|(&start, _)| start).collect();
        for part in parts {
            let removed = self.segments.remove(&part);
            check(removed.is_some_and(|held| held.is_mapped), "a segment")?;
        }
        check(self.blocks.range(addr..end).next().is_none(), "there are blocks in it")?;
        let below = self.blocks.range(..addr).next_back();
        check(below.is_none_or(|(start, below)| start + below.requested <= addr), "a block reaches into it")
    }

    /// Adds memory that was given up.
    fn add(&mut self, entry: &TraceEntry, is_mapped: bool) -> Result<(), String> {
        let addr = entry.addr.unwrap_or_default();
        check(self.segment_of(addr).is_none(), "it is there")?;
        check(self.segments.range(addr..addr + entry.size).next().is_none(), "overlaps another")?;
        self.segments.insert(addr, Held { bytes: entry.size, pool: entry.pool_id, is_mapped });
        Ok(())
    }

    fn undo(&mut self, entry: &TraceEntry) -> Result<(), String> {
        let addr = entry.addr.unwrap_or_default();
        match entry.action {
            Action::FreeCompleted => {
                self.check_inside(addr, entry.size, entry.pool_id)?;
                let below = self.blocks.range(..=addr).next_back();
                check(below.is_none_or(|(start, below)| start + below.requested <= addr), "overlaps the one below")?;
                let above = self.blocks.range(addr..).next();
                check(above.is_none_or(|(start, _)| addr + entry.size <= *start), "overlaps the one above")?;
                self.blocks.insert(addr, Active { requested: entry.size, free_requested: true });
            }
            Action::FreeRequested => {
                let block = self.blocks.get_mut(&addr).ok_or("no such block")?;
                check(block.free_requested, "it was not given back")?;
                check(block.requested == entry.size, "of another size")?;
                block.free_requested = false;
            }
            Action::Alloc => {
                let block = self.blocks.remove(&addr).ok_or("no such block")?;
                check(!block.free_requested, "it was given back before")?;
                check(block.requested == entry.size, "of another size")?;
                self.check_inside(addr, entry.size, entry.pool_id)?;
            }
            Action::SegmentAlloc => {
                let held = self.segments.remove(&addr).ok_or("no such segment")?;
                check(!held.is_mapped && (held.bytes, held.pool) == (entry.size, entry.pool_id), "another segment")?;
                check(self.blocks.range(addr..addr + held.bytes).next().is_none(), "there are blocks in it")?;
            }
            Action::SegmentFree => self.add(entry, false)?,
            Action::SegmentMap => self.unmap(addr, entry.size, entry.pool_id)?,
            Action::SegmentUnmap => self.add(entry, true)?,
            Action::Snapshot => {
                check(addr == 0, "with an address")?;
            }
            _ => check(entry.device_free.is_some() && entry.addr.is_none(), "without the device's free bytes")?,
        }
        Ok(())
    }
}

fn check(holds: bool, otherwise: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise.to_owned()) }
}

/// Undoes the history of a snapshot; what does not fit together is an error. Where nothing was
/// overwritten, nothing may be left before the first entry.
pub(crate) fn check_history(snapshot: &Snapshot) -> Result<(), String> {
    let mut before = Before::of(snapshot);
    for (at, entry) in snapshot.trace().iter().enumerate().rev() {
        before.undo(entry).map_err(|error| format!("entry {at} {entry:?}: {error}"))?;
    }
    let times: Vec<u64> = snapshot.trace().iter().map(|entry| entry.time_us).collect();
    check(times.is_sorted(), "times go back")?;
    if snapshot.entries_overwritten == 0 {
        check(before.blocks.is_empty() && before.segments.is_empty(), &format!("left at the start: {before:?}"))?;
    }
    Ok(())
}

/// Checks that blocks tile their segments and that a segment's sums are those of its blocks.
pub(crate) fn check_segments(snapshot: &Snapshot) -> Result<(), String> {
    let mut last_end = 0;
    for segment in &snapshot.segments {
        check(segment.address >= last_end, &format!("{segment:?} overlaps the one before"))?;
        last_end = segment.address + segment.total_size;
        let (mut at, mut allocated, mut active, mut requested) = (segment.address, 0, 0, 0);
        for block in &segment.blocks {
            check(block.address == at && block.size > 0, &format!("{block:?} does not start at {at:#x}"))?;
            at += block.size;
            let is_active = block.state.is_active();
            check(is_active || block.requested_size == 0, &format!("{block:?} is inactive"))?;
            check(block.requested_size <= block.size, &format!("{block:?} is too small"))?;
            allocated += if block.state == BlockState::ActiveAllocated { block.size } else { 0 };
            active += if is_active { block.size } else { 0 };
            requested += block.requested_size;
        }
        let sums = (segment.allocated_size, segment.active_size, segment.requested_size);
        check(at == last_end && sums == (allocated, active, requested), &format!("{segment:?}"))?;
    }
    Ok(())
}
