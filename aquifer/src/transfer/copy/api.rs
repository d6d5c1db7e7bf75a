//! The copies of a [`Transfer`].
#![allow(single_use_lifetimes, reason = "a lifetime in an argument's `impl Trait` must have a name")]

use aquifer_device::Stream;
use bytemuck::Pod;

use super::batch::TransferBatch;
use super::endpoints::{DeviceSource, HostCopySource, Source, Target};
use super::peer::Route;
use super::region::Plan;
use super::{batch, crossover, host, on_device, peer};
use crate::buffer::Buffer;
use crate::error::Error;
use crate::transfer::counters::{Direction, ON_HOST};
use crate::transfer::pending::Pending;
use crate::transfer::pinned::{PinnedBuffer, PinnedSliceMut};
use crate::transfer::runtime::Transfer;

impl Transfer {
    /// Begins to fill device memory; see [`Source`]. Later uses of `to`, on any stream, come after
    /// all of it, and wait on the host while threads are still enqueuing.
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a
    /// place twice; a stream that captures; when page-locked memory runs out; a file that is
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
        self.check_device("buffer", to.storage().device_id())?;
        from.upload_to(self, to, None)
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
        self.check_stream(stream)?;
        let mut buffer = self.allocator().alloc(from.elements()?, stream)?;
        Ok(from.upload_to(self, &mut buffer, None)?.map(|_report| buffer))
    }

    /// Begins a copy of device memory to the host; see [`Target`].
    ///
    /// # Errors
    /// Ends of different lengths or devices; a region that reaches beyond either end or writes a
    /// place twice; a stream that captures; when page-locked memory runs out; errors of the driver.
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
        self.check_device("buffer", from.storage().device_id())?;
        to.download_from(self, from, None)
    }

    /// Copies device memory to new page-locked memory.
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
    /// As [`Transfer::download`], and [`Error::OutOfHostMemory`] when the system has no
    /// memory for it.
    #[track_caller]
    pub fn to_vec<T: Pod + Send + Sync>(&self, from: &Buffer<T>) -> Result<Pending<Vec<T>>, Error> {
        let _place = self.called_here();
        host::download_new_vec(self, from)
    }

    /// Copies device memory to borrowed memory, and waits on the host for it.
    ///
    /// # Errors
    /// As [`Transfer::download`]. The contents of `to` are then unspecified.
    #[track_caller]
    pub fn download_blocking<T: Pod + Send + Sync>(&self, from: &Buffer<T>, to: &mut [T]) -> Result<(), Error> {
        let _place = self.called_here();
        host::download_blocking(self, from, to)
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
        if from.storage().device_id() == self.device().id() {
            return peer::copy_on_one_device(self, from, to, region);
        }
        peer::copy_from(self, &from.allocator().transfer()?, from, to, region)
    }

    /// As [`Transfer::copy`], for callers that need only the stream's order: records no event.
    pub(crate) fn fill_from<T: Pod + Send + Sync>(
        &self,
        from: impl DeviceSource<T>,
        to: &mut Buffer<T>,
    ) -> Result<(), Error> {
        let (from, region) = from.parts();
        if from.storage().device_id() != self.device().id() {
            let copied = peer::copy_from(self, &from.allocator().transfer()?, from, to, region)?;
            // By way of the host, threads may go on with it, and may fail.
            return copied.enqueued_for(self.next_stream(Direction::OnDevice)).map(drop);
        }
        if let Some((_, bytes)) = on_device::enqueue(self, from, to, region)? {
            self.shared().counters.count(Direction::OnDevice, bytes);
        }
        Ok(())
    }

    /// The route of a copy from the device of `peer` to this one.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn route_from(&self, peer: &Transfer) -> Result<Route, Error> {
        peer::route(self, peer)
    }

    /// Copies host memory to page-locked memory. The calling thread waits until no copy writes
    /// `from` and no copy uses `to`, and then copies: the result is complete when this returns. The
    /// pools may be of different devices, and the memory pageable.
    ///
    /// ```
    /// use aquifer::prelude::*;
    /// use aquifer::transfer::{Region, Transfer};
    /// let device = aquifer::open("sim:24GiB")?;
    /// let transfer = Transfer::new(&Allocator::of(&device)?)?;
    /// let from = transfer.pinned().alloc_from(&[1u32, 2, 3, 4])?;
    /// let mut to = transfer.pinned().alloc_zeroed::<u32>(2)?;
    /// let _ = transfer.copy_on_host(from.slice(1..3), &mut to)?;
    /// assert_eq!((to.read()?, transfer.counters().on_host.bytes), (&[2, 3][..], 8));
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
    /// Ends of different lengths, a region that reaches beyond either end or writes a place twice,
    /// and errors of the driver, such as the loss of a device that was to write `from`.
    pub fn copy_on_host<'a, T: Pod + Send + Sync>(
        &self,
        from: impl HostCopySource<T>,
        to: impl Into<PinnedSliceMut<'a, T>>,
    ) -> Result<Pending<()>, Error> {
        let (to, (len, region)) = (to.into(), from.extent());
        if let Some(plan) = Plan::of(region, len, to.len())?.filter(|_| size_of::<T>() > 0) {
            plan.rows.copy(from.elements()?, to.into_write()?);
            self.shared().counters.count_all(ON_HOST, 1, plan.bytes::<T>());
        }
        Ok(Pending::ready(self.shared(), ()))
    }

    /// An empty batch of small copies.
    pub fn batch(&self) -> TransferBatch {
        batch::new(self)
    }

    /// The size in bytes below which copies of a batch in this direction go to the driver in one
    /// call: `None` if the driver has no such call, `u64::MAX` if it pays at all sizes. Measured at
    /// the first call for a direction, which takes some milliseconds and 4 MiB of memory at either
    /// end, and waits for copies on a stream of its own, counted in [`Transfer::counters`]. If
    /// memory is too short to measure, batched calls stay off until a later call can measure. If
    /// the measurement of a batch fails otherwise, the answer is `None` from then on.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn batch_calls_pay_below(&self, direction: Direction) -> Result<Option<u64>, Error> {
        crossover::batch_calls_pay_below(self, direction)
    }
}
