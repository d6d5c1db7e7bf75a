//! Remaps: frames (physical memory) move from free blocks to a window of addresses that a request
//! needs.
//!
//! A remap is drafted (`draft.rs`), which changes nothing; planned (`plan.rs`), which holds all
//! memory that takes part; carried out by the driver, without the lock; and committed
//! (`commit.rs`), whether the driver did all of it, a part, or nothing.

pub(crate) mod commit;
pub(crate) mod donors;
pub(crate) mod draft;
pub(crate) mod lend;
pub(crate) mod plan;
pub(crate) mod split;
pub(crate) mod trim;
pub(crate) mod window;
