//! What room is left: the free memory that a request could get, and in which pieces.

use aquifer_allocator::Allocator;
use aquifer_allocator::config::CrossStream;
use aquifer_allocator::snapshot::BlockState;
use aquifer_device::Stream;

use crate::exit::Failure;

/// The free memory that a stream's requests could get. The driver can give the same memory at any address, so all that it
/// has, or would have if every unused segment were given back, is one piece.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Room {
    /// What the driver would give, if every unused segment were given back first.
    pub device: u64,
    /// Free blocks of segments that are also in use.
    pub pieces: Vec<u64>,
    /// Bytes of such blocks that only other streams may use.
    pub foreign: u64,
}

impl Room {
    /// The room for requests of `stream`.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn of(allocator: &Allocator, stream: &Stream) -> Result<Room, Failure> {
        let mut room = Room { device: allocator.device().memory_info()?.free, ..Room::default() };
        let own_only = allocator.config().cross_stream == CrossStream::Off;
        let mut kept = 0;
        for segment in allocator.snapshot().segments {
            if segment.active_size == 0 && segment.segment_pool_id == (0, 0) {
                room.device += segment.total_size;
                continue;
            }
            kept += segment.total_size;
            let free =
                segment.blocks.iter().filter(|block| block.state == BlockState::Inactive).map(|block| block.size);
            if segment.segment_pool_id != (0, 0) || (own_only && segment.stream != stream.id()) {
                room.foreign += free.sum::<u64>();
            } else {
                room.pieces.extend(free);
            }
        }
        if let Some(limit) = allocator.limit() {
            room.device = room.device.min(limit.saturating_sub(kept));
        }
        Ok(room)
    }

    /// All of it, what only others may use included.
    pub fn free(&self) -> u64 {
        self.device + self.foreign + self.pieces.iter().sum::<u64>()
    }

    /// The largest piece.
    pub fn largest(&self) -> u64 {
        self.pieces.iter().copied().max().unwrap_or(0).max(self.device)
    }

    /// The share of it that a request of `bytes` cannot use, 0 to 1; 1 if there is none.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn unusable(&self, bytes: u64) -> f64 {
        let pieces = self.pieces.iter().chain([&self.device]);
        let usable: u64 = pieces.filter(|piece| **piece >= bytes).sum();
        if self.free() == 0 { 1.0 } else { 1.0 - usable as f64 / self.free() as f64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_hold_counts_as_unusable() {
        let room = Room { device: 10, pieces: vec![20, 30], foreign: 40 };
        assert_eq!((room.free(), room.largest()), (100, 30));
        for (bytes, unusable) in [(10, 0.4), (20, 0.5), (30, 0.7), (31, 1.0)] {
            assert!((room.unusable(bytes) - unusable).abs() < 1e-9);
        }
        assert!((Room::default().unusable(1) - 1.0).abs() < 1e-9);
    }
}
