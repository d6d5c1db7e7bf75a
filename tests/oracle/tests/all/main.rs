//! The oracle and the simulator's race detector judge the same programs.

mod bench;
mod both;
mod crew;
mod program;
mod programs;
mod rules;
mod running;
