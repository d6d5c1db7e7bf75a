//! The stress program as a library.
#![forbid(unsafe_code)]

pub mod input;
