//! Programs with a known answer, by rule. Both checkers must give it.

mod graphs;
mod memory;
mod order;
