//! Content that is made up where it is read and compared where it arrives, so that none of it is held.

use aquifer_device::fork::Mutex;
use aquifer_device::{DevicePtr, Stream};

use super::ends::{HostSource, HostTarget};
use crate::error::TransferError;
use crate::host_vec;

/// Bytes that are written to a device, or compared with what it holds, at a time.
const PART: u64 = 1 << 20;
/// Bytes that are compared at a time as they arrive.
const COMPARED: usize = 4 << 10;

/// Content of so many bytes, the same at every run and different at every place.
pub(super) struct MadeUp {
    bytes: u64,
    arrived: Mutex<Arrived>,
}

#[derive(Default)]
struct Arrived {
    bytes: u64,
    damaged: bool,
}

impl MadeUp {
    pub(super) fn new(bytes: u64) -> MadeUp {
        MadeUp { bytes, arrived: Mutex::default() }
    }

    /// Whether all of it has arrived as it is, as a target.
    pub(super) fn has_arrived(&self) -> bool {
        let arrived = self.arrived.lock();
        arrived.bytes == self.bytes && !arrived.damaged
    }

    /// Writes it to the device.
    pub(super) fn put(&self, to: DevicePtr, stream: &Stream) -> Result<(), TransferError> {
        self.parts(|offset, part| {
            fill(offset, part);
            Ok(stream.upload_blocking(to.offset(offset), part)?)
        })
    }

    /// Whether the device holds it.
    pub(super) fn is_at(&self, from: DevicePtr, stream: &Stream) -> Result<bool, TransferError> {
        let mut intact = true;
        self.parts(|offset, part| {
            stream.download_blocking(part, from.offset(offset))?;
            intact &= is_as_made(offset, part);
            Ok(())
        })?;
        Ok(intact)
    }

    /// Calls `each` with every part's offset, and room for it.
    fn parts(&self, mut each: impl FnMut(u64, &mut [u8]) -> Result<(), TransferError>) -> Result<(), TransferError> {
        let mut room = host_vec::zeroed(host_vec::len_of(PART.min(self.bytes), 1)?)?;
        let mut offset = 0;
        while offset < self.bytes {
            let left = host_vec::len_of((self.bytes - offset).min(PART), 1)?;
            each(offset, &mut room[..left])?;
            offset += left as u64;
        }
        Ok(())
    }
}

impl HostSource for MadeUp {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        fill(offset, into);
        Ok(())
    }
}

impl HostTarget for MadeUp {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), TransferError> {
        let as_made = is_as_made(offset, from);
        let mut arrived = self.arrived.lock();
        arrived.bytes += from.len() as u64;
        arrived.damaged |= !as_made;
        Ok(())
    }
}

/// Makes up the content from `offset` on.
fn fill(offset: u64, into: &mut [u8]) {
    // The first word may begin before.
    let skipped = (offset % 8) as usize;
    let (head, rest) = into.split_at_mut(into.len().min((8 - skipped) % 8));
    head.copy_from_slice(&mixed(offset / 8)[skipped..][..head.len()]);
    for (word, number) in rest.chunks_mut(8).zip(offset.div_ceil(8)..) {
        word.copy_from_slice(&mixed(number)[..word.len()]);
    }
}

fn is_as_made(mut offset: u64, content: &[u8]) -> bool {
    let mut expected = [0; COMPARED];
    content.chunks(COMPARED).all(|part| {
        let expected = &mut expected[..part.len()];
        fill(offset, expected);
        offset += part.len() as u64;
        *part == *expected
    })
}

/// Eight bytes, different for every number.
fn mixed(number: u64) -> [u8; 8] {
    (number + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_part_is_as_in_the_whole() {
        let mut whole = [0; 100];
        fill(0, &mut whole);
        for (start, end) in (0..100).flat_map(|start| (start..=100).map(move |end| (start, end))) {
            let mut part = vec![0; end - start];
            fill(start as u64, &mut part);
            assert_eq!(part, whole[start..end], "{start}..{end}");
        }
    }

    #[test]
    fn what_is_missing_or_elsewhere_has_not_arrived() {
        let mut content = vec![0; 3 * COMPARED / 2];
        fill(0, &mut content);
        let (first, second) = content.split_at(COMPARED);
        let arrive = |parts: &[(usize, &[u8])]| {
            let target = MadeUp::new(content.len() as u64);
            parts.iter().for_each(|&(offset, part)| target.write(offset as u64, part).unwrap());
            target.has_arrived()
        };
        assert!(arrive(&[(0, first), (COMPARED, second)]) && arrive(&[(COMPARED, second), (0, first)]));
        assert!(!arrive(&[(0, first)]) && !arrive(&[]));
        assert!(!arrive(&[(COMPARED / 2, first), (0, second)]));
        let mut damaged = second.to_vec();
        damaged[7] ^= 1;
        assert!(!arrive(&[(0, first), (COMPARED, &damaged)]));
    }
}
