//! The invariants of timelines (T1 to T5), each by the number of events and waits it costs and by what the simulated device's
//! race detector says about the accesses that rely on it.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

mod captures;
mod common;
mod faults;
mod invariants;
mod programs;
mod threads;
