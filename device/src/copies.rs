//! Copies of more than one range: rows of a matrix, and many copies at once.

use std::ops::Range;

use crate::driver::{DevicePtr, HostPtr};

/// One end of a copy, where its bytes begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// Device memory.
    Device(DevicePtr),
    /// Page-locked host memory that the driver allocated or registered. Ordinary memory is refused: such a copy would silently
    /// wait.
    Host(HostPtr),
}

impl CopyEnd {
    /// The place `bytes` further on; `None` beyond the last address.
    pub(crate) fn further(self, bytes: u64) -> Option<CopyEnd> {
        Some(match self {
            CopyEnd::Device(mut ptr) => {
                ptr.0 = ptr.0.checked_add(bytes)?;
                CopyEnd::Device(ptr)
            }
            CopyEnd::Host(mut ptr) => {
                ptr.0 = ptr.0.checked_add(usize::try_from(bytes).ok()?)?;
                CopyEnd::Host(ptr)
            }
        })
    }
}

/// Rows to be copied, of `width` bytes each. One end at least must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy2d {
    /// Where the first row goes.
    pub dst: CopyEnd,
    /// From the start of a row to the start of the next in bytes, at least `width`.
    pub dst_pitch: u64,
    /// Where the first row is.
    pub src: CopyEnd,
    /// From the start of a row to the start of the next in bytes, at least `width`.
    pub src_pitch: u64,
    /// Length of a row in bytes.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

/// One of many copies. One end at least must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPart {
    /// Where the bytes go.
    pub dst: CopyEnd,
    /// Where they are.
    pub src: CopyEnd,
    /// How many.
    pub bytes: u64,
}

/// A range that a copy touches.
#[derive(Clone, Debug)]
pub(crate) struct Touched {
    pub(crate) host: bool,
    pub(crate) range: Range<u64>,
    pub(crate) writes: bool,
}

/// The first address that one of the copies writes and another, or itself, touches.
pub(crate) fn first_overlap(mut touched: Vec<Touched>) -> Option<u64> {
    touched.retain(|touched| !touched.range.is_empty());
    touched.sort_unstable_by_key(|touched| (touched.host, touched.range.start));
    let (mut host, mut read_until, mut written_until) = (false, 0, 0);
    for touched in touched {
        if host != touched.host {
            (host, read_until, written_until) = (touched.host, 0, 0);
        }
        let against = if touched.writes { read_until.max(written_until) } else { written_until };
        if touched.range.start < against {
            return Some(touched.range.start);
        }
        let until = if touched.writes { &mut written_until } else { &mut read_until };
        *until = touched.range.end.max(*until);
    }
    None
}
