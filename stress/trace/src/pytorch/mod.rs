//! Models of PyTorch's CUDA allocators, for comparison: which blocks they hand out, what they hold,
//! and when they run out of memory. They make the same driver calls.
//!
//! [`PyTorch`] is a plain data structure for one thread, and knows nothing of this project's
//! allocator.

mod index;
mod model;
mod options;
mod pages;
mod segments;

pub use model::PyTorch;
pub use options::Options;

use aquifer::device::DeviceError;

use crate::subject::Refused;

/// Sizes of blocks are multiples of this.
const UNIT: u64 = 512;
/// Larger requests are served from the large pool.
const SMALL_MAX: u64 = 1 << 20;
/// Bytes of a segment of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;

fn refused(error: DeviceError) -> Refused {
    Refused::Failed(Box::new(error.into()))
}
