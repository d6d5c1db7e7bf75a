//! A small set of kernels on typed device memory.
#![deny(unsafe_code)]

mod args;
mod fill;
mod host;
mod kernel;
mod module;
mod set;

pub use args::Param;
pub use kernel::{Kernel, Shape};
pub use module::Module;
pub use set::{KERNELS, find};
