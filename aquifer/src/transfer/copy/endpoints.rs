//! The ends of copies: [`Source`], [`DeviceSource`] and [`Target`].

use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytemuck::Pod;

use super::host;
use super::memory::Owned;
use super::region::Region;
use crate::buffer::{Buffer, View, ViewMut};
use crate::error::Error;
use crate::transfer::host_memory;
use crate::transfer::pending::Pending;
use crate::transfer::pinned::{PinnedBuffer, PinnedSlice, PinnedSliceMut};
use crate::transfer::regular_file;
use crate::transfer::runtime::Transfer;
use crate::transfer::staging::FileReport;

pub(crate) trait Sealed {}

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

    #[doc(hidden)]
    fn upload_to(
        self,
        transfer: &Transfer,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<Self::Report>, Error>;
}

/// A source of [`Transfer::copy_on_host`]: page-locked memory, or owned memory.
#[allow(private_bounds, reason = "the bound seals the trait")]
pub trait HostCopySource<T: Pod + Send + Sync>: Sealed {
    /// The number of elements, and which of them are copied.
    #[doc(hidden)]
    fn extent(&self) -> (usize, Option<&Region<'_>>);

    /// The elements. Waits for copies into page-locked memory.
    #[doc(hidden)]
    fn elements(&self) -> Result<&[T], Error>;
}

/// A target of downloads.
///
/// | target | the complete copy gives |
/// | --- | --- |
/// | [`PinnedBuffer`] by mutable reference, [`PinnedSliceMut`] | nothing: reading the memory waits for the copy |
/// | [`PinnedBuffer`], `Vec<T>` of the buffer's length | the memory |
///
/// [`Buffer::download_blocking`] takes `&mut
/// [T]`.
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
    fn download_from(
        self,
        transfer: &Transfer,
        from: &Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<Self::Output>, Error>;
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
        let (_, len) = regular_file::open(&self.path)
            .map_err(|cause| Error::File { path: self.path.display().to_string(), cause: Arc::new(cause) })?;
        Ok(len.saturating_sub(self.offset))
    }

    /// The file from a byte on.
    #[must_use]
    pub fn offset(self, offset: u64) -> FilePart {
        FilePart { offset, ..self }
    }
}

/// A region of an end of a copy, made by [`Region::of`].
#[derive(Clone, Copy, Debug)]
pub struct InRegion<'r, E> {
    pub(super) region: Region<'r>,
    pub(super) end: E,
}

impl<'r> Region<'r> {
    /// The region of a source or of a target.
    pub fn of<E>(&self, end: E) -> InRegion<'r, E> {
        InRegion { region: *self, end }
    }
}

/// Sources of elements in host memory.
macro_rules! sources {
    ($($type:ty $([$len:ident])?: $from:ident => $upload:ident($end:expr) $(, $read:expr)?;)*) => { $(
        impl<T $(, const $len: usize)?> Sealed for $type {}

        impl<T: Pod + Send + Sync $(, const $len: usize)?> Source<T> for $type {
            type Report = ();

            fn elements(&self) -> Result<usize, Error> {
                Ok(self.len())
            }

            fn upload_to(
                self,
                transfer: &Transfer,
                to: &mut Buffer<T>,
                region: Option<&Region<'_>>,
            ) -> Result<Pending<()>, Error> {
                let $from = self;
                host::$upload(transfer, $end, to, region)
            }
        }

        $(impl<T: Pod + Send + Sync> HostCopySource<T> for $type {
            fn extent(&self) -> (usize, Option<&Region<'_>>) {
                (self.len(), None)
            }

            fn elements(&self) -> Result<&[T], Error> {
                let $from = self;
                $read
            }
        })?
    )* };
}

sources! {
    PinnedSlice<'_, T>: from => upload_pinned(from), from.read();
    &PinnedBuffer<T>: from => upload_pinned(from.into()), from.read();
    &[T]: from => upload_borrowed(from);
    &Vec<T>: from => upload_borrowed(from);
    &[T; N] [N]: from => upload_borrowed(from);
    Vec<T>: from => upload_owned(Owned::new::<T, _>(from)), Ok(from);
    Box<[T]>: from => upload_owned(Owned::new::<T, _>(from)), Ok(from);
    Arc<[T]>: from => upload_owned(Owned::new::<T, _>(from)), Ok(from);
    Owner<T>: from => upload_owned(from.0), Ok(bytemuck::cast_slice(from.0.bytes()));
}

impl Sealed for FilePart {}

impl<T: Pod + Send + Sync> Source<T> for FilePart {
    type Report = FileReport;

    fn elements(&self) -> Result<usize, Error> {
        let bytes = self.len()?;
        host_memory::len_of(bytes / (size_of::<T>() as u64).max(1), size_of::<T>() as u64)
    }

    fn upload_to(
        self,
        transfer: &Transfer,
        to: &mut Buffer<T>,
        region: Option<&Region<'_>>,
    ) -> Result<Pending<FileReport>, Error> {
        match region {
            None => host::upload_file(transfer, &self.path, self.offset, to),
            Some(_) => Err(Error::Region { reason: "files are read without gaps" }),
        }
    }
}

impl<E> Sealed for InRegion<'_, E> {}

impl<T: Pod + Send + Sync, S: Source<T>> Source<T> for InRegion<'_, S> {
    type Report = S::Report;

    /// The number of elements that the region writes.
    fn elements(&self) -> Result<usize, Error> {
        let elements = self.region.extents.iter().fold(1, |all: usize, &extent| all.saturating_mul(extent));
        host_memory::len_of(elements as u64, size_of::<T>() as u64)
    }

    fn upload_to(
        self,
        transfer: &Transfer,
        to: &mut Buffer<T>,
        _: Option<&Region<'_>>,
    ) -> Result<Pending<S::Report>, Error> {
        self.end.upload_to(transfer, to, Some(&self.region))
    }
}

impl<T: Pod + Send + Sync, S: HostCopySource<T>> HostCopySource<T> for InRegion<'_, S> {
    fn extent(&self) -> (usize, Option<&Region<'_>>) {
        (self.end.extent().0, Some(&self.region))
    }

    fn elements(&self) -> Result<&[T], Error> {
        self.end.elements()
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
                $from: &Buffer<T>,
                $region: Option<&Region<'_>>,
            ) -> Result<Pending<$output>, Error> {
                let mut $to = self;
                $download
            }
        }
    )* };
}

targets! {
    PinnedSliceMut<'_, T>: (), |transfer, from, to, region| host::download_pinned(transfer, from, to, region);
    &mut PinnedBuffer<T>: (), |transfer, from, to, region| host::download_pinned(transfer, from, to.into(), region);
    PinnedBuffer<T>: PinnedBuffer<T>, |transfer, from, to, region| {
        Ok(host::download_pinned(transfer, from, (&mut to).into(), region)?.map(|()| to))
    };
    Vec<T>: Vec<T>, |transfer, from, to, region| host::download_vec(transfer, from, to, region);
}

impl<T> Sealed for PinnedSliceMut<'_, T> {}
impl<T> Sealed for &mut PinnedBuffer<T> {}
impl<T> Sealed for PinnedBuffer<T> {}

impl<T: Pod + Send + Sync, D: Target<T>> Target<T> for InRegion<'_, D> {
    type Output = D::Output;

    fn download_from(
        self,
        transfer: &Transfer,
        from: &Buffer<T>,
        _: Option<&Region<'_>>,
    ) -> Result<Pending<D::Output>, Error> {
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
