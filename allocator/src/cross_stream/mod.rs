//! Memory that more than one stream uses.
//!
//! A block belongs to the stream that it was allocated for. Other streams may use it while it is
//! live; once it is given back, it waits for them (`waiting.rs`). Free blocks may be lent to other
//! streams (`lending.rs`), and are then mostly found again without the ladder (`reuse.rs`). Both
//! depend on how far streams got (`progress.rs`).

pub(crate) mod lending;
pub(crate) mod progress;
pub(crate) mod reuse;
pub(crate) mod ticks;
pub(crate) mod waiting;
pub(crate) mod waiting_list;
