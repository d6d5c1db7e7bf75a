//! The ranges that copies read and write, so that copies which overlap can be refused.

use std::ops::Range;

use crate::copies::{Copy2d, Touched, first_overlap};

impl Touched {
    /// The range `bytes` bytes further on.
    fn further(&self, bytes: u64) -> Touched {
        let Range { start, end } = self.range;
        Touched { range: start.saturating_add(bytes)..end.saturating_add(bytes), ..*self }
    }
}

/// The ranges that every row of a copy reads and writes, if the two ends may overlap at all;
/// otherwise nothing. Mostly they cannot, and then no row has to be looked at, however many there
/// are.
pub(super) fn touched_rows(copy: &Copy2d) -> Vec<Touched> {
    let spanned = |place, pitch: u64, writes| {
        let bytes = pitch.saturating_mul(copy.height.saturating_sub(1)).saturating_add(copy.width);
        Touched::new(place, bytes, writes)
    };
    let (to, from) = (spanned(copy.dst, copy.dst_pitch, true), spanned(copy.src, copy.src_pitch, false));
    if first_overlap(vec![to, from]).is_none() {
        return Vec::new();
    }
    let (to, from) = (Touched::new(copy.dst, copy.width, true), Touched::new(copy.src, copy.width, false));
    let rows = 0..copy.height;
    rows.flat_map(|row| [to.further(row * copy.dst_pitch), from.further(row * copy.src_pitch)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::CopyEnd;
    use crate::driver::{DevicePtr, HostPtr};

    fn device(start: u64) -> CopyEnd {
        CopyEnd::Device(DevicePtr(start))
    }

    fn overlap(rows: (u64, u64), pitches: (u64, u64), width: u64, height: u64) -> Option<u64> {
        let (dst, src) = (device(rows.0), device(rows.1));
        first_overlap(touched_rows(&Copy2d { dst, dst_pitch: pitches.0, src, src_pitch: pitches.1, width, height }))
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
