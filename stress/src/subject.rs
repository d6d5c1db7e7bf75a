//! What is measured: an allocator behind the few operations that recorded programs and benchmarks
//! need.

use aquifer::device::DevicePtr;
use aquifer::memory::{AllocError, Allocation};
use aquifer::{Allocator, Device, Stream};

use crate::cli::ConfigArg;
use crate::exit::{Failure, is_refusal};
use crate::session::Session;

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

    /// Notes that another stream uses the block.
    ///
    /// # Errors
    /// When the allocator fails.
    fn record_stream(&mut self, handle: &mut Self::Handle, stream: u16) -> Result<(), Refused>;
}

/// Why a request was refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum Refused {
    /// Memory was lacking.
    OutOfMemory,
    /// Something else failed.
    Failed(Box<Failure>),
}

impl From<AllocError> for Refused {
    #[cold]
    fn from(error: AllocError) -> Refused {
        if is_refusal(&error) { Refused::OutOfMemory } else { Refused::Failed(Box::new(error.into())) }
    }
}

/// The allocator that this program is about, with the streams of a program.
#[derive(Debug)]
pub struct Aquifer {
    allocator: Allocator,
    streams: Vec<Stream>,
}

impl Aquifer {
    /// An allocator for `device`, with `streams` streams: stream 0 is the default stream.
    ///
    /// # Errors
    /// Those of the allocator and the driver.
    pub fn new(session: &Session, device: &Device, config: &ConfigArg, streams: usize) -> Result<Aquifer, Failure> {
        let mut all = vec![device.default_stream().clone()];
        for _ in 1..streams {
            all.push(device.stream()?);
        }
        Ok(Aquifer { allocator: session.allocator(device, config)?, streams: all })
    }

    /// The allocator.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Another handle of the same allocator whose only stream is a new one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn on_new_stream(&self) -> Result<Aquifer, Failure> {
        let stream = self.allocator.device().stream()?;
        Ok(Aquifer { allocator: self.allocator.clone(), streams: vec![stream] })
    }
}

impl Subject for Aquifer {
    type Handle = Allocation;

    // Always, as in a program that calls the allocator itself: a handle that is returned through
    // memory is copied with wider loads than it was written with, and that stall takes longer than
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
}

/// The same allocator through its raw interface: blocks are bare pointers.
#[derive(Debug)]
pub struct Raw(pub Aquifer);

impl Subject for Raw {
    type Handle = DevicePtr;

    #[inline(always)]
    fn alloc(&mut self, bytes: u64, stream: u16) -> Result<DevicePtr, Refused> {
        Ok(self.0.allocator.alloc_raw(bytes, &self.0.streams[usize::from(stream)])?)
    }

    #[inline]
    fn free(&mut self, handle: DevicePtr) {
        if let Err(error) = self.0.allocator.free_raw(handle) {
            panic!("a live pointer was refused: {error}");
        }
    }

    #[inline]
    fn record_stream(&mut self, handle: &mut DevicePtr, stream: u16) -> Result<(), Refused> {
        Ok(self.0.allocator.record_stream_raw(*handle, &self.0.streams[usize::from(stream)])?)
    }
}
