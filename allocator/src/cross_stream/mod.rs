//! Memory that more than one stream uses.
//!
//! A block belongs to the stream that it was allocated for. Other streams may use it while it is
//! live; once it is given back, it waits for them (`waiting.rs`). Free blocks may serve other streams
//! (`others.rs`). Both depend on how far streams got (`progress.rs`).

pub(crate) mod others;
pub(crate) mod progress;
pub(crate) mod waiting;
