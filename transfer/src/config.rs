//! The configuration of a runtime, and statistics of its ring.

use std::thread;
use std::time::Duration;

/// The alignment of pieces of host memory, in bytes.
pub(crate) const PAGE: usize = 4096;

/// The configuration of a runtime: its pinned memory, and the sizes of the staging ring for ordinary
/// memory and files, which by default suit a PCIe 5 link with 16 lanes.
///
/// ```
/// use aquifer::transfer::TransferConfig;
/// let config = TransferConfig::default().pinned_limit(16 << 30).chunk_bytes(2 << 20).chunks(4).threads(2);
/// assert_eq!((config.pinned_limit, config.ring_bytes_max), (Some(16 << 30), 128 << 20));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferConfig {
    /// The most bytes that the pool of pinned memory may hold from the system; `None` means no
    /// limit but the system's. A runtime's own copies of ordinary memory take from its pool, too:
    /// they fail while the caller's buffers hold all of it. The staging ring takes at most half of
    /// it.
    pub pinned_limit: Option<u64>,
    /// Bytes of a chunk of the ring, as a multiple of 4096 from 4 KiB to 1 GiB. By default 4 MiB.
    pub chunk_bytes: usize,
    /// Number of chunks, 1 to 1024. By default four more than there are threads by default. One
    /// stream never gets all of them where there are three or more.
    pub chunks: usize,
    /// Number of threads that copy, 1 to 64. By default 7, or as many as there are cores. When all
    /// of them wait for streams, more start, at most one for each stream.
    pub threads: usize,
    /// The most pinned memory that the ring takes, in bytes, besides half of the pool's limit.
    /// To stay within it, the ring has fewer chunks than configured, and rather two smaller ones
    /// than one. It takes at least 4096 bytes.
    pub ring_bytes_max: usize,
}

impl Default for TransferConfig {
    /// One chunk for each thread, three for the link, and one for other streams; at most 128 MiB
    /// are pinned.
    fn default() -> Self {
        let threads = cores().min(THREADS);
        TransferConfig {
            pinned_limit: None,
            chunk_bytes: CHUNK_BYTES,
            chunks: threads + 4,
            threads,
            ring_bytes_max: 128 << 20,
        }
    }
}

/// Bytes that a link of 55 GB/s carries in 100 µs, as a power of two: an order of magnitude more
/// time than the calls about a chunk take.
const CHUNK_BYTES: usize = 4 << 20;

/// Threads that copy 10 GB/s each, the order of magnitude of one core, and together a quarter more
/// than a link of 55 GB/s carries.
const THREADS: usize = 7;

fn cores() -> usize {
    #[cfg(test)]
    if let Some(cores) = crate::staging::cores_of_tests() {
        return cores;
    }
    thread::available_parallelism().map_or(1, usize::from)
}

impl TransferConfig {
    /// Sets [`TransferConfig::pinned_limit`].
    #[must_use]
    pub fn pinned_limit(self, bytes: u64) -> Self {
        Self { pinned_limit: Some(bytes), ..self }
    }

    /// Sets [`TransferConfig::chunk_bytes`].
    #[must_use]
    pub fn chunk_bytes(self, bytes: usize) -> Self {
        Self { chunk_bytes: bytes, ..self }
    }

    /// Sets [`TransferConfig::chunks`].
    #[must_use]
    pub fn chunks(self, chunks: usize) -> Self {
        Self { chunks, ..self }
    }

    /// Sets [`TransferConfig::threads`].
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    /// Sets [`TransferConfig::ring_bytes_max`].
    #[must_use]
    pub fn ring_bytes_max(self, bytes: usize) -> Self {
        Self { ring_bytes_max: bytes, ..self }
    }

    /// The sizes of a ring: the configured ones, within bounds.
    pub(crate) fn sizes(&self) -> Sizes {
        let most = (self.ring_bytes_max / PAGE * PAGE).max(PAGE);
        let asked = self.chunk_bytes.clamp(PAGE, CHUNK_BYTES_MAX).next_multiple_of(PAGE);
        let chunks = self.chunks.clamp(1, 1024);
        // Two chunks rather than one that is twice as large: else nothing overlaps.
        let fair = if chunks == 1 { most } else { (most / 2 / PAGE * PAGE).max(PAGE) };
        let chunk_bytes = asked.min(fair);
        Sizes {
            chunk_bytes,
            chunks: chunks.min((self.ring_bytes_max / chunk_bytes).max(1)),
            threads: self.threads.clamp(1, 64),
        }
    }
}

/// Sizes and counters of the staging ring of a [`crate::Transfer`]. Times are of the host's clock,
/// added up over threads, on virtual devices too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// Chunks that were allocated so far. There are fewer than configured while fewer are needed,
    /// or where memory is short.
    pub chunks: u64,
    /// Threads that run. They start as they are needed.
    pub threads: u64,
    /// Bytes that went to the device.
    pub uploaded_bytes: u64,
    /// Bytes that came from the device.
    pub downloaded_bytes: u64,
    /// Time in copies of host memory, into and out of chunks.
    pub time_copying: Duration,
    /// Time in reads of files.
    pub time_reading: Duration,
    /// Time spent waiting for a free chunk, that is, for copies to the device. If it is long, the
    /// link limits; else the host or its storage does.
    pub time_waiting_for_chunks: Duration,
    /// Time spent waiting for copies from the device.
    pub time_waiting_for_arrivals: Duration,
}

const CHUNK_BYTES_MAX: usize = 1 << 30;

/// The sizes of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// A multiple of [`PAGE`].
    pub(crate) chunk_bytes: usize,
    /// At least 1.
    pub(crate) chunks: usize,
    /// At least 1.
    pub(crate) threads: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_and_chunks_follow_the_cores() {
        let (config, threads) = (TransferConfig::default(), cores().min(7));
        assert_eq!(config.sizes(), Sizes { chunk_bytes: 4 << 20, chunks: threads + 4, threads });
    }

    #[test]
    fn configured_sizes_count_within_bounds() {
        let config = TransferConfig::default();
        assert_eq!(
            config.chunk_bytes(5000).chunks(0).threads(1000).sizes(),
            Sizes { chunk_bytes: 8192, chunks: 1, threads: 64 }
        );
        assert_eq!(config.chunk_bytes(0).sizes().chunk_bytes, 4096);
        assert_eq!(config.chunk_bytes(usize::MAX).ring_bytes_max(usize::MAX).sizes().chunk_bytes, 1 << 30);
    }

    #[test]
    fn the_ring_takes_no_more_memory_than_it_may() {
        for bytes_max in [0, 1, 4096, 10_000, 1 << 20, 9 << 20, 40 << 20] {
            for chunks in [1, 2, 8] {
                let sizes = TransferConfig::default().ring_bytes_max(bytes_max).chunks(chunks).sizes();
                assert!(sizes.chunk_bytes * sizes.chunks <= bytes_max.max(4096), "{bytes_max}: {sizes:?}");
                assert!(sizes.chunk_bytes.is_multiple_of(4096) && sizes.chunks >= 1, "{bytes_max}: {sizes:?}");
            }
        }
        assert_eq!(TransferConfig::default().ring_bytes_max(9 << 20).sizes().chunks, 2);
    }
}
