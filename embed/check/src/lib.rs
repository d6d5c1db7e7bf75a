//! A library placed before the CUDA driver that finds races and wrong uses of memory in the calls
//! of a program which is already built:
//!
//! ```text
//! aquifer-stress run --check -- PROGRAM ARGS…
//! ```
//!
//! It passes every call on to the driver, and gives those about order and memory to an
//! [`Oracle`](aquifer_oracle::Oracle). The program's memory stays the driver's. What it finds, and
//! what calls cannot show, is in `docs/checking.md`.
//!
//! It takes the driver's place as `aquifer-interposer` does, whose documentation says how.
//!
//! # Environment
//!
//! `AQUIFER_CHECK` names a file that each process appends lines to, one JSON object each: a finding
//! when it is met first, and at the end of the process each finding again with its count, and a
//! summary. Without it nothing is checked.
//!
//! # Order
//!
//! `table` lists functions and what each means · `call` passes calls on · `lookup` finds functions
//! · `judge` decides · `findings` are kept · `allocations` knows what is live and what was freed · `kernels` reads
//! parameters · `stack` remembers places · `advice` has the words · `report` writes.
//!
//! Calls that end something are judged before the driver takes them, so that another thread which
//! gets the same address or handle is judged later; all others after. No lock is held while the
//! driver works, or while names are looked up: only questions about addresses and kernels are asked
//! under the judge's.
//!
//! It is built for 64-bit Linux. Elsewhere the crate is empty.
#![cfg(all(target_os = "linux", target_pointer_width = "64"))]
#![allow(non_snake_case, reason = "the exported functions have the driver's names")]

mod advice;
mod allocations;
mod call;
mod findings;
mod judge;
mod kernels;
mod lookup;
mod report;
mod stack;
mod table;
