//! The oracle and the simulator's race detector judge the same programs.

mod both;
mod crew;
mod program;
mod programs;
mod rules;
