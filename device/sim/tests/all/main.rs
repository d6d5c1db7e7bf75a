//! The simulated device, seen from outside through the driver trait.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

mod adopted;
mod capture;
mod common;
mod conditional;
mod copies;
mod faults;
mod found;
mod happens_before;
mod host_buffer;
mod inspect;
mod interleavings;
mod label;
mod lag;
mod lost;
mod mapping;
mod memory;
mod misuse;
mod peer_order;
mod peers;
mod piling;
mod release;
#[cfg(aquifer_shuttle)]
mod schedules;
mod streams;
mod wrong_programs;
