//! The crate as programs use it.

mod edges;
mod errors;
mod graph_memory;
mod graph_bodies;
mod graphs;
mod unwind;
