//! Backings: where an allocator's memory comes from.

pub(crate) mod choose;
pub(crate) mod growth;
pub(crate) mod paged;
pub(crate) mod segments;
pub(crate) mod trim;

pub use crate::core::limits::Refusal;
pub use paged::{Exportable, Growable, PinnedMapping};
