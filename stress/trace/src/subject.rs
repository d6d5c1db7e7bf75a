//! Allocators under test, with the few operations that recorded programs and benchmarks need.

use std::sync::Arc;

use aquifer::device::{DeviceError, DevicePtr};
use aquifer::memory::{AllocError, Allocation, MemoryStats, OomReport};
use aquifer::{Allocator, Device, Error, Stream};
use aquifer_sim::Lagging;

use crate::map::Map;

/// An allocator under test. Streams are small numbers.
pub trait Subject {
    /// A live block. It must be given back with [`Subject::free`].
    type Handle;

    /// Allocates.
    ///
    /// # Errors
    /// When memory is lacking, or the allocator fails.
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Self::Handle, Refused>;

    /// Frees.
    fn free(&mut self, handle: Self::Handle);

    /// An event of a program begins: an allocation, a free or a use on another stream.
    #[inline]
    fn begin_event(&mut self) {}

    /// A request was refused for lack of memory.
    fn refused(&mut self, _: Refusal) {}

    /// Whether all frees so far succeeded.
    ///
    /// # Errors
    /// The first error of a free.
    fn check(&self) -> Result<(), Error> {
        Ok(())
    }

    /// Notes that another stream uses the block; does nothing for subjects without streams.
    ///
    /// # Errors
    /// When the allocator fails.
    #[inline]
    fn record_stream(&mut self, _: &mut Self::Handle, _: u16) -> Result<(), Refused> {
        Ok(())
    }
}

/// An allocator that has statistics and shows its memory.
pub trait Measured: Subject {
    /// Its statistics.
    fn stats(&self) -> MemoryStats;

    /// Sets the peaks of its statistics to the current values.
    fn reset_peaks(&mut self);

    /// The bytes held from the device now, and those allocated.
    fn held(&self) -> (u64, u64);

    /// What lies where in its memory now.
    ///
    /// # Errors
    /// Errors of the driver.
    fn map(&self) -> Result<Map, Error>;

    /// Gives free memory back to the device.
    ///
    /// # Errors
    /// Errors of the driver.
    fn empty_cache(&mut self) -> Result<(), Error>;

    /// The first address and the requested bytes of a live block.
    fn place(&self, handle: &Self::Handle) -> (DevicePtr, u64);
}

/// A request that was refused for lack of memory.
#[derive(Debug, Clone)]
#[expect(missing_docs, reason = "named by the type")]
pub struct Refusal {
    pub bytes: u64,
    /// This project's allocator reports on it.
    pub report: Option<Box<OomReport>>,
}

/// Why a request was refused.
#[derive(Debug)]
pub enum Refused {
    /// Memory was lacking. This project's allocator reports on it.
    OutOfMemory(Option<Box<OomReport>>),
    /// Something else failed.
    Failed(Box<Error>),
}

impl From<AllocError> for Refused {
    #[cold]
    fn from(error: AllocError) -> Refused {
        match error {
            AllocError::OutOfMemory(mut report) => {
                // Programs are played without tags, so the report would call all memory untagged.
                report.largest_tags.clear();
                Refused::OutOfMemory(Some(report))
            }
            AllocError::TooLarge { .. } => Refused::OutOfMemory(None),
            error => Refused::Failed(Box::new(error.into())),
        }
    }
}

impl From<Error> for Refused {
    #[cold]
    fn from(error: Error) -> Refused {
        match error {
            Error::Alloc(error) => error.into(),
            error => Refused::Failed(Box::new(error)),
        }
    }
}

/// The default stream of a device, and new ones, `count` in all.
///
/// # Errors
/// Errors of the driver.
pub fn streams_of(device: &Device, count: usize) -> Result<Vec<Stream>, DeviceError> {
    let new = (1..count).map(|_| device.stream());
    std::iter::once(Ok(device.default_stream().clone())).chain(new).collect()
}

/// This project's allocator, with the streams of a program.
#[derive(Debug)]
pub struct Aquifer {
    allocator: Allocator,
    streams: Vec<Stream>,
    lag: Option<Arc<Lagging>>,
}

impl Aquifer {
    /// An allocator with `streams` streams: stream 0 is the default stream. `lag` is that of a device
    /// that lags, if the events of a program are its clock.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(allocator: Allocator, streams: usize, lag: Option<Arc<Lagging>>) -> Result<Aquifer, DeviceError> {
        let streams = streams_of(allocator.device(), streams)?;
        Ok(Aquifer { allocator, streams, lag })
    }

    /// The allocator.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// A stream, by its number.
    #[inline]
    pub fn stream(&self, number: u16) -> &Stream {
        &self.streams[usize::from(number)]
    }

    /// Another handle of the same allocator whose only stream is a new one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn on_new_stream(&self) -> Result<Aquifer, DeviceError> {
        let stream = self.allocator.device().stream()?;
        Ok(Aquifer { allocator: self.allocator.clone(), streams: vec![stream], lag: None })
    }
}

impl Measured for Aquifer {
    fn stats(&self) -> MemoryStats {
        self.allocator.stats()
    }

    fn reset_peaks(&mut self) {
        self.allocator.reset_peak_stats();
    }

    fn held(&self) -> (u64, u64) {
        (self.allocator.memory_reserved(), self.allocator.memory_allocated())
    }

    fn map(&self) -> Result<Map, Error> {
        Map::of(&self.allocator, &self.streams)
    }

    fn empty_cache(&mut self) -> Result<(), Error> {
        Ok(self.allocator.empty_cache().map(drop)?)
    }

    fn place(&self, handle: &Allocation) -> (DevicePtr, u64) {
        (handle.ptr(), handle.bytes())
    }
}

impl Subject for Aquifer {
    type Handle = Allocation;

    // Always inlined, as in a program that calls the allocator itself. A handle that is returned
    // through memory is copied with wider loads than its stores, and that stall takes longer than
    // the allocation.
    #[inline(always)]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<Allocation, Refused> {
        Ok(self.allocator.alloc_bytes(bytes, &self.streams[usize::from(stream)])?)
    }

    #[inline]
    fn free(&mut self, handle: Allocation) {
        drop(handle);
    }

    #[inline]
    fn record_stream(&mut self, handle: &mut Allocation, stream: u16) -> Result<(), Refused> {
        Ok(handle.record_stream(&self.streams[usize::from(stream)])?)
    }

    #[inline]
    fn begin_event(&mut self) {
        if let Some(lag) = &self.lag {
            lag.advance();
        }
    }
}
