//! Mapped memory: its basics, frames, devices that lag, repeating programs, and edge cases.

mod basics;
mod edge_cases;
mod frames;
mod lagging_devices;
mod repeating_programs;
