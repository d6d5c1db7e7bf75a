//! Memory that more than one stream uses.
//!
//! A block is the stream's that it was allocated for. Others use it while it is live, and it waits for them once it is given
//! back (`waiting.rs`); others may be lent what is free (`lending.rs`).

pub(crate) mod lending;
pub(crate) mod waiting;
