//! Memory that more than one stream uses.
//!
//! A block belongs to the stream that it was allocated for. Other streams may use it while it is live; once it is given back, it waits for
//! them (`waiting.rs`). Free blocks may be lent to other streams (`lending.rs`).

pub(crate) mod lending;
pub(crate) mod waiting;
