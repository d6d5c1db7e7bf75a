//! The allocator, one subject a file: memory that others know, memory that grows in place or
//! sleeps, access guards on buffers, graphs, peaks, blocks that wait, and a driver that refuses.

mod access_guards;
mod buffers;
pub(crate) mod events;
mod exportable;
mod failed_release;
mod fallback;
mod graphs;
mod graphs_outliving;
mod growable;
mod mapped_together;
mod mappings;
mod peaks;
mod peers;
mod pinned;
mod sleep;
mod waiting;
