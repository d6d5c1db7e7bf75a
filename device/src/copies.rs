//! Descriptions of copies of more than one range: rows of a matrix, and batches of copies; and the
//! check that their ranges do not overlap.

use std::ops::Range;

use crate::driver::handles::{DevicePtr, HostPtr};

/// One end of a copy: the place of its first byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyEnd {
    /// Device memory.
    Device(DevicePtr),
    /// Pinned host memory that the driver allocated or registered. Ordinary memory is refused,
    /// because the copy would silently make the host wait.
    Host(HostPtr),
}

impl CopyEnd {
    /// The place `bytes` bytes further on; `None` beyond the last address.
    #[doc(hidden)]
    pub fn further(self, bytes: u64) -> Option<CopyEnd> {
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

/// A copy of `height` rows of `width` bytes each. At least one end must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy2d {
    /// Target of the first row.
    pub dst: CopyEnd,
    /// Pitch of the target: bytes from the start of a row to the start of the next, at least
    /// `width`.
    pub dst_pitch: u64,
    /// Source of the first row.
    pub src: CopyEnd,
    /// Pitch of the source, likewise.
    pub src_pitch: u64,
    /// Length of a row in bytes.
    pub width: u64,
    /// Number of rows.
    pub height: u64,
}

impl Copy2d {
    /// The copies of its rows, or one copy if the rows lie side by side; `None` if they go beyond
    /// the last address.
    #[doc(hidden)]
    pub fn rows(&self) -> Option<Vec<CopyPart>> {
        let Copy2d { dst, dst_pitch, src, src_pitch, width, height } = *self;
        if height == 1 || (dst_pitch == width && src_pitch == width) {
            return Some(vec![CopyPart { dst, src, bytes: width.checked_mul(height)? }]);
        }
        let row = |row: u64| {
            let (dst, src) = (dst.further(row.checked_mul(dst_pitch)?)?, src.further(row.checked_mul(src_pitch)?)?);
            Some(CopyPart { dst, src, bytes: width })
        };
        (0..height).map(row).collect()
    }
}

/// One copy of a batch. At least one end must be on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyPart {
    /// Target of the bytes.
    pub dst: CopyEnd,
    /// Source of the bytes.
    pub src: CopyEnd,
    /// Number of bytes.
    pub bytes: u64,
}

impl CopyPart {
    /// Whether no copy writes bytes that another copy, or the same one, reads or writes. Then they
    /// may be made in any order, and with one call ([`crate::Driver::copy_batch`]).
    ///
    /// ```
    /// use aquifer_device::{CopyEnd, CopyPart, DevicePtr};
    /// let copy = |dst, src| CopyPart { dst: CopyEnd::Device(DevicePtr(dst)), src: CopyEnd::Device(DevicePtr(src)), bytes: 10 };
    /// assert!(CopyPart::are_independent(&[copy(100, 0), copy(110, 5)]));
    /// assert!(!CopyPart::are_independent(&[copy(100, 0), copy(200, 109)]));
    /// assert!(!CopyPart::are_independent(&[copy(100, 91)]));
    /// ```
    pub fn are_independent(copies: &[CopyPart]) -> bool {
        first_overlap(copies.iter().flat_map(CopyPart::touched).collect()).is_none()
    }

    /// The ranges that it writes and reads.
    #[doc(hidden)]
    pub fn touched(&self) -> [Touched; 2] {
        [Touched::new(self.dst, self.bytes, true), Touched::new(self.src, self.bytes, false)]
    }
}

/// A range that a copy reads or writes.
#[derive(Clone, Debug)]
pub struct Touched {
    /// Whether it is host memory.
    pub host: bool,
    /// The range.
    pub range: Range<u64>,
    /// Whether it is written.
    pub writes: bool,
}

impl Touched {
    /// The range of `bytes` bytes at `place`, cut off at the end of the address space.
    pub fn new(place: CopyEnd, bytes: u64, writes: bool) -> Touched {
        let (host, start) = match place {
            CopyEnd::Device(ptr) => (false, ptr.0),
            CopyEnd::Host(ptr) => (true, ptr.0 as u64),
        };
        Touched { host, range: start..start.saturating_add(bytes), writes }
    }
}

/// The first address that one range writes and another range, even of the same copy, reads or
/// writes; `None` if there is none. Host and device ranges never overlap.
pub fn first_overlap(mut touched: Vec<Touched>) -> Option<u64> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn device(start: u64) -> CopyEnd {
        CopyEnd::Device(DevicePtr(start))
    }

    fn overlap(rows: (u64, u64), pitches: (u64, u64), width: u64, height: u64) -> Option<u64> {
        let (dst, src) = (device(rows.0), device(rows.1));
        let rows = Copy2d { dst, dst_pitch: pitches.0, src, src_pitch: pitches.1, width, height }.rows().unwrap();
        first_overlap(rows.iter().flat_map(CopyPart::touched).collect())
    }

    #[test]
    fn rows_may_lie_between_each_other() {
        assert_eq!(overlap((100, 150), (100, 100), 50, 4), None);
        assert_eq!(overlap((100, 500), (100, 100), 100, 4), None);
        assert_eq!(overlap((100, 149), (100, 100), 50, 4), Some(149));
        assert_eq!(overlap((100, 100), (100, 100), 50, 1), Some(100));
        // The third row of the one meets the second of the other.
        assert_eq!(overlap((100, 110), (20, 40), 10, 3), None);
        assert_eq!(overlap((100, 110), (25, 40), 10, 3), Some(150));
    }

    #[test]
    fn host_and_device_never_overlap() {
        let host = CopyEnd::Host(HostPtr(100));
        assert_eq!(first_overlap(vec![Touched::new(host, 10, true), Touched::new(device(100), 10, true)]), None);
        assert_eq!(first_overlap(vec![Touched::new(host, 0, true), Touched::new(host, 10, true)]), None);
        let twice = vec![Touched::new(device(0), 10, false), Touched::new(device(5), 10, false)];
        assert_eq!(first_overlap(twice), None);
        assert_eq!(first_overlap(vec![Touched::new(host, 10, true), Touched::new(host, 1, false)]), Some(100));
    }
}
