//! Tests of the oracle against the simulator's race detector.
