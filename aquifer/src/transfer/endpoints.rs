//! The ends of copies: [`Source`], [`DeviceSource`] and [`Target`].

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquifer_device::RequestError;
use aquifer_transfer::internal::{len_of, open_regular};
use aquifer_transfer::{Elements, FileReport, InRegion, Owned, PinnedRead, Region, Transfer, TransferError};
use bytemuck::Pod;

use super::pending::Pending;
use crate::buffer::{Buffer, View, ViewMut};
use crate::error::Error;
use crate::pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};

pub(crate) trait Sealed {}

/// A copy that was begun, or not.
type Begun<T> = Result<Pending<T>, Error>;

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
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be uploaded to a buffer of `{T}`",
    label = "expected host memory of `{T}`: a slice, a `Vec`, a `&PinnedBuffer`, an `Owner`, or a `FilePart` for bytes",
    note = "from another buffer, call `x.copy_from(&y, &stream)`; elements of another type must be converted first"
)]
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait Source<T: Pod + Send + Sync>: Sized + Sealed {
    /// The value of the complete copy.
    type Report: Send + 'static;

    #[doc(hidden)]
    fn elements(&self) -> Result<usize, Error>;

    /// The memory that it names, and the region of it, for copies by the calling thread.
    #[doc(hidden)]
    fn on_host(&self) -> Result<(PinnedRead<'_, T>, Option<&Region<'_>>), Error>;

    #[doc(hidden)]
    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<Self::Report>;
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
    fn download_from(self, transfer: &Transfer, from: &Buffer<T>, region: Option<&Region<'_>>) -> Begun<Self::Output>;
}

/// Device memory to copy from: a reference to a [`Buffer`] or to a view, of any device, or
/// [`Region::of`] one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a reference to device memory",
    label = "expected a reference to a buffer or to a view, such as `&x` or `&x.slice(..4)`",
    note = "of a `&mut Buffer<T>`, pass `&*x`; from host memory, call `x.upload(host, &stream)`"
)]
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait DeviceSource<T>: Sealed {
    #[doc(hidden)]
    fn parts(&self) -> (&Buffer<T>, Option<&Region<'_>>);
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

    /// Bytes from the offset to the file's end.
    fn len(&self) -> Result<u64, Error> {
        let failed = |cause| TransferError::File { path: self.path.display().to_string(), cause: Arc::new(cause) };
        let (_, len) = open_regular(&self.path).map_err(failed)?;
        Ok(len.saturating_sub(self.offset))
    }

    /// The file from a byte on.
    #[must_use]
    pub fn offset(self, offset: u64) -> FilePart {
        FilePart { offset, ..self }
    }
}

/// Sources of elements in host memory.
macro_rules! sources {
    ($($type:ty $([$len:ident])?: $from:ident => $upload:ident($end:expr), $read:expr;)*) => { $(
        impl<T $(, const $len: usize)?> Sealed for $type {}

        impl<T: Pod + Send + Sync $(, const $len: usize)?> Source<T> for $type {
            type Report = ();

            fn elements(&self) -> Result<usize, Error> {
                Ok(self.len())
            }

            fn on_host(&self) -> Result<(PinnedRead<'_, T>, Option<&Region<'_>>), Error> {
                let $from = self;
                Ok(($read.into(), None))
            }

            fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<()> {
                let elements = elements::<T>(self.len(), to.len(), region);
                let $from = self;
                Ok(Pending::new(transfer.$upload($end, to.device_part(), &elements)?, ()))
            }
        }
    )* };
}

sources! {
    PinnedSlice<'_, T>: from => upload_pinned(from.part()), from.read()?;
    &PinnedBuffer<T>: from => upload_pinned(from.as_slice().part()), from.read()?;
    &[T]: from => upload_borrowed(bytes_of(from)), *from;
    &Vec<T>: from => upload_borrowed(bytes_of(from)), from.as_slice();
    &[T; N] [N]: from => upload_borrowed(bytes_of(from)), from.as_slice();
    Vec<T>: from => upload_owned(Owned::new::<T, _>(from)), from.as_slice();
    Box<[T]>: from => upload_owned(Owned::new::<T, _>(from)), &**from;
    Arc<[T]>: from => upload_owned(Owned::new::<T, _>(from)), &**from;
    Owner<T>: from => upload_owned(from.0), bytemuck::cast_slice::<u8, T>(from.0.bytes());
}

impl Sealed for FilePart {}

impl<T: Pod + Send + Sync> Source<T> for FilePart {
    type Report = FileReport;

    fn elements(&self) -> Result<usize, Error> {
        let bytes = self.len()?;
        Ok(len_of(bytes / (size_of::<T>() as u64).max(1), size_of::<T>() as u64)?)
    }

    fn on_host(&self) -> Result<(PinnedRead<'_, T>, Option<&Region<'_>>), Error> {
        Err(RequestError::Unsupported { what: "memory as the source of a copy on the host" }.into())
    }

    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, region: Option<&Region<'_>>) -> Begun<FileReport> {
        match region {
            None => {
                let (copied, report) = transfer.upload_file(&self.path, self.offset, to.device_part())?;
                Ok(Pending::arriving((copied, report)))
            }
            Some(_) => Err(TransferError::Region { reason: "files are read without gaps" }.into()),
        }
    }
}

impl<E> Sealed for InRegion<'_, E> {}

impl<T: Pod + Send + Sync, S: Source<T>> Source<T> for InRegion<'_, S> {
    type Report = S::Report;

    /// The number of elements that the region writes.
    fn elements(&self) -> Result<usize, Error> {
        let elements = self.region.extents.iter().fold(1, |all: usize, &extent| all.saturating_mul(extent));
        Ok(len_of(elements as u64, size_of::<T>() as u64)?)
    }

    fn on_host(&self) -> Result<(PinnedRead<'_, T>, Option<&Region<'_>>), Error> {
        Ok((self.end.on_host()?.0, Some(&self.region)))
    }

    fn upload_to(self, transfer: &Transfer, to: &mut Buffer<T>, _: Option<&Region<'_>>) -> Begun<S::Report> {
        self.end.upload_to(transfer, to, Some(&self.region))
    }
}

/// Targets in host memory.
macro_rules! targets {
    ($($type:ty: $output:ty, |$transfer:ident, $from:ident, $to:ident, $region:ident| $download:expr;)*) => { $(
        impl<T: Pod + Send + Sync> Target<T> for $type {
            type Output = $output;

            #[allow(unused_mut, reason = "one of the targets changes itself")]
            fn download_from(self, $transfer: &Transfer, $from: &Buffer<T>, $region: Option<&Region<'_>>) -> Begun<$output> {
                let mut $to = self;
                $download
            }
        }
    )* };
}

targets! {
    PinnedSliceMut<'_, T>: (), |transfer, from, to, region| {
        let elements = elements::<T>(from.len(), to.len(), region);
        Ok(Pending::new(transfer.download_pinned(from.device_part(), to.part(), &elements)?, ()))
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

    fn download_from(self, transfer: &Transfer, from: &Buffer<T>, _: Option<&Region<'_>>) -> Begun<D::Output> {
        self.end.download_from(transfer, from, Some(&self.region))
    }
}

macro_rules! device_sources {
    ($($type:ty)*) => { $(
        impl<T> Sealed for $type {}

        impl<T> DeviceSource<T> for $type {
            fn parts(&self) -> (&Buffer<T>, Option<&Region<'_>>) {
                (self, None)
            }
        }
    )* };
}

device_sources! { &Buffer<T> &View<'_, T> &ViewMut<'_, T> }

impl<T, S: DeviceSource<T>> DeviceSource<T> for InRegion<'_, S> {
    fn parts(&self) -> (&Buffer<T>, Option<&Region<'_>>) {
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
