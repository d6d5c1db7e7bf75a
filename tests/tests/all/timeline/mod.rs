//! The invariants of timelines (T1 to T5), each by the number of events and waits it costs and by
//! what the race detector of the device under test says about the accesses that rely on it.

mod captures;
mod common;
mod faults;
mod invariants;
mod peers;
mod programs;
mod threads;
mod waits;
