//! A subject that works with what it allocates, and remembers the first refusal.

use std::collections::BTreeMap;

use aquifer::device::{Access, AccessKind, DriverKind};
use aquifer::memory::OomReport;
use aquifer::{Allocator, Buffer, Device, Stream};

use crate::cli::ConfigArg;
use crate::content::Filled;
use crate::exit::Failure;
use crate::inputs::Inputs;
use crate::session::Session;
use crate::subject::{Refused, Subject};

/// An allocator with streams that write to every block as soon as they have it.
///
/// So streams are busy when blocks change hands, and the simulated device's race detector sees each
/// of them used.
#[derive(Debug)]
pub struct Stage {
    /// The allocator.
    pub allocator: Allocator,
    /// Its streams; the first is the default stream.
    pub streams: Vec<Stream>,
    /// The report of the first request that was refused.
    pub first_oom: Option<Box<OomReport>>,
    work: Work,
}

/// What streams do with a new block.
#[derive(Debug)]
enum Work {
    /// They write to it.
    Touch,
    /// They write to it, and the host fills the head of some of them, which are inputs.
    Feed(Box<Inputs>),
    /// They fill it with a byte, known while it is live: what is live, by address, and the last
    /// byte.
    Fill(BTreeMap<u64, Filled>, u8),
}

impl Stage {
    /// An allocator for `device`, with `streams` streams.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn new(session: &Session, device: &Device, config: &ConfigArg, streams: usize) -> Result<Stage, Failure> {
        let mut all = vec![device.default_stream().clone()];
        for _ in 1..streams {
            all.push(device.stream()?);
        }
        Ok(Stage { allocator: session.allocator(device, config)?, streams: all, first_oom: None, work: Work::Touch })
    }

    /// The same, but every block is filled with known content, so that damage can be found.
    #[must_use]
    pub fn filling(self) -> Stage {
        Stage { work: Work::Fill(BTreeMap::new(), 0), ..self }
    }

    /// The same, but some blocks are inputs, whose head the host fills by transfers and reads back.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn fed(self) -> Result<Stage, Failure> {
        let inputs = Inputs::new(&self.allocator)?;
        Ok(Stage { work: Work::Feed(Box::new(inputs)), ..self })
    }

    /// How many inputs there were, and how many of those that were freed did not come back as they
    /// went.
    ///
    /// # Errors
    /// Those of transfers that are still under way.
    pub fn inputs(&mut self) -> Result<(u64, u64), Failure> {
        match &mut self.work {
            Work::Feed(inputs) => Ok(inputs.finish()?),
            _ => Ok((0, 0)),
        }
    }

    /// How many live blocks there are with known content, and how many of them do not read as they
    /// were written.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn damaged(&self) -> Result<(usize, usize), Failure> {
        let Work::Fill(live, _) = &self.work else { return Ok((0, 0)) };
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

    fn work_on(&mut self, block: &Buffer<u8>, stream: u16) -> Result<(), Failure> {
        let stream = &self.streams[usize::from(stream)];
        let (ptr, bytes) = (block.ptr(), block.bytes());
        if bytes == 0 {
            return Ok(());
        }
        let simulated = self.allocator.device().info().kind == DriverKind::Simulated;
        match &mut self.work {
            Work::Fill(live, last) => {
                *last = last.wrapping_add(1);
                live.insert(ptr.0, Filled::fill(ptr, bytes, *last, stream)?);
            }
            // Takes its time on the device, and none on the host to keep the bytes.
            Work::Touch | Work::Feed(_) if simulated => {
                stream.touch("work", &[Access { ptr, bytes, kind: AccessKind::Write }])?;
            }
            Work::Touch | Work::Feed(_) => stream.fill(ptr, 0, bytes)?,
        }
        if let Work::Feed(inputs) = &mut self.work {
            inputs.fill(block, stream)?;
        }
        Ok(())
    }
}

impl Subject for Stage {
    /// A block, and the number of its stream.
    type Handle = (Buffer<u8>, u16);

    fn alloc(&mut self, bytes: u64, number: u16) -> Result<Self::Handle, Refused> {
        let stream = &self.streams[usize::from(number)];
        let block =
            self.allocator.alloc(usize::try_from(bytes).unwrap_or(usize::MAX), stream).inspect_err(|error| {
                if let (None, Some(report)) = (&self.first_oom, error.report()) {
                    self.first_oom = Some(Box::new(report.clone()));
                }
            })?;
        match self.work_on(&block, number) {
            Ok(()) => Ok((block, number)),
            Err(failure) => Err(Refused::Failed(Box::new(failure))),
        }
    }

    fn free(&mut self, (block, number): Self::Handle) {
        match &mut self.work {
            Work::Touch => {}
            Work::Fill(live, _) => drop(live.remove(&block.ptr().0)),
            Work::Feed(inputs) => {
                // What could not be read back is not compared; the next call of the device says
                // why.
                if let Err(error) = inputs.read_back(&block, &self.streams[usize::from(number)]) {
                    tracing::warn!(%error, "an input could not be read back");
                }
            }
        }
    }

    fn record_stream(&mut self, (block, _): &mut Self::Handle, stream: u16) -> Result<(), Refused> {
        Ok(block.record_stream(&self.streams[usize::from(stream)])?)
    }
}
