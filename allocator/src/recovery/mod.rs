//! Recovery: the attempts to serve a request that no cached block serves, up to the report that
//! memory has run out.
//!
//! `ladder.rs` tries one rung after the other, among them reclaimers (`reclaim.rs`). `hooks.rs` keeps
//! the callbacks that are registered with an allocator. The last rung is the out-of-memory report (`oom/`).

pub(crate) mod hooks;
pub(crate) mod ladder;
pub(crate) mod oom;
pub(crate) mod reclaim;

pub use hooks::{MappingChange, ReclaimRequest, Registration};
pub use oom::{Advice, OomReport, Reclaimed};
