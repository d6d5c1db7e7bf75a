//! Statistics of the staging ring.

use std::time::Duration;

/// The staging ring of a [`crate::Transfer`] and what it did so far. Times are of the host's clock, added up over threads, on simulated
/// devices too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StagingStats {
    /// Bytes of a chunk; 0 before the first use.
    pub chunk_bytes: u64,
    /// Chunks that were had so far.
    pub chunks: u64,
    /// Chunks that there may be; 0 before the first use. Fewer than that are made while fewer are needed, or where memory is short.
    pub chunks_max: u64,
    /// Threads that run. They start as they are needed.
    pub threads: u64,
    /// Threads that there may be, beside those that wait for streams; 0 before the first use.
    pub threads_max: u64,
    /// Bytes that went to the device.
    pub uploaded_bytes: u64,
    /// Bytes that came from the device.
    pub downloaded_bytes: u64,
    /// Time in copies of host memory, into and out of chunks.
    pub time_copying: Duration,
    /// Time in reads of files.
    pub time_reading: Duration,
    /// Time spent waiting for a free chunk, that is, for copies to the device: where it is much, the link is what limits, and else the
    /// host or its storage.
    pub time_waiting_for_chunks: Duration,
    /// Time spent waiting for copies from the device.
    pub time_waiting_for_arrivals: Duration,
}
