//! A subject that works with what it allocates, and remembers the first refusal.

use aquifer_allocator::{Allocation, Allocator, OomReport};
use aquifer_device::{Access, AccessKind, Device, DeviceError, DriverKind, Stream};

use crate::cli::ConfigArg;
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
        Ok(Stage { allocator: session.allocator(device, config)?, streams: all, first_oom: None })
    }
}

impl Subject for Stage {
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Allocation, Refused> {
        let stream = &self.streams[usize::from(stream)];
        let allocation = self.allocator.alloc(bytes, stream).inspect_err(|error| {
            if let (None, Some(report)) = (&self.first_oom, error.report()) {
                self.first_oom = Some(Box::new(report.clone()));
            }
        })?;
        write(self.allocator.device(), &allocation, stream).map_err(|error| Refused::Failed(Box::new(error.into())))?;
        Ok(allocation)
    }

    fn free(&mut self, handle: Allocation) {
        drop(handle);
    }

    fn record_stream(&mut self, handle: &Allocation, stream: u16) -> Result<(), Refused> {
        Ok(handle.record_stream(&self.streams[usize::from(stream)])?)
    }
}

/// Enqueues something that writes to the whole allocation.
fn write(device: &Device, allocation: &Allocation, stream: &Stream) -> Result<(), DeviceError> {
    let (ptr, bytes) = (allocation.ptr(), allocation.bytes());
    match device.info().kind {
        _ if bytes == 0 => Ok(()),
        // Takes its time on the device, but none on the host to keep the bytes.
        DriverKind::Simulated => stream.touch("work", &[Access { ptr, bytes, kind: AccessKind::Write }]),
        _ => stream.fill(ptr, 0, bytes),
    }
}
