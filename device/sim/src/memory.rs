//! Physical memory of the device: real bytes, held sparsely.
//!
//! A [`Store`] is one piece of physical memory. It holds bytes in pages where single bytes were
//! written, and fills (byte value by range) where memory was set; anything else is poison. So a
//! fill of any size costs one entry, and a device costs the host memory only for the bytes that
//! programs write: a store that was never written to is three words.
//!
//! Invariants: where a page exists it alone counts, and fills below it mean nothing. `used` is the
//! sum of the sizes of all stores, and never exceeds the capacity.

use std::collections::BTreeMap;
use std::ops::Range;

use aquifer_device::{Code, MemoryUsers, ProcessMemory};

use crate::handle::HandleTable;
use crate::interval::IntervalMap;
use crate::refused::{Answer, Refused};

/// The value of bytes that were never written. Recognisable, so that bugs show.
pub(crate) const POISON: u8 = 0xCD;

const PAGE: u64 = 16 << 10;
const PAGE_BYTES: usize = 16 << 10;

/// A piece of a store's content.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    Bytes(Box<[u8]>),
    Fill(u8, u64),
}

impl Content {
    fn bytes(&self) -> u64 {
        match self {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::Fill(_, bytes) => *bytes,
        }
    }
}

/// One piece of physical memory with its content.
#[derive(Debug)]
struct Store {
    bytes: u64,
    written: Option<Box<Written>>,
}

/// The bytes written to a store.
#[derive(Debug, Default)]
struct Written {
    pages: BTreeMap<u64, Box<[u8]>>,
    fills: IntervalMap<u8>,
}

/// The content of a store that was never written to.
static NOTHING: Written = Written { pages: BTreeMap::new(), fills: IntervalMap::new() };

impl Store {
    fn written(&self) -> &Written {
        self.written.as_deref().unwrap_or(&NOTHING)
    }

    fn written_mut(&mut self) -> &mut Written {
        self.written.get_or_insert_default()
    }
}

fn within(page: u64, range: &Range<u64>) -> (Range<u64>, Range<usize>) {
    let start = page * PAGE;
    let piece = range.start.max(start)..range.end.min(start + PAGE);
    (piece.clone(), small(piece.start - start)..small(piece.end - start))
}

/// A length that is known to fit a page or a host buffer.
fn small(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

impl Written {
    fn render(&self, range: Range<u64>, into: &mut [u8]) {
        into.fill(POISON);
        for (piece, &value) in self.fills.overlapping(range.clone()) {
            into[small(piece.start - range.start)..small(piece.end - range.start)].fill(value);
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let range = offset..offset + into.len() as u64;
        let mut at = offset;
        while at < range.end {
            let (piece, inside) = within(at / PAGE, &range);
            let target = &mut into[small(piece.start - offset)..small(piece.end - offset)];
            match self.pages.get(&(at / PAGE)) {
                Some(page) => target.copy_from_slice(&page[inside]),
                None => self.render(piece.clone(), target),
            }
            at = piece.end;
        }
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) {
        let range = offset..offset + bytes.len() as u64;
        let mut at = offset;
        while at < range.end {
            let index = at / PAGE;
            let (piece, inside) = within(index, &range);
            if !self.pages.contains_key(&index) {
                let mut page = vec![POISON; PAGE_BYTES].into_boxed_slice();
                self.render(index * PAGE..(index + 1) * PAGE, &mut page);
                self.pages.insert(index, page);
            }
            if let Some(page) = self.pages.get_mut(&index) {
                page[inside].copy_from_slice(&bytes[small(piece.start - offset)..small(piece.end - offset)]);
            }
            at = piece.end;
        }
    }

    fn fill(&mut self, range: Range<u64>, value: u8) {
        if range.is_empty() {
            return;
        }
        let indices: Vec<u64> =
            self.pages.range(range.start / PAGE..=(range.end - 1) / PAGE).map(|(&i, _)| i).collect();
        for index in indices {
            let (piece, inside) = within(index, &range);
            if piece.end - piece.start == PAGE {
                self.pages.remove(&index);
            } else if let Some(page) = self.pages.get_mut(&index) {
                page[inside].fill(value);
            }
        }
        match value {
            POISON => self.fills.remove(range),
            _ => self.fills.insert(range, value),
        }
    }

    /// The content from `offset` on, up to `end` or where its kind changes.
    fn content(&self, offset: u64, end: u64) -> Content {
        let index = offset / PAGE;
        let (piece, inside) = within(index, &(offset..end));
        if let Some(page) = self.pages.get(&index) {
            return Content::Bytes(page[inside].into());
        }
        let next_page = self.pages.range(index..).next().map_or(end, |(&index, _)| index * PAGE);
        debug_assert!(next_page >= piece.end);
        let (value, until) = self.fills.at(offset, end.min(next_page));
        Content::Fill(value.copied().unwrap_or(POISON), until - offset)
    }
}

/// Names a store while there is memory in it.
pub(crate) type StoreId = u64;

/// A contiguous part of a store, as one piece of a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) store: StoreId,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// Bytes that the driver keeps although nothing uses them, until it is asked to give them back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Kept {
    /// By its stream-ordered pool.
    pub(crate) pool: u64,
    /// For graphs with allocations of their own.
    pub(crate) graphs: u64,
}

/// All physical memory of the device.
#[derive(Debug)]
pub(crate) struct Memory {
    total: u64,
    other: u64,
    /// Bytes that the driver keeps, unused.
    pub(crate) kept: Kept,
    used: u64,
    stores: HandleTable<Store>,
}

impl Memory {
    pub(crate) fn new(total: u64, other: u64) -> Self {
        Memory { total, other, kept: Kept::default(), used: 0, stores: HandleTable::new(0) }
    }

    /// Bytes that can still be given out.
    pub(crate) fn free(&self) -> u64 {
        self.total.saturating_sub(self.other).saturating_sub(self.own())
    }

    /// Bytes of this program, and those that the driver keeps for it.
    fn own(&self) -> u64 {
        self.used.saturating_add(self.kept.pool).saturating_add(self.kept.graphs)
    }

    /// This program, and the other process, which has no id.
    pub(crate) fn users(&self) -> MemoryUsers {
        let other = self.other.min(self.total.saturating_sub(self.own()));
        let others = (other > 0).then(|| ProcessMemory::new(None, other)).into_iter().collect();
        let mut users = MemoryUsers::default();
        (users.own, users.others, users.driver) = (Some(self.own()), others, Some(0));
        users
    }

    /// Bytes of the device.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes held by this program.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    pub(crate) fn set_other(&mut self, bytes: u64) {
        self.other = bytes;
    }

    /// Takes `bytes` of memory from the device, which may hold at most `limit`.
    pub(crate) fn create(&mut self, bytes: u64, limit: u64) -> Answer<StoreId> {
        let free = self.free().min(limit.saturating_sub(self.used));
        if bytes > free {
            let Memory { total, .. } = self;
            let detail = format!("{bytes} bytes asked for, {free} of {total} free on the device");
            return Err(Refused::new(Code::OUT_OF_MEMORY, detail));
        }
        self.used += bytes;
        Ok(self.stores.insert(Store { bytes, written: None }))
    }

    /// Gives memory back to the device.
    pub(crate) fn destroy(&mut self, store: StoreId) {
        if let Some(store) = self.stores.remove(store) {
            self.used -= store.bytes;
        }
    }

    /// Reads the pieces one after the other.
    pub(crate) fn read(&self, pieces: &[Piece], mut into: &mut [u8]) {
        for piece in pieces {
            let (now, later) = into.split_at_mut(small(piece.bytes).min(into.len()));
            if let Some(store) = self.stores.get(piece.store) {
                store.written().read(piece.offset, now);
            }
            into = later;
        }
    }

    /// Writes the pieces one after the other.
    pub(crate) fn write(&mut self, pieces: &[Piece], mut bytes: &[u8]) {
        for piece in pieces {
            let (now, later) = bytes.split_at(small(piece.bytes).min(bytes.len()));
            if let Some(store) = self.stores.get_mut(piece.store) {
                store.written_mut().write(piece.offset, now);
            }
            bytes = later;
        }
    }

    /// Fills the pieces with one byte value.
    pub(crate) fn fill(&mut self, pieces: &[Piece], value: u8) {
        for piece in pieces {
            if let Some(store) = self.stores.get_mut(piece.store) {
                store.written_mut().fill(piece.offset..piece.offset + piece.bytes, value);
            }
        }
    }

    /// Copies pieces to pieces of the same total length, fills as fills.
    pub(crate) fn copy(&mut self, to: &[Piece], from: &[Piece]) {
        let contents = self.contents(from);
        self.put(to, &contents);
    }

    /// The contents of the pieces, one after the other, fills as fills.
    pub(crate) fn contents(&self, pieces: &[Piece]) -> Vec<Content> {
        let mut contents = Vec::new();
        for piece in pieces {
            let Some(store) = self.stores.get(piece.store) else { continue };
            let (mut at, end) = (piece.offset, piece.offset + piece.bytes);
            while at < end {
                let content = store.written().content(at, end);
                at += content.bytes();
                contents.push(content);
            }
        }
        contents
    }

    /// Puts contents into pieces of the same total length.
    pub(crate) fn put(&mut self, pieces: &[Piece], contents: &[Content]) {
        let mut pieces = pieces.iter().copied();
        let mut left = Piece { store: 0, offset: 0, bytes: 0 };
        for content in contents {
            let mut done = 0;
            while done < content.bytes() {
                if left.bytes == 0 {
                    let Some(next) = pieces.next() else { return };
                    left = next;
                }
                let bytes = left.bytes.min(content.bytes() - done);
                if let Some(store) = self.stores.get_mut(left.store) {
                    match content {
                        Content::Bytes(all) => {
                            store.written_mut().write(left.offset, &all[small(done)..small(done + bytes)])
                        }
                        Content::Fill(value, _) => store.written_mut().fill(left.offset..left.offset + bytes, *value),
                    }
                }
                left = Piece { offset: left.offset + bytes, bytes: left.bytes - bytes, ..left };
                done += bytes;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn behaves_like_bytes(
            steps in prop::collection::vec((0u8..3, 0usize..40_000, 1usize..30_000, any::<u8>()), 1..20),
        ) {
            const SIZE: usize = 70_000;
            let mut memory = Memory::new(1 << 20, 0);
            // Two stores back one range, so that pieces are crossed as well.
            let first = memory.create(33_000, u64::MAX).unwrap();
            let second = memory.create(SIZE as u64 - 33_000, u64::MAX).unwrap();
            let pieces = |offset: usize, length: usize| {
                let (start, end, cut) = (offset as u64, (offset + length) as u64, 33_000u64);
                let mut pieces = Vec::new();
                if start < cut {
                    pieces.push(Piece { store: first, offset: start, bytes: end.min(cut) - start });
                }
                if end > cut {
                    pieces.push(Piece { store: second, offset: start.max(cut) - cut, bytes: end - start.max(cut) });
                }
                pieces
            };
            let mut model = vec![POISON; SIZE];
            for (what, offset, length, value) in steps {
                match what {
                    0 => {
                        memory.fill(&pieces(offset, length), value);
                        model[offset..offset + length].fill(value);
                    }
                    1 => {
                        let byte = |i: usize| value.wrapping_add(u8::try_from(i % 251).unwrap());
                        let bytes: Vec<u8> = (0..length).map(byte).collect();
                        memory.write(&pieces(offset, length), &bytes);
                        model[offset..offset + length].copy_from_slice(&bytes);
                    }
                    _ => {
                        let length = length.min(20_000);
                        let (from, to) = if value % 2 == 0 { (offset, 45_000) } else { (45_000, offset.min(25_000)) };
                        let from = from.min(if value % 2 == 0 { 25_000 } else { from });
                        if value % 4 < 2 {
                            memory.copy(&pieces(to, length), &pieces(from, length));
                        } else {
                            let contents = memory.contents(&pieces(from, length));
                            memory.put(&pieces(to, length), &contents);
                        }
                        model.copy_within(from..from + length, to);
                    }
                }
            }
            let mut bytes = vec![0; SIZE];
            memory.read(&pieces(0, SIZE), &mut bytes);
            prop_assert!(bytes == model);
        }
    }
}
