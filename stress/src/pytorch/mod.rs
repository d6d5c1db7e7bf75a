//! Models of PyTorch's CUDA allocators, for comparison: which blocks they hand out, what they hold,
//! and when they run out of memory. They make the same driver calls.
//!
//! [`Native`] is the default allocator, and [`Expandable`] the one with expandable segments. Both
//! are plain data structures for one thread, and know nothing of this project's allocator.

mod expandable;
mod index;
mod native;
mod options;

pub use expandable::Expandable;
pub use native::Native;
pub use options::Options;

use aquifer::device::DeviceError;
use aquifer::memory::AllocError;

use crate::subject::Refused;

/// Sizes of blocks are multiples of this.
const UNIT: u64 = 512;
/// Larger requests are served from the large pool.
const SMALL_MAX: u64 = 1 << 20;
/// Bytes of a segment of the small pool.
const SMALL_SEGMENT: u64 = 2 << 20;

fn refused(error: DeviceError) -> Refused {
    Refused::Failed(Box::new(AllocError::from(error).into()))
}
