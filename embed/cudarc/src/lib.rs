//! Programs that use [cudarc] keep their context, streams, kernels and libraries, and take their
//! memory from Aquifer.
//!
//! ```no_run
//! use aquifer::prelude::*;
//! use aquifer_cudarc::{AllocatorExt, StreamExt};
//! use cudarc::driver::CudaContext;
//!
//! let context = CudaContext::new(0)?;
//! let memory = aquifer_cudarc::allocator(&context)?; // one for the process and this context
//! let (a, b) = (context.new_stream()?, context.new_stream()?);
//!
//! let x = memory.alloc_zeros_on::<f32>(1000, &a)?; // a buffer of Aquifer's
//! let mut y = memory.alloc_on::<f32>(1000, &b)?;
//! b.with([read(&x), write(&mut y)], |stream, [x, y]| {
//!     stream.memcpy_dtod(&*x.as_slice::<f32>(stream)?, &mut *y.as_slice::<f32>(stream)?)
//! })?;
//!
//! let slice = memory.alloc_slice_zeros::<f32>(1000, &a)?; // a `CudaSlice` of cudarc's, in memory of Aquifer's
//! let host: Vec<f32> = a.clone_dtoh(&*slice)?;
//! # Ok::<(), aquifer_cudarc::Error>(())
//! ```
//!
//! # Which kind of memory
//!
//! | | [`Buffer`] with [`StreamExt::with`] | [`PoolSlice`] |
//! | --- | --- | --- |
//! | who orders streams | Aquifer, for the buffers that a call names | cudarc, by its two events a slice |
//! | where it fits | launches and library calls that you write | code that takes a [`CudaSlice`] |
//! | several streams | always | while cudarc's event tracking is on, as it is by default |
//! | several handles, statistics by tag | yes | tags |
//! | graphs | yes: a graph keeps and orders the buffers of its work | while event tracking is off |
//!
//! Verbs of Aquifer (`upload`, `to_vec`, `axpy`, …) take a [`Stream`]: [`stream()`] gives that of a
//! [`CudaStream`].
//!
//! # Graphs
//!
//! [`AllocatorExt::begin_capture`] takes the place of `CudaStream::begin_capture`, and
//! [`Capture::end`] that of `CudaStream::end_capture`. Captures that cudarc's methods begin, or the
//! driver's functions, get memory of their own, too, but nothing orders their launches.
//!
//! # Errors
//!
//! [`Error`] is an error of Aquifer's or of cudarc's, and becomes a [`DriverError`] for functions
//! that return one.
//!
//! # Two pools in one process
//!
//! cudarc allocates from the driver's default memory pool, which keeps what was freed until a
//! synchronisation. What Aquifer caches is not there for cudarc, and the reverse. Where both run
//! short, call `Allocator::empty_cache` before cudarc allocates much, or allocate from Aquifer
//! alone.
//!
//! [cudarc]: https://docs.rs/cudarc
//! [`Buffer`]: aquifer::Buffer

mod error;
mod graph;
mod pinned;
mod slice;
mod stream;

use std::sync::Arc;

use aquifer::device::cuda;
use aquifer::{Allocator, Stream};
use cudarc::driver::{CudaContext, CudaStream};

pub use error::Error;
pub use graph::{Capture, Graph, graph_of_capture, keep_for_capture};
pub use pinned::HostPinned;
pub use slice::{AllocatorExt, PoolSlice};
pub use stream::{Bound, Lent, StreamExt};

#[cfg(doc)]
use cudarc::driver::{CudaSlice, DriverError};

/// The process's allocator of a context's device: the same for every caller. It is configured
/// by the environment, or with [`Allocator::of_with`] before its first use.
///
/// # Errors
/// When the context's GPU cannot be asked about, or the environment configures what cannot be.
pub fn allocator(context: &Arc<CudaContext>) -> Result<Allocator, Error> {
    Ok(Allocator::of(&cuda::device_of(context.clone())?)?)
}

/// Aquifer's stream for one of cudarc's: both stand for one stream of the driver.
///
/// # Errors
/// When the context's GPU cannot be asked about, or the stream is being destroyed.
pub fn stream(stream: &Arc<CudaStream>) -> Result<Stream, Error> {
    let device = cuda::device_of(stream.context().clone())?;
    Ok(cuda::stream(&device, stream)?)
}
