//! Statistics of the staging ring.

use std::time::Duration;

/// Sizes and counters of the staging ring of a [`crate::Transfer`]. Times are of the host's clock,
/// added up over threads, on simulated devices too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Bytes of a chunk; 0 before the first use.
    pub chunk_bytes: u64,
    /// Chunks that were allocated so far.
    pub chunks: u64,
    /// The most chunks; 0 before the first use. There are fewer while fewer are needed, or where
    /// memory is short.
    pub chunks_max: u64,
    /// Threads that run. They start as they are needed.
    pub threads: u64,
    /// The most threads, without those that wait for streams; 0 before the first use.
    pub threads_max: u64,
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
