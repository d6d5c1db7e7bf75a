//! Pinned memory as values of any type.

use std::time::Duration;

use aquifer_device::{Device, RequestError};
use aquifer_sim::{SimConfig, SimDriver};
use aquifer_transfer::PinnedConfig;
use bytemuck::Pod;

use super::PinnedPool;
use crate::error::Error;
use crate::transfer::Transfer;

fn pool() -> PinnedPool {
    PinnedPool::new(&Device::new(SimDriver::new(SimConfig::default())), PinnedConfig::default()).unwrap()
}

/// No bytes, bytes that start anywhere, and elements of any alignment.
#[test]
fn lengths_and_alignments() {
    #[derive(Clone, Copy)]
    #[repr(C, align(8192))]
    struct Aligned([u8; 8192]);
    #[allow(unsafe_code, reason = "a plain type of unusual alignment")]
    // SAFETY: bytes without padding, all of which may have any value.
    unsafe impl bytemuck::Zeroable for Aligned {}
    #[allow(unsafe_code, reason = "a plain type of unusual alignment")]
    // SAFETY: bytes without padding, all of which may have any value.
    unsafe impl Pod for Aligned {}

    let pool = pool();
    let mut empty = pool.alloc::<u64>(0).unwrap();
    assert!(empty.is_empty() && empty.read().unwrap().is_empty() && empty.write().unwrap().is_empty());
    assert_eq!(pool.alloc::<()>(1_000).unwrap().read().unwrap().len(), 1_000);
    let small = pool.alloc::<u8>(1).unwrap();
    let mut aligned = pool.alloc_zeroed::<Aligned>(3).unwrap();
    assert!(aligned.as_slice().part().ptr().0.is_multiple_of(8192));
    aligned.write().unwrap()[2].0[8191] = 1;
    assert_eq!(aligned.slice(2..).as_bytes().slice(8191..).read().unwrap(), [1]);
    let error = pool.alloc::<u64>(usize::MAX / 4).unwrap_err();
    assert!(matches!(error, Error::Request(RequestError::LengthOverflow { size: 8, .. })), "{error}");
    let error = pool.alloc::<u8>(1 << 62).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    drop((small, aligned, empty));
    assert_eq!(pool.stats().active_bytes.current, 0);
}

#[test]
fn views_stay_inside_and_casts_are_checked() {
    let pool = pool();
    let mut buffer = pool.alloc_from(&[1_u16, 2, 3, 4, 5]).unwrap();
    #[allow(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = buffer.try_slice(3..2);
    for refused in [buffer.try_slice(2..6), buffer.try_slice(..=5), reversed, buffer.try_slice(6..)] {
        assert!(matches!(refused.unwrap_err(), Error::Request(RequestError::OutOfBounds { len: 5, .. })));
    }
    assert!(buffer.as_slice_mut().split_at(6).is_err());
    assert!(buffer.as_slice().cast::<u32>().is_err(), "10 bytes are no whole number of u32");
    assert!(buffer.slice(1..).cast::<u32>().is_err(), "not aligned");
    assert!(buffer.slice(1..).cast::<()>().is_err());
    assert_eq!(buffer.slice(2..4).cast::<[u16; 2]>().unwrap().read().unwrap(), [[3, 4]]);
    buffer.slice_mut(..2).cast::<u32>().unwrap().write().unwrap()[0] = 0;
    assert_eq!(buffer.read().unwrap(), [0, 0, 3, 4, 5]);
    assert_eq!(buffer.as_bytes_mut().bytes(), 10);
}

/// The number of looks, a millisecond apart.
const LOOKS: u32 = 5000;

/// Asserts that no pinned memory is in use except for the staging ring's. A thread that
/// extends the ring has memory for a moment that the ring does not count yet.
pub(crate) fn assert_unused(transfer: &Transfer) {
    let in_use = || {
        transfer.pinned().empty_cache().unwrap();
        let ring = transfer.staging_stats();
        transfer.pinned().stats().active_bytes.current.abs_diff(ring.chunks * ring.chunk_bytes)
    };
    for _ in 0..LOOKS {
        if in_use() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("{} bytes of pinned memory are in use", in_use());
}
