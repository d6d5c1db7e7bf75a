//! [`Transfer`]: copies of typed memory.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use aquifer_device::Stream;
use aquifer_kernels::DType;
use aquifer_transfer::internal::bytes_of as byte_len;
use aquifer_transfer::{HostSource, Owned, PinnedBuffer, PinnedPool, Route, Runtime, TransferConfig};
use bytemuck::Pod;

use super::batch::TransferBatch;
use super::endpoints::{DeviceSource, RunsCopies, elements};
use super::pending::Pending;
use crate::allocator::Allocator;
use crate::buffer::{Buffer, View};
use crate::error::Error;

/// The runtime of copies: as the last argument of a copy in place of a stream, it runs the copy on
/// streams of its own, with its settings. It has the counters, the pinned memory, and batches of
/// small copies. Cloning gives another handle of the same runtime.
///
/// *Order.* Buffers carry the ticks of the work that uses them. So every stream that accesses a
/// buffer is ordered after the copies without further calls, whichever stream they ran on.
///
/// *Waiting.* Calls that make the host wait for the device say so in their name or documentation,
/// and [`counters`](aquifer_transfer::Transfer::counters) counts them.
/// [`num_waits`](aquifer_transfer::HostMemoryStats::num_waits) counts waits for pinned memory
/// that a copy still uses.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let transfer = Transfer::new(&memory)?;
///
/// let mut host = memory.pinned_from_slice(&[2.0_f32; 1000])?;
/// let mut x = memory.alloc::<f32>(1000, &stream)?;
/// let mut y = memory.alloc::<f32>(1000, &stream)?;
/// x.upload(&host, &transfer)?; // returns at once
/// y.fill(1.0, &stream)?; // runs at the same time
/// y.axpy(3.0, &x, &stream)?; // ordered after both
/// y.download(&mut host, &transfer)?; // returns at once, too
/// assert_eq!(host.read()?[999], 7.0); // waits on the host
/// assert_eq!(transfer.counters().uploads.bytes, 4000);
/// # Ok::<(), aquifer::Error>(())
/// ```
///
/// It derefs to the runtime below, which has streams and counters.
#[derive(Clone)]
pub struct Transfer {
    copies: aquifer_transfer::Transfer,
    allocator: Allocator,
    pinned: PinnedPool,
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.copies.fmt(f)
    }
}

impl RunsCopies for Transfer {
    fn copies_of<T>(&self, _: View<'_, T>) -> Result<aquifer_transfer::Transfer, Error> {
        Ok(self.copies.clone())
    }
}

impl Deref for Transfer {
    type Target = aquifer_transfer::Transfer;

    fn deref(&self) -> &aquifer_transfer::Transfer {
        &self.copies
    }
}

impl From<&Transfer> for Transfer {
    fn from(transfer: &Transfer) -> Transfer {
        transfer.clone()
    }
}

/// The runtime of the allocator's buffers.
impl TryFrom<&Allocator> for Transfer {
    type Error = Error;

    fn try_from(memory: &Allocator) -> Result<Transfer, Error> {
        memory.transfer()
    }
}

impl Transfer {
    /// A runtime for the allocator's device.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(allocator: &Allocator) -> Result<Transfer, Error> {
        Transfer::with_config(allocator, TransferConfig::default())
    }

    /// A runtime for the allocator's device, configured by `config`. Pins no memory and
    /// starts no thread before the first use.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn with_config(allocator: &Allocator, config: TransferConfig) -> Result<Transfer, Error> {
        Transfer::of_runtime(&Runtime::new(allocator.device(), config)?, allocator)
    }

    pub(crate) fn of_runtime(runtime: &Arc<Runtime>, allocator: &Allocator) -> Result<Transfer, Error> {
        let pinned = runtime.pinned().clone();
        Ok(Transfer { copies: runtime.transfer(allocator)?, allocator: allocator.clone(), pinned })
    }

    /// A handle of the same runtime whose copies run on `stream`, in order with the caller's work
    /// there. Other threads enqueue staged copies later; wait for them before the stream captures,
    /// or they fail.
    ///
    /// # Errors
    /// A stream of another device.
    pub fn on(&self, stream: &Stream) -> Result<Transfer, Error> {
        Ok(Transfer { copies: self.copies.on(stream)?, ..self.clone() })
    }

    /// A handle of the same runtime whose transfers have this priority, numerically: lower is more
    /// urgent. Clamped to the device's range ([`aquifer_device::DeviceInfo::priorities`]);
    /// [`i32::MAX`] is the least urgent. The first call with a priority creates its streams.
    ///
    /// *Effect.* More urgent staged transfers get chunks of the ring first, and may hold more of
    /// them: a bulk transfer yields to them between two chunks. Kernels that transfers launch, such
    /// as conversions, run on streams of this priority, which a GPU prefers. Drivers do not reorder
    /// copies: stream priorities have no effect on copies between host and device (CUDA on
    /// `cuStreamCreateWithPriority`). So a copy of pinned memory waits for the copies before
    /// it on its engine; split bulk transfers of pinned memory where others must pass. Copies
    /// between host memory have no priority.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::Transfer;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (allocator, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let transfer = Transfer::new(&allocator)?; // as urgent as the device allows
    /// let background = transfer.at_priority(i32::MAX)?;
    /// assert!(background.priority() > transfer.priority());
    ///
    /// let mut weights: Buffer<u8> = allocator.alloc(64 << 20, &stream)?;
    /// let mut tokens: Buffer<u32> = allocator.alloc(1 << 20, &stream)?;
    /// let bulk = weights.upload(vec![1u8; 64 << 20], &background)?;
    /// tokens.upload(vec![7u32; 1 << 20], &transfer)?.wait()?; // passes the weights
    /// bulk.wait()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn at_priority(&self, priority: i32) -> Result<Transfer, Error> {
        Ok(Transfer { copies: self.copies.at_priority(priority)?, ..self.clone() })
    }

    /// A handle of the same runtime whose copies run on its own streams.
    #[must_use]
    pub fn without_stream(&self) -> Transfer {
        Transfer { copies: self.copies.without_stream(), ..self.clone() }
    }

    /// The allocator of device memory.
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    /// Pinned memory for copies of this device.
    pub fn pinned(&self) -> &PinnedPool {
        &self.pinned
    }

    /// All work enqueued on the stream so far, as a [`Pending`] to wait for or to await.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::Transfer;
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let stream = device.stream()?;
    /// let tick = stream.tick();
    /// transfer.enqueued_on(&stream)?.wait()?; // or `.await`
    /// assert!(tick.is_done()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A stream of another device, or one that captures.
    pub fn enqueued_on(&self, stream: &Stream) -> Result<Pending<()>, Error> {
        Ok(Pending::new(self.copies.enqueued_on(stream)?, ()))
    }

    /// As [`Buffer::copy_from`], with a [`Pending`] to wait for that tells the route. Streams of
    /// both devices are ordered around it without waiting on the host, except by way of the host:
    /// see [`Route`].
    ///
    /// Elements of another device with gaps between them are packed on their device and unpacked on
    /// this one; elements that a region repeats cross once.
    ///
    /// # Errors
    /// Ends of different lengths, or that overlap; a region that reaches beyond either end, writes
    /// a place twice or writes what it reads; a target of another device; a stream that captures;
    /// when device memory runs out; errors of the drivers. Where the drivers refuse every way to
    /// wait for a copy from another device, the copy goes on, and the memory that it reads is never
    /// freed.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::device::sim::{SimConfig, SimDriver};
    /// use aquifer::memory::Config;
    /// use aquifer::transfer::{Route, Transfer};
    /// let devices = [0, 1].map(|ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal))));
    /// let one = Transfer::new(&Allocator::new(&devices[0], Config::default())?)?;
    /// let two = Transfer::new(&Allocator::new(&devices[1], Config::default())?)?;
    /// let from = one.allocator().from_slice(&[1u32, 2, 3, 4, 5, 6], &devices[0].stream()?)?;
    /// let mut to = two.allocator().alloc::<u32>(6, &devices[1].stream()?)?;
    /// assert_eq!(two.copy(&from, &mut to)?.wait()?, Route::Peer);
    /// assert_eq!(to.to_vec(&two)?, [1, 2, 3, 4, 5, 6]);
    /// # Ok::<(), aquifer::Error>(())
    /// ```
    #[track_caller]
    pub fn copy<T: Pod + Send + Sync>(
        &self,
        from: impl DeviceSource<T>,
        to: &mut Buffer<T>,
    ) -> Result<Pending<Route>, Error> {
        let _place = self.called_here();
        let (from, region) = from.parts();
        let elements = elements::<T>(from.len(), to.len(), region);
        let source = from.copies_for(&self.copies)?;
        let (copied, route) = self.copies.copy(&source, from.device_part(), to.device_part(), &elements)?;
        Ok(Pending::new(copied, route))
    }

    /// New device memory for `len` elements of a dtype.
    #[track_caller]
    pub(crate) fn alloc_elements(&self, len: usize, dtype: DType, stream: &Stream) -> Result<Buffer<u8>, Error> {
        self.allocator().alloc(byte_len(len, dtype.bytes())?, stream)
    }

    /// Begins a copy of memory that the copy owns.
    pub(crate) fn upload_bytes(&self, from: Owned, to: &mut Buffer<u8>) -> Result<Pending<()>, Error> {
        let elements = elements::<u8>(from.len(), to.len(), None);
        Ok(Pending::new(self.copies.upload_owned(from, to.device_part(), &elements)?, ()))
    }

    /// Begins to fill device memory from a source that threads read.
    pub(crate) fn upload_from(&self, source: Arc<dyn HostSource>, to: &mut Buffer<u8>) -> Result<Pending<()>, Error> {
        Ok(Pending::new(self.copies.upload_source(source, to.device_part())?, ()))
    }

    /// Begins a copy from memory of the device of `source`.
    pub(crate) fn copy_bytes(
        &self,
        source: &Transfer,
        from: &Buffer<u8>,
        to: &mut Buffer<u8>,
    ) -> Result<Pending<()>, Error> {
        let elements = elements::<u8>(from.len(), to.len(), None);
        let (copied, _route) = self.copies.copy(source, from.device_part(), to.device_part(), &elements)?;
        Ok(Pending::new(copied, ()))
    }

    /// A value that is complete once all work enqueued on the stream so far is.
    pub(crate) fn after<T>(&self, stream: &Stream, value: T) -> Result<Pending<T>, Error> {
        Ok(Pending::new(self.copies.enqueued_on(stream)?, value))
    }

    /// An empty batch of small copies.
    pub fn batch(&self) -> TransferBatch {
        TransferBatch::new(&self.copies)
    }
}

impl Allocator {
    /// The runtime that copies to and from this allocator's memory: for its settings, counters and
    /// pinned memory, for batches of copies, and for copies on streams of its own.
    ///
    /// # Errors
    /// Errors of the driver, at the first call.
    pub fn transfer(&self) -> Result<Transfer, Error> {
        Transfer::of_runtime(self.services()?.runtime()?, self)
    }

    /// Pinned memory for `len` values of `T`, which copies of this device read and write
    /// without staging. Its contents are undefined.
    ///
    /// # Errors
    /// When pinned memory runs out, and errors of the driver.
    pub fn pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, Error> {
        Ok(self.services()?.runtime()?.pinned().alloc(len)?)
    }

    /// Pinned memory with a copy of `values`.
    ///
    /// # Errors
    /// As [`Allocator::pinned`].
    pub fn pinned_from_slice<T: Pod>(&self, values: &[T]) -> Result<PinnedBuffer<T>, Error> {
        Ok(self.services()?.runtime()?.pinned().alloc_from(values)?)
    }
}
