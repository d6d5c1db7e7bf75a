//! The allocator as its callers see it, on simulated devices.
#![allow(clippy::unwrap_used, reason = "tests may, also outside of test functions")]

mod adopted;
mod attribution;
mod host_memory;
mod idle_pools;
mod last_buffer;
mod observability;
mod pool_limit;
mod reservations;
mod reserve;
mod second_access;
mod tags;
mod together;
