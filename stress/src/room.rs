//! The free memory that a request could get, and its pieces.

use aquifer::{Allocator, Stream};
use aquifer_allocator::config::CrossStream;
use aquifer_allocator::snapshot::BlockState;

use crate::exit::Failure;

/// Requests are rounded up to multiples of this.
const UNIT: u64 = 512;

/// The free memory that a stream's requests could get.
///
/// The driver provides its memory at any address, and free mapped memory moves to any address, so
/// both together are one piece. Free blocks of segments that are also in use are other pieces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Room {
    /// Memory of the driver after all unused segments are released, within limit and headroom.
    pub device: u64,
    /// Free mapped memory. Parts of granules cannot move.
    pub movable: u64,
    /// Free blocks of segments that are also in use.
    pub pieces: Vec<u64>,
    /// Bytes of such blocks that only other streams can use.
    pub foreign: u64,
    /// Free memory of the device that the headroom keeps.
    pub headroom: u64,
    /// Other free memory of the device that exceeds the limit.
    pub over_limit: u64,
}

impl Room {
    /// The room for requests of `stream`.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn of(allocator: &Allocator, stream: &Stream) -> Result<Room, Failure> {
        let mut room = Room { device: allocator.device().memory_info()?.free, ..Room::default() };
        let own_only = allocator.config().cross_stream == CrossStream::Off;
        let (mut kept, mut in_segments) = (0, 0);
        for segment in allocator.snapshot().segments {
            in_segments += segment.total_size;
            let own_pool = segment.segment_pool_id == (0, 0);
            if segment.active_size == 0 && own_pool && !segment.is_expandable {
                room.device += segment.total_size;
                continue;
            }
            kept += segment.total_size;
            let free =
                segment.blocks.iter().filter(|block| block.state == BlockState::Inactive).map(|block| block.size);
            if own_pool && segment.is_expandable {
                room.movable += free.sum::<u64>();
            } else if !own_pool || (own_only && segment.stream != stream.id()) {
                room.foreign += free.sum::<u64>();
            } else {
                room.pieces.extend(free);
            }
        }
        // Granules that are not mapped.
        let spare = allocator.memory_reserved().saturating_sub(in_segments);
        room.movable += spare;
        room.headroom = allocator.headroom().min(room.device);
        room.device -= room.headroom;
        let allowed = allocator.limit().map_or(u64::MAX, |limit| limit.saturating_sub(kept + spare));
        room.over_limit = room.device.saturating_sub(allowed);
        room.device -= room.over_limit;
        Ok(room)
    }

    /// All of it, including memory that only other streams can use.
    pub fn free(&self) -> u64 {
        self.whole() + self.foreign + self.pieces.iter().sum::<u64>()
    }

    /// The memory that is available at any address.
    pub fn whole(&self) -> u64 {
        self.device + self.movable
    }

    /// The largest of the pieces that do not move.
    pub fn largest_piece(&self) -> u64 {
        self.pieces.iter().copied().max().unwrap_or(0)
    }

    /// The largest request that is served, given whether one of `bytes` is. `serves` tries others:
    /// only the allocator knows all rules of rounding, segments, granules and streams.
    ///
    /// # Errors
    /// Those of `serves`.
    pub fn largest_served(
        &self,
        bytes: u64,
        served: bool,
        mut serves: impl FnMut(u64) -> Result<bool, Failure>,
    ) -> Result<u64, Failure> {
        let units = bytes.div_ceil(UNIT);
        let (mut yes, mut no) = if served { (units, self.free() / UNIT + 1) } else { (0, units) };
        // If rules keep large blocks from smaller requests, bisection may miss the largest.
        for piece in [self.whole() / UNIT, self.largest_piece() / UNIT] {
            if yes < piece && piece < no && serves(piece * UNIT)? {
                yes = piece;
            }
        }
        while yes + 1 < no {
            let middle = yes.midpoint(no);
            *(if serves(middle * UNIT)? { &mut yes } else { &mut no }) = middle;
        }
        Ok(yes * UNIT)
    }

    /// The share of it that a request of `bytes` cannot use, 0 to 1, given the largest served
    /// request; 1 if that is smaller.
    #[expect(clippy::cast_precision_loss, reason = "a ratio to display")]
    pub fn unusable(&self, bytes: u64, largest: u64) -> f64 {
        if largest < bytes || self.free() == 0 {
            return 1.0;
        }
        let pieces = self.pieces.iter().copied().chain([self.whole()]);
        let usable = pieces.filter(|piece| *piece >= bytes).sum::<u64>().max(largest);
        1.0 - usable.min(self.free()) as f64 / self.free() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_other_streams_is_unusable() {
        let room = Room { device: 4, movable: 6, pieces: vec![20, 30], foreign: 40, ..Room::default() };
        assert_eq!((room.free(), room.whole(), room.largest_piece()), (100, 10, 30));
        for (bytes, unusable) in [(10, 0.4), (20, 0.5), (30, 0.7), (31, 1.0)] {
            assert!((room.unusable(bytes, 30) - unusable).abs() < 1e-9);
        }
        assert!((Room::default().unusable(1, 0) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn the_largest_request_is_found_by_trying() {
        let room = Room { device: 100 << 20, pieces: vec![40 << 20], ..Room::default() };
        let largest = |bytes, most: u64| {
            let served = |bytes| bytes <= most;
            room.largest_served(bytes, served(bytes), |bytes| Ok(served(bytes))).unwrap()
        };
        for most in [0, 512, 1 << 20, 99 << 20, 140 << 20] {
            for bytes in [1, 1 << 20, (50 << 20) + 7, 140 << 20] {
                assert_eq!(largest(bytes, most), if bytes <= most { most } else { most.min(bytes) / 512 * 512 });
            }
        }
        // Blocks for large requests only.
        let large_only = |bytes: u64| bytes <= 1 << 20 || (39 << 20..=40 << 20).contains(&bytes);
        assert_eq!(room.largest_served(50 << 20, false, |bytes| Ok(large_only(bytes))).unwrap(), 40 << 20);
    }
}
