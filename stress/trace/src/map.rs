//! What lies where in the memory of a device.

use aquifer::{Allocator, Error, Stream};
use aquifer_allocator::snapshot::BlockState;

/// The use of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// In a live block.
    Live,
    /// Given back, but still in use by a stream.
    Waiting,
    /// Free in the cache.
    Free,
    /// Not taken from the device.
    Device,
    /// Held by others.
    Others,
}

/// A piece of memory with one use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its size.
    pub bytes: u64,
    /// Its use.
    pub is: Use,
    /// The number of its stream in the program.
    pub stream: u16,
    /// Whether a segment starts with it.
    pub starts: bool,
    /// The part of a free piece that its allocator can move to where a request needs it.
    pub movable: u64,
}

/// Sums over the memory that is held.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Figures {
    pub live: u64,
    pub free: u64,
    pub waiting: u64,
    /// The part of `free` that can move.
    pub movable: u64,
    /// The largest piece of free memory, and the bytes of the map before it.
    pub largest_free: u64,
    pub largest_free_at: u64,
    pub segments: u64,
}

/// The memory of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Map {
    /// In the order of addresses: the segments, then the rest of the device.
    pub pieces: Vec<Piece>,
    /// Their bytes.
    pub total: u64,
}

/// Streams from this number on look alike in a row.
const STREAMS: usize = 5;

impl Map {
    /// The present memory of the allocator's device, whose streams a program has numbered.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn of(allocator: &Allocator, streams: &[Stream]) -> Result<Map, Error> {
        let memory = allocator.device().memory_info()?;
        let granule = allocator.granule_bytes();
        let mut pieces = Vec::new();
        for segment in allocator.snapshot().segments {
            let stream = streams.iter().position(|stream| stream.id() == segment.stream).unwrap_or(0);
            let granule = granule.filter(|_| segment.is_expandable);
            for (index, block) in segment.blocks.iter().enumerate() {
                let is = match block.state {
                    BlockState::ActiveAllocated => Use::Live,
                    BlockState::ActivePendingFree => Use::Waiting,
                    _ => Use::Free,
                };
                let stream = u16::try_from(stream).unwrap_or(u16::MAX);
                let movable = granule.filter(|_| is == Use::Free);
                let movable = movable.map_or(0, |granule| whole_granules(block.address, block.size, granule));
                pieces.push(Piece { bytes: block.size, is, stream, starts: index == 0, movable });
            }
        }
        let mapped: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        // Granules without an address.
        let spare = allocator.memory_reserved().saturating_sub(mapped);
        if spare > 0 {
            pieces.push(Piece { bytes: spare, is: Use::Free, stream: 0, starts: true, movable: spare });
        }
        Ok(Map::new(pieces, memory.free, memory.total))
    }

    /// A map of these pieces of a device of `total` bytes, of which `free` are not taken.
    pub fn new(mut pieces: Vec<Piece>, free: u64, total: u64) -> Map {
        let reserved = pieces.iter().map(|piece| piece.bytes).sum();
        let others = total.saturating_sub(free).saturating_sub(reserved);
        for (bytes, is) in [(free, Use::Device), (others, Use::Others)] {
            pieces.push(Piece { bytes, is, stream: 0, starts: true, movable: 0 });
        }
        Map { pieces, total }
    }

    /// The memory that is not taken from the device.
    pub fn free_on_device(&self) -> u64 {
        self.pieces.iter().filter(|piece| piece.is == Use::Device).map(|piece| piece.bytes).sum()
    }

    /// The map without memory that is not held.
    #[must_use]
    pub fn held_only(&self) -> Map {
        let pieces: Vec<Piece> = self.held().copied().collect();
        Map { total: pieces.iter().map(|piece| piece.bytes).sum(), pieces }
    }

    /// The pieces of the memory that is held.
    fn held(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter().filter(|piece| !matches!(piece.is, Use::Device | Use::Others))
    }

    /// Sums over the memory that is held.
    pub fn figures(&self) -> Figures {
        let (mut figures, mut at) = (Figures::default(), 0);
        for piece in self.held() {
            figures.segments += u64::from(piece.starts);
            figures.movable += piece.movable;
            match piece.is {
                Use::Live => figures.live += piece.bytes,
                Use::Waiting => figures.waiting += piece.bytes,
                _ => {
                    figures.free += piece.bytes;
                    if piece.bytes > figures.largest_free {
                        (figures.largest_free, figures.largest_free_at) = (piece.bytes, at);
                    }
                }
            }
            at += piece.bytes;
        }
        figures
    }

    /// The bytes of segments of which nothing is in use and those that can move, and the free pieces
    /// of other segments without what can move.
    pub fn unused(&self) -> (u64, Vec<u64>) {
        let held: Vec<&Piece> = self.held().collect();
        let (mut unused, mut pieces) = (0, Vec::new());
        for segment in held.chunk_by(|_, next| !next.starts) {
            let free = segment.iter().filter(|piece| piece.is == Use::Free);
            if segment.iter().all(|piece| piece.is == Use::Free) {
                unused += free.map(|piece| piece.bytes).sum::<u64>();
            } else {
                unused += segment.iter().map(|piece| piece.movable).sum::<u64>();
                pieces.extend(free.map(|piece| piece.bytes - piece.movable).filter(|&bytes| bytes > 0));
            }
        }
        (unused, pieces)
    }

    /// The memory that is held, as a character for each `cell` bytes: `.` is free, `~` waits for a
    /// stream, `_` is not taken, and a letter is live. Its number from A on is four times the
    /// stream that has most there, at most `STREAMS`, plus 0 to 3 for the live part: up to a
    /// quarter, up to a half, less than 15 sixteenths, or more. Memory that is free on the device
    /// is not shown.
    pub fn row(&self, cell: u64, columns: usize) -> String {
        let mut row = String::with_capacity(columns);
        let mut pieces = self.held().copied();
        let mut piece = pieces.next();
        for _ in 0..columns {
            let (mut live, mut waiting, mut room) = ([0; STREAMS + 1], 0, cell);
            while let Some(at) = &mut piece
                && room > 0
            {
                let part = at.bytes.min(room);
                match at.is {
                    Use::Live => live[usize::from(at.stream).min(STREAMS)] += part,
                    Use::Waiting => waiting += part,
                    _ => {}
                }
                (at.bytes, room) = (at.bytes - part, room - part);
                if at.bytes == 0 {
                    piece = pieces.next();
                }
            }
            let (held, sum) = (cell - room, live.iter().sum::<u64>());
            let stream = (0..live.len()).rev().max_by_key(|&stream| live[stream]).unwrap_or(0);
            let level = match sum {
                _ if sum >= held - held / 16 => 3,
                _ if sum > held / 2 => 2,
                _ if sum > held / 4 => 1,
                _ => 0,
            };
            row.push(match () {
                () if held == 0 => '_',
                () if sum == 0 && waiting > 0 => '~',
                () if sum == 0 => '.',
                () => char::from(b'A' + u8::try_from(4 * stream).unwrap_or(0) + level),
            });
        }
        row
    }
}

/// The bytes of whole granules in a piece of memory.
pub(crate) fn whole_granules(start: u64, bytes: u64, granule: u64) -> u64 {
    let end = start.saturating_add(bytes);
    (end - end % granule).saturating_sub(start.checked_next_multiple_of(granule).unwrap_or(end))
}

#[cfg(test)]
mod tests {
    use aquifer_allocator::Config;
    use aquifer_device::Device;
    use aquifer_sim::{SimConfig, SimDriver};

    use super::*;

    #[test]
    fn a_row_tells_streams_and_how_much_is_live() {
        let piece = |bytes, is, stream, starts| Piece { bytes, is, stream, starts, movable: 0 };
        let map = Map::new(
            vec![
                piece(20, Use::Live, 0, true),
                piece(3, Use::Live, 1, true),
                piece(17, Use::Free, 1, false),
                piece(5, Use::Live, 9, true),
                piece(7, Use::Waiting, 9, false),
                piece(4, Use::Waiting, 9, false),
            ],
            40,
            100,
        );
        // Full; less than a half and nothing of stream 1; half of stream 9, waiting; a last part.
        assert_eq!(map.row(10, 8), "DDF.V~__");
        let (largest_free, largest_free_at) = (17, 23);
        let figures =
            Figures { live: 28, free: 17, waiting: 11, movable: 0, largest_free, largest_free_at, segments: 3 };
        assert_eq!(map.figures(), figures);
        assert_eq!(Map::new(Vec::new(), 0, 0).row(10, 2), "__");
    }

    #[test]
    fn whole_granules_that_are_free_can_move() {
        let unused = |options| {
            let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
            let allocator = Allocator::new(&device, Config::parse(options).unwrap()).unwrap();
            let alloc = |kib: u64| allocator.alloc_bytes(kib << 10, device.default_stream()).unwrap();
            let blocks = [alloc(3 << 10), alloc(18 << 10), alloc(3 << 10)];
            let [_first, freed, _last] = blocks;
            drop(freed);
            let map = Map::of(&allocator, &[]).unwrap();
            (map.figures(), map.unused())
        };
        // 18 MiB from 3 MiB on have eight granules of 2 MiB.
        let (mapped, (free, pieces)) = unused("");
        assert!((16 << 20..=mapped.free).contains(&mapped.movable), "{mapped:?}");
        assert_eq!(free + pieces.iter().sum::<u64>(), mapped.free);
        assert!(pieces.iter().all(|&left| left < 4 << 20), "{pieces:?}");
        assert_eq!(unused("backing:segments").0.movable, 0, "segments stay where they are");
    }
}
