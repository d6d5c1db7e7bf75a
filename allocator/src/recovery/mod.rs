//! Recovery: the attempts to serve a request that no cached block serves, up to the report that memory has run out.
//!
//! `ladder.rs` tries one rung after the other, among them garbage collection by age (`gc.rs`) and reclaimers (`reclaim.rs`). Callbacks
//! that are registered with an allocator are kept in `hooks.rs`. The last rung is the out-of-memory report (`oom/`).

mod gc;
pub(crate) mod hooks;
mod ladder;
pub(crate) mod oom;
pub(crate) mod reclaim;

pub use hooks::{MappingChange, Registration};
pub use oom::{Advice, OomReport};
pub use reclaim::{ReclaimRequest, Reclaimed};
