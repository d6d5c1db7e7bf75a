//! Inputs of a program: blocks that the host fills by transfers, and reads back when they are freed.
//!
//! Copies run on the block's own stream, so that no block waits for another stream because of them, and neither they nor their page-locked
//! memory are waited for when they are begun.

use std::collections::{BTreeMap, VecDeque};

use aquifer_allocator::{Allocator, DeviceBuffer};
use aquifer_device::Stream;
use aquifer_transfer::{Pending, PinnedBuffer, Transfer, TransferError};

/// Of so many blocks one is an input.
const EVERY: u64 = 8;
/// Larger blocks are none: a simulated device keeps what is written to it.
const MOST: u64 = 64 << 10;
/// Blocks that may be on their way back.
const ARRIVING_MOST: usize = 8;

/// The inputs that are live, and what came of those before.
#[derive(Debug)]
pub struct Inputs {
    transfer: Transfer,
    blocks: u64,
    /// By address: what was written.
    live: BTreeMap<u64, u8>,
    arriving: VecDeque<(Pending<PinnedBuffer<u8>>, u8)>,
    written: u64,
    damaged: u64,
}

impl Inputs {
    /// For blocks of an allocator.
    ///
    /// # Errors
    /// Those of the driver.
    pub fn new(allocator: &Allocator) -> Result<Inputs, TransferError> {
        let (live, arriving) = (BTreeMap::new(), VecDeque::new());
        Ok(Inputs { transfer: Transfer::new(allocator)?, blocks: 0, live, arriving, written: 0, damaged: 0 })
    }

    /// Fills a new block if it is an input; tells whether it is one.
    ///
    /// # Errors
    /// Those of the transfer.
    pub fn fill(&mut self, block: &mut DeviceBuffer<u8>, stream: &Stream) -> Result<bool, TransferError> {
        self.blocks += 1;
        if !self.blocks.is_multiple_of(EVERY) || block.is_empty() || block.bytes() > MOST {
            return Ok(false);
        }
        let byte = u8::try_from(self.written % 251).unwrap_or(0);
        let mut host = self.transfer.pinned().alloc::<u8>(usize::try_from(block.len()).unwrap_or(0))?;
        host.write()?.fill(byte);
        drop(self.transfer.on(stream)?.upload(&host, block)?);
        self.live.insert(block.ptr().0, byte);
        self.written += 1;
        Ok(true)
    }

    /// Begins to read a block back that is about to be freed, if it is an input.
    ///
    /// # Errors
    /// Those of the transfer.
    pub fn read_back(&mut self, block: &DeviceBuffer<u8>, stream: &Stream) -> Result<(), TransferError> {
        if let Some(byte) = self.live.remove(&block.ptr().0) {
            self.arriving.push_back((self.transfer.on(stream)?.to_host(block)?, byte));
        }
        self.receive(ARRIVING_MOST)
    }

    /// Waits for blocks that are on their way back and compares them, until at most `left` are.
    fn receive(&mut self, left: usize) -> Result<(), TransferError> {
        while self.arriving.len() > left
            && let Some((arriving, byte)) = self.arriving.pop_front()
        {
            let host = arriving.wait()?;
            self.damaged += u64::from(host.read()?.iter().any(|&is| is != byte));
        }
        Ok(())
    }

    /// How many blocks were filled, and how many of those that were freed did not come back as they went.
    ///
    /// # Errors
    /// Those of the transfers that are still under way.
    pub fn finish(&mut self) -> Result<(u64, u64), TransferError> {
        self.receive(0)?;
        Ok((self.written, self.damaged))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_allocator::Config;
    use aquifer_device::Device;
    use aquifer_device::sim::{SimConfig, SimDriver};

    #[test]
    fn inputs_come_back_as_they_went_and_damage_is_seen() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.create_stream().unwrap();
        let mut inputs = Inputs::new(&allocator).unwrap();
        for number in 1..=100u64 {
            let mut block = allocator.alloc_buffer(number * 100, &stream).unwrap();
            let is_input = inputs.fill(&mut block, &stream).unwrap();
            assert_eq!(is_input, number % EVERY == 0);
            if number == 80 {
                stream.fill(block.ptr(), 0xFF, 1).unwrap();
            }
            inputs.read_back(&block, &stream).unwrap();
        }
        assert_eq!(inputs.finish().unwrap(), (12, 1));
        assert_eq!(device.driver().take_violation(), None);
    }
}
