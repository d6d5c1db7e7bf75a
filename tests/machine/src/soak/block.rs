//! Blocks of a soak, and comparisons whose result the host has not read yet.

use aquifer::device::DevicePtr;
use aquifer::kernels::Kernels;
use aquifer::{Buffer, Stream};
use aquifer_kernels::Mismatches;

use super::Failure;

/// Compared blocks after which the host reads the result.
const LOOK_AFTER: usize = 64;

/// A live block and its pattern.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) buffer: Buffer<u8>,
    /// Seed of its pattern.
    pub(super) pattern: u64,
    /// The operation that wrote it.
    pub(super) written_by: u64,
}

/// A block that was compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compared {
    /// The operation that compared it.
    pub operation: u64,
    /// The operation that wrote it.
    pub written_by: u64,
    /// Its address.
    pub ptr: DevicePtr,
    /// Its length in bytes.
    pub bytes: u64,
}

/// The memory in which the device counts differences, for one thread and one stream.
#[derive(Debug)]
pub(super) struct Findings {
    buffer: Buffer<u64>,
    compared: Vec<Compared>,
}

impl Findings {
    pub(super) fn new(buffer: Buffer<u64>, kernels: &Kernels, stream: &Stream) -> Result<Findings, Failure> {
        let mut findings = Findings { buffer, compared: Vec::with_capacity(LOOK_AFTER) };
        kernels.fill(stream, &mut findings.buffer, 0u64)?;
        Ok(findings)
    }

    /// Enqueues the comparison of a block. Returns whether it is time to look.
    pub(super) fn compare(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
        block: &Block,
        operation: u64,
    ) -> Result<bool, Failure> {
        kernels.pattern_verify(stream, &block.buffer, block.pattern, &mut self.buffer)?;
        let (ptr, bytes) = (block.buffer.ptr(), block.buffer.bytes());
        self.compared.push(Compared { operation, written_by: block.written_by, ptr, bytes });
        Ok(self.compared.len() >= LOOK_AFTER)
    }

    /// Waits for the stream and reads the result. A difference is returned with the block that
    /// contains its first address: the last one that was compared there.
    pub(super) fn look(
        &mut self,
        kernels: &Kernels,
        stream: &Stream,
    ) -> Result<Option<(Mismatches, Compared)>, Failure> {
        let compared = std::mem::take(&mut self.compared);
        let Some(found) = kernels.mismatches(stream, &self.buffer)? else { return Ok(None) };
        kernels.fill(stream, &mut self.buffer, 0u64)?;
        let holds = |one: &&Compared| one.ptr.range(one.bytes).contains(&found.first.0);
        Ok(compared.iter().rfind(holds).or(compared.last()).map(|&compared| (found, compared)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer::device::sim::{SimConfig, SimDriver};
    use aquifer::memory::Config;
    use aquifer::{Allocator, Device};

    #[test]
    fn a_changed_byte_is_found_in_its_block() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let (kernels, stream) = (Kernels::load(&device).unwrap(), device.default_stream().clone());
        let buffer = || allocator.alloc(1000, &stream).unwrap();
        let mut blocks = [1, 2, 3].map(|pattern| Block { buffer: buffer(), pattern, written_by: 10 + pattern });
        for block in &mut blocks {
            kernels.pattern_write(&stream, &mut block.buffer, block.pattern).unwrap();
        }
        let counts = allocator.alloc(Kernels::FINDINGS_LEN, &stream).unwrap();
        let mut findings = Findings::new(counts, &kernels, &stream).unwrap();
        let mut look = |blocks: &[Block]| {
            for (operation, block) in (20..).zip(blocks) {
                findings.compare(&kernels, &stream, block, operation).unwrap();
            }
            findings.look(&kernels, &stream).unwrap()
        };
        assert!(look(&blocks).is_none());
        stream.fill(blocks[1].buffer.ptr().offset(999), 0, 1).unwrap();
        let (found, compared) = look(&blocks).unwrap();
        assert_eq!((found.words, found.first), (1, blocks[1].buffer.ptr().offset(999)));
        assert_eq!((compared.operation, compared.written_by), (21, 12));
    }
}
