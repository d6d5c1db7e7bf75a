//! A subject that works with what it allocates, and remembers the first refusal.

use std::collections::BTreeMap;

use aquifer_allocator::{Allocation, Allocator, OomReport};
use aquifer_device::{Access, AccessKind, Device, DeviceError, DriverKind, Stream};

use crate::cli::ConfigArg;
use crate::content::Filled;
use crate::exit::Failure;
use crate::session::Session;
use crate::subject::{Refused, Subject};

/// An allocator with streams that write to every block as soon as they have it.
///
/// So streams are busy when blocks change hands, and the simulated device's race detector sees each of them used.
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
    /// They fill it with a byte, known while it is live: what is live, by address, and the last byte.
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
            all.push(device.create_stream()?);
        }
        Ok(Stage { allocator: session.allocator(device, config)?, streams: all, first_oom: None, work: Work::Touch })
    }

    /// The same, but every block is filled with known content, so that damage can be found.
    #[must_use]
    pub fn filling(self) -> Stage {
        Stage { work: Work::Fill(BTreeMap::new(), 0), ..self }
    }

    /// How many live blocks there are with known content, and how many of them do not read as they were written.
    ///
    /// # Errors
    /// Those of the driver.
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

    fn work_on(&mut self, allocation: &Allocation, stream: u16) -> Result<(), DeviceError> {
        let stream = &self.streams[usize::from(stream)];
        let (ptr, bytes) = (allocation.ptr(), allocation.bytes());
        if bytes == 0 {
            return Ok(());
        }
        match &mut self.work {
            Work::Fill(live, last) => {
                *last = last.wrapping_add(1);
                live.insert(ptr.0, Filled::fill(ptr, bytes, *last, stream)?);
            }
            // Takes its time on the device, and none on the host to keep the bytes.
            Work::Touch if self.allocator.device().info().kind == DriverKind::Simulated => {
                stream.touch("work", &[Access { ptr, bytes, kind: AccessKind::Write }])?;
            }
            Work::Touch => stream.fill(ptr, 0, bytes)?,
        }
        Ok(())
    }
}

impl Subject for Stage {
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u64, number: u16) -> Result<Allocation, Refused> {
        let stream = &self.streams[usize::from(number)];
        let allocation = self.allocator.alloc(bytes, stream).inspect_err(|error| {
            if let (None, Some(report)) = (&self.first_oom, error.report()) {
                self.first_oom = Some(Box::new(report.clone()));
            }
        })?;
        self.work_on(&allocation, number).map_err(|error| Refused::Failed(Box::new(error.into())))?;
        Ok(allocation)
    }

    fn free(&mut self, handle: Allocation) {
        if let Work::Fill(live, _) = &mut self.work {
            live.remove(&handle.ptr().0);
        }
        drop(handle);
    }

    fn record_stream(&mut self, handle: &mut Allocation, stream: u16) -> Result<(), Refused> {
        Ok(handle.record_stream(&self.streams[usize::from(stream)])?)
    }
}
