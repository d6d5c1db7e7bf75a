//! A subject that writes to its blocks and records the first refusal.

use std::collections::BTreeMap;

use aquifer::memory::OomReport;
use aquifer::{Allocator, Buffer, Device, Error, Stream};
use aquifer_device::{AccessKind, AccessRange};
use aquifer_trace::{Refusal, Refused, Subject, streams_of};

use crate::cli::ConfigArg;
use crate::content::Filled;
use crate::exit::Failure;
use crate::session::Session;

/// An allocator with streams that write to every new block.
///
/// So streams are busy when blocks move between them, and the simulated device's race detector sees
/// every use.
#[derive(Debug)]
pub struct Stage {
    /// The allocator.
    pub allocator: Allocator,
    /// Its streams; the first is the default stream.
    pub streams: Vec<Stream>,
    /// The report of the first request that was refused.
    pub first_oom: Option<Box<OomReport>>,
    /// Requests so far.
    pub requests: usize,
    /// Where blocks are filled: the live blocks by address, and the last byte. Otherwise streams
    /// touch them.
    filled: Option<(BTreeMap<u64, Filled>, u8)>,
}

impl Stage {
    /// An allocator for `device`, with `streams` streams.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn new(session: &Session, device: &Device, config: &ConfigArg, streams: usize) -> Result<Stage, Failure> {
        let streams = streams_of(device, streams)?;
        let allocator = session.allocator(device, config)?;
        Ok(Stage { allocator, streams, first_oom: None, requests: 0, filled: None })
    }

    /// The same, but every block is filled with known content, so that damage can be found.
    #[must_use]
    pub fn filling(self) -> Stage {
        Stage { filled: Some((BTreeMap::new(), 0)), ..self }
    }

    /// The number of live blocks with known content, and of those that do not read as written.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn damaged(&self) -> Result<(usize, usize), Failure> {
        let Some((live, _)) = &self.filled else { return Ok((0, 0)) };
        let stream = &self.streams[0];
        for other in &self.streams[1..] {
            stream.wait_for(&other.tick())?;
        }
        let mut damaged = 0;
        for filled in live.values() {
            damaged += usize::from(!filled.is_intact(stream)?);
        }
        Ok((live.len(), damaged))
    }

    fn write_to(&mut self, block: &Buffer<u8>, stream: u16) -> Result<(), Error> {
        let stream = &self.streams[usize::from(stream)];
        let (ptr, bytes) = (block.ptr(), block.bytes());
        if bytes == 0 {
            return Ok(());
        }
        let simulated = self.allocator.device().info().is_virtual;
        match &mut self.filled {
            Some((live, last)) => {
                *last = last.wrapping_add(1);
                live.insert(ptr.0, Filled::fill(ptr, bytes, *last, stream)?);
            }
            // Takes time on the device, but the host does not store the bytes.
            None if simulated => stream.touch("work", &[AccessRange { ptr, bytes, kind: AccessKind::Write }])?,
            None => stream.fill(ptr, 0, bytes)?,
        }
        Ok(())
    }
}

impl Subject for Stage {
    /// A block, and the number of its stream.
    type Handle = (Buffer<u8>, u16);

    fn alloc(&mut self, bytes: u64, number: u16) -> Result<Self::Handle, Refused> {
        let stream = &self.streams[usize::from(number)];
        self.requests += 1;
        let block = self.allocator.alloc(usize::try_from(bytes).unwrap_or(usize::MAX), stream)?;
        match self.write_to(&block, number) {
            Ok(()) => Ok((block, number)),
            Err(error) => Err(Refused::Failed(Box::new(error))),
        }
    }

    fn free(&mut self, (block, _): Self::Handle) {
        if let Some((live, _)) = &mut self.filled {
            live.remove(&block.ptr().0);
        }
    }

    fn refused(&mut self, refusal: Refusal) {
        self.first_oom = self.first_oom.take().or(refusal.report);
    }

    fn record_stream(&mut self, (block, _): &mut Self::Handle, stream: u16) -> Result<(), Refused> {
        Ok(block.record_stream(&self.streams[usize::from(stream)])?)
    }
}
