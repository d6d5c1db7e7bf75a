//! The oracle and the simulator's race detector judge the same programs.
#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

mod bench;
mod both;
mod program;
mod programs;
mod rules;
mod running;
mod threads;
