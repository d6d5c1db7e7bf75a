//! The crate as programs use it.

mod edges;
mod errors;
mod graph_bodies;
mod graph_lending;
mod graph_memory;
mod graph_pinned;
mod graphs;
mod thread_end;
mod unwind;
