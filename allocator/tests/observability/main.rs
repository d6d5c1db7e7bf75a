//! What the allocator says about itself agrees: statistics, snapshots and history.
#![expect(clippy::unwrap_used, reason = "a test fails where it is wrong")]

mod format;
mod known;
mod machine;
mod random;
mod replay;
mod threads;
