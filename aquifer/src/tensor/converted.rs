//! Sources for the staging ring that convert elements while its threads read them.

use aquifer_kernels::{DType, convert_host};
use aquifer_transfer::internal::zeroed;
use aquifer_transfer::{HostSource, TransferError};

use crate::error::Error;

/// The elements of another source, converted.
pub(crate) struct Converted<S> {
    source: S,
    from: DType,
    to: DType,
}

impl<S: HostSource> Converted<S> {
    pub(crate) fn new(source: S, from: DType, to: DType) -> Converted<S> {
        Converted { source, from, to }
    }
}

impl<S: HostSource> HostSource for Converted<S> {
    fn bytes(&self) -> u64 {
        self.source.bytes() / self.from.bytes() * self.to.bytes()
    }

    fn phase(&self) -> u64 {
        self.source.phase() / self.from.bytes() * self.to.bytes()
    }

    fn is_storage(&self) -> bool {
        self.source.is_storage()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), TransferError> {
        let size = self.to.bytes();
        // Whole elements around the range.
        let (first, end) = (offset / size, (offset + into.len() as u64).div_ceil(size));
        let mut elements = zeroed(count((end - first) * self.from.bytes()))?;
        self.source.read(first * self.from.bytes(), &mut elements)?;
        let before = count(offset - first * size);
        if before == 0 && (into.len() as u64).is_multiple_of(size) {
            return convert_host(&elements, self.from, into, self.to).map_err(|error| Error::from(error).into());
        }
        let mut whole = zeroed(count((end - first) * size))?;
        convert_host(&elements, self.from, &mut whole, self.to).map_err(Error::from)?;
        into.copy_from_slice(&whole[before..before + into.len()]);
        Ok(())
    }
}

/// The length of a part of memory.
fn count(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_transfer::Owned;

    #[test]
    fn converting_a_part_agrees_with_converting_all() {
        let floats: Vec<f32> = (0..20).map(|n| n as f32 * 1.5).collect();
        let memory = Owned::new::<f32, _>(floats.clone());
        for to in [DType::F16, DType::U8, DType::F64] {
            let mut all = vec![0; 20 * count(to.bytes())];
            convert_host(bytemuck::cast_slice(&floats), DType::F32, &mut all, to).unwrap();
            let source = Converted::new(memory.part(0..80), DType::F32, to);
            assert_eq!(source.bytes(), all.len() as u64);
            for start in 0..all.len() {
                for end in start..=all.len() {
                    let mut part = vec![0; end - start];
                    source.read(start as u64, &mut part).unwrap();
                    assert_eq!(part, all[start..end]);
                }
            }
            assert!(source.read(all.len() as u64, &mut [0]).is_err());
        }
    }
}
