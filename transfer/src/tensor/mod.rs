//! Tensors: elements of one dtype, somewhere.

mod layout;
mod layout_error;
mod views;

pub use layout::{Layout, MAX_DIMENSIONS};
pub use layout_error::LayoutError;

#[cfg(test)]
mod layout_tests;
