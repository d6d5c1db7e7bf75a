//! Everything between host and device: page-locked memory, copies, staging, prefetching, and tensors with explicit placement.
#![deny(unsafe_code)]

mod error;

pub use error::TransferError;
