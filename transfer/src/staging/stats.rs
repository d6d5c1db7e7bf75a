//! What the ring is made of, and what it did.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::crew::Crew;

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
    /// Time in copies of host memory: into and out of chunks, and between host memory ([`crate::Transfer::copy_on_host`]).
    pub time_copying: Duration,
    /// Time in reads of files.
    pub time_reading: Duration,
    /// Time spent waiting for a free chunk, that is, for copies to the device: where it is much, the link is what limits, and else the
    /// host or its storage.
    pub time_waiting_for_chunks: Duration,
    /// Time spent waiting for copies from the device.
    pub time_waiting_for_arrivals: Duration,
}

impl StagingStats {
    pub(super) fn of(crew: &Crew) -> StagingStats {
        let staff = crew.floor.staff();
        let tally = &crew.tally;
        let time = |ns: &AtomicU64| Duration::from_nanos(ns.load(Ordering::Relaxed));
        StagingStats {
            chunk_bytes: staff.chunk_bytes as u64,
            chunks: staff.chunks as u64,
            chunks_max: staff.sizes.map_or(0, |sizes| sizes.chunks as u64),
            threads: staff.threads as u64,
            threads_max: staff.sizes.map_or(0, |sizes| sizes.threads as u64),
            uploaded_bytes: tally.uploaded.load(Ordering::Relaxed),
            downloaded_bytes: tally.downloaded.load(Ordering::Relaxed),
            time_copying: time(&tally.copy_ns),
            time_reading: time(&tally.storage_ns),
            time_waiting_for_chunks: time(&tally.chunk_wait_ns),
            time_waiting_for_arrivals: time(&tally.arrival_wait_ns),
        }
    }
}
