//! The crate as programs use it.

mod edges;
mod errors;
mod graphs;
mod unwind;
