//! A caching allocator for GPU memory.
#![forbid(unsafe_code)]

pub mod config;
pub mod size_class;
