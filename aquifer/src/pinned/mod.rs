//! Pinned host memory of typed values.

mod buffer;
mod pool;
mod slices;
#[cfg(test)]
pub(crate) mod tests;

pub use buffer::{PinnedBuffer, Returned};
pub use pool::PinnedPool;
pub use slices::{PinnedSlice, PinnedSliceMut};
