//! PyTorch's own tests, and defects of its expandable segments, one by one; `CHECKLIST.md` lists
//! them all.

mod allocation;
mod expandable_segments;
mod pools;
mod snapshots;
mod streams;
