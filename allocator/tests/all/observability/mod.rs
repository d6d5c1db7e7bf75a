//! What the allocator says about itself agrees: statistics, snapshots and history.

mod format;
mod known;
mod machine;
mod random;
mod replay;
mod threads;
mod totals;
