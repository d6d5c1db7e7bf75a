//! GPU memory for Rust programs.

mod error;

pub use aquifer_allocator::{Allocator, Buffer};
pub use aquifer_device::{Device, Stream};
pub use aquifer_transfer::{PinnedBuffer, Tensor};
pub use error::Error;

/// What programs import.
pub mod prelude {
    pub use aquifer_allocator::{DeviceAllocator as _, StreamAccess as _, read, write};
    pub use aquifer_kernels::BufferKernels as _;
    pub use aquifer_transfer::{AllocatorTransfers as _, BufferTransfers as _, DeviceTransfers as _};

    pub use crate::{Allocator, Buffer, Device, PinnedBuffer, Stream, Tensor};
}

/// The code of the guide, as documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
struct Guide;
