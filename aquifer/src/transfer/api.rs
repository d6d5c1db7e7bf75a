//! [`Transfer`]: copies of typed memory.
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use std::ops::Deref;
use std::sync::Arc;

use aquifer_device::Stream;
use aquifer_kernels::DType;
use aquifer_transfer::internal::bytes_of as byte_len;
use aquifer_transfer::{HostSource, Owned, Route, Runtime, TransferConfig};
use bytemuck::Pod;

use super::batch::TransferBatch;
use super::endpoints::{DeviceSource, Source, Target, bytes_of, bytes_of_mut, elements};
use super::pending::Pending;
use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::error::Error;
use crate::pinned::{PinnedBuffer, PinnedPool, PinnedSliceMut};

/// Copies between the host and one device, and within the device. Cloning gives another handle of
/// the same runtime.
///
/// Copies run on streams of the runtime's own, or on the caller's ([`Transfer::on`]), and calls
/// return before copies are done.
///
/// *Order.* Buffers carry the ticks of the work that uses them. So every stream that accesses a
/// buffer ([`aquifer_allocator::AccessGuard`], the kernels of `aquifer-kernels`, other transfers)
/// is ordered after the copies without further calls. Host memory that is in flight cannot be
/// touched: see [`crate::PinnedBuffer`].
///
/// *Waiting.* Calls that make the host wait for the device say so in their name or documentation,
/// and [`counters`](aquifer_transfer::Transfer::counters) counts them.
/// [`num_waits`](aquifer_transfer::HostMemoryStats::num_waits) counts waits for pinned memory
/// that a copy still uses.
///
/// Streams that capture a graph are refused, because a graph's work runs later, and may run many
/// times.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::kernels::Kernels;
/// use aquifer::transfer::Transfer;
/// let device = aquifer::open("sim:24GiB")?;
/// let allocator = Allocator::of(&device)?;
/// let transfer = Transfer::new(&allocator)?;
/// let (kernels, stream) = (Kernels::load(&device)?, device.stream()?);
///
/// let mut host = transfer.pinned().alloc::<f32>(1000)?;
/// host.write()?.fill(2.0);
/// let mut x: Buffer<f32> = allocator.alloc(1000, &stream)?;
/// let mut y: Buffer<f32> = allocator.alloc(1000, &stream)?;
/// let _ = transfer.upload(&host, &mut x)?;     // returns at once
/// kernels.fill(&stream, &mut y, 1.0f32)?;      // runs at the same time
/// kernels.axpy(&stream, 3.0, &x, &mut y)?;     // ordered after it
/// let result = transfer.to_pinned(&y)?.wait()?;  // waits on the host
/// assert_eq!(result.read()?[999], 7.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// It derefs to the runtime below, which has streams, counters and the settings of the ring.
#[derive(Clone, Debug)]
pub struct Transfer {
    copies: aquifer_transfer::Transfer,
    allocator: Allocator,
    pinned: PinnedPool,
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

    pub(crate) fn of_runtime(runtime: &Runtime, allocator: &Allocator) -> Result<Transfer, Error> {
        let pinned = PinnedPool::of(runtime.pinned());
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
    /// let bulk = background.upload(vec![1u8; 64 << 20], &mut weights)?;
    /// transfer.upload(vec![7u32; 1 << 20], &mut tokens)?.wait()?; // passes the weights
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

    /// Begins to fill device memory; see [`Source`]. Later uses of `to`, on any stream, come after
    /// all of it, and wait on the host while threads are still enqueuing.
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a
    /// place twice; a stream that captures; when pinned memory runs out; a file that is
    /// missing or too short; errors of the driver. The [`Pending`] returns errors of threads that
    /// read a source.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{FilePart, Region, Transfer};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
    /// let transfer = Transfer::new(&memory)?;
    /// let mut buffer = memory.alloc_zeros::<u8>(4, &stream)?;
    /// transfer.upload(vec![1, 2, 3, 4], &mut buffer)?.wait()?;
    ///
    /// // The second column of a 4 × 3 matrix.
    /// let column = Region { extents: &[4], from_strides: &[3], to_strides: &[1] };
    /// let _ = transfer.upload(column.of(&(1..12).collect::<Vec<u8>>()), &mut buffer)?;
    /// assert_eq!(transfer.to_vec(&buffer)?.wait()?, [1, 4, 7, 10]);
    ///
    /// let path = std::env::temp_dir().join(format!("aquifer-file-example-{}", std::process::id()));
    /// std::fs::write(&path, [1, 2, 3, 4, 5])?;
    /// let report = transfer.upload(FilePart::new(&path).offset(1), &mut buffer)?.wait()?;
    /// assert_eq!((report.bytes, transfer.to_vec(&buffer)?.wait()?), (4, vec![2, 3, 4, 5]));
    /// # std::fs::remove_file(&path)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn upload<T: Pod + Send + Sync, S: Source<T>>(
        &self,
        from: S,
        to: &mut Buffer<T>,
    ) -> Result<Pending<S::Report>, Error> {
        let _place = self.called_here();
        from.upload_to(&self.copies, to, None)
    }

    /// Allocates device memory for `stream` and fills it as [`Transfer::upload`] does, with all of
    /// the source.
    ///
    /// # Errors
    /// As [`Transfer::upload`], when device memory runs out, and a stream of another device.
    #[track_caller]
    pub fn to_device<T: Pod + Send + Sync, S: Source<T>>(
        &self,
        from: S,
        stream: &Stream,
    ) -> Result<Pending<Buffer<T>>, Error> {
        let _place = self.called_here();
        self.check_device("stream", stream.device_id())?;
        let mut buffer = self.allocator().alloc(from.elements()?, stream)?;
        Ok(from.upload_to(&self.copies, &mut buffer, None)?.map(|_report| buffer))
    }

    /// Begins a copy of device memory to the host; see [`Target`].
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a
    /// place twice; a stream that captures; when pinned memory runs out; errors of the driver.
    /// Memory that was handed over is dropped then.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{Region, Transfer};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let buffer = transfer.to_device(vec![1u32, 4, 7, 10], &device.stream()?)?.wait()?;
    /// let mut pinned = transfer.pinned().alloc::<u32>(4)?;
    /// let _ = transfer.download(&buffer, &mut pinned)?;
    /// assert_eq!(pinned.read()?, [1, 4, 7, 10]); // waits
    ///
    /// // To the first column of a 4 × 3 matrix.
    /// let column = Region { extents: &[4], from_strides: &[1], to_strides: &[3] };
    /// let back = transfer.download(&buffer, column.of(vec![0; 10]))?.wait()?;
    /// assert_eq!(back, [1, 0, 0, 4, 0, 0, 7, 0, 0, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[track_caller]
    pub fn download<T: Pod + Send + Sync, D: Target<T>>(
        &self,
        from: &Buffer<T>,
        to: D,
    ) -> Result<Pending<D::Output>, Error> {
        let _place = self.called_here();
        to.download_from(&self.copies, from, None)
    }

    /// Copies device memory to new pinned memory.
    ///
    /// # Errors
    /// As [`Transfer::download`].
    #[track_caller]
    pub fn to_pinned<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<Pending<PinnedBuffer<T>>, Error> {
        let _place = self.called_here();
        self.download(from, self.pinned().alloc(from.len())?)
    }

    /// Copies device memory to a new `Vec`.
    ///
    /// # Errors
    /// As [`Transfer::download`], and [`OutOfHostMemory`](super::TransferError::OutOfHostMemory)
    /// when the system has no memory for it.
    #[track_caller]
    pub fn to_vec<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<Pending<Vec<T>>, Error> {
        let _place = self.called_here();
        Ok(Pending::arriving(self.copies.download_new_vec(from.device_part(), from.len())?))
    }

    /// Copies device memory to borrowed memory, and waits on the host for it.
    ///
    /// # Errors
    /// As [`Transfer::download`]. The contents of `to` are then unspecified.
    #[track_caller]
    pub fn download_blocking<T: Pod + Send + Sync>(&self, from: &Buffer<T>, to: &mut [T]) -> Result<(), Error> {
        let _place = self.called_here();
        let elements = elements::<T>(from.len(), to.len(), None);
        Ok(self.copies.download_blocking(from.device_part(), bytes_of_mut(to), &elements)?)
    }

    /// Reads one element, and waits on the host for it: the device is idle meanwhile unless it has
    /// other work. Always counted as a synchronisation.
    ///
    /// # Errors
    /// [`Error::NotOneElement`] for another number of elements than one, and as
    /// [`Transfer::download`].
    #[track_caller]
    pub fn item<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<T, Error> {
        let _place = self.called_here();
        if from.len() != 1 {
            return Err(Error::NotOneElement { shape: vec![from.len()] });
        }
        self.refuse_captured()?;
        let staged = self.download(from, self.pinned().alloc::<T>(1)?)?.wait_counted()?;
        Ok(staged.read()?[0])
    }

    /// Enqueues a copy to this device's memory from device memory, also of another device, and
    /// returns its route. Streams of both devices are ordered around it without waiting on the
    /// host, except by way of the host: see [`Route`].
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
    /// use aquifer::transfer::{Region, Route, Transfer};
    /// let devices = [0, 1].map(|ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal))));
    /// let one = Transfer::new(&Allocator::new(&devices[0], Config::default())?)?;
    /// let two = Transfer::new(&Allocator::new(&devices[1], Config::default())?)?;
    /// let from = one.to_device(vec![1u32, 2, 3, 4, 5, 6], &devices[0].stream()?)?.wait()?;
    /// let mut to = two.allocator().alloc::<u32>(6, &devices[1].stream()?)?;
    /// assert_eq!(two.copy(&from, &mut to)?.wait()?, Route::Peer);
    /// assert_eq!(two.to_vec(&to)?.wait()?, [1, 2, 3, 4, 5, 6]);
    ///
    /// // The second column of a 2 × 3 matrix.
    /// let column = Region { extents: &[2], from_strides: &[3], to_strides: &[1] };
    /// two.copy(column.of(&from.slice(1..)), &mut to)?.wait()?;
    /// assert_eq!(two.to_vec(&to)?.wait()?, [2, 5, 3, 4, 5, 6]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
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

    /// Copies host memory to pinned memory. The calling thread waits until no copy writes
    /// `from` and no copy uses `to`, and then copies: the result is complete when this returns. The
    /// pools may be of different devices.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{Region, Transfer};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let from = transfer.pinned().alloc_from(&[1u32, 2, 3, 4])?;
    /// let mut to = transfer.pinned().alloc_zeroed::<u32>(2)?;
    /// let _ = transfer.copy_on_host(from.slice(1..3), &mut to)?;
    /// assert_eq!((&*to.read()?, transfer.counters().on_host.bytes), (&[2, 3][..], 8));
    /// let every_second = Region { extents: &[2], from_strides: &[2], to_strides: &[1] };
    /// let _ = transfer.copy_on_host(every_second.of(vec![5, 6, 7]), &mut to)?;
    /// assert_eq!(to.read()?, [5, 7]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// The ends have no element in common:
    ///
    /// ```compile_fail,E0502
    /// # fn never(transfer: &aquifer::transfer::Transfer, mut buffer: aquifer::PinnedBuffer<u8>) {
    /// let _ = transfer.copy_on_host(&buffer, &mut buffer);
    /// # }
    /// ```
    ///
    /// # Errors
    /// A file as the source; ends of different lengths, a region that reaches beyond either end or
    /// writes a place twice, and errors of the driver, such as the loss of a device that was to
    /// write `from`.
    pub fn copy_on_host<'a, T: Pod + Send + Sync>(
        &self,
        from: impl Source<T>,
        to: impl Into<PinnedSliceMut<'a, T>>,
    ) -> Result<Pending<()>, Error> {
        let (to, (from, region)) = (to.into(), from.on_host()?);
        let elements = elements::<T>(from.len(), to.len(), region);
        self.copies.copy_on_host(bytes_of(&from), to.part(), &elements)?;
        Ok(Pending::ready(()))
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
        Transfer::of_runtime(self.services().runtime()?, self)
    }
}
