//! Inputs of a program: the host fills the head of these blocks by transfers, and reads it back
//! when they are freed.
//!
//! Copies run on the block's own stream, so that no block waits for another stream because of them.
//! Nothing waits for a copy or its pinned memory when it begins.

use std::collections::{BTreeMap, VecDeque};

use aquifer::transfer::Transfer;
use aquifer::{Allocator, Buffer, Error, Pending, PinnedBuffer, Stream};

/// One of this many blocks is an input.
const EVERY: u64 = 8;
/// The bytes at its start that the host fills: a simulated device stores its content, so large
/// blocks are not filled completely.
const HEAD_MOST: usize = 64 << 10;
/// The most downloads in flight.
const ARRIVING_MOST: usize = 8;

/// The live inputs, and counts of all.
#[derive(Debug)]
pub struct Inputs {
    transfer: Transfer,
    blocks: u64,
    /// The written byte, by address.
    live: BTreeMap<u64, u8>,
    arriving: VecDeque<(Pending<PinnedBuffer<u8>>, u8)>,
    written: u64,
    damaged: u64,
}

impl Inputs {
    /// Inputs in memory of an allocator.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(allocator: &Allocator) -> Result<Inputs, Error> {
        let (live, arriving) = (BTreeMap::new(), VecDeque::new());
        Ok(Inputs { transfer: Transfer::new(allocator)?, blocks: 0, live, arriving, written: 0, damaged: 0 })
    }

    /// Fills the head of a new block if the block is an input.
    ///
    /// # Errors
    /// Those of the transfer.
    pub fn fill(&mut self, block: &Buffer<u8>, stream: &Stream) -> Result<(), Error> {
        if block.is_empty() {
            return Ok(());
        }
        self.blocks += 1;
        if !self.blocks.is_multiple_of(EVERY) {
            return Ok(());
        }
        let byte = u8::try_from(self.written % 251).unwrap_or(0);
        let mut head = head(block);
        let mut host = self.transfer.pinned().alloc::<u8>(head.len())?;
        host.write()?.fill(byte);
        drop(head.upload(&host, &self.transfer.on(stream)?)?);
        self.live.insert(block.ptr().0, byte);
        self.written += 1;
        Ok(())
    }

    /// Begins to read back the head of a block before its free, if it is an input.
    ///
    /// # Errors
    /// Those of the transfer.
    pub fn read_back(&mut self, block: &Buffer<u8>, stream: &Stream) -> Result<(), Error> {
        if let Some(byte) = self.live.remove(&block.ptr().0) {
            let head = head(block);
            let arriving = head.download(self.transfer.pinned().alloc(head.len())?, &self.transfer.on(stream)?)?;
            self.arriving.push_back((arriving, byte));
        }
        self.receive(ARRIVING_MOST)
    }

    /// Waits for downloads and compares them, until at most `left` are in flight.
    fn receive(&mut self, left: usize) -> Result<(), Error> {
        while self.arriving.len() > left
            && let Some((arriving, byte)) = self.arriving.pop_front()
        {
            let host = arriving.wait()?;
            self.damaged += u64::from(host.read()?.iter().any(|&is| is != byte));
        }
        Ok(())
    }

    /// The number of filled blocks, and of those that were freed and did not read back as written.
    ///
    /// # Errors
    /// Those of the transfers in flight.
    pub fn finish(&mut self) -> Result<(u64, u64), Error> {
        self.receive(0)?;
        Ok((self.written, self.damaged))
    }
}

/// The part of a block that the host fills.
fn head(block: &Buffer<u8>) -> Buffer<u8> {
    block.slice(..block.len().min(HEAD_MOST)).share()
}

#[cfg(test)]
mod tests {
    use aquifer::Device;
    use aquifer::device::sim::{SimConfig, SimDriver};
    use aquifer::memory::Config;

    use super::*;

    #[test]
    fn damaged_inputs_are_counted() {
        let device = Device::new(SimDriver::new(SimConfig::new(1 << 30)));
        let allocator = Allocator::new(&device, Config::default()).unwrap();
        let stream = device.stream().unwrap();
        let mut inputs = Inputs::new(&allocator).unwrap();
        for number in 1..=100u64 {
            // Some smaller than a head, some larger.
            let block = allocator.alloc(usize::try_from(number * 1000).unwrap(), &stream).unwrap();
            inputs.fill(&block, &stream).unwrap();
            if number == 80 {
                stream.fill(block.ptr(), 0xFF, 1).unwrap();
            }
            inputs.read_back(&block, &stream).unwrap();
        }
        assert_eq!(inputs.finish().unwrap(), (12, 1));
        assert_eq!(device.driver().take_violation(), None);
    }
}
