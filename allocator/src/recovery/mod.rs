//! What happens when no cached block serves a request, up to the report that memory has run out.
//!
//! `ladder.rs` tries one rung after the other. Others take part: garbage collection by age (`gc.rs`), reclaimers (`reclaim.rs`),
//! and what is registered with an allocator in general (`hooks.rs`). The last rung is the report (`oom/`).

mod gc;
pub(crate) mod hooks;
mod ladder;
pub(crate) mod oom;
pub(crate) mod reclaim;

pub use hooks::{MappingChange, Registration};
pub use oom::{Advice, OomReport};
pub use reclaim::ReclaimRequest;
