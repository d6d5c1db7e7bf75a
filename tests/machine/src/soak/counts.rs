//! The counts of a soak.

use std::fmt;

use aquifer::device::DevicePtr;
use serde::Serialize;

use super::block::Compared;

/// Counts of a soak.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Counts {
    /// Operations.
    pub operations: u64,
    /// Blocks allocated.
    pub allocs: u64,
    /// Requests refused for lack of memory, after which some blocks were freed.
    pub ooms: u64,
    /// Bytes of patterns written.
    pub bytes_written: u64,
    /// Bytes of patterns compared.
    pub bytes_verified: u64,
    /// Blocks compared.
    pub blocks_verified: u64,
    /// Copies between blocks.
    pub copies: u64,
    /// Blocks that the host wrote.
    pub uploads: u64,
    /// Blocks that the host compared.
    pub downloads: u64,
    /// Blocks that were passed to another thread.
    pub handed_over: u64,
    /// Times that cached memory was released.
    pub releases: u64,
    /// The most bytes that were held from the device.
    pub peak_reserved_bytes: u64,
    /// Blocks that did not read as they were written.
    #[serde(skip)]
    pub mismatches: Vec<Mismatch>,
}

impl Counts {
    /// Adds the counts of another one; the peak is the larger.
    pub fn add(&mut self, other: Counts) {
        self.operations += other.operations;
        self.allocs += other.allocs;
        self.ooms += other.ooms;
        self.bytes_written += other.bytes_written;
        self.bytes_verified += other.bytes_verified;
        self.blocks_verified += other.blocks_verified;
        self.copies += other.copies;
        self.uploads += other.uploads;
        self.downloads += other.downloads;
        self.handed_over += other.handed_over;
        self.releases += other.releases;
        self.peak_reserved_bytes = self.peak_reserved_bytes.max(other.peak_reserved_bytes);
        self.mismatches.extend(other.mismatches);
    }
}

/// A block that did not read as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mismatch {
    /// Seed of the soak.
    pub seed: u64,
    /// The thread that found it.
    pub thread: usize,
    /// The block.
    pub compared: Compared,
    /// Words of 8 bytes that differ, in this block and others compared since the last look.
    pub words: u64,
    /// The first address that differs.
    pub first: DevicePtr,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mismatch { seed, thread, compared, words, first } = self;
        let Compared { operation, written_by, ptr, bytes } = compared;
        write!(
            f,
            "seed {seed}, operation {operation} (thread {thread}): {bytes} bytes at {ptr}, written by operation \
             {written_by}, differ from {first} on ({words} words of 8 bytes)"
        )
    }
}
