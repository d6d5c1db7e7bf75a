//! The ends of copies, [`Source`], [`DeviceSource`] and [`Target`], and what runs them.

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_device::Stream;
use aquifer_transfer::{
    Elements, InRegion, Owned, PinnedBuffer, PinnedSlice, PinnedSliceMut, Region, Transfer, TransferError,
};
use bytemuck::Pod;

use super::pending::Pending;
use crate::buffer::{Buffer, View, ViewMut};
use crate::error::Error;

pub(crate) trait Sealed {}

/// A copy that was begun, or not.
type Begun<T> = Result<Pending<T>, Error>;

/// What runs a copy: a [`Stream`], in order with the rest of its work, or a
/// [`Transfer`](super::Transfer), on streams of its own. Streams that capture a graph take some
/// copies ([`Allocator::graph`](crate::Allocator::graph)), and refuse others.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot run a copy",
    label = "expected a reference to a `Stream` or to a `Transfer`"
)]
pub trait RunsCopies {
    /// Copies to and from the buffer's memory.
    #[doc(hidden)]
    fn copies_of<T>(&self, buffer: View<'_, T>) -> Result<Transfer, Error>;

    /// The stream, if it is one.
    #[doc(hidden)]
    fn stream(&self) -> Option<&Stream> {
        None
    }
}

impl RunsCopies for Stream {
    fn stream(&self) -> Option<&Stream> {
        Some(self)
    }

    fn copies_of<T>(&self, buffer: View<'_, T>) -> Result<Transfer, Error> {
        buffer.copies_on(self)
    }
}

impl<R: RunsCopies + ?Sized> RunsCopies for &R {
    fn stream(&self) -> Option<&Stream> {
        (**self).stream()
    }

    fn copies_of<T>(&self, buffer: View<'_, T>) -> Result<Transfer, Error> {
        (**self).copies_of(buffer)
    }
}

/// A source of uploads.
///
/// | source | while the copy is in flight |
/// | --- | --- |
/// | [`PinnedBuffer`] by reference, [`PinnedSlice`] | the device reads it; the host may read it, and waits before it writes it |
/// | `Vec<T>`, `Box<[T]>`, `Arc<[T]>`, and any other [`Owner`] | belongs to the copy, and is dropped once it was read |
/// | `&[T]`, `&Vec<T>`, `&[T; N]` | was read when the call returns, which waits for that where it is above 256 KiB |
/// | [`FilePart`] | is read by threads, at several places at a time |
///
/// [`Region::of`] makes a source of a region of any of them but the last.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::{FilePart, Region};
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let mut buffer = memory.alloc_zeros::<u8>(4, &stream)?;
/// // The second column of a 4 × 3 matrix.
/// let column = Region { extents: &[4], from_strides: &[3], to_strides: &[1] };
/// buffer.upload(column.of(&(1..12).collect::<Vec<u8>>()), &stream)?;
/// assert_eq!(buffer.to_vec(&stream)?, [1, 4, 7, 10]);
///
/// let path = std::env::temp_dir().join(format!("aquifer-file-example-{}", std::process::id()));
/// std::fs::write(&path, [1, 2, 3, 4, 5])?;
/// buffer.upload(FilePart::new(&path).offset(1), &stream)?.wait()?;
/// assert_eq!(buffer.to_vec(&stream)?, [2, 3, 4, 5]);
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be uploaded to a buffer of `{T}`",
    label = "expected host memory of `{T}`: a slice, a `Vec`, a `&PinnedBuffer`, an `Owner`, or a `FilePart` for bytes",
    note = "from another buffer, call `x.copy_from(&y, &stream)`; elements of another type must be converted first"
)]
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait Source<T: Pod + Send + Sync>: Sized + Sealed {
    #[doc(hidden)]
    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<()>;
}

/// A target of downloads.
///
/// | target | the complete copy gives |
/// | --- | --- |
/// | [`PinnedBuffer`] by mutable reference, [`PinnedSliceMut`] | nothing: reading the memory waits for the copy |
/// | [`PinnedBuffer`], `Vec<T>` of the buffer's length | the memory |
///
/// [`Buffer::download_blocking`] takes `&mut [T]`.
///
/// [`Region::of`] makes a target of a region of any of them; bytes between its elements stay.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::transfer::Region;
/// let device = aquifer::open("sim:24GiB")?;
/// let (memory, stream) = (Allocator::of(&device)?, device.stream()?);
/// let buffer = memory.from_slice(&[1u32, 4, 7, 10], &stream)?;
/// // To the first column of a 4 × 3 matrix.
/// let column = Region { extents: &[4], from_strides: &[1], to_strides: &[3] };
/// let back = buffer.download(column.of(vec![0; 10]), &stream)?.wait()?;
/// assert_eq!(back, [1, 0, 0, 4, 0, 0, 7, 0, 0, 10]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "a copy that returns before it is done cannot write to `{Self}`",
    label = "expected a `Vec` by value, a `PinnedBuffer`, or a `&mut PinnedBuffer`",
    note = "to fill a `&mut [T]` or `&mut Vec<T>`, call `x.download_blocking(&mut host, &stream)`; for a new `Vec`, `x.to_vec(&stream)`"
)]
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait Target<T: Pod + Send + Sync>: Sized + Sealed {
    /// The value of the complete copy.
    type Output: Send + 'static;

    #[doc(hidden)]
    fn download_from(self, transfer: &Transfer, from: View<'_, T>, region: Option<&Region<'_>>) -> Begun<Self::Output>;
}

/// Device memory to copy from: a reference to a [`Buffer`] or to a view, of any device, or
/// [`Region::of`] one.
///
/// Elements of another device with gaps between them are packed on their device and unpacked on
/// the target's; elements that a region repeats cross once.
///
/// ```
/// use aquifer::prelude::*;
/// use aquifer::device::sim::{SimConfig, SimDriver};
/// use aquifer::transfer::Region;
/// let devices = [0, 1].map(|ordinal| Device::new(SimDriver::new(SimConfig::default().ordinal(ordinal))));
/// let (one, two) = (Allocator::of(&devices[0])?, Allocator::of(&devices[1])?);
/// let (here, there) = (devices[0].stream()?, devices[1].stream()?);
/// let from = one.from_slice(&[1u32, 2, 3, 4, 5, 6], &here)?;
/// let mut to = two.alloc::<u32>(2, &there)?;
/// // The second column of a 2 × 3 matrix.
/// let column = Region { extents: &[2], from_strides: &[3], to_strides: &[1] };
/// to.copy_from(column.of(&from.slice(1..)), &there)?;
/// assert_eq!(to.to_vec(&there)?, [2, 5]);
/// # Ok::<(), aquifer::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reference to device memory",
    label = "expected a reference to a buffer or to a view, such as `&x` or `&x.slice(..4)`",
    note = "of a `&mut Buffer<T>`, pass `&*x`; from host memory, call `x.upload(host, &stream)`"
)]
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait DeviceSource<T>: Sealed {
    #[doc(hidden)]
    fn parts(&self) -> (View<'_, T>, Option<&Region<'_>>);
}

/// Host memory of an owner, such as a memory map, as a [`Source`].
///
/// A background thread drops the owner, perhaps after the copy's [`Pending`] is complete: its
/// `Drop` may wait for other transfers, and a panic in it is logged.
#[derive(Clone)]
pub struct Owner<T>(Owned, PhantomData<fn() -> T>);

impl<T: Pod> Owner<T> {
    /// The memory that `owner` returns; `as_ref` is called once.
    pub fn new(owner: impl AsRef<[T]> + Send + Sync + 'static) -> Owner<T> {
        Owner(Owned::new(owner), PhantomData)
    }
}

impl<T> Owner<T> {
    fn len(&self) -> usize {
        self.0.elements()
    }
}

impl<T> fmt::Debug for Owner<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").field("bytes", &self.0.len()).finish()
    }
}

/// A part of a file, as a [`Source`]: from `offset` on, as many bytes as the target has.
#[derive(Clone, Debug)]
pub struct FilePart {
    path: PathBuf,
    offset: u64,
}

impl FilePart {
    /// The file from its start.
    pub fn new(path: impl AsRef<Path>) -> FilePart {
        FilePart { path: path.as_ref().to_owned(), offset: 0 }
    }

    /// The file from a byte on.
    #[must_use]
    pub fn offset(self, offset: u64) -> FilePart {
        FilePart { offset, ..self }
    }
}

/// Sources of elements in host memory.
macro_rules! sources {
    ($($type:ty $([$len:ident])?: $from:ident => $upload:ident($end:expr);)*) => { $(
        impl<T $(, const $len: usize)?> Sealed for $type {}

        impl<T: Pod + Send + Sync $(, const $len: usize)?> Source<T> for $type {
            fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<()> {
                let elements = elements::<T>(self.len(), to.len(), region);
                let $from = self;
                Ok(Pending::new(transfer.$upload($end, to.device_part(), &elements)?, ()))
            }
        }
    )* };
}

sources! {
    PinnedSlice<'_, T>: from => upload_pinned(from.as_bytes());
    &PinnedBuffer<T>: from => upload_pinned(from.as_bytes());
    &[T]: from => upload_borrowed(bytes_of(from));
    &Vec<T>: from => upload_borrowed(bytes_of(from));
    &[T; N] [N]: from => upload_borrowed(bytes_of(from));
    Vec<T>: from => upload_owned(Owned::new::<T, _>(from));
    Box<[T]>: from => upload_owned(Owned::new::<T, _>(from));
    Arc<[T]>: from => upload_owned(Owned::new::<T, _>(from));
    Owner<T>: from => upload_owned(from.0);
}

impl Sealed for FilePart {}

impl<T: Pod + Send + Sync> Source<T> for FilePart {
    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<()> {
        match region {
            None => Ok(Pending::new(transfer.upload_file(&self.path, self.offset, to.device_part())?, ())),
            Some(_) => Err(TransferError::Region { reason: "files are read without gaps" }.into()),
        }
    }
}

impl<E> Sealed for InRegion<'_, E> {}

impl<T: Pod + Send + Sync, S: Source<T>> Source<T> for InRegion<'_, S> {
    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, _: Option<&Region<'_>>) -> Begun<()> {
        self.end.upload_to(transfer, to, Some(&self.region))
    }
}

/// Targets in host memory.
macro_rules! targets {
    ($($type:ty: $output:ty, |$transfer:ident, $from:ident, $to:ident, $region:ident| $download:expr;)*) => { $(
        impl<T: Pod + Send + Sync> Target<T> for $type {
            type Output = $output;

            #[allow(unused_mut, reason = "one of the targets changes itself")]
            fn download_from(
                self,
                $transfer: &Transfer,
                $from: View<'_, T>,
                $region: Option<&Region<'_>>,
            ) -> Begun<$output> {
                let mut $to = self;
                $download
            }
        }
    )* };
}

targets! {
    PinnedSliceMut<'_, T>: (), |transfer, from, to, region| {
        let elements = elements::<T>(from.len(), to.len(), region);
        Ok(Pending::new(transfer.download_pinned(from.device_part(), to.into_bytes(), &elements)?, ()))
    };
    &mut PinnedBuffer<T>: (), |transfer, from, to, region| to.as_slice_mut().download_from(transfer, from, region);
    PinnedBuffer<T>: PinnedBuffer<T>, |transfer, from, to, region| {
        Ok((&mut to).download_from(transfer, from, region)?.map(|()| to))
    };
    Vec<T>: Vec<T>, |transfer, from, to, region| {
        let elements = elements::<T>(from.len(), to.len(), region);
        Ok(Pending::arriving(transfer.download_vec(from.device_part(), to, &elements)?))
    };
}

impl<T> Sealed for PinnedSliceMut<'_, T> {}
impl<T> Sealed for &mut PinnedBuffer<T> {}
impl<T> Sealed for PinnedBuffer<T> {}

impl<T: Pod + Send + Sync, D: Target<T>> Target<T> for InRegion<'_, D> {
    type Output = D::Output;

    fn download_from(self, transfer: &Transfer, from: View<'_, T>, _: Option<&Region<'_>>) -> Begun<D::Output> {
        self.end.download_from(transfer, from, Some(&self.region))
    }
}

macro_rules! device_sources {
    ($($type:ty)*) => { $(
        impl<T> Sealed for $type {}

        impl<T> DeviceSource<T> for $type {
            fn parts(&self) -> (View<'_, T>, Option<&Region<'_>>) {
                (self.view(), None)
            }
        }
    )* };
}

device_sources! { &Buffer<T> &View<'_, T> &ViewMut<'_, T> }

impl<T, S: DeviceSource<T>> DeviceSource<T> for InRegion<'_, S> {
    fn parts(&self) -> (View<'_, T>, Option<&Region<'_>>) {
        (self.end.parts().0, Some(&self.region))
    }
}

/// The elements of type `T` that a copy moves.
pub(crate) fn elements<'r, T>(from: usize, to: usize, region: Option<&'r Region<'r>>) -> Elements<'r> {
    Elements { size: size_of::<T>(), from, to, region }
}

/// The bytes of elements, which may have none.
pub(super) fn bytes_of<T: Pod>(elements: &[T]) -> &[u8] {
    if size_of_val(elements) == 0 { &[] } else { bytemuck::cast_slice(elements) }
}

/// As [`bytes_of`], to be written.
pub(crate) fn bytes_of_mut<T: Pod>(elements: &mut [T]) -> &mut [u8] {
    if size_of_val(elements) == 0 { &mut [] } else { bytemuck::cast_slice_mut(elements) }
}
