//! Tests of Aquifer that cross crates; see `tests/`.
